"""The built-in plan for several GPUs: its worlds, and that its sizes can be shared by all of them."""

from __future__ import annotations

from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.operators._collective import chunk
from kernelmark.suite.operators.attention_context_parallel import length


def test_attention_by_a_ring_has_rows_on_several_gpus():
    catalog = Catalog.default()
    plan = plans.load("distributed", catalog, "cuda", ["attention_context_parallel"])
    ring = [x.case for x in plan.cells(catalog, "cuda") if x.implementation.name == "kernelmark_ring"]
    assert {x.world for x in ring if x.axes["S"] == 1 << 20} == {1, 2, 4, 8}
    there = catalog.of_operator("attention_context_parallel")
    call = next(x for x in there if x.name == "kernelmark_ring_cpu").load()(ring[0])
    assert call.__name__ == "attention_context_parallel_ring"


def test_every_case_can_be_shared():
    found = plans.load("distributed", Catalog.default(), "cuda")
    assert {x.world for x in found.cases} == {1, 2, 4, 8}
    for case in found.cases:
        if case.operator == "attention_context_parallel":
            assert length(case) > 0
        elif "N" in case.axes:
            assert chunk(case) > 0
    moved = {x.axes["N"] * 2 for x in found.cases if x.operator == "all_reduce"}
    assert (min(moved), max(moved)) == (1 << 10, 1 << 30)
    names = [(x.operator, x.name) for x in found.cases]
    assert len(set(names)) == len(names)
