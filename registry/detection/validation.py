"""Is an implementation of ours worth taking? Six criteria a row, each with its number. Pure.

A criterion is asked of a row if the run names the metrics that it needs: of an operator's row the first three, of
one that trains to a loss speedup and the last three. What is asked and was not measured is unknown, and
never passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, TypeAlias

import msgspec

from ..analysis.rows import Row, rows, speedup
from ..analysis.speedups import peak
from ..figures import change, percent
from ..store.journal import Journal
from ..store.metric import ERROR, PEAKS, Equivalence, summarized
from ..store.record import EAGER, PROVIDER, Key, baseline
from .arms import CURVE, PRIMARY, RATE, Arm, arms
from .convergence import ALLOWED

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]

SPEEDUP = 1.2
"""Over the best baseline, by the lower end of the 95 % interval."""
MEMORY_GROWTH = 1.05
"""Of the best baseline's peak memory."""
COSINE = 0.9
"""The least agreement of a layer's gradient with that in fp32 that counts as healthy."""
NONFINITE, ALIKE = "nonfinite", "gradient_cosine"
"""The metrics that say how healthy gradients are."""
ROUNDING: Mapping[str, float] = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 8e-3}
"""The largest relative norm of an operator's error. 16-bit answers are rounded to 11 and 8 binary digits
themselves, so that 1e-5 is out of reach there: these are two units of that rounding, as the harness's own check
has them. Over a whole model rounding adds up: the harness holds it to the model's own bounds, beyond which a row
is incorrect.
"""


class Criterion(msgspec.Struct, frozen=True):
    """One tick: what was seen, against which bound. What is not asked does not count."""

    name: str
    verdict: Verdict | Literal["not asked"]
    seen: str
    bound: str
    value: float | None = None


class Validated(msgspec.Struct, frozen=True):
    """A row of ours and its criteria."""

    row: Key
    status: str
    criteria: tuple[Criterion, ...]

    @property
    def asked(self) -> tuple[Criterion, ...]:
        """Those that count for the verdict."""
        return tuple(x for x in self.criteria if x.verdict != "not asked")

    @property
    def verdict(self) -> Verdict:
        """Fails with any; passes with all that are asked, if there are any."""
        given = [x.verdict for x in self.asked]
        if self.status not in ("ok", "unsupported", "unavailable") or "fail" in given:
            return "fail"
        return "pass" if given and all(x == "pass" for x in given) else "unknown"


def validate(journal: Journal) -> tuple[Validated, ...]:
    """Every row of ours. Those that could not run here are unknown throughout."""
    found = rows(journal)
    by_identity = {x.identity: x for x in found}
    by_case: dict[str, dict[str, Arm]] = {}
    for arm in arms(journal):
        by_case.setdefault(arm.case, {})[arm.name] = arm
    named = _named(journal)
    out = []
    for row in found:
        if row.provider != PROVIDER:
            continue
        base = by_identity.get(Key(row.operator, row.case, row.best_baseline or "", row.cache))
        beside = by_case.get(row.case, {}) if row.primary == PRIMARY else {}
        good = {name for name, x in beside.items() if x.overall in ("equivalent", "better")}
        own = beside.get(row.implementation)
        has = named[row.operator]
        criteria = (
            _speedup(row, found, good, has, journal),
            _memory(row, base, has),
            _error(row, has),
            _quality(own),
            _stability(own, has),
            _gradients(row, has),
        )
        out.append(Validated(row.identity, row.status, criteria))
    return tuple(out)


def verdict(found: Sequence[Validated]) -> Verdict:
    """Of a run: fails with any row, passes if all do that could run and at least one could."""
    given = [x.verdict for x in found if x.status not in ("unsupported", "unavailable")]
    if "fail" in given:
        return "fail"
    return "pass" if given and all(x == "pass" for x in given) else "unknown"


def _named(journal: Journal) -> dict[str, AbstractSet[str]]:
    """By operator or workload, the metrics that its rows may hold.

    A header has one list for all. Operators share what is asked of them; a metric that was measured only of others
    is none of a workload's.
    """
    names = {x.name for x in journal.header.metrics}
    measured: dict[str, set[str]] = {}
    for record in journal.records:
        samples = record.measurement.samples if record.measurement is not None else {}
        measured.setdefault(record.case.operator, set()).update(samples)
    anywhere = frozenset[str]().union(*measured.values())
    workloads = {x.case.operator for x in journal.records if x.case.pass_ == "program"}
    return {x: names - (anywhere - own) if x in workloads else names for x, own in measured.items()}


def _judged(name: str, seen: str, bound: str, value: float | None, passes: bool) -> Criterion:
    return Criterion(name, "pass" if passes else "fail", seen, bound, value)


def _unknown(name: str, why: str, bound: str) -> Criterion:
    return Criterion(name, "unknown", why, bound)


def _not_asked(name: str, bound: str) -> Criterion:
    return Criterion(name, "not asked", "the run names no metric for it", bound)


