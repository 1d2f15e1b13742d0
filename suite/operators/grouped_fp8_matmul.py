"""Products of groups of rows of 8-bit floats, each with a weight of its own, as a mixture of experts has them,
in the two layouts of DeepGEMM (README of deepseek-ai/DeepGEMM, "Grouped GEMMs").

contiguous: rows of a group follow each other, each group begins at a multiple of 128 rows; for training and
prefill. masked: each group has memory for the most rows that it may have, and only the first of them count; for
decoding, where the host does not know how many they are.

The inputs are 8-bit floats, as in `fp8_matmul`. Rows of no group may have any value in the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, grid
from ._accuracy import (
    SATURATED,
    UNDERFLOWED,
    WEIGHT_BYTES,
    saturated,
    underflowed,
    weight_bytes,
    with_outliers,
)
from .fp8_matmul import BLOCK, TOLERANCE, results_of, scaled, widened

if TYPE_CHECKING:
    import torch


def lengths(E: int, M: int) -> list[int]:
    """How many rows each of E groups has: M on average, from 0.7 to 1.3 times as many by a fixed rule, as
    DeepGEMM's own measurements draw them.
    """
    return [max(1, int(M * (0.7 + 0.6 * ((7 * e + 3) % 10) / 9))) for e in range(E)]


def starts(case: Case) -> tuple[list[int], int]:
    """(where each group begins in the contiguous layout, rows of all, those that fill up included)."""
    begins, at = [], 0
    for count in lengths(case.axes["E"], case.axes["M"]):
        begins.append(at)
        at += -(-count // BLOCK) * BLOCK
    return begins, at


def original(
    case: Case, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a (T, K) or (E, most, K), weights (E, N, K), groups): what `inputs` quantizes when it gets the same
    generator. Rows of no group are 0.
    """
    import torch

    E, M, N, K = (case.axes[axis] for axis in "EMNK")
    counts = lengths(E, M)
    if case.options["layout"] == "contiguous":
        begins, rows = starts(case)
        groups = torch.full((rows,), -1, dtype=torch.int32)
        for e, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            groups[begin : begin + count] = e
        a = torch.randn(rows, K, device=device, generator=generator, dtype=torch.bfloat16)
    else:
        groups = torch.tensor(counts, dtype=torch.int32)
        a = torch.randn(E, most(case), K, device=device, generator=generator, dtype=torch.bfloat16)
    groups = groups.to(device)
    if case.options["data"] == "outliers":
        with_outliers(a)
    weights = torch.randn(E, N, K, device=device, generator=generator, dtype=torch.bfloat16)
    return a.mul_(_there(a, groups)[..., None]), weights, groups


