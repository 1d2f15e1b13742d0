"""Options that the commands on images share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..container.build import Options

Function = TypeVar("Function", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
STAND_IN, PIP_CONF, CA_BUNDLE, BUILD_NETWORK = (
    f"KERNELMARK_{x}" for x in ("STAND_IN", "PIP_CONF", "CA_BUNDLE", "BUILD_NETWORK")
)


def build_options(command: Function) -> Function:
    """How to build where there is no registry or no public index; each has an environment variable too."""
    for option in (
        click.option(
            "--build-network",
            envvar=BUILD_NETWORK,
            metavar="NETWORK",
            help="Network of the build: host.",
        ),
        click.option("--ca-bundle", envvar=CA_BUNDLE, type=FILE, help="Certificates to trust while building."),
        click.option("--pip-conf", envvar=PIP_CONF, type=FILE, help="pip's configuration while building."),
        click.option(
            "--stand-in",
            envvar=STAND_IN,
            metavar="IMAGE",
            help="A local image in place of the pinned base; labelled so.",
        ),
    ):
        command = option(command)
    return command


def options(
    stand_in: str | None,
    pip_conf: Path | None,
    ca_bundle: Path | None,
    build_network: str | None,
    fresh: bool = False,
) -> Options:
    """The build's options from the command's."""
    return Options(stand_in or None, pip_conf, ca_bundle, build_network or None, fresh)


def from_environment() -> Options:
    """The build's options for a command that has none of its own."""
    stand_in, pip_conf, ca_bundle, network = map(os.environ.get, (STAND_IN, PIP_CONF, CA_BUNDLE, BUILD_NETWORK))
    return options(stand_in, Path(pip_conf) if pip_conf else None, Path(ca_bundle) if ca_bundle else None, network)


def tell(line: str) -> None:
    """Progress and remarks; standard output is for results."""
    click.echo(line, err=True)
