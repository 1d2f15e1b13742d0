"""Where a built corpus lies, and how a training program reads it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...registry.store.home import Home
from . import encoding
from .build import ENDING, MAKE
from .manifest import Manifest, load

VARIABLE = "KERNELMARK_CORPUS"


class NoCorpus(Exception):
    """There is no built corpus here; the message says how one is made."""


def folder(manifest: Manifest | None = None) -> Path:
    """The folder of a manifest's corpus: below $KERNELMARK_CORPUS, by default below the home."""
    given = os.environ.get(VARIABLE)
    return (Path(given) if given else Home().folder / "corpus") / (manifest or load()).digest


@dataclass(frozen=True)
class Corpus:
    """A built corpus: its texts as bytes, mapped and not loaded, and the name that says which it is."""

    digest: str
    parts: Mapping[str, mmap.mmap | bytes]


def opened() -> Corpus:
    """The corpus that lies here. Raises `NoCorpus` where there is none of the manifest's sizes.

    Hashes are checked when it is made, and by `kernelmark corpus verify`.
    """
    manifest = load()
    where = folder(manifest)
    parts: dict[str, mmap.mmap | bytes] = {}
    for name, part in manifest.parts.items():
        try:
            with open(where / (name + ENDING), "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            raise NoCorpus(f"no corpus {manifest.digest} here. {MAKE}") from None
        if len(mapped) != part.bytes:
            raise NoCorpus(f"the corpus here is not {manifest.digest}: {name} has {len(mapped)} bytes. {MAKE}")
        parts[name] = mapped
    return Corpus(manifest.digest, parts)


def encoded() -> dict[str, mmap.mmap]:
    """The corpus that lies here in GPT-2's tokens, 16 bits each. Raises `NoCorpus` where it was not encoded."""
    found, where = {}, folder()
    for name in opened().parts:
        try:
            with open(where / (name + encoding.ENCODED), "rb") as file:
                found[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            raise NoCorpus(
                f"the corpus is not here in GPT-2's tokens. {encoding.MAKE}. {encoding.NEEDS}."
            ) from None
    return found
