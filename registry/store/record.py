"""The result types: what one line of a journal can hold.

Way of the data: a `Case` (what was asked) and a `Measurement` (what was seen) make a `Record`; a
`Header` says where a run's records come from, and what their metrics mean. All are frozen and carry no behaviour
beyond names. A `Key` names a row, from the plan to the verdict.

Units are the metrics' own; power in watts, clocks in MHz, temperature in degrees Celsius. An unknown value is
None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from .metric import OPERATOR_METRICS, Metric, finite

SCHEMA_VERSION = 2
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
Pass: TypeAlias = Literal["forward", "backward", "forward_backward", "program"]
"""Of an operator; a workload's only pass is `program`."""
Cache: TypeAlias = Literal["cold", "hot"]
DeviceKind: TypeAlias = Literal["cuda", "rocm", "xpu", "mps", "cpu"]
"""NVIDIA's and AMD's GPUs, Intel's, Apple's, and the host's processor: what `--device` takes."""
DEVICES: tuple[DeviceKind, ...] = ("cuda", "rocm", "xpu", "mps", "cpu")
Scalar: TypeAlias = bool | int | float | str | None

PROVIDER = "kernelmark"
"""The provider name of our own implementations; every other provider is a baseline."""
YARDSTICK = "yardstick"
"""The provider of rows that only give a scale (a plain copy): timed, never a baseline to beat."""
FAKE = "fake"
"""The provider of rows of a server that plays a provider's: they show that measuring works, and are nobody's."""
REFERENCE = "_reference"
"""The ending of an implementation that is a library's own plain reference: shown, and no baseline to beat, as
nobody would pick it. Token by token it is thousands of times slower than anything else.
"""
EAGER = "torch"
"""The implementation that `speedup_vs_eager` refers to."""

VERSION = "library version"
"""The condition of a single row: the version of the library behind it."""


def versions_count(conditions: Mapping[str, Scalar]) -> bool:
    """Whether `VERSION` is a condition of a run's rows. Journals from before it was one, which do not say which
    Python measured either, are compared among themselves as they always were.
    """
    return "python" in conditions


HOST = "host"
"""In a header's environment: a hash that tells hosts of one fleet apart and names none of them."""

BOARDS = "gpu/boards"
"""In a header's environment: a hash that tells the GPUs of a run from others; of several, where it began."""
UNKNOWN = "unknown"
"""In the place of a board's hash, of journals that do not say it: older ones, and those of a CPU."""


def baseline(provider: str, implementation: str) -> bool:
    """Whether an implementation is a baseline to beat."""
    return provider not in (PROVIDER, YARDSTICK, FAKE) and not implementation.endswith(REFERENCE)


