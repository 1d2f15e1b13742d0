"""DeepGEMM (deepseek-ai/DeepGEMM): products of E4M3 with scales of blocks, compiled with nvcc at the first call.

The wheel of that name on PyPI is old and lacks CUTLASS's headers; its repository has an installer. vLLM ships a
copy, which `vllm.py` calls. That ran on an H200, the package itself not yet.
"""

from __future__ import annotations

from typing import Any

from ._products import by_rows_of_k, has_recipe
from ._terms import Call, forward_only, keeping, refusing

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
    dense = keeping(lambda scale_b: scale_b.t().contiguous(), "scale_b")

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
        pairs = (a, scale_a), (b.t(), dense(scale_b=scale_b))
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
