"""The interleaved A/B: two commits measured in turns on one device, fresh processes in balanced order.

Nothing but `kernels/` and `baselines/` comes from a commit; operators, inputs, timers and the correctness
gate are those of the harness that runs, for both sides. Both sides of a pair get the same seed, hence the
same inputs and the same order of cells. Every side of every stage is a run with a journal of its own.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from ...registry.detection.comparison import Comparison, History, Options, Side
from ...registry.detection.decision import FEW_OPERATORS, Progress, decide, promised
from ...registry.detection.earlier import noise_seen, with_noise
from ...registry.detection.pairing import differing, pair
from ...registry.errors import InputError, KernelmarkError
from ...registry.figures import counted, seconds
from ...registry.store.home import Home
from ...registry.store.index import Index
from ...registry.store.journal import Journal, read
from ...registry.store.record import EAGER, PROVIDER, VERSION, DeviceKind, Header, Key, Record, Request
from ..catalog import Catalog
from ..environments import interpreter
from ..plan import Cell, Plan
from ..run.forkserver import ForkServers
from ..run.process import OutOfTime
from ..run.supervisor import Run, new_run
from .revisions import ROOMS, Checkout, Revision
from .same_code import SAME_MACHINE_CODE, SAME_SOURCE, launched, same, shows_launches

Tell: TypeAlias = Callable[[str], None]
WITNESSES = 6
"""Rows of PyTorch that are measured beside those of few operators."""


class NotMeasurable(KernelmarkError):
    """A commit has nothing to measure, so there is nothing to compare."""

    exit_code = 4


@dataclass(frozen=True)
class Tree:
    """One side of the comparison: a commit and what of the plan it can measure.

    `code` maps roots of the catalog to the folders of this commit. `python` is the interpreter of the
    environment that its code runs in; None means ours. `witnesses` were not asked for: they show whether the
    machine changed, where the rows asked for are of too few operators to show it themselves.
    """

    revision: Revision
    code: Mapping[str, str]
    catalog: Catalog
    cells: tuple[Cell, ...]
    python: Path | None = None
    witnesses: tuple[Cell, ...] = ()

    def interpreter(self, name: str) -> Path | None:
        """The interpreter of a named environment: only the core one is exchanged."""
        return self.python if self.python is not None and name == "core" else interpreter(name)


def trees(
    sides: Sequence[tuple[Revision, Path]],
    rooted: Mapping[str, str],
    catalog: Catalog,
    plan: Plan,
    device: DeviceKind,
    implementations: Sequence[str],
) -> list[Tree]:
    """The tree of each revision in its folder; no `implementations` means the kernels that the commits hold.

    Raises `InputError` if none has what is asked for, and `NotMeasurable` if one has not.
    """
    found: list[Tree] = []
    lacking: list[KernelmarkError] = []
    for revision, folder in sides:
        code = {root: str(folder / relative) for root, relative in rooted.items()}
        its = catalog.with_code(code)
        try:
            there = {x.provider for x in its.implementations}
            ours = sorted({PROVIDER} | kernel_providers(rooted) & there)
            asked = plan.cells(its, device, implementations or ours)
        except InputError as error:
            lacking.append(error)
            continue
        # What needs another device has no time on either side, and what no commit holds cannot have changed.
        cells = tuple(
            x
            for x in asked
            if device in x.implementation.devices
            if x.implementation.held_by(rooted)
            if catalog.definition(x.case.operator).spec(x.case) == x.case.spec  # a stored plan's may be another
        )
        if cells:
            found.append(Tree(revision, code, its, cells, witnesses=_witnesses(cells, its, plan, device)))
        else:
            lacking.append(NotMeasurable(f"{revision} has nothing that runs on {device} with these filters."))
    if len(lacking) == len(sides):
        raise lacking[0]
    if lacking:
        here = found[0].revision
        raise NotMeasurable(f"only {here} has what is asked for, the other has not: {lacking[0]}")
    return found


def _witnesses(cells: Sequence[Cell], catalog: Catalog, plan: Plan, device: DeviceKind) -> tuple[Cell, ...]:
    """Rows of PyTorch beside those of few operators, spread over the cases; none where they are asked for."""
    if len({x.case.operator for x in cells}) >= FEW_OPERATORS:
        return ()
    if any(x.implementation.name == EAGER for x in cells):
        return ()
    shown = {(x.case.operator, x.case.name) for x in cells}
    there = {
        (x.case.operator, x.case.name): x
        for x in replace(plan, only={}).cells(catalog, device)
        if x.implementation.name == EAGER and (x.case.operator, x.case.name) in shown
        if device in x.implementation.devices and x.implementation.environment == "core"
    }
    found = list(there.values())
    step = max(1, -(-len(found) // WITNESSES))
    return tuple(found[::step])


def kernel_providers(roots: Collection[str]) -> frozenset[str]:
    """The providers of the kernels that roots hold: ours, and a root's own name where ours is taken."""
    return frozenset({PROVIDER, *(Path(x).name for x in roots)})


