"""DeepGEMM (deepseek-ai/DeepGEMM): products of E4M3 with scales of blocks, compiled with nvcc at the first call.

The wheel of that name on PyPI is old and lacks CUTLASS's headers; its repository has an installer. vLLM ships a
copy, which `vllm.py` calls. That ran on an H200, the package itself not yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ._products import by_rows_of_k, has_recipe, without_padding
from ._terms import Call, forward_only, refusing

REQUIRES = ("deep-gemm",)
INSTALL = "build it from github.com/deepseek-ai/DeepGEMM (PyPI's is too old), or take vLLM's copy: vllm_deep_gemm"
DEVICES = ("cuda",)


def _library() -> Any:
    import deep_gemm

    if not hasattr(deep_gemm, "fp8_gemm_nt"):
        raise ImportError("this deep_gemm has no fp8_gemm_nt: install it from github.com/deepseek-ai/DeepGEMM")
    return deep_gemm


def fp8_product(case: Any, library: Any) -> Call:
    """`fp8_gemm_nt` of weights (N, K), whose scales lie without padding. Scales of single rows of both are the
    gradient's of a weight: it adds that to sums in fp32, here zeros, which are converted to bf16 in the call.
    """
    import torch

    has_recipe(case, "DeepGEMM", ("block", "group"))
    dense = without_padding()

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
        pairs = (a, scale_a), (b.t(), dense(scale_b=scale_b).t())
        library.fp8_gemm_nt(*pairs, out, recipe=(1, 128, 128), disable_ue8m0_cast=True)
        return out

    def gradient(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        sums = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
        pairs = (a, scale_a), (b.t(), scale_b.t())
        library.fp8_gemm_nt(*pairs, sums, c=sums, recipe=(1, 1, 128), disable_ue8m0_cast=True)
        return sums.to(torch.bfloat16)

    call = gradient if case.options["recipe"] == "group" else product
    return refusing(by_rows_of_k(case, call), AssertionError)


def grouped_product(case: Any, library: Any) -> Call:
    """`m_grouped_fp8_gemm_nt_contiguous`, and `…_masked` with the average of rows as what to expect."""
    import torch

    has_recipe(case, "DeepGEMM", ("block",))
    masked = case.options["layout"] == "masked"

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, groups: Any, recipe: str) -> Any:
        out = torch.empty(*a.shape[:-1], b.shape[1], dtype=torch.bfloat16, device=a.device)
        given = (a, scale_a), (b, scale_b), out, groups
        if masked:
            library.m_grouped_fp8_gemm_nt_masked(*given, case.axes["M"], disable_ue8m0_cast=True)
        else:
            library.m_grouped_fp8_gemm_nt_contiguous(*given, disable_ue8m0_cast=True)
        return out

    return refusing(call, AssertionError)


Quantize: TypeAlias = Callable[[Any], tuple[Any, Any]]
"""A matrix (R, C) in E4M3 and scales (R, C / 128) of 128 columns each, a step's side by side."""


def rows_by_expert(experts: Any, count: int) -> tuple[Any, Any]:
    """Where each of a token's choices (M, k) lies among rows by expert (M · k,), and whose each row is, -1 where
    it is nobody's. Each expert's rows begin at a multiple of 128, as contiguous groups must; how many rows there
    are does not depend on the choice, so that the host waits for nothing.
    """
    import torch

    chosen = experts.flatten()
    # `bincount` would wait for the device.
    rows = torch.zeros(count, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, chosen, torch.ones_like(chosen)
    )
    whole = (rows + 127) // 128 * 128
    first = whole.cumsum(0) - whole
    order = chosen.argsort(stable=True)
    sorted_experts = chosen[order]
    nth = torch.arange(len(chosen), device=chosen.device) - (rows.cumsum(0) - rows)[sorted_experts]
    place = torch.empty_like(chosen)
    place[order] = first[sorted_experts] + nth
    most = (len(chosen) + 127 * min(count, len(chosen)) + 127) // 128 * 128
    owner = torch.full((most,), -1, dtype=torch.int32, device=chosen.device)
    owner[place] = chosen.int()
    return place, owner


def mixture(case: Any, library: Any, quantize: Quantize, gate: Quantize) -> Call:
    """A mixture of experts by two contiguous grouped products: rows put in order by PyTorch, quantized by who
    calls, and added up by PyTorch in fp32.
    """
    import torch

    if case.dtype != "e4m3":
        raise NotImplementedError("DeepGEMM's grouped products are called with weights in E4M3 here")
    if case.options["activation"] != "swiglu":
        raise NotImplementedError("gate and up are multiplied by vLLM's SwiGLU here, which clamps nothing")
    if case.axes["D"] % 128 or case.axes["F"] % 128:
        raise NotImplementedError("scales of 128 columns are taken of widths in multiples of 128")

    def product(rows: tuple[Any, Any], weights: Any, scales: Any, owner: Any) -> Any:
        out = torch.empty(len(owner), weights.shape[1], dtype=torch.bfloat16, device=owner.device)
        given = rows, (weights, scales), out, owner
        library.m_grouped_fp8_gemm_nt_contiguous(*given, disable_ue8m0_cast=True)
        return out

    def call(x: Any, router: Any, gate_up: Any, down: Any, scale_gate_up: Any, scale_down: Any, top_k: int) -> Any:
        logits, experts = (x @ router.t()).float().topk(top_k, -1)
        place, owner = rows_by_expert(experts, len(router))
        q, scale = quantize(x)
        # Rows that are nobody's hold what the last token does: they are not multiplied.
        token = torch.full_like(owner, len(x) - 1, dtype=torch.int64)
        token[place] = torch.arange(len(place), device=x.device) // top_k
        rows = q.view(torch.uint8)[token].view(q.dtype), scale.t()[:, token].t()
        hidden = product(rows, gate_up, scale_gate_up, owner)
        y = product(gate(hidden), down, scale_down, owner)[place].unflatten(0, (-1, top_k))
        return (y.float() * logits.softmax(-1)[..., None]).sum(1).to(x.dtype), experts

    return refusing(call, AssertionError)


@forward_only("DeepGEMM")
def fp8_matmul(case: Any) -> Call:
    """`deep_gemm.fp8_gemm_nt`."""
    return fp8_product(case, _library())


@forward_only("DeepGEMM")
def grouped_fp8_matmul(case: Any) -> Call:
    """`deep_gemm.m_grouped_fp8_gemm_nt_contiguous` and `…_masked`."""
    return grouped_product(case, _library())


IMPLEMENTATIONS = {
    "fp8_matmul": {"deep_gemm": fp8_matmul},
    "grouped_fp8_matmul": {"deep_gemm": grouped_fp8_matmul},
}
