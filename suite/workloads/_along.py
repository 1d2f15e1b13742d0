"""Updates along the model's own: a check of the weights that AdamW leaves, in bf16 of three steps, and of the
random step in the timed window in every dtype.

What storing weights in 16 bits rounds away is allowed for each parameter, and hides an optimizer that leaves out
one step of three or corrects no bias: the bound of one parameter has room for it. Rounding goes in any direction;
what such an optimizer makes is all *along* the change. Right steps leave nearly all of it, on average over
parameters, one step of three left out about two thirds.

Three steps are not held so of experts, whose tokens rounding sends elsewhere, nor of Muon, nor of models whose
rounding grows (`_yardstick`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..measure.verify import Incorrect
from ..model import BOUNDS
from . import _expected as answer
from ._coarse_products import ALONG, SEEN
from ._recipe import HYPERPARAMETERS, Recipe

if TYPE_CHECKING:
    from ._trainer import Trainer

MADE = 0.5
"""What a single update may be off by of its way: one that is not made is off by all of it."""


def holds(trainer: Trainer, recipe: Recipe) -> bool:
    """Whether rounding to bf16 is all that takes right steps from the model's."""
    products = getattr(trainer, "products", recipe.products)
    if products != "bf16" or recipe.dtype != "bf16" or recipe.hidden or recipe.large:
        return False
    return recipe.chosen.model.bounds["bf16"] == BOUNDS["bf16"]


def check(trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int) -> None:
    """Raises `Incorrect` where all parameters together went too far, or not far enough, in the first steps."""
    gradients, changed = expected.first.gradients, expected.changed
    along = _along(trainer, recipe, seed, answer.STEPS, gradients, lambda name, before, gradient: changed[name])
    if not abs(along - 1) <= ALONG:
        raise Incorrect(
            f"after {answer.STEPS} steps: along the model's, the changes of all parameters are {along:.3g} times "
            f"them on average, allowed {1 - ALONG:.3g} to {1 + ALONG:.3g}"
        )


def check_update(trainer: Trainer, recipe: Recipe, expected: answer.Step, seed: int) -> None:
    """Raises `Incorrect` where the step that made these gradients of the first weights did not make AdamW's first
    update of them: p ← (1 - lr · weight_decay) p - lr · g / (|g| + eps). In whatever dtypes, and with whatever
    else this step is not the model's: what is looked for is a step that was not made.
    """
    h = HYPERPARAMETERS

    def updated(name: str, before: Any, gradient: Any) -> Any:
        step = gradient / (gradient.abs() + h["eps"])
        return before.float() * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * step

    along = _along(trainer, recipe, seed, 1, expected.gradients, updated, recipe.hidden)
    if not abs(along - 1) <= MADE:
        raise Incorrect(
            f"a random step of the timed window: along AdamW's update, the changes of all parameters are "
            f"{along:.3g} times it on average, allowed {1 - MADE:.3g} to {1 + MADE:.3g}"
        )


def _along(
    trainer: Trainer,
    recipe: Recipe,
    seed: int,
    steps: int,
    gradients: Mapping[str, Any],
    wanted: Callable[[str, Any, Any], Any],
    without: Collection[str] = (),
) -> float:
    """How far the weights went from the first ones along the way to `wanted(name, first, gradient)`, as a share of
    it: on average over parameters, whose elements count by their gradient. Those that storing leaves where they
    were do not count.
    """
    import torch

    got, norm = trainer.weights(), torch.linalg.vector_norm
    # Masters are rounded when all is over; weights without any in each step.
    rounds = answer.ROUNDING[recipe.dtype] * (1 if recipe.stored == "master32" else steps)
    found = []
    for name, before in answer.initial(recipe, seed, next(iter(got.values())).device):
        if name in without:
            continue
        gradient = gradients[name].to(before.device, non_blocking=True).float()
        share, there = gradient.abs(), wanted(name, before, gradient).to(before.device, non_blocking=True)
        way = (there - before).mul_(share)
        change = float(norm(way))
        if SEEN * rounds * float(norm(there * share)) < change:
            went = (got[name].detach().float() - before).mul_(share)
            found.append(float(went.mul_(way).sum(dtype=torch.float64)) / change**2)
    return fmean(found) if found else 1.0
