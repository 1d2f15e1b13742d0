"""Rotary position embedding of queries and keys (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype
from ._attention import STORAGE, variations

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k (B, Hkv, S, D), cos and sin (S, D/2), all in the case's dtype; which pairs turn."""
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    dtype = torch_dtype(case.dtype)
    frequency = 10000.0 ** -(torch.arange(0, D, 2, device=device, dtype=torch.float64) / D)
    # Not from 0: of the first place alone, as a step that decodes has it, who turns nothing would be right.
    angle = torch.arange(1, S + 1, device=device, dtype=torch.float64)[:, None] * frequency
    return {
        "q": torch.randn(B, H, S, D, device=device, generator=generator, dtype=dtype),
        "k": torch.randn(B, Hkv, S, D, device=device, generator=generator, dtype=dtype),
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
        "layout": str(case.options["layout"]),
    }


def reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) with each pair (a, b) turned to (a · cos - b · sin, b · cos + a · sin).

    Layout half pairs dimension i with i + D/2 (Llama, GPT-NeoX), interleaved 2i with 2i + 1 (GPT-J).
    """
    return _turned(q, cos, sin, layout), _turned(k, cos, sin, layout)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    import torch

    if layout == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def bytes_(case: Case) -> int:
    """Each pass reads q and k (or their gradients), cos and sin, and writes as much as q and k."""
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    passes = 2 if case.pass_ == "forward_backward" else 1
    return passes * (2 * B * (H + Hkv) * S * D + S * D) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="rope",
    summary="rotary position embedding of queries and keys",
    axes={"B": "batch", "H": "query heads", "Hkv": "key heads", "S": "sequence", "D": "head dimension"},
    options={"layout": ("half", "interleaved"), "storage": STORAGE},
    later={"storage": "bhsd"},
    variations={x: change for x, change in variations(("q", "k")).items() if x[0] == "storage"},
    stored_as="q",
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("q", "k"),
    # Places begin at 1: nothing else is drawn or computed.
    continues={
        "7fd959a3c426": "114fb54724d1",
        "038e3ce8f717": "8e651d9802e7",
        "f647fe2baa0a": "0fcdca5b5021",
        "0547715e87ec": "7f5df3cbda31",
        "6e05f662267a": "1b2cb0c9de80",
        "55b1658cbbdb": "97cbb85fbff3",
        "98d5d2166543": "c0ff2db038d4",
        "7210ae818cf7": "46b23ffacc17",
        "7ce1b7b9028a": "bcb6cce321da",
        "03ff120f058b": "620e2cc913af",
        "18cc95210f81": "2ed520f11ff8",
        "9a8756df0036": "040e35958fc7",
        "9ab985023ead": "2821a127c9eb",
        "eeb35ffdc0d0": "cd6e9977f892",
        "66d171d77eaa": "905b06994ecd",
        "bf3e73fd336c": "8b5e445ca16c",
        "ad535af19cfe": "f3eeb56b37dc",
        "8d0c99b49700": "94ff1cc05fcd",
    },
    plans={
        "quick": (grid("forward", B=4, H=32, Hkv=8, S=4096, D=128),),
        "quick_cpu": (grid("forward", B=1, H=8, Hkv=2, S=1024, D=128, dtypes="fp32"),),
        "standard": (grid("forward", "backward", B=4, H=32, Hkv=8, S=4096, D=128),),
        "full": (
            grid("forward", "backward", B=4, H=32, Hkv=8, S=4096, D=128, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", B=4, H=32, Hkv=8, S=4096, D=128, options={"layout": "interleaved"}),
            grid("forward", "backward", B=4, H=32, Hkv=8, S=4096, D=64),
            grid("forward", "backward", B=1, H=7, Hkv=1, S=1023, D=96),
            grid("forward", B=1, H=32, Hkv=8, S=1, D=128),
        ),
    },
)
