"""Which cells a time suffices for. Literal cells; nothing is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Writer
from kernelmark.registry.store.record import Case, Header, Measurement, Record, Request
from kernelmark.suite import budget
from kernelmark.suite.estimate import (
    BYTES_PER_S,
    CHECK_S,
    ENERGY_S,
    GPU_S,
    LONGEST_ANSWER_S,
    LOOKED_AT,
    PROGRAM_FLOPS_PER_S,
    Cost,
    estimate,
    known,
)
from kernelmark.suite.implementation import Implementation
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.plan import Cell, Plan, order


def case(size: int, operator: str = "gelu", dtype: str = "bf16") -> Case:
    return Case(operator, f"M{size}-{dtype}-forward", {"M": size}, {}, dtype, "forward", "5bec", 1, 0)


def cell(of: Case, name: str = "torch", environment: str = "core", devices: tuple[str, ...] = ("cpu",)) -> Cell:
    made = Implementation(of.operator, name, name, (), environment, devices, lambda: lambda case: print)
    return Cell(of, made, "cold")


def plan(*cases: Case) -> Plan:
    sampling = Sampling(warmup_s=0.25, max_seconds=0.25)
    return Plan("tiny", cases, 2, ("cold",), sampling, 60.0)


def named(cells: Any) -> list[str]:
    return [f"{x.case.operator} {x.case.axes['M']} {x.implementation.name}" for x in cells]


def each(seconds: Callable[[Cell], float]) -> Cost:
    return lambda cells: sum(map(seconds, cells))


ONE = each(lambda _: 1.0)
SIZES = [cell(case(x)) for x in (1 << 10, 1 << 11, 1 << 12, 1 << 16, 1 << 20)]


def test_the_first_then_what_is_least_like_it() -> None:
    assert [x[0].case.axes["M"].bit_length() - 1 for x in budget.ranked(SIZES)] == [10, 20, 16, 12, 11]


def test_operators_take_turns_and_another_dtype_says_more_than_a_near_size() -> None:
    cells = [cell(case(1024)), cell(case(1100)), cell(case(1024, dtype="fp32")), cell(case(8, "rope"))]
    order = [f"{x[0].case.operator} {x[0].case.name}" for x in budget.ranked(cells)]
    assert order == [
        "gelu M1024-bf16-forward",
        "rope M8-bf16-forward",
        "gelu M1024-fp32-forward",
        "gelu M1100-bf16-forward",
    ]


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        (1, [10]),  # one case at least
        (2 * budget.START_S + 6, [10, 16, 20]),
        (2 * budget.START_S + 9.9, [10, 12, 16, 20]),
        (2 * budget.START_S + 10, [10, 11, 12, 16, 20]),
    ],
)
def test_what_a_time_suffices_for(seconds: float, kept: list[int]) -> None:
    found = budget.fit(SIZES, 2, seconds, ONE)
    assert [x.case.axes["M"].bit_length() - 1 for x in found] == kept
    assert budget.seconds(SIZES, 2, ONE) == 2 * budget.START_S + 10


def test_a_cheaper_case_is_kept_where_a_dear_one_has_no_room() -> None:
    found = budget.fit(SIZES, 1, budget.START_S + 3, each(lambda x: 9.0 if x.case.axes["M"] == 1 << 20 else 1.0))
    assert [x.case.axes["M"].bit_length() - 1 for x in found] == [10, 12, 16]


def test_references_go_first_and_implementations_stay_together() -> None:
    cells = [cell(case(x), name) for x in (8, 9) for name in ("a", "b", "slow_reference")]
    cost = {"a": 1.0, "b": 1.0, "slow_reference": 5.0}
    found = budget.fit(cells, 1, budget.START_S + 9, each(lambda x: cost[x.implementation.name]))
    assert named(found) == ["gelu 8 a", "gelu 8 b", "gelu 8 slow_reference", "gelu 9 a", "gelu 9 b"]
    found = budget.fit(cells, 1, budget.START_S + 4, each(lambda x: cost[x.implementation.name]))
    assert named(found) == ["gelu 8 a", "gelu 8 b", "gelu 9 a", "gelu 9 b"]
    narrowed = budget.narrowed(plan(case(8), case(9)), found[:3])
    assert narrowed.only == {"gelu/M8-bf16-forward": ("a", "b"), "gelu/M9-bf16-forward": ("a",)}


def took(of: Case, seconds: float) -> Record:
    """A record of what took so long, and half a second to check."""
    seen = Measurement({"latency": (1.0,)}, "wall")
    return Record(of, "torch", "torch", None, 0, 0, "cold", "ok", None, seen, {"sample": seconds, "verify": 0.5})


def test_what_a_cell_takes_is_what_it_took_or_its_like_did() -> None:
    records = [took(case(8), x) for x in (1.0, 2.0, 9.0)] + [took(case(16), 4.0)]
    cost = estimate(plan().sampling, records, "cpu")
    assert cost([cell(case(8))]) == 2.5
    assert cost([cell(case(32))]) == 3.5  # the median of its like
    assert cost([cell(case(8), devices=("cuda",))]) == 0.0


def test_what_is_not_known_takes_the_plans_limits_and_a_case_is_laid_out_once() -> None:
    large = msgspec.structs.replace(case(8), bytes=int(3 * BYTES_PER_S))
    both = [cell(large), cell(large, "other", devices=("cuda",))]
    assert estimate(plan().sampling, device="cpu")(both) == 0.5 + CHECK_S + 3
    assert estimate(plan().sampling)(both) == 2 * (0.5 + CHECK_S) + 3  # the same on every machine


def test_of_a_device_elsewhere_all_counts_that_runs_on_such() -> None:
    both = [cell(case(8), devices=("cuda",)), cell(case(8), "other")]
    absent = dataclasses.replace(both[0].implementation, requires=("not-a-package",))
    both[0] = dataclasses.replace(both[0], implementation=absent)
    assert estimate(plan().sampling, device="cuda")(both) == 0.0
    sampling, limits = plan().sampling, 0.5 + CHECK_S + GPU_S
    assert estimate(sampling, device="cuda", here=False)(both) == pytest.approx(limits + ENERGY_S, abs=0.01)
    without = msgspec.structs.replace(sampling, energy="never")
    assert estimate(without, device="cuda", here=False)(both) == pytest.approx(limits, abs=0.01)


@pytest.mark.parametrize("pass_", ["forward", "program"])
def test_what_is_large_is_checked_in_part(pass_: Literal["forward", "program"]) -> None:
    """A call of two million tokens is no reason to leave its case out of a budget of half an hour."""
    large = msgspec.structs.replace(case(8), flops=10**18, pass_=pass_)
    once = 10**18 / PROGRAM_FLOPS_PER_S if pass_ == "program" else 0.25
    assert estimate(plan().sampling)([cell(large)]) == 0.25 + once + CHECK_S + LONGEST_ANSWER_S


def test_known_is_what_the_newest_runs_with_one_of_the_operators_took(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for day in range(1, 2 * LOOKED_AT + 1):
        operator = "gelu" if day <= LOOKED_AT + 1 else "softmax"
        of = msgspec.structs.replace(case(8), operator=operator)
        run = f"2026010{day}-000000-0000"
        header = Header(
            2, run, f"2026-01-0{day}", "", None, False, "tiny", 0, 1, "cpu", "", {}, {}, Request((of,))
        )
        with Writer(home.journal(run)) as out:
            out.write(header)
            out.write(took(of, float(day)))
    assert [x.spent_s["sample"] for x in known(home, "cpu", {"gelu"})] == [4.0, 3.0, 2.0]
    assert [x.spent_s["sample"] for x in known(home, "cpu", {"gelu", "softmax"})] == [6.0, 5.0, 4.0]
    assert known(home, "cuda", {"gelu"}) == []


def test_what_follows_a_clock_takes_as_long_as_its_clock() -> None:
    """Another case's clock says nothing of it."""
    timed = dataclasses.replace(cell(case(8)), lasts_s=600.0)
    own = pytest.approx(600 + plan().sampling.warmup_s + CHECK_S)
    assert estimate(plan().sampling)([timed]) == own
    assert timed.identity == cell(case(8)).identity
    assert estimate(plan().sampling, [took(case(16), 4.0)], "cpu")([timed]) == own
    assert estimate(plan().sampling, [took(case(8), 4.0)], "cpu")([timed]) == 4.5


