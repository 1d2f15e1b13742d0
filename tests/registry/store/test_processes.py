"""What belongs to a row's processes: the boards that they ran on, where these are several."""

from __future__ import annotations

from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.processes import process_values
from kernelmark.registry.store.record import BOARDS, boards
from msgspec.structs import replace


def test_processes_of_several_boards_are_not_put_beside_those_of_one(literal):
    header = literal.header(replicates=3, environment={BOARDS: "a"})
    one = [literal.record("torch", ms, replicate=i) for i, ms in enumerate((1.0, 1.0, 1.1))]
    several = [one[0], *(replace(x, board="b") for x in one[1:])]
    other = [replace(x, board="b") for x in one]
    (mine,), (both,), (moved,) = (process_values(header, x).values() for x in (one, several, other))
    assert mine.values == both.values == moved.values  # the spread between boards is among them
    assert both.definition == f"{mine.definition}/a/b"
    assert moved.definition == mine.definition  # as of runs begun on either: each is of one board


def test_an_interval_holds_the_spread_between_boards(literal):
    header = literal.header(replicates=4, environment={BOARDS: "a"})
    records = [literal.record("torch", ms, replicate=i) for i, ms in enumerate((1.0, 1.0, 1.1, 1.1))]
    (row,) = rows(Journal(header, (*records[:2], *(replace(x, board="b") for x in records[2:]))))
    latency = row.get("latency")
    assert latency.low < 1.0 < 1.1 < latency.high


def test_what_failed_is_of_no_board(literal):
    header = literal.header(environment={BOARDS: "a"})
    failed = replace(literal.record("torch", status="error", reason="no"), board="b")
    assert boards(header, [literal.record("torch", 1.0), failed]) == {"a"}
    assert boards(literal.header(environment={}), [literal.record("torch", 1.0)]) == {"unknown"}
