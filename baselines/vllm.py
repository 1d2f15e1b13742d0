"""vLLM's fused operators, and the FlashAttention 3 and paged Triton attention that it ships.

Its operators are built for serving: they write into what they are given, have no backward pass, and take a
feed-forward block's gate and up side by side in one tensor. What that forces on inputs that are to stay as
they are is inside the call and named as `conversion`. The libraries are loaded by themselves: importing
`vllm` would set up a server's surroundings, and the operators need none of it.
"""

from __future__ import annotations

import functools
from typing import Any

from ._terms import Call, forcing, forward_only, refusing

REQUIRES = ("vllm",)
ENVIRONMENT = "vllm"
DEVICES = ("cuda",)

serving = forward_only("vLLM")


def _library(name: str) -> Any:
    """torch's namespace of the operators of one of vLLM's shared libraries."""
    import importlib.util
    from pathlib import Path

    import torch

    file, namespace = {
        "ops": ("_C_stable_libtorch.abi3.so", "_C"),
        "fa3": ("vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C"),
    }[name]
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vllm is not installed")
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.is_file():
        raise ImportError(f"this vllm has no {file}")
    torch.ops.load_library(str(path))
    return getattr(torch.ops, namespace)


@serving
def rms_norm(case: Any) -> Call:
    """`rms_norm`."""
    import torch

    ops = _library("ops")

    def call(x: Any, weight: Any, eps: float) -> Any:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, eps)
        return out

    return call


@serving
def add_rms_norm(case: Any) -> Call:
    """`fused_add_rms_norm`, in place on both of its inputs: it gets copies."""
    ops = _library("ops")

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        y, h = x.clone(), residual.clone()
        ops.fused_add_rms_norm(y, h, weight, eps)
        return y, h

    return forcing(call, lambda x, residual, weight, eps: (x.clone(), residual.clone()))


def _gated(operator: str) -> Any:
    def factory(case: Any) -> Call:
        import torch

        function = getattr(_library("ops"), operator)

        def conversion(gate: Any, up: Any) -> Any:
            return torch.cat((gate, up), -1)

        def call(gate: Any, up: Any) -> Any:
            out = torch.empty_like(gate)
            function(out, conversion(gate, up))
            return out

        return forcing(call, conversion)

    factory.__doc__ = f"`{operator}`, of gate and up side by side: laid so inside the call."
    return serving(factory)


def _gelu(operator: str) -> Any:
    def factory(case: Any) -> Call:
        import torch

        if case.options["approximate"] != "tanh":
            raise NotImplementedError("vLLM has the tanh form only")
        function = getattr(_library("ops"), operator)

        def call(x: Any, approximate: str) -> Any:
            out = torch.empty_like(x)
            function(out, x)
            return out

        return call

    factory.__doc__ = f"`{operator}`, a tanh form."
    return serving(factory)