def most(case: Case) -> int:
    """Rows of a group's memory in the masked layout: of twice the average, a multiple of 128."""
    return -(-2 * case.axes["M"] // BLOCK) * BLOCK


def _there(a: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Whether each row belongs to a group."""
    import torch

    if a.dim() == 2:
        return groups >= 0
    return torch.arange(a.shape[1], device=a.device)[None, :] < groups[:, None]


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """a and b in E4M3, their scales in fp32, the groups in int32, and the recipe, as the kernel's docstring says.

    Scales of a lie in memory with the rows of one step of K together.
    """
    import torch

    a, weights, groups = original(case, device, generator)
    K = weights.shape[2]
    recipe = str(case.options["recipe"])
    width = BLOCK if recipe == "block" else K
    flat, scale_a = scaled(a.view(-1, K), 1, width)
    scale_a = scale_a.view(*a.shape[:-1], -1).transpose(-1, -2).contiguous().transpose(-1, -2)
    pairs = [scaled(w, BLOCK if recipe == "block" else 1, width) for w in weights]
    b, scale_b = (torch.stack([x[i] for x in pairs]) for i in (0, 1))
    return {
        "a": flat.view(a.shape),
        "b": b,
        "scale_a": scale_a,
        "scale_b": scale_b,
        "groups": groups,
        "recipe": recipe,
    }


def product(a: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """a @ weights.mT by groups, 0 in rows of none."""
    if a.dim() == 3:
        return (a @ weights.mT) * _there(a, groups)[..., None]
    out = a.new_zeros(a.shape[0], weights.shape[1])
    for e, weight in enumerate(weights):
        rows = (groups == e).nonzero()[:, 0]
        out[rows] = a[rows] @ weight.T
    return out


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    groups: torch.Tensor,
    recipe: str,
) -> torch.Tensor:
    """(a · scale_a) @ (b · scale_b)ᵀ by groups."""
    import torch

    _, N, K = b.shape
    width, height = (BLOCK, BLOCK) if recipe == "block" else (K, 1)
    wide = torch.stack([w * widened(s, (N, K), height, width) for w, s in zip(b, scale_b, strict=True)])
    return product(a * scale_a.repeat_interleave(width, -1)[..., :K], wide, groups)


def unquantized(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """The product before the numbers were quantized."""
    a, weights, groups = original(case, device, generator)
    return product(a.double(), weights.double(), groups)


def results(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The product, 0 in rows of no group; the wrong shape or dtype becomes NaN, which is wrong."""
    import torch

    a = inputs["a"]
    checked = results_of(result, (*a.shape[:-1], inputs["b"].shape[1]))
    there = _there(a, inputs["groups"])[..., None]
    return torch.where(there, checked, torch.zeros((), dtype=checked.dtype, device=checked.device))


def bytes_(case: Case) -> int:
    """Reads the rows of all groups and all weights, a byte a number, and their scales; writes the rows in bf16."""
    E, M, N, K = (case.axes[axis] for axis in "EMNK")
    rows = sum(lengths(E, M))
    block = case.options["recipe"] == "block"
    across = -(-K // BLOCK) if block else 1
    scales = across * (rows + E * (-(-N // BLOCK) if block else N))
    return rows * K + E * N * K + scales * BYTES["fp32"] + rows * N * BYTES["bf16"]


def flops(case: Case) -> int:
    """Two a number of the product times K, of rows that belong to a group."""
    E, M, N, K = (case.axes[axis] for axis in "EMNK")
    return 2 * sum(lengths(E, M)) * N * K


MASKED: dict[str, Option | list[Option]] = {"layout": "masked"}
ROW: dict[str, Option | list[Option]] = {"recipe": "row"}

OPERATOR = Operator(
    name="grouped_fp8_matmul",
    summary="products of groups of E4M3 rows, each with a weight of its own, contiguous or masked",
    axes={
        "E": "groups",
        "M": "rows of a group on average",
        "N": "columns of the output",
        "K": "columns of the input",
    },
    options={"layout": ("contiguous", "masked"), "recipe": ("block", "row"), "data": ("normal", "outliers")},
    inputs=inputs,
    reference=reference,
    results=results,
    unquantized=unquantized,
    measures={
        SATURATED: saturated("b"),
        UNDERFLOWED: underflowed("b"),
        WEIGHT_BYTES: weight_bytes("b", "scale_b"),
    },
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: sum(lengths(case.axes["E"], case.axes["M"])),
    dtypes=("e4m3",),
    tolerances={"e4m3": TOLERANCE},
    plans={
        "quick": (grid("forward", dtypes="e4m3", E=4, M=1024, N=4096, K=2048),),
        "quick_cpu": (grid("forward", dtypes="e4m3", E=2, M=20, N=128, K=256),),
        # The shapes that DeepGEMM measures, of DeepSeek-V3's experts.
        "standard": (
            grid("forward", dtypes="e4m3", E=4, M=8192, N=[4096, 7168], K=2048),
            grid("forward", dtypes="e4m3", E=8, M=4096, N=4096, K=7168),
            grid("forward", dtypes="e4m3", E=8, M=4096, N=4096, K=7168, options=ROW),
            grid("forward", dtypes="e4m3", E=[2, 4], M=256, N=4096, K=7168, options=MASKED),
        ),
        "full": (
            grid("forward", dtypes="e4m3", E=8, M=4096, N=7168, K=2048),
            grid("forward", dtypes="e4m3", E=[1, 4], M=512, N=7168, K=2048, options=MASKED),
            grid("forward", dtypes="e4m3", E=32, M=[16, 128], N=5760, K=2880),
            grid("forward", dtypes="e4m3", E=32, M=16, N=2880, K=2880, options=MASKED),
            grid("forward", dtypes="e4m3", E=4, M=512, N=4096, K=2048, options={"data": "outliers"}),
        ),
    },
)
