"""Products in 8 bits: the check of weights that gradients of such products step.

Rounding to E4M3 takes two runs apart with every step, the last norm's bias about twice as far as most parameters,
so that the bound of one parameter is wide: wider than what many faults of an optimizer make. Of all parameters
together rounding makes less than these do (`registry/reference/truth/e4m3-together.txt`).
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
    squares = []
    for name, before in answer.initial(recipe, seed, next(iter(got.values())).device):
        share = expected.first.gradients[name].to(before.device, non_blocking=True).abs()
        wanted = expected.changed[name].to(before.device, non_blocking=True)
        change = float(norm((wanted - before).mul_(share)))
        rounded = rounds * float(norm(wanted * share))
        if SEEN * rounded < change:
            off = float(norm((got[name].detach().float() - wanted).mul_(share)))
            squares.append(max(0.0, off**2 - rounded**2) / change**2)  # rounding is independent of the rest
    together = math.sqrt(fmean(squares)) if squares else 0.0
    if not together <= TOGETHER:
        raise Incorrect(
            f"after {answer.STEPS} steps: the changes of all parameters are off by {together:.3g} of their norms, "
            f"allowed {TOGETHER:.3g} with products in 8 bits"
        )
    return worst
