"""What a run says of convergence: each arm beside its base, seed by seed, at declared steps and along the curve.

The base of a case is PyTorch's own system; a replicate is a seed, in which all arms begin from the same weights
and see the same data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from ..store.journal import Journal
from ..store.metric import Equivalence, Summary, summarized
from ..store.record import EAGER, Case, Measurement, Record, Status
from .convergence import SHARE, Matched, Steps, along, at_step, matched, rate_tried, steps_ratio
from .equivalence import Equivalent

PRIMARY = "bits_per_byte"
CURVE, OVER = "bits_by_step", "validated_step"
RATE = "tokens_per_s"
KEPT = "fp8_share"
BESIDE = ("last_quarter_bits", "copying_bits", "needle_bits")
"""What is asked of a trained model beside its loss."""

Overall = Literal["equivalent", "better", "worse", "inconclusive", "failed"]


class Point(msgspec.Struct, frozen=True):
    """Base and arm after so many steps: means over the seeds that both have, in the metric's unit."""

    step: int
    base: float
    arm: float
    found: Equivalent

    @property
    def difference(self) -> float | None:
        """Mean over the seeds of the arm's relative difference to the base: what the interval is of. None where
        the base is 0, of which nothing is a fraction.
        """
        if self.found.change is not None:
            return self.found.change
        return self.arm / self.base - 1 if self.base else None


class Beside(msgspec.Struct, frozen=True):
    """A metric of `BESIDE` after the last step: means over the seeds that both have."""

    metric: str
    base: float
    arm: float
    found: Equivalent


class Arm(msgspec.Struct, frozen=True):
    """One arm of a case. `overall` is the worst of its points and of the 105 % rule; `failed` has no numbers."""

    case: str
    name: str
    base: str
    status: Status
    reason: str | None
    overall: Overall
    points: tuple[Point, ...] = ()
    steps: Steps | None = None
    matched: Matched | None = None
    beside: tuple[Beside, ...] = ()
    """What decides nothing of `overall`: tasks, and the end of long windows."""
    share: float | None = None
    """Of product operations in the precision that the arm is named by; None where it is named by none."""
    remarks: tuple[str, ...] = ()
    """What its rows say besides."""

    @property
    def named(self) -> bool:
        """Whether it bears the precision's name."""
        return self.share is None or self.share >= SHARE


def arms(journal: Journal) -> tuple[Arm, ...]:
    """All arms of a run beside their bases, in the order met; none where nothing converges in it."""
    rules = _rules(journal)
    found = []
    for name, by_arm in _cases(journal).items():
        base = _measured(by_arm.get(EAGER, []))
        found += [_arm(name, x, records, base, rules) for x, records in by_arm.items() if x != EAGER]
    return tuple(found)


def measurements(journal: Journal) -> dict[str, dict[str, dict[int, Measurement]]]:
    """By case, arm (the base first among them) and seed, what was measured of training to a loss."""
    found = {}
    for name, by_arm in _cases(journal).items():
        ordered = sorted(by_arm, key=lambda x: x != EAGER)
        found[name] = {x: own for x in ordered if (own := _measured(by_arm[x]))}
    return found


def differences(
    journal: Journal,
) -> dict[str, dict[str, dict[float, tuple[float, float, float]]]]:
    """By case, arm and step, the paired difference of losses to the base's between the bounds of its interval."""
    rule = _rules(journal).get(PRIMARY)
    found = {}
    for case, by_arm in measurements(journal).items():
        base = _curves(by_arm.get(EAGER, {}))
        if rule is not None and base:
            own = {x: along(base, _curves(y), rule) for x, y in by_arm.items() if x != EAGER}
            found[case] = {x: y for x, y in own.items() if y}
    return found


def _cases(journal: Journal) -> dict[str, dict[str, list[Record]]]:
    cases: dict[str, dict[str, list[Record]]] = {}
    for record in journal.records:
        if _judged(record.case):
            own = cases.setdefault(record.case.name, {})
            own.setdefault(record.implementation, []).append(record)
    return cases


def _judged(case: Case) -> bool:
    """Whether it trains to a loss over steps: somebody's own workload may have the metric alone."""
    return case.primary == PRIMARY and "N" in case.axes


def _rules(journal: Journal) -> dict[str, Equivalence]:
    return {x.name: x.judged for x in journal.header.metrics if isinstance(x.judged, Equivalence)}


NOT_TRIED = "not tried against others in this run"


