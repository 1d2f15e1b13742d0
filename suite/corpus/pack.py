"""A built corpus as one compressed file, for machines without network."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
from pathlib import Path

from ...registry.errors import InputError
from .build import ENDING, LICENCES, check, sha256
from .manifest import Manifest, Part

PRESET = 6
"""Of xz. Higher ones save 5 % and take twice the memory to read."""


def pack(manifest: Manifest, folder: Path, target: Path) -> int:
    """Writes a folder's corpus into one file and says how many bytes that took. The same bytes every time."""
    names = [*(x + ENDING for x in sorted(manifest.parts)), LICENCES]
    partial = target.with_name(target.name + ".part")
    try:
        with (
            lzma.open(partial, "wb", preset=PRESET) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for name in names:
                data = (folder / name).read_bytes()
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"{target.name} cannot be written: {error.strerror or error}") from None
    return target.stat().st_size


def unpack(manifest: Manifest, source: Path) -> tuple[dict[str, bytes], bytes]:
    """The texts by name and the licences that a packed file holds, checked. Reads members by name, writes nothing.

    Raises `InputError` for a file that is none, `HarnessError` for another corpus.
    """
    most = sum(x.bytes for x in manifest.parts.values()) + (16 << 20)
    try:
        with lzma.open(source) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
            found: dict[str, bytes] = {}
            for entry in archive:
                # What a member says of its size is checked before it is believed.
                if not entry.isfile() or entry.size > most - sum(map(len, found.values())):
                    raise InputError(f"{source.name} holds more than a corpus.")
                file = archive.extractfile(entry)
                assert file is not None
                found[entry.name] = file.read()
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise InputError(f"{source.name} is not a packed corpus: {error}") from None
    texts = {x: found[x + ENDING] for x in manifest.parts if x + ENDING in found}
    check(manifest, {name: Part(len(data), sha256(data)) for name, data in texts.items()})
    return texts, found.get(LICENCES, b"")
