"""Where a user's results live: `KERNELMARK_HOME`, by default `.kernelmark/` in the current directory."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InputError, unknown
from .journal import Journal, read

_ENDINGS = (".jsonl", ".jsonl.gz")


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
    def database(self) -> Path:
        """The embedded registry."""
        return self.folder / "registry.db"

    def journal(self, run: str) -> Path:
        """Where a run's journal is or will be."""
        return self.journals / f"{run}.jsonl"

    def runs(self) -> list[str]:
        """Names of the runs here, oldest first: names begin with the time."""
        names = (x.name for x in self.journals.glob("*.jsonl*"))
        return sorted({name.removesuffix(end) for name in names for end in _ENDINGS if name.endswith(end)})

    def find(self, run: str) -> Path:
        """The journal of a run, given its name, the beginning of one, `latest`, or a journal's path.

        Raises `InputError` if there is none or more than one.
        """
        path = Path(run)
        if path.suffix in (".jsonl", ".gz") or os.sep in run:
            if not path.exists():
                raise InputError(f"no journal at {run}.")
            return path
        runs = self.runs()
        if not runs:
            raise InputError(f"no runs in {self.folder}; make one with `kernelmark run` or import a journal.")
        found = runs[-1:] if run == "latest" else [run] if run in runs else [x for x in runs if x.startswith(run)]
        if len(found) > 1:
            raise InputError(f"run {run!r} is ambiguous: {', '.join(found)}.")
        if not found:
            raise unknown("run", run, ["latest", *runs[-10:]])
        return min(x for x in self.journals.glob(f"{found[0]}.*") if x.name[len(found[0]) :] in _ENDINGS)

    def load(self, run: str) -> Journal:
        """Reads the journal that `find` finds."""
        return read(self.find(run))
