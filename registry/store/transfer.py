"""Journals in and out of a home: validated whole, written atomically, and never merged by guess."""

from __future__ import annotations

import gzip
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from ..errors import InputError, unwritable
from ..figures import counted
from .home import LATEST, Home
from .journal import Journal, content, parse, read
from .shards import FEW, grew, lines_of, path_of, shards_of
from .shards import join as joined

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


def checked_tag(tag: str) -> str:
    """A run's tag, if it is one: of the form of a name, as tables show tags with blanks between them."""
    if not _RUN.fullmatch(tag):
        raise InputError(f"{tag!r} is not a tag: letters, digits, - and _ only, 200 at most")
    return tag


def checked_run(run: str) -> str:
    """A run's name, if it is one.

    It becomes a file's name and part of a search, and an imported journal may say anything.
    """
    if not _RUN.fullmatch(run):
        raise InputError(f"{run!r} is not a run's name: letters, digits, - and _ only, 200 at most")
    if run == LATEST:
        raise InputError(f"{run!r} is not a run's name: it stands for the newest run; take another name")
    return run


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a journal that are whole, as they stand; a torn last one is left out.

    Raises `InputError` for what is no valid journal.
    """
    raw = content(path)
    journal = parse(raw, path)
    checked_run(journal.header.run)
    lines = [x.strip() for x in raw.split(b"\n") if x.strip()]
    return lines[:-1] if journal.torn else lines


def import_journal(path: Path, home: Home) -> str:
    """Copies a journal, plain or compressed, into the home and returns its run.

    If the run is there already, the longer of the two journals stays, provided that the shorter is its
    beginning: a run that was resumed elsewhere; or of one that was joined from shards, that it has all that the
    shorter has. Two journals that differ otherwise raise `InputError`.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the journals in it, {path}/*.jsonl*")
    lines = whole_lines(path)
    header = parse(lines[0] + b"\n", path).header
    run, shard = header.run, header.request.shard
    try:
        home.journals.mkdir(parents=True, exist_ok=True)
        # Of two imports of one run at once, the second must see what the first wrote.
        with FileLock(home.folder / "import.lock"):
            if shard is not None:
                target = path_of(home, run, shard)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists() or _grew(target, lines, run, path):
                    # Joined before it is kept: what does not fit must not stand in the others' way.
                    others = [read(x) for x in shards_of(home, run) if x != target]
                    shards = [*others, parse(b"".join(x + b"\n" for x in lines), path)]
                    joined(shards)
                    _refuse_to_drop(_existing(home, run), shards, path)
                    write_whole(target, b"".join(x + b"\n" for x in lines))
                _join(home, run)
                return run
            there = _existing(home, run)
            here = [x.name for x in shards_of(home, run)]
            if there is None or _grew(there, lines, run, path, here):
                target = home.journal(run)
                write_whole(target, b"".join(x + b"\n" for x in lines))
                if there is not None and there != target:
                    there.unlink()  # the compressed beginning of what now stands beside it
    except OSError as error:
        elsewhere = "Choose another folder with KERNELMARK_HOME."
        raise unwritable(f"{home.folder} cannot be written", error, elsewhere) from None
    return run


def _refuse_to_drop(there: Path | None, shards: Sequence[Journal], path: Path) -> None:
    """Raises `InputError` where a run's journal came whole and has what none of these shards has: the journal that
    is made of them would take its place, and the rest would be lost.
    """
    held = {(x.identity, x.replicate) for shard in shards for x in shard.records}
    lost = [] if there is None else [x for x in read(there).records if (x.identity, x.replicate) not in held]
    if lost:
        run = shards[0].header.run
        raise InputError(
            f"{path}: run {run} is here already, with {counted(len(lost), 'measurement')} that neither this shard "
            "nor one beside it has; nothing was changed. To put it together from its shards: "
            f"kernelmark runs delete {run}"
        )


def join(home: Home, run: str) -> list[str]:
    """Makes the journal of a run anew from its shards that are here; returns those that are missing, as `i/n`."""
    with FileLock(home.folder / "import.lock"):
        return _join(home, run)


def _join(home: Home, run: str) -> list[str]:
    lines, missing = lines_of(home, run)
    write_whole(home.journal(run), b"".join(x + b"\n" for x in lines))
    return missing


def _existing(home: Home, run: str) -> Path | None:
    paths = (home.journal(run), home.journals / f"{run}.jsonl.gz")
    return next((x for x in paths if x.exists()), None)


def _grew(kept: Path, given: Sequence[bytes], run: str, path: Path, shards: Sequence[str] = ()) -> bool:
    """Whether `given`, from `path`, continues the journal `kept`, which these `shards` were joined to; False where
    it adds nothing.
    """
    there = whole_lines(kept)
    shared = min(len(there), len(given))
    if there[:shared] == given[:shared]:
        return len(given) > len(there)
    old, new = (parse(b"".join(y + b"\n" for y in x), of) for x, of in ((there, kept), (given, path)))
    # With some of its shards missing, a run's journal is no beginning of the whole one: both were made anew.
    if old.header.request.missing or new.header.request.missing:
        more = grew(old, new)
        if more and shards:  # of which the journal is made again, without what they lack
            raise InputError(
                f"{path}: run {run} is here in shards, {', '.join(shards[:FEW])}, and this has more; nothing was "
                "changed. Import the journals of the shards that are missing here"
            )
        if more is not None:
            return more
    line = next(i for i in range(shared) if there[i] != given[i]) + 1
    raise InputError(
        f"{path}: run {run} is here already with other content from line {line} on. A journal only grows, "
        "so one of the two was edited, or two machines resumed the same run; nothing was changed"
    )


def export(home: Home, runs: Sequence[str], output: Path, *, force: bool = False) -> list[Path]:
    """Writes the journals of runs to a folder, compressed, or one run to a `.jsonl` or `.jsonl.gz` file.

    A file that exists and differs is only replaced with `force`. Returns the files.
    """
    sources = [home.find(x) for x in runs]
    one_file = output.name.endswith((".jsonl", ".jsonl.gz"))
    if not sources:
        raise InputError("no run to export: name at least one, or `latest`")
    if one_file and len(sources) > 1:
        raise InputError(f"{output} is one file and there are {len(sources)} runs; give a folder")
    if not one_file and output.exists() and not output.is_dir():
        raise InputError(f"{output} is neither a folder nor named .jsonl or .jsonl.gz")
    out = []
    for source in sources:
        text = b"".join(x + b"\n" for x in whole_lines(source))
        target = output if one_file else output / f"{read(source).header.run}.jsonl.gz"
        # No time inside, so that the same journal always makes the same file.
        data = gzip.compress(text, mtime=0) if target.suffix == ".gz" else text
        try:
            if not target.exists() or target.read_bytes() != data:
                if target.exists() and not force:
                    raise InputError(f"{target} exists and holds something else; --force replaces it")
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, data)
        except OSError as error:
            raise unwritable(f"{target} cannot be written", error, "Choose another place with --output.") from None
        out.append(target)
    return out


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: a reader never sees half of it, a full disk leaves the old one."""
    handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    temporary = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's 0600 would hide the journal from the user's own group
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
