"""OpenAI's protocol as our server speaks it: what it takes, what it refuses, and the pieces of an answer. Pure.

Text is the words t0, t1, … of the model's vocabulary: a model with random weights has no other.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

LARGEST = 8 << 20
"""Bytes of a request's body."""
_WORD = re.compile(r"t(0|[1-9][0-9]{0,8})")


class Refused(Exception):
    """A request that is answered with an error: HTTP status, message, and the parameter at fault."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter = status, parameter

    def body(self) -> bytes:
        """The error as the protocol has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self)[:500], "type": kind, "param": self.parameter, "code": None}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream says besides text; the second is vLLM's."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str
    name: str | None = None


class _Both(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of request, `ignore_eos` and `repetition_penalty` vLLM's. What can only be at its
    neutral value is in `NEUTRAL`.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    user: str | None = None
    ignore_eos: bool = False
    n: int | None = 1
    top_p: float | None = 1.0
    repetition_penalty: float | None = 1.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    stop: Any = None
    logit_bias: Any = None
    logprobs: Any = None


class Completion(_Both, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[int]
    best_of: int | None = 1
    echo: bool | None = False
    suffix: str | None = None


class Chat(_Both, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None


NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "top_p": (None, 1.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "stop": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "echo": (None, False),
    "suffix": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "response_format": (None,),
}

DEFAULT_TOKENS = 16
"""Tokens of an answer that says no number, OpenAI's of completions."""


class Wanted(msgspec.Struct, frozen=True):
    """A request that can be served."""

    prompt: tuple[int, ...]
    output: int
    temperature: float
    seed: int
    stream: bool
    usage: bool
    continuous: bool
    ignore_eos: bool
    chat: bool


def parse(raw: bytes, chat: bool, model: str, vocabulary: int, longest: int) -> Wanted:
    """A request's body. Raises `Refused` with what is wrong, what there is and the parameter at fault."""
    try:
        given = msgspec.json.decode(raw, type=Chat) if chat else msgspec.json.decode(raw, type=Completion)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        said = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, f"not a request: {said}") from None
    if given.model != model:
        raise Refused(404, f"no model {given.model[:80]!r}; this server has {model!r}", "model")
    for name, allowed in NEUTRAL.items():
        if hasattr(given, name) and getattr(given, name) not in allowed:
            raise Refused(400, f"{name} is not supported by this server", name)
    temperature = 1.0 if given.temperature is None else given.temperature
    if not 0 <= temperature <= 2:
        raise Refused(400, f"temperature is {temperature:g}; from 0 to 2", "temperature")
    if given.seed is not None and not -(2**63) <= given.seed < 2**63:
        raise Refused(400, "seed is not a 64-bit number", "seed")
    prompt = _prompt(given, vocabulary)
    output = given.max_tokens
    if isinstance(given, Chat) and given.max_completion_tokens is not None:
        output = given.max_completion_tokens
    output = DEFAULT_TOKENS if output is None else output
    if output < 1:
        raise Refused(400, f"max_tokens is {output}; at least 1", "max_tokens")
    if len(prompt) + output > longest:
        raise Refused(
            400,
            f"{len(prompt)} tokens and {output} to come are more than the {longest} of this server",
            "max_tokens",
        )
    options = given.stream_options or StreamOptions()
    if given.stream_options is not None and not given.stream:
        raise Refused(400, "stream_options are for streams", "stream_options")
    return Wanted(
        prompt=prompt,
        output=output,
        temperature=temperature,
        seed=given.seed or 0,
        stream=bool(given.stream),
        usage=options.include_usage or options.continuous_usage_stats,
        continuous=options.continuous_usage_stats,
        ignore_eos=given.ignore_eos,
        chat=chat,
    )


def _prompt(given: Completion | Chat, vocabulary: int) -> tuple[int, ...]:
    if isinstance(given, Chat):
        where = "messages"
        found = [x for message in given.messages for x in words(message.content, where)]
    else:
        where = "prompt"
        found = words(given.prompt, where) if isinstance(given.prompt, str) else given.prompt
    if not found:
        raise Refused(400, f"{where} has no token", where)
    if not all(0 <= x < vocabulary for x in found):
        raise Refused(400, f"{where} has a token beyond the vocabulary, t0 to t{vocabulary - 1}", where)
    return tuple(found)


def words(text: str, where: str = "prompt") -> list[int]:
    """The tokens of a text. Raises `Refused` for a word that is none."""
    found = []
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise Refused(400, f"this server's text is the words t0, t1, …, not {word[:40]!r}", where)
        found.append(int(match[1]))
    return found


def text_of(tokens: list[int]) -> str:
    """The text of tokens, each with a space behind it."""
    return "".join(f"t{x} " for x in tokens)


class Answer:
    """The pieces of one answer, in the protocol's form."""

    def __init__(self, wanted: Wanted, identity: str, model: str, created: int) -> None:
        self.wanted = wanted
        chunk = wanted.chat and wanted.stream
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if wanted.chat else "text_completion"
        self._frame = {"id": identity, "object": kind, "created": created, "model": model}

    def piece(self, tokens: list[int], total: int, finish: str | None, **more: object) -> bytes:
        """An event with the text of tokens."""
        text = text_of(tokens)
        choice: dict[str, object] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if self.wanted.chat else {"text": text}
        body = {**self._frame, "choices": [choice], **more}
        if self.wanted.continuous:
            body["usage"] = self._usage(total)
        return _event(body)

    def usage(self, total: int) -> bytes:
        """The event that says how many tokens there were."""
        return _event({**self._frame, "choices": [], "usage": self._usage(total)})

    def whole(self, tokens: list[int], finish: str) -> bytes:
        """The body of an answer that does not stream."""
        text = text_of(tokens)
        choice: dict[str, object] = {"index": 0, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self.wanted.chat else {"text": text}
        return msgspec.json.encode({**self._frame, "choices": [choice], "usage": self._usage(len(tokens))})

    def _usage(self, total: int) -> dict[str, int]:
        asked = len(self.wanted.prompt)
        return {"prompt_tokens": asked, "completion_tokens": total, "total_tokens": asked + total}


DONE = b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
