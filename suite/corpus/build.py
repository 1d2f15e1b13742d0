"""Builds a corpus: wheels fetched and checked, texts assembled, bytes compared with the manifest's hashes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ...registry.errors import HarnessError, InputError, last_line
from ...registry.progress import Tell, untold
from .manifest import Manifest, Package, Part
from .text import Text, assemble, text

T = TypeVar("T")

ENDING = ".txt"
LICENCES = "LICENCES.txt"
JSON_WORK = 18
"""A byte of a wheel whose JSON is searched for marked text takes so many times as long as one of source code."""
TOLD = 0.01
"""By how much more must be read until it is told again."""
READING = 0.7
"""The share of the time in which texts are read; the rest is assembling."""


def sha256(data: bytes) -> str:
    """Hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def fetch(packages: Sequence[Package], wheels: Path, tell: Tell = untold) -> None:
    """Downloads with pip the wheels that a folder lacks. Raises `InputError` where they cannot be had."""
    wheels.mkdir(parents=True, exist_ok=True)
    missing = [x for x in packages if not (wheels / x.file).is_file()]
    for i, package in enumerate(missing):
        tell(package.file, i / len(missing))
        python, abi, platforms = package.tags
        version = python.removeprefix("cp") if python.startswith("cp") else "312"
        with tempfile.TemporaryDirectory(dir=wheels, prefix=".fetch-") as folder:
            wanted = Path(folder) / "wanted.txt"
            wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
            command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", version]
            command += ["--abi", abi, "--dest", folder, "--requirement", str(wanted)]
            for platform in platforms:
                command += ["--platform", platform]
            ended = subprocess.run(command, capture_output=True, text=True)
            made = Path(folder) / package.file
            if ended.returncode or not made.is_file():
                said = last_line(ended.stderr, "pip said nothing")[:300]
                raise InputError(
                    f"{package.file} cannot be downloaded: {said}. On a machine without network take a packed "
                    f"corpus: kernelmark corpus build --packed FILE."
                )
            os.replace(made, wheels / package.file)


def opened(package: Package, wheels: Path) -> zipfile.ZipFile:
    """A wheel whose hash is right. Raises `InputError` where it is missing or another."""
    path = wheels / package.file
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != package.sha256:
            raise InputError(
                f"{package.file} has sha256 {found}, the manifest {package.sha256}: remove that file."
            )
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{package.file} cannot be read: {error}") from None


def texts(manifest: Manifest, wheels: Path, tell: Tell = untold, order: int | None = None) -> Iterator[Text]:
    """All texts of a manifest's packages, in the order of wheels and members, or in one drawn from `order`."""
    chance = None if order is None else random.Random(order)
    paths = [wheels / x.file for x in manifest.packages]
    work = [x.stat().st_size * _work(y) for x, y in zip(paths, manifest.packages, strict=True) if x.is_file()]
    done, whole, told = 0, max(1, sum(work)), -1.0
    for package in _ordered(manifest.packages, chance):
        with opened(package, wheels) as wheel:
            for member in _ordered(wheel.infolist(), chance):
                if (fraction := min(1.0, done / whole)) >= told + TOLD:
                    told = fraction
                    tell(package.file, fraction)
                done += member.compress_size * _work(package)
                found = text(package, member.filename, wheel.read(member), manifest.largest)
                if found is not None:
                    yield found


def _ordered(some: Sequence[T], chance: random.Random | None) -> Sequence[T]:
    return some if chance is None else chance.sample(some, len(some))


def _work(package: Package) -> int:
    return 1 if package.key is None else JSON_WORK


def licences(manifest: Manifest, wheels: Path) -> bytes:
    """The licences that the wheels carry, one after the other: they go where the text goes."""
    found = []
    for package in sorted(manifest.packages, key=lambda x: x.name):
        with opened(package, wheels) as wheel:
            for name in sorted(wheel.namelist()):
                last = name.rpartition("/")[2].upper()
                if ".dist-info/" in name and last.startswith(("LICEN", "COPYING", "NOTICE", "AUTHORS")):
                    found.append(f"== {package.name} {package.version}: {last} ==\n".encode() + wheel.read(name))
    return b"\n".join(found)


def built(manifest: Manifest, wheels: Path, tell: Tell = untold, order: int | None = None) -> dict[str, bytes]:
    """The corpus's texts by name, whatever order they are read in. Raises `HarnessError` where they are not those
    that the manifest names.
    """

    def read() -> Iterator[Text]:
        yield from texts(manifest, wheels, lambda what, fraction: tell(what, fraction * READING), order)
        tell("assembling", READING)

    made = assemble(read(), manifest)
    check(manifest, {name: Part(len(data), sha256(data)) for name, data in made.items()})
    return made


def check(manifest: Manifest, parts: Mapping[str, Part]) -> None:
    """Raises `HarnessError` where a corpus is not the manifest's; a manifest without hashes takes any."""
    wrong = [x for x in manifest.parts if parts.get(x) != manifest.parts[x]]
    if wrong:
        told = "; ".join(f"{x}: {_told(parts.get(x))}, not {_told(manifest.parts[x])}" for x in wrong)
        raise HarnessError(f"this is not the manifest's corpus: {told}.")


def _told(part: Part | None) -> str:
    return "missing" if part is None else f"{part.bytes} bytes {part.sha256[:12]}"


def write(parts: Mapping[str, bytes], notices: bytes, folder: Path) -> None:
    """Writes a corpus into a folder; a file is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (*((name + ENDING, data) for name, data in parts.items()), (LICENCES, notices)):
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".part-", delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise


def verify(manifest: Manifest, folder: Path) -> dict[str, Part]:
    """The sizes and hashes of a corpus that lies in a folder. Raises where they are not the manifest's."""
    found = {}
    for name in manifest.parts:
        path = folder / (name + ENDING)
        try:
            with open(path, "rb") as file:
                found[name] = Part(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise InputError(f"{path.name} cannot be read: {error.strerror}. {MAKE}") from None
    check(manifest, found)
    return found


MAKE = "Make it with: kernelmark corpus build"
