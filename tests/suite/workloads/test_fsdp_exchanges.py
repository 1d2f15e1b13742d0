"""FSDP2 with all-gathers and reduce-scatters that a system names: the same steps as by its own, in two ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernelmark.kernels.collective import all_gather as gathering
from kernelmark.kernels.collective import reduce_scatter as scattering
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _exchanges as exchanges
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._parallel import Fsdp2
from kernelmark.suite.workloads._split import ContextParallel

from ...ranks import spread

CPU = torch.device("cpu")
OURS = {"all_gather": "kernelmark", "reduce_scatter": "kernelmark"}
WORLD, STEPS = 2, 3


def made(parts, way="fsdp2", A=1, world=WORLD):
    """A trainer of a tiny model, and the tokens of all ranks' steps."""
    case = train.WORKLOAD.case(
        {"B": 1, "S": 16, "A": A, "gpus": world}, "fp32", "program", model="llama-tiny", parallel=way
    )
    trainer = train.assemble(case, Assembly(System("some", "torch", parts), train.catalog()))
    whole = train.read(train.WORKLOAD.whole(case))
    trainer.load(answer.initial(whole, 5, CPU))
    return case, trainer, answer.Batches(whole, 5, CPU)


def _counted(counts):
    """Counts what is asked of the kernels' calls, which here go by the group's own."""
    for module, name in ((gathering, "all_gather"), (scattering, "reduce_scatter")):
        call = getattr(module, name)

        def into(*given, whole=call.into, name=name):
            counts[name] = counts.get(name, 0) + 1
            return whole(*given)

        call.into = into


def _steps(group, parts, A):
    counts = {}
    _counted(counts)
    _, trainer, batches = made(parts, A=A)
    found = [float(trainer.step(*map(trainer.parallel.share, batches.draw(step)))) for step in range(STEPS)]
    with trainer.parallel.local():
        trainer.step(*map(trainer.parallel.share, batches.draw(STEPS)))
    gradients = {name: x.clone() for name, x in trainer.gradients().items()}
    found.append(float(trainer.step(*map(trainer.parallel.share, batches.draw(STEPS + 1)))))
    later = {name: x.clone() for name, x in trainer.gradients().items()}
    return found, gradients, later, {name: x.clone() for name, x in trainer.weights().items()}, counts


def test_steps_are_those_of_fsdp2_s_own():
    """To the bit, as here both go by gloo; with a step between that sends nothing, and two micro-batches."""
    A = 2
    ours, plain = (spread(WORLD, _steps, parts, A) for parts in (OURS, {}))
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine[0] == theirs[0]
        for found, wanted in zip(mine[1:4], theirs[1:4], strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(x, wanted[name]) for name, x in found.items())
        # Two layers and the rest of the model, in each pass forward; layers in the backward passes too.
        assert theirs[4] == {}
        assert mine[4]["reduce_scatter"] == 3 * (STEPS + 1)
        assert mine[4]["all_gather"] >= 5 * A * (STEPS + 1)


@pytest.mark.parametrize("name", exchanges.EXCHANGES)
def test_one_of_them_alone(name):
    (_, _, _, _, counts), _ = spread(WORLD, _steps, {name: "kernelmark"}, 1)
    assert counts.keys() == {name}


def _refused(group, parts):
    try:
        made(parts)
    except NotImplementedError as error:
        return str(error)


def test_what_cannot_write_to_a_given_array_is_refused():
    said = "FSDP2 has no use for all_gather of torch_distributed: it writes to no given array"
    assert spread(WORLD, _refused, {"all_gather": "torch_distributed"}) == [said] * WORLD


@pytest.mark.parametrize(("way", "world"), [("ddp", 2), ("tensor", 2), ("single", 1)])
def test_other_ways_have_no_such_exchange(way, world):
    with pytest.raises(NotImplementedError, match="some names all_gather and reduce_scatter, which FSDP2 alone"):
        made(OURS, way, world=world)


def test_sums_of_another_scale_are_the_group_s_own(monkeypatch):
    asked, reduced = [], []
    comm = exchanges.Scatter(lambda *given: asked.append(given))
    ops = torch.distributed.ReduceOp
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", lambda out, x, op, group: reduced.append(op))
    for op in (ops.AVG, ops.SUM, ops.MAX):
        comm(output_tensor="out", input_tensor="x", group="group", op=op)
    assert asked == [("x", "out", "group", True), ("x", "out", "group", False)]
    assert reduced == [ops.MAX]


def test_memory_that_peers_read_is_counted_and_given_up(monkeypatch):
    """Beside what the allocator counts, once for all calls of a kind."""
    forgotten = []
    calls = {
        name: SimpleNamespace(shared=lambda: 1000, forget=lambda: forgotten.append(1))
        for name in exchanges.EXCHANGES
    }
    way = Fsdp2()
    assert way.shared() == 0
    way._calls = calls
    assert way.shared() == 1000
    case = train.WORKLOAD.case({"B": 1, "S": 16}, "fp32", "program", model="llama-tiny")
    group = SimpleNamespace(size=2, rank=0, together=lambda: _Here(forgotten), every=lambda x: [x, x])
    session = SimpleNamespace(device=Cpu.open(), group=group, seed=5)
    trainer = SimpleNamespace(parallel=way, step=None)
    program = train.Program(train.read(case), trainer, session, SimpleNamespace(expected=None))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    monkeypatch.setattr(train, "peak_allocated", lambda left: 30)
    program.cuda = True
    program._keep_peaks()
    assert program.peaks == (1030, 7)
    program._give_up()
    assert forgotten == ["together", 1, 1]


def test_keys_that_peers_pull_are_counted_and_given_up():
    """Where a system's attention says so; others have no such memory."""
    forgotten = []
    way = ContextParallel(2)
    for attend in (None, lambda q, k, v, mask: q):
        way._attend = attend
        way.forget()
        assert way.shared() == 0
    way._attend = SimpleNamespace(shared=lambda: 500, forget=lambda: forgotten.append(1))
    assert way.shared() == 500
    way.forget()
    assert forgotten == [1]


class _Here:
    def __init__(self, told):
        self._told = told

    def __enter__(self):
        self._told.append("together")

    def __exit__(self, *error):
        return None


def test_a_system_of_copies_is_of_fsdp2_s_rows_alone():
    from kernelmark.suite import plan as plans

    catalog = Catalog.default()
    for name in ("distributed", "distributed-train-4"):
        plan = plans.load(name, catalog, "cuda", ["train"])
        for case in plan.cases:
            named = "kernelmark_copies" in plan.chosen(case)
            followed = case.axes.get("follow", 0) > 0
            assert named == (case.options["parallel"] == "fsdp2" and not followed), case.name
        system = next(x for x in plan.systems if x.name == "kernelmark_copies")
        assert (system.base, system.parts) == ("kernelmark", OURS)
        assert plan.cells(catalog, "cuda", ["kernelmark_copies"])
