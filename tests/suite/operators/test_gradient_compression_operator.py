"""The operators of gradient compression: cases, payload, PyTorch beside them, and what must not pass."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.gradient_compression import OPERATOR, unpacked
from kernelmark.suite.operators.gradient_decompression import OPERATOR as BACK

CPU = torch.device("cpu")
SCHEMES = ("int8", "fp8", "topk")
DTYPES = ("bf16", "fp16", "fp32")


def bench(operator, N, dtype, scheme, seed=1):
    case = operator.case({"N": N}, dtype, "forward", scheme=scheme)
    return Workbench.build(operator, case, CPU, seed)


def eager(here):
    return EAGER[here.operator.name]["torch"](here.case)


def test_standard_names():
    names = [[x.name for grid in o.plans["standard"] for x in o.expand(grid)] for o in (OPERATOR, BACK)]
    assert names == [
        [
            *(f"N67108864-{x}-bf16-forward" for x in SCHEMES),
            *(f"N1048576-{x}-bf16-forward" for x in ("int8", "topk")),
        ],
        [f"N67108864-{x}-bf16-forward" for x in ("int8", "topk")],
    ]


def test_bytes():
    """An element costs 6 bytes in bf16 beside what is sent: 1 and 1/32 quantized, 8 times 4 of 1024 by top-k."""
    for scheme, sent in (("int8", 1024 + 32), ("fp8", 1024 + 32), ("topk", 32)):
        assert OPERATOR.case({"N": 1024}, "bf16", "forward", scheme=scheme).bytes == 6 * 1024 + sent
        assert BACK.case({"N": 1024}, "bf16", "forward", scheme=scheme).bytes == 2 * 1024 + sent
    assert OPERATOR.case({"N": 1025}, "bf16", "forward", scheme="topk").bytes == 6 * 1025 + 64


@pytest.mark.parametrize("operator", [OPERATOR, BACK], ids=["compression", "decompression"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("N", [1, 1000, 5000])
def test_eager_is_right(operator, scheme, dtype, N):
    for seed in range(3):
        here = bench(operator, N, dtype, scheme, seed)
        outputs = here.comparable(here.call(eager(here))())
        deviation(outputs, here.references, operator.tolerances[dtype])
        assert not here.changed()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_there_and_back(scheme):
    here = bench(OPERATOR, 3000, "fp32", scheme)
    payload, rest = eager(here)(**here.inputs)
    back = bench(BACK, 3000, "fp32", scheme)
    assert payload.shape == back.inputs["payload"].shape
    dense = eager(back)(**back.inputs | {"payload": payload})
    torch.testing.assert_close(dense, unpacked(payload, 3000, torch.float32, scheme, 8, torch.float32))
    torch.testing.assert_close(dense + rest, here.inputs["gradient"] + here.inputs["residual"])


def no_feedback(payload, rest, inputs):
    return payload, torch.zeros_like(rest)


def old_residual(payload, rest, inputs):
    return payload, inputs["residual"].clone()


def shorter(payload, rest, inputs):
    return payload[:-4], rest


def other_dtype(payload, rest, inputs):
    return payload, rest.half()


def nothing_sent(payload, rest, inputs):
    return torch.zeros_like(payload), inputs["gradient"] + inputs["residual"]


@pytest.mark.parametrize("change", [no_feedback, old_residual, shorter, other_dtype, nothing_sent])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_wrong_answers(scheme, change):
    here = bench(OPERATOR, 5000, "fp32", scheme)
    result = change(*eager(here)(**here.inputs), here.inputs)
    with pytest.raises(Incorrect):
        deviation(here.comparable(result), here.references, OPERATOR.tolerances["fp32"])


def test_nearly_the_largest_are_wrong():
    """The ninth in place of the eighth, with everything else in order."""
    here = bench(OPERATOR, 4096, "fp32", "topk")
    total = (here.inputs["gradient"] + here.inputs["residual"]).view(-1, 1024)
    places = total.abs().topk(9, -1).indices[:, [*range(7), 8]]
    values = total.gather(-1, places)
    payload = torch.cat([values.view(-1).view(torch.uint8), places.to(torch.int16).view(-1).view(torch.uint8)])
    rest = total.scatter(-1, places, 0).view(-1)
    outputs = here.comparable((payload, rest))
    deviation(outputs[:1], here.references[:1], OPERATOR.tolerances["fp32"])
    with pytest.raises(Incorrect):
        deviation(outputs, here.references, OPERATOR.tolerances["fp32"])


def test_truncation_is_wrong():
    """Half a step of int8 passes, a whole one does not."""
    here = bench(OPERATOR, 5000, "fp32", "int8")
    payload, _ = eager(here)(**here.inputs)
    total = here.inputs["gradient"] + here.inputs["residual"]
    scales = payload[5120:].view(torch.float32).repeat_interleave(128)[:5000]
    values = payload[:5120].view(torch.int8)
    values[:5000] = (total / scales).trunc().to(torch.int8)
    rest = total - values[:5000].float() * scales
    with pytest.raises(Incorrect, match="output 1"):
        deviation(here.comparable((payload, rest)), here.references, OPERATOR.tolerances["fp32"])


@pytest.mark.parametrize("plan", ["quick", "quick_cpu"])
def test_quick_is_short(plan):
    for name in ("gradient_compression", "gradient_decompression"):
        operator = importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR
        cases = [x for grid in operator.plans[plan] for x in operator.expand(grid)]
        assert 1 <= len(cases) <= 2
        assert all(x.bytes < 200e6 for x in cases)
