"""Shards as a job array of Slurm, through its own commands. Order and deliveries lie in a folder all hosts see.

The array's name is the run's, so a driver that starts anew finds what an earlier one asked for. There may be no
accounting (`sacct`): what ended is known by its delivery, and what is neither delivered nor queued is lost.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...registry.errors import last_line
from .delivery import TAIL
from .engine import EngineError
from .order import FILE, Order

ANSWER_S = 60.0
"""How long Slurm's controller may take to answer."""


def script(order: Order, folder: Path, python: str) -> str:
    """What each element of the array runs: the task, inside the image where Slurm or Apptainer starts it."""
    # -P: no module of the folder that it was asked for in.
    task = [python, "-P", "-m", f"{__package__}.task", str(folder / FILE), "--into", str(folder / "deliveries")]
    words = [shlex.quote(x) for x in task]
    words += ["--shard", '"$SLURM_ARRAY_TASK_ID"', "--node", '"$SLURMD_NODENAME"']
    here = f"{folder}:{folder}"
    digest = (order.image or "").rpartition("@")[2]
    environment = [f"export KERNELMARK_IMAGE_DIGEST={shlex.quote(digest)}"] if order.container != "none" else []
    if order.container == "pyxis":
        image = shlex.quote(f"--container-image={_enroot(order.image or '')}")
        words = ["srun", image, shlex.quote(f"--container-mounts={here}"), "--no-container-mount-home", *words]
    elif order.container == "apptainer":
        gpu = ["--nv"] if order.gpus else []
        image = shlex.quote(f"docker://{order.image}")
        words = ["apptainer", "exec", *gpu, "--containall", "--bind", shlex.quote(here), image, *words]
        environment = [f"export APPTAINERENV_KERNELMARK_IMAGE_DIGEST={shlex.quote(digest)}"]
    elif order.container == "docker":
        environment = []  # `kernelmark bench` says so to the container that it makes
    return "\n".join(["#!/bin/bash", *environment, f"exec {' '.join(words)}", ""])


def _enroot(image: str) -> str:
    """`registry/name@sha256:…` as enroot writes it: `registry#name@sha256:…`."""
    host, slash, rest = image.partition("/")
    return f"{host}#{rest}" if slash and ("." in host or ":" in host) else image


def submission(order: Order, folder: Path, shards: Sequence[int]) -> list[str]:
    """The arguments of `sbatch`."""
    gpus = [f"--gpus-per-node={order.gpus}"] if order.gpus else []
    return [
        "--parsable",
        f"--job-name={name_of(order)}",
        f"--array={','.join(map(str, shards))}",
        "--requeue",
        "--open-mode=append",
        f"--output={str(folder).replace('%', '%%')}/log-%a.txt",
        "--nodes=1",
        "--ntasks=1",
        *(["--exclusive"] if order.exclusive else []),
        *gpus,
        *order.options,
    ]


def name_of(order: Order) -> str:
    """The array's name."""
    return f"kernelmark-{order.run}"


def standing(text: str) -> dict[int, str]:
    """What `squeue` printed as shards and their states; lines of anything else are passed over."""
    out = {}
    for line in text.splitlines():
        element, state, why = (*line.split(maxsplit=2), "", "", "")[:3]
        if element.isdigit():
            out[int(element)] = _waiting(why) if state == "PENDING" else state.lower()
    return out


def _waiting(why: str) -> str:
    """How a shard waits; a held one, by somebody or after starts that failed, until somebody releases it."""
    return f"held ({why})" if "held" in why.lower() or why == "JobHoldMaxRequeue" else "waiting for a host"


class Slurm:
    """The arrays of one run."""

    def __init__(self, order: Order, folder: Path) -> None:
        missing = [x for x in ("sbatch", "squeue", "scancel") if shutil.which(x) is None]
        if missing:
            raise EngineError(f"no {', '.join(missing)} here: run this where Slurm's commands are, a login node.")
        self.order, self.folder = order, folder.resolve()

    def submit(self, shards: Sequence[int]) -> None:
        # Inside an image its own Python is the one that has kernelmark.
        python = "python" if self.order.container in ("pyxis", "apptainer") else sys.executable
        (self.folder / "deliveries").mkdir(parents=True, exist_ok=True)
        _slurm(
            "sbatch", *submission(self.order, self.folder, shards), text=script(self.order, self.folder, python)
        )

    def held(self) -> dict[int, str]:
        said = _slurm("squeue", "--me", "-h", "-r", f"--name={name_of(self.order)}", "-o", "%K %T %r")
        return {
            x: state for x, state in standing(said).items() if state not in ("completed", "cancelled", "failed")
        }

    def said(self, shard: int) -> str:
        path = self.folder / f"log-{shard}.txt"
        try:
            return f"{last_line(path.read_text(errors='replace')[-TAIL:])} ({path})"
        except OSError:
            return ""

    def cancel(self) -> None:
        _slurm("scancel", "--me", f"--name={name_of(self.order)}")


def _slurm(*words: str, text: str | None = None) -> str:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{words[0]}: {error}") from None
    if done.returncode:
        raise EngineError(f"{words[0]}: {done.stderr.strip()[:500] or f'exit code {done.returncode}'}")
    return done.stdout
