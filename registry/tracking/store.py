"""The result registry in MLflow: filled from journals, as often as one likes.

What ingesting guarantees, for SQLite and for a server, with any number of writers and any of them killed
at any point: once the last ingest of a run has come to its end, every row stands there exactly once, in the
state of the longest journal ingested. It rests on four rules, none of which needs a transaction:

1. What is written for a row is a pure function of the journal, timestamps included, so two processes that
   fill the same MLflow run do no harm, and a run left unfinished by a killed process is simply finished, by
   whoever comes next, even beside a finished one of the same row.
2. An MLflow run is never changed once finished. A row that changed gets a new one of the next `generation`.
3. MLflow runs of one row have a total order: journal length, generation, id. Only one that stands below a
   *finished* one is ever deleted, so the highest finished one outlives everybody.
4. Everyone looks again after writing. Of two writers the later one to finish sees both, and tidies up.

On one machine a file lock keeps writers apart besides, because waiting is cheaper than tidying up.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import InputError
from ..store.home import Home
from ..store.index import Index
from ..store.journal import Journal, read
from ..store.transfer import checked_run
from .bulk import Bulk
from .connection import Connection, StoreError, connect, locked, resolve
from .entries import SUMMARY, Entry, artifacts, content_hash, entries, journal_file, length, summary
from .saved_view import NARROWER, READABLE, TAG, Opened, View, drawn

__all__ = ["Ingested", "Store", "StoreError", "Synced", "resolve", "sync"]

Progress: TypeAlias = Callable[[int, int], None]

_PAGE = 100
"""Entries of one answer: a server takes 4 ms for each, and has other writers to answer meanwhile."""
_CHUNK = 100
"""Entries of one transaction: a tenth of a second, so that others need not wait and progress shows."""
_FEW = 20
"""Entries that are deleted before looking again who else deletes them."""
_HASH, _LINES, _GENERATION, _REPORT = "result_sha256", "journal_lines", "generation", "report_sha256"


@dataclass(frozen=True)
class Ingested:
    """What an ingest did: rows newly made, made anew because the journal grew, and left as they were."""

    run: str
    created: int
    updated: int
    skipped: int
    deep_link: str


@dataclass(frozen=True)
class Step:
    """How far a sync is: rows of the run under way, and the fraction of all that it was asked for."""

    run: str
    rows: int
    of: int
    fraction: float


@dataclass(frozen=True)
class Synced:
    """What a sync did, and the journals it could not read, by run."""

    ingested: tuple[Ingested, ...]
    complete: tuple[str, ...]
    unreadable: Mapping[str, str]


@dataclass(frozen=True)
class _Stored:
    """An MLflow run that stands for a row, or for a run's summary, in some state of its journal."""

    id: str
    identity: str
    sha256: str
    lines: int
    generation: int
    finished: bool
    report: str | None = None

    @classmethod
    def of(cls, run: Any) -> _Stored:
        """From MLflow's own type."""
        return cls.from_tags(run.info.run_id, run.info.status, run.data.tags)

    @classmethod
    def from_tags(cls, run_id: str, status: str, tags: Mapping[str, str]) -> _Stored:
        """From what MLflow keeps of it."""
        number = {x: int(tags[x]) if tags.get(x, "").isdigit() else 0 for x in (_LINES, _GENERATION)}
        return cls(
            id=run_id,
            identity=tags.get("identity", ""),
            sha256=tags.get(_HASH, ""),
            lines=number[_LINES],
            generation=number[_GENERATION],
            finished=status in ("FINISHED", "FAILED"),
            report=tags.get(_REPORT),
        )

    @property
    def rank(self) -> tuple[int, int, str]:
        """Of several for one row the highest stays."""
        return (self.lines, self.generation, self.id)


