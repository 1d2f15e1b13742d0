"""Gates that choose blocks of attention, trained: each maps a block's mean query, or mean key, to a few features
whose product is the block's score.

A choice has no derivative, so a gate does not learn from a model's loss. It learns what dense attention does with
each block (SeerAttention, Gao et al., arXiv 2410.13276): the softmax of its scores over a row's blocks is to be
the weight that the row's queries give to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Queries, and keys, of a block."""
STEPS = 200
RATE = 0.02
"""Of Adam, falling to 0 by a cosine; a gate's elements are of the size of G^-1/2."""
TEMPERATURE = 4.0
"""Of the softmax on both sides. At 1 the few blocks that have most of a row's weight were all that is learned."""


def amount(D: int, device: str) -> tuple[int, int]:
    """Sequences, and tokens of each, that a gate of D dimensions is trained on: pairs of blocks are to be more
    than its parameters. A CPU gets fewer, as it would take minutes.
    """
    return (8, 2048) if D <= 32 or device == "cpu" else (16, 8192)


def started(Hkv: int, D: int, G: int, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A gate (Hkv, D, G) that knows nothing."""
    gate: torch.Tensor = draw(Hkv, D, G) * G**-0.5
    return gate


def both(gate: torch.Tensor, H: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_q (H, D, G) and gate_k (Hkv, D, G) of one gate (Hkv, D, G), which a key head and its queries share."""
    return gate.repeat_interleave(H // max(1, len(gate)), 0), gate


def pooled(x: torch.Tensor) -> torch.Tensor:
    """The mean of each block of tokens, the last one's over the tokens it has: (B, heads, n, D)."""
    import torch

    B, heads, S, D = x.shape
    across = -(-S // BLOCK)
    sums = torch.nn.functional.pad(x, (0, 0, 0, across * BLOCK - S)).view(B, heads, across, BLOCK, D).sum(3)
    sizes = torch.full((across, 1), float(BLOCK), dtype=x.dtype, device=x.device)
    if across:
        sizes[-1] = S - (across - 1) * BLOCK
    return sums / sizes


def weights(q: torch.Tensor, k: torch.Tensor, mask: str) -> torch.Tensor:
    """(B, H, n, n): the weight that dense attention gives to each block of keys, mean over a block's queries. The
    sum over a row is 1. A block of queries at a time.
    """
    import torch
    from torch.nn.functional import pad

    S = q.shape[2]
    k = k.repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1)
    rows = []
    for low in range(0, S, BLOCK):
        high = min(S, low + BLOCK)
        products = (q[:, :, low:high].float() * q.shape[-1] ** -0.5) @ k.float().mT
        if mask == "causal":
            hidden = torch.ones(high - low, S, dtype=torch.bool, device=q.device).triu_(low + 1)
            products = products.masked_fill(hidden, -torch.inf)
        of_row = products.softmax(-1).mean(2)
        rows.append(pad(of_row, (0, -S % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1))
    return torch.stack(rows, 2)


def gate_loss(
    gate_q: torch.Tensor,
    gate_k: torch.Tensor,
    mean_q: torch.Tensor,
    mean_k: torch.Tensor,
    target: torch.Tensor,
    mask: str,
) -> torch.Tensor:
    """The cross-entropy, mean over rows, of the gates' softmax over a row's blocks with its `weights` (B, H, n,
    n), both at `TEMPERATURE`. Differentiable in the gates.

    mean_q (B, H, n, D) and mean_k (B, Hkv, n, D) are `pooled`. A row's own block is left out on both sides: it is
    always chosen. So are rows that see no other.
    """
    import torch

    a, b = mean_q @ gate_q, mean_k @ gate_k
    n = target.shape[-1]
    hidden = torch.eye(n, dtype=torch.bool, device=target.device)
    if mask == "causal":
        hidden = hidden | torch.ones_like(hidden).triu_(1)
    given = ~hidden.all(-1)

    def levels(scores: torch.Tensor) -> torch.Tensor:
        hot = (scores / TEMPERATURE).masked_fill(hidden, -torch.inf)[..., given, :]
        return hot.log_softmax(-1)

    scores = (a @ b.repeat_interleave(a.shape[1] // b.shape[1], 1).mT) * mean_q.shape[-1] ** -0.5
    wanted = levels(target.clamp(min=1e-30).log()).exp()
    # 0 · -inf is NaN.
    return -(wanted * levels(scores).masked_fill(hidden[given], 0)).sum(-1).mean()


def trained(
    gate: torch.Tensor, seen: Sequence[tuple[torch.Tensor, torch.Tensor]], mask: str, steps: int = STEPS
) -> torch.Tensor:
    """A gate (Hkv, D, G) after so many steps of Adam, each on all of the queries (B, H, S, D) and keys (B, Hkv, S,
    D) that are given, of one length of more than one block.
    """
    import torch

    H = seen[0][0].shape[1]
    with torch.no_grad():
        target = torch.cat([weights(q, k, mask) for q, k in seen])
        mean_q, mean_k = (torch.cat([pooled(x[i].float()) for x in seen]) for i in (0, 1))
    with torch.enable_grad():
        leaf = gate.detach().float().clone().requires_grad_()
        optimizer = torch.optim.Adam([leaf], lr=RATE)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            gate_loss(*both(leaf, H), mean_q, mean_k, target, mask).backward()
            optimizer.step()
            falling.step()
    return leaf.detach()
