"""quack (Dao AI Lab): kernels in CuTe DSL for Hopper and newer, compiled at the first call of a shape."""

from __future__ import annotations

from typing import Any

from ._terms import Call, forcing, refusing, sparing

REQUIRES = ("quack-kernels", "nvidia-cutlass-dsl")
DEVICES = ("cuda",)

CHECKS = (AssertionError, ValueError)
"""What its checks of arguments raise."""

CHUNK = 4096
"""Tokens a chunk of its fused linear cross-entropy, as it comes."""


def rms_norm(case: Any) -> Call:
    """`quack.rmsnorm.rmsnorm`."""
    from quack.rmsnorm import rmsnorm

    return refusing(lambda x, weight, eps: rmsnorm(x, weight, eps=eps), *CHECKS)


def add_rms_norm(case: Any) -> Call:
    """`quack.rmsnorm.rmsnorm` with a residual, which it returns updated."""
    from quack.rmsnorm import rmsnorm

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)

    return refusing(call, *CHECKS)


def layer_norm(case: Any) -> Call:
    """`layernorm_fwd` and `layernorm_bwd`, which take weight and bias in fp32: converted inside the call.

    quack has no autograd function of it, so one that calls the two stands here.
    """
    import torch
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
            rows, wide = x.reshape(-1, x.shape[-1]), weight.float()
            if not any(ctx.needs_input_grad):
                return layernorm_fwd(rows, wide, bias.float(), eps).view(x.shape)
            y, rstd, mean = layernorm_fwd(rows, wide, bias.float(), eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(rows, wide, rstd, mean)
            ctx.dtype = weight.dtype
            return y.view(x.shape)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            rows, wide, rstd, mean = ctx.saved_tensors
            dx, dw, db = layernorm_bwd(rows, wide, dy.reshape(rows.shape), rstd, mean)
            return dx.view(dy.shape), dw.to(ctx.dtype), db.to(ctx.dtype), None

    apply: Any = LayerNorm.apply

    def call(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return apply(x, weight, bias, eps)

    def conversion(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return weight.detach().float(), bias.detach().float()

    return refusing(forcing(call, conversion), *CHECKS)


def softmax(case: Any) -> Call:
    """`quack.softmax.softmax`."""
    from quack.softmax import softmax as function

    return refusing(lambda x: function(x), *CHECKS)


def rope(case: Any) -> Call:
    """`quack.rotary.apply_rotary_emb` of q and of k, which takes our order as a strided (B, S, H, D)."""
    from quack.rotary import apply_rotary_emb

    interleaved = case.options["layout"] == "interleaved"

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return tuple(
            apply_rotary_emb(x.transpose(1, 2), cos, sin, interleaved=interleaved).transpose(1, 2) for x in (q, k)
        )

    return refusing(call, *CHECKS)


def cross_entropy(case: Any) -> Call:
    """`quack.cross_entropy.cross_entropy`."""
    from quack.cross_entropy import cross_entropy as function

    if case.options["regularized"]:
        raise NotImplementedError("quack's cross_entropy has neither label smoothing nor a z-loss")
    return refusing(lambda logits, target: function(logits, target), *CHECKS)


def fused_linear_cross_entropy(case: Any) -> Call:
    """`quack.linear_cross_entropy.chunked_linear_cross_entropy`, its matmuls tuned at the first call.

    With gradients it refuses a chunk of as many tokens as the model has dimensions ("m == n makes row/col
    inference ambiguous": its scaling of rows cannot be told from one of columns there), which its own 4096 is for
    a model of that width: there chunks have half as many.
    """
    try:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
    except TypeError as error:
        # quack keys its compiled matmuls by what their code refers to, and finds in some versions of CuTe DSL
        # what it has no key for.
        raise ImportError(f"quack's matmuls do not load beside this nvidia-cutlass-dsl: {error}") from error

    scaled = case.dtype == "bf16" and case.pass_ != "forward"
    size = _chunk(case.axes["M"], case.axes["D"]) if scaled else CHUNK

    def call(x: Any, weight: Any, target: Any) -> Any:
        return chunked_linear_cross_entropy(x, weight, target, chunk_size=size)

    # Backward alone scales the gradients that forward left, in place: a second one would scale them again.
    return refusing(sparing(call) if case.pass_ == "backward" else call, *CHECKS)


def matmul(case: Any) -> Call:
    """`quack.gemm_interface.gemm`, and `gemm_gated` for a gate beside its other factor, tuned at the first
    call."""
    try:
        from quack.gemm_interface import gemm, gemm_gated
    except TypeError as error:  # as above
        raise ImportError(f"quack's matmuls do not load beside this nvidia-cutlass-dsl: {error}") from error

    if case.dtype == "fp32":
        raise NotImplementedError("quack multiplies fp16 and bf16 here")

    def call(a: Any, b: Any, bias: Any, gated: bool) -> Any:
        if gated:
            return gemm_gated(a, b, activation="swiglu", store_preact=False, concat_layout=("B",))[1]
        return gemm(a, b, bias=bias)

    # Beside some versions of CuTe DSL its epilogues have no key: a TypeError.
    return refusing(call, *CHECKS, TypeError)


def _chunk(tokens: int, width: int) -> int:
    """`CHUNK`, or the next of its halves with which no chunk has `width` tokens, the last filled up to 128s."""
    for size in (CHUNK, CHUNK // 2, CHUNK // 4):
        last = -(-((tokens - 1) % size + 1) // 128) * 128
        if width not in ((size, last) if tokens > size else (last,)):
            return size
    return CHUNK


IMPLEMENTATIONS = {
    "add_rms_norm": {"quack": add_rms_norm},
    "cross_entropy": {"quack": cross_entropy},
    "fused_linear_cross_entropy": {"quack": fused_linear_cross_entropy},
    "layer_norm": {"quack": layer_norm},
    "matmul": {"quack": matmul},
    "rms_norm": {"quack": rms_norm},
    "rope": {"quack": rope},
    "softmax": {"quack": softmax},
}
