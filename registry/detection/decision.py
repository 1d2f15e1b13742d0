"""How two commits are compared: the one path from comparisons to verdicts. Pure: no device, git, files or clock.

The command line and the calibration (tests/calibration) both call what is here; nothing else makes verdicts.

A/B: `stage_one` looks at 6 pairs of every row and names the rows to measure again; `stage_two` calls these
slower or faster on *fresh* pairs alone, each at a level of its own, so that a row's verdict does not hang on
how many others there are. `decide` joins the two around a caller's way to measure. Stored: `stored` asks
whether a new run fits the runs of unchanged code. docs/deciding.md has the evidence, docs/calibration.md the
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..figures import percent
from ..store.metric import Equivalence, Metric
from ..store.record import Key
from .assessment import MINIMUM_OPERATORS, Assessment, assess, confirming, machine_shift, noise_settled
from .comparison import Comparison, History, Noise, Options, pooled
from .eligibility import exclusion, unchanged_runs
from .noise import (
    FLOOR,
    PRIOR_RUNS,
    Estimate,
    Floats,
    Prior,
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
FEW_OPERATORS = MINIMUM_OPERATORS
"""Rows of fewer operators cannot show that the machine changed: others must, whose code is the same."""
FIRST_LOOK = 0.2
"""Share of the level at which stage one settles a row as unchanged.

