"""Products in 8 bits: the check of weights that gradients of such products step.

Rounding to E4M3 takes a gradient up to a few tenths from fp32's. A step of Adam is nearly the gradient's sign, so
that the first is off by little; from then on two runs have different weights, and what separates them grows with
each step, in the last norm's bias about twice as fast as in most parameters
(`registry/reference/truth/e4m3-together.txt`). So the first step is held tightly, parameter by parameter; three
steps all together, which an optimizer that does something else takes further than rounding does; and each
parameter only to be no exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..measure.verify import Incorrect
from ..model import Bound
from . import _expected as answer
from . import _pieces as pieces
from ._recipe import HYPERPARAMETERS, Recipe

if TYPE_CHECKING:
    import torch

    from ._trainer import Trainer

FIRST = 0.3
"""How far the first step of a parameter may be off. Signs of gradients that are off by e, as normal numbers are,
make it √(.85 e³): .23 at the bound of 8-bit gradients.
"""
TOGETHER = 0.4
"""The same of three steps, of all parameters: the root of the mean of their squared errors."""
OUTLIER = 4.0
"""How many times the mean of all others a parameter may be off, where that is more than its bound."""
WRONG = 0.9
"""How far no parameter may be off. At 1 it did not move."""
SEEN = 4.0
"""How many times what storing rounds a parameter must have moved to count in the mean."""


def check_first(
    trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int, adamw: Callable[..., Any]
) -> None:
    """Holds what one step changed of each parameter to a step of `adamw` by the answer's gradients. Raises
    `Incorrect`. Elements count by their gradient, and what storing may round away does not.
    """
    import torch

    what = "after the first step"
    for name, got, before in _weights(trainer, recipe, seed, what):
        gradient = expected.first.gradients[name].to(before.device, non_blocking=True)
        off = way = stored = 0.0
        for some in zip(*(x.reshape(-1).split(pieces.PIECE) for x in (got, before, gradient)), strict=True):
            now, then, g = (x.float() for x in some)
            nothing = torch.zeros_like(then), torch.zeros_like(then)
            wanted, *_ = adamw([then], [g], *([x] for x in nothing), None, 1, **HYPERPARAMETERS)
            squares = _squares(now, then, wanted, g.abs(), answer.ROUNDING[recipe.dtype])
            off, way, stored = off + squares[0], way + squares[1], stored + squares[2]
        error = _error(f"{what}: {name}", off, way, stored)
        if not error <= FIRST:
            raise Incorrect(
                f"{what}: the change of {name} is off by {error:.3g} of its norm, allowed {FIRST:.3g} "
                "with products in 8 bits"
            )


def check_weights(trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int, bound: Bound) -> float:
    """As `_expected.check_weights`, of products in 8 bits. Raises `Incorrect`.

    A parameter whose steps are mostly lost in what storing rounds (gains of about 1, in bf16) is not in the mean.
    """
    what = f"after {answer.STEPS} steps"
    # Masters are rounded when all is over; weights without any in each step, and steps that are too short the same
    # way each time.
    rounds = answer.ROUNDING[recipe.dtype] * (1 if recipe.stored == "master32" else answer.STEPS)
    errors, seen = {}, {}
    for name, got, before in _weights(trainer, recipe, seed, what):
        share = expected.first.gradients[name].to(before.device, non_blocking=True).abs()
        wanted = expected.changed[name].to(before.device, non_blocking=True)
        off, way, stored = _squares(got, before, wanted, share, rounds)
        errors[name] = _error(f"{what}: {name}", off, way, stored)
        if SEEN**2 * stored < way:
            seen[name] = errors[name]
    together = _mean(seen.values())
    if not together <= TOGETHER:
        raise Incorrect(
            f"{what}: the changes of all parameters are off by {together:.3g} of their norms, "
            f"allowed {TOGETHER:.3g} with products in 8 bits"
        )
    where = max(errors, key=lambda x: errors[x])
    others = _mean(x for name, x in seen.items() if name != where)
    allowed = min(WRONG, max(bound.change, OUTLIER * others))
    if not errors[where] <= allowed:
        raise Incorrect(
            f"{what}: the change of {where} is off by {errors[where]:.3g} of its norm, allowed {allowed:.3g} "
            "with products in 8 bits"
        )
    return errors[where]


def _weights(trainer: Trainer, recipe: Recipe, seed: int, what: str) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Each weight by name, as it is and as it was. Raises `Incorrect` for one that is missing."""
    got = trainer.weights()
    for name, before in answer.initial(recipe, seed, next(iter(got.values())).device):
        if name not in got:
            raise Incorrect(f"{what}: there is no {name}")
        yield name, got[name].detach(), before


def _squares(got: Any, before: Any, wanted: Any, share: Any, rounds: float) -> tuple[float, float, float]:
    """Sums of squares of elements, which count by `share`: how far they are off, how far they should have moved,
    and what storing rounds of them, up to `rounds` of each.
    """
    import torch

    def square(x: Any) -> float:
        return float(torch.linalg.vector_norm(x, dtype=torch.float32)) ** 2

    off = square((got.float() - wanted).mul_(share))
    return off, square((wanted - before).mul_(share)), rounds**2 * square(wanted * share)


def _error(what: str, off: float, way: float, stored: float) -> float:
    """How far a parameter is off, of its way, beyond what storing rounds; of their squares. Raises `Incorrect`."""
    if math.isnan(off):
        raise Incorrect(f"{what} is not finite")
    far = max(0.0, math.sqrt(off) - math.sqrt(stored))
    return far / math.sqrt(way) if way else far


def _mean(errors: Iterable[float]) -> float:
    """The root of the mean of their squares."""
    squares = [x * x for x in errors]
    return math.sqrt(fmean(squares)) if squares else 0.0
