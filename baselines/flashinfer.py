"""FlashInfer (Ye et al., arXiv 2501.01005): a server's operators and attention, compiled at their first call.

Compiling needs nvcc and ninja. As with vLLM, operators that write over their inputs get copies, and what lies
apart is laid side by side, inside the call and named as `conversion`. Attention is planned once from the
sequences' lengths, as a server does once a step for all layers; what is timed is `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _blocks
from ._products import by_rows_of_k, has_recipe, without_padding
from ._terms import DTYPES, Call, forcing, forward_only, refusing, telling

REQUIRES = ("flashinfer-python",)
ENVIRONMENT = "flashinfer"
DEVICES = ("cuda",)

CHECKS = (AssertionError, ValueError)
"""What its checks of arguments raise."""
WORKSPACE = 128 << 20
"""Bytes of workspace that its documentation recommends."""
COLUMNS = 4096
"""Of the tokens that an array is to its all-reduce: a model's width."""
RANKS = (2, 4, 8)
"""That its choice between one shot and two knows (`_use_oneshot_heuristics` of `flashinfer.comm.trtllm_ar`)."""

serving = forward_only("FlashInfer")


def _halves(case: Any, fp32: bool = False) -> None:
    if case.dtype not in (("bf16", "fp16", "fp32") if fp32 else ("bf16", "fp16")):
        raise NotImplementedError("FlashInfer takes fp16 and bf16 here")


@serving
def rms_norm(case: Any) -> Call:
    """`flashinfer.rmsnorm`."""
    import flashinfer

    _halves(case)

    def call(x: Any, weight: Any, eps: float) -> Any:
        return flashinfer.rmsnorm(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)

    return refusing(call, *CHECKS)


@serving
def add_rms_norm(case: Any) -> Call:
    """`flashinfer.fused_add_rmsnorm`, in place on both of its inputs: it gets copies."""
    import flashinfer

    _halves(case)

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        y, h = x.clone(), residual.clone()
        flashinfer.fused_add_rmsnorm(y.view(-1, y.shape[-1]), h.view(-1, h.shape[-1]), weight, eps)
        return y, h

    return refusing(forcing(call, lambda x, residual, weight, eps: (x.clone(), residual.clone())), *CHECKS)


@serving
def layer_norm(case: Any) -> Call:
    """`flashinfer.layernorm` of bf16, which takes weight and bias in fp32: converted inside the call."""
    import flashinfer

    if case.dtype != "bf16":
        raise NotImplementedError("flashinfer.layernorm takes bf16 only")

    def call(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        return flashinfer.layernorm(x.view(-1, x.shape[-1]), weight.float(), bias.float(), eps).view(x.shape)

    return refusing(forcing(call, lambda x, weight, bias, eps: (weight.float(), bias.float())), *CHECKS)


def _gated(name: str) -> Any:
    def factory(case: Any) -> Call:
        import flashinfer
        import torch

        _halves(case)
        function = getattr(flashinfer, name)

        def conversion(gate: Any, up: Any) -> Any:
            return torch.cat((gate, up), -1)

        return refusing(forcing(lambda gate, up: function(conversion(gate, up)), conversion), *CHECKS)

    factory.__doc__ = f"`flashinfer.{name}`, of gate and up side by side: laid so inside the call."
    return serving(factory)


def all_reduce(case: Any) -> Call:
    """`flashinfer.comm.allreduce_fusion` with nothing fused (`kAllReduce`), one shot or two as it chooses by size,
    and launched as in its documentation: dependent on the kernel before. Not run yet.

    Its workspace is TensorRT-LLM's: memory of all ranks, which each rank maps. "auto" takes "mnnvl" where it can,
    which needs multicast, and that can put GPUs that others share out of service (`flashinfer.comm.allreduce`).
    It takes activations: an array is so many tokens of `COLUMNS`, or one of fewer. Sums are made in its dtype.
    """
    from flashinfer import comm

    _reduces(case)
    columns = min(case.axes["N"], COLUMNS)
    held = [_workspace(case, columns)]  # emptied to give it up: the call is there for longer

    def call(x: Any, place: str) -> Any:
        return comm.allreduce_fusion(
            input=x.view(-1, columns),
            workspace=held[0],
            pattern=comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=True,
        ).view(-1)

    def forget() -> None:
        while held:
            workspace = held.pop()
            # Its `destroy` leaves the library's own references, which keep the memory.
            comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace.ipc_handles)
            workspace.destroy()

    checked = refusing(call, *CHECKS)
    checked.shared = lambda **inputs: sum(map(_shared, held))  # type: ignore[attr-defined]  # the harness asks
    checked.forget = forget  # type: ignore[attr-defined]
    return checked