def rates_tried(journal: Journal, beside: Iterable[Journal] = ()) -> dict[str, str | None]:
    """By case of the base, what is wrong with its learning rate: to be the only one tried is.

    Cases that differ in nothing but the rate are tries of one another. Each is known by its last losses, seed by
    seed: rates are compared over the seeds that all of them have (`rate_tried`). Tries of the runs `beside` count
    where these have the same seed and conditions, and case the same definition.
    """
    header = journal.header
    known = [x for x in beside if (x.header.seed, x.header.key) == (header.seed, header.key)]
    losses: dict[tuple[object, ...], dict[float, dict[int, float]]] = {}
    cases: dict[str, Case] = {}
    for record in itertools.chain(journal.records, *(x.records for x in known)):
        tried = _judged(record.case) and "lr" in record.case.options
        if not tried or record.implementation != EAGER or record.measurement is None:
            continue
        case = record.case
        own = losses.setdefault(_but_for_rate(case), {}).setdefault(float(case.options["lr"]), {})
        own.setdefault(record.replicate, summarized(record.measurement.samples[PRIMARY], "last"))
        cases.setdefault(case.name, case)
    asked = {x.case.name for x in journal.records}
    return {
        name: rate_tried(all_, float(case.options["lr"])) if len(all_) > 1 else NOT_TRIED
        for name, case in cases.items()
        if name in asked and (all_ := losses[_but_for_rate(case)])
    }


def _but_for_rate(case: Case) -> tuple[object, ...]:
    return (case.spec, *case.but_for("lr"))


def _measured(records: list[Record]) -> dict[int, Measurement]:
    return {x.replicate: x.measurement for x in records if x.measurement is not None}


def _arm(
    case: str, name: str, records: list[Record], base: Mapping[int, Measurement], rules: Mapping[str, Equivalence]
) -> Arm:
    bad = next((x for x in records if x.status == "incorrect"), None)
    own = _measured(records)
    if bad is not None or not own or not base:
        bad = bad or next((x for x in records if x.status != "ok"), None)
        status: Status = bad.status if bad else "ok"
        reason = bad.reason if bad else f"{EAGER}, the base, was not measured"
        return Arm(case, name, EAGER, status, reason, "failed")
    points = _points(records[0].case.axes["N"], base, own, rules)
    curves = _curves(base), _curves(own)
    steps = steps_ratio(*curves)
    share = next((x.samples[KEPT][-1] for x in own.values() if KEPT in x.samples), None)
    return Arm(
        case,
        name,
        EAGER,
        "ok",
        None,
        _overall([x.found.kind for x in points], steps.kind),
        points,
        steps,
        matched(*curves, _values(base, RATE, "median"), _values(own, RATE, "median")),
        tuple(_beside(base, own, rules)),
        share,
        tuple(dict.fromkeys(y for x in own.values() for y in x.remarks)),
    )


def _beside(
    base: Mapping[int, Measurement], own: Mapping[int, Measurement], rules: Mapping[str, Equivalence]
) -> Iterator[Beside]:
    for metric, rule in rules.items():
        before, after = _values(base, metric, "last"), _values(own, metric, "last")
        if metric in BESIDE and (both := before.keys() & after.keys()):
            means = [sum(side[x] for x in both) / len(both) for side in (before, after)]
            yield Beside(metric, means[0], means[1], at_step(before, after, rule))


def _points(
    last: int, base: Mapping[int, Measurement], own: Mapping[int, Measurement], rules: Mapping[str, Equivalence]
) -> tuple[Point, ...]:
    """The declared steps in their order, and the last."""
    points = []
    for metric, rule in rules.items():
        before, after = _values(base, metric, "last"), _values(own, metric, "last")
        both = before.keys() & after.keys()
        if metric.partition("@")[0] == PRIMARY and both:
            means = [sum(side[x] for x in both) / len(both) for side in (before, after)]
            step = last if metric == PRIMARY else int(metric.rpartition("@")[2])
            points.append(Point(step, means[0], means[1], at_step(before, after, rule)))
    return tuple(sorted(points, key=lambda x: x.step))


def _values(side: Mapping[int, Measurement], metric: str, summary: Summary) -> dict[int, float]:
    return {seed: summarized(x.samples[metric], summary) for seed, x in side.items() if metric in x.samples}


def _curves(side: Mapping[int, Measurement]) -> dict[int, tuple[tuple[float, float], ...]]:
    return {
        seed: tuple(zip(x.samples[OVER], x.samples[CURVE], strict=True))
        for seed, x in side.items()
        if CURVE in x.samples
    }


def _overall(points: list[str], steps: str) -> Overall:
    """The worst: one step at which it is worse, or too many steps, and it is worse."""
    if "worse" in points or steps == "exceeded":
        return "worse"
    if "inconclusive" in points or steps == "inconclusive":
        return "inconclusive"
    return "better" if "better" in points else "equivalent"
