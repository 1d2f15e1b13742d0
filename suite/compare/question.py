"""What is asked of two commits, and how it is answered: from stored runs, by an A/B, or by both."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import msgspec

from ...registry.detection import decision
from ...registry.detection.comparison import Options
from ...registry.detection.comparison_report import ComparisonReport
from ...registry.detection.decision import Progress
from ...registry.detection.verdict import Verdict
from ...registry.errors import InputError, KernelmarkError
from ...registry.figures import counted
from ...registry.store.home import Home
from ...registry.store.index import Index
from ...registry.store.record import Key, Record
from ..catalog import Catalog
from ..choice import Choice
from ..environments import Environment, ours
from ..plan import BUILTIN, TIMED, Plan
from ..run.fingerprint import device_named
from ..shards import cut
from .attribute import Factorial
from .bisect import Bisection
from .interleaved import Interleaved, NotMeasurable, Tell, Tree, kernel_providers, rooms, rooted, trees
from .revisions import Checkout, Revision
from .stored import Stored, decided, find

Records: TypeAlias = tuple[Sequence[Record], Sequence[Record]]


class NothingStored(KernelmarkError):
    """The stored runs do not answer, and nothing may or can be measured."""

    exit_code = 4


@dataclass(frozen=True)
class Answer:
    """The verdicts, with the records that they rest on, what was measured, and the current side's runs.

    `named` is the plan's name, also where its runs do not say what it asked for.
    """

    progress: Progress
    records: Records = ((), ())
    plan: Plan | None = None
    runs: tuple[str, ...] = ()
    named: str | None = None


@dataclass(frozen=True)
class Question:
    """What is asked, with everything that narrows it."""

    checkout: Checkout
    base: Revision
    current: Revision
    operators: tuple[str, ...]
    implementations: tuple[str, ...]
    device: str | None
    plan: str | None
    shard: tuple[int, int] | None
    """Which part of the plan, of how many; None for all of it."""
    options: Options
    decided_by: float
    """When measuring for the verdicts ends, by `time.monotonic`."""
    until: float
    """When all measuring ends."""
    seed: int
    environments: tuple[Environment, Environment]
    tell: Tell = field(compare=False)
    measure_same: bool = False
    """Whether rows whose code is the same are measured like any other."""

    def answer(self, mode: str, home: Home, index: Index) -> Answer:
        """The verdicts, from stored runs or an A/B."""
        if mode == "ab":
            return self._measured(home, index)
        found = self._stored(index)
        if isinstance(found, str):
            if mode == "stored":
                raise NothingStored(f"{found}. --mode ab measures both.")
            if why := self._cannot_measure(None):
                raise NothingStored(f"{found}, and {why}.")
            self.tell(f"{found}: measuring both")
            return self._measured(home, index)
        self.tell(
            f"stored: run {found.base.header.run} of the baseline, {', '.join(found.runs)} of the current side"
        )
        records = found.base.records, found.current.records
        cannot = self._cannot_measure(found.current.header.device)
        if mode == "auto" and cannot is None:
            if found.differing:
                self.tell(f"the stored runs differ in {'; '.join(found.differing)}: measuring both")
                return self._measured(home, index)
            if len(found.past) < self.options.minimum_runs:
                self.tell(
                    f"{len(found.past)} stored runs of unchanged code, {self.options.minimum_runs} are needed: "
                    f"measuring both"
                )
                return self._measured(home, index)
        progress = self._decided(found, index)
        if mode == "auto" and cannot is None and not progress.verdicts:
            self.tell("the stored runs have no row in common that was asked for: measuring both")
            return self._measured(home, index)
        if mode == "auto" and cannot is None and progress.requests:
            return self._settled(progress, records, found, home, index)
        return self._of_stored(progress, records, found)

    def settling(self, answer: Answer) -> str | None:
        """The command that asks the same rows of an A/B, by the same thresholds, where stored runs leave something
        open; None where they leave nothing. Stored runs have no environment that was asked for.
        """
        if answer.progress.mode == "ab" or not any(x.kind == "inconclusive" for x in answer.progress.verdicts):
            return None
        plan, note = self.plan or answer.named, ""
        if self.plan is None and plan is not None and (plan not in BUILTIN or plan in TIMED):
            # Of a file's plan a run bears the name alone, and a comparison takes no plan with a limit of its own.
            plan, note = "FILE.toml", f", with plan {plan!r} as a file{' without its limit' * (plan in TIMED)}"
        usual, mine = Options(), self.options
        words = ["regression_detector", "--baseline", self.base.name, "--current", self.current.name]
        words += ["--mode", "ab"]
        words += ["--plan", plan] if plan else []
        for name, values in (("--operator", self.operators), ("--implementation", self.implementations)):
            words += [x for value in values for x in (name, value)]
        words += ["--shard", f"{self.shard[0]}/{self.shard[1]}"] if self.shard else []
        words += ["--device", self.device] if self.device else []
        if (mine.fail_above, mine.warn_above) != (usual.fail_above, usual.warn_above):
            words += ["--fail-above", f"{mine.fail_above:.6g}", "--warn-above", f"{mine.warn_above:.6g}"]
        words += ["--measure-same"] if self.measure_same else []
        return f"What is inconclusive is settled by measuring both{note}: {shlex.join(words)}"

    def _of_stored(self, progress: Progress, records: Records, found: Stored) -> Answer:
        header = found.current.header
        return Answer(progress, records, Plan.of(header), found.runs, header.plan)

    def _settled(self, progress: Progress, records: Records, found: Stored, home: Home, index: Index) -> Answer:
        """What the stored runs left open, decided by an A/B, provided that it is made under their conditions."""
        self.tell(f"the stored runs leave {counted(len(progress.requests), 'row')} to an A/B")
        stored, header = self._of_stored(progress, records, found), found.current.header
        try:
            ab = self._interleaved(home, index, stored.plan, progress.requests)
        except NotMeasurable as error:
            self.tell(f"the stored runs' verdicts stand: {error}")
            return stored
        if ab.header is None or ab.header.key != header.key:
            self.tell("the stored runs' verdicts stand: the A/B was made under other conditions than theirs")
            return stored
        merged = decision.replace(progress, ab.progress.verdicts)
        return Answer(merged, ab.records, stored.plan, (*stored.runs, *ab.runs))

    def _stored(self, index: Index) -> Stored | str:
        plan = None if self.plan is None else Path(self.plan).stem  # runs of a file's plan bear its name
        return find(index, self.checkout, self.base, self.current, self._rooms, self.options, self.device, plan)

    def _decided(self, found: Stored, index: Index) -> Progress:
        mine = kernel_providers(self._rooted)
        shown = self.implementations or sorted(mine)
        return decided(found, index, self.options, self.operators, shown, mine if self._shared_baselines else None)

    @property
    def _rooms(self) -> list[str]:
        return rooms(self._rooted.values())

    @property
    def _rooted(self) -> Mapping[str, str]:
        return rooted(Catalog.default(), self.checkout)

    @property
    def _shared_baselines(self) -> bool:
        """Whether the code of other libraries' rows is the same in both commits, which makes them witnesses."""
        return self._same_code([x for x in self._rooms if x.rpartition("/")[2] == "baselines"])

    def _same_code(self, folders: Sequence[str]) -> bool:
        """Whether both revisions hold the same in these folders."""
        code = self.checkout.code([self.base.commit, self.current.commit], folders)
        return not self.current.dirty and not self.base.dirty and len(set(code.values())) == 1

    def _cannot_measure(self, device: str | None) -> str | None:
        """Why there can be no A/B here of runs made on a device."""
        if find_spec("torch") is None:
            return "this machine cannot measure: torch is not installed"
        here = device_named(self.device)
        if device is not None and device != here:
            return f"this machine measures on {here} and the stored runs are of {device}"
        return None

    def _measured(self, home: Home, index: Index) -> Answer:
        ab = self._interleaved(home, index, None, None)
        return Answer(ab.progress, ab.records, None, tuple(ab.runs))

    def _interleaved(
        self, home: Home, index: Index, plan: Plan | None, only: Collection[Key] | None
    ) -> Interleaved:
        """A finished A/B: of the plan asked for, or of these rows of a given plan."""
        with self._trees(plan, self.base, self.current) as (plan, base, current):
            ab = Interleaved(
                base=base,
                current=current,
                plan=plan,
                device=device_named(self.device),
                home=home,
                index=index,
                options=self.options,
                seed=self.seed,
                until=self.decided_by,
                tell=self.tell,
                # Another library in another environment is no witness of the machine.
                shared_baselines=self._shared_baselines and base.python == current.python,
                measure_same=self.measure_same,
            )
            ab.compare(only)
        return ab

    @contextlib.contextmanager
    def _trees(self, plan: Plan | None, first: Revision, second: Revision) -> Iterator[tuple[Plan, Tree, Tree]]:
        """Copies of two revisions, ready to be measured in the environments of the two sides."""
        device = device_named(self.device)
        catalog = Catalog.default()
        places = self._rooted
        if plan is None:
            chosen = Choice(self.plan or "quick", self.operators, self.implementations)
            plan = chosen.unbudgeted(catalog, device, "a comparison has a --budget of its own.")
            if self.shard is not None:
                plan = cut(plan, plan.cells(catalog, device, self.implementations), self.shard, by_seed=False)
        with self.checkout.copies({"base": first, "current": second}) as folders:
            sides = [(first, folders["base"]), (second, folders["current"])]
            base, current = trees(sides, places, catalog, plan, device, self.implementations)
            self._refuse_apart(base, current)
            read = {x.folder for x in catalog.roots[1:]} | {x.parent for x in folders.values()}
            with contextlib.ExitStack() as held:
                pythons = {x: held.enter_context(x(sorted(read))) for x in dict.fromkeys(self.environments)}
                mine, theirs = (pythons[x] for x in self.environments)
                yield plan, replace(base, python=mine), replace(current, python=theirs)

    def _refuse_apart(self, *sides: Tree) -> None:
        """Raises `InputError` for what does not run in the environments asked for."""
        apart = {x.implementation.name for y in sides for x in y.cells if x.implementation.environment != "core"}
        if apart and self.environments != (ours, ours):
            raise InputError(
                f"{', '.join(sorted(apart))}: run in environments of their own, which --base-environment and "
                f"--current-environment do not exchange."
            )

    def explained(
        self, report: ComparisonReport, answer: Answer, home: Home, index: Index, attribute: bool, bisect: bool
    ) -> ComparisonReport:
        """The report with what became slower attributed to its causes and to its commit, as far as is asked."""
        if (why := self._cannot_measure(None)) is not None:
            raise NothingStored(f"to attribute or bisect is to measure, and {why}.")
        if attribute:
            report = self._attributed(report, answer, home)
        if bisect:
            report = self._bisected(report, answer, home, index)
        return report

    def _attributed(self, report: ComparisonReport, answer: Answer, home: Home) -> ComparisonReport:
        with self._trees(answer.plan, self.base, self.current) as (plan, base, current):
            factorial = Factorial(
                base=base,
                current=current,
                plan=plan,
                device=device_named(self.device),
                home=home,
                options=self.options,
                seed=self.seed,
                until=self.until,
                tell=self.tell,
                same_code=self._same_code(self._rooms),
            )
            found = tuple(factorial.attribute(report.slower, answer.records))
        remarks = report.remarks
        if base.python == current.python:
            remarks += ("Both sides ran in one environment, so only code and tuning were told apart.",)
        return msgspec.structs.replace(report, attributions=found, remarks=remarks)

    def _bisected(self, report: ComparisonReport, answer: Answer, home: Home, index: Index) -> ComparisonReport:
        def compare(
            base: Revision, current: Revision, rows: Sequence[Key], options: Options
        ) -> Mapping[Key, Verdict]:
            # One environment for all: what is asked is which commit did it.
            mine = (self.environments[1], self.environments[1])
            step = replace(
                self, base=base, current=current, options=options, environments=mine, decided_by=self.until
            )
            ab = step._interleaved(home, index, answer.plan, rows)
            return {x.key: x for x in ab.progress.verdicts}

        bisection = Bisection(
            checkout=self.checkout,
            base=self.base,
            current=self.current,
            rooms=self._rooms,
            compare=compare,
            options=self.options,
            until=self.until,
            tell=self.tell,
        )
        return msgspec.structs.replace(report, findings=tuple(bisection.find(report.slower)))