def _reduces(case: Any) -> None:
    """Raises NotImplementedError for what its all-reduce does not take: it looks at little of this itself."""
    import torch

    N, width = case.axes["N"], getattr(torch, DTYPES[case.dtype]).itemsize
    if case.options["place"] == "in":
        raise NotImplementedError("its all-reduce gives sums only, no mean in place")
    if case.world not in RANKS:
        raise NotImplementedError(f"it chooses between its kernels for 2, 4 and 8 GPUs, not for {case.world}")
    if N % min(N, COLUMNS) or min(N, COLUMNS) * width % 16:
        raise NotImplementedError(f"{N} elements are no tokens of {COLUMNS} columns, nor one of whole 16 bytes")
    if N >= 1 << 30:
        raise NotImplementedError("it counts in 32 bits, to twice the elements of an array")


def _workspace(case: Any, columns: int) -> Any:
    """Of the default group's ranks, for arrays of this size. All ranks make it together."""
    import torch
    import torch.distributed as dist
    from flashinfer import comm

    return comm.create_allreduce_fusion_workspace(
        backend="trtllm",
        world_size=case.world,
        rank=dist.get_rank(),
        max_token_num=case.axes["N"] // columns,
        hidden_dim=columns,
        dtype=getattr(torch, DTYPES[case.dtype]),
    )


def _shared(workspace: Any) -> int:
    """Bytes of this rank's memory that its peers can read and write. With confidential computing it is torch's
    symmetric memory, of which a workspace says sizes alone.
    """
    mapped = sum(x.get_allocation_size() for x in workspace.mem_handles)
    sizes = ("buffer_size", "flag_size", "lamport_buffer_size")
    return int(mapped or sum(workspace.metadata[x] for x in sizes))


@serving
def rope(case: Any) -> Call:
    """`flashinfer.apply_rope_with_cos_sin_cache` of tokens of heads (B · S, H · D), with a cache in fp32.

    Positions do not depend on the inputs' contents and are made once.
    """
    import flashinfer
    import torch

    _halves(case)
    B, S, D = (case.axes[axis] for axis in "BSD")
    neox = case.options["layout"] == "half"
    positions = None

    def conversion(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        tokens = tuple(x.transpose(1, 2).reshape(B * S, -1) for x in (q, k))
        return *tokens, torch.cat((cos, sin), -1).float()

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        nonlocal positions
        if positions is None:
            positions = torch.arange(S, dtype=torch.int32, device=q.device).repeat(B)
        q, k, cache = conversion(q, k, cos, sin, layout)
        out = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, D, cache, is_neox=neox)
        return tuple(x.view(B, S, -1, D).transpose(1, 2) for x in out)

    return refusing(forcing(call, conversion), *CHECKS)


@serving
def softmax(case: Any) -> Call:
    """`flashinfer.sampling.softmax`, of logits in fp32."""
    from flashinfer.sampling import softmax as function

    if case.dtype != "fp32":
        raise NotImplementedError("flashinfer.sampling.softmax gives fp32, whatever it is given")
    return refusing(lambda x: function(x), *CHECKS)


@serving
def mx_quant(case: Any) -> Call:
    """`mxfp8_quantize` and `nvfp4_quantize` with scales in rows, which exist for Blackwell only."""
    import flashinfer
    import torch

    _halves(case)
    if torch.cuda.get_device_capability() < (10, 0):
        raise NotImplementedError("FlashInfer quantizes to block formats on compute capability 10 and newer only")
    M = case.axes["M"]
    if case.options["format"] == "mxfp4":
        raise NotImplementedError("mxfp4_quantize gives its scales in the order of the tensor cores only")

    def mxfp8(x: Any, format: str, scale: Any) -> Any:
        q, scales = flashinfer.mxfp8_quantize(x, is_sf_swizzled_layout=False)
        return q, scales.view(M, -1)

    def nvfp4(x: Any, format: str, scale: Any) -> Any:
        q, scales = flashinfer.nvfp4_quantize(x, 1 / scale, sfLayout=flashinfer.SfLayout.layout_linear)
        return q, scales.view(torch.float8_e4m3fn).view(M, -1)

    return refusing(mxfp8 if case.options["format"] == "mxfp8" else nvfp4, *CHECKS)


