"""Sum over ranks of gradients that may be sent in fewer bits, with error feedback: what is lost comes back later.

Seide et al. 2014; Karimireddy et al., arXiv 1901.09847. What an implementation sends is its own affair; what it
says it lost must be what it lost. `scheme` says what values are rounded to, with a scale for 128 of them: int8, or
E4M3 (fp8), which has as many bytes, keeps small ones beside a large one, and rounds others coarser.

Numbers are rounded twice: by each rank, what it has, v = x + residual; and by one rank of each element, the r-th
of the r-th part of the array, the sum of what came. How far that may be off follows from the two (`bounds`). What
comes back in later calls is held to nearly nothing: the sum and all that ranks say they keep are the exact sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Gather, Inputs, Operator, Sharding, Tolerance, torch_dtype
from ._collective import AXES, rates, row, rows, size

if TYPE_CHECKING:
    import torch

GROUP = 128
"""Elements of a byte each that have one scale of four."""

OUT = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}
"""What rounding to the dtype of the sum may change of it; the rest of the bound is of each element (`bounds`)."""

ROUNDING = {dtype: Tolerance(norm=0.02, absolute=0, relative=u, bounded=True) for dtype, u in OUT.items()}
"""Of int8 with a scale for 128 elements, twice: 0.0064 of a normal distribution's deviation each."""

ROUNDING_FP8 = {dtype: Tolerance(norm=0.06, absolute=0, relative=u, bounded=True) for dtype, u in OUT.items()}
"""Of E4M3, twice: half a step is 2^-4 of a number at most, 0.026 of it in the root mean square."""

FP32 = 2**-19
"""Of the magnitudes that are added up: what some thirty roundings to fp32 change of their sum."""


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


def reference(x: torch.Tensor, residual: torch.Tensor, scheme: str = "int8") -> tuple[torch.Tensor, ...]:
    """The sum of the rows of x + residual; x + residual, which a rank sent but for what it kept; the sum again,
    which the answer and what all ranks kept make up. Then the bounds of these.
    """
    own = x + residual
    exact = own.sum(0)
    return exact, own, exact, *bounds(own, exact, scheme)


def bounds(own: torch.Tensor, exact: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How far the three outputs may be off, by element. With h(v) what rounding changes of v at most (`rounding`),
    e = Σ h(v) over ranks, and h(|Σ v| + e) for the second rounding, as what is added up is off by e already:

    * the sum: e + h(|Σ v| + e);
    * what a rank sent, of v: h(v), and in the part whose sums it rounds h(|Σ v| + e) more, which is kept there:
      rank r's is part r of as many whole groups, which an implementation has to cut so;
    * the sum and what is kept: no more than fp32 and the sum's dtype lose.
    """
    import torch

    first = torch.empty_like(own)
    for bound, x in zip(first, own, strict=True):  # a row at a time: what that takes beside it is small
        bound.copy_(rounding(x, scheme))
    e = first.sum(0)
    second = rounding(exact.abs() + e, scheme)
    world, size = own.shape
    part = -(-size // (GROUP * world)) * GROUP  # whole groups; the last ones' may be shorter or nothing
    for rank in range(world):
        first[rank, rank * part : (rank + 1) * part] += second[rank * part : (rank + 1) * part]
    lost = FP32 * sum(x.abs() for x in own)
    # The sum's dtype rounds what was rounded, not the exact sum: `relative` has that share of the latter alone.
    # The bounds do not know that dtype: a sum in fp32 is held as one in bf16 here.
    summed = (e + second) * (1 + OUT["bf16"]) + lost
    return summed, first.add_(lost), (e + second) * OUT["bf16"] + lost


def rounding(x: torch.Tensor, scheme: str) -> torch.Tensor:
    """What rounding x (N,) may change of each element, where the largest of a group A becomes the largest number:
    half a step. Of int8 that is A / 254; of E4M3 2^-4 of a number, and below its normal ones 2^-10 / 448 of A.
    """
    import torch

    groups = torch.nn.functional.pad(x.abs(), (0, -x.numel() % GROUP)).view(-1, GROUP)
    largest = groups.amax(1, keepdim=True).clamp(min=1e-30)
    if scheme == "int8":
        half = (largest / 254).expand_as(groups)
    else:
        half = torch.maximum(groups * 2**-4, largest * (2**-10 / 448))
    return half.reshape(-1)[: x.numel()]


def results(result: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """(sum, new residual) to the sum and what was sent of this rank's array; and the residual, for `across`."""
    out, rest = result
    if rest.shape != inputs["residual"].shape or out.dtype != inputs["x"].dtype:
        return ()
    return out, inputs["x"].float() + inputs["residual"] - rest, rest


AT_ONCE = 1 << 26
"""Elements of residuals that are gathered at once."""


def across(outputs: list[torch.Tensor], gathered: Gather) -> list[torch.Tensor]:
    """In place of its own residual the sum and what all ranks kept of it: what was lost for good is missing
    there."""
    import torch

    if len(outputs) != 3:
        return outputs
    out, sent, rest = outputs
    kept = torch.cat([sum(gathered(x), torch.zeros_like(x)) for x in rest.split(AT_ONCE)])
    return [out, sent, out.float() + kept]


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
    tolerances=ROUNDING,
    tolerances_of={("scheme", "fp8"): ROUNDING_FP8},
    rates=rates(2, sent=lambda case: (1 + 4 / GROUP) / BYTES[case.dtype]),
    sharding=Sharding(split=row, join=rows, part=part, across=across),
    plans={},
)
