"""`kernelmark repro`: the exact command that repeats a recorded run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from ...registry.errors import unwritable
from ...registry.store.home import Home
from ..catalog import Catalog
from ..run import fingerprint
from .names import run_argument


@click.command("repro")
@run_argument("run")
@click.option("--execute", is_flag=True, help="Run it.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command_repro(run: str, execute: bool, as_json: bool) -> None:
    """The command that repeats a recorded run, or its execution.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. A run made in an image is repeated in
    the image of that digest; another one on this machine, at its commit. Whether the result is comparable
    `kernelmark compare` says. Exit code 4 where --execute lacks the commit or the image.
    """
    from ..run.repro import NotRepeatable, repeat

    home = Home()
    header = home.load(run).header
    found = repeat(header, home, Catalog.default())
    if found.plan_file is not None and found.plan_text is not None:
        try:
            found.plan_file.parent.mkdir(parents=True, exist_ok=True)
            found.plan_file.write_text(found.plan_text, encoding="utf-8")
        except OSError as error:
            what = f"the plan cannot be written to {found.plan_file}"
            raise unwritable(what, error, "Choose another folder with KERNELMARK_HOME.") from None
    if as_json:
        import msgspec

        data = {"command": found.command, "commit": found.commit, "image": found.image, "warnings": found.warnings}
        click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        for warning in found.warnings:
            click.echo(f"# {warning}")
        if found.commit:
            click.echo(shlex.join(["git", "checkout", found.commit]))
        click.echo(found.line)
    if not execute:
        return
    if found.image is None:
        here, dirty = fingerprint.commit(Path(__file__).resolve().parent)
        if here != header.commit or dirty:
            now = f"{here}{' with uncommitted changes' if dirty else ''}"
            raise NotRepeatable(
                f"run {header.run} was made at commit {header.commit} and this checkout is at {now}."
            )
    from . import cli, run_command

    sys.stdout.flush()
    run_command(cli, list(found.command[1:]))
