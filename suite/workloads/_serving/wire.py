"""What a server and the process of its engine say to each other: messages in frames over pipes."""

from __future__ import annotations

import os
import select

import msgspec

from .messages import EngineSpec
from .protocol import Wanted

SIZE = 4
"""Bytes before each message that say how many it has."""


class Build(msgspec.Struct, frozen=True, tag=True):
    """The first message to an engine: what it is to be. `end` is the token that ends an answer."""

    spec: EngineSpec
    end: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request, by a number of its own."""

    number: int
    wanted: Wanted


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Nobody reads a request's answer any more."""

    number: int


class Built(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests."""


class Made(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a request. `finish` is why no more come after them, None until then."""

    number: int
    tokens: list[int]
    finish: str | None


class Gave(msgspec.Struct, frozen=True, tag=True):
    """What a pass made."""

    made: list[Made]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine's last words."""

    reason: str


ToEngine = Build | Ask | Leave
FromEngine = Built | Gave | Failed
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def framed(message: ToEngine | FromEngine) -> bytes:
    """A message as it is written: its size first."""
    data = _encoder.encode(message)
    return len(data).to_bytes(SIZE, "big") + data


class Frames:
    """Messages out of bytes as they come, however they are cut."""

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole with these bytes."""
        left, found = self._left, []
        left += data
        while len(left) >= SIZE and len(left) >= (end := SIZE + int.from_bytes(left[:SIZE], "big")):
            found.append(bytes(left[SIZE:end]))
            del left[:end]
        return found


class Inbox:
    """Messages of a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.ended = pipe, False
        self._frames = Frames()

    def take(self, wait: bool) -> list[bytes]:
        """All that have come; if asked to, it waits for the first, or for the pipe's end."""
        found: list[bytes] = []
        while select.select([self.pipe], [], [], None if wait and not found else 0)[0]:
            data = os.read(self.pipe, 1 << 16)
            if not data:
                self.ended = True
                break
            found += self._frames.feed(data)
        return found


def to_engine(data: bytes) -> ToEngine:
    """A server's message."""
    return _to_engine.decode(data)


def from_engine(data: bytes) -> FromEngine:
    """An engine's message."""
    return _from_engine.decode(data)
