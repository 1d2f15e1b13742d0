"""Sum over ranks of gradients that may be sent in fewer bits, with error feedback: what is lost comes back later.

Seide et al. 2014; Karimireddy et al., arXiv 1901.09847. What an implementation sends is its own affair; what it
says it lost must be what it lost. `scheme` says what values are rounded to, with a scale for 128 of them: int8, or
E4M3 (fp8), which has as many bytes, keeps small ones beside a large one, and rounds others coarser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Sharding, Tolerance, torch_dtype
from ._collective import AXES, rates, row, rows, size

if TYPE_CHECKING:
    import torch

GROUP = 128
"""Elements of a byte each that have one scale of four."""

ROUNDING = Tolerance(norm=0.02, absolute=0.1, relative=0.02)
"""Of int8 with a scale for 128 elements, twice: 0.0064 of a normal distribution's deviation each."""

ROUNDING_FP8 = Tolerance(norm=0.06, absolute=0.2, relative=0.13)
"""Of E4M3, twice: half a step is 2^-4 of a number at most, 0.026 of it in the root mean square."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (world, N) in the case's dtype and residual (world, N) in fp32, a row a rank."""
    import torch

    shape = (case.world, case.axes["N"])
    return {
        "x": torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype)),
        "residual": torch.randn(shape, device=device, generator=generator, dtype=torch.float32).mul_(0.01),
    }


def in_fp8(inputs: Inputs, case: Case) -> Inputs:
    """The same, and the scheme."""
    return {**inputs, "scheme": "fp8"}


def reference(x: torch.Tensor, residual: torch.Tensor, scheme: str = "int8") -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the rows of x + residual, and x + residual: what a rank sent and what it kept make up."""
    total = x + residual
    return total.sum(0), total


def results(result: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """(sum, new residual) to the sum and what was sent of this rank's array."""
    out, rest = result
    if rest.shape != inputs["residual"].shape or out.dtype != inputs["x"].dtype:
        return ()
    return out, inputs["x"].float() + inputs["residual"] - rest


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """The sum is everybody's, what a rank sent its own."""
    return answer if answer.dim() == 1 else answer[rank].clone()


OPERATOR = Operator(
    name="all_reduce_quantized",
    summary="Sum of gradients over ranks, sent in fewer bits with error feedback",
    axes=AXES,
    options={"scheme": ("int8", "fp8")},
    later={"scheme": "int8"},
    variations={("scheme", "fp8"): in_fp8},
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=lambda case: 2 * size(case) + 8 * case.axes["N"],
    flops=lambda case: 0,
    tolerances=dict.fromkeys(("bf16", "fp16", "fp32"), ROUNDING),
    tolerances_of={("scheme", "fp8"): dict.fromkeys(("bf16", "fp16", "fp32"), ROUNDING_FP8)},
    rates=rates(2, sent=lambda case: (1 + 4 / GROUP) / BYTES[case.dtype]),
    sharding=Sharding(split=row, join=rows, part=part),
    # `reference` took `scheme`, which changes nothing of it.
    continues={"cb53840933aa": "ca4feb375746"},
    plans={},
)