class Key(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Names one row: an implementation of a case in one cache state. The one identity from plan to verdict."""

    operator: str
    case: str
    implementation: str
    cache: Cache

    def __str__(self) -> str:
        state = "" if self.cache == "cold" else f" ({self.cache})"
        return f"{self.operator} {self.case} {self.implementation}{state}"


GPUS = "gpus"
"""The reserved axis: how many GPUs a case takes. Left out of axes, names and keys where it is 1."""


TF32 = "tf32"
"""The dtype of a ceiling of products of fp32 whose inputs are rounded to 10 bits."""


def products(dtype: str, options: Mapping[str, object]) -> str:
    """The dtype that matrix products of a case with these options may have."""
    allowed = options.get("products", "dtype")
    return dtype if allowed == "dtype" else str(allowed)


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"pass_": "pass"}):
    """One thing to compute: an operator, or a workload, at given sizes, dtype and pass.

    `name` is unique within the operator and stable across versions; `spec` is a short hash of what this case
    computes, so that a changed definition is never compared by accident. `bytes`, `flops` and `exponentials` are
    the least a perfect implementation moves through device memory, multiplies and adds in matrix products, and
    raises to powers, of each GPU where there are several; 0 where the definition does not say. `primary` names the
    metric that the case is judged by.
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
    primary: str = "latency"
    exponentials: int = 0

    @property
    def full_name(self) -> str:
        """Its name with the operator's: unique within a run, and what a plan and a `Request` go by."""
        return f"{self.operator}/{self.name}"

    @property
    def products(self) -> str:
        """The dtype of its matrix products, which may be narrower than its own: what a limit of them is of."""
        return products(self.dtype, self.options)

    @property
    def world(self) -> int:
        """How many GPUs it takes, each with a process of its own, its rank."""
        return self.axes.get(GPUS, 1)

    def but_for(self, option: str) -> tuple[object, ...]:
        """What it is but for an option: cases that are alike in this differ in that alone."""
        options = sorted((name, str(x)) for name, x in self.options.items() if name != option)
        return (self.operator, self.dtype, self.pass_, *sorted(self.axes.items()), *options)


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
    """What was seen when one implementation of one case was measured in one process.

    `samples` holds every sample of each metric in the order taken; the header's `metrics` say what they mean.
    """

    samples: dict[str, tuple[float, ...]]
    timer: str
    batch: int = 1
    """Calls behind one sample; above 1 only for timers that cannot resolve a single call."""
    converged: bool = True
    """Whether the stopping rule's precision was reached within its limits."""
    telemetry: Telemetry | None = None
    throttled: tuple[int, ...] = ()
    """Indices of samples of the primary metric during which a throttle reason was raised."""
    tuning: dict[str, str] = {}
    """Autotuned kernels that ran, each with the configuration that won."""
    remarks: tuple[str, ...] = ()
    """What the implementation had changed in the process of its rivals that the harness put back, that its answer
    is of another dtype than its inputs, who else was on the GPU, why its energy is not known, why a row does not
    bear its name, and that other rows of its case were measured on another board."""
    code: str | None = None
    """How many kernels a call launches, and a hash of their machine code, grids and arguments in order; None where
    it was not asked for or cannot be told."""

    def __post_init__(self) -> None:
        # JSON has no NaN or infinity: such a sample would make a line that cannot be read back.
        if not self.samples:
            raise ValueError("samples holds at least one metric")
        for name, values in self.samples.items():
            if not values or not finite(values):
                raise ValueError(f"samples of {name!r}: at least one number, each finite")


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
    board: str | msgspec.UnsetType = msgspec.UNSET
    """The hash of the GPUs that it was measured on, where they are others than its header's `BOARDS`. Not written
    where they are the same: lines of a run on one board are what they always were."""

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.measurement is not None):
            raise ValueError(f"status {self.status!r}: a measurement is there exactly when the status is 'ok'")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"status {self.status!r} needs a reason")
        if self.measurement is not None and self.case.primary not in self.measurement.samples:
            raise ValueError(f"no samples of {self.case.primary!r}, the metric that the case is judged by")

    @property
    def identity(self) -> Key:
        """The row that it belongs to. With the replicate, what may stand in a journal only once."""
        return Key(self.case.operator, self.case.name, self.implementation, self.cache)

    @property
    def primary(self) -> tuple[float, ...]:
        """The samples of the primary metric; none where the status is not ok."""
        return self.measurement.samples[self.case.primary] if self.measurement is not None else ()


def boards(header: Header, records: Iterable[Record]) -> frozenset[str]:
    """The boards that what ended well among these was measured on, by their hashes; one that is not known is
    `UNKNOWN`.
    """
    began = str(header.environment.get(BOARDS) or UNKNOWN)
    measured = (x for x in records if x.measurement is not None)
    return frozenset(began if x.board is msgspec.UNSET else x.board for x in measured)


_WORST_FIRST = ("incorrect", "crashed", "timeout", "out_of_memory", "error", "unavailable", "unsupported")


def ended(records: Sequence[Record]) -> tuple[Status, str | None]:
    """How a row ended in all its processes, with the reason of one that did not end well.

    `ok` if any process did, unless another one was incorrect: a wrong answer is never outvoted.
    """
    bad = [x for x in records if x.status != "ok"]
    if not bad:
        return "ok", None
    worst = min(bad, key=lambda x: _WORST_FIRST.index(x.status))
    if worst.status != "incorrect" and len(bad) < len(records):
        return "ok", f"{len(bad)} of {len(records)} replicates: {worst.status}: {worst.reason}"
    return worst.status, worst.reason


