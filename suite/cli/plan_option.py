"""The option `--plan` of the commands that measure: its help names every plan there is."""

from __future__ import annotations

import click

from ..plan import BUILTIN
from .names import plans

plan_option = click.option(
    "--plan",
    shell_complete=plans,
    default="quick",
    show_default=True,
    help=f"{', '.join(BUILTIN)}, or a plan file (.toml).",
)