def rooted(catalog: Catalog, checkout: Checkout) -> dict[str, str]:
    """The catalog's roots whose code the checkout's commits hold, each with its place in the checkout."""
    out = {}
    for root in catalog.roots:
        if root.folder.is_relative_to(checkout.folder):
            relative = str(root.folder.relative_to(checkout.folder))
            if any(checkout.tracks(room) for room in rooms([relative])):
                out[str(root.folder)] = relative
    if not out and (checkout.folder / "suite" / "operators").is_dir() and checkout.tracks("kernels"):
        out[str(catalog.roots[0].folder)] = "."  # a checkout of this program beside an installed one
    if not out:
        raise InputError(
            f"{checkout.folder} holds no kernels that this program would measure. Go to a checkout of kernelmark, "
            f"or name a folder with kernels/ of this one in KERNELMARK_PATH."
        )
    return out


def rooms(places: Collection[str]) -> list[str]:
    """The folders of a checkout that a commit's code lies in."""
    return [room if place == "." else f"{place}/{room}" for place in places for room in ROOMS]


@dataclass
class Interleaved:
    """An A/B under way. `until` is when measuring ends, by `time.monotonic`.

    With `shared_baselines` both commits have the same code of other libraries' rows, which are then witnesses
    of the machine.
    """

    base: Tree
    current: Tree
    plan: Plan
    device: DeviceKind
    home: Home
    index: Index
    options: Options
    seed: int
    until: float
    tell: Tell
    shared_baselines: bool = False
    measure_same: bool = False
    """Whether rows whose code is the same are measured like any other: an A/A."""
    header: Header | None = field(default=None, init=False)
    """Of the first run, once there is one."""
    records: tuple[Sequence[Record], Sequence[Record]] = field(default=((), ()), init=False)
    """What stage one measured on either side."""
    progress: Progress = field(default=Progress(()), init=False)
    """How it ended."""
    runs: list[str] = field(default_factory=list, init=False)
    """Of the current side, as far as they were begun."""
    _stage: int = field(default=0, init=False)
    _same: dict[Key, str] = field(default_factory=dict, init=False)
    """Rows of which both sides have the same code, and what of it was compared."""

    def compare(self, only: Collection[Key] | None = None) -> None:
        """The whole procedure, on all rows or on those named."""
        rows = {cell.identity for tree in (self.base, self.current) for cell in tree.cells}
        chosen = sorted(rows if only is None else rows & set(only))
        if not chosen:
            raise NotMeasurable("none of the rows in question can be measured here.")
        self._same = dict.fromkeys(self._of_same_source(chosen), SAME_SOURCE)
        if self._same:
            self.tell(
                f"the same code on both sides: {counted(len(self._same), 'row')}, of which one pair is measured"
            )
        hidden = self._witnesses - set(chosen) if len(self._same) < len(chosen) else set()
        pairs = {key: 1 if key in self._same else self.options.pairs for key in (*chosen, *sorted(hidden))}
        first = self._measure(pairs)
        shown = partial(self._of_shown, hidden)
        progress = decide(first, shown, self.options)
        self.progress = msgspec.structs.replace(
            progress, verdicts=tuple(x for x in progress.verdicts if x.key not in hidden)
        )
        if self.header is not None:
            self.index.keep_spreads(
                self.header.key, with_noise(self.index.spreads(self.header.key), self.progress)
            )

    def _measure(self, wanted: Mapping[Key, int]) -> list[Comparison]:
        """So many fresh pairs of each row, or as many as there was time for.

        In later stages rows that got less than half of the least that is asked for are left out.
        """
        self._stage += 1
        names = new_run(), new_run()
        runs = [
            self._run(tree, wanted, name, Request(partner=other, stage=self._stage))
            for tree, name, other in zip((self.base, self.current), names, reversed(names), strict=True)
        ]
        made = self._pairs(runs, wanted) if time.monotonic() < self.until else 0
        self.runs += [runs[1].name] if made else []
        if made == 0:
            return [Comparison(key, Side(), Side()) for key in wanted] if self._stage == 1 else []
        wanted = {key: 1 if key in self._same else pairs for key, pairs in wanted.items()}
        base, current = (read(run.path) for run in runs)
        if self._stage == 1:
            self.header, self.records = base.header, (base.records, current.records)
        histories = noise_seen(self.index.spreads(base.header.key))
        allowed = self._allowed(base.header, current.header)
        enough = 0 if self._stage == 1 else self.options.rerun_pairs // 2
        out = paired(base, current, wanted, made, enough, histories, allowed=allowed, controls=self._controls)
        noted = tuple(f"in two environments: {x}" for x in differing(base.header, current.header) if allowed)
        out = [msgspec.structs.replace(x, notes=(*x.notes, *noted)) for x in out]
        return [msgspec.structs.replace(x, same=self._same.get(x.key)) for x in out]

    def _of_same_source(self, rows: Collection[Key]) -> set[Key]:
        """Rows whose source and environment are the same on both sides."""
        return {key for key, (before, after) in self._files(rows).items() if same(before, after)}

    def _of_same_machine_code(self, runs: Sequence[Run], rows: Collection[Key]) -> dict[Key, str]:
        """Rows whose calls launched the same machine code in the same way on both sides, by their first processes;
        with what is to be said of them."""
        base, current = ({x.identity: x.measurement for x in read(run.path).records} for run in runs)
        return {
            key: SAME_MACHINE_CODE.format(launches=kernels)
            for key, files in self._files(rows).items()
            if (kernels := launched(base.get(key), current.get(key))) and all(shows_launches(*x) for x in files)
        }

    def _files(self, rows: Collection[Key]) -> dict[Key, tuple[tuple[Path, Path], tuple[Path, Path]]]:
        """Both sides' files of rows that may be found to have the same code, each with its root."""
        if self.measure_same or self.base.python != self.current.python:
            return {}
        sides = [{x.identity: tree.catalog.file(x.implementation) for x in tree.cells} for tree in self._trees]
        return {
            key: (before, after) for key in rows if (before := sides[0].get(key)) and (after := sides[1].get(key))
        }

    @property
    def _trees(self) -> tuple[Tree, Tree]:
        return self.base, self.current

    def _of_shown(self, hidden: Collection[Key], wanted: Mapping[Key, int]) -> list[Comparison]:
        """What was asked for again; of a witness the first look is enough."""
        asked = {key: pairs for key, pairs in wanted.items() if key not in hidden}
        return self._measure(asked) if asked else []

    @property
    def _witnesses(self) -> set[Key]:
        if not self.shared_baselines:
            return set()
        return {x.identity for x in self.base.witnesses} & {x.identity for x in self.current.witnesses}

    @property
    def _controls(self) -> set[str]:
        ours = kernel_providers(self.base.code)
        cells = (*self.base.cells, *self.base.witnesses)
        others = {x.implementation.name for x in cells if x.implementation.provider not in ours}
        return others if self.shared_baselines else set()

    def _allowed(self, base: Header, current: Header) -> frozenset[str]:
        """Conditions that may differ: none, unless the two sides were given environments of their own."""
        if self.base.python == self.current.python:
            return frozenset()
        return frozenset({*base.conditions, *current.conditions, VERSION})

    def _run(self, tree: Tree, wanted: Mapping[Key, int], name: str, request: Request) -> Run:
        return side_run(self, tree, wanted, self.seed + self._stage, name, request)

    def _pairs(self, runs: Sequence[Run], wanted: Mapping[Key, int]) -> int:
        """Measures pairs until all are made or the time is over; how many were made whole."""
        after_first = None
        if self._stage == 1:
            self._promise(self._known_pair_s(wanted), "by an earlier run")
            after_first = partial(self._seen_once, runs, wanted)
        what = f"stage {self._stage}, pair"
        return in_turns(self, runs, wanted, f"{self.seed}/{self._stage}", what, after_first)

    def _seen_once(self, runs: Sequence[Run], wanted: Mapping[Key, int], pair_s: float) -> Mapping[Key, int]:
        """How many pairs of each row are wanted once there is one: of the same machine code it is enough."""
        found = self._of_same_machine_code(runs, wanted.keys() - self._same.keys())
        self._same |= found
        if found:
            self.tell(
                f"the same machine code on both sides: {counted(len(found), 'row')}, of which this pair is enough"
            )
        if not wanted.keys() - self._same.keys() - self._witnesses:
            return dict.fromkeys(wanted, 1)  # nothing is left that witnesses would be for
        self._promise(pair_s)
        return {key: 1 if key in found else pairs for key, pairs in wanted.items()}

    def _promise(self, pair_s: float | None, how: str = "measured") -> None:
        """Says what the budget can settle: before the start by earlier runs, and after the first pair."""
        left = self.until - time.monotonic()
        if math.isinf(left):
            return
        if not pair_s:
            counts = (self.options.pairs + self.options.rerun_pairs, 4 * self.options.rerun_pairs)
            told = "; ".join(f"{x} pairs of a row, {promised(x, self.options)}" for x in counts)
            self.tell(f"budget: {left:.0f} s; how long a pair takes is not known yet ({told})")
            return
        pairs = int(left / pair_s)
        more = " more" if how == "measured" else ""
        self.tell(
            f"budget: a pair of all rows takes {pair_s:.3g} s ({how}), so there is time for {pairs}{more} pairs, "
            f"{promised(pairs + (how == 'measured'), self.options)}"
        )

    def _known_pair_s(self, wanted: Mapping[Key, int]) -> float | None:
        """What two processes of a stored run of as many cases of the same plan took; None if there is none."""
        cases = len({(x.operator, x.case) for x in wanted})
        for entry in self.index.runs(device=self.device, plan=self.plan.name, limit=20):
            if entry.cases == cases:
                with contextlib.suppress(OSError, InputError):
                    journal = read(entry.path)
                    made = len({x.replicate for x in journal.records})
                    wall = sum(x.wall_s for x in journal.footers)
                    if made and wall > 0:
                        return 2 * wall / made
        return None


