"""SDPA's backends one by one, where a CPU has them."""

from __future__ import annotations

import pytest
import torch
from kernelmark.baselines import sdpa
from kernelmark.baselines import torch as eager
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.attention import OPERATOR
from kernelmark.suite.operators.attention_window import OPERATOR as WINDOW

FACTORIES = sdpa.IMPLEMENTATIONS["attention"] | eager.IMPLEMENTATIONS["attention"]


def case(pass_="forward_backward", Hkv=4, mask="causal", dtype="fp32"):
    return OPERATOR.case({"B": 2, "H": 4, "Hkv": Hkv, "S": 48, "D": 16}, dtype, pass_, mask=mask)


def test_names():
    assert list(sdpa.IMPLEMENTATIONS["attention"]) == ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"]


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_math", "torch"])
@pytest.mark.parametrize("Hkv", [4, 1])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_right_answer_twice(name, Hkv, mask, dtype):
    chosen = case(Hkv=Hkv, mask=mask, dtype=dtype)
    bench = Workbench.build(OPERATOR, chosen, torch.device("cpu"), seed=1)
    call = bench.call(FACTORIES[name](chosen))
    for _ in range(2):
        deviation(bench.comparable(call()), bench.references, OPERATOR.tolerances[dtype])


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
def test_cuda_only(name):
    inputs = OPERATOR.inputs(case(), torch.device("cpu"), torch.Generator())
    with pytest.raises(NotImplementedError, match="CUDA only"):
        FACTORIES[name](case())(**inputs)


def test_efficient_has_no_grouped_heads():
    with pytest.raises(NotImplementedError, match="no grouped"):
        FACTORIES["sdpa_efficient"](case(Hkv=1))


def test_no_backend_has_a_window():
    windowed = WINDOW.case({"B": 1, "H": 2, "Hkv": 2, "S": 32, "D": 16, "W": 8}, "fp32", "forward")
    for factory in sdpa.IMPLEMENTATIONS["attention_window"].values():
        with pytest.raises(NotImplementedError, match="no window"):
            factory(windowed)


@pytest.mark.parametrize("Hkv", [4, 1])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_window_as_a_mask(Hkv, mask):
    axes = {"B": 2, "H": 4, "Hkv": Hkv, "S": 48, "D": 16, "W": 9}
    chosen = WINDOW.case(axes, "fp32", "forward_backward", mask=mask)
    bench = Workbench.build(WINDOW, chosen, torch.device("cpu"), seed=1)
    call = bench.call(eager.IMPLEMENTATIONS["attention_window"]["torch"](chosen))
    for _ in range(2):
        deviation(bench.comparable(call()), bench.references, WINDOW.tolerances["fp32"])


def test_the_reason_is_torch_s_own():
    messages = [
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Memory Efficient attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:2.)",
        "Expected query, key and value to all be of dtype: {Half, BFloat16}. (Triggered internally at x.h:3.)",
    ]
    assert sdpa._reason("FLASH_ATTENTION", messages) == (
        "FLASH_ATTENTION: Expected query, key and value to all be of dtype: {Half, BFloat16}."
    )
    assert "does not take" in sdpa._reason("FLASH_ATTENTION", messages[:2])


@pytest.mark.parametrize("message", ["No available kernel. Aborting execution.", "No viable backend for x"])
def test_a_refusal_is_unsupported(monkeypatch, message):
    def refuse(*args, **kwargs):
        raise RuntimeError(message)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    inputs = OPERATOR.inputs(case(), torch.device("cpu"), torch.Generator())
    with pytest.raises(NotImplementedError, match="FLASH_ATTENTION does not take this case"):
        FACTORIES["sdpa_flash"](case())(**inputs)


def test_other_errors_stay_errors(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    inputs = OPERATOR.inputs(case(), torch.device("cpu"), torch.Generator())
    with pytest.raises(RuntimeError, match="illegal memory"):
        FACTORIES["sdpa_flash"](case())(**inputs)
