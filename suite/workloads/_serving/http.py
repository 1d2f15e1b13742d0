"""What of HTTP/1.1 a client and a server on one machine need, without I/O: a response that streams, a request's
head.

A client of our own, because what is measured is when bytes were sent and came: a library's buffers and tasks lie
between the socket and the stamp, and cost more than the rest of the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HEAD = 32 << 10
"""Bytes of a head."""
BODY = 64 << 20
"""Bytes of a body that is kept, or of one event."""


class Malformed(Exception):
    """Not what the protocol allows; the message says what."""


def head_of(raw: bytes) -> tuple[str, dict[str, str]]:
    """The first line and the headers, by their names in lower case, of a head without its empty line.

    Raises `Malformed`.
    """
    lines = raw.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or not name.isascii() or not name.isprintable():
            raise Malformed("a header is not NAME: VALUE")
        key = name.lower()
        if key in headers and key in ("content-length", "transfer-encoding", "host"):
            raise Malformed(f"header {key} stands twice")
        headers[key] = value.strip()
    return lines[0], headers


def length_of(headers: dict[str, str], most: int) -> int:
    """The length of the body, 0 without one. Raises `Malformed` for one that is no length or above `most`."""
    given = headers.get("content-length", "0")
    if not given.isascii() or not given.isdigit() or len(given) > 12:
        raise Malformed("content-length is not a number")
    if int(given) > most:
        raise Malformed(f"the body is {int(given)} bytes; at most {most}")
    return int(given)


@dataclass
class Response:
    """A response as its bytes come in, in any pieces.

    `feed` gives the payloads of server-sent events that are whole; other bodies are collected in `body`.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    done: bool = False
    _raw: bytearray = field(default_factory=bytearray)
    _text: bytearray = field(default_factory=bytearray)
    _left: int | None = None
    """Bytes left of a body or of a chunk; -1: to the end of the connection; None: a chunk's head comes next."""
    _chunked: bool = False
    _trailing: bool = False
    _returned: bool = False
    """Whether the text ended with a CR: a LF that comes next is of the same line's end."""

    @property
    def streams(self) -> bool:
        """Whether the body is server-sent events."""
        return self.headers.get("content-type", "").lower().startswith("text/event-stream")

    def feed(self, data: bytes) -> list[bytes]:
        """Takes bytes; gives the data of each event that is whole now. Raises `Malformed`."""
        self._raw += data
        while self.status is None:
            if not self._head():
                return []
        fresh = bytearray()
        while not self.done and self._some(fresh):
            pass
        if not self.streams:
            self.body += fresh
            if len(self.body) > BODY:
                raise Malformed("the body is too large")
            return []
        return self._events(fresh)

    def close(self) -> None:
        """The connection ended: the end of a body that has no other. Raises `Malformed` for one cut short."""
        if self.status is not None and self._left == -1:
            self.done = True
        if not self.done:
            raise Malformed("the connection ended before the response did")

    def _head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > HEAD:
                raise Malformed("the head is too long")
            return False
        first, self.headers = head_of(bytes(self._raw[:end]))
        del self._raw[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not (rest[:3].isascii() and rest[:3].isdigit()):  # "²" is a digit
            raise Malformed("no HTTP/1.1 response")
        status = int(rest[:3])
        if 100 <= status < 200:  # an interim one: the response follows
            self.headers = {}
            return True
        self.status = status
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if status in (204, 304):  # which have no body, and say no length of it
            self._chunked, self._left, self.done = False, 0, True
        elif self._chunked:
            self._left = None
        elif "content-length" in self.headers:
            self._left = length_of(self.headers, BODY)
            self.done = self._left == 0
        else:
            self._left = -1
        return True

    def _some(self, fresh: bytearray) -> bool:
        """Moves what can be moved of the raw bytes to `fresh`; whether there may be more."""
        if not self._chunked:
            take = len(self._raw) if self._left == -1 else min(len(self._raw), self._left or 0)
            fresh += self._raw[:take]
            del self._raw[:take]
            if self._left != -1:
                self._left = (self._left or 0) - take
                self.done = self._left == 0
            return False
        if self._trailing:
            end = self._raw.find(b"\r\n")
            if end < 0:
                return False
            self.done = end == 0
            del self._raw[: end + 2]
            return True
        if self._left is None:
            end = self._raw.find(b"\r\n")
            if end < 0:
                if len(self._raw) > 64:
                    raise Malformed("a chunk's size is too long")
                return False
            try:
                self._left = int(bytes(self._raw[:end]).partition(b";")[0], 16)
            except ValueError:
                raise Malformed("a chunk has no size") from None
            if not 0 <= self._left <= BODY:
                raise Malformed("a chunk's size is no length")
            del self._raw[: end + 2]
            if self._left == 0:
                self._trailing, self._left = True, None
            return True
        # What is there of a chunk is not kept until its end: events that lie in one have their own time.
        take = min(len(self._raw), self._left)
        fresh += self._raw[:take]
        del self._raw[:take]
        self._left -= take
        if self._left or len(self._raw) < 2:
            return False
        if self._raw[:2] != b"\r\n":
            raise Malformed("a chunk does not end where it says")
        del self._raw[:2]
        self._left = None
        return True

    def _events(self, fresh: bytearray) -> list[bytes]:
        if self._returned and fresh.startswith(b"\n"):  # a CRLF that was cut between two reads
            del fresh[:1]
            self._returned = False
        if fresh:
            self._returned = fresh.endswith(b"\r")
        # Lines end with CRLF, LF or CR.
        self._text += fresh.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in fresh else fresh
        if len(self._text) > BODY:
            raise Malformed("an event is too large")
        if b"\n\n" not in self._text:
            return []
        *whole, rest = bytes(self._text).split(b"\n\n")
        self._text = bytearray(rest)
        found = []
        for event in whole:
            lines = [x[5:].removeprefix(b" ") for x in event.split(b"\n") if x.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found
