"""vLLM's fused operators, and the FlashAttention 3 and paged Triton attention that it ships.

Its operators are built for serving: they write into what they are given, have no backward pass, and take a
feed-forward block's gate and up side by side in one tensor. What that forces on inputs that are to stay as
they are is inside the call and named as `conversion`. The libraries are loaded by themselves: importing
`vllm` would set up a server's surroundings, and the operators need none of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from . import _blocks, _transformers_models, _vllm_engine, deep_gemm
from ._products import by_rows_of_k, has_recipe, without_padding
from ._terms import Call, forcing, forward_only, keeping, refusing

REQUIRES = ("vllm",)
ENVIRONMENT = "vllm"
DEVICES = ("cuda",)
ONCE = ("vllm_engine",)  # a second one fails in what the first compiled, or in its CUDA graphs' pool

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


def _deep_gemm() -> Any:
    """The DeepGEMM that vLLM ships, as a package of its own."""
    import importlib.util
    import sys
    from pathlib import Path

    if "deep_gemm" in sys.modules:
        return sys.modules["deep_gemm"]
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("vllm is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "third_party/deep_gemm"
    if not (folder / "__init__.py").is_file():
        raise ImportError("this vllm has no third_party/deep_gemm")
    found = importlib.util.spec_from_file_location(
        "deep_gemm", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["deep_gemm"] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules["deep_gemm"]
        raise
    return module


@serving
def fp8_matmul(case: Any) -> Call:
    """`cutlass_scaled_mm`, CUTLASS's products. Of blocks of scales it takes the address and no strides."""
    import torch

    has_recipe(case, "cutlass_scaled_mm", ("tensor", "row", "block"))
    if case.options["recipe"] == "block" and case.axes["K"] % 128:
        raise NotImplementedError("vLLM gives cutlass_scaled_mm no blocks of scales unless K is a multiple of 128")
    ops = _library("ops")
    dense = without_padding()

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        if recipe == "block":
            scale_b = dense(scale_b=scale_b)
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
        ops.cutlass_scaled_mm(out, a, b, scale_a, scale_b, None)
        return out

    return by_rows_of_k(case, call)


@serving
def fp8_matmul_deep_gemm(case: Any) -> Call:
    """DeepGEMM's `fp8_gemm_nt`, of the copy that vLLM ships."""
    return deep_gemm.fp8_product(case, _deep_gemm())


@serving
def grouped_fp8_matmul_deep_gemm(case: Any) -> Call:
    """DeepGEMM's grouped products, of the copy that vLLM ships."""
    return deep_gemm.grouped_product(case, _deep_gemm())


@serving
def quantized_activation(case: Any) -> Call:
    """`rms_norm_per_block_quant` and `silu_and_mul_per_block_quant`, scales column by column."""
    ops = _library("ops")
    if case.axes["K"] % 128:
        raise NotImplementedError("vLLM's fused quantization takes widths in multiples of 128")
    return lambda x, norm_weight, eps: _quantized(ops, x, norm_weight, eps)


