"""Prints the table of `docs/deciding.md`: how often common tests call unchanged code changed, on an H200.

    python docs/deciding.py [--write]

The data are the first stages of ten A/B comparisons of commits with the same kernels, in
`registry/reference/detector/`: 318 rows each, three to five pairs of fresh processes in random order, clocks not
locked. Every difference that a test finds there is a false alarm. With --write, what stands between the marks in
the document is replaced.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from _page import placed
from kernelmark.registry.store.journal import read
from numpy.typing import NDArray
from scipy import special

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE / "deciding.md"
UNCHANGED = HERE.parent / "registry" / "reference" / "detector"
LEVEL = 0.05

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sides:
    """One row of one comparison: the samples of each process of both sides, in ms, paired by position."""

    base: Sequence[Floats]
    current: Sequence[Floats]

    @cached_property
    def medians(self) -> tuple[Floats, Floats]:
        """Logarithms of the processes' medians."""
        base, current = ([np.log(np.median(x)) for x in side] for side in (self.base, self.current))
        return np.array(base), np.array(current)


def rows() -> Iterator[Sides]:
    """Every row that both sides measured in at least three pairs."""
    for folder in sorted(UNCHANGED.glob("unchanged-*")):
        found: dict[tuple[str, ...], dict[str, dict[int, Floats]]] = defaultdict(
            lambda: {"base": {}, "current": {}}
        )
        for side in ("base", "current"):
            for record in read(folder / f"1-{side}.jsonl.gz").records:
                if record.measurement is not None:
                    name = (record.case.operator, record.case.name, record.implementation, record.cache)
                    found[name][side][record.replicate] = np.array(record.measurement.samples["latency"])
        for sides in found.values():
            pairs = sorted(sides["base"].keys() & sides["current"].keys())
            if len(pairs) >= 3:
                yield Sides([sides["base"][x] for x in pairs], [sides["current"][x] for x in pairs])


def inside(samples: Floats) -> Floats:
    """Without what lies beyond Tukey's fences."""
    low, high = np.percentile(samples, [25, 75])
    reach = 1.5 * (high - low)
    return samples[(samples >= low - reach) & (samples <= high + reach)]


def _welch(base: Floats, current: Floats) -> float:
    """Two-sided p of Welch's t (Biometrika 34, 1947)."""
    m, n = len(base), len(current)
    a, b = float(base.var(ddof=1)) / m, float(current.var(ddof=1)) / n
    if not a + b > 0:
        return 1.0
    share = a / (a + b)
    df = 1 / (share**2 / (m - 1) + (1 - share) ** 2 / (n - 1))
    return float(2 * special.stdtr(df, -abs(float(current.mean() - base.mean())) / np.sqrt(a + b)))


def one_process(row: Sides) -> float:
    """Welch's t over the iterations of one process a side."""
    return _welch(row.base[0], row.current[0])


def one_process_fenced(row: Sides) -> float:
    """The same without outliers."""
    return _welch(inside(row.base[0]), inside(row.current[0]))


def pooled(row: Sides) -> float:
    """Welch's t over all iterations of all processes."""
    return _welch(np.concatenate(row.base), np.concatenate(row.current))


def pooled_ranks(row: Sides) -> float:
    """Mann and Whitney's U over all iterations of all processes, by its normal approximation."""
    base, current = np.concatenate(row.base), np.concatenate(row.current)
    m, n = len(base), len(current)
    _, places, counts = np.unique(np.concatenate([base, current]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ties = float((counts.astype(float) ** 3 - counts).sum()) / ((m + n) * (m + n - 1))
    variance = m * n / 12 * (m + n + 1 - ties)
    z = (float(ranks[:m].sum()) - m * (m + n + 1) / 2) / np.sqrt(variance)
    return float(2 * special.ndtr(-abs(z)))


def medians(row: Sides) -> float:
    """Welch's t over the processes' medians."""
    return _welch(*row.medians)


def paired(row: Sides) -> float:
    """Student's t over the pairs' log ratios."""
    base, current = row.medians
    apart = current - base
    error = float(apart.std(ddof=1)) / np.sqrt(len(apart))
    return float(2 * special.stdtr(len(apart) - 1, -abs(float(apart.mean())) / error)) if error > 0 else 1.0


TESTS: Sequence[tuple[str, Callable[[Sides], float]]] = (
    ("iterations of one process, Welch", one_process),
    ("the same, outliers beyond Tukey's fences removed", one_process_fenced),
    ("iterations of all processes, Welch", pooled),
    ("iterations of all processes, Mann-Whitney", pooled_ranks),
    ("process medians, Welch", medians),
    ("process medians in pairs, Student", paired),
)


def table() -> str:
    """The Markdown table, with the number of rows that it rests on."""
    found = [x for x in rows() if all(np.ptp(y) > 0 for y in (*x.base, *x.current))]
    apart = [
        abs(float(np.expm1(np.median(current) - np.median(base)))) for base, current in (x.medians for x in found)
    ]
    lines = [
        f"{len(found)} rows of ten comparisons of unchanged code on H200s:",
        "",
        f"| unit and test, p < {LEVEL} | calls changed | and by more than 1 % |",
        "|---|---|---|",
    ]
    for name, test in TESTS:
        alarms = [test(x) < LEVEL for x in found]
        more = sum(x and y > 0.01 for x, y in zip(alarms, apart, strict=True))
        lines.append(f"| {name} | {100 * sum(alarms) / len(found):.1f} % | {100 * more / len(found):.2f} % |")
    return "\n".join(lines) + "\n"


BLOCKS = {"false alarms": table}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(placed(DOCUMENT.read_text(encoding="utf-8"), BLOCKS), encoding="utf-8")
    else:
        print(table(), end="")
