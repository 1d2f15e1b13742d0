"""One kernel in a file, judged: does it compile, is it right on shapes that its author did not see, how fast is it
beside the best peer, and what did the defences find.

The file is a root of its own for the time of the judgement, and its kernel runs in worker processes of its own, in
turns with those of its peers, without the user's secrets in their environment, and without a network where the
system lets us take it away.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from ...registry.analysis.rows import rows
from ...registry.errors import InputError, last_line
from ...registry.progress import Tell, untold
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import PROVIDER, Case, DeviceKind, Record
from .. import plan as plans
from ..catalog import Catalog, Root
from ..environments import interpreter
from ..measure.stopping import Sampling
from ..operator import Operator
from ..plan import Cell, Plan
from .forkserver import ForkServers
from .listener import Listener
from .process import OutOfTime
from .progress import Shared
from .supervisor import Run, new_run

CANDIDATE = "candidate"
"""The folder of the judged kernel, which it is named by."""
FREE = frozenset({"B", "M", "N", "S", "T", "V"})
"""Axes that take any size."""
WIDTHS = frozenset({"D", "K"})
"""Those that often do not; every other draw varies them too, where an operator has no heads."""
UNSEEN = 4
"""Shapes that are drawn, beside those of the plan `quick`."""
ONCE = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=0.1, warmup_s=0, energy="never")
"""For shapes that are only checked."""
REPLICATES = 3
SECRET = ("*_KEY", "*_TOKEN", "*_SECRET*", "*PASSWORD*", "AWS_*")
"""Variables that the candidate does not get, beside those that an endpoint names in `needs`."""
LOADING = 0.2
"""Of the time, what goes by until the first cell is measured: torch is loaded."""
SHARE_OF_CHECKS = 0.4
"""Of the time, for the shapes; the rest is for the comparison with peers."""
NO_DRIVER = "0 active drivers"
"""What Triton says where it finds no GPU to compile for."""
NEEDS_GPU = "a Triton kernel needs a GPU, or TRITON_INTERPRET=1"


class Shape(msgspec.Struct, frozen=True):
    """How the kernel ended on one shape. `ok` is None where no peer could compute it either."""

    case: str
    ok: bool | None
    reason: str | None = None


class Speed(msgspec.Struct, frozen=True):
    """× the best peer on one case of plan `quick`, with the 95 % interval over replicates."""

    case: str
    ms: float
    speedup: float | None
    low: float | None
    high: float | None
    best_peer: str | None


class Judgement(msgspec.Struct, frozen=True):
    """What was found. `right` and `compiles` are None where nothing was seen of it in time, or nothing could be
    seen here: then `reason` says why.
    """

    operator: str
    device: str
    compiles: bool | None
    right: bool | None
    asked: int
    """How many shapes there are; those in `shapes` were reached in time."""
    shapes: tuple[Shape, ...]
    peers: tuple[str, ...]
    """The implementations that can run beside it here."""
    out_of_time: bool
    interpreted: bool
    """Whether times are those of Triton's interpreter, which say nothing of the kernel's speed."""
    speed: tuple[Speed, ...]
    found: tuple[str, ...]
    """What the defences found: why it is incorrect, and what it had changed in its process that was put back."""
    network: str
    seconds: float
    seed: int
    reason: str | None = None


@dataclass
class Judge:
    """Judges one file within `budget_s`; `seed` draws the shapes, and nobody but us knows it before.

    It is right if it is on all shapes, but for those that it says it does not support, or that nobody can compute.
    """

    operator: str
    file: Path
    device: DeviceKind
    seed: int
    budget_s: float = 60.0
    tell: Tell = untold

    def judge(self) -> Judgement:
        """Raises `InputError` for a file that is none, `HarnessError` where no worker starts."""
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kernelmark-judge-") as folder, contextlib.ExitStack() as held:
            root, home = Path(folder) / CANDIDATE, Home(Path(folder) / "home")
            operator = Catalog.default().operator(self.operator)
            _place(self.file, root, self.operator, self.device)
            catalog = Catalog((*Catalog.default().roots, Root(root)))
            python, network = apart(Path(folder), root, secret_variables(catalog))
            known = plans.load("quick", catalog, self.device, [self.operator])
            unseen = unseen_cases(operator, known.cases, random.Random(self.seed))
            checks = Plan("shapes", (*known.cases, *unseen), 1, ("cold",), ONCE, known.deadline_s)
            again = replace(known, name="peers", replicates=REPLICATES)
            bench = held.enter_context(_Bench(catalog, root, self.device, home, python, self.seed))
            first, rest = bench.cells(checks, ("torch",)), bench.cells(again)
            counted = [*first, *(x for _ in range(REPLICATES) for x in rest)]
            can = [x.implementation for x in counted if x.implementation.unavailable(self.device) is None]
            listener = Shared(self.tell, len(can), LOADING)
            self.tell("loading torch", 0.0)
            checked = bench.measure(checks, first, begin + self.budget_s * SHARE_OF_CHECKS, listener)
            shapes = tuple(_shapes(checked, bench.name))
            timed: Journal | None = None
            out_of_time = not _ended(checked)
            if not any(x.ok is False for x in shapes):
                timed = bench.measure(again, rest, begin + self.budget_s, listener)
                out_of_time |= not _ended(timed)
            speed = _speeds(timed, bench.name) if timed is not None else ()
            records = [*(checked.records if checked else ()), *(timed.records if timed else ())]
            here = not (self.device == "cpu" and undriven(records, bench.name))
            ours = [x for x in records if x.implementation == bench.name and here]
            others = _others(records, bench.name)
            wrong = any(_counts(x, others.get(x.case.name, ())) for x in ours)
            # What was not reached in time may be wrong.
            reached = len(shapes) == len(checks.cases)
            right = False if wrong else True if reached and any(x.ok for x in shapes) else None
            return Judgement(
                operator=self.operator,
                device=self.device,
                compiles=any(x.status in ("ok", "incorrect") for x in ours) if ours else None,
                right=right,
                asked=len(checks.cases),
                shapes=shapes if here else (),
                peers=tuple(dict.fromkeys(x.name for x in can if x.root != root)),
                out_of_time=out_of_time,
                interpreted=self.device == "cpu" and interpreted(root),
                speed=() if right is False else speed,
                found=tuple(dict.fromkeys(_found(ours))),
                network=network,
                seconds=round(time.monotonic() - begin, 1),
                seed=self.seed,
                reason=None if here else NEEDS_GPU,
            )


HONEST = ("ok", "unsupported")
"""How a kernel may end: with the answer, or by saying that it has none for such a case."""


@dataclass(frozen=True)
class _Bench:
    """Where the candidate and its peers are measured: in turns, each in worker processes of their own."""

    catalog: Catalog
    root: Path
    device: DeviceKind
    home: Home
    python: Path
    seed: int
    mine: ForkServers = field(default_factory=ForkServers)
    """Where the candidate's workers are forked from; its peers' have servers of their own."""
    others: ForkServers = field(default_factory=ForkServers)

    def __enter__(self) -> _Bench:
        for servers in (self.mine, self.others):
            servers.begin(self.python)  # both load torch at once
        return self

    def __exit__(self, *exception: object) -> None:
        for servers in (self.mine, self.others):
            servers.close()

    @property
    def name(self) -> str:
        """The implementation that the candidate goes by."""
        return next(
            x.name for x in self.catalog.implementations if x.root == self.root and self.device in x.devices
        )

    def cells(self, plan: Plan, peers: Sequence[str] = ()) -> tuple[Cell, ...]:
        """The candidate's and its peers'; all of them where none is named."""
        found = plan.cells(self.catalog, self.device, (self.name, *peers) if peers else ())
        return tuple(
            x for x in found if x.implementation.provider != PROVIDER or x.implementation.root == self.root
        )

    def measure(self, plan: Plan, cells: tuple[Cell, ...], until: float, listener: Listener) -> Journal | None:
        """All replicates, or those that there is time for."""
        own = tuple(x for x in cells if x.implementation.root == self.root)
        others = tuple(x for x in cells if x.implementation.root != self.root)
        run = Run(
            plan,
            cells,
            self.catalog,
            self.device,
            self.home,
            self.seed,
            name=new_run(),
            ceilings=False,
            until=until,
            listener=listener,
            python=lambda environment: self.python if environment == "core" else interpreter(environment),
        )
        with contextlib.suppress(OutOfTime), run.session():
            for replicate in range(plan.replicates):
                turns = [(own, self.mine), (others, self.others)]
                for some, run.servers in turns if replicate % 2 == 0 else turns[::-1]:
                    run.replicate(replicate, some)
        return read(run.path) if run.path.exists() else None


def _place(file: Path, root: Path, operator: str, device: str) -> None:
    """Makes the file the operator's kernel in a root of its own."""
    target = root / ("kernels/cpu" if device == "cpu" else "kernels") / f"{operator}.py"
    target.parent.mkdir(parents=True)
    try:
        shutil.copyfile(file, target)
    except OSError as error:
        raise InputError(f"kernel file {file} cannot be read: {error.strerror or error}.") from None


