"""From an image's name and a choice of GPUs to something that can run, with everything checked on the way.

Checks come in the order of their price: names, engine, GPUs, driver, and only then a build of many minutes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...registry.errors import InputError
from ...registry.store import transfer
from ...registry.store.home import Home
from . import gpus
from .build import Built, Options, checkout, obtain, present, remark
from .engine import Engine, find
from .launch import Ended, Job, judge, leftovers, run
from .table import Image, load, named


@dataclass(frozen=True)
class Session:
    """An engine, an image that it has, and the GPUs of it that the image may use."""

    engine: Engine
    image: Built
    gpus: tuple[int, ...]
    home: Home

    @property
    def owner(self) -> str:
        """Names this home to the engine without saying where it is."""
        return hashlib.sha256(str(self.home.folder.resolve()).encode()).hexdigest()[:16]

    def measure(self, job: Job) -> tuple[Ended, list[str]]:
        """Runs a job on this session's GPUs. Its exit code, and the runs that it left, imported into the home."""
        runs: list[str] = []
        ended = run(self.engine, self.image, job, lambda folder: runs.extend(take(folder, self.home)), self.owner)
        kept = f" What was finished is in run {runs[-1]}." if runs else ""
        judge(self.engine, ended, job.limits, kept)
        return ended, runs

    def earlier(self) -> list[str]:
        """Takes in runs whose launcher could not; their names."""
        runs: list[str] = []
        leftovers(self.engine, lambda folder: runs.extend(take(folder, self.home)), self.owner)
        return runs

    def arguments(self) -> list[str]:
        """What holds the run to the image's device: a GPU that does not answer must not become a CPU row."""
        return ["--device", {"nvidia": "cuda", "amd": "rocm"}.get(self.image.accelerator, "cpu")]


def prepare(name: str, wanted: str | None, home: Home, options: Options, tell: Callable[[str], None]) -> Session:
    """An image by its name in the table, or by digest or reference. Raises `KernelmarkError`."""
    indices = gpus.chosen(wanted or "0")
    folder, image = _meant(name)
    if image is not None:
        _allowed(image.name, image.accelerator, wanted)
        if options.stand_in is None:
            _ = image.pinned_base
    engine = find()
    accelerator: str = image.accelerator if image is not None else ""
    built = None
    if folder is None or image is None:
        built = present(engine, name)
        accelerator = built.accelerator
        _allowed(built.name, built.accelerator, wanted)
    there: tuple[gpus.Gpu, ...] = ()
    if accelerator == "nvidia":
        gpus.require_toolkit(engine, indices)
        there = gpus.on_host() if engine.local else ()
        if there and image is not None:
            gpus.admit(_promised(image), there, indices)
    if built is None:
        assert folder is not None
        assert image is not None
        built = obtain(engine, folder, image, options, tell)
    if accelerator == "nvidia":
        gpus.admit(built, there or gpus.in_image(engine, built, indices), indices)
    if said := remark(built):
        tell(said)
    return Session(engine, built, indices if accelerator == "nvidia" else (), home)


def reached(name: str, home: Home, options: Options, tell: Callable[[str], None]) -> Session:
    """An image as `prepare` takes one, to look into and not to measure in: no GPU is asked for."""
    folder, image = _meant(name)
    if image is not None and options.stand_in is None:
        _ = image.pinned_base
    engine = find()
    if folder is None or image is None:
        built = present(engine, name)
    else:
        built = obtain(engine, folder, image, options, tell)
    if said := remark(built):
        tell(said)
    return Session(engine, built, (), home)


def _meant(name: str) -> tuple[Path | None, Image | None]:
    """A checkout and one of its images, or neither for a name that only an engine can know."""
    if ":" in name or "@" in name:
        return None, None
    folder = checkout()
    return folder, named(folder, name)


def _allowed(name: str, accelerator: str, wanted: str | None) -> None:
    if accelerator == "none" and wanted is not None:
        raise InputError(f"image {name} uses no GPU: leave GPUS out, or measure with --device cpu.")


def _promised(image: Image) -> Built:
    """What an image will be when it is built."""
    return Built("", image.name, image.accelerator, image.architectures, image.cuda, image.minimum_driver)


def take(folder: Path, home: Home) -> list[str]:
    """Imports the journals that a container wrote, and keeps its workers' logs; the runs' names.

    Of a shard it also wrote what the run looks like with that shard alone, which is made anew here.
    """
    shards = sorted(folder.glob("journals/shards/*.jsonl"))
    runs = [transfer.import_journal(x, home) for x in shards or sorted(folder.glob("journals/*.jsonl"))]
    for log in sorted(folder.glob("logs/*.log")):
        home.logs.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, home.logs / log.name)
    return runs


def known() -> dict[str, Image]:
    """All images of the checkout."""
    return load(checkout())