@serving
def attention(case: Any) -> Call:
    """`BatchPrefillWithRaggedKVCacheWrapper` on packed tokens (B · S, H, D); on Hopper by its FlashAttention 3.
    A window is its `window_left`, a cap of scores its `logits_soft_cap`. Its wrapper with sinks takes pages only.

    With B > 1 our (B, H, S, D) is no view of packed tokens: it is copied to that order inside the call.
    """
    import flashinfer
    import torch

    _halves(case)
    _blocks.takes(case, "its ragged wrapper", "cap", "Sk")
    B, H, S, D = (case.axes[axis] for axis in ("B", "H", "S", "D"))
    Hkv, Dv = case.axes.get("Hkv", H), case.axes.get("Dv", D)
    Sk, cap = _blocks.keys(case), _blocks.cap_of(case)
    causal = case.options["mask"] == "causal"
    left, right = _blocks.reach(case)
    if right > 0:
        raise NotImplementedError("FlashInfer's windows end at the query")
    planned = None

    def conversion(q: Any, k: Any, v: Any, mask: str, window: int = 0, cap: float = 0.0) -> Any:
        return tuple(x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v))

    def plan(q: Any) -> Any:
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        places = torch.arange(B + 1, dtype=torch.int32, device=q.device)
        kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        kinds |= {"logits_soft_cap": cap} if cap else {}
        kinds |= {"head_dim_vo": Dv} if Dv != D else {}
        wrapper.plan(places * S, places * Sk, H, Hkv, D, causal=causal, window_left=left, **kinds)
        return wrapper

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0, cap: float = 0.0) -> Any:
        nonlocal planned
        if planned is None:
            planned = plan(q)
        out = planned.run(*conversion(q, k, v, mask))
        return out.view(B, S, H, Dv).transpose(1, 2)

    return refusing(forcing(call, conversion) if B > 1 and S > 1 else call, *CHECKS)


@serving
def attention_varlen(case: Any) -> Call:
    """`BatchPrefillWithRaggedKVCacheWrapper`, planned once from where sequences start. A window is its
    `window_left`, a cap of scores its `logits_soft_cap`.
    """
    import flashinfer
    import torch

    _halves(case)
    _blocks.takes(case, "its ragged wrapper", "cap", "Sk")
    H, Hkv, D = (case.axes[axis] for axis in ("H", "Hkv", "D"))
    causal, cap = case.options["mask"] == "causal", _blocks.cap_of(case)
    left, right = _blocks.reach(case)
    if right > 0:
        raise NotImplementedError("FlashInfer's windows end at the query")
    more: dict[str, Any] = {"window_left": left} if left >= 0 else {}
    more |= {"logits_soft_cap": cap} if cap else {}
    planned = None

    def plan(q: Any, starts: Any, key_starts: Any) -> Any:
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        wrapper.plan(starts, key_starts, H, Hkv, D, causal=causal, **kinds, **more)
        return wrapper

    def call(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **rest: Any) -> Any:
        nonlocal planned
        if planned is None:
            planned = plan(q, cu_seqlens_q, cu_seqlens_k)
        return planned.run(q, k, v)

    return refusing(call, *CHECKS)


