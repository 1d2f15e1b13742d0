"""Whether two images hold the same: every file bit for bit, times aside, and what they are configured as.

    python tests/docker/images/alike.py IMAGE IMAGE

prints how much was held against each other and what differs; ends with exit code 1 if anything does. The engine is
that of DOCKER_HOST. `test_image.py` does so with the cpu image; the others are minutes and gigabytes.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import docker


class Reader:
    """Chunks as a file that can be read from front to end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.chunks = iter(chunks)
        self.rest = b""

    def read(self, size: int) -> bytes:
        parts, have = [self.rest], len(self.rest)
        while have < size and (chunk := next(self.chunks, b"")):
            parts.append(chunk)
            have += len(chunk)
        data = b"".join(parts)
        self.rest = data[size:]
        return data[:size]


def members(client: docker.DockerClient, image: str) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Every file of an image, with its data where it has any."""
    container = client.containers.create(image, name=f"export-{image[7:19]}")
    try:
        with tarfile.open(fileobj=Reader(container.export()), mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                yield member, file.read() if file is not None else None
    finally:
        container.remove(force=True, v=True)


def as_it_is(member: tarfile.TarInfo, data: bytes | None) -> tuple[Any, ...]:
    """A file without its times."""
    kind = (member.type, member.mode, member.uid, member.gid, member.linkname)
    return (*kind, hashlib.sha256(data).hexdigest() if data is not None else None)


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both, or in one alone."""
    return sorted(
        x for x in first.keys() | second.keys() if x not in first or x not in second or first[x] != second[x]
    )


def main(*references: str) -> int:
    """Compares two images. Returns the exit code."""
    client = docker.from_env(timeout=600)
    images = [client.images.get(x) for x in references]
    if len({x.id for x in images}) != 2:
        raise SystemExit("two images are wanted, of two builds")
    contents: list[dict[str, tuple[Any, ...]]] = []
    for image in images:
        content, size = {}, 0
        for member, data in members(client, image.id):
            content[member.name] = as_it_is(member, data)
            size += len(data or b"")
        contents.append(content)
        files = sum(x[-1] is not None for x in content.values())
        print(f"{image.id}: {len(content)} entries, {files} of them files, of {size} bytes", flush=True)
    configured = [x.attrs["Config"] for x in images]
    found = 0
    for kind, (first, second) in (("entries", contents), ("settings", configured)):
        names = differing(first, second)
        for name in names:
            print(f"  {name}: {first.get(name)} {second.get(name)}")
        print(f"{len(names)} {kind} differ")
        found += len(names)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
