"""A site of 100,000 rows and of a million: what a day costs, and when a browser paints. `make test-load`."""

from __future__ import annotations

import random
import re
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.site.build import MEMORY, Settings, build
from kernelmark.registry.site.facts import facts, run_of
from kernelmark.registry.site.ledger import Ledger
from kernelmark.registry.store.journal import Journal

from ..conftest import CHROMIUM
from .conftest import EXPECTED

pytestmark = pytest.mark.load
OPERATORS = [f"operator_{x:02d}" for x in range(20)]
SIZES = (1024, 2048, 4096, 8192, 16384)
LIBRARIES = ("kernelmark", "torch", "torch_compile", "liger", "quack")
DAY_SECONDS = {200: 15.0, 2000: 60.0}
"""What a day's journal may cost a site of so many runs of 500 rows, in a processor's time."""
PAINT_MS = {200: 1000.0, 2000: 2000.0}
"""First paint, of a machine that does nothing else."""
SHELL = 300_000
"""Bytes of a page beside its data, which its script reads."""
DATA = r'<script type="application/json".*?</script>'


def made(literal: Any, number: int, noise: random.Random) -> Journal:
    """A run of 500 rows, with a step of one operator every 60 runs."""
    lines = []
    for place, operator in enumerate(OPERATORS):
        step = 1.05 ** ((number + 3 * place) // 60)
        for size in SIZES:
            case = literal.case(operator=operator, name=f"S{size}", axes={"S": size}, bytes=2000 * size)
            for rank, name in enumerate(LIBRARIES):
                ms = size / 1024 * (1 + 0.2 * rank) * (step if name == "kernelmark" else 1)
                provider = "torch" if name == "torch_compile" else name
                lines.append(literal.record(name, noise.gauss(1, 0.005) * ms, case=case, provider=provider))
    return literal.journal(*lines, literal.footer(), **_header(number))


def _header(number: int) -> dict[str, str]:
    day, month, year = 1 + number % 28, 1 + number // 28 % 12, 2010 + number // 336
    created = f"{year}-{month:02d}-{day:02d}T00:00:00+00:00"
    return {"run": f"run-{number:05d}", "commit": f"{number:040x}", "created": created}


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
        fields = _header(number)
        run = msgspec.structs.replace(about, name=fields.pop("run"), **fields)
        found = []
        for x in rows:
            value, *rest = x.metrics[x.primary]
            noisy = {x.primary: (value * noise.gauss(1, 0.005), *rest)}
            found.append(msgspec.structs.replace(x, metrics=x.metrics | noisy))
        ledger.take_in([str(number)], run, found)
        again = "<!-- repeated -->not yet repeated<!-- end of repeated -->"
        (folder / f"run/{run.file}.html").write_text(again)
    return count, folder


@pytest.fixture
def painted(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Callable[[Path], float]]:
    """Milliseconds from asking for a page to its first contentful paint, by a browser's clock: the page tells a
    server on loopback.
    """
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    told: list[float] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if found := re.fullmatch(r"/([\d.]+)", self.path):
                told.append(float(found[1]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", free_port()), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = (
        "<script>new PerformanceObserver((x) => x.getEntries().forEach((y) => { if (y.name === "
        f"'first-contentful-paint') new Image().src = 'http://127.0.0.1:{server.server_port}/' + y.startTime; "
        "})).observe({ type: 'paint', buffered: true });</script>"
    )

    def look(page: Path) -> float:
        probe = page.with_name(f"probe-{page.name}")
        probe.write_text(page.read_text().replace("</head>", f"{script}</head>", 1))
        told.clear()
        command = [CHROMIUM, "--headless", "--disable-gpu", "--no-sandbox", "--disable-background-networking"]
        command += [f"--user-data-dir={tmp_path}/profile", "--remote-debugging-port=0", probe.as_uri()]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as browser:  # type: ignore[arg-type]
            end = time.monotonic() + 60
            while not told and time.monotonic() < end:
                time.sleep(0.05)
            browser.terminate()
        probe.unlink()
        assert told, f"{page.name} was not painted within a minute"
        return told[0]

    yield look
    server.shutdown()
    server.server_close()


@pytest.mark.timeout(3000)
def test_a_day_is_added_and_pages_are_painted(
    grown: tuple[int, Path],
    literal: Any,
    written: Callable[[Sequence[Journal], Path], list[Path]],
    painted: Callable[[Path], float],
    tmp_path: Path,
) -> None:
    count, folder = grown
    begin = time.process_time(), time.monotonic()
    build([], folder, Settings(), EXPECTED)
    whole = time.process_time() - begin[0], time.monotonic() - begin[1]
    day = written([made(literal, count, random.Random(1))], tmp_path / "day")
    begin = time.process_time(), time.monotonic()
    built = build(day, folder, Settings(), EXPECTED)
    added = time.process_time() - begin[0], time.monotonic() - begin[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"\n{built.rows:,} rows: all pages in {whole[0]:.1f} s of a processor ({whole[1]:.1f} s by the clock), ")
    print(f"a day's 500 rows in {added[0]:.1f} s ({added[1]:.1f} s); at most {peak:,.0f} MiB")
    names = [
        "index",
        f"operator/{OPERATORS[0]}",
        "compare",
        "coverage",
        "runs",
        "scaling",
        f"run/run-{count:05d}",
        f"run/run-{count:05d}.2",
    ]
    slow = {}
    for name in names:
        page = folder / f"{name}.html"
        text = page.read_text()
        shell = len(re.sub(DATA, "", text, flags=re.S))
        ms = min(painted(page) for _ in range(3))  # the machine may have other work
        print(f"{name}: {len(text):,} B, {shell:,} beside its data; first paint after {ms:.0f} ms")
        assert shell <= SHELL, name
        slow |= {name: ms} if ms > PAINT_MS[count] else {}
    assert not slow
    assert added[0] < DAY_SECONDS[count]
