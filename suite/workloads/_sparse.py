"""Causal attention of an arm over some blocks of 128 × 128: by a mask of elements, by FlexAttention, or by an
operator `attention_sparse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ..operators._gates import BLOCK
from ..operators.attention_sparse import choose, fixed, scores

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from ._gated import Gates

Chosen: TypeAlias = Callable[[Any, Any], Any]
"""Of queries and keys, which blocks are seen: (…, n, n) bool."""
OFF = 0.02
"""By how much the share of tiles that an arm leaves out may differ from the share that it is named by."""
MASKED = 2048
"""Up to so many tokens a CUDA device gets a mask of elements; of longer sequences it would not fit. A CPU always
gets one: FlexAttention has no backward pass for it.
"""


def sparse(chosen: Chosen, S: int, device: str) -> Callable[..., Any]:
    """A part `attention(q, k, v, mask)` over the blocks that are chosen."""
    if device == "cuda" and S > MASKED:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        return by_blocks(chosen, torch.compile(flex_attention, dynamic=False))
    return masked(elements(chosen))


def masked(seen: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Attention with a mask of elements, of shape (…, S, S) bool, made of queries and keys."""
    from torch.nn.functional import scaled_dot_product_attention

    def attention(q: Any, k: Any, v: Any, mask: str) -> Any:
        groups = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=seen(q, k), enable_gqa=groups)

    return attention


def by_blocks(chosen: Chosen, flex: Callable[..., Any]) -> Callable[..., Any]:
    """Attention by `flex_attention` or what compiles it, which visits no block that is left out."""

    def attention(q: Any, k: Any, v: Any, mask: str) -> Any:
        own = block_mask(chosen(q, k), q.shape[2])
        return flex(q, k, v, block_mask=own, enable_gqa=q.shape[1] != k.shape[1])

    return attention


def over_given(call: Callable[..., Any], chosen: Chosen) -> Callable[..., Any]:
    """Attention by an `attention_sparse`, over blocks (n, n) that all heads share."""

    def attention(q: Any, k: Any, v: Any, mask: str) -> Any:
        given = {"sparsity": 0, "blocks": chosen(q, k)[None], "gate_q": None, "gate_k": None}
        return call(q=q, k=k, v=v, mask="causal", **given)

    return attention


def over_chosen(
    call: Callable[..., Any], left_out: int, gates: Gates | None, heard: Callable[[Any], None]
) -> Callable[..., Any]:
    """Attention by an `attention_sparse` that chooses the blocks itself, by means or behind gates, which learn
    after their pass's choice. `heard` is told the choice (B, H, n, n).
    """

    def attention(q: Any, k: Any, v: Any, mask: str) -> Any:
        gate_q, gate_k = (None, None) if gates is None else gates.both(q.detach(), k.detach())
        given = {"sparsity": left_out, "blocks": None, "gate_q": gate_q, "gate_k": gate_k}
        output, seen = call(q=q, k=k, v=v, mask="causal", **given)
        heard(seen)
        if gates is not None:
            gates.learn(q.detach(), k.detach())
        return output

    return attention


def causal(S: int, device: torch.device, ahead: int = 0) -> torch.Tensor:
    """(S, S) bool; `ahead` positions that follow are seen too, which is a planted fault."""
    import torch

    return torch.ones(S, S, dtype=torch.bool, device=device).tril(ahead)


def blocks(pattern: str, left_out: int) -> Chosen:
    """The blocks of a pattern that are seen. Fixed ones are made once for each length."""
    import torch

    made: dict[int, Any] = {}

    def chosen(q: Any, k: Any) -> Any:
        if pattern == "dynamic":
            # Means over a block hold what comes later within it: which blocks are seen, not what is in them.
            return choose(scores(q.detach(), k.detach(), "causal", None, None), "causal", left_out)
        across = -(-q.shape[2] // BLOCK)
        if across not in made:
            found = torch.zeros(across, across, dtype=torch.bool)
            for row, own in enumerate(fixed(pattern, across, "causal", left_out)):
                found[row, own] = True
            made[across] = found.to(q.device)
        return made[across]

    return chosen


def left_out(seen: torch.Tensor) -> torch.Tensor:
    """The share of the causal tiles that blocks seen (…, n, n) bool leave out; fp32 (), on their device."""
    across = seen.shape[-1]
    dense = across * (across + 1) // 2 * (seen.numel() // across**2)
    return 1 - seen.tril().sum() / dense


def elements(chosen: Chosen) -> Callable[[Any, Any], Any]:
    """The mask of elements (…, S, S) of blocks, causal."""

    def seen(q: Any, k: Any) -> Any:
        S = q.shape[2]
        wide = chosen(q, k).repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)[..., :S, :S]
        return wide & causal(S, q.device)

    return seen


def block_mask(seen: torch.Tensor, S: int) -> BlockMask:
    """FlexAttention's form of blocks (…, n, n): a row's own is causal within, earlier ones are seen whole."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    across = seen.shape[-1]
    seen = seen.view(*(1,) * (4 - seen.dim()), *seen.shape)
    own = torch.eye(across, dtype=torch.bool, device=seen.device)

    def listed(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many blocks a row has, and their numbers, those first."""
        order = some.int().argsort(dim=-1, descending=True, stable=True)
        return some.sum(-1, dtype=torch.int32), order.int()

    def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
        some = seen[b if seen.shape[0] > 1 else 0, h if seen.shape[1] > 1 else 0, query // BLOCK, key // BLOCK]
        return some & (query >= key)

    earlier = seen & own.logical_not() & torch.ones_like(own).tril()
    return BlockMask.from_kv_blocks(
        *listed(seen & own), *listed(earlier), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(S, S)
    )
