"""Anthropic's endpoint through its own SDK: messages, streamed, without retries.

The key stands in ANTHROPIC_API_KEY, and goes nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

REQUIRES = ("anthropic",)
HEADERS = ("anthropic-ratelimit-requests-remaining", "anthropic-ratelimit-tokens-remaining", "retry-after")


class Messages:
    """Messages."""

    needs: tuple[str, ...] = ("ANTHROPIC_API_KEY",)
    local = False

    def connect(self, url: str | None, timeout_s: float) -> None:
        """A client: of the provider, or of a server on this machine."""
        import anthropic

        key = os.environ["ANTHROPIC_API_KEY"] if url is None else "local"
        self._client: Any = anthropic.Anthropic(api_key=key, base_url=url, max_retries=0, timeout=timeout_s)

    def close(self) -> None:
        """Ends the client's connections."""
        self._client.close()

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        """What comes, one thing at a time. The usage of the output is cumulative: the last holds."""
        raw = self._client.messages.with_raw_response.create(
            model=model, max_tokens=output, messages=[{"role": "user", "content": prompt}], stream=True
        )
        yield {"headers": {name: raw.headers[name] for name in HEADERS if name in raw.headers}}
        usage: dict[str, Any] = {}
        for event in raw.parse():
            if event.type == "message_start":
                own = event.message.usage
                usage = {"prompt": own.input_tokens, "cached": getattr(own, "cache_read_input_tokens", None)}
                yield {"model": event.message.model, "tier": getattr(own, "service_tier", None)}
            elif event.type == "content_block_delta":
                text = getattr(event.delta, "text", None) or getattr(event.delta, "thinking", None)
                if text:
                    yield {"text": text}
            elif event.type == "message_delta" and event.usage is not None:
                if event.usage.output_tokens is not None:
                    yield {"usage": {**usage, "output": event.usage.output_tokens}}
            elif event.type == "message_stop":
                yield {"end": True}


def messages(case: Any) -> Messages:
    """`client.messages.create(stream=True)`."""
    return Messages()


IMPLEMENTATIONS = {"endpoint": {"anthropic_messages": messages}}
