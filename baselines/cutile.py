"""cuTile (NVIDIA's `cuda-tile`): kernels written in it (`_cutile_kernels.py`), compiled by `tileiras` at the first
call.

Its package ships a compiler and no kernels, so it is measured on request, as plan `languages` does. Its kernels
compile for Hopper with the `tileiras` of its environment. On an H200 three products ran and were right
(`20261124-183154-fee7`); its other kernels were not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from . import _blocks, _cutile_kernels
from ._terms import Call, forcing, forward_only

REQUIRES = ("cuda-tile", "nvidia-cuda-tileiras")
ENVIRONMENT = "cutile"
DEVICES = ("cuda",)
ON_REQUEST = ("cutile",)

WIDEST = 32768
"""Columns of a row that a block holds at once."""


def _launched(kernel: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    import cuda.tile as ct
    import torch

    ct.launch(torch.cuda.current_stream(), grid, kernel, arguments)


def _columns(case: Any) -> int:
    """The power of two from the width of a row on. Raises NotImplementedError for rows too wide."""
    width = int(case.axes["D"])
    if width > WIDEST:
        raise NotImplementedError(f"this kernel in cuTile holds rows of up to {WIDEST} columns")
    return 1 << max(0, width - 1).bit_length()


@forward_only("this product in cuTile")
def matmul(case: Any) -> Call:
    """Tiles of 128 × 128 with steps of 64, of 64 × 128 for up to 64 rows. Of larger ones its compiler keeps sums
    in memory, for compute capability 9.0.
    """
    import torch

    if case.dtype == "fp32":
        raise NotImplementedError("this product in cuTile takes bf16 and fp16")
    if case.options["epilogue"] != "none":
        raise NotImplementedError("this product in cuTile has no epilogue")
    product = _cutile_kernels.compiled(_cutile_kernels.product)
    M, N = case.axes["M"], case.axes["N"]
    rows, columns = (64 if M <= 64 else 128), 128
    grid = -(-M // rows), -(-N // columns)

    def call(a: Any, b: Any, bias: Any, gated: bool) -> Any:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        _launched(product, grid, a, b, out, rows, columns, 64)
        return out

    return call


@forward_only("this kernel in cuTile")
def rms_norm(case: Any) -> Call:
    """A row a block, in fp32."""
    import torch

    columns = _columns(case)
    kernel = _cutile_kernels.compiled(_cutile_kernels.rms_norm)

    def call(x: Any, weight: Any, eps: float) -> Any:
        out = torch.empty_like(x)
        rows, width = x.view(-1, x.shape[-1]), x.shape[-1]
        _launched(kernel, (len(rows),), rows, weight, out.view(-1, width), width, columns, eps)
        return out

    return call


@forward_only("this kernel in cuTile")
def layer_norm(case: Any) -> Call:
    """A row a block, in fp32."""
    import torch

    columns = _columns(case)
    kernel = _cutile_kernels.compiled(_cutile_kernels.layer_norm)

    def call(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        out = torch.empty_like(x)
        rows, width = x.view(-1, x.shape[-1]), x.shape[-1]
        _launched(kernel, (len(rows),), rows, weight, bias, out.view(-1, width), width, columns, eps)
        return out

    return call


@forward_only("this kernel in cuTile")
def softmax(case: Any) -> Call:
    """A row a block, in fp32."""
    import torch

    columns = _columns(case)
    kernel = _cutile_kernels.compiled(_cutile_kernels.softmax)

    def call(x: Any) -> Any:
        out = torch.empty_like(x)
        _launched(kernel, (len(x),), x, out, columns)
        return out

    return call


@forward_only("this kernel in cuTile")
def swiglu(case: Any) -> Call:
    """2,048 columns of a row a block, in fp32."""
    import torch

    kernel = _cutile_kernels.compiled(_cutile_kernels.swiglu)
    grid = case.axes["M"], -(-case.axes["N"] // 2048)

    def call(gate: Any, up: Any) -> Any:
        out = torch.empty_like(gate)
        _launched(kernel, grid, gate, up, out, 2048)
        return out

    return call


@forward_only("this attention in cuTile")
def attention(case: Any) -> Call:
    """Attention with running maximum and sum (Dao et al., arXiv 2205.14135): 128 queries of a head a block."""
    import torch

    if case.dtype == "fp32":
        raise NotImplementedError("this attention in cuTile takes bf16 and fp16")
    if case.axes["D"] not in (32, 64, 128):
        raise NotImplementedError("this attention in cuTile takes head dimensions of 32, 64 and 128")
    _blocks.takes(case, "this attention in cuTile")
    kernel = _cutile_kernels.compiled(_cutile_kernels.attention)
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    causal = case.options["mask"] == "causal"

    def heads(q: Any, k: Any, v: Any, mask: str) -> Any:
        return [x.flatten(0, 1) for x in (q, k, v)]

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        out = torch.empty(B * H, S, D, dtype=q.dtype, device=q.device)
        given = *heads(q, k, v, mask), out, D**-0.5, H // Hkv, D, 128, 128, causal
        _launched(kernel, (-(-S // 128), B * H), *given)
        return out.view(q.shape)

    return call if case.options.get("storage", "bhsd") == "bhsd" else forcing(call, heads)


IMPLEMENTATIONS = {
    "attention": {"cutile": attention},
    "layer_norm": {"cutile": layer_norm},
    "matmul": {"cutile": matmul},
    "rms_norm": {"cutile": rms_norm},
    "softmax": {"cutile": softmax},
    "swiglu": {"cutile": swiglu},
}