What is settled is not looked at again, so the first look must be the strictest: at the whole level it would
overlook as many slowdowns as all later looks together, and the rows whose pairs happen to lie about 0 would
end there with intervals that hold the truth in 99 % of cases (98 % over all rows at three times the noise).
"""


NOISY = 2
"""A row too noisy to be settled gets so many times the least number of fresh pairs: six pairs know its spread
badly, and a second look at too few fresh ones costs more than they do."""


class Progress(msgspec.Struct, frozen=True):
    """Where a comparison stands. It may be reported as it is at any time: what is open is `inconclusive`.

    `requests` maps rows that looked changed to the number of fresh pairs that are to confirm it, and `extra`
    those that were only too noisy to settle. `directions` is +1 for a row that looked slower, -1 for faster.
    `first` holds the first pairs of rows that were too noisy, `fresh` what was measured of each row since.
    """

    verdicts: tuple[Verdict, ...]
    mode: Mode = "ab"
    stage: int = 1
    requests: dict[Key, int] = {}
    extra: dict[Key, int] = {}
    directions: dict[Key, int] = {}
    priors: dict[Key, Noise] = {}
    first: dict[Key, Comparison] = {}
    fresh: dict[Key, Comparison] = {}


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
    """Settles as unchanged what 6 pairs can settle; what looks changed (p < .05 against "by at most 1 %"), and
    what is too noisy to tell, is to be measured again."""
    rows = _unique(comparisons)
    reasons = [exclusion(row, "ab", options) for row in rows]
    usable = np.array([x is None and _by_ratio(row) for x, row in zip(reasons, rows, strict=True)], dtype=bool)
    estimate = _paired(rows)
    others = empirical_prior(_only(estimate, usable))
    prior = either(history_prior([row.history.noise for row in rows]), others)
    variance, df = shrink(estimate, prior)
    seen = _assess(estimate, variance, df, options, options.level, FIRST_LOOK * options.level)
    shift = machine_shift(rows, estimate, usable, options)
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
        direction = 1 if seen.change[i] > 0 else -1
        why: tuple[Kind, str]
        if shift is not None:
            why = ("not comparable", shift)
        elif _against_tolerated(seen, i, direction) < options.level:
            requests[row.key], directions[row.key] = int(seen.fresh[i]), direction
            why = ("inconclusive", f"flagged as {'slower' if direction > 0 else 'faster'}, not yet confirmed")
        else:
            why = equivalence(seen, i, options)
            if why[0] == "inconclusive":
                extra[row.key] = max(NOISY * options.rerun_pairs, int(seen.fresh[i]))
        verdicts.append(decided(row, why, i, seen, estimate, options, p=_p(seen, i, direction)))
    priors = {
        row.key: Noise(float(prior.variance[i]), float(prior.df[i]))
        for i, row in enumerate(rows)
        if prior.df[i] > 0
    }
    first = {row.key: row for row in rows if row.key in extra}
    return Progress(tuple(verdicts), "ab", 1, requests, extra, directions, priors, first)


def stage_two(progress: Progress, fresh: Sequence[Comparison], options: Options = DEFAULTS) -> Progress:
    """Calls rows slower or faster on their fresh pairs alone; what is not called may be settled as unchanged.

    A row is measured again partly because its first pairs looked large, so these must not speak again: only
    the direction to test and the prior of the spread are kept, and that prior knows nothing of this row's
    stage one. A call needs three things: a change beyond the limit, p < .05 against "by at most 1 %", and
    against no change at all a level of which each look spends its share (`confirming`), so that of a thousand
    unchanged rows one is called, whether one row is compared or two hundred. A false discovery rate over one
    row would be p < .05.

    A row that was only too noisy was not picked for its change, so "no change" may rest on all its pairs, and
    dropping the first ones would bias what is reported the other way, see `FIRST_LOOK`. Called again with what
    is in `extra`, it adds the new pairs to the fresh ones. A row whose rerun was not made stays inconclusive.
    """
    if progress.mode != "ab":
        raise InputError("only an A/B comparison has a second stage")
    asked = progress.requests.keys() | progress.extra.keys()
    if strangers := [str(row.key) for row in _unique(fresh) if row.key not in asked]:
        raise InputError(f"rerun without being asked for: {', '.join(strangers)}")
    stage = progress.stage + 1
    reasons = [exclusion(row, "ab", options) for row in fresh]
    anew = [
        pooled(progress.fresh[row.key], row) if reason is None and row.key in progress.fresh else row
        for row, reason in zip(fresh, reasons, strict=True)
    ]
    both = [
        pooled(progress.first[row.key], row) if reason is None and row.key in progress.first else row
        for row, reason in zip(anew, reasons, strict=True)
    ]
    prior = history_prior([[progress.priors[row.key]] if row.key in progress.priors else [] for row in fresh])
    level = options.level / 2 ** (stage - 2)
    confirmed, seen = (_looked_at(rows, prior, options, level) for rows in (anew, both))
    new: dict[Key, Verdict] = {}
    extra: dict[Key, int] = {}
    for i, row in enumerate(anew):
        if (reason := reasons[i]) is not None:
            new[row.key] = msgspec.structs.replace(excluded(row, reason, options, "ab"), stage=stage)
            continue
        if (found := by_equivalence(both[i])) is not None:
            new[row.key] = msgspec.structs.replace(excluded(both[i], found[0], options, "ab"), stage=stage)
            if found[1]:
                extra[row.key] = found[1]
            continue
        shown, (assessed, estimate) = row, confirmed
        flagged = progress.directions.get(row.key)
        direction = flagged or (1 if assessed.change[i] > 0 else -1)
        why = significant(assessed, i, _certain(assessed, i, flagged, options, stage), options)
        if why is None:
            shown, (assessed, estimate) = both[i], seen
            why = equivalence(assessed, i, options)
        if why[0] == "inconclusive" and (pairs := _more_pairs(confirmed[0], i, confirmed[1], options)):
            extra[row.key] = pairs
        p = _p(assessed, i, direction)
        new[row.key] = decided(shown, why, i, assessed, estimate, options, stage=stage, p=p)
    verdicts = tuple(new.get(v.key) or not_rerun(v, progress.requests) for v in progress.verdicts)
    kept = {row.key: row for row in anew if row.key in extra}
    first = {key: row for key, row in progress.first.items() if key in extra}
    directions = progress.directions
    return Progress(verdicts, "ab", stage, {}, extra, directions, progress.priors, first, kept)


def stored(comparisons: Sequence[Comparison], options: Options = DEFAULTS) -> Progress:
    """Decides a run against the runs of unchanged code, where the base cannot be measured again.

    The unit is the run: within-run tests cry wolf in 30 to 40 % of rows, because a run has an effect of its
    own. So the new run's mean must fall outside Student's prediction interval of the old runs' means. A run
    whose own processes are further apart than that predicts is held to these: its mean is known no better.
    What alerts or stays inconclusive is in `requests`: an A/B decides it where the device is at hand.
    """
    rows = _unique(comparisons)
    reasons = [exclusion(row, "stored", options) for row in rows]
    usable = np.array([x is None and _by_ratio(row) for x, row in zip(reasons, rows, strict=True)], dtype=bool)
    new = trimmed(log_times([_costs(row, row.current.medians) for row in rows]))
    estimate = _prediction(new, log_times([_costs(row, unchanged_runs(row, options)) for row in rows]))
    seen = _assess(estimate, estimate.variance, estimate.df, options, options.level)
    shift = machine_shift(rows, estimate, usable, options)
    # Each direction is a family of its own, so that swapping the sides mirrors the verdicts. Over few rows a
    # false discovery rate asks for little: a row must be beyond doubt by itself, too.
    rejected = np.zeros(len(rows), dtype=bool)
    for p, none in ((seen.p_slower, seen.none_slower), (seen.p_faster, seen.none_faster)):
        rejected |= benjamini_hochberg(np.where(usable, p, np.nan), options.q) & (none <= options.false_calls)
    verdicts: list[Verdict] = []
    requests: dict[Key, int] = {}
    why: tuple[Kind, str]
    for i, row in enumerate(rows):
        if (reason := reasons[i]) is not None:
            verdict = excluded(row, reason, options, "stored")
        else:
            why = significant(seen, i, bool(rejected[i]), options) or equivalence(seen, i, options)
            why = why if shift is None else ("not comparable", shift)
            direction = 1 if seen.change[i] > 0 else -1
            verdict = decided(row, why, i, seen, estimate, options, mode="stored", p=_p(seen, i, direction))
        verdicts.append(verdict)
        if verdict.kind in ("regression", "warning", "improvement", "inconclusive"):
            requests[row.key] = options.pairs
    return Progress(tuple(verdicts), "stored", 1, requests)


def promised(pairs: int, options: Options = DEFAULTS) -> str:
    """What so many pairs of each row can settle, the first ones among them, in words."""
    fresh = min(pairs - options.pairs, options.maximum_pairs)
    if fresh < options.rerun_pairs:
        return f"too few to confirm a change, which takes {options.pairs} + {options.rerun_pairs}"
    noise = noise_settled(fresh, options)
    return f"which find {percent(options.fail_above, 1)} where processes vary by up to {percent(noise, 1)}"


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
    return costs(row.metric, values)


def costs(metric: Metric, values: Sequence[float]) -> Sequence[float]:
    """Values of which more is worse: inverses where the metric is better higher."""
    if metric.better != "higher":
        return values
    return [1 / x if x > 0 else math.nan for x in values]


def _prediction(new: Estimate, runs: Floats) -> Estimate:
    """The new run's distance from the mean of the runs, with its variance: as the runs predict it of one run, or
    as its own processes have it (Yuen's, over their number), whichever is larger."""
    count = np.isfinite(runs).sum(axis=1).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(runs, axis=1) / count
        variance = np.nansum(np.square(runs - mean[:, None]), axis=1) / (count - 1)
        variance = np.maximum(variance, FLOOR) * (1 + 1 / count)
        variance = np.fmax(variance, new.variance / new.count)
    return Estimate(new.mean - mean, variance, np.maximum(count - 1, 0), np.ones_like(count))


def _only(estimate: Estimate, usable: NDArray[np.bool_]) -> Estimate:
    return Estimate(estimate.mean, estimate.variance, np.where(usable, estimate.df, 0.0), estimate.count)


def _assess(
    estimate: Estimate, variance: Floats, df: Floats, options: Options, level: float, settled: float | None = None
) -> Assessment:
    # Rows without data pass through as NaN; they were excluded with a reason before.
    with np.errstate(invalid="ignore", divide="ignore"):
        count, df = np.maximum(estimate.count, 1), np.maximum(df, 1)
        return assess(estimate.mean, variance, count, df, options, level, settled)


def _looked_at(
    rows: list[Comparison], prior: Prior, options: Options, level: float
) -> tuple[Assessment, Estimate]:
    estimate = _paired(rows)
    variance, df = shrink(estimate, prior)
    return _assess(estimate, variance, df, options, level, FIRST_LOOK * level), estimate


def _certain(seen: Assessment, i: int, flagged: int | None, options: Options, stage: int) -> bool:
    """Whether fresh pairs confirm a change: in the direction it was flagged in, or, more strictly, in either."""
    for direction in (1, -1):
        none, tolerated = _p(seen, i, direction), _against_tolerated(seen, i, direction)
        if none <= confirming(options, stage, direction == flagged) and tolerated <= options.level:
            return True
    return False


def _p(seen: Assessment, i: int, direction: int) -> float:
    """One-sided against no change at all, in the direction to test."""
    return float(seen.none_slower[i] if direction > 0 else seen.none_faster[i])


def _against_tolerated(seen: Assessment, i: int, direction: int) -> float:
    return float(seen.p_slower[i] if direction > 0 else seen.p_faster[i])


def _more_pairs(seen: Assessment, i: int, estimate: Estimate, options: Options) -> int:
    """How many more fresh pairs an inconclusive row is worth; 0 for none."""
    made = int(estimate.count[i])
    wanted = int(seen.fresh[i]) - made
    if wanted < options.rerun_pairs and math.isfinite(seen.needed[i]):
        wanted = max(options.rerun_pairs, int(seen.needed[i]))
    return max(0, min(wanted, options.maximum_pairs - made))
