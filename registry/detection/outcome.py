"""One row's verdict from its numbers: the rule of docs/deciding.md in code."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from ..analysis.statistics import geometric_mean
from ..figures import percent
from ..store.metric import Equivalence
from ..store.record import Key
from .assessment import Assessment
from .comparison import Comparison, Noise, Options
from .eligibility import notes, unchanged_runs, value_of
from .equivalence import equivalent
from .metrics import flags
from .noise import Estimate
from .verdict import COMPARED, Kind, Mode, Verdict


def significant(seen: Assessment, i: int, rejected: bool, options: Options) -> tuple[Kind, str] | None:
    """What a row is called that certainly changed; None if that is not certain."""
    change = float(seen.change[i])
    if not rejected:
        return None
    if abs(change) <= math.log1p(options.warn_above):
        # An interval that reaches beyond the limit of failing leaves that open.
        if not seen.within[i]:
            return None
        below = percent(options.warn_above, 1)
        return "below the limit", f"{speed(change)}, certainly, and below the limit of {below}"
    if change < 0:
        return "improvement", f"{speed(change)}, significantly and by more than {percent(options.warn_above, 1)}"
    if change > math.log1p(options.fail_above):
        return "regression", f"{speed(change)}, significantly and by more than {percent(options.fail_above, 1)}"
    return "warning", f"{speed(change)}, significantly and by more than {percent(options.warn_above, 1)}"


def equivalence(seen: Assessment, i: int, options: Options) -> tuple[Kind, str]:
    """No change if the whole interval, at the stage's level, lies within the margin, else inconclusive."""
    if seen.within[i]:
        return "no change", f"the interval lies within ±{percent(options.fail_above, 1)}"
    needed = seen.needed[i]
    more = (
        f"about {int(needed)} fresh pairs" if math.isfinite(needed) else f"more than {options.maximum_pairs} pairs"
    )
    return "inconclusive", f"too noisy to tell; {more} would settle it"


def by_equivalence(row: Comparison) -> tuple[tuple[Kind, str], int | None] | None:
    """The verdict of a row whose primary metric is judged by equivalence, and the fresh pairs that would settle
    it; None for one that is judged by its ratio.
    """
    rule = row.metric.judged
    if not isinstance(rule, Equivalence):
        return None
    found = equivalent(row.base.medians, row.current.medians, rule, row.metric.better)
    kinds: Mapping[str, Kind] = {"equivalent": "no change", "worse": "regression", "better": "improvement"}
    return (kinds.get(found.kind, "inconclusive"), found.reason), found.needed


def excluded(row: Comparison, why: tuple[Kind, str], options: Options, mode: Mode) -> Verdict:
    """The verdict of a row that the ratio of its values did not decide."""
    kind, reason = why
    return Verdict(
        key=row.key,
        kind=kind,
        reason=reason,
        mode=mode,
        metric=row.metric.name,
        unit=row.metric.unit,
        base_value=_base_value(row, mode, options),
        current_value=_middle(row, row.current.medians),
        differing=row.differing,
        flags=flags(row) if kind in COMPARED else (),
        notes=notes(row),
    )


def decided(
    row: Comparison,
    why: tuple[Kind, str],
    i: int,
    seen: Assessment,
    estimate: Estimate,
    options: Options,
    *,
    mode: Mode = "ab",
    stage: int = 1,
    p: float | None = None,
) -> Verdict:
    """The verdict of a row with its numbers, as ratios."""
    kind, reason = why
    needed = float(seen.needed[i])
    return Verdict(
        key=row.key,
        kind=kind,
        reason=reason,
        mode=mode,
        stage=stage,
        metric=row.metric.name,
        unit=row.metric.unit,
        base_value=_base_value(row, mode, options),
        current_value=_middle(row, row.current.medians),
        change=_ratio(seen.change[i]),
        low=_ratio(seen.low[i]),
        high=_ratio(seen.high[i]),
        p=float(seen.p_slower[i]) if p is None else p,
        detectable=_ratio(seen.detectable[i]),
        pairs=int(estimate.count[i]) if mode == "ab" else 0,
        pairs_needed=int(needed) if kind == "inconclusive" and mode == "ab" and math.isfinite(needed) else None,
        noise=Noise(float(estimate.variance[i]), float(estimate.df[i])) if mode == "ab" else None,
        flags=flags(row),
        notes=notes(row),
    )


def not_rerun(verdict: Verdict, requests: Mapping[Key, int]) -> Verdict:
    """A flagged row whose rerun was not made stays open and says so."""
    if verdict.key not in requests:
        return verdict
    text = f"flagged, and the rerun of {requests[verdict.key]} fresh pairs was not made within the budget"
    return msgspec.structs.replace(verdict, reason=text, pairs_needed=requests[verdict.key])


def speed(change: float) -> str:
    """A logarithmic change in words."""
    return f"slower by {percent(_ratio(change), 1)}" if change > 0 else f"{1 + _ratio(-change):.3g} times as fast"


def _base_value(row: Comparison, mode: Mode, options: Options) -> float | None:
    if mode == "stored" and (mean := geometric_mean(unchanged_runs(row, options))) is not None:
        return mean
    return _middle(row, row.base.medians)


def _middle(row: Comparison, medians: Sequence[float]) -> float | None:
    values = [x for x in medians if value_of(row, x)]
    return statistics.median(values) if values else None


def _ratio(log: float) -> float:
    """exp(log) - 1, kept from overflowing: garbage times may be hundreds of orders of magnitude apart."""
    return math.expm1(min(max(float(log), -700.0), 700.0))
