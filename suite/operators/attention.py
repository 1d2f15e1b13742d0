"""Scaled dot-product attention (Vaswani et al., arXiv 1706.03762), with grouped key and value heads
(Ainslie et al., arXiv 2305.13245).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, exponentials_of, grid, torch_dtype
from ._attention import PLAIN, VARIANTS, attended, variations

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, Sk, D), all in the case's dtype, and the mask's name."""
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    Sk = keys(case)
    dtype = torch_dtype(case.dtype)

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(B, heads, length, D, device=device, generator=generator, dtype=dtype)

    return {"q": draw(H, S), "k": draw(Hkv, Sk), "v": draw(Hkv, Sk), "mask": case.options["mask"]}


def keys(case: Case) -> int:
    """Keys of a sequence."""
    return case.axes.get("Sk") or case.axes["S"]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v; query head h reads key head h // (H / Hkv); the last query and key in one place."""
    return attended(q, k, v, mask, 0, sinks, cap)


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and writes the output; backward reads q, k, v and the output's gradient and
    writes three gradients (the output itself can be computed again).
    """
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    of_q, of_k = {"forward": (2, 2), "backward": (3, 4), "forward_backward": (5, 6)}[case.pass_]
    return (of_q * H * S + of_k * Hkv * keys(case)) * B * D * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two matmuls forward and five backward (the scores are computed again) over the pairs that are visible; of as
    many queries as keys a causal mask leaves half.
    """
    B, H, S, D = (case.axes[axis] for axis in ("B", "H", "S", "D"))
    Sk = keys(case)
    matmuls = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    seen = S * Sk
    if case.options["mask"] == "causal":
        seen = S * S // 2 + S * (Sk - S) if Sk >= S else Sk * Sk // 2
    return matmuls * 2 * B * H * seen * D


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
    axes={
        "B": "batch",
        "H": "query heads",
        "Hkv": "key and value heads",
        "S": "sequence",
        "D": "head dimension",
        "Sk": "keys of a sequence, the last in the last query's place; 0: as many as queries",
    },
    options={"mask": ("causal", "full"), **VARIANTS},
    later={"Sk": 0, **PLAIN},
    variations=variations(),
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    exponentials=exponentials_of(flops),
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("q", "k", "v", "sinks"),
    stored_as="q",
    each=True,
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    fp32_reference=True,
    # The reference is shared now, and computes the same.
    continues={
        "8a68a9981d02": "b4360efa4d67",
        "0c11145d9d84": "58d2583ad61e",
        "90948aa1761a": "0555bf8ee244",
        "95f9e8b95e87": "3328e483b044",
        "f4ac923f8d06": "238fe0ba5661",
        "b4f5f6820537": "24d17b60314c",
    },
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
