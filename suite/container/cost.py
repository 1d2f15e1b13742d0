"""What a container costs: the same cells in turns on bare metal and in an image, fresh processes both, paired.

It is the comparison of commits with the image in place of the commit: same pairing, same decision, same
verdicts. The two sides differ in the image alone; where they differ in more (another torch, another driver),
no verdict is given and the difference is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ...registry.detection.comparison import Comparison, Options, Side
from ...registry.detection.decision import Progress, decide
from ...registry.detection.pairing import differing_in, pair
from ...registry.errors import HarnessError
from ...registry.figures import counted, seconds
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import DeviceKind, Header, Key, Record
from ..catalog import Catalog
from ..compare.interleaved import balanced
from ..plan import Plan
from ..run.repro import to_toml
from .launch import RESULTS, Job, Limits
from .session import Session

NOTED = ("python",)
"""Conditions that come with an image: they may differ, and each row names both values."""
ALLOWED = ("image_digest", *NOTED)


@dataclass
class Cost:
    """A comparison under way. `until` is when measuring ends, by `time.monotonic`."""

    session: Session
    plan: Plan
    catalog: Catalog
    device: DeviceKind
    implementations: Sequence[str]
    home: Home
    options: Options
    seed: int
    until: float
    limits: Limits
    tell: Callable[[str], None]

    def compare(self) -> Progress:
        """The whole procedure: bare metal is the base, the container the current side."""
        cells = self.plan.cells(self.catalog, self.device, self.implementations)
        keys = sorted(
            {
                Key(x.case.operator, x.case.name, x.implementation.name, x.cache)
                for x in cells
                if x.implementation.unavailable(self.device) is None
            }
        )
        first = self._measure(dict.fromkeys(keys, self.options.pairs))
        found = {x.key for x in first}
        first += [Comparison(key, Side(), Side()) for key in keys if key not in found]
        return decide(first, self._measure, self.options)

    def _measure(self, wanted: Mapping[Key, int]) -> list[Comparison]:
        """So many fresh pairs of each row; those that the time did not suffice for are left out."""
        count = max(wanted.values(), default=0)
        chosen = {(x.operator, x.case) for x in wanted}
        plan = replace(
            self.plan, cases=tuple(x for x in self.plan.cases if (x.operator, x.name) in chosen), replicates=1
        )
        names = sorted({x.implementation for x in wanted})
        bare: list[Journal] = []
        contained: list[Journal] = []
        orders = balanced(2, str(self.seed))
        took = 0.0
        for number in range(count):
            begin = time.monotonic()
            if begin + took > self.until:
                self.tell(f"the budget ended after {number} of {count} pairs")
                break
            self.seed += 1
            left = f", {seconds(took * (count - number))} left of this stage" if number else ""
            self.tell(f"pair {number + 1} of {count}: {counted(len(wanted), 'row')}{left}")
            sides = [(self._bare, bare), (self._contained, contained)]
            for measure, journals in (sides[i] for i in next(orders)):
                journals.append(measure(plan, names))
            took = time.monotonic() - begin
        if not bare:
            return []
        base, current = _joined(bare), _joined(contained)
        rows = pair(base, current, allowed=ALLOWED, controls=())
        noted = differing_in(NOTED, base[0], current[0])
        return [msgspec.structs.replace(x, notes=(*x.notes, *noted)) for x in rows if x.key in wanted]

    def _arguments(self, plan: str, names: Sequence[str]) -> list[str]:
        narrowed = [x for name in names for x in ("--implementation", name)]
        return [
            "run",
            "--journal-only",
            "--side",
            "--plan",
            plan,
            *narrowed,
            "--seed",
            str(self.seed),
            "--device",
            self.device,
        ]

    def _bare(self, plan: Plan, names: Sequence[str]) -> Journal:
        file = self.home.folder / "plans" / "container-cost" / f"{plan.name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_toml(plan, self.catalog))
        before = set(self.home.runs())
        command = [sys.executable, "-m", "kernelmark.suite", *self._arguments(str(file), names)]
        environment = {**os.environ, "KERNELMARK_HOME": str(self.home.folder), "PYTHONSAFEPATH": "1"}
        if self.session.gpus:
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi and the container number them
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(x) for x in self.session.gpus)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        made = sorted(set(self.home.runs()) - before)
        if done.returncode != 0 or not made:
            raise HarnessError(f"measuring outside the container failed: {(done.stderr or done.stdout).strip()}")
        return read(self.home.journal(made[-1]))

    def _contained(self, plan: Plan, names: Sequence[str]) -> Journal:
        name = f"plan/{plan.name}.toml"
        job = Job(
            self._arguments(f"{RESULTS}/{name}", names),
            self.session.gpus,
            {name: to_toml(plan, self.catalog).encode()},
            self.limits,
            quiet=True,
        )
        ended, runs = self.session.measure(job)
        if ended.code == 130:
            raise KeyboardInterrupt
        if ended.code != 0 or not runs:
            raise HarnessError(
                f"measuring in the container failed with exit code {ended.code}: {ended.said.strip()}"
            )
        return self.home.load(runs[-1])


def _joined(journals: Sequence[Journal]) -> tuple[Header, list[Record]]:
    """Runs of one process each as one run of many; the conditions of all must be those of the first."""
    first = journals[0].header
    for journal in journals[1:]:
        if journal.header.key != first.key:
            raise HarnessError(f"the conditions changed between runs {first.run} and {journal.header.run}.")
    records = [
        msgspec.structs.replace(record, replicate=number)
        for number, journal in enumerate(journals)
        for record in journal.records
    ]
    return msgspec.structs.replace(first, replicates=len(journals)), records
