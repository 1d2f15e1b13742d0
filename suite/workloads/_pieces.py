"""References of parts of a model that nearly fills a device: what is as large as all logits, or as several copies
of a table, is computed some of it at a time. The same formulas over the same numbers, summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..catalog import Catalog
from ..operator import Operator

if TYPE_CHECKING:
    import torch

PIECE = 2**26
"""Elements of a piece, about: 256 MiB of fp32."""


@dataclass(frozen=True)
class InPieces(Catalog):
    """A catalog whose loss and update of AdamW are in pieces."""

    def operator(self, name: str) -> Operator:
        """The operator of that name."""
        found = super().operator(name)
        if name not in _PIECES:
            return found
        return replace(found, reference=_PIECES[name](found.reference))


def in_pieces(catalog: Catalog) -> Catalog:
    """The same catalog, large answers in pieces."""
    return InPieces(catalog.roots, catalog.systems)


def loss(whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`fused_linear_cross_entropy` over some rows of x (M, D) at a time, their logits made again for the backward
    pass: the mean of the pieces' means, each by its rows.
    """

    def pieces(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        rows = max(1, PIECE // weight.shape[0])
        total: Any = 0.0
        for some, wanted in zip(x.split(rows), target.split(rows), strict=True):
            mean = checkpoint(whole, some, weight, wanted, use_reentrant=False)
            total = total + mean * (len(some) / len(x))
        return total  # type: ignore[no-any-return]  # a tensor: there is a row

    return pieces


def update(whole: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`adamw` of one parameter without a master, in place: each element's new values follow from its own alone."""

    def pieces(
        params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, masters: None, step: int, **given: float
    ) -> tuple[torch.Tensor, ...]:
        (p,), (g,), (m,), (v,) = params, grads, exp_avgs, exp_avg_sqs
        for each in zip(*(x.view(-1).split(PIECE) for x in (p, g, m, v)), strict=True):
            now = whole(*([x] for x in each), masters, step, **given)
            for old, new in zip((each[0], each[2], each[3]), now, strict=True):
                old.copy_(new)
        return p, m, v

    return pieces


_PIECES: Mapping[str, Callable[[Any], Any]] = {"fused_linear_cross_entropy": loss, "adamw": update}
