"""Rows for those who script: a tuple that a notebook shows as a table, and that becomes a data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..analysis.rows import Row
from ..errors import InputError
from . import units
from .flat import flat
from .table import Column, Table, html

if TYPE_CHECKING:
    import pandas


class Rows(tuple[Row, ...]):
    """A run's rows."""

    def frame(self) -> pandas.DataFrame:
        """As a pandas data frame, with the columns of `show --csv`. Raises `InputError` without pandas."""
        try:
            import pandas
        except ImportError:
            raise InputError("a data frame needs pandas: pip install pandas") from None
        return pandas.DataFrame([flat(x) for x in self])

    def table(self) -> Table:
        """What a notebook shows: the primary metric with its interval, and how each row stands."""
        table = Table(
            (
                *(Column(x) for x in ("operator", "case", "implementation", "status")),
                *(Column(x, number=True) for x in ("value", "95 % interval", "limit", "vs best", "vs eager")),
            )
        )
        for x in self:
            low, high = x.bounds()
            bounds = units.DASH if low is None else f"[{units.number(low)}, {units.number(high)}]"
            value = x.get()
            table.add(
                x.operator,
                x.case,
                x.implementation,
                x.status.replace("_", " "),
                f"{units.number(value.value)} {value.unit}" if value else units.DASH,
                bounds,
                units.percent(x.fraction_of_limit) + ("!" if x.above_limit else ""),
                units.ratio(x.speedup_vs_best_baseline),
                units.ratio(x.speedup_vs_eager),
            )
        return table

    def _repr_html_(self) -> str:
        return html(self.table())
