"""Prints the table of stages in `docs/attention.md` from the journal of a run of `stages.toml`.

    python docs/stages/table.py registry/reference/NAME.jsonl.gz [--write]

With --write, what stands between the marks in the document is replaced by it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row, rows
from kernelmark.registry.store.journal import Journal, read
from kernelmark.registry.views import summary

STAGES = ("plain", "tiled", "tma", "specialised", "kernelmark")
MARKS = ("<!-- stages -->\n", "<!-- end of stages -->\n")
DOCUMENT = Path(__file__).resolve().parents[1] / "attention.md"


def table(journal: Journal) -> str:
    """The Markdown tables of the forward and the backward pass."""
    header = journal.header
    found = [x for x in rows(journal) if x.operator == "attention" and x.implementation in STAGES]
    name = journal.path.name if journal.path else header.run
    lines = [
        f"From `registry/reference/{name}`: {summary.device_name(header)}, {header.replicates} replicates,"
        f" commit {summary.commit(header)}.",
    ]
    for pass_ in ("forward", "backward"):
        cases: dict[str, list[Row]] = {}
        for x in found:
            if x.pass_ == pass_:
                cases.setdefault(x.case, []).append(x)
        if cases:
            labels = [f"D={x[0].axes['D']} {x[0].options['mask']}" for x in cases.values()]
            lines += ["", f"| {pass_} | {' | '.join(labels)} |", "|---" * (len(labels) + 1) + "|"]
            columns = [_column(x) for x in cases.values()]
            lines += [
                f"| {x} | {' | '.join(y)} |" for x, y in zip(STAGES, zip(*columns, strict=True), strict=True)
            ]
    return "\n".join(lines) + "\n"


def _column(found: Sequence[Row]) -> list[str]:
    """One case: each stage's time, rate, and how many times faster it is than the last one measured before."""
    out = []
    before: float | None = None
    for name in STAGES:
        row = next((x for x in found if x.implementation == name), None)
        ms = row.value() if row else None
        if row is None or ms is None:
            out.append(row.status if row else figures.DASH)
            continue
        gain = f", ×{before / ms:.2f}" if before else ""
        out.append(f"{figures.number(ms, 3)} ms, {figures.number(row.value('throughput'), 3)} TFLOP/s{gain}")
        before = ms
    return out


def placed(document: str, text: str) -> str:
    """The document with `text` between its marks."""
    start, end = MARKS
    head, rest = document.split(start)
    return head + start + text + end + rest.split(end)[1]


if __name__ == "__main__":
    made = table(read(Path(sys.argv[1])))
    if sys.argv[2:] == ["--write"]:
        DOCUMENT.write_text(placed(DOCUMENT.read_text(), made))
    else:
        print(made, end="")
