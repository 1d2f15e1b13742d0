"""From journals to a folder of pages. What is there already stays: a day's journals are added to it in seconds."""

from __future__ import annotations

import gc
import gzip
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import msgspec
from filelock import FileLock

from .. import figures
from ..analysis.repeated import NOT_YET
from ..errors import InputError
from ..progress import Tell, untold
from ..store.journal import Journal, parse, read, read_header
from ..store.shards import whole
from ..views import serving
from . import data, exports, feeds
from .comparisons import beside_others, newest_two
from .course import Course, course
from .coverage import Expected, coverage
from .facts import Fact, Run, facts, file_name, run_of
from .ledger import EXPORTED, Ledger
from .pages import Pages
from .paging import numbered
from .repetition import repetitions, replaced
from .scaling import Ahead, ahead, scaling
from .servers import served
from .sizes import Swept, page_of, parts, swept
from .standing import Standing, standings
from .timeline import Line, Measured, ordered, timelines

HERE = Path(__file__).parent
MEMORY = "site.db"
LOCK = ".site.lock"
ROOMS = ("operator", "scaling", "run", "data", "journals", "assets")
"""Folders of a site. What else lies in it is somebody's."""
ASSETS = {
    "site.css": HERE / "assets" / "site.css",
    "site.js": HERE / "assets" / "site.js",
    "uplot.js": HERE / "vendor" / "uplot" / "uPlot.iife.min.js",
    "uplot.css": HERE / "vendor" / "uplot" / "uPlot.min.css",
    "uplot-license.txt": HERE / "vendor" / "uplot" / "LICENSE",
}
SPREADS = "spreads"
"""What the memory calls distributions of latencies: only journals have every request's."""
PROBES = "probes"
"""The same of what searches for the highest rate tried."""
AHEAD = "ahead"
"""And of what its steps are predicted to be on more GPUs."""
DATA = "data"
"""What the memory calls scripts of values that are written."""
NAMED = 5
"""So many runs are named in a message; more are counted."""
COPIED = "copy"
"""Journals are copied into the site."""


@dataclass(frozen=True)
class Settings:
    """How a site is made. `address` is where it will be served, for the feeds' links; `journals` is "copy", "none"
    or the address of a folder that has them.
    """

    title: str = "kernelmark"
    address: str = ""
    journals: str = COPIED

    @property
    def linked(self) -> str | None:
        """What stands before `journals/` in links; None where there are none."""
        return {COPIED: "", "none": None}.get(self.journals, _slashed(self.journals))


@dataclass
class Built:
    """What a build did."""

    added: int = 0
    runs: int = 0
    rows: int = 0
    written: int = 0
    parquet: bool = False
    skipped: list[str] = field(default_factory=list)
    """Why a journal could not be taken in."""


_Kept = TypeVar("_Kept")
Times = Callable[[set[str]], Mapping[str, int]]
_PLACE, _created = attrgetter("place"), attrgetter("created")
READ = 0.5
"""The part of the time that reading the journals takes, with a page for each run."""


def build(
    sources: Sequence[Path],
    output: Path,
    settings: Settings,
    expected: Mapping[str, Expected],
    times: Times = lambda commits: {},
    fresh: bool = False,
    tell: Tell = untold,
) -> Built:
    """Adds journals to the site in `output`, and writes what changed.

    `expected` is what exists, `times` says when commits were made, in seconds since 1970. `fresh` forgets what the
    site holds first. Raises `InputError` where the folder is no site's, nothing could be read, or forgetting would
    delete a source.
    """
    below = [x for x in sources if output.resolve() in x.resolve().parents]
    if fresh and below:
        raise InputError(
            f"{below[0]} lies below {output}, and --fresh deletes what the site holds before it is read; copy the "
            "journals elsewhere first, or leave --fresh out."
        )
    site = _Site(output, settings, fresh, tell)
    collecting = gc.isenabled()
    try:
        site.take_in(sources)
        if not site.ledger.runs():
            raise InputError("; ".join(["no journal could be read", *site.built.skipped[:5]]) + ".")
        gc.disable()  # nothing of the 100,000 facts is ever part of a cycle, and looking for them takes long
        site.write(expected, times)
    finally:
        if collecting:
            gc.enable()
        site.lock.release()
    return site.built


@dataclass(frozen=True)
class _Read:
    """A shard's journal, as it was read."""

    path: Path
    raw: bytes
    digest: str
    journal: Journal


