"""How two commits are compared: the one path from comparisons to verdicts. Pure: no device, git, files or clock.

The command line and the calibration (tests/calibration) both call what is here; nothing else makes verdicts.

A/B: `stage_one` looks at 5 pairs of every row and names the rows to rerun; `stage_two` decides those it
flagged on *fresh* pairs alone, with Benjamini and Hochberg's correction over the rerun. `decide` joins the
two around a caller's way to measure. Stored: `stored` asks whether a new run fits the runs of unchanged code.
docs/deciding.md has the evidence and the literature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..store.metric import Equivalence
from ..store.record import Key
from .assessment import Assessment, assess, machine_shift
from .comparison import Comparison, History, Noise, Options, pooled
from .eligibility import exclusion, unchanged_runs
from .noise import (
    FLOOR,
    PRIOR_RUNS,
    Estimate,
    Floats,
    benjamini_hochberg,
    either,
    empirical_prior,
    history_prior,
    log_times,
    shrink,
    trimmed,
)
from .outcome import by_equivalence, decided, equivalence, excluded, not_rerun, significant
from .verdict import Kind, Mode, Verdict

DEFAULTS = Options()
FIRST_LOOK = 0.2
"""Share of the level at which stage one settles a row as unchanged.

What is settled is not looked at again, so the first look must be the strictest: at the whole level it would
overlook as many slowdowns as all later looks together, and the rows whose pairs happen to lie about 0 would
end there with intervals that hold the truth in 99 % of cases (98 % over all rows at three times the noise).
"""


class Progress(msgspec.Struct, frozen=True):
    """Where a comparison stands. It may be reported as it is at any time: what is open is `inconclusive`.

    `requests` maps rows that must be rerun before they can be decided to the number of fresh pairs, and
    `extra` those that more pairs would probably settle. `directions` is +1 for a row flagged as slower, -1
    for faster. `kept` holds what was measured of the rows in `extra`, which their fresh pairs are added to.
    """

    verdicts: tuple[Verdict, ...]
    mode: Mode = "ab"
    stage: int = 1
    requests: dict[Key, int] = {}
    extra: dict[Key, int] = {}
    directions: dict[Key, int] = {}
    priors: dict[Key, Noise] = {}
    kept: dict[Key, Comparison] = {}


Rerun = Callable[[Mapping[Key, int]], Sequence[Comparison]]
"""Measures so many fresh pairs of each row and returns those only; fewer rows, or none, when the budget ends."""


def decide(
    first: Sequence[Comparison],
    rerun: Rerun,
    options: Options = DEFAULTS,
    resolve: bool = True,
    stages: int = 4,
) -> Progress:
    """The whole A/B procedure: stage one, then what it asks for, measured by `rerun`.

    With `resolve`, rows that are merely inconclusive are rerun too, and stages above the second go on for
    what stays inconclusive. Without it, only what was flagged is rerun, once.
    """
    progress = stage_one(first, options)
    while progress.stage < (stages if resolve else min(stages, 2)):
        wanted = {**progress.extra, **progress.requests} if resolve else progress.requests
        fresh = rerun(wanted) if wanted else ()
        if not fresh:
            break
        progress = stage_two(progress, fresh, options)
    return progress


def stage_one(comparisons: Sequence[Comparison], options: Options = DEFAULTS) -> Progress:
    """Decides what 5 pairs can decide, and flags what must be rerun: p < .05 against "changed by at most 1 %"."""
    rows = _unique(comparisons)
    reasons = [exclusion(row, "ab", options) for row in rows]
    usable = np.array([x is None and _by_ratio(row) for x, row in zip(reasons, rows, strict=True)], dtype=bool)
    estimate = _paired(rows)
    others = empirical_prior(_only(estimate, usable))
    prior = either(history_prior([row.history.noise for row in rows]), others)
    variance, df = shrink(estimate, prior)
    seen = _assess(estimate, variance, df, options, options.level, FIRST_LOOK * options.level)
    shift = machine_shift(rows, estimate.mean, usable, options)
    verdicts: list[Verdict] = []
    requests: dict[Key, int] = {}
    extra: dict[Key, int] = {}
    directions: dict[Key, int] = {}
    for i, row in enumerate(rows):
        if (reason := reasons[i]) is not None:
            verdicts.append(excluded(row, reason, options, "ab"))
            continue
        if (found := by_equivalence(row)) is not None:
            verdicts.append(excluded(row, found[0], options, "ab"))
            if found[1]:
                extra[row.key] = found[1]
            continue
        direction = int(seen.p_slower[i] < options.level) - int(seen.p_faster[i] < options.level)
        why: tuple[Kind, str]
        if shift is not None:
            why = ("not comparable", shift)
        elif direction:
            requests[row.key], directions[row.key] = options.rerun_pairs, direction
            why = ("inconclusive", f"flagged as {'slower' if direction > 0 else 'faster'}, not yet confirmed")
        else:
            why = equivalence(seen, i, options)
            if why[0] == "inconclusive":
                extra[row.key] = _more_pairs(seen, i, options, 1)
        verdicts.append(decided(row, why, i, seen, estimate, options, p=_p(seen, i, direction)))
    priors = {
        row.key: Noise(float(prior.variance[i]), float(prior.df[i]))
        for i, row in enumerate(rows)
        if prior.df[i] > 0
    }
    kept = {row.key: row for row in rows if row.key in extra}
    return Progress(tuple(verdicts), "ab", 1, requests, extra, directions, priors, kept)


def stage_two(progress: Progress, fresh: Sequence[Comparison], options: Options = DEFAULTS) -> Progress:
    """Decides the rerun rows: those that were flagged on their fresh pairs alone, the others on all pairs.

    A row is flagged partly because its first pairs looked large, so these must not speak again: only the
    direction to test and the prior of the spread are kept, and that prior knows nothing of this row's stage
    one. A row that was only too noisy was not picked for its change, and to drop its first pairs would bias
    what is reported the other way, see `FIRST_LOOK`.

    Called again with what is in `extra`, it adds the new pairs to those of `kept` and decides at half the
    level each time, so that looking often does not cry wolf. Rows that were flagged and rows that were only
    too noisy are two families of the Benjamini-Hochberg procedure: noisy rows must not cost a flagged one
    its power. A requested row that was not rerun stays inconclusive.
    """
    if progress.mode != "ab":
        raise InputError("only an A/B comparison has a second stage")
    rows = _unique(fresh)
    asked = progress.requests.keys() | progress.extra.keys()
    if strangers := [str(row.key) for row in rows if row.key not in asked]:
        raise InputError(f"rerun without being asked for: {', '.join(strangers)}")
    stage = progress.stage + 1
    level, q = (x / 2 ** (stage - 2) for x in (options.level, options.q))
    reasons = [exclusion(row, "ab", options) for row in rows]
    rows = [
        pooled(progress.kept[row.key], row) if reason is None and row.key in progress.kept else row
        for row, reason in zip(rows, reasons, strict=True)
    ]
    estimate = _paired(rows)
    prior = history_prior([[progress.priors[row.key]] if row.key in progress.priors else [] for row in rows])
    variance, df = shrink(estimate, prior)
    seen = _assess(estimate, variance, df, options, level)
    p = np.array(
        [_p(seen, i, progress.directions.get(row.key, 0)) for i, row in enumerate(rows)], dtype=np.float64
    )
    p[[reason is not None or not _by_ratio(row) for reason, row in zip(reasons, rows, strict=True)]] = np.nan
    flagged = np.array([row.key in progress.directions for row in rows], dtype=bool)
    rejected = np.zeros(len(rows), dtype=bool)
    for family in (flagged, ~flagged):
        rejected |= benjamini_hochberg(np.where(family, p, np.nan), q)
    new: dict[Key, Verdict] = {}
    extra: dict[Key, int] = {}
    for i, row in enumerate(rows):
        if (reason := reasons[i]) is not None:
            new[row.key] = msgspec.structs.replace(excluded(row, reason, options, "ab"), stage=stage)
            continue
        if (found := by_equivalence(row)) is not None:
            new[row.key] = msgspec.structs.replace(excluded(row, found[0], options, "ab"), stage=stage)
            if found[1]:
                extra[row.key] = found[1]
            continue
        why = significant(seen, i, bool(rejected[i]), options) or equivalence(seen, i, options)
        if why[0] == "inconclusive" and (pairs := _more_pairs(seen, i, options, stage)):
            extra[row.key] = pairs
        new[row.key] = decided(row, why, i, seen, estimate, options, stage=stage, p=float(p[i]))
    verdicts = tuple(new.get(v.key) or not_rerun(v, progress.requests) for v in progress.verdicts)
    kept = {row.key: row for row in rows if row.key in extra}
    return Progress(verdicts, "ab", stage, {}, extra, progress.directions, progress.priors, kept)


def stored(comparisons: Sequence[Comparison], options: Options = DEFAULTS) -> Progress:
    """Decides a run against the runs of unchanged code, where the base cannot be measured again.

    The unit is the run: within-run tests cry wolf in 30 to 40 % of rows, because a run has an effect of its
    own. So the new run's mean must fall outside Student's prediction interval of the old runs' means. What
    alerts or stays inconclusive is in `requests`: an A/B decides it where the device is at hand.
    """
    rows = _unique(comparisons)
    reasons = [exclusion(row, "stored", options) for row in rows]
    usable = np.array([x is None and _by_ratio(row) for x, row in zip(reasons, rows, strict=True)], dtype=bool)
    new = trimmed(log_times([_costs(row, row.current.medians) for row in rows]))
    estimate = _prediction(new.mean, log_times([_costs(row, unchanged_runs(row, options)) for row in rows]))
    seen = _assess(estimate, estimate.variance, estimate.df, options, options.level)
    shift = machine_shift(rows, estimate.mean, usable, options)
    # Each direction is a family of its own, so that swapping the sides mirrors the verdicts.
    rejected = np.zeros(len(rows), dtype=bool)
    for p in (seen.p_slower, seen.p_faster):
        rejected |= benjamini_hochberg(np.where(usable, p, np.nan), options.q)
    verdicts: list[Verdict] = []
    requests: dict[Key, int] = {}
    why: tuple[Kind, str]
    for i, row in enumerate(rows):
        if (reason := reasons[i]) is not None:
            verdict = excluded(row, reason, options, "stored")
        elif not _by_ratio(row):
            verdict = excluded(
                row, ("inconclusive", "equivalence is judged on pairs: by an A/B"), options, "stored"
            )
        else:
            why = significant(seen, i, bool(rejected[i]), options) or equivalence(seen, i, options)
            why = why if shift is None else ("not comparable", shift)
            direction = 1 if seen.change[i] > 0 else -1
            verdict = decided(row, why, i, seen, estimate, options, mode="stored", p=_p(seen, i, direction))
        verdicts.append(verdict)
        if verdict.kind in ("regression", "warning", "improvement", "inconclusive"):
            requests[row.key] = options.pairs
    return Progress(tuple(verdicts), "stored", 1, requests)


def replace(progress: Progress, verdicts: Iterable[Verdict]) -> Progress:
    """Puts verdicts of an A/B in the place of those that a stored comparison asked it for."""
    new = {verdict.key: verdict for verdict in verdicts}
    requests = {key: pairs for key, pairs in progress.requests.items() if key not in new}
    merged = tuple(new.get(verdict.key, verdict) for verdict in progress.verdicts)
    return msgspec.structs.replace(progress, verdicts=merged, requests=requests)


def remember(histories: Mapping[Key, History], progress: Progress) -> dict[Key, History]:
    """The histories with the spread that this comparison saw, for the next one to lean on.

    Run means are not added: only who accepts a commit as unchanged may do that.
    """
    out = dict(histories)
    for verdict in progress.verdicts:
        if verdict.noise is not None and verdict.kind != "not comparable":
            old = out.get(verdict.key, History())
            out[verdict.key] = History((*old.noise, verdict.noise)[-PRIOR_RUNS:], old.runs)
    return out


def _unique(comparisons: Sequence[Comparison]) -> list[Comparison]:
    if len({row.key for row in comparisons}) != len(comparisons):
        raise InputError("a row occurs twice in one comparison")
    return list(comparisons)


def _paired(rows: list[Comparison]) -> Estimate:
    width = max((min(len(row.base.medians), len(row.current.medians)) for row in rows), default=0)
    base = log_times([_costs(row, row.base.medians) for row in rows], width)
    current = log_times([_costs(row, row.current.medians) for row in rows], width)
    return trimmed(current - base)


def _by_ratio(row: Comparison) -> bool:
    return not isinstance(row.metric.judged, Equivalence)


def _costs(row: Comparison, values: Sequence[float]) -> Sequence[float]:
    """Values of which more is worse: inverses where the metric is better higher."""
    if row.metric.better != "higher":
        return values
    return [1 / x if x > 0 else math.nan for x in values]


def _prediction(new: Floats, runs: Floats) -> Estimate:
    """The new run's distance from the mean of the runs, with its variance as a prediction of one run."""
    count = np.isfinite(runs).sum(axis=1).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(runs, axis=1) / count
        variance = np.nansum(np.square(runs - mean[:, None]), axis=1) / (count - 1)
        variance = np.maximum(variance, FLOOR) * (1 + 1 / count)
    return Estimate(new - mean, variance, np.maximum(count - 1, 0), np.ones_like(count))


