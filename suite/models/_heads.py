"""Attention of models whose queries, keys and values are one product: views of it, never copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def attending(attention: Callable[..., Any], heads: int, mask: str) -> Callable[[Any], Any]:
    """The part of that name as a function of a projection (B, S, 3·H·D), to (B, S, H·D).

    A part that takes the three in one tensor (B, S, 3, H, D) has it for its attribute `packed`.
    """

    def views(projected: Any) -> Any:
        q, k, v = [x.unflatten(2, (heads, -1)).transpose(1, 2) for x in projected.chunk(3, -1)]
        return attention(q=q, k=k, v=v, mask=mask).transpose(1, 2).flatten(2)

    def whole(projected: Any) -> Any:
        return packed(projected.unflatten(2, (3, heads, -1)), mask).flatten(2)

    packed: Callable[..., Any] = getattr(attention, "packed", attention)
    return views if packed is attention else whole