class Setting(Protocol):
    """What all runs that are measured in turns share."""

    plan: Plan
    device: DeviceKind
    home: Home
    until: float

    @property
    def tell(self) -> Tell:
        """Progress goes there."""


def side_run(
    setting: Setting, tree: Tree, wanted: Mapping[Key, int], seed: int, name: str, request: Request
) -> Run:
    """The run of one tree over the rows wanted, so many processes of each."""
    cells = tuple(cell for cell in (*tree.cells, *tree.witnesses) if cell.identity in wanted)
    asked = {(cell.case.operator, cell.case.name): cell.case for cell in cells}
    return Run(
        plan=replace(setting.plan, cases=tuple(asked.values()), replicates=max(wanted.values())),
        cells=cells,
        catalog=tree.catalog,
        device=setting.device,
        home=setting.home,
        seed=seed,
        name=name,
        code=tree.code,
        ceilings=False,  # a ratio needs none, and every process would pay for them
        commit=(tree.revision.commit, tree.revision.dirty),
        request=request,
        code_told=request.stage == 1,
        until=setting.until,
        python=tree.interpreter,
    )


def in_turns(
    setting: Setting,
    runs: Sequence[Run],
    wanted: Mapping[Key, int],
    seed: str,
    what: str,
    after_first: Callable[[float], Mapping[Key, int]] | None = None,
) -> int:
    """Measures all runs in rounds, in balanced order, until all rounds are made or the time is over.

    Returns how many rounds were made whole. `what` is the word for a round ("stage 1, pair"); `after_first` is
    told what the first round took, in seconds, and says what is wanted from then on.
    """
    orders = balanced(len(runs), seed)
    count, made, took = max(wanted.values()), 0, 0.0
    with contextlib.suppress(OutOfTime), contextlib.ExitStack() as sessions:
        servers = sessions.enter_context(ForkServers())
        for run in runs:
            run.servers = servers
            sessions.enter_context(run.session())
        while made < count:
            begin = time.monotonic()
            if begin + took > setting.until:  # it would be cut short, and half a round is of no use
                raise OutOfTime
            rows = [key for key, number in wanted.items() if number > made]
            left = f", {seconds(took * (count - made))} left of this stage" if made else ""
            setting.tell(f"{what} {made + 1} of {count}: {counted(len(rows), 'row')}{left}")
            for run in (runs[i] for i in next(orders)):
                run.replicate(made, [cell for cell in run.cells if wanted[cell.identity] > made])
            made += 1
            took = time.monotonic() - begin
            if after_first is not None and made == 1:
                wanted = after_first(took)
                count = max(wanted.values())
    if made < count:
        setting.tell(f"the budget ended after {made} of {count} {what.rpartition(' ')[2]}s")
    return made


