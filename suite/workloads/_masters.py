"""The check of what three steps made of weights whose masters are in fp32: storing rounds these once, at the end,
and not in each step. What is allowed for three roundings hides updates without a correction of biases.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..measure.verify import Incorrect
from ..model import Bound
from ._expected import ROUNDING, STEPS, Expected, initial
from ._recipe import Recipe

if TYPE_CHECKING:
    from ._trainer import Trainer


def check_weights(trainer: Trainer, recipe: Recipe, expected: Expected, seed: int, bound: Bound) -> float:
    """As `_expected.check_weights`, of weights that are their masters, rounded once. Raises `Incorrect`."""
    import torch

    got = trainer.weights()
    norm = torch.linalg.vector_norm
    worst, where = 0.0, ""
    for name, before in initial(recipe, seed, next(iter(got.values())).device):
        if name not in got:
            raise Incorrect(f"after {STEPS} steps: there is no {name}")
        share = expected.first.gradients[name].to(before.device, non_blocking=True).abs()
        wanted = expected.changed[name].to(before.device, non_blocking=True)
        change = float(norm((wanted - before).mul_(share)))
        rounded = ROUNDING[recipe.dtype] * float(norm(wanted * share))
        off = float(norm((got[name].detach().float() - wanted).mul_(share)))
        if math.isnan(off):
            raise Incorrect(f"after {STEPS} steps: {name} is not finite")
        error = max(0.0, off - rounded) / change if change else off
        if error > worst:
            worst, where = error, name
    if not worst <= bound.change:
        raise Incorrect(
            f"after {STEPS} steps: the change of {where} is off by {worst:.3g} of its norm, "
            f"allowed {bound.change:.3g}"
        )
    return worst
