"""Matrix products of 8-bit floats (E4M3) with a scale for a tensor, a row, or a block (DeepSeek-V3, arXiv
2412.19437).

The inputs are 8-bit floats: quantizing them is outside of what is timed. `error` is that against the exact product
of the same 8-bit inputs, so it is the kernel's own; `error_unquantized` also has what E4M3 costs, against the
product of the numbers before they were quantized.

A linear layer of a weight (N, K) is layout "nt". The gradient of its input is "nn", with the weight as it is
stored; that of its weight is "tn", with recipe "group" as DeepSeek-V3 trains. Hopper's matrix units take 8-bit
operands row by row of K only: who multiplies the other layouts there transposes first, within what is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid
from ._accuracy import (
    E4M3_LARGEST,
    SATURATED,
    UNDERFLOWED,
    WEIGHT_BYTES,
    saturated,
    underflowed,
    weight_bytes,
    with_outliers,
)

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Columns of a, and rows and columns of b, that share a scale with recipe "block"."""

HEIGHTS = {"row": (1, 1), "block": (1, BLOCK), "group": (1, 1), "tile": (BLOCK, BLOCK)}
"""By recipe, rows of a and columns of b that share a scale; of "tensor" all do."""
BLOCKED = ("block", "group", "tile")
"""Recipes with a scale for each 128 of K; the others have one for all of K."""

TOLERANCE = Tolerance(norm=6e-3, absolute=3e-2, relative=2e-2)
"""bf16's rounding comes to 0.0017 of the output's size; sums of K = 16384 products in the 14 bits that the matrix
units keep may add as much again."""


def original(case: Case, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) and b (K, N) in bf16: what `inputs` quantizes when it gets the same generator.

    Both are drawn from a normal distribution. With data "outliers" one column of a in a hundred is 30 times as
    large.
    """
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")
    a = torch.randn(M, K, device=device, generator=generator, dtype=torch.bfloat16)
    if case.options["data"] == "outliers":
        with_outliers(a)
    return a, torch.randn(N, K, device=device, generator=generator, dtype=torch.bfloat16).t()


def scaled(x: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (R, C) in E4M3 and the scales (⌈R / height⌉, ⌈C / width⌉) in fp32: the largest of each block at 448."""
    import torch

    R, C = x.shape
    down, across = -(-R // height), -(-C // width)
    padded = torch.nn.functional.pad(x.float(), (0, across * width - C, 0, down * height - R))
    blocks = padded.view(down, height, across, width)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-30) / E4M3_LARGEST
    q = (blocks / scale[:, None, :, None]).reshape(down * height, across * width)[:R, :C]
    return q.to(torch.float8_e4m3fn).contiguous(), scale


def quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (N, K) in E4M3 and scales (⌈N / 128⌉, ⌈K / 128⌉) in fp32, rows of scales padded to four numbers, as
    cuBLAS takes their transpose.
    """
    import torch

    q, scale = scaled(weight, BLOCK, BLOCK)
    across = scale.shape[1]
    return q, torch.nn.functional.pad(scale, (0, -across % 4))[:, :across]


def quantized(a: torch.Tensor, b: torch.Tensor, recipe: str) -> Inputs:
    """a and b in E4M3 and their scales, as they lie in memory where they are read fastest.

    Scales are () and () for "tensor", (M, 1) and (1, N) for "row", else (M or ⌈M / 128⌉, ⌈K / 128⌉) and (⌈K /
    128⌉, ⌈N / 128⌉ or N): those of single rows with the rows of one step of K together, those of 128 × 128 with
    rows of the weight (N, K) padded to four numbers, as cuBLAS takes them.
    """
    (M, K), N = a.shape, b.shape[1]
    heights = HEIGHTS.get(recipe, (M, N))
    width = BLOCK if recipe in BLOCKED else K

    def laid(x: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
        if recipe in BLOCKED and height == BLOCK:
            return quantized_weight(x)
        q, scale = scaled(x, height, width)
        return q, scale.t().contiguous().t() if recipe in BLOCKED else scale

    (a, scale_a), (weight, scale_b) = laid(a, heights[0]), laid(b.t(), heights[1])
    if recipe == "tensor":
        scale_a, scale_b = scale_a[0, 0], scale_b[0, 0]
    return {"a": a, "b": weight.t(), "scale_a": scale_a, "scale_b": scale_b.t(), "recipe": recipe}


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """a (M, K) and b (K, N) in E4M3, their scales, and the recipe. The layout says how a and b lie in memory: n
    row by row, t column by column.
    """
    given = quantized(*original(case, device, generator), str(case.options["recipe"]))
    if case.options["layout"] == "tn":
        given["a"] = given["a"].t().contiguous().t()
    if case.options["layout"] in ("nn", "tn"):
        given["b"] = given["b"].contiguous()
    return given


def widened(scale: torch.Tensor, shape: tuple[int, int], height: int, width: int) -> torch.Tensor:
    """A scale for each number of a matrix of that shape."""
    if scale.dim() == 0:
        return scale
    return scale.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]


def reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, recipe: str
) -> torch.Tensor:
    """(a · scale_a) @ (b · scale_b)."""
    (M, K), N = a.shape, b.shape[1]
    width = BLOCK if recipe in BLOCKED else K
    down, along = HEIGHTS.get(recipe, (M, N))
    return (a * widened(scale_a, (M, K), down, width)) @ (b * widened(scale_b, (K, N), width, along))


def unquantized(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """a @ b before they were quantized."""
    a, b = original(case, device, generator)
    return a.double() @ b.double()


def results_of(result: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A product in bf16 of that shape; what has another shape or dtype becomes NaN, which is wrong."""
    import torch

    if result.shape != shape or result.dtype != torch.bfloat16:
        return torch.full(shape, torch.nan, device=result.device)
    return result


