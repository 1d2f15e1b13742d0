"""Where verdicts go: files, JSON, the terminal. Shared by `regression_detector` and `kernelmark fleet`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ...registry.errors import unwritable

if TYPE_CHECKING:
    from ...registry.detection.comparison_report import ComparisonReport

FEW = 10
"""Up to so many rows there is nothing to fold."""


@dataclass(frozen=True)
class Shown:
    """Where the result goes."""

    everything: bool
    as_json: bool
    markdown: Path | None
    junit: Path | None
    html: Path | None
    no_registry: bool


def show(report: ComparisonReport, asked: Shown) -> None:
    """The result to where it was asked for: files, JSON, the terminal."""
    from ...registry.detection import verdict_output, verdict_text
    from ...registry.views.verdict_page import render_verdict

    files = (
        (asked.markdown, verdict_text.to_markdown),
        (asked.junit, verdict_output.to_junit),
        (asked.html, render_verdict),
    )
    for path, render in files:
        if path is not None:
            try:
                path.write_text(render(report), encoding="utf-8")
            except OSError as error:
                raise unwritable(f"{path} cannot be written", error, "Name another file.") from None
    if asked.as_json:
        text = msgspec.json.encode(verdict_output.to_json(report))
        click.echo(msgspec.json.format(text, indent=2))
        return
    from ...registry.views import table
    from ...registry.views.verdict_table import verdict_table

    everything = asked.everything or len(report.progress.verdicts) <= FEW
    told = map(table.line, verdict_text.explanations(report))
    table.show([*verdict_table(report, everything), *told])
