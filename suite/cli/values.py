"""Values that options take: shares of a whole and lengths of time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # generic in click's types, and not when it runs
    _Value = click.ParamType[float]
else:
    _Value = click.ParamType

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Share(_Value):
    """`5%` or `0.05`."""

    name = "share"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The fraction."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            number = float("nan")
        share = number / 100 if text.endswith("%") else number
        if not 0 <= share < 1:
            self.fail(f"{text!r} is no share: write 5% or 0.05.", param, ctx)
        return share


class Duration(_Value):
    """`90`, `600s`, `10m` or `1.5h`."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip())
        if found is None:
            self.fail(f"{str(value)!r} is no length of time: write 600s, 10m or 1.5h.", param, ctx)
        return float(found[1]) * _UNITS[found[2]]
