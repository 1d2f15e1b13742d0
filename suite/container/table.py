"""The table of images, `docker/images.toml`: reading it and checking what it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...registry.errors import InputError, unknown

FILE = Path("docker") / "images.toml"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COPIED = re.compile(r"requirements/(image|torch)-[a-z0-9_-]+\.txt")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_SNAPSHOT = re.compile(r"\d{8}T\d{6}Z")


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table of the file, where each field is explained."""

    name: str
    summary: str
    accelerator: Literal["none", "nvidia", "amd"]
    base: str
    digest: str
    trust: str
    verified_at: str
    platform: str
    python: str
    apt: tuple[str, ...]
    apt_snapshot: str
    locks: tuple[str, ...]
    architectures: tuple[str, ...] = ()
    cuda: str = ""
    minimum_driver: str = ""
    sibling: str = ""
    environment: str = "core"
    sources: str = ""
    compiler: str = ""
    wheel: str = ""
    lacks: str = ""

    @property
    def own_lock(self) -> str:
        """The lock of a baseline library's environment, which the Dockerfile copies by name; empty without one."""
        return next((x for x in self.locks if not _COPIED.fullmatch(x)), "")

    @property
    def every_lock(self) -> tuple[str, ...]:
        """Its locks, and those of what is compiled, of the compiler, and of what was compiled elsewhere."""
        return (*self.locks, *(x for x in (self.sources, self.compiler, self.wheel) if x))

    @property
    def pinned_base(self) -> str:
        """The base as `FROM` takes it. Raises `InputError` where its digest is not known, or a lock could not be
        made.
        """
        return self.base_or(None)

    def base_or(self, stand_in: str | None) -> str:
        """The stand-in, else the pinned base. What is installed on either is the same, so a lock that could not be
        made is in the way of both.
        """
        if self.lacks:
            raise InputError(f"image {self.name} cannot be built yet: {self.lacks}.")
        if stand_in is not None:
            return stand_in
        if not self.digest:
            raise InputError(
                f"image {self.name}: the digest of its base {self.base} is not known ({self.trust}). `make pin` "
                f"asks the registry for it and writes it to {FILE}."
            )
        return f"{self.base}@{self.digest}"

    def problems(self, folder: Path) -> list[str]:
        """What is wrong with this table, as sentences; `folder` is the checkout that locks lie in."""
        found = []
        if self.digest and not _DIGEST.fullmatch(self.digest):
            found.append(f"digest {self.digest!r} is not sha256: and 64 hex digits")
        if "@" in self.base or ":" not in self.base.rpartition("/")[2]:
            found.append(f"base {self.base!r} is not NAME:TAG")
        if self.verified_at and not _DAY.fullmatch(self.verified_at):
            found.append(f"verified_at {self.verified_at!r} is not a day, YYYY-MM-DD, or empty")
        if self.verified_at and not self.digest:
            found.append("verified_at without a digest")
        if not _SNAPSHOT.fullmatch(self.apt_snapshot):
            found.append(f"apt_snapshot {self.apt_snapshot!r} is not a time, YYYYMMDDTHHMMSSZ")
        if self.accelerator == "nvidia" and not (self.architectures and self.cuda and self.minimum_driver):
            found.append("an NVIDIA image needs architectures, cuda and minimum_driver")
        found += [f"lock {x} does not exist" for x in self.every_lock if not (folder / x).is_file()]
        apart = [x for x in self.locks if not _COPIED.fullmatch(x)]
        if apart and apart != [f"requirements/{self.environment}.txt"]:
            found.append(f"lock {apart[0]} is none that the Dockerfile copies")
        if bool(self.sibling) != (self.environment != "core"):
            found.append("a sibling holds an environment, and only a sibling does")
        if bool(self.sources) != bool(self.compiler):
            found.append("sources need a compiler, and only they do")
        if self.wheel and not self.sources:
            found.append("a wheel is compiled from sources, and there are none")
        return [f"{self.name}: {x}" for x in found]

    def unlike(self, other: Image) -> list[str]:
        """In what this image may not stand beside another as its sibling: what decides rows beside libraries."""
        same = ("accelerator", "base", "digest", "platform", "python", "apt_snapshot", "architectures", "cuda")
        return [x for x in same if getattr(self, x) != getattr(other, x)]


def load(folder: Path) -> dict[str, Image]:
    """All images of the checkout in `folder`, by name, in the file's order. Raises `InputError`."""
    path = folder / FILE
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"no {FILE} in {folder}: images are built from a checkout of kernelmark") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    defaults = tables.pop("defaults", {})
    images = {}
    for name, fields in tables.items():
        try:
            images[name] = msgspec.convert({**defaults, **fields, "name": name}, Image)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(f"{path}, [{name}]: {error}") from None
    for image in images.values():
        if image.sibling and image.sibling not in images:
            raise InputError(f"{path}, [{image.name}]: there is no image {image.sibling!r} to be a sibling of.")
        if image.sibling and (unlike := image.unlike(images[image.sibling])):
            raise InputError(f"{path}, [{image.name}]: not as {image.sibling}: {', '.join(unlike)}.")
    return images


def siblings(folder: Path, name: str) -> dict[str, Image]:
    """The images that stand beside one, by the environment that each holds."""
    return {x.environment: x for x in load(folder).values() if x.sibling == name}


def named(folder: Path, name: str) -> Image:
    """The image of that name. Raises `InputError` with the list of those that exist."""
    images = load(folder)
    if name not in images:
        raise unknown("image", name, list(images))
    return images[name]
