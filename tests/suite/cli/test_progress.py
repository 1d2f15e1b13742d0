"""Progress, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest
import rich.console
from kernelmark.registry.store.record import Case, Measurement, Record
from kernelmark.suite.catalog import Implementation
from kernelmark.suite.cli import progress as module
from kernelmark.suite.cli.progress import Lines, Live, progress
from kernelmark.suite.plan import Cell

CASE = Case("gelu", "M4-bf16-forward", {"M": 4}, {}, "bf16", "forward", "5bec", 100, 0)
CELL = Cell(CASE, Implementation("gelu", "torch", "torch", (), "core", ("cpu",), lambda: lambda case: max), "cold")


def record(replicate: int = 0, status: str = "ok", reason: str | None = None) -> Record:
    seen = Measurement({"latency": (1.0,)}, "events") if status == "ok" else None
    return Record(CASE, "torch", "torch", None, replicate, 0, "cold", status, reason, seen)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_lines_now_and_then_and_for_what_went_wrong(capsys, clock):
    with progress() as lines:
        assert isinstance(lines, Lines)
        lines.begin("run-1", 100, 40)
        lines.stage(0, "sample", CELL)
        for _ in range(30):
            clock[0] += 1
            lines.end(record())
        lines.end(record(status="timeout", reason="verify: not finished within 5 s"))
        lines.end(record(status="unsupported", reason="only on Sundays"))
        for _ in range(28):
            lines.end(record(replicate=2))
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "run run-1: 100 measurements, 40 done already",
        "[41/100] replicate 1, gelu M4-bf16-forward torch; 0:59 left",
        "[51/100] replicate 1, gelu M4-bf16-forward torch; 0:49 left",
        "[61/100] replicate 1, gelu M4-bf16-forward torch; 0:39 left",
        "  gelu M4-bf16-forward torch: timeout: verify: not finished within 5 s",
        "[100/100] replicate 3, gelu M4-bf16-forward torch; 0:00 left",
    ]


def test_nothing_is_promised_before_anything_is_known(capsys, clock):
    lines = Lines()
    lines.begin("run-1", 3, 0)
    assert lines.left() == "–"
    clock[0] += 90
    lines.end(record())
    assert lines.left() == "3:00"
    assert capsys.readouterr().out.splitlines()[0] == "run run-1: 3 measurements"


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
        live.begin("run-1", 4, 1)
        live.stage(0, "start", None)
        live.stage(0, "sample", CELL)
        live.progress.refresh()
        live.end(record())
        live.end(record(status="error", reason="verify: ValueError: [bold]odd[/bold] text"))
        live.progress.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "run run-1" in shown
    assert "replicate 1: gelu M4-bf16-forward torch: sample" in shown
    assert "1/4" in shown
    assert "3/4" in shown
    assert "gelu M4-bf16-forward torch: error: verify: ValueError: [bold]odd[/bold] text" in shown
