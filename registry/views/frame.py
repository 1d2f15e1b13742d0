"""Rows for those who script: a tuple that a notebook shows as a table, and that becomes a data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import figures
from ..analysis.rows import Row
from ..errors import InputError
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
            bounds = figures.DASH if low is None else f"[{figures.number(low)}, {figures.number(high)}]"
            value = x.get()
            table.add(
                x.operator,
                x.case,
                x.implementation,
                x.status.replace("_", " "),
                f"{figures.number(value.value)} {value.unit}" if value else figures.DASH,
                bounds,
                figures.percent(x.fraction_of_limit) + ("!" if x.above_limit else ""),
                figures.ratio(x.speedup_vs_best_baseline),
                figures.ratio(x.speedup_vs_eager),
            )
        return table

    def _repr_html_(self) -> str:
        return html(self.table())
