"""From deliveries to one run. Collecting twice is collecting once: of each shard the first whole one counts."""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...registry.errors import InputError
from ...registry.progress import Tell, untold
from ...registry.store.home import Home
from ...registry.store.journal import Journal, parse
from ...registry.store.journal import read as read_journal
from ...registry.store.record import HOST
from ...registry.store.shards import path_of, shards_of
from ...registry.store.transfer import import_journal, join
from .comparison import Report
from .comparison import parse as parse_report
from .delivery import Delivery, found, hashes, read
from .order import Order, folder_of
from .task import JOURNAL, REPORT

VERDICTS = (0, 1, 3, 4)
"""Exit codes of a comparison that came to its end."""
ENDED = frozenset(128 + x for x in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
"""Exit codes of a shard that somebody ended in order: its host was taken back."""


@dataclass(frozen=True)
class Refused:
    """A delivery that is not taken in. `lasting`: the same shard would end the same way anywhere."""

    shard: int
    host: str
    reason: str
    lasting: bool = False


@dataclass(frozen=True)
class Whole:
    """A shard that is here, whole."""

    shard: int
    host: str
    rows: int
    wall_s: float


@dataclass(frozen=True)
class State:
    """What is here of a run over many machines."""

    order: Order
    whole: tuple[Whole, ...]
    refused: tuple[Refused, ...] = ()
    duplicates: int = 0
    """Whole deliveries of shards that were here already."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The shards that are to be asked for."""
        there = {x.shard for x in self.whole}
        return tuple(x for x in range(1, self.order.shards + 1) if x not in there)


def deliveries_of(home: Home, run: str) -> Path:
    """Where tasks that see this home deliver."""
    return folder_of(home, run) / "deliveries"


def dropped_in(home: Home, run: str) -> Path:
    """Where shards are kept that were taken out of a run, each by the hash of what counted."""
    return folder_of(home, run) / "dropped"


def offered(order: Order, home: Home, folder: Path) -> Iterator[Path]:
    """The deliveries in a folder, oldest first, without those that were taken out of the run."""
    gone = {x.stem.rpartition("-")[2] for x in dropped_in(home, order.run).glob("*-of-*-*")}
    for path in found(folder):
        if not gone or gone.isdisjoint(hashes(path)):
            yield path


def collect(
    order: Order, home: Home, folder: Path | None = None, known: frozenset[str] = frozenset(), tell: Tell = untold
) -> State:
    """Takes in what was delivered to a folder (default: the home's own), but for the folders `known` by name."""
    refused: list[Refused] = []
    duplicates = 0
    there = {x.shard: x for x in whole_shards(order, home)}
    paths = [x for x in offered(order, home, folder or deliveries_of(home, order.run)) if x.name not in known]
    for number, path in enumerate(paths):
        tell(path.name, number / len(paths))  # shards are cut to be alike
        taken = _take(order, home, path, there)
        if isinstance(taken, Refused):
            refused.append(taken)
        elif taken.shard in there:
            duplicates += not _same(order, home, taken, path)
        else:
            there[taken.shard] = taken
    if there and not order.compare and _behind(order, home, there):
        join(home, order.run)
    return State(order, tuple(there[x] for x in sorted(there)), tuple(refused), duplicates)


def _behind(order: Order, home: Home, there: Mapping[int, Whole]) -> bool:
    """Whether the run's journal is older than a whole shard: who kept that was killed before it joined them."""
    joined = home.journal(order.run)
    newest = max(path_of(home, order.run, (x, order.shards)).stat().st_mtime_ns for x in there)
    return not joined.exists() or joined.stat().st_mtime_ns < newest


def whole_shards(order: Order, home: Home) -> list[Whole]:
    """The shards of a run that are in the home, whole; of a comparison, those whose reports were delivered."""
    if order.compare:
        return [x for x, _ in reports(order, home).values()]
    return [x for path in shards_of(home, order.run) if (x := _whole(read_journal(path))) is not None]


def waiting(order: Order, home: Home) -> dict[int, str]:
    """The shards that came back whole and that nobody has taken in: `--no-wait`, or who drove the run is gone."""
    out = {}
    for path in [] if order.compare else offered(order, home, deliveries_of(home, order.run)):
        delivered = read(path)
        if isinstance(delivered, str) or JOURNAL not in delivered[1]:
            continue
        with contextlib.suppress(InputError):
            journal = parse(delivered[1][JOURNAL], path / JOURNAL)
            if journal.header.run == order.run and (whole := _whole(journal)) is not None:
                out[whole.shard] = "delivered"
    return out


def _take(order: Order, home: Home, path: Path, there: Mapping[int, Whole]) -> Whole | Refused:
    """Takes one delivery in, unless its shard is here."""
    delivered = read(path)
    if isinstance(delivered, str):
        return Refused(0, "", f"{path.name}: {delivered}")
    note, contents = delivered
    shard, host = note.shard[0], note.host
    if note.run != order.run or note.shard[1] != order.shards or not 1 <= shard <= order.shards:
        return Refused(0, host, f"{path.name}: of run {note.run}, shard {shard}/{note.shard[1]}, not of this one")
    if order.compare:
        return _compared(home, path, note, contents)
    if JOURNAL not in contents:
        return Refused(shard, host, _ending(note), lasting=note.code == 2)
    try:
        journal = parse(contents[JOURNAL], path / JOURNAL)
        if (journal.header.run, journal.header.request.shard) != (order.run, (shard, order.shards)):
            return Refused(shard, host, f"{path.name}: its journal is of another run or shard")
        whole = _whole(journal)
        if whole is None:
            return Refused(shard, host, _ending(note))
        if shard not in there:
            import_journal(path / JOURNAL, home)
    except InputError as error:  # another commit, driver or power limit than the shards that are here
        return Refused(shard, host, str(error))
    return whole


def reports(order: Order, home: Home) -> dict[int, tuple[Whole, Report]]:
    """Of a comparison: by shard, the report that was delivered first."""
    return {shard: (whole, parse_report(data)) for shard, (whole, data) in sorted(reported(order, home).items())}


def reported(order: Order, home: Home) -> dict[int, tuple[Whole, bytes]]:
    """The same as it was delivered."""
    out: dict[int, tuple[Whole, bytes]] = {}
    for path in offered(order, home, deliveries_of(home, order.run)):
        taken = _take(order, home, path, {})
        if isinstance(taken, Whole) and taken.shard not in out:
            out[taken.shard] = taken, (path / REPORT).read_bytes()
    return out


def _compared(home: Home, path: Path, note: Delivery, contents: Mapping[str, bytes]) -> Whole | Refused:
    """One shard of a comparison; the journals of both its sides are runs of their own."""
    shard = note.shard[0]
    if REPORT not in contents or note.code not in VERDICTS:
        return Refused(shard, note.host, _ending(note), lasting=note.code == 2)
    try:
        rows = len(parse_report(contents[REPORT]).verdicts)
        for name in sorted(contents.keys() - {REPORT}):
            import_journal(path / name, home)
    except InputError as error:
        return Refused(shard, note.host, str(error))
    return Whole(shard, note.host, rows, note.wall_s)


def _whole(journal: Journal) -> Whole | None:
    """What a shard's journal holds, if its run came to its end."""
    shard = journal.header.request.shard
    if shard is None or not any(x.complete for x in journal.footers):
        return None
    host = str(journal.header.environment.get(HOST, "unknown"))
    return Whole(shard[0], host, len(journal.records), sum(x.wall_s for x in journal.footers))


def _ending(note: Delivery) -> str:
    if note.code in ENDED:  # it said how to go on in a folder that is gone
        return f"it was ended by {signal.Signals(note.code - 128).name} before it was whole"
    last = [x for x in note.said.splitlines() if x.strip()]
    return f"it ended with exit code {note.code}" + (f": {last[-1][:300]}" if last else "")


def _same(order: Order, home: Home, whole: Whole, path: Path) -> bool:
    """Whether a delivery is the very one that was taken in."""
    if order.compare:  # its report is read where it was delivered, the first one always
        return True
    there = path_of(home, order.run, (whole.shard, order.shards)).read_bytes()
    return hashlib.sha256(there).digest() == hashlib.sha256((path / JOURNAL).read_bytes()).digest()
