"""Pins: the bases' digests against their registry, and the locks against what they were made from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ...registry.errors import unknown
from . import prebuilt
from .engine import Engine
from .errors import ImageMissing
from .table import FILE, Image, load

MADE_FROM = Path("requirements") / "locks.json"
"""By lock: a hash of its inputs and one of itself, as they were when `make lock` wrote it."""


def record(folder: Path) -> None:
    """Writes `MADE_FROM` anew."""
    found = {lock.relative_to(folder).as_posix(): _hashes(lock) for lock in _locks(folder)}
    (folder / MADE_FROM).write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def check(folder: Path) -> list[str]:
    """What does not hold, as sentences; empty where all is well."""
    problems = [x for image in load(folder).values() for x in image.problems(folder)]
    try:
        noted = json.loads((folder / MADE_FROM).read_text())
    except (OSError, ValueError) as error:
        return [*problems, f"{MADE_FROM} cannot be read: {error}"]
    for lock in _locks(folder):
        where = lock.relative_to(folder).as_posix()
        before, now = noted.get(where), _hashes(lock)
        if before is None:
            problems.append(f"{where} is not in {MADE_FROM}: make lock")
        elif before["input"] != now["input"]:
            problems.append(f"{where} is older than {lock.stem}.in or a file that it names: make lock")
        elif before["lock"] != now["lock"]:
            problems.append(f"{where} was changed by hand: make lock")
    for image in load(folder).values():
        for name in image.every_lock:
            if (folder / name).is_file():
                problems += [f"{name}: {x}" for x in unhashed((folder / name).read_text())]
        problems += _other_wheel(folder, image)
    torch = _torch_versions(folder)
    if len(set(torch.values())) > 1:
        said = ", ".join(f"{x} has {y}" for x, y in sorted(torch.items()))
        problems.append(f"not the same torch everywhere: {said}")
    return problems


def _other_wheel(folder: Path, image: Image) -> list[str]:
    """What the image's wheel is, where that is not what its sources are. What stands behind a + in its version
    says that the wheel is not the whole of them, and does not count.
    """
    if not image.wheel or not all((folder / x).is_file() for x in (image.wheel, image.sources)):
        return []
    wheel, sources = (prebuilt.pinned((folder / x).read_text()) for x in (image.wheel, image.sources))
    if {name: version.partition("+")[0] for name, version in wheel.items()} == sources:
        return []
    said = " and ".join(", ".join(f"{x} {y}" for x, y in found.items()) for found in (wheel, sources))
    return [f"{image.wheel} and {image.sources} are not of one version: {said}"]


def unhashed(lock: str) -> list[str]:
    """The packages of a lock that no hash stands beside, or that are not held to one version."""
    entries = re.sub(r"\\\n\s*", " ", lock).splitlines()
    packages = [x for x in entries if x.strip() and not x.lstrip().startswith(("#", "--"))]
    return [
        f"{x.split()[0]} is not pinned with a hash"
        for x in packages
        if "==" not in x.split(";")[0] or "--hash=sha256:" not in x
    ]


def _locks(folder: Path) -> list[Path]:
    """Locks that were made from an input beside them: the suite's, the images', the registry server's."""
    rooms = (folder / "requirements", folder / "docker" / "registry")
    return [x for room in rooms for x in sorted(room.glob("*.txt")) if x.with_suffix(".in").exists()]


def _hashes(lock: Path) -> dict[str, str]:
    text = "".join(_closure(lock.with_suffix(".in"), set()))
    return {
        "input": hashlib.sha256(text.encode()).hexdigest(),
        "lock": hashlib.sha256(lock.read_bytes()).hexdigest(),
    }


def _closure(path: Path, seen: set[Path]) -> Iterator[str]:
    """The requirements of an input and of those that it includes, comments left out."""
    seen.add(path)
    for line in path.read_text().splitlines():
        text = line.partition(" #")[0].strip()
        if text.startswith("-r "):
            other = path.parent / text[3:].strip()
            if other not in seen:
                yield from _closure(other, seen)
        elif text and not text.startswith("#"):
            yield text + "\n"


def _torch_versions(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted((folder / "requirements").glob("*.txt")):
        if match := re.search(r"^torch==([0-9.]+)", path.read_text(), re.MULTILINE):
            found[path.name] = match[1]
    return found


def pin(engine: Engine, folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Asks the registry for the digest of each base, and writes it down; a line on each image.

    Siblings stand on one base: whoever names one of a set means all, and a set is written as a whole.

    Raises `ImageMissing` where the registry cannot be asked; what was asked before that is written.
    """
    from docker.errors import DockerException

    images = load(folder)
    for name in names:
        if name not in images:
            raise unknown("image", name, list(images))
    day = datetime.now(UTC).date().isoformat()
    seen: dict[str, str] = {}

    def asked(base: str) -> str:
        if base not in seen:
            try:
                seen[base] = str(engine.client.images.get_registry_data(base).id)
            except DockerException as error:
                reason = str(getattr(error, "explanation", None) or error)
                raise ImageMissing(f"the base {base}", reason) from None
        return seen[base]

    sets = {images[x].sibling or x for x in names}
    path, text = folder / FILE, (folder / FILE).read_text()
    for image in images.values():
        if names and (image.sibling or image.name) not in sets:
            continue
        digest = asked(image.base)
        values = {"digest": digest, "verified_at": day, "trust": "seen in its registry"}
        text = pinned(text, image.name, values)
        if image is [x for x in images.values() if (x.sibling or x.name) == (image.sibling or image.name)][-1]:
            path.write_text(text)
        yield f"{image.name}: {digest}" + (
            "" if digest == image.digest else f", was {image.digest or 'not known'}"
        )


def pinned(text: str, table: str, values: dict[str, str]) -> str:
    """The text of the table file with other values in one table; comments and order stay as they are."""
    begin = re.search(rf"^\[{re.escape(table)}\]\n", text, re.MULTILINE)
    assert begin is not None, table
    following = re.search(r"^(#.*\n)*\[", text[begin.end() :], re.MULTILINE)
    end = begin.end() + following.start() if following else len(text)
    body = text[begin.end() : end]
    for name, value in values.items():
        line = f'{name} = "{value}"\n'
        body, count = re.subn(rf"^{name} = .*\n", line, body, flags=re.MULTILINE)
        if not count:
            body = re.sub(r"^(digest = .*\n)", rf"\1{line}", body, count=1, flags=re.MULTILINE)
    return text[: begin.end()] + body + text[end:]