def _speedup(
    row: Row, found: Sequence[Row], good: AbstractSet[str], has: AbstractSet[str], journal: Journal
) -> Criterion:
    bound = f"at least {SPEEDUP:g}×"
    value, low, best = row.speedup_vs_best_baseline, row.speedup_ci_low, row.best_baseline
    if isinstance(journal.metric(row.primary).judged, Equivalence):  # to be as good is no speed
        if RATE not in has:
            return _not_asked("speedup", bound)
        value, low, best = _rate(row, found, good, journal)
    if low is None or value is None:
        return _unknown("speedup", "no interval" if value else "no baseline beside it", bound)
    return _judged("speedup", f"{value:.2f}× over {best}, lower bound {low:.2f}×", bound, low, low >= SPEEDUP)


def _rate(
    row: Row, found: Sequence[Row], good: AbstractSet[str], journal: Journal
) -> tuple[float | None, float | None, str | None]:
    """Tokens/s over the fastest baseline's, with the lower end, and which that is. An arm that is not shown to be
    as good as its base is no baseline: it may compute less.
    """
    there = [
        x
        for x in found
        if (x.operator, x.case, x.cache) == (row.operator, row.case, row.cache)
        and x.implementation in (EAGER, *good)
        and baseline(x.provider, x.implementation)
    ]
    best = max(there, key=lambda x: x.value(RATE) or 0.0, default=None)
    if best is None:
        return None, None, None
    metric = journal.metric(RATE)
    base, own = (
        {
            x.replicate: summarized(x.measurement.samples[RATE], metric.summary)
            for x in journal.records
            if x.identity == side and x.measurement is not None and RATE in x.measurement.samples
        }
        for side in (best.identity, row.identity)
    )
    value, low, _ = speedup(base, own, metric.better)
    return value, low, best.implementation


def _memory(row: Row, base: Row | None, has: AbstractSet[str]) -> Criterion:
    bound = f"at most {percent(MEMORY_GROWTH - 1)} more"
    if not has & set(PEAKS):
        return _not_asked("memory", bound)
    ours, theirs = peak(row), peak(base) if base else None
    if base is None or ours is None or theirs is None:
        return _unknown("memory", "not measured of both", bound)
    if theirs <= 0:
        return _judged("memory", f"{ours / 1e6:.1f} MB, the baseline none", bound, None, ours <= 0)
    growth = ours / theirs
    seen = f"{change(growth)} of {base.implementation}'s {theirs / 1e6:.1f} MB"
    return _judged("memory", seen, bound, growth, growth <= MEMORY_GROWTH)


def _error(row: Row, has: AbstractSet[str]) -> Criterion:
    limit = ROUNDING.get(row.dtype)
    bound = f"at most {limit:g} in {row.dtype}" if limit is not None else "by dtype"
    value = row.value(ERROR.name)
    if ERROR.name not in has:
        return _not_asked("error", bound)
    if limit is None or value is None:
        return _unknown("error", "not measured" if limit is not None else f"no bound for {row.dtype}", bound)
    return _judged("error", f"{value:.1e}", bound, value, value <= limit)


def _quality(arm: Arm | None) -> Criterion:
    """The worst of the declared steps, the last of these."""
    bound = f"no worse than {EAGER} at declared steps"
    if arm is None:
        return _not_asked("quality", bound)
    if not arm.points:
        return _unknown("quality", arm.reason or "not measured", bound)
    severity = ("equivalent", "better", "inconclusive", "worse")
    point = max(arm.points, key=lambda x: (severity.index(x.found.kind), x.step))
    seen = f"{point.arm:.4f} bits a byte after {point.step:,} steps, {point.found.reason}"
    if point.found.kind == "inconclusive":
        return Criterion("quality", "unknown", seen, bound, point.found.change)
    return _judged("quality", seen, bound, point.found.change, point.found.kind != "worse")


def _stability(arm: Arm | None, has: AbstractSet[str]) -> Criterion:
    bound = f"at most {percent(ALLOWED)} of {EAGER}'s steps"
    if arm is None or CURVE not in has:
        return _not_asked("stability", bound)
    if arm.steps is None or arm.steps.kind == "inconclusive":
        return _unknown("stability", arm.steps.reason if arm.steps else arm.reason or "not measured", bound)
    return _judged("stability", arm.steps.reason, bound, arm.steps.ratio, arm.steps.kind == "within")


def _gradients(row: Row, has: AbstractSet[str]) -> Criterion:
    bound = f"all finite, cosine to fp32 at least {COSINE:g}"
    if row.primary != PRIMARY or not {NONFINITE, ALIKE} <= has:
        return _not_asked("gradients", bound)
    steps, alike = row.get(NONFINITE), row.get(ALIKE)
    # Of the worst seed.
    odd, cosine = steps.maximum if steps else None, alike.minimum if alike else None
    if odd is None or cosine is None:
        return _unknown("gradients", "not measured", bound)
    seen = f"{odd:.0f} steps not finite, cosine {cosine:.3f}"
    return _judged("gradients", seen, bound, cosine, odd == 0 and cosine >= COSINE)