class Store:
    """An open registry. `Store.open` is the only way to make one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = connection.client
        self._bulk: Bulk | None = None
        if connection.database is not None:
            with connection.reachable():
                self._bulk = Bulk.open(connection.database, connection.experiment_id)

    @classmethod
    def open(cls, uri: str | None, home: Home) -> Store:
        """Opens the registry at an MLflow URI: given, else MLFLOW_TRACKING_URI, else SQLite in the home.

        Raises `StoreError` where it does not answer within seconds, `InputError` for a URI of no use here.
        """
        return cls(connect(uri, home))

    def ingest(self, journal: Journal, report: Path | None = None, progress: Progress | None = None) -> Ingested:
        """Brings a journal's rows into the registry, and its summary with the artifacts last.

        `report` is an HTML page to keep with them. Idempotent, and safe against others: see above.
        """
        with locked(self._connection.lock), self._connection.reachable():
            wanted = entries(journal)
            count: Counter[str] = Counter()
            run, lines = journal.header.run, length(journal)
            before = self._of_run(run)
            apart = [x for x in wanted if x.identity in before or self._bulk is None or not self._bulk.takes(x)]
            single = {x.identity for x in apart}
            for number in self._create([x for x in wanted if x.identity not in single], lines):
                count["created"] = number
                if progress:
                    progress(number, len(wanted))
            for number, entry in enumerate(apart, count["created"] + 1):
                count[self._bring(entry, before.get(entry.identity, []), lines, {})] += 1
                if progress:
                    progress(number, len(wanted))
            wrote = count["created"] + count["updated"] or any(not x.finished for y in before.values() for x in y)
            self._tidy(self._of_run(run) if wrote else before, run)
            # The summary last: once it is finished, nothing of the run is missing.
            entry = summary(journal)
            self._bring(entry, before.get(SUMMARY, []), lines, artifacts(journal))
            left = self._tidy(self._of_run(run, SUMMARY), run, SUMMARY).get(SUMMARY, [])
            if report is not None and left:
                self._keep_report(max(left, key=lambda x: x.rank), report)
            return Ingested(run, count["created"], count["updated"], count["skipped"], self.deep_link(run))

    def attach(self, verification: Journal) -> None:
        """Keeps the journal of a verification with the run that it verifies too, where the registry has that."""
        verified, digest = verification.header.request.verifies, content_hash(verification)
        if verified is None:
            return
        name = f"verified_by.{checked_run(verification.header.run)}"
        with locked(self._connection.lock), self._connection.reachable():
            condition = f"tags.invocation = '{checked_run(verified)}' and tags.kind = '{SUMMARY}'"
            for found in list(self._search(condition)):
                if found.data.tags.get(name) != digest:
                    self._connection.upload(found.info.run_id, *journal_file(verification))
                    self._client.set_tag(found.info.run_id, name, digest)

    def complete(self) -> dict[str, str]:
        """Content hashes of the runs that are wholly in the registry, by run."""
        found: dict[str, list[_Stored]] = {}
        with self._connection.reachable():
            for run in self._search(f"tags.kind = '{SUMMARY}'"):
                found.setdefault(run.data.tags["invocation"], []).append(_Stored.of(run))
            # What a killed writer left of a row that another one recorded.
            begun = {x.data.tags.get("invocation") for x in self._search("attributes.status = 'RUNNING'")}
        whole = {name: x[0] for name, x in found.items() if len(x) == 1 and x[0].finished}
        return {name: x.sha256 for name, x in whole.items() if name not in begun}

    def newest(self) -> str | None:
        """The run measured last of those that have a row with a value in the registry."""
        with self._connection.reachable():
            for run in self._search("tags.kind = 'row' and tags.status = 'ok'", limit=1):
                return str(run.data.tags["invocation"])
        return None

    def tag(self, run: str, wanted: Mapping[str, Mapping[str, str]], prefix: str) -> int:
        """Gives the entries of a run tags of their own, by identity; how many rows have them now.

        All tags that begin with `prefix` are this call's: those not wanted go. They are no part of an entry's
        content, so an ingest leaves them alone.
        """
        count = 0
        with locked(self._connection.lock), self._connection.reachable():
            for found in list(self._search(f"tags.invocation = '{checked_run(run)}'")):
                there: Mapping[str, str] = found.data.tags
                mine = wanted.get(there.get("identity", ""), {})
                for name, value in mine.items():
                    if there.get(name) != value:
                        self._client.set_tag(found.info.run_id, name, value)
                for name in [x for x in there if x.startswith(prefix) and x not in mine]:
                    self._client.delete_tag(found.info.run_id, name)
                count += bool(mine) and there.get("kind") == "row"
        return count

    def deep_link(self, run: str | None) -> str:
        """The UI's address of a run's rows, or of all; only its fragment where no server runs."""
        wanted = {"kind": "row", "status": "ok"} | ({"invocation": run} if run else {})
        return self._connection.link(View("", wanted, ()).search)

    def saved_view(self, conditions: Mapping[str, str]) -> Opened:
        """A view of the rows with these tags, as far as its charts can be read: of more rows than that, or where
        no operator is named, it is the newest run's first case among them.

        The view is kept in the registry, so that its address is good for whoever has it. Raises `InputError` where
        no row has a value and such tags; the message says what there is of the first tag that fits none.
        """
        wanted = {"kind": "row", "status": "ok", **conditions}
        with self._connection.reachable():
            found = self._rows(wanted)
            if not found:
                raise InputError(self._nothing(conditions))
            first, asked = found[0].data.tags, len(found)
            for names in NARROWER:
                if "operator" in wanted and len(found) <= READABLE:
                    break
                chosen = {x: first[x] for x in names}
                wanted |= chosen
                found = [x for x in found if all(x.data.tags[y] == z for y, z in chosen.items())]
            metrics = sorted({name for x in found for name in x.data.metrics if not name.endswith("/curve")})
            shown = drawn(metrics, first.get("primary", "latency"))
            view = View(
                " · ".join(wanted[x] for x in ("operator", "case") if x in wanted),
                wanted,
                shown,
                others=[x for x in metrics if x not in shown],
                higher=first.get("better") == "higher",
                rows=len(found),
            )
            kept = self._keep_view(view)
        address = view.fragment(self._connection.experiment_id)
        link = self._connection.address(address) if kept else self._connection.link(view.search)
        return Opened(link, view.title, view.rows, asked)

    def _keep_view(self, view: View) -> bool:
        """Whether the registry has the view now: who may only read it gets the search alone."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.set_experiment_tag(self._connection.experiment_id, f"{TAG}{view.key}", view.state)
        except MlflowException as error:
            if error.error_code != "PERMISSION_DENIED":
                raise
            return False
        return True

    def _rows(self, wanted: Mapping[str, str]) -> list[Any]:
        """MLflow's runs with these tags, the newest run's first case first."""
        return list(self._search(View("", wanted, ()).search))

    def _nothing(self, conditions: Mapping[str, str]) -> str:
        """Which of the conditions fits no row that fits those before it, and what would."""
        held: dict[str, str] = {"kind": "row", "status": "ok"}
        for name, value in conditions.items():
            if not self._rows({**held, name: value}):
                if name == "invocation":
                    return f"run {value} has no row with a value in the registry: kernelmark show {value}"
                there = sorted({str(x.data.tags[name]) for x in self._rows(held) if name in x.data.tags})
                known = ", ".join(there[:20]) or "none at all"
                return f"no row in the registry has {name} {value!r}; there are: {known}"
            held[name] = value
        return "the registry has no row with a value; `kernelmark run` or `kernelmark import` brings some"

    def _search(self, condition: str, limit: int | None = None) -> Iterator[Any]:
        """All active runs that match, page by page: MLflow silently stops at the first page."""
        token = None
        while True:
            page = self._client.search_runs(
                [self._connection.experiment_id],
                condition,
                max_results=limit or _PAGE,
                order_by=["attributes.start_time DESC"],
                page_token=token,
            )
            yield from page
            token = page.token
            if not token or limit:
                return

    def _of_run(self, run: str, kind: str | None = None) -> dict[str, list[_Stored]]:
        if self._bulk is not None and kind is None:
            names = ("identity", _HASH, _LINES, _GENERATION, _REPORT)
            there = self._bulk.of_run(run, names)
            fast: dict[str, list[_Stored]] = {}
            for x in there:
                fast.setdefault(x.tags.get("identity", ""), []).append(_Stored.from_tags(x.id, x.status, x.tags))
            return fast
        condition = f"tags.invocation = '{run}'" + (f" and tags.kind = '{kind}'" if kind else "")
        out: dict[str, list[_Stored]] = {}
        for found in map(_Stored.of, self._search(condition)):
            out.setdefault(found.identity, []).append(found)
        return out

    def _create(self, fresh: Sequence[Entry], lines: int) -> Iterator[int]:
        """Writes entries of which nothing stands in the registry yet, many at a time; how many so far."""
        for begin in range(0, len(fresh), _CHUNK):
            assert self._bulk is not None
            some = fresh[begin : begin + _CHUNK]
            self._bulk.create([(x, _own_tags(x, lines, 1)) for x in some])
            yield begin + len(some)

    def _bring(self, entry: Entry, there: Sequence[_Stored], lines: int, files: Mapping[str, bytes]) -> str:
        """Sees to it that an entry stands in the registry, if nothing newer does; says what that took."""
        done = max((x for x in there if x.finished), key=lambda x: x.rank, default=None)
        if done is not None and done.lines > lines:
            return "skipped"
        below = done.rank if done else (0, 0, "")
        # Begun by a writer that lives or was killed. It stands above, so nobody may delete it: it is finished,
        # even where the row is there already, and what stands below goes.
        begun = [x for x in there if not x.finished and x.sha256 == entry.sha256 and x.rank > below]
        same = done is not None and done.sha256 == entry.sha256
        if same and not begun:
            return "skipped"
        if begun:
            run_id = max(begun, key=lambda x: x.rank).id
        else:
            generation = 1 + max((x.generation for x in there), default=0)
            run_id = self._client.create_run(
                self._connection.experiment_id,
                start_time=entry.start_ms,
                tags={**entry.tags, **_own_tags(entry, lines, generation)},
                run_name=entry.name,
            ).info.run_id
        if not self._fill(run_id, entry, files) or same:
            return "skipped"
        return "updated" if done else "created"

    def _fill(self, run_id: str, entry: Entry, files: Mapping[str, bytes]) -> bool:
        """Writes what belongs to an entry; False where another writer put something newer in its place."""
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        metrics = [Metric(name, value, entry.start_ms, 0) for name, value in entry.metrics.items()]
        metrics += [Metric(x, value, entry.start_ms, step) for x, y in entry.curves.items() for step, value in y]
        params = [Param(name, value) for name, value in entry.params.items()]
        try:
            if metrics or params:
                self._client.log_batch(run_id, metrics=metrics, params=params)
            for name, data in files.items():
                self._connection.upload(run_id, name, data)
            self._client.set_terminated(run_id, "FAILED" if entry.failed else "FINISHED", entry.end_ms)
        except MlflowException as error:
            refused = error.error_code == "INVALID_PARAMETER_VALUE"
            if refused and self._client.get_run(run_id).info.lifecycle_stage == "deleted":
                return False
            raise
        return True

    def _tidy(
        self, found: Mapping[str, list[_Stored]], run: str, kind: str | None = None
    ) -> Mapping[str, list[_Stored]]:
        """Deletes what stands below a finished entry of the same row; returns what is left.

        Of many that wrote one run at once each sees all that is too much. So each begins somewhere else, and looks
        again after a few: else all would ask for all of it to be deleted.
        """
        while True:
            below = [y for stored in found.values() for y in _below(stored)]
            few = random.sample(below, min(_FEW, len(below)))
            for x in few:
                self._client.delete_run(x.id)
            if len(few) == len(below):
                return {identity: [x for x in stored if x not in few] for identity, stored in found.items()}
            found = self._of_run(run, kind)

    def _keep_report(self, stored: _Stored, report: Path) -> None:
        try:
            data = report.read_bytes()
        except OSError as error:
            raise InputError(f"report {report} cannot be read: {error.strerror}") from None
        sha256 = hashlib.sha256(data).hexdigest()
        if stored.report != sha256:
            self._connection.upload(stored.id, "report.html", data)
            self._client.set_tag(stored.id, _REPORT, sha256)


