"""Multi-head latent attention of a prompt (DeepSeek-V2, arXiv 2405.04434): keys of more dimensions than values.

Keys are projected from a latent vector and joined with rotary dimensions that all heads share; here they lie as
the projection leaves them, a key a head. Decoding from the latent vectors themselves is `attention_mla_decode`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid, torch_dtype
from ._attention import attended, relaid

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q and k (B, H, S, D), v (B, H, S, Dv), all in the case's dtype, and the mask's name."""
    import torch

    B, H, S, D, Dv = (case.axes[axis] for axis in ("B", "H", "S", "D", "Dv"))
    dtype = torch_dtype(case.dtype)

    def draw(columns: int) -> torch.Tensor:
        return torch.randn(B, H, S, columns, device=device, generator=generator, dtype=dtype)

    return {"q": draw(D), "k": draw(D), "v": draw(Dv), "mask": case.options["mask"]}


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v: (B, H, S, Dv)."""
    return attended(q, k, v, mask)


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and writes the output; backward reads q, k, v and the output's gradient and writes
    three gradients.
    """
    B, H, S, D, Dv = (case.axes[axis] for axis in ("B", "H", "S", "D", "Dv"))
    of_keys, of_values = {"forward": (2, 2), "backward": (4, 3), "forward_backward": (6, 5)}[case.pass_]
    return B * H * S * (of_keys * D + of_values * Dv) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """One product of keys' dimensions and one of values' forward, three and two backward; causal needs half."""
    B, H, S, D, Dv = (case.axes[axis] for axis in ("B", "H", "S", "D", "Dv"))
    of_keys, of_values = {"forward": (1, 1), "backward": (3, 2), "forward_backward": (4, 3)}[case.pass_]
    products = 2 * B * H * S * S * (of_keys * D + of_values * Dv)
    return products // (2 if case.options["mask"] == "causal" else 1)


MASKS: dict[str, Option | list[Option]] = {"mask": ["causal", "full"]}

OPERATOR = Operator(
    name="attention_mla",
    summary="Latent attention of a prompt: keys of 192 dimensions, values of 128",
    axes={
        "B": "batch",
        "H": "heads",
        "S": "sequence",
        "D": "dimension of queries and keys",
        "Dv": "dimension of values",
    },
    # How q, k and v lie in memory: contiguous, or (B, S, H, D) as a projection leaves them.
    options={"mask": ("causal", "full"), "storage": ("bhsd", "bshd")},
    variations={("storage", "bshd"): partial(relaid, names=("q", "k", "v"), packed=False)},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("q", "k", "v"),
    stored_as="q",
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    fp32_reference=True,
    plans={
        "quick": (grid("forward", "backward", B=1, H=16, S=4096, D=192, Dv=128),),
        "quick_cpu": (grid("forward", B=1, H=4, S=256, D=192, Dv=128, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=1, H=128, S=4096, D=192, Dv=128),
            grid("forward", options={"storage": "bshd"}, B=2, H=16, S=8192, D=192, Dv=128),
        ),
        "full": (
            grid("forward", "backward", options=MASKS, B=4, H=16, S=[1000, 4095], D=192, Dv=128),
            grid("forward", "backward", B=1, H=128, S=4096, D=192, Dv=128, dtypes="fp16"),
        ),
    },
)
