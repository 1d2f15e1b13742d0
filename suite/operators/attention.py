"""Scaled dot-product attention (Vaswani et al., arXiv 1706.03762), with grouped key and value heads
(Ainslie et al., arXiv 2305.13245).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

SCORES = 1 << 28
"""Scores (elements of S×S) that the reference holds at once: one head at S = 16384, 2048 queries at S = 131072."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, S, D), all in the case's dtype, and the mask's name."""
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    dtype = torch_dtype(case.dtype)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(B, heads, S, D, device=device, generator=generator, dtype=dtype)

    return {"q": draw(H), "k": draw(Hkv), "v": draw(Hkv), "mask": case.options["mask"]}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v; query head h reads key head h // (H / Hkv).

    A few heads at a time, and of one head, where that is long, some queries: their scores are computed again for
    the backward pass and never kept. At S = 16384 all of them together would be 1 GiB a head in fp32.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    S, D = q.shape[2:]

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
        """Of queries from `first` on, with all keys up to the last that any of them sees."""
        scores = (q * D**-0.5) @ k.mT
        if mask == "causal":
            own, other = (torch.arange(x.shape[1], device=x.device) for x in (q, k))
            scores = scores.masked_fill_(other > own[:, None] + first, float("-inf"))
        out: torch.Tensor = scores.softmax(-1) @ v
        return out

    groups = q.shape[1] // max(1, k.shape[1])
    heads = max(1, SCORES // max(1, S * S))
    queries = max(1, SCORES // max(1, S))
    flat = [x.flatten(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))]
    parts = []
    for own, keys, values in zip(*(x.split(heads) for x in flat), strict=True):
        blocks = []
        for first in range(0, max(1, S), queries):
            rows = own[:, first : first + queries]
            seen = first + rows.shape[1] if mask == "causal" else S
            given = rows, keys[:, :seen], values[:, :seen], first
            blocks.append(checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False))
        parts.append(torch.cat(blocks, 1))
    return torch.cat(parts).view(q.shape)


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and writes the output; backward reads q, k, v and the output's gradient and
    writes three gradients (the output itself can be computed again).
    """
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    queries, keys = {"forward": (2, 2), "backward": (3, 4), "forward_backward": (5, 6)}[case.pass_]
    return (queries * H + keys * Hkv) * B * S * D * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two matmuls forward and five backward (the scores are computed again); causal needs half of each."""
    B, H, S, D = (case.axes[axis] for axis in ("B", "H", "S", "D"))
    matmuls = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    return matmuls * 2 * B * H * S * S * D // (2 if case.options["mask"] == "causal" else 1)


LARGE = ((8, 2048), (4, 4096), (2, 8192), (1, 16384))
"""(B, S) of the large cases: 16384 tokens each."""
MODELS = ((32, 64), (16, 128))
"""(H, D) of the large cases: a model dimension of 2048."""
MASKS: dict[str, Option | list[Option]] = {"mask": ["causal", "full"]}


# Not a function: plans are no part of what the operator's `spec` covers, functions are.
STANDARD = (
    # Tiny sequences, where a launch is all there is.
    grid("forward", options=MASKS, B=1, H=1, Hkv=1, S=[32, 64, 128, 256, 512], D=64),
    grid("forward", options=MASKS, B=2, H=4, Hkv=[4, 1], S=128, D=64),
    # 16384 tokens at four lengths.
    *(
        x
        for H, D in MODELS
        for B, S in LARGE
        for x in (
            grid("forward", options=MASKS, B=B, H=H, Hkv=[H, H // 4], S=S, D=D),
            grid("backward", options=MASKS, B=B, H=H, Hkv=H, S=S, D=D),
        )
    ),
    *(grid("backward", B=2, H=H, Hkv=H // 4, S=8192, D=D) for H, D in MODELS),
)


OPERATOR = Operator(
    name="attention",
    summary="Scaled dot-product attention, causal or full, with grouped key and value heads",
    axes={"B": "batch", "H": "query heads", "Hkv": "key and value heads", "S": "sequence", "D": "head dimension"},
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
        "quick": (
            grid("forward", "backward", B=2, H=16, Hkv=16, S=2048, D=128),
            grid("forward", B=2, H=4, Hkv=4, S=128, D=64),
        ),
        "quick_cpu": (grid("forward", B=1, H=4, Hkv=4, S=256, D=64, dtypes="fp32"),),
        "standard": STANDARD,
        "full": (
            grid("forward", "backward", dtypes="fp16", options=MASKS, B=2, H=16, Hkv=[16, 4], S=8192, D=128),
            grid("forward", "backward", options=MASKS, B=2, H=16, Hkv=16, S=4096, D=[96, 256]),
            grid("forward", "backward", options=MASKS, B=4, H=16, Hkv=[16, 4], S=[1000, 4095], D=128),
            grid("forward", "backward", options=MASKS, B=4, H=32, Hkv=32, S=[1000, 4095], D=64),
        ),
    },
)
