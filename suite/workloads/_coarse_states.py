"""Moments in 8 bits: the check of weights that they step, and a twin of such an optimizer on any device.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861: a moment is rounded to a table
of 256 numbers times the largest magnitude of its block, and a step is made in fp32 by the moments before they are
rounded. torchao and bitsandbytes do so; here moments are rounded alike, and kept in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..measure.verify import Incorrect
from ..model import Bound
from . import _expected as answer
from ._recipe import HYPERPARAMETERS, Recipe

if TYPE_CHECKING:
    import torch

    from ._trainer import Trainer

BLOCK = 256
"""Elements that share a scale."""
LEAST = 4096
"""Elements of the smallest parameter whose moments are rounded, as both libraries have it."""
DECADES = 7
"""Powers of ten between the largest number of a block and its least, which is not 0."""
OWN = Bound(loss=0.0, gradient=0.0, change=0.2)
"""How far moments in 8 bits alone may take weights from the answer's. The twin's are off by a hundredth."""
LENGTH = 0.05
"""The same of how far weights went along the way of the answer's; the twin's are off by less than a hundredth."""


@cache
def _numbers(signed: bool) -> tuple[float, ...]:
    """What a number of a block, over its largest, is rounded to: in each decade twice as many as in the one below,
    in the middles of equal parts of it; 0, and 1.
    """
    found = []
    for decade in range(DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        top = 10.0 ** (decade + 1 - DECADES)
        found += [top * (0.1 + 0.9 * (i + 0.5) / parts) for i in range(parts)]
    return tuple(sorted([*found, *((-x for x in found) if signed else ()), 0.0, 1.0]))


def rounded(x: torch.Tensor, signed: bool) -> torch.Tensor:
    """x in fp32 after a round trip through 8 bits; as it is where it is too small for that."""
    import torch

    if x.numel() < LEAST or x.numel() % BLOCK:
        return x
    table = torch.tensor(_numbers(signed), device=x.device)
    blocks = x.reshape(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    code = torch.bucketize(blocks / largest, (table[1:] + table[:-1]) / 2, right=True)
    return (table[code] * largest).view_as(x)


class Twin:
    """AdamW by the operator's reference, with moments in 8 bits; to be stepped as an optimizer of PyTorch's."""

    def __init__(self, params: Sequence[Any], reference: Callable[..., Any]) -> None:
        import torch

        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": HYPERPARAMETERS["lr"]}]
        self._reference = reference
        self._moments = [tuple(torch.zeros_like(x, dtype=torch.float32) for _ in range(2)) for x in params]
        self._steps = 0

    def step(self) -> None:
        """One step of all parameters, by their gradients."""
        import torch

        self._steps += 1
        group = self.param_groups[0]
        given = {**HYPERPARAMETERS, "lr": group["lr"]}
        with torch.no_grad():
            for p, moments in zip(group["params"], self._moments, strict=True):
                m, v = moments
                new = self._reference(
                    [p.float()], [p.grad.float()], [m], [v], None, self._bias_corrected(), **given
                )
                p.copy_(new[0])
                m.copy_(self._kept(new[1], True))
                v.copy_(self._kept(new[2], False))

    def _bias_corrected(self) -> int:
        """The number of the step by which biases are corrected."""
        return self._steps

    def _kept(self, moment: Any, signed: bool) -> Any:
        """What is kept of a moment until the next step."""
        return rounded(moment, signed)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on but its rate."""
        return {"steps": self._steps, "moments": [tuple(x.clone() for x in y) for y in self._moments]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self._steps = state["steps"]
        for own, kept in zip(self._moments, state["moments"], strict=True):
            for x, y in zip(own, kept, strict=True):
                x.copy_(y)


def check_weights(trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int, bound: Bound) -> float:
    """As `_expected.check_weights`, of moments in 8 bits. Raises `Incorrect`.

    A second moment below a millionth of its block's largest becomes 0. Where the next gradient is much smaller (of
    a token that does not come again), that element's step is as long as one likes, in every such optimizer: no
    element counts as further off than one that goes the whole way back. In exchange the length of the way is held
    too: what forgets moments or a correction, or has a wrong scale, goes along the answer's way, but not as far.
    """
    import torch

    got, norm = trainer.weights(), torch.linalg.vector_norm
    most = 2 * answer.STEPS * HYPERPARAMETERS["lr"]
    # Errors of products and of moments are independent. What rounding of products turns around is off by twice its
    # length: an error of e makes the way shorter by e² / 2.
    change, length = math.hypot(bound.change, OWN.change), LENGTH + bound.change**2 / 2
    worst = 0.0
    for name, before in answer.initial(recipe, seed, next(iter(got.values())).device):
        if name not in got:
            raise Incorrect(f"after {answer.STEPS} steps: there is no {name}")
        share = expected.first.gradients[name].to(before.device, non_blocking=True).abs()
        after = expected.changed[name].to(before.device, non_blocking=True)
        wanted = (after - before).mul_(share)
        off = (got[name].detach().float() - after).clamp_(-most, most).mul_(share)
        way = float(norm(wanted))
        if math.isnan(float(norm(off))):
            raise Incorrect(f"after {answer.STEPS} steps: {name} is not finite")
        if not way:
            continue
        stored = answer.STEPS * answer.ROUNDING[recipe.dtype] * float(norm(after * share)) / way
        error = max(0.0, float(norm(off)) / way - stored)
        if not error <= change:
            raise Incorrect(
                f"after {answer.STEPS} steps: the change of {name} is off by {error:.3g} of its norm, "
                f"allowed {change:.3g} with moments in 8 bits"
            )
        went = 1 + float((off * wanted).sum()) / way**2
        if not abs(went - 1) <= length + stored:
            raise Incorrect(
                f"after {answer.STEPS} steps: the change of {name} is {went:.3g} times as long as it should be, "
                f"allowed 1 ± {length + stored:.3g} with moments in 8 bits"
            )
        worst = max(worst, error)
    return worst
