"""The result types: what one line of a journal can hold.

Way of the data: a `Case` (what was asked) and a `Measurement` (what was seen) make a `Record`; a
`Header` says where a run's records come from. All are frozen and carry no behaviour beyond names.

Units, everywhere: time in milliseconds, memory in bytes, energy in joules, power in watts, clocks in
MHz, temperature in degrees Celsius. An unknown value is None, never 0.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

SCHEMA_VERSION = 1
"""Raised when a reader of the previous version could misread a journal."""

Status: TypeAlias = Literal[
    "ok",
    "incorrect",
    "unsupported",
    "unavailable",
    "out_of_memory",
    "timeout",
    "crashed",
    "error",
]
Pass: TypeAlias = Literal["forward", "backward", "forward_backward"]
Cache: TypeAlias = Literal["cold", "hot"]
Scalar: TypeAlias = bool | int | float | str | None

PROVIDER = "kernelmark"
"""The provider name of our own implementations; every other provider is a baseline."""
YARDSTICK = "yardstick"
"""The provider of rows that only give a scale (a plain copy): timed, never a baseline to beat."""
REFERENCE = "_reference"
"""The ending of an implementation that is a library's own plain reference: shown, and no baseline to beat, as
nobody would pick it. Token by token it is thousands of times slower than anything else.
"""
EAGER = "torch"
"""The implementation that `speedup_vs_eager` refers to."""


def rival(provider: str, implementation: str) -> bool:
    """Whether an implementation is a baseline to beat."""
    return provider not in (PROVIDER, YARDSTICK) and not implementation.endswith(REFERENCE)


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"pass_": "pass"}):
    """One thing to compute: an operator at given sizes, dtype and pass.

    `name` is unique within the operator and stable across versions; `spec` is a short hash of what the
    operator's file computes and accepts, so that a changed definition is never compared by accident.
    `bytes` and `flops` are the least a perfect implementation moves through device memory and computes.
    """

    operator: str
    name: str
    axes: dict[str, int]
    options: dict[str, bool | int | float | str]
    dtype: str
    pass_: Pass
    spec: str
    bytes: int
    flops: int
    tokens: int | None = None


SLOWED = 0.02
"""By how much a clock must be lower for a throttle reason to matter: an H200 has its power cap's flag up in every
third process, mostly at a clock that is 1 % lower.
"""


class Telemetry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device's state around and during sampling, read through NVML; None where it did not answer."""

    sm_mhz: tuple[int, int] | None = None
    """Lowest and highest SM clock seen."""
    memory_mhz: tuple[int, int] | None = None
    power_w: float | None = None
    """Mean board power over the sampling window."""
    temperature_c: int | None = None
    reasons: tuple[str, ...] = ()
    """Names of the clocks-event reasons seen (power cap, thermal slowdown, …), idle left out."""


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was seen when one implementation of one case was timed in one process.

    `samples_ms` holds every sample in the order taken. `launch_ms` is the host's wall time of single,
    unqueued calls, launch and synchronization included. `error` is the relative norm of the deviation
    from the reference, the largest over outputs. `spent_s` says how long each stage took.
    """

    samples_ms: tuple[float, ...]
    timer: str
    batch: int = 1
    """Calls behind one sample; above 1 only for timers that cannot resolve a single call."""
    converged: bool = True
    """Whether the stopping rule's precision was reached within its limits."""
    launch_ms: tuple[float, ...] = ()
    error: float | None = None
    peak_memory_bytes: int | None = None
    energy_j: float | None = None
    telemetry: Telemetry | None = None
    throttled: tuple[int, ...] = ()
    """Indices of samples during which a throttle reason was raised."""
    tuning: dict[str, str] = {}
    """Autotuned kernels that ran, each with the configuration that won."""
    conversion_ms: float | None = None
    """The part of a call that only converts layouts as its library demands, timed alone; None without one."""

    def __post_init__(self) -> None:
        # JSON has no NaN or infinity: such a sample would make a line that cannot be read back.
        if not self.samples_ms or not all(0 <= x < math.inf for x in self.samples_ms):
            raise ValueError("samples_ms holds at least one time, each finite and not negative")
        if self.conversion_ms is not None and not 0 <= self.conversion_ms < math.inf:
            raise ValueError("conversion_ms is a time, finite and not negative")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="record"):
    """One line of a journal: how one implementation of one case ended in one replicate."""

    case: Case
    implementation: str
    provider: str
    version: str | None
    replicate: int
    position: int
    """Place in this replicate's shuffled order, from 0."""
    cache: Cache
    status: Status
    reason: str | None = None
    measurement: Measurement | None = None
    spent_s: dict[str, float] = {}
    """Seconds per stage, also for what did not end well."""

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.measurement is not None):
            raise ValueError(f"status {self.status!r}: a measurement is there exactly when the status is 'ok'")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"status {self.status!r} needs a reason")

    @property
    def identity(self) -> tuple[str, str, str, str, int]:
        """What may stand in a journal only once."""
        return (self.case.operator, self.case.name, self.implementation, self.cache, self.replicate)


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ceiling"):
    """A limit of the device measured in this run: a copy of `size` bytes, or a matmul of `size` FLOP.

    For a copy, `size` counts bytes read plus bytes written, as `Case.bytes` does.
    """

    what: Literal["copy", "matmul"]
    size: int
    time_ms: float
    replicate: int
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.size <= 0 or not 0 < self.time_ms < math.inf:
            raise ValueError("a ceiling has a size and a time above 0")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="header"):
    """First line of a journal: which run this is and where it was made.

    `conditions` decides comparability: it is hashed into `key`, and two runs that differ in it are never
    compared silently. `environment` is noted only. Neither holds host, user or path names.
    """

    schema_version: int
    run: str
    created: str
    """UTC, ISO 8601."""
    harness: str
    """Version of kernelmark."""
    commit: str | None
    dirty: bool
    plan: str
    seed: int
    replicates: int
    device: Literal["cuda", "cpu"]
    key: str
    conditions: dict[str, Scalar]
    environment: dict[str, Scalar]
    request: dict[str, str] = {}
    """What `--resume` and `repro` need to ask for the same again: the plan as TOML, filters."""


class Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="footer"):
    """Written when a session of a run ends, so a resumed run has several; its absence means: killed."""

    ended: str
    wall_s: float
    complete: bool
    spent_s: dict[str, float]
    """Seconds per stage over the session, and `overhead`: everything outside the stages."""


Line: TypeAlias = Header | Record | Ceiling | Footer
