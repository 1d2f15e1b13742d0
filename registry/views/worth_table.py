"""What kernels are worth in a model, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from ..analysis.worth import Worth, worths
from ..store.journal import Journal
from .table import Block, Column, Page, Table, line

HEADINGS = ("part", "put in", "calls", "alone ×", "expected ×", "measured ×", "95 %", "gained ms", "expected ms")
_DROPS = {"expected ms": 3, "gained ms": 2, "calls": 1}
"""What a narrow terminal does without, the highest first."""


def worth_table(journal: Journal) -> Page:
    """All exchanges of a run, a table for each base system; empty for a run without any."""
    found = worths(journal)
    if not found:
        return []
    page: list[Block] = []
    for (step, base), group in groupby(found, key=lambda x: (x.exchange.step, x.exchange.base)):
        rows = list(group)
        known = next((x.base_ms for x in rows if x.base_ms is not None), None)
        title = f"worth · {step} · base {base}" + (f", {known:.2f} ms" if known is not None else "")
        columns = [Column(x, number=i > 1, drop=_DROPS.get(x, 0)) for i, x in enumerate(HEADINGS)]
        table = Table(columns, title)
        for x in rows:
            if x.status == "ok":
                table.add(*cells(x), style="dim" if x.null else "")
        page.append(table)
        page += [line(f"{why}: {'; '.join(what)}", style="dim") for why, what in missing(rows)]
        page += [
            line(f"{x.exchange.part} {x.exchange.implementation} {x.agreement}: {x.differs}", style="dim")
            for x in rows
            if x.differs
        ]
    page.append(line("Dim: the interval holds 1, so that nothing is shown."))
    if any(x.status == "ok" and x.agreement in ("more", "less") and not x.differs for x in found):
        page.append(
            line(
                f"What differs where more or less was measured than expected, if it was not tried yet: "
                f"kernelmark worth --resume {journal.header.run}"
            )
        )
    return page


def missing(found: Iterable[Worth]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Exchanges without a figure: each reason, and by part what was to be put in."""
    reasons: dict[str, dict[str, dict[str, None]]] = {}
    for x in found:
        if x.status != "ok":
            reason = (x.reason or "no reason given").removeprefix(f"{x.exchange.system}: ")
            parts = reasons.setdefault(f"{x.status.replace('_', ' ')}, {reason}", {})
            parts.setdefault(x.exchange.part, {})[x.exchange.implementation] = None
    return tuple(
        (why, tuple(f"{x} {', '.join(names)}" for x, names in parts.items())) for why, parts in reasons.items()
    )


def cells(x: Worth) -> tuple[str, ...]:
    """A row's texts, in the order of `HEADINGS`."""
    return (
        x.exchange.part,
        x.exchange.implementation,
        str(x.exchange.calls),
        _ratio(x.alone, 2),
        _ratio(x.expected, 4),
        _ratio(x.measured, 4),
        "–" if x.low is None or x.high is None or x.processes < 2 else f"{x.low:.4f}–{x.high:.4f}",
        _ratio(x.gained_ms, 3),
        _ratio(x.expected_ms, 3),
    )


def _ratio(x: float | None, digits: int) -> str:
    return "–" if x is None else f"{x:.{digits}f}"
