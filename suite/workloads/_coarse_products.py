"""Products in 8 bits: the check of their gradients, and of weights that these step.

With every layer rounding to E4M3 scatters gradients further, those of queries and keys most: in a Llama of 32
layers by half of their norms (`registry/reference/truth/e4m3-gradients.txt`). With every step it takes two runs
apart, the last norm's bias by up to .7 (`registry/reference/truth/e4m3-changes.txt`). That is as far as some
faults take them. But what is wrong moves a gradient or a change *along* what it should be, which scatter hardly
does. So what is off along it is held at any depth, that of all parameters together tightly, and what is off
across it may be more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from ..catalog import Catalog
from ..measure.verify import Incorrect
from ..model import Bound
from . import _expected as answer
from ._fp8 import emulated
from ._recipe import Recipe

if TYPE_CHECKING:
    import torch

    from ._trainer import Trainer

CHANGED = 0.9
"""How far the change of one parameter may be off, at most: of one that is not stepped it is 1."""
ALONG = 0.4
"""How much of it may be along the answer's, where it is further off than a model's bound."""
ALONG_ALL = 0.2
"""The same of all parameters, on average. Rounding made .10 where that was most; an optimizer that does something
else makes .30 and more, three steps of which one is left out too.
"""
SEEN = 4.0
"""How many times what storing rounds a parameter must have moved to count in the averages: gains of about 1 do
not, in bf16.
"""

KIND = "1x128"
"""Whose rounding is emulated. By the other kinds gradients scatter as much, within `BEYOND`."""
BEYOND = 2.0
"""How many times as far as rounding alone a system may scatter most gradients, and one beside most: two runs
differ by chance.
"""
WIDEST = 0.8
"""How far a gradient may be off in any case: one that is dropped is off by 1."""


def scattered(
    recipe: Recipe, catalog: Catalog, seed: int, device: torch.device, first: answer.Step
) -> dict[str, float]:
    """How far rounding products' inputs to E4M3 alone takes each parameter's first gradient from the answer's, of
    its norm: all else as the answer computes it.
    """
    import torch

    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        linear = emulated(KIND, stuck=False)
        module = answer.reference_module(recipe.chosen, recipe.S, catalog, device, {"linear": linear})
        module.recompute = True
        own = dict(module.named_parameters())
        for name, values in answer.initial(recipe, seed, device):
            own[name].data.copy_(values)
        answer._step(module, own, answer.Batches(recipe, seed, device).draw(0), recipe, keep=False)
        return {name: _apart(x.grad, first, name)[0] for name, x in own.items()}
    finally:
        torch.set_float32_matmul_precision(kept)


def check_step(
    what: str,
    trainer: Trainer,
    loss: float,
    expected: answer.Step,
    bound: Bound,
    scatter: Mapping[str, float],
) -> float:
    """`_expected.check_step`, but that a gradient may be further off than the bound: up to `WIDEST`, and `BEYOND`
    times what rounding alone makes of it, more where most of the system's are further off; along the answer's it
    may not. Raises `Incorrect`.
    """
    worst = answer.check_step(what, trainer, loss, expected, replace(bound, gradient=math.inf))
    if worst <= bound.gradient:
        return worst
    got = trainer.gradients()
    found = {name: _apart(got[name], expected, name) for name in expected.gradients}
    ratios = [off / scatter[name] for name, (off, _) in found.items() if scatter.get(name)]
    of_most = min(BEYOND, max(1.0, median(ratios))) if ratios else 1.0
    for name, (off, along) in found.items():
        alone = scatter.get(name, 0.0)
        allowed = max(bound.gradient, min(WIDEST, BEYOND * of_most * alone))
        if not off <= allowed:
            raise Incorrect(
                f"{what}: the gradient of {name} is off by {off:.3g} of its norm, allowed {allowed:.3g}; "
                f"rounding alone makes {alone:.3g}"
            )
        if not abs(along) <= bound.gradient:
            raise Incorrect(
                f"{what}: along the model's, the gradient of {name} is {1 + along:.3g} times it, allowed "
                f"{1 - bound.gradient:.3g} to {1 + bound.gradient:.3g}"
            )
    return worst


def _apart(gradient: torch.Tensor, expected: answer.Step, name: str) -> tuple[float, float]:
    """How far a gradient is off, of the norm of the answer's, which counts as in `_expected.check_step`; and how
    much of that is along the answer's.
    """
    import torch

    own = gradient.detach()
    wanted = expected.gradients[name].to(own.device, non_blocking=True)
    apart = wanted.to(torch.float32, copy=True).sub_(own)
    least = answer.SMALL * (expected.mean_square * wanted.numel()) ** 0.5
    norm = max(float(torch.linalg.vector_norm(wanted, dtype=torch.float32)), least)
    off = float(torch.linalg.vector_norm(apart)) / norm
    return off, -float(apart.mul_(wanted).sum(dtype=torch.float64)) / norm**2


def check_weights(trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int, bound: Bound) -> float:
    """`_expected.check_weights`, but that a change may be further off than the bound, up to `CHANGED`, where it is
    not so along the answer's by more than `ALONG`; then all parameters together: along it by `ALONG_ALL` on
    average, and the root of the mean of their squared errors within the bound. Raises `Incorrect`.
    """
    import torch

    widest = replace(bound, change=max(bound.change, CHANGED))
    worst = answer.check_weights(trainer, recipe, expected, seed, widest)
    got, norm = trainer.weights(), torch.linalg.vector_norm
    # Masters are rounded when all is over; weights without any in each step.
    rounds = answer.ROUNDING[recipe.dtype] * (1 if recipe.stored == "master32" else answer.STEPS)
    squares, lengths = [], []
    for name, before in answer.initial(recipe, seed, next(iter(got.values())).device):
        share = expected.first.gradients[name].to(before.device, non_blocking=True).abs()
        wanted = expected.changed[name].to(before.device, non_blocking=True)
        way = (wanted - before).mul_(share)
        apart = (got[name].detach().float() - wanted).mul_(share)
        change, off = float(norm(way)), float(norm(apart))
        if not change:
            continue
        rounded = rounds * float(norm(wanted * share)) / change
        off, along = off / change, float(apart.mul_(way).sum(dtype=torch.float64)) / change**2
        if off - rounded > bound.change and abs(along) - rounded > ALONG:
            raise Incorrect(
                f"after {answer.STEPS} steps: along the model's, the change of {name} is {1 + along:.3g} times "
                f"it, allowed {1 - ALONG:.3g} to {1 + ALONG:.3g}"
            )
        if SEEN * rounded < 1:
            squares.append(max(0.0, off**2 - rounded**2))  # rounding is independent of the rest
            lengths.append(along)
    if not squares:
        return worst
    along, together = fmean(lengths), math.sqrt(fmean(squares))
    if not abs(along) <= ALONG_ALL:
        raise Incorrect(
            f"after {answer.STEPS} steps: along the model's, the changes of all parameters are {1 + along:.3g} "
            f"times them on average, allowed {1 - ALONG_ALL:.3g} to {1 + ALONG_ALL:.3g} with products in 8 bits"
        )
    if not together <= bound.change:
        raise Incorrect(
            f"after {answer.STEPS} steps: the changes of all parameters are off by {together:.3g} of their norms, "
            f"allowed {bound.change:.3g} with products in 8 bits"
        )
    return worst