def test_what_failed_at_once_says_nothing_of_its_like() -> None:
    failed = msgspec.structs.replace(took(case(32), 0.0), status="error", reason="no", measurement=None)
    records = [took(case(16), 4.0), failed]
    assert estimate(plan().sampling, records, "cpu")([cell(case(8))]) == 4.5


def test_in_a_first_replicate_what_says_most_comes_first() -> None:
    walk = budget.first(order(SIZES, 7, 0), SIZES)
    assert [x.case.axes["M"].bit_length() - 1 for x in walk] == [10, 20, 16, 12, 11]


def test_each_environment_costs_a_start() -> None:
    cells = [cell(case(8)), dataclasses.replace(cell(case(9), environment="vllm"))]
    assert budget.seconds(cells, 3, ONE) == 3 * (2 * budget.START_S + 2)


def test_a_reference_belongs_to_its_own_operator() -> None:
    """Cases of two operators may have one name."""
    cells = [
        cell(case(8)),
        cell(case(8), "gelu_reference"),
        cell(case(8, "rope")),
        cell(case(8, "rope"), "rope_reference"),
    ]
    cost = {"gelu": 1.0, "rope": 9.0}

    def dear(x: Cell) -> float:
        return 1.0 if x.implementation.name.endswith("_reference") else cost[x.case.operator]

    found = budget.fit(cells, 1, budget.START_S + 4, each(dear))
    assert named(found) == ["gelu 8 torch", "gelu 8 gelu_reference"]


def test_references_that_are_all_there_is_are_cases_as_others_are() -> None:
    alone = [cell(case(x), "slow_reference") for x in (8, 1 << 20)]
    assert named(budget.fit(alone, 1, 0.0, ONE)) == ["gelu 8 slow_reference"]
    beside = [cell(case(9, "rope")), *alone]
    assert budget.fit(beside, 1, budget.START_S + 3, ONE) == tuple(beside)


@pytest.mark.parametrize(("seconds", "kept"), [(1, [16]), (2 * budget.START_S + 4, [10, 16])])
def test_the_control_is_always_kept(seconds: float, kept: list[int]) -> None:
    found = budget.fit(SIZES, 2, seconds, ONE, "gelu/M65536-bf16-forward")
    assert [x.case.axes["M"].bit_length() - 1 for x in found] == kept
