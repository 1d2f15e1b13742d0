"""Products in 8 bits of libraries that take addresses of scales and no strides: stand-ins read as those do."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernelmark.baselines import deep_gemm, flashinfer, tensorrt_llm, vllm
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.operators import fp8_matmul, quantized_linear
from kernelmark.suite.operators.fp8_matmul import BLOCK, scaled
from kernelmark.suite.operators.quantized_activation import reference as activation

AXES = {"M": 4, "N": 256, "K": 640}
"""Five blocks of K: rows of the weight's scales have three numbers of padding."""


def _as_they_lie(scale, rows, columns):
    """A matrix's numbers row by row from its address on."""
    return scale.as_strided((rows, columns), (columns, 1), scale.storage_offset())


def _product(a, weight, scale_a, scale_w):
    """a (M, K) times weight (N, K), whose scales are found as they lie: those of a column by column."""
    (M, K), N = a.shape, weight.shape[0]
    given = {
        "scale_a": _as_they_lie(scale_a, K // BLOCK, M).t(),
        "scale_b": _as_they_lie(scale_w, N // BLOCK, K // BLOCK).t(),
    }
    return fp8_matmul.reference(a.float(), weight.t().float(), recipe="block", **given).bfloat16()


def _cutlass_scaled_mm(out, a, b, scale_a, scale_b, bias):
    out.copy_(_product(a, b.t(), scale_a, scale_b))


def _fp8_gemm_nt(a, b, out, recipe, disable_ue8m0_cast):
    out.copy_(_product(a[0], b[0], a[1], b[1]))


def _vllm(case, monkeypatch):
    monkeypatch.setattr(vllm, "_library", lambda name: SimpleNamespace(cutlass_scaled_mm=_cutlass_scaled_mm))
    return vllm.fp8_matmul(case)


def _deep_gemm(case, monkeypatch):
    return deep_gemm.fp8_product(case, SimpleNamespace(fp8_gemm_nt=_fp8_gemm_nt))


def _flashinfer(case, monkeypatch):
    package, gemm = ModuleType("flashinfer"), ModuleType("flashinfer.gemm")
    gemm.fp8_blockscale_gemm_sm90 = _product
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", gemm)
    return flashinfer.fp8_matmul(case)


def _tensorrt_llm(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    operators = SimpleNamespace(fp8_block_scaling_gemm=_product)
    monkeypatch.setattr(torch.ops, "trtllm", operators, raising=False)
    return tensorrt_llm.fp8_matmul(case)


@pytest.mark.parametrize("made", [_vllm, _deep_gemm, _flashinfer, _tensorrt_llm])
def test_scales_of_blocks_lie_as_they_are_read(made, monkeypatch):
    case = fp8_matmul.OPERATOR.case(AXES, "e4m3", "forward")
    given = fp8_matmul.OPERATOR.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    assert not given["scale_b"].t().is_contiguous()
    y = made(case, monkeypatch)(**given)
    wide = {name: x.double() if torch.is_tensor(x) else x for name, x in given.items()}
    deviation([y], [fp8_matmul.OPERATOR.reference(**wide)], fp8_matmul.TOLERANCE)


def _norm(q, x, norm_weight, scale, eps, *rest):
    found, scales = scaled(activation(x.float(), norm_weight.float(), eps), 1, BLOCK)
    q.copy_(found)
    scale.copy_(scales)


def test_those_of_a_linear_layer_too(monkeypatch):
    operators = SimpleNamespace(cutlass_scaled_mm=_cutlass_scaled_mm, rms_norm_per_block_quant=_norm)
    monkeypatch.setattr(vllm, "_library", lambda name: operators)
    operator = quantized_linear.OPERATOR
    case = operator.case(AXES, "bf16", "forward")
    given = operator.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    call = vllm.quantized_linear(case)
    assert call.conversion(**given).is_contiguous()
    wide = {name: x.double() if torch.is_tensor(x) else x for name, x in given.items()}
    deviation([call(**given)], [operator.reference(**wide)], quantized_linear.TOLERANCE)
    whole = operator.case({**AXES, "K": 512}, "bf16", "forward")
    assert not hasattr(vllm.quantized_linear(whole), "conversion")
