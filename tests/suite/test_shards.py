"""Plans cut into shards: every case in exactly one, about the same time in each, the same cut everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import Request
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.estimate import estimate
from kernelmark.suite.shards import control_case, cut, measured, most, parse, seconds
from msgspec.structs import replace as replaced

CATALOG = Catalog.default()
PLAN = plans.load("standard", CATALOG, "cuda")
CELLS = PLAN.cells(CATALOG, "cuda")


def names(plan):
    return [(x.operator, x.name) for x in plan.cases]


@pytest.mark.usefixtures("untraced")
@settings(max_examples=15)
@given(st.integers(1, 40))
def test_every_case_is_in_exactly_one_shard_in_the_plans_order(count):
    parts = [cut(PLAN, CELLS, (i, count)) for i in range(1, count + 1)]
    assert sorted(y for x in parts for y in names(x)) == sorted(names(PLAN))
    order = {x: i for i, x in enumerate(names(PLAN))}
    for part in parts:
        places = [order[x] for x in names(part)]
        assert places == sorted(places)
        assert part.cases


def test_shards_take_about_the_same_time():
    cost = estimate(PLAN.sampling)
    parts = [set(names(cut(PLAN, CELLS, (i, 4)))) for i in range(1, 5)]
    loads = [cost(x for x in CELLS if (x.case.operator, x.case.name) in part) for part in parts]
    assert max(loads) < 1.02 * min(loads)
    assert seconds(PLAN, CELLS, 4) == pytest.approx(loads)


def test_a_training_of_many_steps_is_one_sample_and_its_answer_is_that_of_the_first():
    plan = plans.load("memory-techniques", CATALOG, "cuda")
    cells = plan.cells(CATALOG, "cuda")
    cost = estimate(plan.sampling)
    long = [x for x in cells if x.case.operator == "converge"]
    # On an H200 four such trainings took 170 s; by the rate of calls' answers their one would take 74 minutes.
    assert 150 < cost(long) < 400
    steps = [x for x in cells if x.case.options.get("model") == "llama-3.1-8b"]
    assert cost(steps) > cost(long)
    parts = [names(cut(plan, cells, (i, 2))) for i in (1, 2)]
    assert min(map(len, parts)) > 5


def test_implementations_that_a_case_is_for_stay_with_it():
    plan = plans.load("state_space", CATALOG, "cuda")
    cells = plan.cells(CATALOG, "cuda")
    parts = [cut(plan, cells, (i, 3)) for i in (1, 2, 3)]
    assert {x: y for part in parts for x, y in part.only.items()} == plan.only
    for part in parts:
        assert set(part.only) <= {f"{operator}/{name}" for operator, name in names(part)}


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/2", "1/2/3", "１/2", ""])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(InputError, match="is no shard: i/n, such as 2/4"):
        parse(text)


def test_more_shards_than_cases_are_refused():
    with pytest.raises(InputError, match="too few for 9999 shards"):
        cut(PLAN, CELLS, parse("1/9999"))


def test_a_control_is_in_every_part_and_the_rest_is_cut_as_without_it():
    control = control_case(PLAN, CELLS)
    assert PLAN.cases[names(PLAN).index(tuple(control.split("/", 1)))].bytes > 1 << 20
    for i in (1, 2, 3):
        with_it = {f"{operator}/{name}" for operator, name in names(cut(PLAN, CELLS, (i, 3), control))}
        without = {f"{operator}/{name}" for operator, name in names(cut(PLAN, CELLS, (i, 3)))}
        assert with_it == without | {control}


def test_what_parts_take_is_what_their_cases_take():
    plain, more = seconds(PLAN, CELLS, 4), seconds(PLAN, CELLS, 4, control_case(PLAN, CELLS))
    assert sum(plain) == pytest.approx(seconds(PLAN, CELLS, 1)[0])
    assert [x > y for x, y in zip(more, plain, strict=True)].count(False) == 1


def test_parts_say_what_all_of_them_have():
    """So that those of two plans are told apart, though they have no case in common."""
    whole = [cut(PLAN, CELLS, (i, 3)) for i in (1, 2, 3)]
    assert len({x.cut for x in whole}) == 1
    fewer = replace(PLAN, cases=tuple(x for x in PLAN.cases if x is not whole[1].cases[0]))
    changed = replace(PLAN, cases=(replaced(PLAN.cases[0], spec="changed"), *PLAN.cases[1:]))
    others = [cut(plan, CELLS, (1, count)).cut for plan, count in ((fewer, 3), (changed, 3), (PLAN, 4))]
    assert len({whole[0].cut, *others}) == 4
    header = whole[0].request(CELLS, Request(shard=(1, 3)))
    assert header.cut == whole[0].cut
    assert whole[0].request(CELLS).cut == PLAN.cut == ""


def test_a_control_that_is_no_case_is_refused():
    with pytest.raises(InputError, match="has no case 'softmax/none' to control with: name one as OPERATOR/CASE"):
        cut(PLAN, CELLS, (1, 2), "softmax/none")


def test_cases_without_a_cell_are_in_no_part_and_control_nothing():
    """As with --implementation, which leaves whole operators without a cell."""
    few = [x for x in CELLS if x.case.operator == "gelu"]
    plan = measured(PLAN, few)
    cases = {("gelu", x.case.name) for x in few}
    assert 1 < len(cases) < len(PLAN.cases)
    assert control_case(plan, few).startswith("gelu/")
    parts = [cut(plan, few, (i, len(cases))) for i in range(1, len(cases) + 1)]
    assert sorted(y for x in parts for y in names(x)) == sorted(cases)
    with pytest.raises(InputError, match=f"has {len(cases)} cases here, too few"):
        cut(plan, few, (1, len(cases) + 1))


# The case that both of the middle ones have is that of the later one.
LONGER, *SHORTER = (
    plans.load(x, CATALOG, "cuda") for x in ("converge", "converge_rates", "converge_continued", "converge_sparse")
)
TRAININGS = replace(
    LONGER,
    cases=tuple({y.full_name: y for x in (LONGER, *SHORTER) for y in x.cases}.values()),
    only={name: y for x in (LONGER, *SHORTER) for name, y in x.only.items()},
    systems=tuple({y.name: y for x in (LONGER, *SHORTER) for y in x.systems}.values()),
)
"""Of 10,000 steps and of 1,000."""
ARMS = TRAININGS.cells(CATALOG, "cuda")
(LONG,) = (x.full_name for x in TRAININGS.cases if (x.axes["N"], x.axes["S"]) == (10000, 512))


def test_cases_that_take_no_time_leave_no_part_of_a_comparison_empty():
    """What one of its commits lacks is among its verdicts, and has no cell here."""
    plan = replace(PLAN, cases=PLAN.cases[:6])
    cells = [x for x in CELLS if x.case == plan.cases[0]]
    for count in (3, 6):
        parts = [names(cut(plan, cells, (i, count), by_seed=False)) for i in range(1, count + 1)]
        assert all(parts)
        assert sorted(y for x in parts for y in x) == sorted(names(plan))


def replicates(parts):
    """Of each case the replicates that parts have, those of all parts together."""
    found = {}
    for part in parts:
        for case in part.cases:
            found.setdefault(case.full_name, []).extend(part.numbers(case))
    return found


@pytest.mark.usefixtures("untraced")
@settings(max_examples=10)
@given(st.integers(1, 30))
def test_every_seed_of_a_training_is_in_exactly_one_shard(count):
    parts = [cut(TRAININGS, ARMS, (i, count)) for i in range(1, count + 1)]
    assert {x: sorted(y) for x, y in replicates(parts).items()} == {
        x.full_name: [0, 1, 2, 3, 4] for x in TRAININGS.cases
    }
    assert all(x.cases for x in parts)
    assert sum(seconds(TRAININGS, ARMS, count)) == pytest.approx(seconds(TRAININGS, ARMS, 1)[0])


def test_only_what_takes_longer_than_a_shard_should_is_cut_by_seed():
    parts = [cut(TRAININGS, ARMS, (i, 4)) for i in (1, 2, 3, 4)]
    apart = {name for x in parts for name in x.seeds}
    assert LONG in apart
    assert apart < {x.full_name for x in TRAININGS.cases}
    assert sum(LONG in {y.full_name for y in x.cases} for x in parts) > 1
    longest, shortest = max(seconds(TRAININGS, ARMS, 4)), min(seconds(TRAININGS, ARMS, 4))
    assert longest < 1.3 * shortest
    whole = [cut(TRAININGS, ARMS, (i, 4), by_seed=False) for i in (1, 2, 3, 4)]
    assert not any(x.seeds for x in whole)
    with pytest.raises(InputError, match=f"has {len(TRAININGS.cases)} cases here, too few for 20 shards"):
        cut(TRAININGS, ARMS, (1, 20), by_seed=False)


def test_one_training_can_be_as_many_shards_as_it_has_seeds():
    plan = replace(TRAININGS, cases=tuple(x for x in TRAININGS.cases if x.full_name == LONG))
    cells = [x for x in ARMS if x.case.full_name == LONG]
    assert most(plan, cells) == 5
    assert [cut(plan, cells, (i, 5)).seeds[LONG] for i in (1, 2, 3, 4, 5)] == [(0,), (1,), (2,), (3,), (4,)]
    assert [cut(plan, cells, (i, 2)).seeds[LONG] for i in (1, 2)] == [(0, 2, 4), (1, 3)]
    with pytest.raises(InputError, match="has 1 case of 5 seeds here, too few for 6 shards"):
        cut(plan, cells, (1, 6))
    assert control_case(plan, cells) is None  # it would be in every shard whole
    assert [cut(plan, cells, (i, 1), LONG).seeds for i in (1,)] == [{}]
    assert [cut(plan, cells, (i, 5)).most for i in (1, 5)] == [1, 1]