@serving
def attention_fp8(case: Any) -> Call:
    """`single_prefill_with_kv_cache` in E4M3 by its FlashAttention 3, which takes scales of heads but not of
    sequences: one call a sequence. V's features are to be contiguous.

    In 0.6.14 rows that see few keys come out too small, the first almost as 0: keys that the causal mask hides,
    and those that fill up the last block, count in the softmax's denominator. The gate refuses such an answer.
    """
    import torch
    from flashinfer import single_prefill_with_kv_cache

    causal = case.options["mask"] == "causal"
    colmajor = case.options["v_layout"] == "colmajor"

    def conversion(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        return v.contiguous()

    def call(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any, mask: str) -> Any:
        if colmajor:
            v = conversion(q, k, v)
        outputs = [
            single_prefill_with_kv_cache(
                *(x[b].transpose(0, 1) for x in (q, k, v)),
                scale_q=q_scale[b],
                scale_k=k_scale[b],
                scale_v=v_scale[b],
                o_dtype=torch.bfloat16,
                causal=causal,
                backend="fa3",
            )
            for b in range(q.shape[0])
        ]
        return (torch.stack(outputs) if len(outputs) > 1 else outputs[0][None]).transpose(1, 2)

    return refusing(forcing(call, conversion) if colmajor else call, *CHECKS)


@serving
def attention_sparse(case: Any) -> Call:
    """`BlockSparseAttentionWrapper` on tokens (S, H, D) of one sequence, planned once from a fixed layout.

    Each block of queries is a request to it, whose pages are the kept blocks of keys. Its causal mask is that of
    the last block of a request, which is the block's own in every layout here.
    """
    import flashinfer
    import torch

    _halves(case)
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    if not _blocks.given(case):
        raise NotImplementedError("it is planned on the host, from one layout of blocks for all heads")
    if B != 1 or S % 128:
        raise NotImplementedError("it takes one sequence of whole blocks")
    planned = None

    def plan(q: Any, blocks: Any) -> Any:
        wrapper = flashinfer.BlockSparseAttentionWrapper(
            torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        )
        counts = blocks[0].sum(-1)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        places = blocks[0].nonzero()[:, 1].int()
        kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype, "o_data_type": q.dtype}
        causal = case.options["mask"] == "causal"
        wrapper.plan(starts, places, S, S, 128, 128, H, Hkv, D, causal=causal, **kinds)
        return wrapper

    def call(q: Any, k: Any, v: Any, mask: str, sparsity: int, blocks: Any, gate_q: Any, gate_k: Any) -> Any:
        nonlocal planned
        if planned is None:
            planned = plan(q, blocks)
        return planned.run(*(x[0].transpose(0, 1) for x in (q, k, v))).transpose(0, 1)[None]

    def tiles_left_out(blocks: Any, **inputs: Any) -> float:
        """By the list that it is planned with."""
        return _blocks.left_out(case, blocks[0].sum(-1))

    return telling(refusing(call, *CHECKS), tiles_left_out=tiles_left_out)


def in_use(lengths: Sequence[int], page: int, across: int) -> tuple[list[int], list[int], list[int]]:
    """What FlashInfer wants to know of sequences of these lengths, whose block tables have `across` pages each.

    (starts, places, last): sequence b's pages are the entries starts[b] to starts[b + 1] of the list of pages
    in use, whose entry i stands at place places[i] of the block tables laid end to end; last[b] tokens of its last
    page are in use.
    """
    starts, places = [0], list[int]()
    for b, length in enumerate(lengths):
        needed = -(-length // page)
        starts.append(starts[-1] + needed)
        places += range(b * across, b * across + needed)
    return starts, places, [(x - 1) % page + 1 for x in lengths]


@serving
def attention_decode(case: Any) -> Call:
    """`BatchDecodeWithPagedKVCacheWrapper`, or the paged prefill wrapper for more than one new token.

    A contiguous cache is one of pages of 64 tokens in order. FlashInfer takes a list of just the pages in use:
    with sequences as long as the block table that is the table itself, else it is picked out inside the call.
    """
    import flashinfer
    import torch

    _halves(case)
    _blocks.takes(case, "its paged wrapper", "cap")
    B, Sq, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "Sq", "H", "Hkv", "S", "D"))
    page = int(case.options["page"]) or 64
    soft = {"logits_soft_cap": cap} if (cap := _blocks.cap_of(case)) else {}
    if not case.options["page"] and S % page:
        raise NotImplementedError(f"a contiguous cache of {S} tokens is not made of pages of {page}")
    across = -(-S // page)
    wrapper: Any = None
    pages: Any = None
    places: Any = None

    def plan(q: Any, lengths: Any) -> None:
        nonlocal wrapper, pages, places
        starts, used, last = (
            torch.tensor(x, dtype=torch.int32, device=q.device) for x in in_use(lengths.tolist(), page, across)
        )
        if len(used) < B * across:
            places, pages = used, torch.empty_like(used)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        if Sq == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=Hkv < H)
            wrapper.plan(starts, pages, last, H, Hkv, D, page, **soft, **kinds)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            tokens = torch.arange(B + 1, dtype=torch.int32, device=q.device) * Sq
            wrapper.plan(tokens, starts, pages, last, H, Hkv, D, page, causal=True, **soft, **kinds)

    def call(q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any, cap: float = 0.0) -> Any:
        nonlocal pages
        if wrapper is None:
            ordered = torch.arange(B * across, dtype=torch.int32, device=q.device)
            pages = ordered if block_table is None else block_table.view(-1)
            plan(q, lengths)
        if places is not None:
            pages.copy_(places if block_table is None else block_table.view(-1)[places])
        cache = tuple(x.view(-1, page, Hkv, D) for x in (k_cache, v_cache))
        return wrapper.run(q.view(B * Sq, H, D), cache).view(B, Sq, H, D)

    return refusing(call, *CHECKS)