def undriven(records: Sequence[Record], name: str) -> bool:
    """Whether all that became of an implementation is that Triton found no GPU: it was never compiled."""
    ours = [x for x in records if x.implementation == name]
    return bool(ours) and all(x.status == "error" and NO_DRIVER in (x.reason or "") for x in ours)


def _ended(journal: Journal | None) -> bool:
    """Whether all was measured before the time was over."""
    return journal is not None and bool(journal.footers) and journal.footers[-1].complete


def interpreted(root: Path) -> bool:
    """Whether Triton interprets what a root's files have it do, as far as their imports tell."""
    if os.environ.get("TRITON_INTERPRET", "").lower() not in ("1", "true", "on"):
        return False
    return any(_imports_triton(x.read_text(encoding="utf-8-sig", errors="replace")) for x in root.rglob("*.py"))


def _imports_triton(source: str) -> bool:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    named = [
        name
        for x in ast.walk(tree)
        if isinstance(x, ast.Import | ast.ImportFrom)
        for name in (
            [y.name for y in x.names] if isinstance(x, ast.Import) else ["." * x.level + (x.module or "")]
        )
    ]
    return any(x.partition(".")[0] == "triton" for x in named)


def secret_variables(catalog: Catalog) -> list[str]:
    """The variables set here that a judged kernel has no business with, by their names."""
    needed = {
        name
        for root in catalog.roots
        for path in root.files("baselines").values()
        for name in _needs(path.read_text(encoding="utf-8-sig"))
    }
    return sorted(
        x for x in os.environ if x in needed or any(fnmatchcase(x.upper(), pattern) for pattern in SECRET)
    )


