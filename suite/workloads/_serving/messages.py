"""What the processes of a load tell each other: tasks, what was seen, and what a server is to be. Without code, so
that listing workloads loads neither asyncio nor a server.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ....registry.store.record import DeviceKind
from .load import Asked

LOOPBACK = "127.0.0.1"


class Task(msgspec.Struct, frozen=True):
    """What to ask of whom. `users` 0: an open load; `begin_ns` is when its schedule starts. Each request may take
    `timeout_s`, all of them `deadline_s`.
    """

    host: str
    port: int
    path: str
    model: str
    asked: tuple[Asked, ...]
    users: int
    begin_ns: int
    timeout_s: float
    deadline_s: float
    words: bool = False
    """Whether prompts are sent as text, `t17 t3`, and not as token ids."""
    extra: dict[str, bool | int | float | str] = {}
    """More fields of each request's body."""


class Seen(msgspec.Struct):
    """One request as it was seen, stamps in ns of the monotonic clock; None where it did not come to that.

    `outcome` is `ok`, or how it failed: `http 429`, `cut`, `timeout`, `refused`, `malformed`, `unsent`, or an
    error
    event's `error`. `chunks` are the stamps of chunks with text, `sizes` their tokens where the server says so.
    """

    number: int
    scheduled: int
    sent: int | None = None
    first: int | None = None
    last: int | None = None
    end: int | None = None
    chunks: list[int] = []
    sizes: list[int] = []
    tokens: int | None = None
    prompt_tokens: int | None = None
    outcome: str = "unsent"
    text: str = ""
    written: list[int] = []
    """Stamps that a server of ours put into its chunks: when it wrote each."""


class Result(msgspec.Struct):
    """All requests of a task, how late the client's own loop was, in ms, every few of them, and the processor time
    that it took while they were under way.
    """

    seen: list[Seen]
    late_ms: list[float]
    busy_s: float = 0.0


class Planted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of a request, and faults by its number in the order of arrival, over and over.

    A fault is `429`, `500`, `stall` (`stall_ms` before the second half), `merged` (four tokens a chunk), `cut`
    (the connection, at half), `no usage`, `hang` (nothing after the first token) or empty.
    """

    first_ms: float = 0.0
    token_ms: float = 0.0
    concurrency: int = 1 << 20
    stall_ms: float = 50.0
    faults: tuple[str, ...] = ()


class EngineSpec(msgspec.Struct, frozen=True):
    """The engine of a server: a system on a model with the weights of a seed."""

    system: dict[str, Any]
    model: str
    slice: str
    dtype: str
    seed: int
    device: DeviceKind
    sequences: int
    longest: int
    page: int = 64
    code: dict[str, str] = {}
    threads: int | None = None


class Spec(msgspec.Struct, frozen=True):
    """A server: what it serves, and where it listens. `anywhere` is told by a person, never by a plan."""

    model: str
    vocabulary: int
    longest: int
    engine: EngineSpec | None = None
    planted: Planted | None = None
    port: int = 0
    anywhere: bool = False
    stamps: bool = False
    """Whether each event says when it was written, for tests of clients."""
