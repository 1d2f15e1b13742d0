"""The AdamW operator: its cases, its cost, its reference, and PyTorch beside it, which updates in place."""

from __future__ import annotations

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.adamw import OPERATOR, STATES, shapes

CPU = torch.device("cpu")
SMALL = {"T": 10, "D": 8}


def case(dtype="bf16", **options):
    return OPERATOR.case(SMALL, dtype, "forward", **options)


def bench(dtype="bf16", **options):
    return Workbench.build(OPERATOR, case(dtype, **options), CPU, 1)


def test_standard_names():
    names = [x.name for grid in OPERATOR.plans["standard"] for x in OPERATOR.expand(grid)]
    assert names == [
        "T32-D4096-equal-plain-bf16-forward",
        "T32-D4096-equal-master32-bf16-forward",
        "T32-D4096-equal-master16-bf16-forward",
        "T32-D4096-equal-plain-fp32-forward",
        "T288-D128-llama-plain-bf16-forward",
        "T288-D1024-llama-plain-bf16-forward",
    ]


def test_shapes():
    assert shapes(OPERATOR.case({"T": 3, "D": 5}, "bf16", "forward")) == [(5, 5)] * 3
    layer = shapes(case(sizes="llama"))
    assert layer[:4] == [(8, 8), (2, 8), (2, 8), (8, 8)]
    assert layer[4:] == [(28, 8), (28, 8), (8, 28), (8,), (8,), (8, 8)]


@pytest.mark.parametrize(
    ("dtype", "state", "each"),
    [("bf16", "plain", 14), ("fp32", "plain", 28), ("bf16", "master32", 28), ("bf16", "master16", 20)],
)
def test_bytes_of_a_parameter(dtype, state, each):
    assert case(dtype, state=state).bytes == 10 * 64 * each
    assert case(dtype, state=state, sizes="llama").bytes == (64 * 2 + 16 * 2 + 224 * 3 + 16 + 64) * each


def test_fp32_has_no_masters():
    for state in ("master32", "master16"):
        with pytest.raises(NotImplementedError, match="their own masters"):
            bench("fp32", state=state)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("sizes", ["equal", "llama"])
@pytest.mark.parametrize("name", EAGER["adamw"])
def test_pytorch_is_right(name, sizes, dtype):
    """Every implementation, in place, and again on fresh values."""
    for state in STATES if dtype == "bf16" else ["plain"]:
        here = bench(dtype, sizes=sizes, state=state)
        try:
            call = here.call(EAGER["adamw"][name](here.case))
        except NotImplementedError:
            assert (state, name) in {("master16", "torch_foreach"), ("master16", "torch_fused")}
            continue
        for _ in range(2):
            here.lay(here.values)
            outputs = here.comparable(call())
            deviation(outputs, here.references, OPERATOR.tolerances[dtype])
            assert len(outputs) == (40 if state != "plain" else 30)
            assert not here.changed(outputs)
            assert here.changed()


def test_thousands_of_steps_stay_finite():
    """Timing repeats the step on what it left."""
    here = bench()
    call = here.call(EAGER["adamw"]["torch_fused"](here.case))
    for _ in range(20_000):
        call()
    here.hold_finite()
    assert max(float(x.abs().max()) for x in here.inputs["params"]) < 1


def torch_step(change):
    """PyTorch's step with one number of it changed."""
    right = EAGER["adamw"]["torch_fused"](case())
    return lambda **inputs: right(**inputs | change)


@pytest.mark.parametrize(
    "change", [{"lr": 0.055}, {"weight_decay": 0.0}, {"step": 20}, {"beta1": 0.85}, {"beta2": 0.99}, {"eps": 0.0}]
)
def test_each_number_counts(change):
    """In bf16 already: no term of the step is lost in its rounding."""
    here = bench()
    call = here.call(torch_step(change))
    with pytest.raises(Incorrect):
        deviation(here.comparable(call()), here.references, OPERATOR.tolerances["bf16"])


def test_doing_nothing_is_wrong():
    here = bench()
    with pytest.raises(Incorrect):
        deviation(here.comparable(None), here.references, OPERATOR.tolerances["bf16"])


def fp32_step(here, wrong="", ulps=0):
    """A step in fp32, its numbers too, as kernels have it that take them as fp32; `wrong` is what it does wrong.

    `ulps` is by how many units of the last place its power of beta2 is off.
    """
    inputs = here.inputs
    number = {x: torch.tensor(inputs[x]) for x in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    lr, beta1, beta2, eps, decay = number.values()
    step = inputs["step"] - (wrong == "one step behind")
    unbias1, unbias2 = 1 - beta1**step, 1 - (beta2**step + ulps * 2.0**-24)
    if wrong == "no bias correction":
        unbias1 = unbias2 = torch.tensor(1.0)
    lists = (inputs[x] for x in ("params", "grads", "exp_avgs", "exp_avg_sqs"))
    for p, g, m, v in zip(*lists, strict=True):
        if wrong == "decay coupled":
            g = g + decay * p
        m.mul_(beta1).add_((1 - beta1) * g)
        v.mul_(beta2).add_((1 - beta2) * g * g)
        root = (v / unbias2).sqrt() + eps
        if wrong == "eps inside the root":
            root = (v / unbias2 + eps).sqrt()
        elif wrong == "eps before the correction":
            root = (v.sqrt() + eps) / unbias2.sqrt()
        update = lr / unbias1 * m / root
        if wrong == "decay after the update":
            p.sub_(update).mul_(1 - lr * decay)
        elif wrong == "decay coupled":
            p.sub_(update)
        else:
            p.mul_(1 - lr * decay).sub_(update)


def fp32_deviation(**options):
    here = Workbench.build(OPERATOR, OPERATOR.case({"T": 1, "D": 512}, "fp32", "forward"), CPU, 1)
    fp32_step(here, **options)
    return deviation(here.comparable(None), here.references, OPERATOR.tolerances["fp32"])


@pytest.mark.parametrize("ulps", [-4, 0, 4])
def test_numbers_in_fp32_are_right(ulps):
    """What the tolerance leaves room for is there, and is more than the rounding of a step's operations."""
    assert fp32_deviation(ulps=ulps) > 1.5e-6


@pytest.mark.parametrize(
    "wrong",
    [
        "decay after the update",
        "decay coupled",
        "eps before the correction",
        "eps inside the root",
        "no bias correction",
        "one step behind",
    ],
)
def test_a_wrong_step_in_fp32_is_caught(wrong):
    with pytest.raises(Incorrect):
        fp32_deviation(wrong=wrong)
