"""The built-in plan for several GPUs: its worlds, and that its sizes can be shared by all of them."""

from __future__ import annotations

import pytest
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.operators._collective import chunk
from kernelmark.suite.operators.attention_context_parallel import length
from kernelmark.suite.workloads._hooks import HOOKS


def test_attention_by_a_ring_has_rows_on_several_gpus():
    catalog = Catalog.default()
    plan = plans.load("distributed_long", catalog, "cuda", ["attention_context_parallel"])
    ring = [x.case for x in plan.cells(catalog, "cuda") if x.implementation.name == "kernelmark_ring"]
    assert {x.world for x in ring if x.axes["S"] == 1 << 20} == {1, 2, 4, 8}
    there = catalog.of_operator("attention_context_parallel")
    call = next(x for x in there if x.name == "kernelmark_ring_cpu").load()(ring[0])
    assert call.__name__ == "attention_context_parallel_ring"


def test_every_case_can_be_shared():
    found = plans.load("distributed", Catalog.default(), "cuda")
    assert {x.world for x in found.cases} == {1, 2, 4, 8}
    long = plans.load("distributed_long", Catalog.default(), "cuda")
    assert (long.replicates, long.sampling.max_samples) == (3, 1)
    for case in (*found.cases, *long.cases):
        if case.operator == "attention_context_parallel":
            assert length(case) > 0
        elif "N" in case.axes:
            assert chunk(case) > 0
    moved = {x.axes["N"] * 2 for x in found.cases if x.operator == "all_reduce"}
    assert (min(moved), max(moved)) == (1 << 10, 1 << 30)
    names = [(x.operator, x.name) for x in found.cases]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["links", "attention", "compression", "long", "train"])
def test_cuts_are_of_the_plans_and_of_four_gpus(name):
    catalog = Catalog.default()
    whole = {
        x.full_name for y in ("distributed", "distributed_long") for x in plans.load(y, catalog, "cuda").cases
    }
    cut = plans.load(f"distributed-{name}-4", catalog, "cuda")
    assert {x.full_name for x in cut.cases} <= whole
    assert max(x.world for x in cut.cases) == 4
    assert cut.replicates == 1


@pytest.mark.parametrize("name", ["distributed", "distributed-compression-4"])
def test_gradients_in_fewer_bytes_stand_beside_plain_ones(name):
    """And beside all-reduces of several sizes on as many GPUs: from these comes the link that they pay on."""
    catalog = Catalog.default()
    cells = plans.load(name, catalog, "cuda").cells(catalog, "cuda")
    cases = [(x.case, x.implementation.name) for x in cells]
    steps: dict[tuple[object, ...], set[object]] = {}
    for x, who in cases:
        if x.operator == "train" and not x.axes.get("follow"):
            place = x.dtype, x.axes["S"], x.options["model"], x.world, who
            steps.setdefault(place, set()).add(x.options["parallel"])
    fewer = {place: ways for place, ways in steps.items() if ways & set(HOOKS)}
    assert {place[3] for place in fewer} >= {2, 4}
    assert all("ddp" in ways for ways in fewer.values())
    assert any(ways >= set(HOOKS) for ways in fewer.values())
    for world in {place[3] for place in fewer}:
        reduced = (x for x, who in cases if who == "torch_distributed" and x.operator == "all_reduce")
        assert len({x.axes["N"] for x in reduced if x.world == world and x.options["place"] == "in"}) > 1


def test_what_is_sent_in_fewer_bytes_is_held_to_these():
    """Int8 with a scale of four bytes for 128 elements: 33 bytes for 64 of bf16, and for 128 of fp32."""
    operator = Catalog.default().operator("all_reduce_quantized")
    for dtype, share in (("bf16", 33 / 64), ("fp32", 33 / 128)):
        case = operator.case({"N": 1 << 20, "gpus": 4}, dtype, "forward")
        found = {metric.name: rate(case, 0.5) for metric, rate in operator.rates.items()}
        assert found["busbw"] == pytest.approx(1.5 * found["algbw"])
        assert found["wire"] == pytest.approx(share * found["busbw"])