@serving
def fp8_matmul(case: Any) -> Call:
    """`flashinfer.gemm.fp8_blockscale_gemm_sm90`, of weights (N, K) and scales of 1×128 and 128×128. It takes
    addresses of scales without their strides.
    """
    from flashinfer.gemm import fp8_blockscale_gemm_sm90 as function

    has_recipe(case, "FlashInfer", ("block",))
    if case.axes["M"] % 4 or case.axes["K"] % 128:
        raise NotImplementedError("FlashInfer reads scales as they lie for M in multiples of 4 and K of 128")
    dense = without_padding()

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        return function(a, b.t(), scale_a, dense(scale_b=scale_b).t())

    return refusing(by_rows_of_k(case, call), *CHECKS)


@serving
def grouped_fp8_matmul(case: Any) -> Call:
    """Its grouped products of 8 bits are Blackwell's."""
    raise NotImplementedError("FlashInfer's group_gemm_fp8_nt_groupwise is for Blackwell only")


@serving
def attention_mla_decode(case: Any) -> Call:
    """`BatchMLAPagedAttentionWrapper`, which chooses its backend itself; latent and rotary parts are views.

    It takes a list of just the pages in use: with sequences as long as the block table that is the table itself,
    else it is picked out inside the call.
    """
    import flashinfer
    import torch

    _halves(case)
    B, Sq, H, S, C, R = (case.axes[axis] for axis in ("B", "Sq", "H", "S", "C", "R"))
    page = int(case.options["page"])
    across = -(-S // page)
    wrapper: Any = None
    pages: Any = None
    places: Any = None

    def plan(q: Any, table: Any, lengths: Any, scale: float) -> None:
        nonlocal wrapper, pages, places
        in_order, used, _ = in_use(lengths.tolist(), page, across)
        starts = torch.tensor(in_order, dtype=torch.int32, device=q.device)
        pages = table.view(-1)
        if len(used) < B * across:
            places = torch.tensor(used, device=q.device)
            pages = pages[places]
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
        tokens = torch.arange(B + 1, dtype=torch.int32, device=q.device) * Sq
        wrapper.plan(tokens, starts, pages, lengths, H, C, R, page, Sq > 1, scale, q.dtype, q.dtype)

    def call(q: Any, cache: Any, block_table: Any, lengths: Any, latent: int, scale: float) -> Any:
        if wrapper is None:
            plan(q, block_table, lengths, scale)
        if places is not None:
            pages.copy_(block_table.view(-1)[places])
        rows = q.view(B * Sq, H, C + R)
        parts = (*rows.split((C, R), -1), *cache.split((C, R), -1))
        return wrapper.run(*parts).view(B, Sq, H, C)

    return refusing(call, *CHECKS)


IMPLEMENTATIONS = {
    "fp8_matmul": {"flashinfer": fp8_matmul},
    "grouped_fp8_matmul": {"flashinfer": grouped_fp8_matmul},
    "add_rms_norm": {"flashinfer": add_rms_norm},
    "all_reduce": {"flashinfer": all_reduce},
    "attention": {"flashinfer": attention},
    "attention_decode": {"flashinfer": attention_decode},
    "attention_fp8": {"flashinfer": attention_fp8},
    "attention_sparse": {"flashinfer": attention_sparse},
    "attention_mla": {"flashinfer": attention},
    "attention_mla_decode": {"flashinfer": attention_mla_decode},
    "attention_window": {"flashinfer": attention},
    "attention_varlen": {"flashinfer": attention_varlen},
    "geglu": {"flashinfer": _gated("gelu_tanh_and_mul")},
    "layer_norm": {"flashinfer": layer_norm},
    "mx_quant": {"flashinfer": mx_quant},
    "rms_norm": {"flashinfer": rms_norm},
    "rope": {"flashinfer": rope},
    "softmax": {"flashinfer": softmax},
    "swiglu": {"flashinfer": _gated("silu_and_mul")},
}