def _needs(source: str) -> Iterator[str]:
    """What a provider's file assigns to `needs`, as it stands there: nothing of it is imported."""
    for node in ast.walk(ast.parse(source)) if "needs" in source else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(x, ast.Name) and x.id == "needs" for x in targets):
            value = getattr(node, "value", None)
            for x in ast.walk(value) if isinstance(value, ast.AST) else ():
                if isinstance(x, ast.Constant) and isinstance(x.value, str):
                    yield x.value


def apart(folder: Path, root: Path, without: Sequence[str] = ()) -> tuple[Path, str]:
    """A Python for workers that sees the root and has none of the variables in `without`, and no network where
    `unshare` can take it away; and whether.
    """
    cut = [shutil.which("unshare") or "unshare", "--map-root-user", "--net"]
    try:
        done = subprocess.run([*cut, "true"], capture_output=True, text=True, timeout=10, check=False)
        refused = last_line(done.stderr, "it failed") if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        refused = str(error)
    roots = os.pathsep.join(x for x in (os.environ.get("KERNELMARK_PATH"), str(root)) if x)
    unset = ["env", *(y for x in without for y in ("-u", x))]
    command = shlex.join([*unset, *([] if refused else cut), sys.executable])
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nKERNELMARK_PATH={shlex.quote(roots)} exec {command} "$@"\n')
    script.chmod(0o700)
    return script, "none" if refused is None else f"not cut off: {refused}"


