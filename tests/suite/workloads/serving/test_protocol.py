"""What our server takes and refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kernelmark.suite.workloads._serving.protocol import Refused, parse, text_of, words


def asked(chat: bool = False, **fields: Any) -> bytes:
    body: dict[str, Any] = {"model": "m"}
    body |= {"messages": [{"role": "user", "content": "t1 t2"}]} if chat else {"prompt": [1, 2]}
    return msgspec.json.encode({**body, **fields})


def taken(raw: bytes, chat: bool = False) -> Any:
    return parse(raw, chat, "m", vocabulary=100, longest=64)


def test_what_is_taken() -> None:
    assert taken(asked()).output == 16
    assert taken(asked(prompt="t5 t7\n t9")).prompt == (5, 7, 9)
    found = taken(asked(chat=True, max_completion_tokens=3, stream=True, temperature=0), chat=True)
    assert (found.prompt, found.output, found.chat, found.stream) == ((1, 2), 3, True, True)
    assert words(text_of([1, 20, 3])) == [1, 20, 3]


@pytest.mark.parametrize(
    ("fields", "status", "parameter"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [100]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": "hello"}, 400, "prompt"),
        ({"prompt": ["t1"]}, 400, None),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 63}, 400, "max_tokens"),
        ({"max_tokens": 10**30}, 400, "max_tokens"),
        ({"temperature": 3}, 400, "temperature"),
        ({"seed": 2**70}, 400, "seed"),
        ({"n": 2}, 400, "n"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"stop": ["a"]}, 400, "stop"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"new_option": 1}, 400, None),
    ],
)
def test_what_is_refused(fields: dict[str, Any], status: int, parameter: str | None) -> None:
    with pytest.raises(Refused) as refused:
        taken(asked(**fields))
    assert (refused.value.status, refused.value.parameter) == (status, parameter)
    assert msgspec.json.decode(refused.value.body())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"model": NaN}',
        b"null",
        b'{"model": "m", "prompt": [1], "seed": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_request(raw: bytes) -> None:
    with pytest.raises(Refused) as refused:
        taken(raw)
    assert refused.value.status == 400
