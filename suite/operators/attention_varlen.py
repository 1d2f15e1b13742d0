"""Attention over packed sequences of different lengths, as they are trained on and served without padding.

The interface is FlashAttention's (Dao, arXiv 2307.08691): tokens of all sequences one behind the other, and where
each sequence starts. With equal lengths it is the same work as a case of `attention` of the same axes, which
counts the same operations: the two can be divided.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, exponentials_of, grid, torch_dtype

if TYPE_CHECKING:
    import torch

SCORES = 1 << 28
"""Scores (elements of S×S) that the reference holds at once: one head at S = 16384."""

SHORTEST = {"uniform": 8, "long_tail": 64}
"""S by the shortest length that is drawn."""


def lengths_of(case: Case) -> list[int]:
    """Tokens by sequence, the same whenever a case of these axes is built.

    equal: all S. uniform: evenly from S/8 to S. long_tail: from S/64 to S, the density falling with the square of
    the length, so that few sequences have most of the tokens, as documents do. Each of the B equal parts of a
    distribution gives one length, in shuffled order: the sum hardly depends on luck.
    """
    B, S = case.axes["B"], case.axes["S"]
    kind = str(case.options["lengths"])
    if kind == "equal":
        return [S] * B
    drawn = random.Random(f"{kind} {B} {S}")
    low = S / SHORTEST[kind]
    lengths = []
    for part in range(B):
        share = (part + drawn.random()) / B
        length = low + share * (S - low) if kind == "uniform" else low / (1 - share * (1 - low / max(1, S)))
        lengths.append(min(S, max(min(1, S), round(length))))
    return sorted(lengths, key=lambda _: drawn.random())


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (T, H, D), k and v (T, Hkv, D) with T the sum of lengths; where sequences start, (B + 1,) int32, for
    queries and for keys; the longest of them, and the mask's name.
    """
    import torch

    H, Hkv, D = (case.axes[axis] for axis in ("H", "Hkv", "D"))
    lengths = lengths_of(case)
    dtype = torch_dtype(case.dtype)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, D, device=device, generator=generator, dtype=dtype)

    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    longest = max(lengths, default=0)
    return {
        "q": draw(H),
        "k": draw(Hkv),
        "v": draw(Hkv),
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts.clone(),
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "mask": case.options["mask"],
    }


