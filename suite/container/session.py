"""From an image's name and a choice of GPUs to something that can run, with everything checked on the way.

Checks come in the order of their price: names, engine, GPUs, driver, and only then a build of many minutes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...registry.errors import InputError
from ...registry.store import transfer
from ...registry.store.home import Home
from ..catalog import ROOMS, Catalog
from . import gpus
from .build import Built, Options, checkout, obtain, present, remark
from .engine import Engine, find
from .launch import RESULTS, Ended, Job, judge, leftovers, run
from .table import Image, load, named


@dataclass(frozen=True)
class Taken:
    """What containers left: the runs that are in the home now, and a sentence on each journal that is not."""

    runs: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def take(self, folder: Path, home: Home) -> None:
        """Imports the journals that a container wrote, and keeps its workers' logs.

        Of a shard it also wrote what the run looks like with that shard alone, which is made anew here. A journal
        that is refused is kept in the home as it is, since its container goes, and is in no other's way.
        """
        shards = sorted(folder.glob("journals/shards/*.jsonl"))
        for path in shards or sorted(folder.glob("journals/*.jsonl")):
            try:
                self.runs.append(transfer.import_journal(path, home))
            except InputError as error:
                try:
                    kept = _kept(path, home.folder / "refused")
                except OSError:  # it is the home that is closed to us, and no fault of the journal's
                    raise error from None
                self.refused.append(str(error).replace(str(path), str(kept)))
        for log in sorted(folder.glob("logs/*.log")):
            home.logs.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, home.logs / log.name)


@dataclass(frozen=True)
class Session:
    """An engine, an image that it has, and the GPUs of it that the image may use."""

    engine: Engine
    image: Built
    gpus: tuple[int, ...]
    home: Home
    roots: tuple[Path, ...] = ()
    """Folders of kernels of one's own."""

    @property
    def owner(self) -> str:
        """Names this home to the engine without saying where it is."""
        return hashlib.sha256(str(self.home.folder.resolve()).encode()).hexdigest()[:16]

    def measure(self, job: Job) -> tuple[Ended, list[str]]:
        """Runs a job on this session's GPUs. Its exit code, and the runs that it left, imported into the home.

        Raises `InputError` for a journal that it left and that is none; what was fine is in the home all the same.
        """
        taken = Taken()
        job = with_roots(job, self.roots)
        ended = run(self.engine, self.image, job, lambda folder: taken.take(folder, self.home), self.owner)
        kept = f" What was finished is in run {taken.runs[-1]}." if taken.runs else ""
        judge(self.engine, ended, job.limits, kept)
        if taken.refused:
            raise InputError(
                "\n".join([f"not all that the container left could be taken in.{kept}", *taken.refused])
            )
        return ended, taken.runs

    def earlier(self) -> Taken:
        """Takes in runs whose launcher could not."""
        taken = Taken()
        leftovers(self.engine, lambda folder: taken.take(folder, self.home), self.owner)
        return taken

    def arguments(self) -> list[str]:
        """What holds the run to the image's device: a GPU that does not answer must not become a CPU row."""
        return ["--device", {"nvidia": "cuda", "amd": "rocm"}.get(self.image.accelerator, "cpu")]


def prepare(name: str, wanted: str | None, home: Home, options: Options, tell: Callable[[str], None]) -> Session:
    """An image by its name in the table, or by digest or reference. Raises `KernelmarkError`."""
    indices = gpus.chosen(wanted or "0")
    roots = tuple(x.folder for x in Catalog.default().roots[1:])
    folder, image = _meant(name)
    if image is not None:
        _allowed(image.name, image.accelerator, wanted)
        image.base_or(options.stand_in)
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
    return Session(engine, built, indices if accelerator == "nvidia" else (), home, roots)


def reached(name: str, home: Home, options: Options, tell: Callable[[str], None]) -> Session:
    """An image as `prepare` takes one, to look into and not to measure in: no GPU is asked for."""
    folder, image = _meant(name)
    if image is not None:
        image.base_or(options.stand_in)
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


def with_roots(job: Job, roots: Sequence[Path]) -> Job:
    """A job that has the rooms of these roots in its result folder, each root under its own name: kernels of one's
    own may be called by it.
    """
    files, places = dict(job.files), []
    for number, root in enumerate(roots):
        place = f"roots/{number}/{root.name}"
        paths = (x for room in ROOMS for x in (root / room).rglob("*") if x.is_file())
        held = {f"{place}/{x.relative_to(root)}": x for x in paths if "__pycache__" not in x.parts}
        files |= {name: x.read_bytes() for name, x in sorted(held.items())}
        places += [f"{RESULTS}/{place}"] if held else []
    if not places:
        return job
    return replace(job, files=files, variables={**job.variables, "KERNELMARK_PATH": os.pathsep.join(places)})


def _kept(path: Path, folder: Path) -> Path:
    """A copy of a journal in a folder, under a number: its own name is what a container says."""
    folder.mkdir(parents=True, exist_ok=True)
    target = next(x for x in (folder / f"{i}.jsonl" for i in itertools.count()) if not x.exists())
    return Path(shutil.copyfile(path, target))


def known() -> dict[str, Image]:
    """All images of the checkout."""
    return load(checkout())
