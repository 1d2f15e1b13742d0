"""`kernelmark bench`: measure a plan in a pinned image; the rows land in this machine's registry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.journal import read
from ...registry.store.transfer import whole_lines
from . import names
from .choosing import asked_for, choosing, shared, with_resume
from .container_options import build_options, options, tell
from .results import present, writable
from .values import Memory

if TYPE_CHECKING:
    from ...registry.store.record import Status
    from ..choice import Choice
    from ..container.build import Options

HERE = (
    *("image", "gpus", "resume", "any_board", "memory", "shm_size", "output", "no_report", "journal_only"),
    *("build_network", "ca_bundle", "pip_conf", "stand_in"),
)
"""What is of this machine and this launch, and may be another when a run goes on."""


@click.command("bench")
@click.argument("image", metavar="IMAGE", shell_complete=names.images)
@click.option(
    "--gpus", metavar="0,1", help="GPUs as nvidia-smi numbers them; default: 0. A case takes as many as it needs."
)
@click.option(
    "--with",
    "beside",
    multiple=True,
    metavar="ENVIRONMENT",
    help="Also in the sibling image that holds this environment, or all: one run, one journal; repeatable.",
)
@choosing()
@shared("budget", "note", "fail_on", "shard", "name", "control", "seed")
@click.option(
    "--resume",
    metavar="RUN",
    shell_complete=names.runs,
    help="Go on with a run that was interrupted, in the same image.",
)
@shared("any_board")
@click.option(
    "--memory", type=Memory(), metavar="SIZE", help="Memory of the container, as 16g; default: no limit."
)
@click.option(
    "--shm-size", type=Memory(), default="1g", show_default=True, metavar="SIZE", help="Its shared memory."
)
@shared("output", "no_report", "journal_only")
@build_options
def command_bench(
    image: str,
    gpus: str | None,
    beside: tuple[str, ...],
    choice: Choice,
    budget: float | None,
    note: str | None,
    fail_on: tuple[Status, ...],
    shard: str | None,
    name: str | None,
    control: str | None,
    seed: int | None,
    resume: str | None,
    any_board: bool,
    memory: str | None,
    shm_size: str,
    output: Path | None,
    no_report: bool,
    journal_only: bool,
    **building: Path | str | None,
) -> None:
    """Measure a plan in a pinned image and record it.

    IMAGE is a name of docker/images.toml, built first if it is not here, or an image's digest. The container
    has no network, no capabilities, a fixed user who is not root, and a file system that it cannot write but
    for its results. Exit codes are those of `kernelmark run`, and 5 where the container cannot run.
    """
    from ..container.launch import Job, Limits
    from ..container.session import prepare

    with_resume(resume)
    home = Home(output)
    writable(home)
    files: dict[str, bytes] = {}
    if resume is not None:
        if asked := asked_for(click.get_current_context(), but=(*HERE, "fail_on")):
            raise InputError(f"--resume goes on with what its run was asked; leave {', '.join(asked)} out.")
        path = home.find(resume)
        run = read(path).header.run
        files[f"journals/{run}.jsonl"] = b"".join(x + b"\n" for x in whole_lines(path))
        asked = ["--resume", run, *(["--any-board"] if any_board else [])]
    else:
        asked = ["--plan", _plan(choice.plan, files), *choice.words]
        for option, value in (
            ("--budget", None if budget is None else f"{budget:g}s"),
            ("--note", note),
            ("--shard", shard),
            ("--run", name),
            ("--control", control),
            ("--seed", seed),
        ):
            asked += [] if value is None else [option, str(value)]
    asked += [x for status in fail_on for x in ("--fail-on", status)]
    if beside:
        if any((resume, shard, name, control, memory, journal_only)):
            raise InputError(
                "--with measures one new run: leave --resume, --shard, --run, --control, --memory and "
                "--journal-only out."
            )
        # The supervisor is here, and reads the plan where it is.
        words = ["--plan", choice.plan, *asked[2:], "--output", str(home.folder)]
        words += ["--no-report"] if no_report else []
        _over_siblings(image, gpus, beside, options(**building), home, words)  # type: ignore[arg-type]  # as below
        return
    session = prepare(image, gpus, home, options(**building), tell)  # type: ignore[arg-type]  # click made them
    earlier = session.earlier()
    for run in earlier.runs:
        tell(f"run {run}, which an earlier launch had to leave behind, is taken in")
    for said in earlier.refused:
        tell(f"left behind by an earlier launch and not taken in: {said}")
    device = [] if resume is not None else session.arguments()
    tell(f"in image {session.image.name}, {session.image.id}")
    ended, runs = session.measure(
        Job(["run", "--journal-only", *asked, *device], session.gpus, files, Limits(memory, shm_size))
    )
    for run in () if journal_only else runs:
        present(home.load(run), home, report=not no_report)
    if ended.code == 130 and runs:
        tell(f"interrupted. Go on with: kernelmark bench {image} --resume {runs[-1]}")
    sys.exit(ended.code)


def _over_siblings(
    image: str, gpus: str | None, beside: Sequence[str], building: Options, home: Home, words: Sequence[str]
) -> None:
    """One run whose workers are in several images, as `kernelmark run` makes it of these words."""
    from ..container import siblings
    from ..container.build import checkout
    from ..container.session import prepare
    from .run import command_run

    named = siblings.names(checkout(), image, beside)
    sessions = {x: prepare(y, gpus, home, building, tell) for x, y in named.items()}
    for environment, session in sessions.items():
        tell(f"{environment} in image {session.image.name}, {session.image.id}")
    with (
        siblings.held(image, sessions),
        command_run.make_context("run", [*words, *sessions["core"].arguments()]) as context,
    ):
        command_run.invoke(context)


def _plan(plan: str, files: dict[str, bytes]) -> str:
    """The plan's name inside the container, where a plan file goes along."""
    from ..container.launch import RESULTS
    from ..plan import BUILTIN

    if plan in BUILTIN or not plan.endswith(".toml"):
        return plan
    try:
        files[f"plan/{Path(plan).name}"] = Path(plan).read_bytes()
    except OSError as error:
        raise InputError(f"plan file {plan} cannot be read: {error.strerror}") from None
    return f"{RESULTS}/plan/{Path(plan).name}"
