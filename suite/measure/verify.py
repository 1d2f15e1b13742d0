"""The correctness gate: no time without the right answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..operator import Tolerance

if TYPE_CHECKING:
    import torch


class Incorrect(Exception):
    """The answer is wrong; the message says how far."""


class Unavailable(Exception):
    """Something that a case needs is not here, data for instance; the message says what, and how to get it."""


def flat(result: object) -> list[torch.Tensor]:
    """The tensors of a result, in order; None has none."""
    import torch

    if result is None:
        return []
    if isinstance(result, torch.Tensor):
        return [result]
    assert isinstance(result, tuple | list), type(result)
    return [x for x in result if x is not None]


def poison(result: object) -> None:
    """Overwrites every byte of a result with 0xFF, NaN in every floating type.

    The allocator hands the same memory to the next call, so an element which that leaves unwritten is
    NaN and not the right answer of the call before.
    """
    import torch

    for tensor in flat(result):
        with torch.no_grad():
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(255)


STRAGGLERS = 1e-7
"""The share of elements that may be beyond their bound: rounding in 16 bits has a tail, and in outputs of a
hundred million elements every implementation has a few there, PyTorch's own among them.
"""
FAR = 10.0
"""How many times its bound no element may be off, however many there are."""


def deviation(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor], tolerance: Tolerance) -> float:
    """The relative norm of the deviation, the largest over outputs. Raises `Incorrect`.

    NaN and infinity pass only where the reference has the same. Where the tolerance is `bounded`, the second half
    of the references are bounds of the first's elements.
    """
    import torch

    bounds: Sequence[torch.Tensor] = ()
    if tolerance.bounded:
        bounds, references = references[len(references) // 2 :], references[: len(references) // 2]
    if len(outputs) != len(references):
        raise Incorrect(f"{len(outputs)} outputs where the reference has {len(references)}")
    worst = 0.0
    for index, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        name = f"output {index}" if len(outputs) > 1 else "output"
        if output.shape != reference.shape:
            raise Incorrect(f"{name} has shape {tuple(output.shape)}, the reference {tuple(reference.shape)}")
        if output.is_complex() and not reference.is_complex():
            # As real numbers it would lose its other half, whatever that is.
            raise Incorrect(f"{name} is of {output.dtype}, the reference of real numbers")
        if output.numel() == 0:
            continue
        got = output.to(reference.dtype)
        allowed = bounds[index] if bounds else None
        finite = torch.isfinite(reference)
        if not bool(finite.all()):
            same = (got == reference) | (torch.isnan(got) & torch.isnan(reference))
            if not bool(same[~finite].all()):
                raise Incorrect(f"{name} differs from the reference where that is not finite")
            got, reference = got[finite], reference[finite]
            allowed = None if allowed is None else allowed[finite]
            if reference.numel() == 0:
                continue
        difference = (got - reference).abs()
        bad = int((~torch.isfinite(difference)).sum())
        if bad:
            raise Incorrect(f"{name}: {bad} of {difference.numel()} elements are NaN or infinite")
        norm = float(torch.linalg.vector_norm(reference))
        error = float(torch.linalg.vector_norm(difference)) / norm if norm else float(difference.max())
        worst = max(worst, error)
        if error > tolerance.norm:
            raise Incorrect(f"{name}: relative error {error:.3g}, allowed {tolerance.norm:.3g}")
        scale = norm / reference.numel() ** 0.5
        bound = tolerance.relative * reference.abs() + tolerance.absolute * scale
        bound = bound if allowed is None else bound + allowed
        outside = int((difference > bound).sum())
        few = outside <= STRAGGLERS * difference.numel()
        if outside and not (few and bool((difference <= FAR * bound).all())):
            raise Incorrect(
                f"{name}: {outside} of {difference.numel()} elements beyond tolerance, "
                f"the farthest by {float(difference.max()):.3g} (typical magnitude {scale:.3g})"
            )
    return worst


def distance(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The relative norm of the deviation, the largest over outputs, whatever it is."""
    import torch

    norm = torch.linalg.vector_norm
    return max(
        float(norm(x.to(y.dtype) - y) / norm(y).clamp(min=torch.finfo(y.dtype).tiny))
        for x, y in zip(outputs, references, strict=True)
    )
