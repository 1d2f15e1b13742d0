"""What a corpus is made of: pinned packages, which of their files count, and the hashes of what comes out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

from ...registry.errors import InputError, short

FILE = Path(__file__).with_name("manifest.toml")
_HASH = re.compile(r"[0-9a-f]{64}")
_WHEEL = re.compile(r"([A-Za-z0-9_.]+)-([A-Za-z0-9_.!+]+)-([a-z0-9_.]+)-([a-z0-9_.]+)-([a-z0-9_.]+)\.whl")


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wheel, and what of it is text.

    Its members that match `files` and not `without` (regular expressions over whole names) count. Of JSON, only
    the strings of `key`, HTML taken off. `group` matches the beginning of a name that members share which must not
    be parted into training and validation; by default that is their folder.
    """

    name: str
    file: str
    sha256: str
    licence: str
    files: str
    without: str | None = None
    key: str | None = None
    group: str = r".*/"

    def __post_init__(self) -> None:
        if not _HASH.fullmatch(self.sha256):
            raise ValueError(f"{self.name}: sha256 has 64 hexadecimal digits")
        if not _WHEEL.fullmatch(self.file):
            raise ValueError(f"{self.name}: {self.file!r} is not a wheel's name")
        for pattern in (self.files, self.without or "", self.group):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{self.name}: {pattern!r} is no regular expression: {error}") from None

    @property
    def tags(self) -> tuple[str, str, tuple[str, ...]]:
        """Of the wheel: Python, ABI and platforms, as its name has them."""
        found = _WHEEL.fullmatch(self.file)
        assert found is not None
        return found[3], found[4], tuple(found[5].split("."))

    @property
    def version(self) -> str:
        """The version that its file's name says."""
        return self.file.split("-")[1]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the texts that come out: its size in bytes and its hash."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The packages of a corpus and what they make. `parts` is empty until it has been built once.

    Members of `largest` bytes or more are left out, but for JSON. Of equal lines of `line` bytes or more, only the
    first is kept. One group in `validation_every` is kept for validation.
    """

    packages: tuple[Package, ...]
    largest: int = 2 << 20
    line: int = 32
    validation_every: int = 100
    parts: dict[str, Part] = {}

    def __post_init__(self) -> None:
        names = [x.name for x in self.packages]
        if len(set(names)) != len(names):
            raise ValueError("a package stands in it twice")

    @property
    def digest(self) -> str:
        """Names the corpus: a short hash of its texts' hashes."""
        import hashlib

        return hashlib.sha256("".join(x.sha256 for _, x in sorted(self.parts.items())).encode()).hexdigest()[:12]


def load(path: Path = FILE) -> Manifest:
    """A manifest from its file. Raises `InputError` saying what is wrong with it."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Manifest)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise InputError(f"{short(str(path))} is not a corpus's manifest: {str(error)[:500]}") from None
