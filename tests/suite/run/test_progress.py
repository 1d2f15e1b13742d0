"""What those who script see of how far a run is: in a notebook, on a terminal, in a log."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
from kernelmark.registry.store.metric import LATENCY
from kernelmark.registry.store.record import Case, Key, Measurement
from kernelmark.suite.implementation import Implementation
from kernelmark.suite.plan import Cell
from kernelmark.suite.run.listener import Silent
from kernelmark.suite.run.pace import Pace
from kernelmark.suite.run.progress import Cells, Line, Output, in_notebook, watched

SEEN = Measurement({"latency": (0.5,)}, "monotonic")


def cell(case: str) -> Cell:
    made = Case("gelu", case, {}, {}, "bf16", "forward", "5bec", 1, 0)
    return Cell(made, Implementation("gelu", "torch", "torch", (), "core", ("cpu",), lambda: None), "cold")


class Written:
    """A line that keeps all that stood in it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def show(self, text: str) -> None:
        self.texts.append(text)

    def close(self) -> None:
        self.texts.append("closed")


def test_a_line_says_what_how_far_and_how_long(monkeypatch):
    now, line = [0.0], Written()
    monkeypatch.setattr(Pace, "of", lambda todo: Pace(set(todo), lambda: now[0]))
    shown = Cells(line, lambda: now[0])
    cells = [cell(f"c{i}") for i in range(5)]
    shown.begin("", [(x.identity, 0) for x in cells], 0, [LATENCY])
    shown.stage(0, "ceilings", None)
    for i, x in enumerate(cells):
        now[0] += 2
        shown.stage(0, "build", x)
        shown.stage(0, "verify", x)  # at once: nobody could read the one before
        now[0] += 3
        shown.end(x.record(0, i, "error", "verify: no") if i == 1 else x.record(0, i, "ok", None, SEEN))
    shown.close()
    assert line.texts == [
        "0 of 5: ceilings",
        "0 of 5: gelu c0 torch: build",
        "1 of 5: gelu c0 torch: 0.5000 ms",
        "1 of 5: gelu c1 torch: build",
        "2 of 5: gelu c1 torch: error",
        "2 of 5: gelu c2 torch: build",
        "3 of 5: gelu c2 torch: 0.5000 ms",
        "3 of 5: gelu c3 torch: build",
        "4 of 5, 5.0 s left: gelu c3 torch: 0.5000 ms",
        "4 of 5, 5.0 s left: gelu c4 torch: build",
        "5 of 5: gelu c4 torch: 0.5000 ms",
        "5 of 5 measured in 25.0 s",
        "closed",
    ]


class Handle:
    """As IPython's: a place in a cell's output."""

    def __init__(self, data: dict[str, str]) -> None:
        self.data = [data]

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        self.data.append(data)


@pytest.fixture
def notebook(monkeypatch):
    """A notebook's kernel, as far as it is asked; gives the places in its output."""
    places: list[Handle] = []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        places.append(Handle(data))
        return places[-1]

    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    shown = ModuleType("IPython.display")
    shown.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return places


def test_in_a_notebook_one_place_of_the_output_is_rewritten(notebook):
    assert in_notebook()
    with watched() as listener:
        listener.begin("", [(Key("gelu", "c0", "torch", "cold"), 0)], 0, [LATENCY])
        listener.stage(0, "<b>", None)
    (place,) = notebook
    assert [x["text/plain"] for x in place.data] == ["0 of 1: <b>", "0 of 1 measured in 0.0 s"]
    assert place.data[0]["text/html"] == "<pre>0 of 1: &lt;b&gt;</pre>"


def test_ipython_on_a_terminal_is_no_notebook(monkeypatch):
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not in_notebook()
    monkeypatch.setattr(ipython, "get_ipython", lambda: None)
    assert not in_notebook()


def test_a_terminals_line_is_taken_away_and_a_log_has_none(monkeypatch, capsys):
    with watched() as listener:
        assert isinstance(listener, Silent)
    with watched(False) as listener:
        assert isinstance(listener, Silent)
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    with watched() as listener:
        listener.begin("", [(Key("gelu", "c0", "torch", "cold"), 0)], 0, [LATENCY])
        listener.stage(0, "ceilings", None)
    assert screen.getvalue() == ("\r\x1b[K0 of 1: ceilings\r\x1b[K0 of 1 measured in 0.0 s\r\x1b[K")
    assert capsys.readouterr().out == ""


def test_both_kinds_of_line_are_used_alike():
    assert {x for x in vars(Output) if not x.startswith("_")} == {x for x in vars(Line) if not x.startswith("_")}
