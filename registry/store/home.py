"""Where a user's results live: `KERNELMARK_HOME`, by default `.kernelmark/` in the current directory."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InputError, short, unknown
from .journal import Journal, read


class Home:
    """The folder of journals, reports, logs and the embedded registry. Created when first written to."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(os.environ.get("KERNELMARK_HOME") or ".kernelmark")

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
        """The journals here by their runs' names, oldest first: names begin with the time."""
        found: dict[str, Path] = {}
        try:
            for path in sorted(self.journals.iterdir() if self.journals.is_dir() else ()):
                for ending in (".jsonl", ".jsonl.gz"):
                    if path.name.endswith(ending) and not path.name.startswith("."):
                        found.setdefault(path.name.removesuffix(ending), path)
        except OSError as error:
            raise InputError(f"{self.journals} cannot be read: {error.strerror}.") from None
        return dict(sorted(found.items()))

    def runs(self) -> list[str]:
        """Names of the runs here, oldest first."""
        return list(self.paths())

    def find(self, run: str) -> Path:
        """The journal of a run, given its name, the beginning of one, `latest`, or a journal's path.

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
            raise InputError(f"no runs in {self.folder}; make one with `kernelmark run` or import a journal.")
        runs = list(paths)
        found = runs[-1:] if run == "latest" else [run] if run in paths else [x for x in runs if x.startswith(run)]
        if len(found) > 1:
            raise InputError(
                f"run {run!r} is ambiguous: {', '.join(found[:20])}{' …' if len(found) > 20 else ''}."
            )
        if not found:
            raise unknown("run", run, ["latest", *runs[-10:]])
        return paths[found[0]]

    def load(self, run: str) -> Journal:
        """Reads the journal that `find` finds."""
        return read(self.find(run))
