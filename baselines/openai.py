"""OpenAI's endpoints through its own SDK: chat completions and responses, streamed, without retries.

The key stands in OPENAI_API_KEY, and goes nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

REQUIRES = ("openai",)
HEADERS = ("openai-processing-ms", "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens")


class _Endpoint:
    """One of its endpoints. `needs` are the variables that must be set; a local server needs none of them."""

    needs: tuple[str, ...] = ("OPENAI_API_KEY",)
    local = False

    def connect(self, url: str | None, timeout_s: float) -> None:
        """A client: of the provider, or of a server on this machine. Retries are off: a 429 is an outcome."""
        import openai

        key = os.environ["OPENAI_API_KEY"] if url is None else "local"
        base = None if url is None else f"{url}/v1"
        self._client: Any = openai.OpenAI(api_key=key, base_url=base, max_retries=0, timeout=timeout_s)

    def close(self) -> None:
        """Ends the client's connections."""
        self._client.close()


def _headers(raw: Any) -> dict[str, str]:
    return {name: raw.headers[name] for name in HEADERS if name in raw.headers}


class Chat(_Endpoint):
    """Chat completions."""

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        """What comes, one thing at a time: headers, text, usage, the model's name, and the end."""
        raw = self._client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_completion_tokens=output,
            stream=True,
            stream_options={"include_usage": True},
        )
        yield {"headers": _headers(raw)}
        for chunk in raw.parse():
            for choice in chunk.choices:
                if choice.delta.content:
                    yield {"text": choice.delta.content}
                if choice.finish_reason is not None:
                    yield {"end": True, "model": chunk.model, "tier": getattr(chunk, "service_tier", None)}
            if chunk.usage is not None:
                prompt_of, output_of = chunk.usage.prompt_tokens_details, chunk.usage.completion_tokens_details
                yield {
                    "usage": {
                        "prompt": chunk.usage.prompt_tokens,
                        "output": chunk.usage.completion_tokens,
                        "cached": getattr(prompt_of, "cached_tokens", None),
                        "reasoning": getattr(output_of, "reasoning_tokens", None),
                    }
                }


class Responses(_Endpoint):
    """Responses."""

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        """What comes, one thing at a time."""
        raw = self._client.responses.with_raw_response.create(
            model=model, input=prompt, max_output_tokens=output, stream=True, store=False
        )
        yield {"headers": _headers(raw)}
        for event in raw.parse():
            if event.type == "response.output_text.delta" and event.delta:
                yield {"text": event.delta}
            elif event.type in ("response.completed", "response.incomplete"):
                found = event.response
                yield {"end": True, "model": found.model, "tier": getattr(found, "service_tier", None)}
                if found.usage is not None:
                    prompt_of, output_of = found.usage.input_tokens_details, found.usage.output_tokens_details
                    yield {
                        "usage": {
                            "prompt": found.usage.input_tokens,
                            "output": found.usage.output_tokens,
                            "cached": getattr(prompt_of, "cached_tokens", None),
                            "reasoning": getattr(output_of, "reasoning_tokens", None),
                        }
                    }


def chat(case: Any) -> Chat:
    """`client.chat.completions.create(stream=True)`."""
    return Chat()


def responses(case: Any) -> Responses:
    """`client.responses.create(stream=True)`."""
    return Responses()


IMPLEMENTATIONS = {"endpoint": {"openai_chat": chat, "openai_responses": responses}}
