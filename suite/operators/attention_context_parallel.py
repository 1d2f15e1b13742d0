"""Attention of one sequence over several GPUs (context parallelism: Liu et al., arXiv 2310.01889, and after).

The sequence is cut into 2·P chunks for P ranks; rank r holds chunks r and 2·P - 1 - r, under a full mask as well,
so that a causal mask gives all ranks the same work. Sharding is outside of the clock. Of 512 k tokens and more the
answer is known for 4096 rows alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Sharding, exponentials_of
from .attention import OPERATOR as ATTENTION
from .attention import inputs as drawn  # by name: what a case's hash covers is functions
from .attention import reference as attention

if TYPE_CHECKING:
    import torch

SAMPLED_FROM = 1 << 19
"""Tokens from which on only a sample of rows is checked: all of them would take a GPU an hour in fp32."""
SAMPLED_ROWS = 4096


def length(case: Case) -> int:
    """Tokens of a chunk."""
    S, chunks = case.axes["S"], 2 * case.world
    if S % chunks:
        raise NotImplementedError(f"{S} tokens cannot be cut into {chunks} equal chunks for {case.world} ranks")
    return S // chunks


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, S, D) in the case's dtype and the mask's name."""
    length(case)
    if case.pass_ != "forward" and case.axes["S"] >= SAMPLED_FROM:
        raise NotImplementedError(f"no reference for gradients of {SAMPLED_FROM} tokens and more; forward only")
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
    """(B, H, rows, D) in fp64 arithmetic, a few rows of one head at a time."""
    import torch

    groups = q.shape[1] // k.shape[1]
    at = torch.tensor(rows, device=q.device)
    out = torch.empty(*q.shape[:2], len(rows), q.shape[3], dtype=q.dtype, device=q.device)
    places = torch.arange(q.shape[2], device=q.device)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[b, h // groups].double(), v[b, h // groups].double()
            for first in range(0, len(rows), 128):
                own = at[first : first + 128]
                scores = (q[b, h, own].double() * q.shape[3] ** -0.5) @ keys.T
                if mask == "causal":
                    scores.masked_fill_(places > own[:, None], float("-inf"))
                out[b, h, first : first + 128] = (scores.softmax(-1) @ values).to(q.dtype)
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
    sharding=Sharding(split=split, join=join, part=part),
    # The reference is shared now, and computes the same.
    continues={
        "294c6e1dcf9c": "6e222e3d80bd",
        "b1a0be4ee8ad": "9da70e4b3fe2",
        "6335963f800b": "50b982d322c0",
        "24de85b442b8": "a130c5255d1f",
        "a2db3fc136fc": "3d72f2f416e5",
        "94a08b86b83b": "932b6088243a",
    },
    plans={},
)