def unseen_cases(operator: Operator, known: Sequence[Case], draw: random.Random) -> tuple[Case, ...]:
    """Cases of other sizes than the known ones, none larger. One has odd sizes, where the operator takes them."""
    found: dict[str, Case] = {}
    odd = True
    names = {x.name for x in known}
    for attempt in range(20 * UNSEEN):
        base = draw.choice(known)
        chosen = FREE | WIDTHS if attempt % 2 and "H" not in base.axes else FREE
        free = [x for x, size in base.axes.items() if x in chosen and size > 1]
        sizes = {x: draw.randint(max(1, base.axes[x] // 2), base.axes[x]) for x in free}
        # By chance alone there would often be no odd width. Some operators take none.
        if every := odd and bool(attempt % 2) and attempt < 5 * UNSEEN:
            sizes = {x: size - 1 + size % 2 for x, size in sizes.items()}
        axes = dict(base.axes) | sizes
        try:
            case = operator.case(axes, base.dtype, base.pass_, **base.options)
        except InputError:
            continue
        if case.name not in names:
            found[case.name] = case
            odd = odd and not every
        if len(found) == UNSEEN:
            break
    return tuple(found.values())


def _others(records: Sequence[Record], name: str) -> dict[str, set[str]]:
    """How a case ended for the candidate's peers, by the case's name."""
    found: dict[str, set[str]] = {}
    for x in records:
        if x.implementation != name:
            found.setdefault(x.case.name, set()).add(x.status)
    return found


def _counts(mine: Record, others: Collection[str]) -> bool:
    """Whether how the candidate ended is held against it. A wrong answer is one whoever else has none; another
    failure that all of its peers share is not.
    """
    if mine.status == "incorrect":
        return True
    return mine.status not in HONEST and (not others or "ok" in others)


def _shapes(journal: Journal | None, name: str) -> Iterator[Shape]:
    """How each case ended."""
    others = _others(journal.records if journal else (), name)
    ended = {x.case.name: x for x in (journal.records if journal else ()) if x.implementation == name}
    for case, mine in ended.items():
        if mine.status == "ok":
            yield Shape(case, True)
        elif _counts(mine, others.get(case, ())):
            yield Shape(case, False, f"{mine.status}: {mine.reason}")
        else:
            yield Shape(case, None, mine.reason)


def _speeds(journal: Journal, name: str) -> tuple[Speed, ...]:
    return tuple(
        Speed(
            x.case,
            value,
            x.speedup_vs_best_baseline,
            x.speedup_ci_low,
            x.speedup_ci_high,
            x.best_baseline,
        )
        for x in rows(peers(journal, name))
        if x.implementation == name and (value := x.value()) is not None
    )


def peers(journal: Journal, name: str) -> Journal:
    """The journal with the candidate as ours, which is how rows tell it from the baselines that it is beside."""
    named = (
        msgspec.structs.replace(x, provider=PROVIDER) if x.implementation == name else x for x in journal.records
    )
    return replace(journal, records=tuple(named))


def _found(records: Sequence[Record]) -> Iterator[str]:
    for x in records:
        if x.status == "incorrect":
            yield f"incorrect: {x.reason}"
        for remark in x.measurement.remarks if x.measurement else ():
            yield f"put back: {remark}"