@serving
def rope(case: Any) -> Call:
    """`rotary_embedding`, in place on tokens of heads (B · S, H · D), with cos and sin side by side.

    Positions do not depend on the inputs' contents and are made once, as a server makes them once a step
    for all layers.
    """
    import torch

    ops = _library("ops")
    B, S, D = (case.axes[axis] for axis in "BSD")
    neox = case.options["layout"] == "half"
    positions = None

    def conversion(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        tokens = tuple(x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (q, k))
        return *tokens, torch.cat((cos, sin), -1)

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        nonlocal positions
        if positions is None:
            positions = torch.arange(S, device=q.device).repeat(B)
        q, k, cache = conversion(q, k, cos, sin, layout)
        ops.rotary_embedding(positions, q.view(B * S, -1), k.view(B * S, -1), D, cache, neox)
        return q.transpose(1, 2), k.transpose(1, 2)

    return forcing(call, conversion)


@serving
def fp8_quant(case: Any) -> Call:
    """`dynamic_per_token_scaled_fp8_quant` of rows, `per_token_group_fp8_quant` of 128 columns."""
    import torch

    if case.options["format"] != "e4m3":
        raise NotImplementedError("vLLM quantizes to e4m3 only")
    ops = _library("ops")
    largest = torch.finfo(torch.float8_e4m3fn).max

    def row(x: Any, granularity: str, format: str) -> Any:
        q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        ops.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)
        return q, scale

    def block(x: Any, granularity: str, format: str) -> Any:
        q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scale = torch.empty((x.shape[0], x.shape[1] // 128), dtype=torch.float32, device=x.device)
        ops.per_token_group_fp8_quant(x, q, scale, 128, 1e-10, -largest, largest, False, False, False)
        return q, scale

    if case.options["granularity"] == "tile":
        raise NotImplementedError("vLLM quantizes activations by rows and blocks of rows, not by squares")
    if case.options["granularity"] == "row":
        return row
    if case.options["granularity"] != "block":
        raise NotImplementedError("vLLM quantizes rows and groups of columns, no squares")
    if case.axes["N"] % 128:
        raise NotImplementedError("per_token_group_fp8_quant needs a width divisible by 128")
    return block


def _fa3(case: Any) -> Any:
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashAttention 3 takes fp16 and bf16 here")
    if case.axes["D"] > 256:
        raise NotImplementedError("FlashAttention 3 takes head dimensions up to 256")
    return _library("fa3").fwd


@serving
def attention(case: Any) -> Call:
    """FlashAttention 3's forward pass by its operator, which vLLM builds for packed tokens (T, H, D) only.

    One sequence of our (B, H, S, D) is a view of that; of more, the tokens are copied together.
    """
    import torch

    fwd = _fa3(case)
    B, S = case.axes["B"], case.axes["S"]
    causal = case.options["mask"] == "causal"
    scale = case.axes["D"] ** -0.5

    def conversion(q: Any, k: Any, v: Any, mask: str) -> Any:
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))

    @functools.cache
    def starts(device: Any) -> Any:
        return torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=device)

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        places = starts(q.device)
        out = fwd(
            *conversion(q, k, v, mask),
            None, None, None,  # new keys and values, q_v
            None,  # out
            places, places, None, None, None, S, S,  # where sequences start, lengths, longest
            None, None, None,  # page table, places in the cache, padding
            None, None, None,  # rotary cos, sin, positions
            None, None, None,  # scales of fp8
            scale, causal, -1, -1, 0.0,
            True, None, 1, None, 0,  # interleaved, schedule, splits, packed groups, SMs left to others
            None, 1, 0, None,  # sink, context parallelism
        )[0]  # fmt: skip
        return out.unflatten(0, (B, S)).transpose(1, 2)

    return forcing(call, conversion) if B > 1 else call


@serving
def attention_decode(case: Any) -> Call:
    """FlashAttention 3 on the paged cache, as vLLM's server runs it on Hopper; it chooses the splits itself."""
    fwd = _fa3(case)
    Sq, S = case.axes["Sq"], case.axes["S"]
    scale = case.axes["D"] ** -0.5

    def call(q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any) -> Any:
        return fwd(
            q, k_cache, v_cache,
            None, None, None, None,
            None, None, None, None, lengths, Sq, S,
            block_table, None, None,
            None, None, None,
            None, None, None,
            scale, True, -1, -1, 0.0,
            True, None, 0, None, 0,
            None, 1, 0, None,
        )[0]  # fmt: skip

    return call


@serving
def unified_attention(case: Any) -> Call:
    """`unified_attention`, the portable Triton kernel of vLLM's server, on the paged cache."""
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention as function

    B, Sq, S, D = (case.axes[axis] for axis in ("B", "Sq", "S", "D"))
    if not int(case.options["page"]):
        raise NotImplementedError("unified_attention takes a paged cache only")
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("unified_attention is run in fp16 and bf16 here")
    starts = None

    def call(q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any) -> Any:
        nonlocal starts
        if starts is None:
            starts = torch.arange(B + 1, dtype=torch.int32, device=q.device) * Sq
        out = torch.empty_like(q)
        function(
            q=q.view(-1, *q.shape[2:]),
            k=k_cache,
            v=v_cache,
            out=out.view(-1, *q.shape[2:]),
            cu_seqlens_q=starts,
            max_seqlen_q=Sq,
            seqused_k=lengths,
            max_seqlen_k=S,
            softmax_scale=D**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return out

    return refusing(call, AssertionError, ValueError)


IMPLEMENTATIONS = {
    "add_rms_norm": {"vllm": add_rms_norm},
    "attention": {"vllm_fa3": attention},
    "attention_decode": {"vllm_fa3": attention_decode, "vllm_unified": unified_attention},
    "fp8_quant": {"vllm": fp8_quant},
    "geglu": {"vllm": _gated("gelu_tanh_and_mul")},
    "gelu": {"vllm": _gelu("gelu_new"), "vllm_fast": _gelu("gelu_fast")},
    "rms_norm": {"vllm": rms_norm},
    "rope": {"vllm": rope},
    "swiglu": {"vllm": _gated("silu_and_mul")},
}
