"""Trained weights on disk: small checkpoints that are made by a command in minutes and never committed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from ...registry.store.record import Case
from ..measure.verify import Unavailable
from ..model import chosen
from ._checkpoint import Checkpoint, write

VARIABLE = "KERNELMARK_CHECKPOINTS"
OTHER = (
    "data: the checkpoint here is another than where the run was planned. Copy that one here, or begin a new run"
)


def folder() -> Path:
    """Where they lie: in $KERNELMARK_CHECKPOINTS, by default below the home."""
    from ...registry.store.home import Home  # listing reads this file, and no journal

    given = os.environ.get(VARIABLE)
    return Path(given) if given else Home().folder / "checkpoints"


def save(case: Case, seed: int, weights: Mapping[str, Any]) -> Path:
    """Writes weights by name, those that a case of `converge` learned. Raises `OSError` where it cannot.

    The file's name holds all that they were trained with, so that others are not overwritten.
    """
    axes = case.axes
    trained = f"{case.options['model']}-{case.options['data']}-{axes['N']}"
    target = folder() / f"{trained}-B{axes['B']}-S{axes['S']}-seed{seed}-{case.dtype}.pt"
    write(target, {name: x.detach().cpu() for name, x in weights.items()})
    return target


def find(model: str, data: str, steps: int) -> Path:
    """The checkpoint that is here. Raises `Unavailable` where there is none, and where there are several."""
    found = sorted(folder().glob(f"{model}-{data}-{steps}-B*.pt"))
    if not found:
        raise Unavailable(
            f"data: no checkpoint here. Make it with: kernelmark checkpoint {model} --data {data} --steps {steps}"
        )
    if len(found) > 1:
        raise Unavailable(
            f"data: {len(found)} checkpoints here, {', '.join(x.name for x in found)}. Leave one of them, or set "
            f"{VARIABLE} to a folder that holds only that one"
        )
    return found[0]


def digest(model: str, data: str, steps: int) -> str:
    """The SHA-256 of that file; none where there is none, or several."""
    try:
        path = find(model, data, steps)
    except Unavailable:
        return ""
    stat = path.stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)


@cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Of a file as it was then: it is read once for all cases of a plan."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(model: str, data: str, steps: int) -> dict[str, Any]:
    """Weights by name, on the host. Raises `Unavailable` as `find` does, where its file is damaged, and where it
    holds the weights of another model.
    """
    from .train import catalog  # whose workload is not loaded for a file's name

    path = find(model, data, steps)
    try:
        found = Checkpoint(path).load("cpu")
    except (EOFError, OSError, RuntimeError, UnpicklingError) as error:
        raise Unavailable(
            f"data: {path.name} in {path.parent} is no checkpoint or is damaged: {str(error).partition('. ')[0]}"
        ) from None
    assert found is not None, "it was there a moment ago"
    of = chosen(catalog().models, model)
    wanted = {name: x.shape for name, x in of.model.weights(of.configuration).items()}
    if (unlike := _unlike(found, wanted)) is not None:
        raise Unavailable(f"data: {path.name} in {path.parent} holds no weights of {model}: {unlike}")
    return found


def _unlike(found: Any, wanted: Mapping[str, tuple[int, ...]]) -> str | None:
    """What of a file's content first tells it from weights of these shapes by name; None if nothing does.

    Asked before they are copied: a copy takes what can be broadcast, and looks for no name that is too many.
    """
    if not isinstance(found, Mapping):
        return f"it is no table of weights by name, but {type(found).__name__}"
    for name, shape in wanted.items():
        if name not in found:
            return f"there is no {name}"
        own = getattr(found[name], "shape", ())
        if tuple(own) != shape:
            return f"{name} has shape {list(own)}, the model's {list(shape)}"
    more = next((str(name) for name in found if name not in wanted), None)
    return None if more is None else f"the model has no {more[:80]}"
