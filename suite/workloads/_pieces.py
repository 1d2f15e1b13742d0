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
    """`fused_linear_cross_entropy` over some rows of x (M, D) at a time: the mean of the pieces' means, each by
    its rows. Logits are made again for the backward pass, which sums the weight's gradient where it lies.
    """
    import torch

    def split(x: Any, target: Any, weight: Any) -> Any:
        rows = max(1, PIECE // weight.shape[0])
        for some, wanted in zip(x.split(rows), target.split(rows), strict=True):
            yield some, wanted, len(some) / len(x)

    class Pieces(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, target: Any) -> Any:
            ctx.save_for_backward(x, weight, target)
            return sum(whole(some, weight, wanted) * share for some, wanted, share in split(x, target, weight))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight, target = ctx.saved_tensors
            of_x, of_weight = [], None
            for some, wanted, share in split(x, target, weight):
                own = some.detach().requires_grad_(), weight.detach().requires_grad_()
                with torch.enable_grad():
                    mean = whole(*own, wanted) * share
                first, second = torch.autograd.grad(mean, own, grad)
                of_x.append(first)
                of_weight = second if of_weight is None else of_weight.add_(second)
                del second, mean  # before the next one's is there: of a large vocabulary it is 2 GB
            return torch.cat(of_x), of_weight, None

    def pieces(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Pieces.apply(x, weight, target)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return found

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
