"""Requests with something wrong, for whatever takes requests."""

from __future__ import annotations

import random

import msgspec

GOOD = msgspec.json.encode({"model": "m", "prompt": [1], "max_tokens": 1})


def malformed(generator: random.Random) -> bytes:
    """A request with something wrong: bytes changed, cut, or put in; or fields of wrong kinds."""
    body = GOOD
    kind = generator.randrange(4)
    if kind == 0:
        values: list[object] = [
            None,
            -1,
            1e308,
            "x",
            [],
            {},
            [[1]],
            True,
            "t1",
            "\ud800".encode("utf-8", "replace").decode(),
        ]
        names = ["model", "prompt", "max_tokens", "temperature", "stream", "n", "seed", "messages", "tools"]
        fields = {generator.choice(names): generator.choice(values) for _ in range(3)}
        body = msgspec.json.encode({"model": "m", "prompt": [1], **fields})
    elif kind == 1:
        body = bytes(generator.randrange(256) for _ in range(generator.randrange(60)))
    path = generator.choice([b"/v1/completions", b"/v1/chat/completions", b"/v1/models", b"/../etc", b"/%00"])
    verb = generator.choice([b"POST", b"POST", b"POST", b"GET", b"PUT", b"\x00"])
    whole = b"%s %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (verb, path, len(body), body)
    if kind >= 2:
        raw = bytearray(whole)
        for _ in range(generator.randrange(1, 6)):
            raw[generator.randrange(len(raw))] = generator.randrange(256)
        whole = bytes(raw[: generator.randrange(1, len(raw) + 1)])
    return whole
