"""The providers' SDKs on a server of this machine that plays them all: what measuring an endpoint adds by itself.

Its rows have the provider `fake`, and no provider's table takes them.
"""

from __future__ import annotations

from typing import Any

from . import anthropic, bedrock, openai


def _local(kind: type[Any]) -> Any:
    """An endpoint's class, asked on this machine. Raises `ImportError` where its SDK is not installed, which says
    how it is: each needs another one, so that this file has no `REQUIRES` that would.
    """

    class Local(kind):  # type: ignore[misc]  # a class of one of several
        local = True
        needs = ()

    def factory(case: Any) -> Any:
        import importlib

        sdk = {"openai": "openai", "anthropic": "anthropic", "bedrock": "boto3"}[name]
        try:
            importlib.import_module(sdk)
        except ModuleNotFoundError as error:
            if error.name != sdk:
                raise  # it is there, and lacks something itself
            raise ImportError(f"{sdk} is not installed: pip install {sdk}") from None
        return Local()

    name = kind.__module__.rpartition(".")[2]
    return factory


IMPLEMENTATIONS = {
    "endpoint": {
        "fake_openai_chat": _local(openai.Chat),
        "fake_openai_responses": _local(openai.Responses),
        "fake_anthropic_messages": _local(anthropic.Messages),
        "fake_bedrock_converse": _local(bedrock.Converse),
    }
}
