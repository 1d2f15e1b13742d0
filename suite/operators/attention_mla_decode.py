"""Multi-head latent attention of new tokens to a paged cache of latent vectors (DeepSeek-V2, arXiv 2405.04434).

The projections of keys and values are absorbed into those of queries and outputs: all heads read one vector a
token, of C latent and R rotary dimensions, whose latent part is the value too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid, torch_dtype
from ._attention import newest
from .attention_decode import lengths_of

if TYPE_CHECKING:
    import torch

BEFORE = 192
"""Dimensions of a head before absorption, by whose root scores are divided: 128 and 64 rotary ones."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, Sq, H, C + R), cache (pages, page, C + R), block_table (B, ⌈S / page⌉) int32, which gives each
    sequence its pages, scattered over the cache, lengths (B,) int32, how many of the columns are latent, and the
    scale. In the newest tokens, and in the place behind them, the middle one of the latent columns is large;
    queries have 0 there.
    """
    import torch

    B, Sq, H, S, C, R = (case.axes[axis] for axis in ("B", "Sq", "H", "S", "C", "R"))
    page = int(case.options["page"])
    dtype = torch_dtype(case.dtype)
    across = -(-S // page)
    places = torch.randperm(B * across, device=device, generator=generator, dtype=torch.int32)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype)

    q, cache, table = draw(B, Sq, H, C + R), draw(B * across, page, C + R), places.view(B, across)
    lengths = torch.tensor(lengths_of(case), dtype=torch.int32, device=device)
    # Keys and values are one: what is large is a column that queries do not see, so that it moves no weight. It is
    # half of the answer's norm at most.
    q[..., C // 2] = 0
    pages, rows = newest(cache, table, lengths, Sq)
    cache[pages, rows, C // 2] = ((lengths * C).float().sqrt() / 2).to(dtype)[:, None]
    return {
        "q": q,
        "cache": cache,
        "block_table": table,
        "lengths": lengths,
        "latent": C,
        "scale": BEFORE**-0.5,
    }


def reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """softmax(q·cacheᵀ · scale)·cache[:, :C], one sequence at a time: (B, Sq, H, C).

    The new tokens are the last of their sequence: token i of Sq sees the first length − Sq + i + 1.
    """
    import torch

    Sq = q.shape[1]
    outputs = []
    for b, length in enumerate(lengths.tolist()):
        seen = cache[block_table[b].long()].flatten(0, 1)[:length]
        scores = torch.einsum("qhd,kd->hqk", q[b] * scale, seen)
        hidden = torch.ones(Sq, length, dtype=torch.bool, device=q.device).triu(length - Sq + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,kd->qhd", weights, seen[:, :latent]))
    return torch.stack(outputs) if outputs else q.new_zeros(*q.shape[:3], latent)


def bytes_(case: Case) -> int:
    """Reads the queries, every vector in the cache once and the tables; writes the output."""
    B, Sq, H, S, C, R = (case.axes[axis] for axis in ("B", "Sq", "H", "S", "C", "R"))
    elements = B * Sq * H * (2 * C + R) + sum(lengths_of(case)) * (C + R)
    return elements * BYTES[case.dtype] + 4 * B * (1 + -(-S // int(case.options["page"])))


def flops(case: Case) -> int:
    """Two products of every query with every vector; the few that the last tokens hide are counted."""
    Sq, H, C, R = (case.axes[axis] for axis in ("Sq", "H", "C", "R"))
    return 2 * Sq * H * (2 * C + R) * sum(lengths_of(case))


PAGED: dict[str, Option | list[Option]] = {"page": 64}

OPERATOR = Operator(
    name="attention_mla_decode",
    summary="Latent attention of new tokens to a paged cache of one vector a token",
    axes={
        "B": "sequences",
        "Sq": "new tokens a sequence",
        "H": "query heads",
        "S": "tokens of the longest sequence",
        "C": "latent dimensions, which are the values too",
        "R": "rotary dimensions",
    },
    options={"page": (64, 16, 32, 128), "lengths": ("equal", "mixed")},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["Sq"],
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    # A column of the newest tokens became large, and 0 in queries: nothing else is drawn or computed.
    continues={
        "291fefd52b2b": "ff7a75bc649e",
        "f59bbd3b31d2": "559d1d3afd6b",
        "5bb7340ac491": "50eb2ffaeb8a",
    },
    plans={
        "quick": (grid("forward", options=PAGED, B=16, Sq=1, H=128, S=4096, C=512, R=64),),
        "quick_cpu": (grid("forward", options=PAGED, B=2, Sq=1, H=16, S=256, C=512, R=64, dtypes="fp32"),),
        "standard": (
            grid("forward", options=PAGED, B=128, Sq=1, H=128, S=4096, C=512, R=64),
            grid("forward", options=PAGED | {"lengths": "mixed"}, B=64, Sq=1, H=128, S=8192, C=512, R=64),
            grid("forward", options=PAGED, B=32, Sq=2, H=128, S=4096, C=512, R=64),
            # A share of the heads, as with eight GPUs.
            grid("forward", options=PAGED, B=64, Sq=1, H=16, S=4096, C=512, R=64),
            grid("forward", options=PAGED, B=1, Sq=1, H=128, S=[1024, 131072], C=512, R=64),
        ),
        "full": (
            grid("forward", options=PAGED, B=[8, 64], Sq=1, H=128, S=[1000, 8192], C=512, R=64, dtypes="fp16"),
        ),
    },
)
