"""What is asked of a fleet: one run of a plan in shards, or one comparison of two commits in shards."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import filelock
import msgspec

from ...registry.errors import InputError, unknown
from ...registry.store.home import Home
from ...registry.store.record import DeviceKind
from ...registry.store.transfer import checked_run

EngineName: TypeAlias = Literal["local", "ray", "slurm", "kubernetes"]
Container: TypeAlias = Literal["none", "docker", "pyxis", "apptainer"]
"""How a task comes into its image: not at all; by `kernelmark bench` on the host; the engine starts it inside."""
FILE = "order.json"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run over many machines. `arguments` are those that every shard's command has besides its own.

    `plan_text` is a plan file's content, which travels along; `plan` is then the file's name. `seconds` is what
    each shard takes, expected, over all replicates. `salt` makes hosts' hashes comparable within one home and
    nowhere else.
    """

    run: str
    engine: EngineName
    shards: int
    plan: str
    device: DeviceKind
    seed: int
    seconds: tuple[float, ...]
    salt: str
    arguments: tuple[str, ...] = ()
    plan_text: str | None = None
    control: str | None = None
    image: str | None = None
    container: Container = "none"
    gpus: int = 0
    """GPUs that a shard needs; they are of one host."""
    exclusive: bool = True
    """Whether a shard has its host to itself."""
    options: tuple[str, ...] = ()
    """Words for the engine, as they are."""
    address: str | None = None
    """Where the engine is, where it must be told."""
    checkout: str = ""
    """The folder that a task begins in, on every host."""
    compare: bool = False
    """Whether a shard is an A/B of two commits, by `regression_detector`."""

    def __post_init__(self) -> None:
        checked_run(self.run)
        if len(self.seconds) != self.shards:
            raise ValueError("an expected time for each shard")


def folder_of(home: Home, run: str) -> Path:
    """What is kept of a run over many machines: its order, and what was delivered."""
    return home.fleet / checked_run(run)


def save(order: Order, home: Home) -> Path:
    """Keeps an order; its folder. Raises `InputError` if there is one of that run."""
    folder = folder_of(home, order.run)
    if (folder / FILE).exists():
        raise InputError(
            f"run {order.run} is on a fleet already; go on with: kernelmark fleet run --resume {order.run}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _lay(folder / FILE, msgspec.json.format(msgspec.json.encode(order), indent=1), 0o666)
    return folder


def _lay(path: Path, data: bytes, mode: int) -> None:
    """Writes a file whole or not at all: half an order would be the latest run, an empty secret none."""
    partial = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(home: Home, run: str) -> Order:
    """The order of a run, given its name or `latest`. Raises `InputError` for one that is not there."""
    known = sorted(x.parent.name for x in (home.folder / "fleet").glob(f"*/{FILE}"))
    name = known[-1] if run == "latest" and known else run
    if name not in known:
        error = unknown("run on a fleet", run, ["latest", *known[-10:]] if known else [])
        raise error if known else InputError(f"{error} `kernelmark fleet run` starts one.")
    path = folder_of(home, name) / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Order)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"{path} is no order: {error}") from None


def salt(home: Home, environ: Mapping[str, str] = os.environ) -> str:
    """The secret that this home hashes hosts with: its own, or $KERNELMARK_SALT where homes are to agree."""
    if given := environ.get("KERNELMARK_SALT"):
        return given
    path = home.folder / "fleet" / "salt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name("salt.lock")):  # of two first orders at once both have the same
        if not path.exists() or not path.stat().st_size:
            _lay(path, secrets.token_hex(16).encode(), 0o600)
        return path.read_text()