def packed(inputs: Inputs, case: Case) -> Inputs:
    """The same numbers as views of one projection (T, (H + 2 Hkv) · D)."""
    import torch

    names = ("q", "k", "v")
    whole = torch.cat([inputs[x] for x in names], 1)
    return inputs | dict(zip(names, whole.split([inputs[x].shape[1] for x in names], 1), strict=True))


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Literal["causal", "full"],
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v, one sequence and a few heads at a time; query head h reads key head h // (H / Hkv).

    A causal mask is aligned to the end: of Lq queries and Lk keys, query i sees the keys up to i + Lk − Lq, and
    one that sees none gives zeros. Scores are computed again for the backward pass and never kept.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        blind = hidden.all(-1, keepdim=True)
        # Of a row that sees nothing softmax would be NaN, and so would every gradient.
        weights = scores.masked_fill(hidden & ~blind, float("-inf")).softmax(-1).masked_fill(blind, 0)
        out: torch.Tensor = weights @ v
        return out

    mine, others = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    outputs = []
    for part in zip(q.split(mine), k.split(others), v.split(others), strict=True):
        length, keys = part[0].shape[0], part[1].shape[0]
        hidden = torch.zeros(length, keys, dtype=torch.bool, device=q.device)
        if mask == "causal":
            hidden = torch.ones_like(hidden).triu(keys - length + 1)
        flat = [x.transpose(0, 1).repeat_interleave(q.shape[1] // max(1, x.shape[1]), 0) for x in part]
        chunk = max(1, SCORES // max(1, length * keys))
        done = [
            checkpoint(heads, *some, hidden, use_reentrant=False, preserve_rng_state=False)
            for some in zip(*(x.split(chunk) for x in flat), strict=True)
        ]
        outputs.append(torch.cat(done).transpose(0, 1))
    return torch.cat(outputs) if outputs else torch.zeros_like(q)


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and writes the output; backward reads q, k, v and the output's gradient and writes
    three gradients (the output itself can be computed again). Both read where sequences start.
    """
    B, H, Hkv, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "D"))
    queries, keys = {"forward": (2, 2), "backward": (3, 4), "forward_backward": (5, 6)}[case.pass_]
    passes = 2 if case.pass_ == "forward_backward" else 1
    return (queries * H + keys * Hkv) * sum(lengths_of(case)) * D * BYTES[case.dtype] + passes * 8 * (B + 1)


def flops(case: Case) -> int:
    """Two matmuls forward and five backward (the scores are computed again) of each sequence with itself; causal
    needs half of each.
    """
    H, D = case.axes["H"], case.axes["D"]
    matmuls = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    pairs = sum(length * length for length in lengths_of(case))
    return matmuls * 2 * H * D * pairs // (2 if case.options["mask"] == "causal" else 1)


MODELS = ((32, 64), (16, 128))
"""(H, D): a model dimension of 2048, as in the large cases of `attention`."""
EQUAL = ((8, 2048), (2, 8192))
"""(B, S) of equal lengths, which `attention` has too: 16384 tokens each."""
UNEVEN = (({"lengths": "uniform"}, 16, 2048), ({"lengths": "long_tail"}, 64, 8192))
"""Lengths, B and S: about 18000 tokens of sequences much alike, and 34000 of a few long ones and many short."""
MASKS: dict[str, Option | list[Option]] = {"mask": ["causal", "full"]}

# Not a function: plans are no part of what the operator's `spec` covers, functions are.
STANDARD = (
    *(
        x
        for H, D in MODELS
        for B, S in EQUAL
        for x in (
            grid("forward", options=MASKS, B=B, H=H, Hkv=H, S=S, D=D),
            grid("forward", B=B, H=H, Hkv=H // 4, S=S, D=D),
            grid("backward", B=B, H=H, Hkv=H, S=S, D=D),
        )
    ),
    *(grid("backward", B=2, H=H, Hkv=H // 4, S=8192, D=D) for H, D in MODELS),
    *(
        x
        for H, D in MODELS
        for options, B, S in UNEVEN
        for x in (
            grid("forward", options=dict(options), B=B, H=H, Hkv=[H, H // 4], S=S, D=D),
            grid("backward", options=dict(options), B=B, H=H, Hkv=H, S=S, D=D),
        )
    ),
)

OPERATOR = Operator(
    name="attention_varlen",
    summary="Attention over packed sequences of different lengths, causal or full, with grouped heads",
    axes={
        "B": "sequences",
        "H": "query heads",
        "Hkv": "key and value heads",
        "S": "tokens that the longest sequence may have",
        "D": "head dimension",
    },
    options={
        "mask": ("causal", "full"),
        "lengths": ("equal", "uniform", "long_tail"),
        # Packed: views of one projection.
        "storage": ("thd", "packed"),
    },
    later={"storage": "thd"},
    variations={("storage", "packed"): packed},
    stored_as="q",
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    exponentials=exponentials_of(flops),
    tokens=lambda case: sum(lengths_of(case)),
    gradients=("q", "k", "v"),
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    fp32_reference=True,
    plans={
        "quick": (
            grid("forward", "backward", options={"lengths": "uniform"}, B=8, H=16, Hkv=16, S=2048, D=128),
        ),
        "quick_cpu": (
            grid("forward", options={"lengths": "uniform"}, B=4, H=4, Hkv=4, S=256, D=64, dtypes="fp32"),
        ),
        "standard": STANDARD,
        "full": (
            grid(
                "forward", "backward", dtypes="fp16", options=MASKS | {"lengths": ["uniform", "long_tail"]},
                B=32, H=16, Hkv=[16, 4], S=4096, D=128,
            ),
            grid(
                "forward", "backward", options=MASKS | {"lengths": "uniform"}, B=16, H=16, Hkv=16, S=2048,
                D=[96, 256],
            ),
            grid("forward", options={"lengths": "long_tail"}, B=512, H=16, Hkv=4, S=4096, D=128),
        ),
    },
)  # fmt: skip
