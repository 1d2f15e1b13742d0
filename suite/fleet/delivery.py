"""What a task brings back: a folder with what it measured, and a note with the hashes of that, written last.

An engine may bring the same shard twice, half of it, or none of it: a folder without its note, or whose files are
not those of the note, was not delivered.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ...registry.escape import lines

NOTE = "delivery.json"
LARGEST = 512 << 20
"""Bytes of one file; journals are never larger (`registry/store/bounds.py`)."""
TAIL = 4000


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a task ended. `files` maps what it brought, by name, to its SHA-256; `said` is the end of its log."""

    run: str
    shard: tuple[int, int]
    host: str
    code: int
    files: dict[str, str]
    said: str = ""
    wall_s: float = 0.0


def digest(data: bytes) -> str:
    """The SHA-256 of a file's bytes."""
    return hashlib.sha256(data).hexdigest()


def write(folder: Path, delivery: Delivery, contents: Mapping[str, bytes]) -> None:
    """Makes the folder, whole or not at all as seen by `found`."""
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir(parents=True)
    try:
        for name, data in contents.items():
            (hidden / name).write_bytes(data)
        (hidden / NOTE).write_bytes(msgspec.json.encode(delivery))
        os.replace(hidden, folder)
    except OSError:  # a full disk is none the emptier for what nobody will read
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def read(folder: Path) -> tuple[Delivery, dict[str, bytes]] | str:
    """A delivery and its files, or why it is none."""
    try:
        note = msgspec.json.decode((folder / NOTE).read_bytes(), type=Delivery)
        contents = {}
        for name, sha in note.files.items():
            path = folder / name
            if Path(name).name != name or path.is_symlink() or path.stat().st_size > LARGEST:
                return f"{name[:100]!r} is no file of a delivery"
            data = path.read_bytes()
            if digest(data) != sha:
                return f"{name[:100]!r} is not what was sent: its hash is another"
            contents[name] = data
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        return lines(str(error), 300)
    return note, contents


def hashes(folder: Path) -> frozenset[str]:
    """The SHA-256 of each file of a delivery, as its note says; none of what is no delivery."""
    try:
        return frozenset(msgspec.json.decode((folder / NOTE).read_bytes(), type=Delivery).files.values())
    except (OSError, msgspec.MsgspecError, ValueError):
        return frozenset()


def found(folder: Path) -> Iterator[Path]:
    """The folders of deliveries in a folder, oldest first."""
    there = [x for x in folder.iterdir() if not x.name.startswith(".") and x.is_dir()] if folder.is_dir() else []
    yield from sorted(there, key=lambda x: (x.stat().st_mtime_ns, x.name))
