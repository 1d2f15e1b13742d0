"""Matrix products of 8-bit floats (E4M3) with a scale for a tensor, a row, or a block (DeepSeek-V3, arXiv
2412.19437).

The inputs are 8-bit floats: quantizing them is outside of what is timed. A row's error is that against the exact
product of the same 8-bit inputs, so it is the kernel's own; `errors` also says what E4M3 costs, against the
product of the numbers before they were quantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.metric import Metric
from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Columns of a, and rows and columns of b, that share a scale with recipe "block"."""

LARGEST = 448.0
"""E4M3's largest number."""

TOLERANCE = Tolerance(norm=6e-3, absolute=3e-2, relative=2e-2)
"""bf16's rounding comes to 0.0017 of the output's size; sums of K = 16384 products in the 14 bits that the matrix
units keep may add as much again."""


def original(case: Case, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) and b (K, N) in bf16: what `inputs` quantizes when it gets the same generator.

    Both are drawn from a normal distribution. With data "outliers" one column of a in a hundred is 30 times as
    large, as channels of a transformer's activations are (Dettmers et al., arXiv 2208.07339).
    """
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")
    a = torch.randn(M, K, device=device, generator=generator, dtype=torch.bfloat16)
    if case.options["data"] == "outliers":
        a[:, ::100] *= 30
    return a, torch.randn(N, K, device=device, generator=generator, dtype=torch.bfloat16).t()


def scaled(x: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (R, C) in E4M3 and the scales (⌈R / height⌉, ⌈C / width⌉) in fp32: the largest of each block at 448."""
    import torch

    R, C = x.shape
    down, across = -(-R // height), -(-C // width)
    padded = torch.nn.functional.pad(x.float(), (0, across * width - C, 0, down * height - R))
    blocks = padded.view(down, height, across, width)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-30) / LARGEST
    q = (blocks / scale[:, None, :, None]).reshape(down * height, across * width)[:R, :C]
    return q.to(torch.float8_e4m3fn).contiguous(), scale


def quantized(a: torch.Tensor, b: torch.Tensor, recipe: str) -> Inputs:
    """a and b in E4M3 and their scales, as they lie in memory where they are read fastest.

    Scales are () and () for "tensor", (M, 1) and (1, N) for "row", (M, ⌈K / 128⌉) and (⌈K / 128⌉, ⌈N / 128⌉) for
    "block": a's column by column, b's with rows of the weight (N, K) padded to four numbers, as cuBLAS takes them.
    """
    import torch

    (M, K), N = a.shape, b.shape[1]
    heights = {"tensor": (M, N), "row": (1, 1), "block": (1, BLOCK)}[recipe]
    width = BLOCK if recipe == "block" else K
    (a, scale_a), (weight, scale_b) = scaled(a, heights[0], width), scaled(b.t(), heights[1], width)
    if recipe == "tensor":
        scale_a, scale_b = scale_a[0, 0], scale_b[0, 0]
    elif recipe == "block":
        scale_a = scale_a.t().contiguous().t()
        across = scale_b.shape[1]
        scale_b = torch.nn.functional.pad(scale_b, (0, -across % 4))[:, :across].t()
    else:
        scale_b = scale_b.t()
    return {"a": a, "b": weight.t(), "scale_a": scale_a, "scale_b": scale_b, "recipe": recipe}


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """a (M, K) and b (K, N), the transpose of a weight, in E4M3, their scales, and the recipe."""
    return quantized(*original(case, device, generator), str(case.options["recipe"]))


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
    width = BLOCK if recipe == "block" else K
    columns = BLOCK if recipe == "block" else 1
    return (a * widened(scale_a, (M, K), 1, width)) @ (b * widened(scale_b, (K, N), width, columns))


def results(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The product; the wrong shape or dtype becomes NaN, which is wrong."""
    import torch

    shape = (inputs["a"].shape[0], inputs["b"].shape[1])
    if result.shape != shape or result.dtype != torch.bfloat16:
        return torch.full(shape, torch.nan, device=inputs["a"].device)
    return result


def errors(result: torch.Tensor, originals: tuple[torch.Tensor, torch.Tensor], given: Inputs) -> dict[str, float]:
    """‖result − exact‖ / ‖exact‖ by name: against the fp64 product of the numbers before they were quantized
    ("error_unquantized") and of the quantized ones ("error_quantized"), and the shares of numbers that became the
    largest of the format ("saturated") and that became 0 ("underflowed").
    """
    import torch

    def distance(exact: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(result.double() - exact) / torch.linalg.vector_norm(exact))

    wide: Inputs = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    pairs = list(zip(originals, (given["a"], given["b"]), strict=True))
    count = sum(x.numel() for x in originals)
    return {
        "error_unquantized": distance(originals[0].double() @ originals[1].double()),
        "error_quantized": distance(reference(**wide)),
        "saturated": sum(int((q.float().abs() == LARGEST).sum()) for _, q in pairs) / count,
        "underflowed": sum(int(((q.float() == 0) & (x != 0)).sum()) for x, q in pairs) / count,
    }


SATURATED = Metric(
    "saturated",
    "1",
    better="neither",
    about="The share of the inputs' numbers that are the largest of their format.",
)


def saturated(outputs: list[torch.Tensor], references: list[torch.Tensor], inputs: Inputs) -> float:
    """The share of a's and b's numbers that are the largest of E4M3: those of each scale's largest, and more where
    a scale cuts others off.
    """
    pair = [inputs[name].float().abs() for name in ("a", "b")]
    share: float = sum(int((x == LARGEST).sum()) for x in pair) / max(1, sum(x.numel() for x in pair))
    return share


def scales(case: Case) -> int:
    """How many scales there are."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    across = -(-K // BLOCK)
    return {"tensor": 2, "row": M + N, "block": across * (M + -(-N // BLOCK))}[str(case.options["recipe"])]


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

OPERATOR = Operator(
    name="fp8_matmul",
    summary="matrix product of E4M3 numbers with scales for a tensor, a row or a block",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    options={"recipe": ("block", "row", "tensor"), "data": ("normal", "outliers")},
    inputs=inputs,
    reference=reference,
    results=results,
    measures={SATURATED: saturated},
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
            grid("forward", dtypes="e4m3", options=RECIPES, M=8192, N=8192, K=8192),
            grid("forward", dtypes="e4m3", options=RECIPES, M=4096, N=2880, K=2880),
        ),
        "full": (
            *(grid("forward", dtypes="e4m3", M=[16, 128, 8192], N=N, K=K) for N, K in SHAPES),
            grid("forward", dtypes="e4m3", options=RECIPES | {"data": "outliers"}, M=4096, N=4096, K=7168),
            grid("forward", dtypes="e4m3", options=RECIPES, M=[1, 100, 4095], N=2880, K=2880),
            grid("forward", dtypes="e4m3", options=RECIPES, M=1000, N=1001, K=999),
        ),
    },
)
