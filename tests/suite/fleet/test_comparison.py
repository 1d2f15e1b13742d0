"""Reports of shards as one: the same verdicts, and the exit code of all."""

from __future__ import annotations

import json

import pytest
from kernelmark.registry.detection.comparison import Noise, Options
from kernelmark.registry.detection.comparison_report import ComparisonReport
from kernelmark.registry.detection.decision import Progress
from kernelmark.registry.detection.verdict import Flag, Verdict
from kernelmark.registry.detection.verdict_output import to_json
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.record import Key
from kernelmark.suite.fleet.collect import collect, deliveries_of, reports
from kernelmark.suite.fleet.comparison import join, parse
from kernelmark.suite.fleet.delivery import Delivery, digest, write
from kernelmark.suite.fleet.dropping import drop
from kernelmark.suite.fleet.order import Order


def verdict(case: str, kind, change: float | None = 0.0) -> Verdict:
    return Verdict(
        Key("softmax", case, "kernelmark", "cold"),
        kind,
        f"why {case}",
        base_value=1.0,
        current_value=1.0 + (change or 0),
        change=change,
        noise=Noise(1e-4, 5.0),
        flags=(Flag("memory", 1.0, 2.0, "twice"),) if kind == "warning" else (),
    )


def report(*verdicts: Verdict, **changes) -> ComparisonReport:
    given = {"base": "a" * 40, "current": "b" * 40, "fails": frozenset({"regression"}), "remarks": ("one",)}
    return ComparisonReport(progress=Progress(verdicts), **given | changes)


def text(x: ComparisonReport) -> bytes:
    return json.dumps(to_json(x)).encode()


ROWS = (
    verdict("A", "no change"),
    verdict("B", "regression", 0.3),
    verdict("C", "warning", 0.04),
    verdict("D", "missing", None),
)


def test_cut_and_joined_it_is_the_same():
    whole = report(*ROWS)
    parts = {2: parse(text(report(ROWS[1], ROWS[3]))), 1: parse(text(report(ROWS[0], ROWS[2])))}
    joined = join(parts)
    assert to_json(joined) == to_json(whole)
    assert joined.exit_code == whole.exit_code == 1


@pytest.mark.parametrize(
    "changes",
    [{"base": "c" * 40}, {"current": "c" * 40}, {"options": Options(fail_above=0.1)}, {"fails": frozenset()}],
)
def test_answers_to_other_questions_are_not_joined(changes):
    parts = {1: parse(text(report(ROWS[0]))), 2: parse(text(report(ROWS[1], **changes)))}
    with pytest.raises(InputError, match="shard 2 "):
        join(parts)


@pytest.mark.parametrize(
    "wrong", [b"", b"{}", b"[]", b'{"schema_version": 9}', text(report(ROWS[0])).replace(b'"kind"', b'"kin"')]
)
def test_what_is_no_report(wrong):
    with pytest.raises(InputError, match="report"):
        parse(wrong)


def test_the_first_report_of_a_shard_counts_and_an_end_without_verdict_does_not(tmp_path):
    home = Home(tmp_path)
    order = Order("r", "slurm", 2, "quick", "cpu", 1, (1.0, 1.0), "salt", compare=True)
    folder = deliveries_of(home, "r")
    folder.mkdir(parents=True)
    for i, (shard, code, row) in enumerate([(1, 5, ROWS[0]), (1, 1, ROWS[1]), (1, 0, ROWS[0]), (2, 0, ROWS[2])]):
        data = text(report(row))
        write(
            folder / f"{shard}-{i}",
            Delivery("r", (shard, 2), "h", code, {"report.json": digest(data)}),
            {"report.json": data},
        )
    state = collect(order, home)
    assert [x.shard for x in state.whole] == [1, 2]
    assert [x.reason for x in state.refused] == ["it ended with exit code 5"]
    assert {shard: x.verdicts[0].key.case for shard, (_, x) in reports(order, home).items()} == {1: "B", 2: "C"}
    (kept,) = drop(order, home, [1])  # of which the one behind it counts then
    assert kept.read_bytes() == text(report(ROWS[1]))
    assert {shard: x.verdicts[0].key.case for shard, (_, x) in reports(order, home).items()} == {1: "A", 2: "C"}
    drop(order, home, [1])
    assert collect(order, home).missing == (1,)