def _quantized(ops: Any, x: Any, norm_weight: Any, eps: float) -> tuple[Any, Any]:
    """The activation in E4M3 and its scales, of 128 columns each."""
    import torch

    M, K = x.shape[0], x.shape[1] // (1 if norm_weight is not None else 2)
    q = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(K // 128, M, dtype=torch.float32, device=x.device).t()
    if norm_weight is not None:
        ops.rms_norm_per_block_quant(q, x, norm_weight, scale, eps, None, None, 128, True)
    else:
        ops.silu_and_mul_per_block_quant(q, x, scale, 128, None, True)
    return q, scale


@serving
def quantized_linear(case: Any) -> Call:
    """The fused quantization, then `cutlass_scaled_mm` of 1×128 by 128×128, whose scales lie without padding."""
    import torch

    ops = _library("ops")
    if case.axes["K"] % 128 or case.axes["N"] % 128:
        raise NotImplementedError("vLLM's fused quantization and its product take multiples of 128")

    def conversion(scale: Any, **rest: Any) -> Any:
        return scale.contiguous()

    def call(x: Any, weight: Any, scale: Any, norm_weight: Any, eps: float) -> Any:
        q, scale_q = _quantized(ops, x, norm_weight, eps)
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        ops.cutlass_scaled_mm(out, q, weight.t(), scale_q, conversion(scale).t(), None)
        return out

    # Rows of ours are padded to four scales, each of 128 columns.
    return forcing(call, conversion) if case.axes["K"] % 512 else call


@serving
def moe(case: Any) -> Call:
    """`fused_experts`, Triton's unless vLLM has a table for another, after its router by PyTorch, which gives bf16
    logits as its models do.
    """
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    if case.options["activation"] != "swiglu":
        raise NotImplementedError(
            "vLLM's fused_experts is called with SwiGLU here: clamped by vllm_triton_kernels"
        )
    if case.dtype == "e4m3" and (case.axes["D"] % 128 or case.axes["F"] % 128):
        raise NotImplementedError("vLLM's scales of blocks take widths in multiples of 128")

    def call(x: Any, router: Any, gate_up: Any, down: Any, scale_gate_up: Any, scale_down: Any, top_k: int) -> Any:
        logits, experts = (x @ router.t()).float().topk(top_k, -1)
        quantized = {}
        if scale_gate_up is not None:
            quantized["quant_config"] = fp8_w8a8_moe_quant_config(
                w1_scale=scale_gate_up, w2_scale=scale_down, block_shape=[128, 128]
            )
        y = fused_experts(x, gate_up, down, logits.softmax(-1), experts.int(), **quantized)
        return y, experts

    return refusing(call, AssertionError)


@serving
def moe_deep_gemm(case: Any) -> Call:
    """DeepGEMM's grouped products, of vLLM's copy, between vLLM's quantizations of x and of SwiGLU."""
    import torch

    ops = _library("ops")

    def quantize(x: Any) -> tuple[Any, Any]:
        q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty(x.shape[1] // 128, len(x), dtype=torch.float32, device=x.device).t()
        ops.per_token_group_fp8_quant(x, q, scale, 128, 1e-10, -448.0, 448.0, False, True, False)
        return q, scale

    return deep_gemm.mixture(case, _deep_gemm(), quantize, lambda x: _quantized(ops, x, None, 0.0))


def moe_triton_kernels(case: Any) -> Call:
    """Triton's own package of kernels, of which vLLM ships a copy (PyPI has another project by its name), by
    vLLM's `triton_kernel_moe_forward`, which routes by the logits that PyTorch gives.

    Its weights have gate and up in turns and K before the columns: laid so once, as a server does that loads a
    model. It keeps the choice of experts to itself, so PyTorch makes it once more, within the call. On an H200
    two sizes ran and were right (`20261127-122232-f28b`).
    """
    import torch

    if case.options["activation"] != "clamped":
        raise NotImplementedError(
            "triton_kernels' gated product is gpt-oss's: gate and up clamped, and 1 added to up"
        )
    if case.dtype != "bf16":
        raise NotImplementedError("triton_kernels are called with weights in bf16 here")
    try:
        from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as kernels
    except ImportError:  # vLLM before it had a folder of experts
        from vllm.model_executor.layers.fused_moe import gpt_oss_triton_kernels_moe as kernels

    def laid(gate_up: Any, down: Any) -> tuple[Any, Any]:
        in_turns = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
        return in_turns.mT.contiguous(), down.mT.contiguous()

    weights = keeping(laid, "gate_up", "down")

    def call(x: Any, router: Any, gate_up: Any, down: Any, top_k: int, limit: float, **scales: Any) -> Any:
        first, second = weights(gate_up=gate_up, down=down)
        logits = x @ router.t()
        y = kernels.triton_kernel_moe_forward(x, first, second, logits, top_k, renormalize=True)
        return y, logits.topk(top_k, -1).indices

    return refusing(call, AssertionError)


@serving
def mx_matmul_marlin(case: Any) -> Call:
    """Marlin: weights in four bits widened on their way to the matrix units. It lays the weight out anew once, as
    a server does that loads a model.
    """
    import torch
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

    if case.options["format"] != "mxfp4" or case.dtype != "bf16":
        raise NotImplementedError("Marlin is called for MXFP4 weights and bf16 inputs here")
    N, K = case.axes["N"], case.axes["K"]
    if N % 64 or K % 128:
        raise NotImplementedError("Marlin takes N in multiples of 64 and K in multiples of 128")

    def laid(q: Any, scales: Any) -> Any:
        layer: Any = torch.nn.Module()
        layer.params_dtype = torch.bfloat16
        layer.output_size_per_partition, layer.input_size_per_partition = N, K
        layer.weight = torch.nn.Parameter(q, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        marlin.prepare_fp4_layer_for_marlin(layer)
        return layer

    kept = keeping(laid, "q", "scales")

    def call(x: Any, q: Any, scales: Any, **rest: Any) -> Any:
        layer = kept(q=q, scales=scales)
        workspace = getattr(layer, "workspace", None)  # newer versions keep their own
        return marlin.apply_fp4_marlin_linear(
            x, layer.weight, layer.weight_scale, None, workspace, size_n=N, size_k=K
        )

    return refusing(call, AssertionError)


@serving
def mx_matmul_machete(case: Any) -> Call:
    """Machete has other formats."""
    raise NotImplementedError("Machete's weights in four bits are integers with a scale, not E2M1 numbers")


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

    if case.options["granularity"] == "row":
        return row
    if case.options["granularity"] != "block":
        raise NotImplementedError("vLLM quantizes rows and groups of columns, no squares and no columns")
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
    Windows, a cap of scores and sinks are its own. vLLM compiles no backward pass: a build of FlashAttention 3
    itself has one, and was not tried.

    One sequence of our (B, H, S, D) is a view of that; of more, the tokens are copied together.
    """
    import torch

    fwd = _fa3(case)
    B, S, Sk = case.axes["B"], case.axes["S"], _blocks.keys(case)
    causal = case.options["mask"] == "causal"
    scale = case.axes["D"] ** -0.5
    left, right = _blocks.reach(case)

    def conversion(q: Any, k: Any, v: Any, mask: str, window: int = 0, sinks: Any = None, cap: float = 0.0) -> Any:
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))

    @functools.cache
    def starts(device: Any, length: int) -> Any:
        return torch.arange(0, (B + 1) * length, length, dtype=torch.int32, device=device)

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0, sinks: Any = None, cap: float = 0.0) -> Any:
        out = fwd(
            *conversion(q, k, v, mask),
            None, None, None,  # new keys and values, q_v
            None,  # out
            starts(q.device, S), starts(q.device, Sk), None, None, None, S, Sk,  # starts, lengths, longest
            None, None, None,  # page table, places in the cache, padding
            None, None, None,  # rotary cos, sin, positions
            None, None, None,  # scales of fp8
            scale, causal, left, right, cap,
            True, None, 1, None, 0,  # interleaved, schedule, splits, packed groups, SMs left to others
            sinks, 1, 0, None,  # sink, context parallelism
        )[0]  # fmt: skip
        return out.unflatten(0, (B, S)).transpose(1, 2)

    return forcing(call, conversion) if B > 1 else call


@serving
def attention_varlen(case: Any) -> Call:
    """FlashAttention 3's forward pass by its operator, on packed tokens as it is built for. Windows, a cap of
    scores and sinks are its own.
    """
    fwd = _fa3(case)
    causal = case.options["mask"] == "causal"
    scale = case.axes["D"] ** -0.5
    left, right = _blocks.reach(case)

    def call(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        mask: str,
        window: int = 0,
        sinks: Any = None,
        cap: float = 0.0,
    ) -> Any:
        return fwd(
            q, k, v,
            None, None, None, None,
            cu_seqlens_q, cu_seqlens_k, None, None, None, max_seqlen_q, max_seqlen_k,
            None, None, None,
            None, None, None,
            None, None, None,
            scale, causal, left, right, cap,
            True, None, 1, None, 0,
            sinks, 1, 0, None,
        )[0]  # fmt: skip

    return call


@serving
def attention_mla_decode(case: Any) -> Call:
    """FlashMLA (`flash_mla_with_kvcache`), which vLLM ships; pages of 64 tokens, dense, on Hopper. Its schedule is
    made at the first call and kept, as a server keeps it a step for all layers.
    """
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashMLA takes fp16 and bf16 here")
    if int(case.options["page"]) != 64 or (case.axes["C"], case.axes["R"]) != (512, 64):
        raise NotImplementedError("FlashMLA takes pages of 64 tokens of 512 latent and 64 rotary dimensions")
    causal = case.axes["Sq"] > 1
    schedule = get_mla_metadata()[0]

    def call(q: Any, cache: Any, block_table: Any, lengths: Any, latent: int, scale: float) -> Any:
        return flash_mla_with_kvcache(
            q, cache[:, :, None], block_table, lengths, latent, schedule, softmax_scale=scale, causal=causal
        )[0]

    return refusing(call, AssertionError, ValueError)


@serving
def attention_fp8(case: Any) -> Call:
    """FlashAttention 3's forward pass in E4M3, on packed tokens (T, H, D) whose features are contiguous, V's too.

    It transposes V in the kernel and takes scales of key heads (B, Hkv): that of a key head's first query head.
    """
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    if D > 256 or D % 16:
        raise NotImplementedError("FlashAttention 3 takes head dimensions of a multiple of 16 up to 256 in E4M3")
    fwd = _library("fa3").fwd
    causal = case.options["mask"] == "causal"

    def packed(x: Any) -> Any:
        tokens = x.transpose(1, 2).flatten(0, 1)
        return tokens if tokens.stride(-1) == 1 else tokens.contiguous()

    def conversion(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        return tuple(packed(x) for x in (q, k, v))

    @functools.cache
    def starts(device: Any) -> Any:
        return torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=device)

    def call(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any, mask: str) -> Any:
        places = starts(q.device)
        out = fwd(
            *conversion(q, k, v),
            None, None, None, None,
            places, places, None, None, None, S, S,
            None, None, None,
            None, None, None,
            q_scale[:, :: H // Hkv], k_scale, v_scale,
            D**-0.5, causal, -1, -1, 0.0,
            True, None, 1, None, 0,
            None, 1, 0, None,
        )[0]  # fmt: skip
        return out.unflatten(0, (B, S)).transpose(1, 2)

    return forcing(call, conversion) if B > 1 or case.options["v_layout"] == "colmajor" else call


@serving
def attention_decode(case: Any) -> Call:
    """FlashAttention 3 on the paged cache, as vLLM's server runs it on Hopper; it chooses the splits itself."""
    fwd = _fa3(case)
    Sq, S = case.axes["Sq"], case.axes["S"]
    scale = case.axes["D"] ** -0.5

    def call(
        q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any, sinks: Any = None, cap: float = 0.0
    ) -> Any:
        return fwd(
            q, k_cache, v_cache,
            None, None, None, None,
            None, None, None, None, lengths, Sq, S,
            block_table, None, None,
            None, None, None,
            None, None, None,
            scale, True, -1, -1, cap,
            True, None, 0, None, 0,
            sinks, 1, 0, None,
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

    def call(
        q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any, sinks: Any = None, cap: float = 0.0
    ) -> Any:
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
            softcap=cap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            **({} if sinks is None else {"sinks": sinks}),
        )
        return out

    return refusing(call, AssertionError, ValueError)


@serving
def selective_scan(case: Any) -> Call:
    """`selective_scan_fwd`, which writes over delta and z: it gets copies. A state a sequence is written too."""
    ops = _library("ops")

    def conversion(delta: Any, z: Any, **rest: Any) -> Any:
        return delta.clone(), z.clone()

    def call(
        u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, delta_softplus: bool
    ) -> Any:
        delta, out = conversion(delta, z)
        states = u.new_empty((*u.shape[:2], A.shape[1]))
        ops.selective_scan_fwd(
            u, delta, A, B[:, None], C[:, None], D, out, delta_bias, delta_softplus,
            None, None, None,  # where sequences start, places in the cache, which of them count
            states, -1, 1024,  # what no place is, tokens between kept states
            None, None, None, None, None,  # kept states of prefixes
        )  # fmt: skip
        return out

    return forcing(call, conversion)


@serving
def selective_state_update(case: Any) -> Call:
    """`selective_state_update`; steps and decays of heads as expanded views, by which it knows them as such."""
    import torch
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update as function

    def call(
        state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: bool
    ) -> Any:
        if A.dim() == 1:
            A = A[:, None, None].expand(state.shape[1:])
            D, dt_bias = (t[:, None].expand(state.shape[1:3]) for t in (D, dt_bias))
            dt = dt[..., None].expand(x.shape)
        out = torch.empty_like(x)
        function(state, x, dt, A, B, C, D=D, dt_bias=dt_bias, z=z, dt_softplus=dt_softplus, out=out)
        return out

    return refusing(call, AssertionError)


@serving
def ssd(case: Any) -> Call:
    """`mamba_chunk_scan_combined_varlen` on packed tokens, in chunks of 256 as Mamba-2's models have them.

    Where chunks end depends on the sizes alone and is made once, as a server makes it once a step for all layers.
    Its states between chunks have the dtype of C, and fp32 where the last one is asked for.
    """
    import torch
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen as function

    if case.options["packed"]:
        raise NotImplementedError("sequences in a row are given by their places on the host, one state for each")
    B, S = case.axes["B"], case.axes["S"]
    kept = torch.float32 if case.options["states"] else None

    @functools.cache
    def places(device: Any) -> dict[str, Any]:
        starts = range(0, B * S + 1, S)
        ends = sorted({*starts, *range(0, B * S, 256)})
        found = {
            "cu_seqlens": list(starts),
            "cu_chunk_seqlens": ends,
            "last_chunk_indices": [ends.index(x) - 1 for x in starts[1:]],
            "seq_idx": [x // S for x in ends[:-1]],
        }
        return {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in found.items()}

    def call(
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        dt_bias: Any,
        initial_state: Any,
        seq_idx: Any,
        dt_softplus: bool,
        return_final_state: bool,
    ) -> Any:
        y = torch.empty_like(x)
        state = function(
            *(x.flatten(0, 1), dt.flatten(0, 1), A, B.flatten(0, 1), C.flatten(0, 1), 256),
            **places(x.device),
            out=y.flatten(0, 1),
            D=D,
            dt_bias=dt_bias,
            initial_states=initial_state,
            dt_softplus=dt_softplus,
            state_dtype=kept,
        )
        return (y, state) if return_final_state else y

    return refusing(call, AssertionError)


@serving
def causal_conv1d(case: Any) -> Call:
    """`causal_conv1d_fn` on packed tokens of channels, which it wants side by side: others are copied so.

    It keeps the last tokens in a cache, from which it also takes an initial state: that is copied there. Which
    program has which tokens depends on the sizes alone and is made once, as a server makes it once a step.
    """
    from types import SimpleNamespace

    import torch
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn as function
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    B, D, S, W = (case.axes[axis] for axis in ("B", "D", "S", "W"))
    tokens_last, initial = case.options["layout"] == "bds", bool(case.options["initial"])
    kind = "silu" if case.options["activation"] == "silu" else None

    @functools.cache
    def prepared(device: Any, dtype: Any) -> dict[str, Any]:
        starts = torch.arange(0, (B + 1) * S, S, dtype=torch.int32)
        names = ("nums_dict", "batch_ptr", "token_chunk_offset_ptr")
        programs = compute_causal_conv1d_metadata(starts, device=device)
        return {
            "conv_states": torch.zeros(B, W - 1, D, dtype=dtype, device=device).transpose(1, 2),
            "query_start_loc": starts.to(device),
            "cache_indices": torch.arange(B, dtype=torch.int32, device=device),
            "has_initial_state": torch.full((B,), initial, device=device),
            "metadata": SimpleNamespace(**dict(zip(names, programs, strict=True))),
        }

    def conversion(x: Any, initial_state: Any, **rest: Any) -> Any:
        if initial:
            cache = prepared(x.device, x.dtype)["conv_states"]
            cache.copy_(initial_state if tokens_last else initial_state.transpose(1, 2))
        return x.transpose(1, 2).contiguous() if tokens_last else x

    def call(x: Any, weight: Any, bias: Any, initial_state: Any, activation: str, layout: str) -> Any:
        tokens = conversion(x, initial_state).flatten(0, 1).t()
        given = prepared(x.device, x.dtype)
        y = function(tokens, weight, bias, activation=kind, null_block_id=-1, **given).t().unflatten(0, (B, S))
        return y.transpose(1, 2) if tokens_last else y

    checked = refusing(call, AssertionError)
    return forcing(checked, conversion) if tokens_last or initial else checked


@serving
def causal_conv1d_update(case: Any) -> Call:
    """`causal_conv1d_update`, whose state has a token less than this one: the oldest is moved by a copy."""
    import torch
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update as function

    B = case.axes["B"]
    kind = "silu" if case.options["activation"] == "silu" else None

    @functools.cache
    def lines(device: Any) -> Any:
        return torch.arange(B, dtype=torch.int32, device=device)

    def conversion(conv_state: Any, **rest: Any) -> Any:
        return conv_state[..., 0].copy_(conv_state[..., 1])

    def call(x: Any, conv_state: Any, weight: Any, bias: Any, activation: str) -> Any:
        conversion(conv_state)
        return function(
            x,
            conv_state[..., 1:],
            weight,
            bias,
            activation=kind,
            conv_state_indices=lines(x.device),
            null_block_id=-1,
            out=torch.empty_like(x),
        )

    return forcing(refusing(call, AssertionError), conversion)


@serving
def gated_rms_norm(case: Any) -> Call:
    """`rms_norm_gated` of its Mamba-2."""
    from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated

    def call(x: Any, z: Any, weight: Any, eps: float, group: int, order: str) -> Any:
        size = None if group == x.shape[-1] else group
        return rms_norm_gated(x, weight, None, z, eps, size, order == "norm_first")

    return refusing(call, saying="doesn't support feature dim >= 64KB")


def all_reduce(case: Any) -> Call:
    """Its custom all-reduce over peers' memory, one stage or two by size, to 8 MiB. An array is copied to its
    buffer, as between calls that are not captured by vLLM itself. Not run yet.
    """
    if case.options["place"] == "in":
        raise NotImplementedError("its all-reduce gives sums only, no mean in place")
    reduced = _peers()

    def call(x: Any, place: str) -> Any:
        if not reduced.should_custom_ar(x):
            raise NotImplementedError("vLLM takes NCCL for arrays of this size between these GPUs")
        return reduced.all_reduce(x)

    return call


@functools.cache
def _peers() -> Any:
    """Its buffers of the default group's ranks, whose addresses are exchanged by a group that is not NCCL's."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    return CustomAllreduce(dist.new_group(backend="gloo"), torch.device("cuda", torch.cuda.current_device()))


class _Serve(_transformers_models.Folder):
    """`vllm serve` as it comes, its cache of prefixes with it."""

    path = "/v1/completions"
    words = False
    extra: ClassVar[dict[str, Any]] = {"ignore_eos": True}
    remarks: tuple[str, ...] = ()
    variables: Mapping[str, str] = {**_transformers_models.Folder.variables, **_vllm_engine.ALONE}

    def command(self, folder: Any, port: int, longest: int, device: str) -> list[str]:
        """Its own command, in the interpreter that runs us. Without a dtype it takes bf16 for weights in fp32. On
        Hopper its sampler imports flashinfer, and the server ends where that is missing, unless it is told not to.
        """
        import importlib.util

        self.remarks = _vllm_engine.trimmed()
        if importlib.util.find_spec("flashinfer") is None:
            self.variables = {**type(self).variables, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
            self.remarks += ("without flashinfer, which is not installed: PyTorch's sampler chooses the tokens",)
        where = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(longest)]
        where += ["--dtype", _transformers_models.stored(folder)]
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *where]


def serve(case: Any) -> _Serve:
    """vLLM's server on a folder with our weights."""
    return _Serve()


def forward(case: Any) -> Call:
    """Its encoders, which it pools: BERT among them, and no class that gives logits of tokens."""
    raise NotImplementedError(
        "vLLM's encoders give embeddings, of a text or of its tokens, on the host; `forward` holds logits of the "
        "vocabulary to the model's, and times a pass up to them"
    )


def generate(case: Any) -> _vllm_engine.Generate:
    """vLLM's engine in the worker's process."""
    return _vllm_engine.Generate()


IMPLEMENTATIONS = {
    "add_rms_norm": {"vllm": add_rms_norm},
    "all_reduce": {"vllm_custom": all_reduce},
    "attention": {"vllm_fa3": attention},
    "attention_window": {"vllm_fa3": attention},
    "attention_decode": {"vllm_fa3": attention_decode, "vllm_unified": unified_attention},
    "attention_fp8": {"vllm_fa3": attention_fp8},
    "attention_mla_decode": {"flash_mla": attention_mla_decode},
    "attention_varlen": {"vllm_fa3": attention_varlen},
    "causal_conv1d": {"vllm": causal_conv1d},
    "causal_conv1d_update": {"vllm": causal_conv1d_update},
    "fp8_matmul": {"vllm": fp8_matmul, "vllm_deep_gemm": fp8_matmul_deep_gemm},
    "grouped_fp8_matmul": {"vllm_deep_gemm": grouped_fp8_matmul_deep_gemm},
    "moe": {"vllm": moe, "vllm_deep_gemm": moe_deep_gemm, "vllm_triton_kernels": moe_triton_kernels},
    "mx_matmul": {"vllm_marlin": mx_matmul_marlin, "vllm_machete": mx_matmul_machete},
    "quantized_activation": {"vllm": quantized_activation},
    "quantized_linear": {"vllm": quantized_linear},
    "fp8_quant": {"vllm": fp8_quant},
    "gated_rms_norm": {"vllm": gated_rms_norm},
    "geglu": {"vllm": _gated("gelu_tanh_and_mul")},
    "forward": {"vllm_encoder": forward},
    "generate": {"vllm_engine": generate},
    "gelu": {"vllm": _gelu("gelu_new"), "vllm_fast": _gelu("gelu_fast")},
    "rms_norm": {"vllm": rms_norm},
    "rope": {"vllm": rope},
    "serve": {"vllm_serve": serve},
    "selective_scan": {"vllm": selective_scan},
    "selective_state_update": {"vllm": selective_state_update},
    "ssd": {"vllm": ssd},
    "swiglu": {"vllm": _gated("silu_and_mul")},
}
