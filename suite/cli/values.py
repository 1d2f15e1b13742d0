"""Values that options take: shares of a whole, lengths of time, memory, seeds, sizes of axes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ...registry.errors import short
from ...registry.store.bounds import SEEDS

if TYPE_CHECKING:  # generic in click's types, and not when it runs
    _Value = click.ParamType[float]
    _Number = click.ParamType[int]
    _Axis = click.ParamType[tuple[str, tuple[int, ...]]]
    _Text = click.ParamType[str]
else:
    _Value = _Number = _Axis = _Text = click.ParamType

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
        if found is None or not float(found[1]):
            self.fail(f"{str(value)!r} is no length of time: write 600s, 10m or 1.5h.", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


class Memory(_Text):
    """`512m` or `16g`, as Docker takes it: asked here, since the engine is asked after minutes of building."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it was written."""
        text = str(value).strip()
        if not re.fullmatch(r"(?=[\d.]*[1-9])\d+(\.\d+)?([kmg]b?|b)?", text, re.ASCII | re.IGNORECASE):
            self.fail(f"{short(text)!r} is no amount of memory: write 512m or 16g.", param, ctx)
        return text


class Seed(_Number):
    """A seed that a journal can hold. No range of click's, which would show both ends in every help."""

    name = "integer"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        given: Any = value  # whatever click's own type is said to take
        seed: int = click.INT.convert(given, param, ctx)
        if not SEEDS[0] <= seed <= SEEDS[1]:
            self.fail(f"{short(str(seed))} is not within {SEEDS[0]} and {SEEDS[1]}.", param, ctx)
        return seed


class AxisSizes(_Axis):
    """`S=1024,4096`: an axis and the sizes that it may have."""

    name = "AXIS=SIZE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, ...]]:
        """The axis and its sizes."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"([A-Za-z_]\w*)=(\d{1,18}(?:,\d{1,18})*)", str(value).replace(" ", ""))
        if found is None:
            self.fail(f"{str(value)!r} names no axis and sizes: write S=4096 or S=1024,4096.", param, ctx)
        return found[1], tuple(int(x) for x in found[2].split(","))


def together(axes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Sizes by axis, of an option that was given several times."""
    found: dict[str, tuple[int, ...]] = {}
    for axis, sizes in axes:
        found[axis] = tuple(dict.fromkeys((*found.get(axis, ()), *sizes)))
    return found
