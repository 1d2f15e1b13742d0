"""`kernelmark new`: files of a new operator or baseline that run as they are."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..catalog import Catalog
from ..scaffold import Written, baseline, operator
from .names import operators

FOLDER = click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=".",
    help="The program's checkout, or any folder for private kernels; default: the current one.",
)


@click.group("new")
def command_new() -> None:
    """Write the files of a new operator or baseline, which run as they are."""


@command_new.command("operator")
@click.argument("name")
@click.option("--family", help="The folder of kernels/ it goes to, in the program's own checkout.")
@FOLDER
def new_operator(name: str, family: str | None, folder: Path) -> None:
    """An operator: its declaration, a Triton kernel, a kernel for CPUs, a test.

    NAME is the operator's: small letters, digits and underscores.
    """
    written = operator(name, folder, Catalog.default(), family)
    _say(written, folder, f"kernelmark run --operator {name}")


@command_new.command("baseline")
@click.argument("name")
@click.option(
    "--operator",
    "operator_name",
    default="rms_norm",
    show_default=True,
    shell_complete=operators,
    help="The operator that it computes.",
)
@FOLDER
def new_baseline(name: str, operator_name: str, folder: Path) -> None:
    """A baseline: one file that calls somebody else's library.

    NAME is the file's and the row's: small letters, digits and underscores.
    """
    written = baseline(name, folder, Catalog.default(), operator_name)
    _say(written, folder, f"kernelmark run --operator {operator_name}")


def _say(written: Written, folder: Path, command: str) -> None:
    for path in written.files:
        click.echo(f"written   {path}")
    if written.private and folder.resolve() not in [x.folder for x in Catalog.default().roots]:
        click.echo(f"once      export KERNELMARK_PATH={shlex.quote(str(folder.resolve()))}")
    click.echo(f"measure   {command}")
    tests = [x for x in written.files if x.name.startswith("test_")]
    if tests:
        click.echo(f"test      python -m pytest {tests[0]}")
