"""How kernels that were compiled are judged, and what a record keeps of them: on made-up rows."""

from __future__ import annotations

import json

from . import gate

ROW = {
    "case": "ssd B1",
    "error": None,
    "module": "_ssd",
    "kernel": "_scan",
    "shared": 1024,
    "spilled": 0,
    "products": True,
    "matrix": 1,
}
ROWS = [
    ROW,
    {**ROW, "spilled": 8},
    {**ROW, "spilled": 4},
    {**ROW, "matrix": 0},
    {**ROW, "shared": 70 << 10},
    {**ROW, "error": "NotImplementedError()"},
    {**ROW, "error": "KeyError()"},
]
LISTED = """
[[exception]]
targets = ["gfx942", "gfx950"]
kernel = "ssd/_ssd/.*"
status = "{}"
reason = "x"
"""


def test_the_gravest_end_counts():
    ends = ["compiled", "spills", "spills", "no matrix unit", "shared memory", "unsupported", "failed"]
    assert [gate.status(x, "gfx942") for x in ROWS] == ends
    assert gate.status(ROWS[4], "gfx950") == "compiled"  # whose limit is higher


def test_what_is_not_listed_is_a_fault_and_what_no_longer_happens_is_one():
    assert len(gate.faults(ROWS, "gfx942", [])) == 5
    listed = gate.exceptions(LISTED.format("spills"))
    assert [x.split(": ")[2] for x in gate.faults(ROWS, "gfx942", listed)] == [
        "no matrix unit",
        "shared memory",
        "failed",
    ]
    assert gate.stale(ROWS, "gfx942", listed) == []
    assert len(gate.stale(ROWS[:1], "gfx942", listed)) == 1


def test_a_record_keeps_counts_and_what_spills(tmp_path):
    file = tmp_path / "compiled.json"
    gate.keep(file, "gfx942", ROWS)
    gate.keep(file, "8.0", ROWS[:1])
    gate.keep(file, "gfx942", ROWS[:3])
    kept = json.loads(file.read_text())
    assert list(kept) == ["8.0", "gfx942"]
    assert kept["8.0"]["others"] == []
    assert kept["8.0"]["sources"] == gate.sources()
    found = kept["gfx942"]
    assert (found["kernels"], found["counts"]["compiled"], found["counts"]["spills"]) == (3, 1, 2)
    assert found["others"] == [{"kernel": "ssd/_ssd/_scan", "status": "spills", "times": 2, "spilled": [4, 8]}]


def test_the_command_refuses_what_is_no_target(capsys):
    assert gate.main("--record", "x.json", "sm_90") == 2
    assert gate.main("--record") == 2
    assert "no target sm_90; known: 7.5, " in capsys.readouterr().err
