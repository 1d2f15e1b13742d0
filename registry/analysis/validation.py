"""Is an implementation of ours worth taking? Six criteria a row, each with its number. Pure.

What was not measured is unknown, and never passes. Of an operator's row only the first three are asked; of a
workload's, which trains a model, all six.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from ..store.journal import Journal
from ..store.metric import ERROR, MEMORY, Equivalence, Metric
from ..store.record import PROVIDER, Key
from .rows import Row, rows

Verdict: TypeAlias = Literal["pass", "fail", "unknown"]

SPEEDUP = 1.2
"""Over the best baseline, by the lower end of the 95 % interval."""
MEMORY_GROWTH = 1.05
"""Of the best baseline's peak memory."""
STEPS = 1.05
"""Of the best baseline's steps to the same loss."""
COSINE = 0.9
"""The least agreement of a layer's gradient with that in fp32 that counts as healthy."""
ROUNDING: Mapping[str, float] = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 8e-3}
"""The largest relative norm of the error. 16-bit answers are rounded to 11 and 8 binary digits themselves, so that
1e-5 is out of reach there: these are two units of that rounding, as the harness's own check has them."""


class Criterion(msgspec.Struct, frozen=True):
    """One tick: what was seen, against which bound."""

    name: str
    verdict: Verdict
    seen: str
    bound: str
    value: float | None = None


class Validated(msgspec.Struct, frozen=True):
    """A row of ours and its criteria. `asked` of them count for the verdict."""

    row: Key
    status: str
    criteria: tuple[Criterion, ...]
    asked: int

    @property
    def verdict(self) -> Verdict:
        """Fails with any; passes with all that are asked."""
        given = [x.verdict for x in self.criteria[: self.asked]]
        if self.status not in ("ok", "unsupported", "unavailable") or "fail" in given:
            return "fail"
        return "pass" if all(x == "pass" for x in given) else "unknown"


def validate(journal: Journal) -> tuple[Validated, ...]:
    """Every row of ours. Those that could not run here are unknown throughout."""
    found = rows(journal)
    by_identity = {x.identity: x for x in found}
    out = []
    for row in found:
        if row.provider != PROVIDER:
            continue
        base = by_identity.get(Key(row.operator, row.case, row.best_baseline or "", row.cache))
        criteria = (
            _speedup(row),
            _memory(row, base),
            _error(row),
            _quality(row, base, journal.header.metrics),
            _stability(row, base),
            _gradients(row),
        )
        out.append(Validated(row.identity, row.status, criteria, 6 if row.pass_ == "program" else 3))
    return tuple(out)


def verdict(found: Sequence[Validated]) -> Verdict:
    """Of a run: fails with any row, passes if all do that could run and at least one could."""
    given = [x.verdict for x in found if x.status not in ("unsupported", "unavailable")]
    if "fail" in given:
        return "fail"
    return "pass" if given and all(x == "pass" for x in given) else "unknown"


def _judged(name: str, seen: str, bound: str, value: float | None, passes: bool) -> Criterion:
    return Criterion(name, "pass" if passes else "fail", seen, bound, value)


def _unknown(name: str, why: str, bound: str) -> Criterion:
    return Criterion(name, "unknown", why, bound)


def _speedup(row: Row) -> Criterion:
    bound = f"at least {SPEEDUP:g}×"
    low, value = row.speedup_ci_low, row.speedup_vs_best_baseline
    if low is None or value is None:
        return _unknown("speedup", "no interval" if value else "no baseline beside it", bound)
    seen = f"{value:.2f}× over {row.best_baseline}, at least {low:.2f}×"
    return _judged("speedup", seen, bound, low, low >= SPEEDUP)


def _memory(row: Row, base: Row | None) -> Criterion:
    bound = f"at most {(MEMORY_GROWTH - 1) * 100:.0f} % more"
    for name in (MEMORY.name, "peak_allocated"):
        ours, theirs = row.value(name), base.value(name) if base else None
        if ours is not None and theirs is not None:
            if theirs <= 0:
                return _judged("memory", f"{ours / 1e6:.1f} MB, the baseline none", bound, None, ours <= 0)
            growth = ours / theirs
            seen = f"{(growth - 1) * 100:+.1f} % of {base.implementation if base else ''}'s {theirs / 1e6:.1f} MB"
            return _judged("memory", seen, bound, growth, growth <= MEMORY_GROWTH)
    return _unknown("memory", "not measured of both", bound)


def _error(row: Row) -> Criterion:
    limit = ROUNDING.get(row.dtype)
    if limit is None:
        return _unknown("error", f"no bound for {row.dtype}", "by dtype")
    bound = f"at most {limit:g} in {row.dtype}"
    for name in (ERROR.name, "gradient_error"):
        value = row.value(name)
        if value is not None:
            return _judged("error", f"{value:.1e}", bound, value, value <= limit)
    return _unknown("error", "not measured", bound)


def _quality(row: Row, base: Row | None, metrics: Sequence[Metric]) -> Criterion:
    judged = next((x for x in metrics if x.name == "bits_per_byte" and isinstance(x.judged, Equivalence)), None)
    ours = row.value("bits_per_byte")
    theirs = base.value("bits_per_byte") if base else None
    if judged is None or not isinstance(judged.judged, Equivalence) or ours is None or not theirs:
        return _unknown("quality", "not measured", "no worse than the baseline")
    worse, margin = ours / theirs - 1, judged.judged.margin
    seen = f"{ours:.4f} bits a byte, {worse * 100:+.2f} %"
    return _judged("quality", seen, f"at most {margin * 100:g} % worse", worse, worse <= margin)


def _stability(row: Row, base: Row | None) -> Criterion:
    bound = f"at most {STEPS * 100:.0f} % of the baseline's steps"
    ours, theirs = row.value("steps_to_target"), base.value("steps_to_target") if base else None
    if ours is None or not theirs:
        return _unknown("stability", "not measured", bound)
    return _judged(
        "stability", f"{ours / theirs * 100:.0f} % of steps", bound, ours / theirs, ours / theirs <= STEPS
    )


def _gradients(row: Row) -> Criterion:
    bound = f"all finite, cosine to fp32 at least {COSINE:g}"
    odd, cosine = row.value("nonfinite"), row.value("gradient_cosine")
    if odd is None or cosine is None:
        return _unknown("gradients", "not measured", bound)
    seen = f"{odd:.0f} steps not finite, cosine {cosine:.3f}"
    return _judged("gradients", seen, bound, cosine, odd == 0 and cosine >= COSINE)
