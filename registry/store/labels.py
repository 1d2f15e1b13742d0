"""What people call runs: a name, tags, a note. Kept beside the journals, which stay as they were written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ..errors import InputError, unwritable


class Label(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one run is called."""

    name: str | None = None
    tags: tuple[str, ...] = ()
    note: str | None = None


NOTHING = Label()


def read(folder: Path) -> dict[str, Label]:
    """The labels of a home's runs, by run."""
    path = folder / "labels.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Label])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} cannot be read: {why}. It holds names, tags and notes of runs, and nothing measured: "
            "mend it, or move it away."
        ) from None


def change(folder: Path, run: str, **fields: Any) -> Label:
    """Sets fields of a run's label, and returns it. One that holds nothing any more is not kept."""
    from filelock import FileLock  # who only reads needs none

    path = folder / "labels.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "labels.lock"):
            before = read(folder)
            label = msgspec.structs.replace(before.get(run, NOTHING), **fields)
            kept = {x: y for x, y in {**before, run: label}.items() if y != NOTHING}
            fresh = path.with_suffix(".new")
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(kept.items()))), indent=2))
            os.replace(fresh, path)
    except OSError as error:
        raise unwritable(
            f"{path} cannot be written", error, "Names, tags and notes need a folder open to you."
        ) from None
    return label
