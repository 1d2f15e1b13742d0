"""Progress, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys

import msgspec
import pytest
import rich.console
from kernelmark.registry.store.metric import LATENCY, Metric
from kernelmark.registry.store.record import Case, Key, Measurement, Record
from kernelmark.suite.cli import progress as module
from kernelmark.suite.cli.progress import Lines, Live, progress
from kernelmark.suite.implementation import Implementation
from kernelmark.suite.plan import Cell
from kernelmark.suite.run.pace import Pace
from kernelmark.suite.run.progress import Tally

CASE = Case("gelu", "M4-bf16-forward", {"M": 4}, {}, "bf16", "forward", "5bec", 100, 0)
CELL = Cell(CASE, Implementation("gelu", "torch", "torch", (), "core", ("cpu",), lambda: lambda case: max), "cold")
METRICS = (LATENCY, Metric("speed", "tokens/s", "higher", "last"), Metric("taken", "B", summary="maximum"))


def todo(cells: int, replicates: int = 1) -> list[tuple[Key, int]]:
    """Places of rows by torch, c0, c1, …"""
    return [(key(f"c{i}"), replicate) for replicate in range(replicates) for i in range(cells)]


def key(case: str) -> Key:
    return Key("gelu", case, "torch", "cold")


def record(case: str = "c0", replicate: int = 0, status: str = "ok", reason: str | None = None) -> Record:
    seen = Measurement({"latency": (1.0,)}, "events") if status == "ok" else None
    named = msgspec.structs.replace(CASE, name=case)
    return Record(named, "torch", "torch", None, replicate, 0, "cold", status, reason, seen)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Pace, "of", lambda todo: Pace(set(todo), lambda: now[0]))
    return now


def test_lines_now_and_then_and_for_what_went_wrong(capsys, clock):
    with progress() as lines:
        assert isinstance(lines, Lines)
        lines.begin("run-1", todo(60), 140, METRICS)
        lines.stage(0, "start", None)
        clock[0] += 7  # a worker's start, once a replicate: no part of what a cell takes
        lines.stage(0, "sample", CELL)
        for i in range(30):
            clock[0] += 1
            lines.end(record(f"c{i}"))
        lines.end(record("c30", status="timeout", reason="verify: not finished within 5 s"))
        lines.end(record("elsewhere", status="unsupported", reason="only on Sundays"))
        for i in range(31, 60):
            lines.end(record(f"c{i}"))
    assert capsys.readouterr().out.splitlines() == [
        "run run-1: 200 measurements, 140 done already",
        "[141/200] replicate 1, gelu c0 torch",
        "[151/200] replicate 1, gelu c10 torch; 49.0 s left",
        "[161/200] replicate 1, gelu c20 torch; 39.0 s left",
        "  gelu c30 torch: timeout: verify: not finished within 5 s",
        "[200/200] replicate 1, gelu c59 torch",
    ]


def test_rows_appear_as_they_are_measured(capsys, clock):
    lines = Lines()
    lines.begin("run-1", todo(2, replicates=3), 0, METRICS)
    for replicate in range(3):
        for case in ("c0", "c1"):
            clock[0] += 1
            lines.end(record(case, replicate))
    assert capsys.readouterr().out.splitlines() == [
        "run run-1: 6 measurements",
        "[1/6] gelu c0 torch: 1.000 ms",
        "[2/6] gelu c1 torch: 1.000 ms",
        "[6/6] replicate 3, gelu c1 torch",
    ]


@pytest.mark.parametrize(
    ("primary", "samples", "told"),
    [
        ("latency", (3.0, 1.0, 2.0), "2.000 ms"),
        ("speed", (3000.0, 1000.0, 1500.0), "1,500 tokens/s"),
        ("taken", (3e6, 9e6, 1e6), "9 MB"),
    ],
)
def test_a_first_value_is_its_metrics_summary(capsys, clock, primary, samples, told):
    seen = msgspec.structs.replace(
        record(),
        case=msgspec.structs.replace(CASE, primary=primary),
        measurement=Measurement({primary: samples}, "program"),
    )
    lines = Lines()
    lines.begin("run-1", [(key("c0"), 0), (key("c1"), 0)], 0, METRICS)
    lines.end(seen)
    assert capsys.readouterr().out.splitlines()[1] == f"[0/2] gelu M4-bf16-forward torch: {told}"


def test_a_tally_is_silent_for_what_is_short_and_says_how_long_the_rest_takes(capsys):
    now = [0.0]
    tally = Tally("recording", lambda: now[0])
    for second in range(13):
        now[0] = second
        tally.show(f"{second} of 40 rows", second / 40)
    tally.close()
    assert capsys.readouterr().err.splitlines() == [
        "recording: 5 of 40 rows, 35.0 s left",
        "recording: 10 of 40 rows, 30.0 s left",
    ]


class Terminal(io.StringIO):
    """Looks like a terminal."""

    def isatty(self) -> bool:
        return True


def test_live_on_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(rich, "_console", rich.console.Console(width=160, force_terminal=True))
    with progress() as live:
        assert isinstance(live, Live)
        live.begin("run-1", todo(3), 1, METRICS)
        live.stage(0, "start", None)
        live.stage(0, "sample", CELL)
        live.progress.refresh()
        live.end(record())
        live.end(record("c1", status="error", reason="verify: ValueError: [bold]odd[/bold] text"))
        live.progress.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "run run-1" in shown
    assert "replicate 1: gelu M4-bf16-forward torch: sample" in shown
    assert "1/4" in shown
    assert "3/4" in shown
    assert "gelu c1 torch: error: verify: ValueError: [bold]odd[/bold] text" in shown
