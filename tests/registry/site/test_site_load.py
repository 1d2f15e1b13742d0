"""A site of 100,000 rows and of a million: what a day's journals cost, and when a browser paints. `make test-load`."""

from __future__ import annotations

import random
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.site.build import MEMORY, Settings, build
from kernelmark.registry.site.facts import facts, run_of
from kernelmark.registry.site.ledger import Ledger
from kernelmark.registry.store.journal import Journal

from .conftest import EXPECTED

pytestmark = pytest.mark.load
OPERATORS = [f"operator_{x:02d}" for x in range(20)]
SIZES = (1024, 2048, 4096, 8192, 16384)
LIBRARIES = ("kernelmark", "torch", "torch_compile", "liger", "quack")
DAY_SECONDS = {200: 12.0, 2000: 90.0}
"""What a day's journal may cost a site of so many runs of 500 rows."""
PAINT_MS = 1000.0
SHELL = 300_000
"""Bytes of a page beside its data: rows of its tables, drawings, and what its script reads."""
PAINT = """
addEventListener("load", () => setTimeout(() => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  document.title = `painted ${paint ? paint.startTime : NaN}`;
}, 300));
"""


def made(literal: Any, number: int, noise: random.Random) -> Journal:
    """A run of 500 rows, with a step of one operator every 60 runs."""
    lines = []
    for place, operator in enumerate(OPERATORS):
        step = 1.05 ** ((number + 3 * place) // 60)
        for size in SIZES:
            case = literal.case(operator=operator, name=f"S{size}", axes={"S": size}, bytes=2000 * size)
            for rank, name in enumerate(LIBRARIES):
                ms = size / 1024 * (1 + 0.2 * rank) * (step if name == "kernelmark" else 1)
                provider = name if name != "torch_compile" else "torch"
                lines.append(literal.record(name, noise.gauss(1, 0.005) * ms, case=case, provider=provider))
    hours = number * 6
    created = f"2026-{1 + hours // 672 % 12:02d}-{1 + hours // 24 % 28:02d}T{hours % 24:02d}:00:00+00:00"
    return literal.journal(
        *lines, literal.footer(), run=f"run-{number:05d}", created=created, commit=f"{number:040x}"
    )


@pytest.fixture(params=DAY_SECONDS)
def grown(request: Any, literal: Any, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A site's folder that has so many runs. Their facts go to its memory as they are: journals of a million rows
    would be read for half an hour.
    """
    count, folder, noise = request.param, tmp_path / "site", random.Random(0)
    (folder / "run").mkdir(parents=True)
    ledger = Ledger(folder / MEMORY)
    template = made(literal, 0, noise)
    rows, about = facts(template), run_of(template, facts(template))
    for number in range(count):
        run = msgspec.structs.replace(
            about,
            name=f"run-{number:05d}",
            commit=f"{number:040x}",
            created=f"20{10 + number // 336}-{1 + number // 28 % 12:02d}-{1 + number % 28:02d}T00:00:00+00:00",
        )
        found = [
            msgspec.structs.replace(x, metrics={x.primary: (noise.gauss(1, 0.005) * x.metrics[x.primary][0], *x.metrics[x.primary][1:])})
            for x in rows
        ]
        ledger.take_in([str(number)], run, found)
        (folder / f"run/{run.file}.html").write_text("<!-- repeated -->not yet repeated<!-- end of repeated -->")
    return count, folder


@pytest.mark.timeout(3000)
def test_a_day_is_added_and_pages_are_painted(
    grown: tuple[int, Path],
    literal: Any,
    written: Callable[[Sequence[Journal], Path], list[Path]],
    browse: Callable[..., str],
    tmp_path: Path,
) -> None:
    count, folder = grown
    settings = Settings()
    begin = time.perf_counter()
    built = build([], folder, settings, EXPECTED)
    whole = time.perf_counter() - begin
    day = written([made(literal, count, random.Random(1))], tmp_path / "day")
    begin = time.perf_counter()
    built = build(day, folder, settings, EXPECTED)
    added = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"\n{built.rows:,} rows: pages in {whole:.1f} s, a day's {500} rows in {added:.1f} s, {peak:,.0f} MiB")
    for name in ("index", f"operator/{OPERATORS[0]}", "compare", "coverage", "runs", "scaling", f"run/run-{count:05d}"):
        path = folder / f"{name}.html"
        text = path.read_text()
        told = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
        probe = folder / f"{name}-paint.html"
        probe.write_text(text.replace("</head>", f"<script>{PAINT}</script></head>", 1))
        painted = float(re.search(r"<title>painted ([\d.]+|NaN)", browse(probe.as_uri(), "--dump-dom"))[1])  # type: ignore[index]
        probe.unlink()
        print(f"{name}: {len(text):,} B, {len(told):,} without its series; first paint after {painted:.0f} ms")
        assert painted <= PAINT_MS, name
        assert len(told) <= SHELL, name
    assert added < DAY_SECONDS[count]
