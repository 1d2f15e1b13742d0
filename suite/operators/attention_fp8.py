"""Scaled dot-product attention of 8-bit floats (E4M3) with a scale for each head, forward only (FlashAttention-3,
Shah et al., arXiv 2407.08608, §3.3).

The inputs are 8-bit floats: quantizing them is outside of what is timed, as in a model whose projections write
them so.

Two errors say what E4M3 costs, here on numbers drawn from a normal distribution. A row of a journal has the error
against exact attention of the same 8-bit inputs, which is the kernel's own, since it rounds the softmax's weights
to E4M3 as well: 0.022 to 0.026, whatever S is. Against attention of the numbers before they were quantized it is
0.051 to 0.055, of which any implementation has the inputs' 0.045 to 0.049.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, exponentials_of, grid

if TYPE_CHECKING:
    import torch

SCORES = 1 << 28
"""Scores (elements of S×S) that the reference holds at once: one head at S = 16384."""

LARGEST = 448.0
"""E4M3's largest number."""

TOLERANCE = Tolerance(norm=0.035, absolute=0.3, relative=0.07)
"""For weights rounded to nearest, with some room for sums of 14 bits. The worst of 500 000 elements was 0.11 of
its row's size beyond the relative part, 0.17 where weights are at most 1 when rounded. Truncated weights and
weights in E5M2 fail."""


def original(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, S, D) in bf16: what `inputs` quantizes when it gets the same generator."""
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    return {
        name: torch.randn(B, heads, S, D, device=device, generator=generator, dtype=torch.bfloat16)
        for name, heads in (("q", H), ("k", Hkv), ("v", Hkv))
    }


def quantized(x: torch.Tensor, groups: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, H, S, D) in E4M3 and the scales (B, H), fp32: the largest number of `groups` heads at 448."""
    import torch

    B, H, S, D = x.shape
    if x.numel() == 0:
        return x.to(torch.float8_e4m3fn), torch.ones(B, H, device=x.device)
    largest = x.abs().view(B, H // groups, groups * S * D).amax(-1).float().clamp(min=1e-30)
    scale = (largest / LARGEST).repeat_interleave(groups, 1)
    return (x.float() / scale[..., None, None]).to(torch.float8_e4m3fn), scale


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q, k and v in E4M3, their scales (B, H) and (B, Hkv) in fp32, and the mask's name.

    Query heads that share a key head share a scale: FlashAttention-3 takes no other. With v_layout "colmajor" the
    contiguous dimension of v is the sequence.
    """
    given: Inputs = {}
    scales: Inputs = {}
    groups = {"q": case.axes["H"] // max(1, case.axes["Hkv"])}
    for name, x in original(case, device, generator).items():
        given[name], scales[f"{name}_scale"] = quantized(x, groups.get(name, 1))
    if case.options["v_layout"] == "colmajor":
        given["v"] = given["v"].mT.contiguous().mT
    return given | scales | {"mask": case.options["mask"]}


def evened(out: torch.Tensor, mask: str) -> torch.Tensor:
    """Rows of a causal output times the root of how many keys they see.

    A mean over n keys drawn at random is 1/√n large. So multiplied all rows have the same size, and a tolerance
    means the same for the first and the last.
    """
    import torch

    if mask != "causal":
        return out
    return out * torch.arange(1, out.shape[2] + 1, device=out.device, dtype=out.dtype).sqrt()[:, None]


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v, a few heads at a time; query head h reads key head h // (H / Hkv)."""
    import torch

    S = q.shape[2]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu_(1) if mask == "causal" else None
    groups = q.shape[1] // max(1, k.shape[1])
    chunk = max(1, SCORES // max(1, S * S))
    parts = []
    flat = [x.flatten(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))]
    for queries, keys, values in zip(*(x.split(chunk) for x in flat), strict=True):
        scores = (queries * q.shape[-1] ** -0.5) @ keys.mT
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts).view(q.shape)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    mask: Literal["causal", "full"],
) -> torch.Tensor:
    """Exact attention of the quantized inputs, its rows evened."""
    q, k, v = (x * scale[..., None, None] for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale)))
    return evened(attended(q, k, v, mask), mask)


def results(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The output in fp32, its rows evened; the wrong shape or dtype becomes NaN, which is wrong."""
    import torch

    if result.shape != inputs["q"].shape or result.dtype != torch.bfloat16:
        return torch.full(inputs["q"].shape, torch.nan, device=inputs["q"].device)
    return evened(result.float(), inputs["mask"])


def bytes_(case: Case) -> int:
    """Reads q, k, v, a byte each, and the scales; writes the output in bf16."""
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    return B * S * D * ((H + 2 * Hkv) * BYTES[case.dtype] + H * BYTES["bf16"]) + B * (H + 2 * Hkv) * BYTES["fp32"]


def flops(case: Case) -> int:
    """Two matmuls; causal needs half of each."""
    B, H, S, D = (case.axes[axis] for axis in ("B", "H", "S", "D"))
    return 4 * B * H * S * S * D // (2 if case.options["mask"] == "causal" else 1)


LARGE = ((8, 2048), (4, 4096), (2, 8192), (1, 16384))
"""(B, S) of the large cases: 16384 tokens each."""
MODELS = ((32, 64), (16, 128))
"""(H, D) of the large cases: a model dimension of 2048."""
MASKS: dict[str, Option | list[Option]] = {"mask": ["causal", "full"]}
LAYOUTS: dict[str, Option | list[Option]] = {"v_layout": ["rowmajor", "colmajor"]}

# Not a function: plans are no part of what the operator's `spec` covers, functions are.
STANDARD = (
    *(
        grid("forward", dtypes="e4m3", options=MASKS, B=B, H=H, Hkv=H, S=S, D=D)
        for H, D in MODELS
        for B, S in LARGE
    ),
    *(
        x
        for H, D in MODELS
        for x in (
            grid("forward", dtypes="e4m3", options=MASKS | {"v_layout": "colmajor"}, B=2, H=H, Hkv=H, S=8192, D=D),
            grid("forward", dtypes="e4m3", B=2, H=H, Hkv=H // 4, S=8192, D=D),
        )
    ),
)

OPERATOR = Operator(
    name="attention_fp8",
    summary="Scaled dot-product attention of E4M3 inputs with a scale for each head, forward",
    axes={"B": "batch", "H": "query heads", "Hkv": "key and value heads", "S": "sequence", "D": "head dimension"},
    options={"mask": ("causal", "full"), "v_layout": ("rowmajor", "colmajor")},
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=bytes_,
    flops=flops,
    exponentials=exponentials_of(flops),
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    dtypes=("e4m3",),
    tolerances={"e4m3": TOLERANCE},
    fp32_reference=True,
    plans={
        "quick": (grid("forward", dtypes="e4m3", B=2, H=16, Hkv=16, S=2048, D=128),),
        "quick_cpu": (grid("forward", dtypes="e4m3", B=1, H=4, Hkv=4, S=256, D=64),),
        "standard": STANDARD,
        "full": (
            grid("forward", dtypes="e4m3", options=MASKS | LAYOUTS, B=2, H=16, Hkv=4, S=[1000, 4096], D=[96, 256]),
            grid("forward", dtypes="e4m3", options=MASKS | LAYOUTS, B=4, H=16, Hkv=16, S=[128, 4095], D=128),
        ),
    },
)