def results(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The product; the wrong shape or dtype becomes NaN, which is wrong."""
    return results_of(result, (inputs["a"].shape[0], inputs["b"].shape[1]))


def scales(case: Case) -> int:
    """How many scales there are."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    recipe = str(case.options["recipe"])
    down, along = HEIGHTS.get(recipe, (M, N))
    across = -(-K // BLOCK) if recipe in BLOCKED else 1
    return across * (-(-M // down) + -(-N // along))


def bytes_(case: Case) -> int:
    """Reads both matrices, a byte a number, and the scales; writes the product in bf16."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return (M * K + K * N) * BYTES[case.dtype] + M * N * BYTES["bf16"] + scales(case) * BYTES["fp32"]


def flops(case: Case) -> int:
    """Two a number of the product times K."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return 2 * M * N * K


SHAPES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
"""(N, K) of the products that DeepGEMM is measured at: the linear layers of DeepSeek-V3."""
RECIPES: dict[str, Option | list[Option]] = {"recipe": ["block", "row", "tensor"]}
ALL: dict[str, Option | list[Option]] = {"recipe": ["block", "row", "tensor", "group", "tile"]}
DX: dict[str, Option | list[Option]] = {"layout": "nn", "recipe": ["block", "row", "tensor"]}
DW: dict[str, Option | list[Option]] = {"layout": "tn", "recipe": ["group", "row", "tensor"]}

OPERATOR = Operator(
    name="fp8_matmul",
    summary="matrix product of E4M3 numbers with scales for a tensor, a row or a block",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    options={
        "recipe": ("block", "row", "tensor", "group", "tile"),
        "layout": ("nt", "nn", "tn"),
        "data": ("normal", "outliers"),
    },
    inputs=inputs,
    reference=reference,
    weights=("scale_b",),
    results=results,
    unquantized=unquantized,
    measures={
        SATURATED: saturated("a", "b"),
        UNDERFLOWED: underflowed("a", "b"),
        WEIGHT_BYTES: weight_bytes("b", "scale_b"),
    },
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("e4m3",),
    tolerances={"e4m3": TOLERANCE},
    plans={
        "quick": (grid("forward", dtypes="e4m3", M=4096, N=4096, K=4096, options=RECIPES),),
        "quick_cpu": (grid("forward", dtypes="e4m3", M=64, N=256, K=320),),
        "standard": (
            *(grid("forward", dtypes="e4m3", M=[64, 4096], N=N, K=K) for N, K in SHAPES),
            grid("forward", dtypes="e4m3", options=ALL, M=8192, N=8192, K=8192),
            grid("forward", dtypes="e4m3", options=DX, M=8192, N=4096, K=14336),
            grid("forward", dtypes="e4m3", options=DW, M=14336, N=4096, K=8192),
            grid("forward", dtypes="e4m3", options=RECIPES, M=4096, N=2880, K=2880),
        ),
        "full": (
            *(grid("forward", dtypes="e4m3", M=[16, 128, 8192], N=N, K=K) for N, K in SHAPES),
            grid("forward", dtypes="e4m3", options=ALL | {"data": "outliers"}, M=4096, N=4096, K=7168),
            grid("forward", dtypes="e4m3", options=ALL, M=[1, 100, 4095], N=2880, K=2880),
            grid("forward", dtypes="e4m3", options=ALL | {"layout": ["nt", "nn", "tn"]}, M=1000, N=1001, K=999),
        ),
    },
)