def _below(stored: Sequence[_Stored]) -> list[_Stored]:
    """Those of a row's entries that a finished one stands above."""
    done = max((x.rank for x in stored if x.finished), default=None)
    return [x for x in stored if done is not None and x.rank < done]


def _told(progress: Callable[[Step], None] | None, run: str, before: float, share: float) -> Progress:
    """Rows of one journal as a part of all, by their journals' sizes."""

    def tell(rows: int, of: int) -> None:
        if progress is not None:
            progress(Step(run, rows, of, before + share * rows / of))

    return tell


def _own_tags(entry: Entry, lines: int, generation: int) -> dict[str, str]:
    """What rule 3 goes by."""
    return {"identity": entry.identity, _HASH: entry.sha256, _LINES: str(lines), _GENERATION: str(generation)}


def sync(
    home: Home,
    runs: Sequence[str] = (),
    uri: str | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Synced:
    """Brings into the registry what is not there yet: the named runs, or all of the home.

    A named run is gone through row by row even if the registry calls it complete. A journal that cannot
    be read does not keep the others out.
    """
    paths = [home.find(x) for x in runs] or list(home.paths().values())
    store, index = Store.open(uri, home), Index(home)
    known = {} if runs else store.complete()
    out = Synced((), (), {})
    sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
    before = 0
    for path, size in zip(paths, sizes, strict=True):
        told = _told(progress, path.name.split(".")[0], before / max(1, sum(sizes)), size / max(1, sum(sizes)))
        before += size
        try:
            told(0, 1)
            journal = read(path)
            run = journal.header.run
            if known.get(run) == content_hash(journal):
                out = replace(out, complete=(*out.complete, run))
                continue
            pages = [x for x in (home.reports / f"{run}.html",) if x.exists()]
            done = store.ingest(journal, pages[0] if pages else None, told)
            for verification in (journal, *index.verifying(run)):
                store.attach(verification)
            out = replace(out, ingested=(*out.ingested, done))
        except InputError as error:
            out = replace(out, unreadable={**out.unreadable, path.name: str(error)})
        except (ArithmeticError, ValueError, LookupError) as error:  # odd numbers that no measurement gives
            said = f"{path} makes no sense: {type(error).__name__}: {error}"
            out = replace(out, unreadable={**out.unreadable, path.name: said})
        except StoreError as error:
            if (why := _refused(error.__cause__)) is None:
                raise
            out = replace(
                out, unreadable={**out.unreadable, path.name: f"{path} is refused by the registry: {why}"}
            )
    return out


def _refused(cause: BaseException | None) -> str | None:
    """Why a server that answers will not have one run, and others all the same; None for every other failure."""
    if getattr(getattr(cause, "response", None), "status_code", None) == 413:
        return "its journal or its report is larger than the server, or a proxy before it, lets in (413)"
    # The second is of the server's database, which has bounds of its own.
    if getattr(cause, "error_code", None) in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
        return " ".join(str(cause).partition("[SQL:")[0].split())  # SQLAlchemy goes on with the whole statement
    return None
