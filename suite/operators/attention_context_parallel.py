"""Attention of one sequence over several GPUs (context parallelism: Liu et al., arXiv 2310.01889, and after).

The sequence is cut into 2·P chunks for P ranks; rank r holds chunks r and 2·P - 1 - r, under a full mask as well,
so that a causal mask gives all ranks the same work. Sharding is outside of the clock.

Of 512 k tokens and more the answer is known for 4096 rows alone. Gradients are checked with a gradient of the
output that is zero in all other rows: that in q is then known for these rows, and those in k and v are sums over
these rows alone, and known for every key under either mask. Timed calls have a gradient of random numbers in every
row (`Sampled`). One row in 128 is checked of 512 k tokens, one in 512 of 2 M: what is wrong in others alone is not
seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Sampled, Sharding, exponentials_of
from .attention import OPERATOR as ATTENTION
from .attention import inputs as drawn  # by name: what a case's hash covers is functions
from .attention import reference as attention

if TYPE_CHECKING:
    import torch

SAMPLED_FROM = 1 << 19
"""Tokens from which on only a sample of rows is checked: all of them would take a GPU an hour in fp32."""
SAMPLED_ROWS = 4096


def known_in_part(case: Case) -> bool:
    """Whether only a sample of the answer is known."""
    return case.axes["S"] >= SAMPLED_FROM


def length(case: Case) -> int:
    """Tokens of a chunk."""
    S, chunks = case.axes["S"], 2 * case.world
    if S % chunks:
        raise NotImplementedError(f"{S} tokens cannot be cut into {chunks} equal chunks for {case.world} ranks")
    return S // chunks


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, S, D) in the case's dtype and the mask's name."""
    length(case)
    if case.pass_ == "backward" and known_in_part(case):
        raise NotImplementedError(f"of {SAMPLED_FROM} tokens and more forward, or forward and backward in one")
    return drawn(case, device, generator)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    """One process's attention; of a long sequence in `sampled` rows only."""
    if q.shape[2] < SAMPLED_FROM:
        return attention(q, k, v, mask)
    return _rows(q, k, v, mask, sampled(q.shape[2]))


def sampled(S: int) -> list[int]:
    """Rows that are checked: spread evenly, at odd places, the first and the last among them."""
    step = S // SAMPLED_ROWS
    return [i * step + (i * 7919) % step for i in range(SAMPLED_ROWS - 1)] + [S - 1]


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, rows: list[int]) -> torch.Tensor:
    """(B, H, rows, D) in fp64 arithmetic, a few rows of one head at a time, whose scores are computed again for
    the backward pass and never kept.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    groups = q.shape[1] // k.shape[1]
    at = torch.tensor(rows, device=q.device)
    places = torch.arange(q.shape[2], device=q.device)

    def piece(some: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        scores = (some.double() * q.shape[3] ** -0.5) @ keys.double().T
        if mask == "causal":
            scores = scores.masked_fill_(places > own[:, None], float("-inf"))
        found: torch.Tensor = (scores.softmax(-1) @ values.double()).to(q.dtype)
        return found

    # By heads once: gradients of each come together once, too.
    queries = q[:, :, at].flatten(0, 1).unbind(0)
    keys, values = (x.flatten(0, 1).unbind(0) for x in (k, v))
    heads = []
    for head, some in enumerate(queries):
        of = keys[head // groups], values[head // groups]
        pieces = zip(some.split(128), at.split(128), strict=True)
        heads.append(torch.cat([checkpoint(piece, x, *of, own, use_reentrant=False) for x, own in pieces]))
    out: torch.Tensor = torch.stack(heads).unflatten(0, q.shape[:2])
    return out


def split(whole: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's two chunks of (B, H, S, D)."""
    import torch

    chunks = whole.split(length(case), 2)
    return torch.cat((chunks[rank], chunks[2 * case.world - 1 - rank]), 2)


def join(parts: list[torch.Tensor], case: Case) -> torch.Tensor:
    """(B, H, S, D) of all ranks' chunks."""
    import torch

    halves = [x.split(length(case), 2) for x in parts]
    return torch.cat([x[0] for x in halves] + [x[1] for x in reversed(halves)], 2)


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """What a rank returns, of all rows or of those sampled."""
    if answer.shape[2] == case.axes["S"]:
        return split(answer, case, rank)
    S = case.axes["S"]
    return answer[:, :, [i for i, row in enumerate(sampled(S)) if _local(row, S, case.world, rank) is not None]]


def results(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Of a rank's output the rows that are checked."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    S = inputs["q"].shape[2] * world
    if S < SAMPLED_FROM:
        return result
    return result[:, :, local_rows(S, world, rank)]


def local_rows(S: int, world: int, rank: int) -> list[int]:
    """Where the rows that are checked lie in a rank's output."""
    places = (_local(row, S, world, rank) for row in sampled(S))
    return [x for x in places if x is not None]


def _local(row: int, S: int, world: int, rank: int) -> int | None:
    """A row's place in a rank's two chunks; None where it is another's."""
    size = S // (2 * world)
    chunk, place = divmod(row, size)
    return {rank: place, 2 * world - 1 - rank: size + place}.get(chunk)


def in_place(gradient: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's gradient of the output: that of the rows that are checked, (B, H, rows, D), and zeros."""
    B, H, _, D = gradient.shape
    own = gradient.new_zeros(B, H, 2 * length(case), D)
    own[:, :, local_rows(case.axes["S"], case.world, rank)] = part(gradient, case, rank)
    return own


def checked_rows(own: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """Of a rank's output, or of its gradient in q, the rows that are checked."""
    return own[:, :, local_rows(case.axes["S"], case.world, rank)]


def bytes_(case: Case) -> int:
    """Of each GPU: its own q and output, and all of k and v; backward their gradients as well."""
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    queries, keys = {"forward": (2, 2), "backward": (3, 4), "forward_backward": (5, 6)}[case.pass_]
    return (queries * H // case.world + keys * Hkv) * B * S * D * BYTES[case.dtype]


def flops(case: Case) -> int:
    """A GPU's share of attention's."""
    return ATTENTION.flops(case) // case.world


OPERATOR = replace(
    ATTENTION,
    name="attention_context_parallel",
    summary="Attention of one sequence over several GPUs",
    axes={name: meaning for name, meaning in ATTENTION.axes.items() if name != "Sk"},
    options={"mask": ATTENTION.options["mask"]},
    later={},
    variations={},
    gradients=("q", "k", "v"),
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=bytes_,
    flops=flops,
    exponentials=exponentials_of(flops),
    forms=("ring",),
    each=False,
    sampled=Sampled(of=known_in_part, lay=in_place, rows=checked_rows, like_output=("q",)),
    sharding=Sharding(split=split, join=join, part=part),
    # The reference is shared now, and keeps no scores; it computes the same.
    continues={
        "ed27930e1ba1": "6e222e3d80bd",
        "623eb1b8c50d": "9da70e4b3fe2",
        "9c8ab3f14c3e": "50b982d322c0",
        "c71047feda18": "a130c5255d1f",
        "c726c44d001c": "3d72f2f416e5",
        "ab58a1765bbd": "932b6088243a",
    },
    plans={},
)
