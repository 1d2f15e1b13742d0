"""Wheels that were compiled elsewhere, taken by the hash of a lock in place of compiling them again.

The files are too large for the repository: they lie in `docker/wheels`, which git ignores. Where one does not, the
image's build compiles its sources.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from ...registry.errors import InputError
from .table import Image

FOLDER = Path("docker") / "wheels"
_ENTRY = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^\s;]+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Wheel:
    """A file of `FOLDER` that a lock names: its path in the checkout, and its hash."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return f"{self.path.name} (sha256 {self.sha256})"


def pinned(lock: str) -> dict[str, str]:
    """The version that a lock has of each package, by the name as wheels spell it."""
    return {re.sub(r"[-_.]+", "_", x["name"]).lower(): x["version"] for x in _ENTRY.finditer(lock)}


def found(folder: Path, image: Image) -> Wheel | None:
    """The wheel to take for an image of the checkout in `folder`; None where there is none and it is compiled.

    Raises `InputError` for a wheel of that name and version whose hash the lock does not have.
    """
    if not image.wheel or not (folder / image.wheel).is_file():
        return None
    lock = (folder / image.wheel).read_text()
    hashes = set(_HASH.findall(lock))
    for name, version in pinned(lock).items():
        for path in sorted((folder / FOLDER).glob(f"{name}-{version}-*.whl")):
            inside, digest = path.relative_to(folder), hashlib.sha256(path.read_bytes()).hexdigest()
            if digest not in hashes:
                raise InputError(
                    f"{inside} is not the wheel that {image.wheel} names: its sha256 is {digest}. Without it the "
                    f"build compiles {image.sources}."
                )
            return Wheel(inside, digest)
    return None
