"""What this machine's CDI specifications say of its GPUs, and what of it does not hold.

An engine that gives GPUs through the Container Device Interface reads them from files that NVIDIA's toolkit
wrote: which devices there are, and the device nodes, files of the driver and hooks that a container gets. When
the driver is updated or the toolkit goes, the files stay, and the engine names the first thing that failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""Where engines look unless they are told otherwise."""
KIND = "nvidia.com/gpu"
ANEW = "`sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` writes it anew"


class Node(msgspec.Struct, rename="camel"):
    """A device node; its path on the host where that is another."""

    path: str
    host_path: str = ""


class Mount(msgspec.Struct, rename="camel"):
    """A file or folder of the host."""

    host_path: str


class Hook(msgspec.Struct):
    """A program of the host that the runtime runs before the container's."""

    path: str


class Edits(msgspec.Struct, rename="camel"):
    """What a container gets."""

    device_nodes: list[Node] | None = None
    mounts: list[Mount] | None = None
    hooks: list[Hook] | None = None


class Device(msgspec.Struct, rename="camel"):
    """One device by its name, `0` of `nvidia.com/gpu=0`."""

    name: str
    container_edits: Edits = msgspec.field(default_factory=Edits)


class Specification(msgspec.Struct, rename="camel"):
    """One file; what stands beside these fields is passed over."""

    kind: str
    devices: list[Device]
    container_edits: Edits = msgspec.field(default_factory=Edits)


def read(path: Path) -> Specification:
    """A file's specification, JSON or YAML. Raises `ValueError` or `OSError` where it is none."""
    text = path.read_bytes()
    if path.suffix == ".json":
        return msgspec.json.decode(text, type=Specification)
    try:
        return msgspec.yaml.decode(text, type=Specification)
    except ImportError:
        raise ValueError("PyYAML is not installed here") from None


def problems(wanted: Sequence[int], folders: Sequence[Path] | None = None) -> list[str]:
    """What keeps these GPUs from a container, as sentences without a full stop; empty where no file speaks of
    GPUs.
    """
    found: list[str] = []
    named: dict[str, tuple[Path, tuple[Edits, Edits]]] = {}
    for folder in FOLDERS if folders is None else folders:
        for path in sorted(folder.glob("*")):
            if path.suffix not in (".json", ".yaml", ".yml"):
                continue
            try:
                said = read(path)
            except (OSError, ValueError) as error:
                found.append(f"{path} is no CDI specification that can be read: {error}")
                continue
            if said.kind != KIND:
                continue
            # What a later folder has of a device is what counts, as engines have it.
            named |= {x.name: (path, (said.container_edits, x.container_edits)) for x in said.devices}
    for index in wanted:
        if str(index) not in named:
            if named:
                found.append(f"no CDI specification has {KIND}={index}; there are {', '.join(sorted(named))}")
            continue
        path, both = named[str(index)]
        found += (f"{path} names {x}; {ANEW}" for edits in both for x in _absent(edits))
    return list(dict.fromkeys(found))


def _absent(edits: Edits) -> Iterator[str]:
    """What a container would get and this machine does not have; one of each kind says enough."""
    nodes = (Path(x.host_path or x.path) for x in edits.device_nodes or ())
    mounts = (Path(x.host_path) for x in edits.mounts or ())
    hooks = (Path(x.path) for x in edits.hooks or ())
    for kind, paths in (("the device", nodes), ("the driver's file", mounts)):
        if gone := next((x for x in paths if not x.exists()), None):
            yield f"{kind} {gone}, which is not there"
    if gone := next((x for x in hooks if not os.access(x, os.X_OK)), None):
        yield f"the hook {gone}, which is {'no program that may be run' if gone.exists() else 'not there'}"
