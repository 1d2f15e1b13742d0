"""Where results live: `KERNELMARK_HOME`, else `.kernelmark/` in the current directory where there is one, else the
`home` of the user's configuration file, else `.kernelmark/` in the current directory, which is then made.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from functools import lru_cache
from pathlib import Path

from ..errors import InputError, short, unknown
from . import labels, settings
from .bounds import OutOfBounds, moment
from .journal import Journal, read, read_header
from .record import Header

PROJECT = ".kernelmark"
LATEST = "latest"
_BEGINNING = 2048
"""Bytes of a journal that hold its header's first fields, when it was made among them."""
_CREATED = re.compile(
    rb'\{\s*"kind":\s*"header",\s*"schema_version":\s*\d+,\s*"run":\s*"[\w-]*",\s*"created":\s*"([^"\\]*)"'
)


class Home:
    """The folder of journals, reports, logs and the embedded registry. Created when first written to."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.why = (folder, "as the command says") if folder else _chosen()

    @property
    def journals(self) -> Path:
        """One journal a run, named by it."""
        return self.folder / "journals"

    @property
    def shards(self) -> Path:
        """Journals of runs that were measured in parts, one a part."""
        return self.journals / "shards"

    @property
    def reports(self) -> Path:
        """HTML reports."""
        return self.folder / "reports"

    @property
    def logs(self) -> Path:
        """What workers printed."""
        return self.folder / "logs"

    @property
    def fleet(self) -> Path:
        """What is kept of runs over many machines or GPUs, a folder a run: its order, and what was delivered."""
        return self.folder / "fleet"

    @property
    def scratch(self) -> Path:
        """What runs that were killed go on from, a folder a run; empty where none was."""
        return self.folder / "scratch"

    @property
    def database(self) -> Path:
        """The embedded registry."""
        return self.folder / "registry.db"

    def journal(self, run: str) -> Path:
        """Where a run's journal is or will be."""
        return self.journals / f"{run}.jsonl"

    def paths(self) -> dict[str, Path]:
        """The journals here by their runs' names, oldest first as their headers say: names may be any."""
        found: dict[str, Path] = {}
        if self.folder.is_file():
            raise InputError(f"{self.folder} ({self.why}) is a file; name a folder, which need not exist yet.")
        try:
            for path in sorted(self.journals.iterdir() if self.journals.is_dir() else ()):
                for ending in (".jsonl", ".jsonl.gz"):
                    if path.name.endswith(ending) and not path.name.startswith("."):
                        found.setdefault(path.name.removesuffix(ending), path)
        except OSError as error:
            raise InputError(f"{self.journals} cannot be read: {error.strerror}.") from None
        return dict(sorted(found.items(), key=lambda x: (_made(x[1]), x[0])))

    def names(self) -> dict[str, str]:
        """The runs that somebody gave a name, by it."""
        return {x.name: run for run, x in labels.read(self.folder).items() if x.name is not None}

    def latest(self) -> str | None:
        """The latest run that somebody asked for, which a side of a comparison is not. One whose journal cannot be
        read counts too: that is said when it is read, and no older run takes its place.
        """
        for run, path in reversed(self.paths().items()):
            header = read_header(path)
            if header is None or asked_for(header):
                return run
        return None

    def runs(self) -> list[str]:
        """Names of the runs here, oldest first."""
        return list(self.paths())

    def find(self, run: str) -> Path:
        """The journal of a run: given its name, the beginning of one, a name that somebody gave it, `latest`, or a
        journal's path.

        Raises `InputError` if there is none or more than one.
        """
        path = Path(run)
        try:
            if path.suffix in (".jsonl", ".gz") or os.sep in run:
                if not path.exists():
                    raise InputError(f"no journal at {short(run)}.")
                return path
        except (OSError, ValueError) as error:  # somebody else's folder; a name of megabytes
            raise InputError(f"no journal at {short(run)}: {getattr(error, 'strerror', None) or error}.") from None
        paths = self.paths()
        if not paths:
            raise InputError(
                f"no runs in {self.folder} ({self.why}); make one with `kernelmark run` or import a journal."
            )
        if run == LATEST:
            latest = self.latest()
            if latest is None:
                raise InputError(f"{self.folder} holds only sides of comparisons: kernelmark runs --all")
            return paths[latest]
        if run in paths:  # by its whole name it is found whatever people called it
            return paths[run]
        names = self.names()
        wanted = names.get(run, run)
        found = [wanted] if wanted in paths else [x for x in paths if x.startswith(run)]
        if len(found) > 1:
            raise InputError(
                f"run {run!r} is ambiguous: {', '.join(found[:20])}{' …' if len(found) > 20 else ''}."
            )
        if not found:
            raise unknown("run", run, [LATEST, *names, *list(paths)[-10:]])
        return paths[found[0]]

    def load(self, run: str, lean: bool = False) -> Journal:
        """Reads the journal that `find` finds; `lean` as `journal.read` has it."""
        return read(self.find(run), lean)


def _made(path: Path) -> float:
    """When a run was made, in seconds; of a journal that does not say it, when that was last written."""
    try:
        state = path.stat()
    except OSError:  # deleted meanwhile
        return 0.0
    said = _said(path, state.st_size, state.st_mtime_ns)
    return state.st_mtime if said is None else said


@lru_cache(maxsize=100_000)
def _said(path: Path, size: int, written: int) -> float | None:
    """When a journal's header says that its run was made. A header may have megabytes: its beginning is read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            found = _CREATED.match(file.read(_BEGINNING))
    except (OSError, EOFError, zlib.error):
        return None
    header = None if found else read_header(path)  # one that another program wrote, in another order
    created = found[1].decode(errors="replace") if found else header.created if header is not None else ""
    try:
        return moment(created).timestamp()
    except OutOfBounds:
        return None


def _chosen() -> tuple[Path, str]:
    """The folder, and why that one."""
    named = os.environ.get("KERNELMARK_HOME")
    if named:
        return Path(named), "KERNELMARK_HOME says so"
    own = settings.load().home
    if own is None or Path(PROJECT).is_dir():
        return Path(PROJECT), "the current directory's own"
    try:
        return Path(own).expanduser(), f"{settings.file()} says so"
    except RuntimeError:  # no such user, or one without a home
        raise InputError(f"{settings.file()}: home is {own!r}, and whose ~ that is is not known here.") from None


def asked_for(header: Header) -> bool:
    """Whether somebody asked for a run, and not a comparison of commits or images for one of its sides."""
    request = header.request
    return request.partner is None and request.arm is None and request.stage == 0
