"""Attention within a sliding window (Beltagy et al., arXiv 2004.05150), with grouped key and value heads.

An operator of its own and no option of `attention`: a window is a size, which an axis can have at any value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, exponentials_of, grid, torch_dtype
from ._attention import PLAIN, VARIANTS, attended, variations, visible

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, Sk, D), all in the case's dtype, the mask's name and the window."""
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    dtype = torch_dtype(case.dtype)

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(B, heads, length, D, device=device, generator=generator, dtype=dtype)

    Sk = keys(case)
    given: Inputs = {"q": draw(H, S), "k": draw(Hkv, Sk), "v": draw(Hkv, Sk)}
    return given | {"mask": case.options["mask"], "window": case.axes["W"]}


def keys(case: Case) -> int:
    """Keys of a sequence."""
    return case.axes.get("Sk") or case.axes["S"]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    window: int,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v over the keys less than `window` places away, under a causal mask none after the query;
    query head h reads key head h // (H / Hkv); the last query and the last key are in one place.
    """
    return attended(q, k, v, mask, window, sinks, cap)


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and writes the output; backward reads q, k, v and the output's gradient and
    writes three gradients (the output itself can be computed again). Keys that the window hides from all queries,
    which there are where there are more keys, need not be read; their gradients are written.
    """
    B, H, Hkv, S, D, W = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D", "W"))
    Sk = keys(case)
    of_q, read, written = {"forward": (2, 2, 0), "backward": (3, 2, 2), "forward_backward": (5, 4, 2)}[case.pass_]
    seen = min(Sk, S + W - 1)
    return (of_q * H * S + (read * seen + written * Sk) * Hkv) * B * D * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two matmuls forward and five backward (the scores are computed again), over the pairs that are visible."""
    B, H, S, D, W = (case.axes[axis] for axis in ("B", "H", "S", "D", "W"))
    matmuls = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    return matmuls * 2 * B * H * D * visible(S, keys(case), str(case.options["mask"]), W)


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
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    fp32_reference=True,
    # More keys than queries came later, and nothing else changed: of the cases that plans have.
    continues={
        "1294bd9970d8": "d032e0cf078b",
        "21d02eb24cca": "347f7c4a0278",
        "241b66d2169b": "19b91ecc9c43",
        "2aa1ae21edd5": "271a775940e4",
        "5a27102c08d7": "41da062dd981",
        "603112a66b56": "38331db4c38d",
        "89d765c03f5c": "467d6d8fd8ac",
        "960dabc03fb1": "9e6b2c13c48a",
        "a64136fe23d1": "6b16bf1d2ff9",
        "b5824967c4b1": "b0d9c08a3489",
        "d74dc6ba330b": "33fd46629a73",
        "eb1d6642c74d": "9144eb3d344a",
    },
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
            # A part of a prompt, as its models take it in.
            grid("forward", B=1, H=32, Hkv=8, S=[512, 2048], D=128, W=4096, Sk=[32768, 10000]),
            grid("forward", options={"sinks": True}, B=1, H=64, Hkv=8, S=2048, D=64, W=128, Sk=32768),
        ),
    },
)