def balanced(arms: int, seed: str) -> Iterator[tuple[int, ...]]:
    """Orders of so many arms, round by round: a random one, then the same one reversed (AB BA), and anew.

    Over such a block a linear drift of the machine adds as much to one arm as to another, and so does whatever
    it costs to be the second of a pair. Random order alone only does so on average: at five pairs one side is
    first four times or more in three comparisons of eight.
    """
    generator = random.Random(seed)
    while True:
        order = tuple(generator.sample(range(arms), arms))
        yield order
        yield order[::-1]


def paired(
    base: Journal,
    current: Journal,
    wanted: Mapping[Key, int],
    made: int,
    enough: int,
    histories: Mapping[Key, History] | None = None,
    *,
    allowed: Collection[str] = (),
    controls: Collection[str] | None = None,
) -> list[Comparison]:
    """The rows wanted of two journals, each with as many whole pairs as it asks for, or as were made.

    Rows that ask for more than were made are left out, unless those are `enough`. The rest is as for `pair`.
    """
    out: list[Comparison] = []
    for count in sorted(set(wanted.values())):
        if made >= min(count, enough):
            keys = {key for key, number in wanted.items() if number == count}
            before, after = (_cut(journal, keys, min(count, made)) for journal in (base, current))
            out += pair(before, after, histories, allowed=allowed, controls=controls)
    return out


def _cut(journal: Journal, keys: Collection[Key], pairs: int) -> tuple[Header, list[Record]]:
    """Only these rows and only whole pairs, with a header that says so."""
    header = msgspec.structs.replace(journal.header, replicates=pairs)
    return header, [x for x in journal.records if x.replicate < pairs and x.identity in keys]
