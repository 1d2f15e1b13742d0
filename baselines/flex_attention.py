"""PyTorch's FlexAttention under torch.compile (Dong et al., arXiv 2412.05496)."""

from __future__ import annotations

from typing import Any

from . import _blocks
from ._terms import Call, telling

REQUIRES = ("torch", "triton")
DEVICES = ("cuda",)


def attention(case: Any) -> Call:
    """`flex_attention`, compiled; what is hidden as a block mask, made once: it depends on the lengths alone.

    A cap of scores is its `score_mod`. A sink scales the output by what it takes of the weight, which follows from
    the log-sum-exp, as transformers' gpt-oss has it with FlexAttention.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    S, Sk = case.axes["S"], _blocks.keys(case)
    groups = _blocks.grouped(case)
    causal = case.options["mask"] == "causal"
    cap = _blocks.cap_of(case)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    blocks = None

    before, after = _blocks.reach(case)

    def seen(b: Any, h: Any, query: Any, key: Any) -> Any:
        place = query + (Sk - S)
        if before < 0:
            return place >= key
        return (place - key <= before) & (key - place <= after)

    def capped(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        return cap * torch.tanh(score / cap)

    modified = {"score_mod": capped} if cap else {}

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0, sinks: Any = None, cap: float = 0.0) -> Any:
        nonlocal blocks
        if (causal or before >= 0) and blocks is None:
            blocks = create_block_mask(seen, None, None, S, Sk, device=q.device)
        given: dict[str, Any] = {"block_mask": blocks, "enable_gqa": groups, **modified}
        if sinks is None:
            return compiled(q, k, v, **given)
        out, lse = compiled(q, k, v, **given, return_lse=True)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)

    return call


def attention_sparse(case: Any) -> Call:
    """`flex_attention`, compiled, on a `BlockMask` of the blocks: its diagonal ones partial, the others full.

    Given blocks are a fixed layout, whose `BlockMask` is made once, as its documentation says; chosen ones become
    one inside the call, from lists and not by `create_block_mask`, which evaluates every element.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

    S = case.axes["S"]
    groups = _blocks.grouped(case)
    causal = case.options["mask"] == "causal"
    choose = _blocks.choice(case)
    compiled = torch.compile(flex_attention, dynamic=False)
    made = None

    def seen(b: Any, h: Any, query: Any, key: Any) -> Any:
        return query >= key

    def masked(blocks: Any) -> Any:
        own = (
            torch.eye(blocks.shape[-1], dtype=torch.bool, device=blocks.device) if causal else blocks.new_zeros(())
        )
        return BlockMask.from_kv_blocks(
            *_blocks.lists(blocks & own),
            *_blocks.lists(blocks & ~own),
            BLOCK_SIZE=_blocks.BLOCK,
            mask_mod=seen if causal else noop_mask,
            seq_lengths=(S, S),
            # Of each block of keys its queries, which only a backward pass walks.
            compute_q_blocks=case.pass_ != "forward",
        )

    def given(q: Any, k: Any, v: Any, mask: str, sparsity: int, blocks: Any, gate_q: Any, gate_k: Any) -> Any:
        nonlocal made
        if made is None:
            made = masked(blocks[None])
        return compiled(q, k, v, block_mask=made, enable_gqa=groups)

    def chosen(
        q: Any,
        k: Any,
        v: Any,
        mask: str,
        sparsity: int,
        blocks: Any,
        gate_q: Any,
        gate_k: Any,
        threshold: float | None = None,
    ) -> Any:
        blocks = choose(q, k, gate_q, gate_k, threshold)
        return compiled(q, k, v, block_mask=masked(blocks), enable_gqa=groups), blocks

    def tiles_left_out(q: Any, k: Any, gate_q: Any, gate_k: Any, blocks: Any, **rest: Any) -> float:
        """By the lists of its `BlockMask`, partial blocks and full ones, which its kernels walk."""
        fixed = _blocks.given(case)
        mask = masked(blocks[None] if fixed else choose(q, k, gate_q, gate_k, rest.get("threshold")))
        return _blocks.left_out(case, mask.kv_num_blocks + mask.full_kv_num_blocks)

    return telling(given if _blocks.given(case) else chosen, tiles_left_out=tiles_left_out)


def attention_varlen(case: Any) -> Call:
    """`flex_attention`, compiled, on one long sequence whose tokens know their document, and how far they are
    from its end. A cap of scores and sinks are as of `attention`.

    The block mask is made once, as its documentation has it made once a batch for all layers.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    groups = _blocks.grouped(case)
    causal = case.options["mask"] == "causal"
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    before, after = _blocks.reach(case)
    alike = case.options["keys"] == "same"
    cap = _blocks.cap_of(case)
    blocks = None

    def made(starts: Any, key_starts: Any, tokens: int, keys: int) -> Any:
        documents = torch.repeat_interleave(starts.diff(), output_size=tokens)
        owners = torch.repeat_interleave(key_starts.diff(), output_size=keys)
        # Of a document the last query and the last key are in one place: what is between the ends of both.
        shift = (key_starts - starts)[1:]

        def seen(b: Any, h: Any, query: Any, key: Any) -> Any:
            same = documents[query] == owners[key]
            if not causal and before < 0:
                return same
            apart = query - key if alike else query + shift[documents[query]] - key
            if before < 0:
                return same & (apart >= 0)
            return same & (apart <= before) & (apart >= -after)

        return create_block_mask(seen, None, None, tokens, keys, device=starts.device)

    def capped(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        return cap * torch.tanh(score / cap)

    modified = {"score_mod": capped} if cap else {}

    def call(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, sinks: Any = None, **rest: Any) -> Any:
        nonlocal blocks
        if blocks is None:
            blocks = made(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        given: dict[str, Any] = {"block_mask": blocks, "enable_gqa": groups, **modified}
        if sinks is None:
            return compiled(q, k, v, **given)[0].transpose(0, 1)
        out, lse = compiled(q, k, v, **given, return_lse=True)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)[0].transpose(0, 1)

    return call


IMPLEMENTATIONS = {
    "attention": {"flex_attention": attention},
    "attention_mla": {"flex_attention": attention},
    "attention_sparse": {"flex_attention": attention_sparse},
    "attention_window": {"flex_attention": attention},
    "attention_varlen": {"flex_attention": attention_varlen},
}
