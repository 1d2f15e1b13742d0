"""DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509) as PyTorch builds it: exchange heads, attend, exchange back.

An all-to-all turns a rank's part of the sequence with all heads into the whole sequence with a part of the heads,
and another turns the answer back. Written here after the paper, over `scaled_dot_product_attention`; gradients
come by autograd. Needs as many key heads as ranks, or a multiple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUIRES = ("torch",)


def _attention(case: Any) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention

    world, H, Hkv = case.world, case.axes["H"], case.axes["Hkv"]
    if Hkv % world:
        raise NotImplementedError(f"{Hkv} key heads cannot be shared by {world} ranks")

    class Exchange(torch.autograd.Function):
        """(world, …) of parts for every rank to (world, …) of parts from every rank; its own inverse."""

        @staticmethod
        def forward(ctx: Any, parts: Any) -> Any:
            result = torch.empty_like(parts)
            dist.all_to_all_single(result, parts.contiguous())
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return exchange(grad)

    exchange: Callable[[Any], Any] = Exchange.apply
    # Ranks hold chunks r and 2·world - 1 - r of the sequence.
    order = [half for r in range(world) for half in (r, 2 * world - 1 - r)]
    inverse = [order.index(i) for i in range(2 * world)]

    def kept(parts: Any) -> Any:
        """What stands for it where nothing is sent."""
        return parts.contiguous()

    def heads_apart(x: Any, exchange: Callable[[Any], Any]) -> Any:
        """(B, heads, S/world, D) to (B, heads/world, S, D), in the order of the sequence."""
        parts = exchange(torch.stack(x.chunk(world, 1)))
        chunks = [half for part in parts for half in part.chunk(2, 2)]
        return torch.cat([chunks[i] for i in inverse], 2)

    def heads_together(x: Any, exchange: Callable[[Any], Any]) -> Any:
        chunks = x.chunk(2 * world, 2)
        parts = [torch.cat((chunks[r], chunks[2 * world - 1 - r]), 2) for r in range(world)]
        return torch.cat(list(exchange(torch.stack(parts))), 1)

    def over(exchange: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any, mask: str) -> Any:
            q, k, v = (heads_apart(x, exchange) for x in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", enable_gqa=Hkv != H)
            return heads_together(out, exchange)

        return call

    call = over(exchange)
    call.local = lambda: over(kept)  # type: ignore[attr-defined]  # the same without communication
    return call


IMPLEMENTATIONS = {"attention_context_parallel": {"ulysses": _attention}}