class _Site:
    def __init__(self, output: Path, settings: Settings, fresh: bool, tell: Tell) -> None:
        self.output = output
        self.tell = tell
        self.settings = settings
        self.built = Built()
        if output.exists() and not output.is_dir():
            raise InputError(f"{output} is no folder; name one with --output.")
        others = [x for x in output.iterdir() if x.name != LOCK] if output.is_dir() else []
        if others and not (output / MEMORY).exists():
            raise InputError(f"{output} is not empty and holds no site; name another folder with --output.")
        output.mkdir(parents=True, exist_ok=True)
        # Two jobs of one night may build the same site: the second waits, and finds what the first took in.
        self.lock = FileLock(output / LOCK)
        self.lock.acquire()
        if fresh:
            (output / MEMORY).unlink(missing_ok=True)
            for name in ROOMS:
                shutil.rmtree(output / name, ignore_errors=True)
        self.ledger = Ledger(output / MEMORY)

    def take_in(self, sources: Iterable[Path]) -> None:
        """Reads what was not read before. Pages of runs are written here: only journals have what is on them."""
        style = self._style()
        current = self.ledger.remembered("style", style) is not None
        seen = self.ledger.seen() if current else set()
        gone = {x.name for x in self._gone()}
        # Under other settings or a newer kernelmark all runs' pages are made anew, from the site's own copies too.
        own = [] if current and not gone else sorted((self.output / "journals").glob("*.jsonl.gz"))
        pages = Pages(self.settings.title, "", self.settings.linked)
        known = {x.name for x in self.ledger.runs()}
        paths = [*sources, *own]
        shards: dict[str, list[_Read]] = {}
        old: list[Path] = []
        for i, path in enumerate(paths):
            self.tell(path.name, READ * i / len(paths))
            try:
                raw = path.read_bytes()
                digest = hashlib.sha256(raw).hexdigest()
                if digest in seen:
                    old.append(path)
                    if not gone or (header := read_header(path)) is None or header.run not in gone:
                        continue
                journal = read(path)
            except InputError as error:
                self.built.skipped.append(str(error))
                continue
            except OSError as error:
                self.built.skipped.append(f"{path}: {error.strerror}")
                continue
            seen.add(digest)
            if journal.header.request.shard is not None:
                shards.setdefault(journal.header.run, []).append(_Read(path, raw, digest, journal))
                continue
            copy = raw if path.suffix == ".gz" else gzip.compress(raw, mtime=0)
            self._take(pages, known, journal, {digest}, copy)
        self._take_shards(pages, known, shards, old)
        if left := [x.name for x in self._gone()]:
            named = ", ".join(left[:NAMED]) + (f" and {len(left) - NAMED} more" if len(left) > NAMED else "")
            told = f"whose page or journal is not in {self.output} any more; give their journals again"
            self.built.skipped.append(f"{figures.counted(len(left), 'run')} {told}: {named}")
        self.ledger.remember([("style", style, b"")])

    def _gone(self) -> list[Run]:
        """The runs whose page or journal somebody took away, or which a folder that was restored in part lacks."""
        kept = [("run", "html")] + ([("journals", "jsonl.gz")] if self.settings.journals == COPIED else [])
        return [
            x
            for x in self.ledger.runs()
            if not all((self.output / room / f"{x.file}.{kind}").exists() for room, kind in kept)
        ]

    def _take(self, pages: Pages, known: set[str], journal: Journal, digests: set[str], copy: bytes) -> None:
        """Takes in the journal of a run, of which `digests` were read; `copy` is what the site keeps of it."""
        found = facts(journal)
        run = run_of(journal, found)
        if self.ledger.counts(run):
            # First the files: a journal that is counted as read is not looked at again, even by the build
            # after one that was killed.
            pages.built = figures.moment(run.created)
            self._write_all(f"run/{run.file}", pages.run(journal, run, found))
            if self.settings.journals == COPIED:
                digests = digests | {hashlib.sha256(copy).hexdigest()}
                self._write(f"journals/{run.file}.jsonl.gz", copy)
            self.built.added += run.name not in known
            known.add(run.name)
            spread = msgspec.msgpack.encode(serving.spreads(journal))
            probes = msgspec.msgpack.encode(serving.probes(journal))
            made = msgspec.msgpack.encode(ahead(journal))
            kept = ((SPREADS, spread), (PROBES, probes), (AHEAD, made))
            self.ledger.remember((f"{what}\n{run.name}", "", x) for what, x in kept)
        self.ledger.take_in(digests, run, found)

    def _take_shards(
        self, pages: Pages, known: set[str], shards: Mapping[str, list[_Read]], old: Sequence[Path]
    ) -> None:
        """Takes in runs that came as shards, each as one run: with those shards that came before, which are among
        the sources that are `old`, or which the site has kept.
        """
        kept = self.output / "journals" / "shards"
        earlier: dict[str, list[Path]] = {}
        for path in (*old, *kept.glob("*.jsonl.gz")) if shards else ():
            header = read_header(path)
            if header is not None and header.request.shard is not None:
                earlier.setdefault(header.run, []).append(path)
        for name, new in shards.items():
            try:
                parts: dict[tuple[int, int] | None, Journal] = {}
                for part in (*map(read, earlier.get(name, ())), *(x.journal for x in new)):
                    shard = part.header.request.shard
                    if shard not in parts or len(part.records) > len(parts[shard].records):
                        parts[shard] = part
                raw = whole([*parts.values()])
            except InputError as error:
                self.built.skipped += [f"{x.path}: {error}" for x in new]
                continue
            journal = parse(raw)
            rows = Counter(x.identity for x in journal.records)
            lost = sum(len(x.lines) > rows[x.identity] for x in self.ledger.of_run(name))
            # A site that keeps no journals cannot tell one seed of a row from another.
            blind = self.settings.journals != COPIED and journal.header.request.missing and name in known
            if lost or blind:
                told = f"the site has rows of run {name} that no shard here has; give all of its shards at once"
                self.built.skipped += [f"{x.path}: {told}" for x in new]
                continue
            digests = {x.digest for x in new}
            for x in new if self.settings.journals == COPIED else ():
                number, count = shard = x.journal.header.request.shard or (1, 1)
                if parts[shard] is not x.journal:  # a beginning of what is kept
                    continue
                kept.mkdir(parents=True, exist_ok=True)
                copy = x.raw if x.path.suffix == ".gz" else gzip.compress(x.raw, mtime=0)
                self._write(f"journals/shards/{file_name(name)}.{number}-of-{count}.jsonl.gz", copy)
                digests.add(hashlib.sha256(copy).hexdigest())
            self._take(pages, known, journal, digests, gzip.compress(raw, mtime=0))

    def _style(self) -> str:
        """What pages are made with: of another one all are made anew."""
        digest = hashlib.sha256(repr((self.settings.title, self.settings.journals)).encode())
        for path in sorted([*HERE.glob("*.py"), *HERE.glob("templates/*.html")]):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def write(self, expected: Mapping[str, Expected], times_of: Times) -> None:
        """All pages but those of runs, and what lies beside them."""
        known = self.ledger.runs()
        times = times_of({x.commit for x in known if x.commit})
        runs = ordered(known, times)
        measured = self._measured(runs)
        self.built.runs, self.built.rows = len(runs), self.ledger.count()
        again = repetitions(runs, self.ledger.of_run)
        newest = figures.moment(max(x.created for x in runs))
        pages = Pages(self.settings.title, newest, self.settings.linked, again)
        for run in runs:
            path = self.output / f"run/{run.file}.html"
            if again[run.name] != NOT_YET and path.exists():
                self._write(f"run/{run.file}.html", replaced(path.read_text(encoding="utf-8"), again[run.name]))
        by_operator: dict[str, list[Measured]] = {}
        for run, fact in measured:
            by_operator.setdefault(fact.operator, []).append((run, fact))
        lines: dict[str, tuple[Line, ...]] = {}
        newest_first = list(reversed(runs))
        newest_first.sort(key=lambda x: x.kind == "cpu")  # GPUs before processors
        by_device: dict[str, list[Standing]] = {x.device: [] for x in newest_first}
        sizes: dict[str, Mapping[str, Sequence[Swept]]] = {}
        courses: dict[tuple[str, str], Course] = {}
        done = 0
        for operator, found in sorted(by_operator.items()):
            self.tell(operator, READ + (1 - READ) * done / len(measured))
            done += len(found)
            lines[operator] = timelines(operator, found, times, self.ledger)
            standing = standings(operator, found)
            for x in standing:
                by_device[x.device].append(x)
                courses[x.device, operator] = course(x, found)
            over = swept(operator, found)
            if over:
                sizes[operator] = parts(over)
                for part in sizes[operator]:
                    self._write(page_of(operator, part), pages.sizes(operator, part, sizes[operator]))
            texts = pages.operator(operator, standing, lines[operator], runs, over, sizes.get(operator, {}))
            self._write_all(f"operator/{file_name(operator)}", texts)
        events = feeds.events((x for found in lines.values() for x in found), pages.places)
        self._write_all(
            "index", pages.overview(runs, self.built.rows, by_device, expected, lines, events, courses)
        )
        self._write_all("runs", pages.runs(runs))
        made = self._kept(AHEAD, runs, tuple[Ahead, ...])
        self._write_all("scaling", pages.scaling(scaling(measured), sizes, made))
        servers = served(
            by_operator.get(serving.OPERATOR, ()),
            self._kept(SPREADS, runs, tuple[serving.Spread, ...]),
            self._kept(PROBES, runs, tuple[serving.Probes, ...]),
        )
        self._write_all("serving", pages.serving(servers))
        kinds = {x.device: x.kind for x in runs}
        covered = {x: coverage(x, kinds[x], measured, expected) for x in by_device}
        self._write_all("coverage", pages.coverage(covered, bool(expected)))
        self._comparisons(pages, runs, measured)
        self._beside(pages, runs, feeds.regressions(events), max(runs, key=_created))

    def _measured(self, runs: Sequence[Run]) -> list[Measured]:
        """The facts that pages are made of, in the order of their runs and of their places in them."""
        by_run: dict[str, list[Fact]] = {x.name: [] for x in runs}
        for name, fact in self.ledger.newest():
            by_run[name].append(fact)
        return [(run, fact) for run in runs for fact in sorted(by_run[run.name], key=_PLACE)]

    def _kept(self, what: str, runs: Sequence[Run], kind: type[_Kept]) -> dict[str, _Kept]:
        """By run, what only its journal said."""
        found = {x.name: self.ledger.remembered(f"{what}\n{x.name}", "") for x in runs}
        return {name: msgspec.msgpack.decode(x, type=kind) for name, x in found.items() if x}

    def _comparisons(self, pages: Pages, runs: Sequence[Run], measured: Sequence[Measured]) -> None:
        of_source: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run.arm is None:
                of_source.setdefault(data.source(run), []).append(run)
        for source, found in of_source.items():
            name = f"data/{data.source_file(*source)}.js"
            # By what the ledger holds and not by what this build took in: the one before may have been killed.
            what, state = f"{DATA}\n{name}", self.ledger.state(x.name for x in found)
            if self.ledger.remembered(what, state) is None or not (self.output / name).exists():
                self._write(name, data.values((x, y) for x in found for y in self.ledger.of_run(x.name)))
                self.ledger.remember([(what, state, b"")])
        by_source: dict[tuple[str, str], list[Measured]] = {}
        for run, fact in measured:
            if run.arm is None:
                by_source.setdefault(data.source(run), []).append((run, fact))
        self._write("compare.html", pages.compare(runs, newest_two(by_source), beside_others(by_source)))

    def _beside(self, pages: Pages, runs: Sequence[Run], worse: Sequence[feeds.Event], newest: Run) -> None:
        by_name = {x.name: x for x in runs}

        def after(place: int) -> Iterator[exports.Numbered]:
            return ((number, (by_name[name], fact)) for number, name, fact in self.ledger.after(place))

        state = self.ledger.remembered(EXPORTED, "")
        known = msgspec.msgpack.decode(state, type=exports.Exported) if state else None
        exported, self.built.parquet = exports.export(self.output, known, after)
        self.ledger.remember([(EXPORTED, "", msgspec.msgpack.encode(exported))])
        self._write("rows.html", pages.files(self.built.rows, self.built.parquet))
        address = _slashed(self.settings.address)
        self._write("regressions.atom", feeds.atom(worse, self.settings.title, address, newest.created))
        self._write("regressions.json", feeds.json_feed(worse, self.settings.title, address))
        for name, path in ASSETS.items():
            self._write(f"assets/{name}", path.read_bytes())

    def _write_all(self, name: str, texts: Sequence[str]) -> None:
        """Writes what stands on several pages, and takes away what stood on more of them."""
        for number, text in enumerate(texts, 1):
            self._write(f"{numbered(name, number)}.html", text)
        more = len(texts) + 1
        while (path := self.output / f"{numbered(name, more)}.html").exists():
            path.unlink()
            more += 1

    def _write(self, name: str, text: str | bytes) -> None:
        """Writes a file of the site, unless it holds that already: what did not change keeps its time."""
        path = self.output / name
        raw = text.encode(errors="replace") if isinstance(text, str) else text
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.stat().st_size != len(raw) or path.read_bytes() != raw:
            path.write_bytes(raw)
            self.built.written += 1


def _slashed(address: str) -> str:
    return address if not address or address.endswith("/") else f"{address}/"