CeilingKind: TypeAlias = Literal["copy", "read", "write", "matmul", "exponential"]


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ceiling"):
    """A limit of the device measured in this run: a copy, a read or a write of `size` bytes, a matmul of `size`
    FLOP, or `size` exponentials.

    For a copy, `size` counts bytes read plus bytes written, as `Case.bytes` does.
    """

    what: CeilingKind
    size: int
    time_ms: float
    replicate: int
    dtype: str | None = None
    board: str | msgspec.UnsetType = msgspec.UNSET
    """As of a `Record`."""

    def __post_init__(self) -> None:
        if self.size <= 0 or not 0 < self.time_ms < math.inf:
            raise ValueError("a ceiling has a size and a time above 0")


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One part of a model's base system put in by another: what a run on kernels' worth compares.

    The rows of `operator`/`case` by `implementation` and by `instead` say what the exchange is worth alone, those
    of `program`/`step` by `system` and by `base` what it is worth in the model, which makes `calls` of the part a
    step.
    """

    system: str
    base: str
    part: str
    program: str
    step: str
    operator: str
    case: str
    implementation: str
    instead: str
    calls: int
    refused: str = ""
    """Why the part cannot go into the base system; empty where it can, and was measured."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run was asked for: enough for `--resume` and `repro` to ask for the same again.

    `cases` is empty where a run does not say what it measured (a foreign one). `sampling` holds the limits of
    sampling by name. `only` gives by operator/case the implementations that the case is for.
    """

    cases: tuple[Case, ...] = ()
    implementations: tuple[str, ...] = ()
    caches: tuple[Cache, ...] = ()
    sampling: dict[str, int | float | str] = {}
    deadline_s: float | None = None
    only: dict[str, tuple[str, ...]] = {}
    systems: tuple[dict[str, str | dict[str, str]], ...] = ()
    """The systems that the plan names, as its file has them."""
    exchanges: tuple[Exchange, ...] = ()
    """What a plan on kernels' worth exchanges."""
    models: dict[str, tuple[str, ...]] = {}
    """By operator/case, the models whose call the case is."""
    parameters: dict[str, int] = {}
    """By operator/case, the parameters of the model that it is of."""
    layers: dict[str, int] = {}
    """By operator/case of a slice, the layers of its whole model."""
    calls: dict[str, float] = {}
    """By operator/case, how often a step of the program that was captured makes that call."""
    step_ms: float | None = None
    """How long a step of that program took."""
    peers: dict[str, tuple[str, ...]] = {}
    """By operator, the implementations without which nothing is said of it as a whole."""
    seeds: dict[str, tuple[int, ...]] = {}
    """Of a shard: by operator/case the replicates of it that it has, where other shards have the rest."""
    shard: tuple[int, int] | None = None
    """(i, n): this journal holds the i-th of n shards of its run, counted from 1."""
    cut: str = ""
    """Of a shard: a hash of what each shard of its run has. Those of two plans, or of one that was cut otherwise,
    may lack a case between them. Empty in older journals.
    """
    missing: tuple[tuple[int, int], ...] = ()
    """Of a run that was joined from shards: those that were not there."""
    control: str | None = None
    """operator/case of the case that every shard measures, so that hosts can be held against each other."""
    hosts: dict[str, str] = {}
    """By operator/case, the host that measured it, where shards of a run say so: noise is a host's own. Where
    several had some of its seeds each, one name for all of them.
    """
    imported_from: str | None = None
    """The format that a run was imported from."""
    partner: str | None = None
    """The run that this one was measured in turns with, of the other commit."""
    stage: int = 0
    """Which stage of a comparison the run is; above 1 it holds only rows under suspicion."""
    arm: str | None = None
    """Which cell of a factorial over code and environment the run is."""
    verifies: str | None = None
    """The run whose rows this one measured again, drawn by its own seed."""
    pinned: dict[str, dict[str, str]] = {}
    """By row, the configurations that its autotuned kernels were held to."""
    note: str | None = None
    """What somebody noted when asking for the run."""

    @property
    def exchanged(self) -> frozenset[tuple[str, str, str]]:
        """Operator, case and implementation of the rows that stand for an exchange of a part: what they are worth
        is said beside their base, and they are nobody's baseline.
        """
        return frozenset((x.program, x.step, x.system) for x in self.exchanges)


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
    device: DeviceKind
    key: str
    conditions: dict[str, Scalar]
    environment: dict[str, Scalar]
    request: Request = Request()
    metrics: tuple[Metric, ...] = OPERATOR_METRICS
    """What the samples of this journal mean."""


KernelKind: TypeAlias = Literal["ours", "product", "copy", "other"]
"""What a kernel of a step is; a copy computes nothing, it lays out anew what is there."""


class Launched(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel of a profiled step (on a CPU: an operator of PyTorch, without what it calls): calls and
    milliseconds a step.
    """

    name: str
    kind: KernelKind
    calls: float
    ms: float


class Launches(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="launches"):
    """What one step of a row runs, as a profiler saw it after the row was measured: nothing of it is a result.

    `gap_ms` is when none of the kernels ran.
    """

    operator: str
    case: str
    implementation: str
    steps: int
    gap_ms: float
    kernels: tuple[Launched, ...]


class Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="footer"):
    """Written when a session of a run ends, so a resumed run has several; its absence means: killed."""

    ended: str
    wall_s: float
    complete: bool
    spent_s: dict[str, float]
    """Seconds per stage over the session, and `overhead`: everything outside the stages."""


Line: TypeAlias = Header | Record | Ceiling | Launches | Footer
