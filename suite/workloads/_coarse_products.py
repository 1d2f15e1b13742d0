"""Products in 8 bits: the check of weights that gradients of such products step.

Rounding to E4M3 takes two runs apart with every step, the last norm's bias about twice as far as most parameters,
so that the bound of one parameter is wide: wider than what many faults of an optimizer make. Of all parameters
together rounding makes less than these do (`registry/reference/truth/e4m3-together.txt`), and least *along* what
they should change by, which is where an optimizer that does something else shows
(`registry/reference/truth/e4m3-changes.txt`).
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from ..measure.verify import Incorrect
from ..model import Bound
from . import _expected as answer
from ._recipe import Recipe

if TYPE_CHECKING:
    from ._trainer import Trainer

TOGETHER = 0.4
"""How far three steps of all parameters may be off: the root of the mean of their squared errors."""
ALONG = 0.2
"""How much of it may be along the answer's change, on average. Rounding made .10 where that was most; what else an
optimizer may do made .30 and more, three steps of which one is left out too.
"""
SEEN = 4.0
"""How many times what storing rounds a parameter must have moved to count in the mean: gains of about 1 do not, in
bf16.
"""


def check_weights(trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int, bound: Bound) -> float:
    """`_expected.check_weights`, then all parameters together. Raises `Incorrect`."""
    import torch

    worst = answer.check_weights(trainer, recipe, expected, seed, bound)
    got, norm = trainer.weights(), torch.linalg.vector_norm
    # Masters are rounded when all is over; weights without any in each step.
    rounds = answer.ROUNDING[recipe.dtype] * (1 if recipe.stored == "master32" else answer.STEPS)
    squares, lengths = [], []
    for name, before in answer.initial(recipe, seed, next(iter(got.values())).device):
        share = expected.first.gradients[name].to(before.device, non_blocking=True).abs()
        wanted = expected.changed[name].to(before.device, non_blocking=True)
        way = (wanted - before).mul_(share)
        change = float(norm(way))
        rounded = rounds * float(norm(wanted * share))
        if SEEN * rounded < change:
            apart = (got[name].detach().float() - wanted).mul_(share)
            off = float(norm(apart))
            lengths.append(float(apart.mul_(way).sum(dtype=torch.float64)) / change**2)
            squares.append(max(0.0, off**2 - rounded**2) / change**2)  # rounding is independent of the rest
    together = math.sqrt(fmean(squares)) if squares else 0.0
    if not together <= TOGETHER:
        raise Incorrect(
            f"after {answer.STEPS} steps: the changes of all parameters are off by {together:.3g} of their norms, "
            f"allowed {TOGETHER:.3g} with products in 8 bits"
        )
    along = fmean(lengths) if lengths else 0.0
    if not abs(along) <= ALONG:
        raise Incorrect(
            f"after {answer.STEPS} steps: along the model's, the changes of all parameters are {1 + along:.3g} "
            f"times them on average, allowed {1 - ALONG:.3g} to {1 + ALONG:.3g} with products in 8 bits"
        )
    return worst
