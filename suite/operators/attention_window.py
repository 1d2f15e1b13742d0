"""Attention within a sliding window (Beltagy et al., arXiv 2004.05150), with grouped key and value heads.

An operator of its own and no option of `attention`: a window is a size, which an axis can have at any value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

SCORES = 1 << 28
"""Scores that the reference holds at once."""
QUERIES = 1024
"""Queries of one piece of the reference, which reads no keys but those that some of them see."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, S, D), all in the case's dtype, the mask's name and the window."""
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    dtype = torch_dtype(case.dtype)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(B, heads, S, D, device=device, generator=generator, dtype=dtype)

    return {"q": draw(H), "k": draw(Hkv), "v": draw(Hkv), "mask": case.options["mask"], "window": case.axes["W"]}


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"], window: int
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v over the keys less than `window` places away, under a causal mask none after the query;
    query head h reads key head h // (H / Hkv).

    A piece of queries of a few heads at a time, whose scores are computed again for the backward pass.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    S = q.shape[2]
    groups = q.shape[1] // max(1, k.shape[1])
    q_heads, k_heads, v_heads = (
        x.flatten(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    )

    def piece(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        hidden = (distance.abs() >= window) | (
            distance < 0 if mask == "causal" else torch.zeros_like(distance, dtype=torch.bool)
        )
        scores = ((q * q.shape[-1] ** -0.5) @ k.mT).masked_fill_(hidden, float("-inf"))
        out: torch.Tensor = scores.softmax(-1) @ v
        return out

    columns = []
    for first in range(0, S, QUERIES):
        last = min(first + QUERIES, S)
        low, high = max(0, first - window + 1), last if mask == "causal" else min(S, last + window - 1)
        places = torch.arange(first, last, device=q.device)[:, None] - torch.arange(low, high, device=q.device)
        chunk = max(1, SCORES // places.numel())
        parts = zip(
            q_heads[:, first:last].split(chunk),
            k_heads[:, low:high].split(chunk),
            v_heads[:, low:high].split(chunk),
            strict=True,
        )
        columns.append(
            torch.cat(
                [checkpoint(piece, *part, places, use_reentrant=False, preserve_rng_state=False) for part in parts]
            )
        )
    return torch.cat(columns, 1).view(q.shape) if columns else q.clone()


def pairs(S: int, W: int, mask: str) -> int:
    """Pairs of a query and a key that it sees."""
    W = min(W, S)
    below = S * W - W * (W - 1) // 2
    return below if mask == "causal" else 2 * below - S


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and writes the output; backward reads q, k, v and the output's gradient and
    writes three gradients (the output itself can be computed again). A window hides pairs, never a key of all.
    """
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    queries, keys = {"forward": (2, 2), "backward": (3, 4), "forward_backward": (5, 6)}[case.pass_]
    return (queries * H + keys * Hkv) * B * S * D * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two matmuls forward and five backward (the scores are computed again), over the pairs that are visible."""
    B, H, S, D, W = (case.axes[axis] for axis in ("B", "H", "S", "D", "W"))
    matmuls = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    return matmuls * 2 * B * H * D * pairs(S, W, str(case.options["mask"]))


MASKS: dict[str, Option | list[Option]] = {"mask": ["causal", "full"]}


OPERATOR = Operator(
    name="attention_window",
    summary="Scaled dot-product attention within a sliding window, causal or full, with grouped heads",
    axes={
        "B": "batch",
        "H": "query heads",
        "Hkv": "key and value heads",
        "S": "sequence",
        "D": "head dimension",
        "W": "window: a query sees itself and the W - 1 keys before it, under a full mask also as many after it",
    },
    options={"mask": ("causal", "full")},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("q", "k", "v"),
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    fp32_reference=True,
    plans={
        "quick": (grid("forward", "backward", B=2, H=16, Hkv=16, S=8192, D=128, W=1024),),
        "quick_cpu": (grid("forward", B=1, H=4, Hkv=4, S=256, D=64, W=64, dtypes="fp32"),),
        "standard": (
            *(
                grid("forward", "backward", B=B, H=H, Hkv=H, S=S, D=D, W=1024)
                for H, D in ((32, 64), (16, 128))
                for B, S in ((2, 8192), (1, 16384))
            ),
            grid("forward", options={"mask": "full"}, B=2, H=16, Hkv=16, S=8192, D=128, W=1024),
            grid("forward", B=2, H=16, Hkv=4, S=8192, D=128, W=1024),
        ),
        "full": (
            grid("forward", "backward", options=MASKS, B=1, H=16, Hkv=16, S=16384, D=128, W=[256, 1000, 4096]),
            grid("forward", "backward", options=MASKS, B=2, H=16, Hkv=4, S=4095, D=128, W=1024),
            grid("forward", "backward", B=2, H=16, Hkv=16, S=8192, D=128, W=1024, dtypes="fp16"),
        ),
    },
)