def _only(estimate: Estimate, usable: NDArray[np.bool_]) -> Estimate:
    return Estimate(estimate.mean, estimate.variance, np.where(usable, estimate.df, 0.0), estimate.count)


def _assess(
    estimate: Estimate, variance: Floats, df: Floats, options: Options, level: float, settled: float | None = None
) -> Assessment:
    # Rows without data pass through as NaN; they were excluded with a reason before.
    with np.errstate(invalid="ignore", divide="ignore"):
        count, df = np.maximum(estimate.count, 1), np.maximum(df, 1)
        return assess(estimate.mean, variance, count, df, options, level, settled)


def _p(seen: Assessment, i: int, direction: int) -> float:
    """One-sided in the direction to test; doubled where none was chosen beforehand."""
    if direction:
        return float(seen.p_slower[i] if direction > 0 else seen.p_faster[i])
    return float(min(1.0, 2 * min(seen.p_slower[i], seen.p_faster[i])))


def _more_pairs(seen: Assessment, i: int, options: Options, stage: int) -> int:
    """How many fresh pairs an inconclusive row is worth; 0 for none.

    Five pairs know their spread too badly to give up on them, so stage one never does.
    """
    if math.isfinite(seen.needed[i]):
        return max(options.rerun_pairs, int(seen.needed[i]))
    return options.rerun_pairs if stage == 1 else 0
