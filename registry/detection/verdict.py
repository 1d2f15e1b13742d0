"""What a comparison ends in, and what that means for an exit code."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias, get_args

import msgspec

from ..errors import unknown
from ..store.metric import ERRORS, HELD, LATENCY, OPERATOR_METRICS, PEAKS, Metric
from ..store.record import Key
from .comparison import Noise

Kind: TypeAlias = Literal[
    "regression",
    "incorrect",
    "missing",
    "not comparable",
    "warning",
    "inconclusive",
    "improvement",
    "below the limit",
    "new",
    "skipped",
    "no change",
]
"""Worst first. `incorrect`: its result was right and is wrong now. `missing`: it had a time and has none now.
`below the limit`: certainly slower or faster, by less than is warned of. `new`: it has a time now and had none.
`skipped`: neither side has a time."""
Mode: TypeAlias = Literal["ab", "stored"]

KINDS: tuple[Kind, ...] = get_args(Kind)
COMPARED: frozenset[Kind] = frozenset(
    {"regression", "warning", "improvement", "below the limit", "no change", "inconclusive"}
)

EXIT_CODES: dict[str, int] = {
    **dict.fromkeys(("regression", "warning", "improvement", "below the limit"), 1),
    **dict.fromkeys(("incorrect", "missing", "not comparable", "new", "skipped"), 4),
    "inconclusive": 3,
    "no change": 0,
}
"""The code of each verdict if it is among those that fail. A flag that fails is a 1."""
FAIL_ON: frozenset[str] = frozenset(
    {"regression", "incorrect", "missing", "not comparable", "inconclusive", *PEAKS, HELD.name, *ERRORS}
)
"""Verdicts, and metrics whose flags fail, unless the user says otherwise. Energy is noisy on short kernels:
reported, not failed on."""
PRECEDENCE = (2, 5, 1, 4, 3, 0)


class Flag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric other than the primary one that got worse."""

    metric: str
    base: float
    current: float
    reason: str


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one row was decided. Changes are current / base - 1 of the primary metric, or base / current - 1 of one
    that is better higher: above 0 is worse.

    `low` and `high` bound the change with 95 % confidence. `detectable` is the smallest slowdown that this
    row's noise would let through to a warning four times in five. `p` is one-sided against no change at all, in
    the direction that was tested. `pairs_needed` is how many fresh pairs would probably
    settle an inconclusive row; None if more than are worth running. `stage` is 1 for all rows and counts up
    with every rerun that decided instead. `noise` is what to remember for `History.noise`.
    """

    key: Key
    kind: Kind
    reason: str
    mode: Mode = "ab"
    stage: int = 1
    metric: str = LATENCY.name
    unit: str = LATENCY.unit
    base_value: float | None = None
    current_value: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None
    pairs: int = 0
    pairs_needed: int | None = None
    noise: Noise | None = None
    flags: tuple[Flag, ...] = ()
    differing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Base time over current time."""
        return None if self.change is None else 1 / (1 + self.change)


def worst_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """By kind as `Kind` lists them, flagged rows before others, then the slowest change first."""

    def rank(verdict: Verdict) -> tuple[int, int, float, Key]:
        size = verdict.change or 0.0
        return KINDS.index(verdict.kind), -len(verdict.flags), -size, verdict.key

    return sorted(verdicts, key=rank)


def tally(verdicts: Iterable[Verdict]) -> dict[Kind, int]:
    """Number of verdicts of each kind that occurs, worst first."""
    kinds = [verdict.kind for verdict in verdicts]
    return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def fail_on(names: Iterable[str], metrics: Iterable[Metric] = ()) -> frozenset[str]:
    """Checks the names given to `--fail-on`: verdicts, and metrics whose flags fail, those of every operator and
    these. "default" stands for the default set, "none" for nothing.
    """
    judged = list(dict.fromkeys(x.name for x in (*OPERATOR_METRICS, *metrics) if x.judged is not None))
    out: set[str] = set()
    for name in names:
        if name == "default":
            out |= FAIL_ON
        elif name in judged:
            out.add(name)
        elif name.replace("_", " ").replace("-", " ") in EXIT_CODES:
            out.add(name.replace("_", " ").replace("-", " "))
        elif name != "none":
            raise unknown("verdict to fail on", name, [*EXIT_CODES, *judged, "default", "none"])
    return frozenset(out)


def exit_code(verdicts: Iterable[Verdict], fails: Collection[str] = FAIL_ON, others: Iterable[int] = ()) -> int:
    """The verdict as an exit code, precedence 2 > 5 > 1 > 4 > 3 > 0.

    `others` are codes that arose elsewhere (5 from the harness). Having compared nothing is 4 whatever
    `fails` says: a gate that looked at nothing must not be green.
    """
    codes = set(others)
    compared = False
    for verdict in verdicts:
        compared = compared or verdict.kind in COMPARED
        codes |= {EXIT_CODES[verdict.kind]} if verdict.kind in fails else set()
        codes |= {1 for flag in verdict.flags if flag.metric in fails}
    if not compared:
        codes.add(4)
    return next((code for code in PRECEDENCE if code in codes), 5 if codes else 0)
