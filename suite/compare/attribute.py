"""What a slower row comes from, measured: old and new code, environment and tuned configuration in turns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from ...registry.detection.attribution import CAUSES, Arm, Attribution, arms, attribute, whole
from ...registry.detection.comparison import Options
from ...registry.detection.decision import costs
from ...registry.detection.pairing import side
from ...registry.detection.verdict import Verdict
from ...registry.store.home import Home
from ...registry.store.journal import read
from ...registry.store.metric import LATENCY
from ...registry.store.processes import by_row, tunings
from ...registry.store.record import DeviceKind, Key, Record, Request
from ..plan import Plan
from ..run.supervisor import Run, new_run
from .interleaved import Tell, Tree, in_turns, side_run

SEED = 1000
"""Added to the comparison's seed: other inputs than those by which the rows were found."""

Tuned: TypeAlias = Mapping[Key, Mapping[str, str]]


@dataclass
class Factorial:
    """The arms of an attribution, measured in rounds. `base` and `current` are the trees of the comparison.

    With `same_code`, or where both run in one environment, that factor is left out. `until` is when measuring
    ends, by `time.monotonic`.
    """

    base: Tree
    current: Tree
    plan: Plan
    device: DeviceKind
    home: Home
    options: Options
    seed: int
    until: float
    tell: Tell
    same_code: bool = False
    _refused: dict[tuple[Arm, Key], str] = field(default_factory=dict, init=False)
    _pass: int = field(default=0, init=False)

    def attribute(
        self, verdicts: Iterable[Verdict], records: tuple[Sequence[Record], Sequence[Record]]
    ) -> list[Attribution]:
        """The causes of each verdict's change. `records` are both sides', for what they tuned."""
        asked = {x.key: x for x in verdicts}
        here = set.intersection(*({x.identity for x in tree.cells} for tree in (self.base, self.current)))
        found = self._known({key: x for key, x in asked.items() if key in here}, records)
        nothing = "undecided: it cannot be measured here"
        return [found.get(key) or Attribution(key, nothing) for key in asked]

    def _known(
        self, known: Mapping[Key, Verdict], records: tuple[Sequence[Record], Sequence[Record]]
    ) -> dict[Key, Attribution]:
        before, after = (winners(x) for x in records)
        retuned = {
            key: before[key] for key in known if key in before and key in after and before[key] != after[key]
        }
        if not known or not (not self.same_code or self._environment or retuned):
            why = "undecided: both sides have the same code, environment and tuned configuration"
            return {key: Attribution(key, why) for key in known}
        # With one thing that differs there is nothing to tell apart, and nothing to measure.
        found = {}
        for key, verdict in known.items():
            factors = {"code": not self.same_code, "environment": self._environment, "tuning": key in retuned}
            causes = [cause for cause in CAUSES if factors.get(cause)]
            if len(causes) == 1 and verdict.change is not None:
                found[key] = whole(verdict, causes[0])
        known = {key: x for key, x in known.items() if key not in found}
        return found | (self._told_apart(known, retuned, before) if known else {})

    def _told_apart(
        self, known: Mapping[Key, Verdict], retuned: Collection[Key], before: Tuned
    ) -> dict[Key, Attribution]:
        # What was autotuned at all is held to the old choice, or it would be tuned anew in every process.
        held = {key: before[key] for key in known if key in before}
        found = self._measure(known, sorted(set(retuned) & known.keys()), held)
        unable = [key for key in held if any(self._refused.get((arm, key)) for arm in self._arms(key in retuned))]
        if unable:
            reasons = {key: self._refused_why(key) for key in unable}
            again = self._measure({key: known[key] for key in unable}, [], {})
            found |= {
                key: msgspec.structs.replace(x, notes=(f"tuning is part of the code here: {reasons[key]}",))
                for key, x in again.items()
            }
        return found

    @property
    def _environment(self) -> bool:
        return self.base.python != self.current.python

    def _arms(self, tuning: bool) -> list[Arm]:
        return arms(not self.same_code, self._environment, tuning)

    def _measure(
        self, known: Mapping[Key, Verdict], retuned: Sequence[Key], held: Tuned
    ) -> dict[Key, Attribution]:
        """All arms in turns; each row's arms as far as it has them."""
        self._pass += 1
        rounds = self.options.rerun_pairs
        wanted = dict.fromkeys(known, rounds)
        chosen = self._arms(bool(retuned))
        names = {arm: new_run() for arm in chosen}
        runs: dict[Arm, Run] = {}
        for arm in chosen:
            others = ",".join(name for other, name in names.items() if other != arm)
            rows = {key: rounds for key in wanted if not arm.tuning or key in retuned}
            runs[arm] = self._run(arm, rows, names[arm], others, {} if arm.tuning else held)
        seed = f"{self.seed + SEED}/{self._pass}"
        made = in_turns(self, list(runs.values()), wanted, seed, "attribution, round")
        journals = {arm: read(run.path) for arm, run in runs.items()} if made else {}
        groups = {arm: by_row(journals[arm].records) if made else {} for arm in runs}
        metrics = next((x.header.metrics for x in journals.values()), ())
        self._refused = {
            (arm, key): x.reason or x.status
            for arm, rows in groups.items()
            for key, found in rows.items()
            for x in found
            if x.status == "unsupported" and key in held and not arm.tuning
        }
        out = {}
        for key, verdict in known.items():
            mine = self._arms(key in retuned)
            metric = next((x for x in metrics if x.name == verdict.metric), LATENCY)
            times = {
                arm: costs(metric, side(groups[arm].get(key, []), made, metrics).medians) or (math.nan,) * made
                for arm in mine
            }
            out[key] = attribute(key, times, self.options, verdict.noise)
        return out

    def _refused_why(self, key: Key) -> str:
        return next(reason for (_, row), reason in self._refused.items() if row == key)

    def _run(self, arm: Arm, rows: Mapping[Key, int], name: str, others: str, held: Tuned) -> Run:
        code, environment = (self.current if x else self.base for x in (arm.code, arm.environment))
        tree = replace(code, python=environment.python)
        # Stage 2: it holds only rows under suspicion, and must not stand for its commit's runs.
        request = Request(partner=others, stage=2, arm=str(arm))
        if held:
            pinned = {str(key): chosen for key, chosen in held.items() if key in rows}
            request = msgspec.structs.replace(request, pinned=pinned)
        run = side_run(self, tree, rows, self.seed + SEED + self._pass, name, request)
        run.pinned = {x.identity: held[x.identity] for x in run.cells if x.identity in held}
        return run


def winners(records: Iterable[Record]) -> dict[Key, dict[str, str]]:
    """By row, each autotuned kernel with the configuration that won in most processes."""
    seen = {key: tunings(own) for key, own in by_row(records).items()}
    return {
        key: {kernel: counts.most_common(1)[0][0] for kernel, counts in sorted(kernels.items())}
        for key, kernels in seen.items()
        if kernels
    }
