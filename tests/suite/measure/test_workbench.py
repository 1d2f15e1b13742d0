"""The workbench: one set of inputs and one right answer for all implementations of a case."""

from __future__ import annotations

import pytest
import torch
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench, seed_of
from kernelmark.suite.operators.fp8_quant import OPERATOR as FP8
from kernelmark.suite.operators.rms_norm import OPERATOR as RMS

CPU = torch.device("cpu")


def case(pass_: str = "forward", dtype: str = "fp32", **axes: int):
    return RMS.case({"B": 2, "S": 3, "D": 16} | axes, dtype, pass_)


def bench(pass_: str = "forward", dtype: str = "fp32", seed: int = 1) -> Workbench:
    return Workbench.build(RMS, case(pass_, dtype), CPU, seed)


def eager(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def test_seeds_are_of_case_seed_and_replicate():
    seeds = [
        seed_of(case(), 0, 0),
        seed_of(case(), 0, 1),
        seed_of(case(), 1, 0),
        seed_of(case("backward"), 0, 0),
        seed_of(case(D=32), 0, 0),
    ]
    assert len(set(seeds)) == 5
    assert seeds[0] == seed_of(case(), 0, 0)
    assert all(0 <= x < 2**56 for x in seeds)


def test_the_same_seed_builds_the_same():
    first, again, other = bench(), bench(), bench(seed=2)
    assert torch.equal(first.inputs["x"], again.inputs["x"])
    assert torch.equal(first.decoys[0], again.decoys[0])
    assert not torch.equal(first.inputs["x"], other.inputs["x"])
    assert not torch.equal(first.values[0] * 2, first.decoys[0])


def test_the_reference_is_of_higher_precision():
    assert bench(dtype="bf16").references[0].dtype == torch.float64
    narrow = Workbench.build(FP8, FP8.case({"M": 2, "N": 128}, "bf16", "forward"), CPU, 1)
    assert all(x.dtype in (torch.float32, torch.float64) for x in narrow.references)


def test_lay_and_changed():
    here = bench()
    place = here.inputs["x"].data_ptr()
    assert not here.changed()
    here.lay(here.decoys)
    assert torch.equal(here.inputs["x"], here.decoys[0])
    assert here.inputs["x"].data_ptr() == place
    assert here.changed()
    here.lay(here.values)
    assert not here.changed()
    here.inputs["weight"][5] = float("nan")
    assert here.changed()


def test_changed_sees_what_equality_does_not():
    here = bench()
    for contents in (here.inputs["x"], here.values[0]):
        contents.view(-1)[0] = float("nan")
    assert not here.changed()  # NaN where there was NaN
    here.values[0].view(-1)[1] = 0.0
    here.inputs["x"].view(-1)[1] = -0.0
    assert here.changed()


def test_changed_sees_a_single_column_that_lies_apart():
    """Contiguous by its size alone, as scales of one block of columns are."""
    here = bench()
    column = torch.zeros(1, 6).as_strided((6, 1), (1, 4))
    here.varied, here.values = [column], [column.clone()]
    assert not here.changed()
    column[3] = 1
    assert here.changed()


@pytest.mark.parametrize(("pass_", "outputs"), [("forward", 1), ("backward", 2), ("forward_backward", 3)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_calls_agree_with_the_reference(pass_, outputs, dtype):
    here = bench(pass_, dtype)
    call = here.call(eager)
    for _ in range(2):  # backward alone is repeated on one graph
        result = here.comparable(call())
        assert len(result) == len(here.references) == outputs
        assert not any(x.requires_grad for x in result)
        deviation(result, here.references, RMS.tolerances[dtype])
    assert not here.changed()


def test_forward_keeps_no_graph_and_backward_runs_forward_once():
    calls = []

    def counted(x, weight, eps):
        calls.append(torch.is_grad_enabled())
        return eager(x, weight, eps)

    bench("forward").call(counted)()
    assert calls == [False]
    backward = bench("backward").call(counted)
    for _ in range(3):
        backward()
    assert calls == [False, True]
    both = bench("forward_backward").call(counted)
    for _ in range(3):
        both()
    assert len(calls) == 5


def test_backward_varies_the_gradients_of_the_outputs():
    here = bench("backward")
    assert [x.shape for x in here.varied] == [here.inputs["x"].shape]
    call = here.call(eager)
    right = call()[0].clone()
    here.lay(here.decoys)
    assert not torch.allclose(call()[0], right)


def test_results_are_brought_into_the_references_form():
    here = Workbench.build(FP8, FP8.case({"M": 2, "N": 128}, "fp32", "forward"), CPU, 1)
    from kernelmark.baselines.torch import IMPLEMENTATIONS

    result = here.call(IMPLEMENTATIONS["fp8_quant"]["torch"](here.case))()
    assert result[0].dtype == torch.float8_e4m3fn
    deviation(here.comparable(result), here.references, FP8.tolerances["fp32"])
