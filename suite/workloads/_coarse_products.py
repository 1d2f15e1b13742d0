"""Products in 8 bits: the checks of their gradients, and of the weights that these step.

Rounding to E4M3 takes two runs apart with every layer and every step, some parameters twice as far as most. So the
bound of one parameter is wide: wider than what many faults of an optimizer make. Of all parameters together
rounding makes less than these do (`registry/reference/truth/e4m3-together.txt`), and least *along* what they
should be or change by, which is where a program that does something else shows
(`registry/reference/truth/e4m3-changes.txt`, `e4m3-gradients.txt`).

In a deep model rounding alone passes the bounds, by how much depends on the tokens. So a case of such products
runs PyTorch's own parts with products that are rounded and nothing else, in each way to scale, and a system may be
off by a quarter more than they are, as `_yardstick` has it of rounding to 16 bits. What is allowed one parameter
then is not allowed all of them together, nor along the answer (`registry/reference/truth/e4m3-bounds.txt`, by
`tests/calibration/coarse_bounds.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import TYPE_CHECKING

from ...registry.store.record import EAGER
from ..catalog import Catalog
from ..measure.verify import Incorrect
from ..model import Bound
from ..system import Assembly, Changes, System
from . import _expected as answer
from ._arms import ArmTrainer
from ._recipe import Recipe
from ._yardstick import ROOM, UNBOUNDED

if TYPE_CHECKING:
    from ..measure.session import Session
    from ._trainer import Trainer

EMULATED = tuple(
    System(EAGER, changes=Changes(products=products))
    for products in ("e4m3_tensorwise_e5m2", "e4m3_rowwise", "e4m3_1x128")
)
"""Systems that round products and nothing else, a way to scale each; with gradients in E5M2 a tensor's one scale
loses a little more.
"""
TOGETHER = 0.4
"""How far gradients or three steps of all parameters may be off: the root of the mean of their squared errors."""
ALONG = 0.2
"""How much of it may be along the answer's, on average. Of three steps rounding made .10 where that was most; what
else an optimizer may do made .30 and more, three steps of which one is left out too.
"""
ASTRAY = 0.4
"""How much of it may be along a single one's where rounding takes one further off than its bound, or a quarter
more than rounding makes: of gradients that was .36 at the most in models of up to 64 layers. A dropped one is off
by 1.
"""
LEFT = 0.9
"""The most that may be so, whatever rounding makes: of one that is dropped all is."""
SEEN = 4.0
"""How many times what storing rounds a parameter must have moved to count in the mean: gains of about 1 do not, in
bf16.
"""


@dataclass(frozen=True)
class Apart:
    """Relative errors of parameters' gradients, or of what steps changed: the largest, the root of the mean of
    their squares, and how long they are along the answer's, less 1: on average, and furthest from it.
    """

    worst: float = 0.0
    together: float = 0.0
    along: float = 0.0
    astray: float = 0.0


@dataclass(frozen=True)
class Rounding:
    """How far rounding to 8 bits alone takes a case from its answer, the most of all ways to scale: gradients of
    the steps that are checked, and the change of three steps. 0 where that was not found out.
    """

    gradients: Apart = Apart()
    changes: Apart = Apart()


NOTHING = Rounding()


def rounding(r: Recipe, catalog: Catalog, session: Session, expected: answer.Expected) -> Rounding:
    """Runs PyTorch's own parts with rounded products; of ways that cannot be run in one process, or not in the
    memory that there is, nothing is known.
    """
    import torch

    gradients, changes = [Apart()], [Apart()]
    for system in EMULATED if session.group.size == 1 else ():
        try:
            steps, change = _rounded(r, Assembly(system, catalog), session, expected)
        except (torch.OutOfMemoryError, MemoryError, NotImplementedError, Incorrect):
            continue
        finally:
            session.device.release()
        gradients += steps
        changes.append(change)
    return Rounding(_most(gradients), _most(changes))


def _rounded(
    r: Recipe, assembly: Assembly, session: Session, expected: answer.Expected
) -> tuple[list[Apart], Apart]:
    """Gradients of the steps that are checked, and what three steps change."""
    device = session.device.torch_device
    batches = answer.Batches(r, session.seed, device)
    trainer = ArmTrainer(r, assembly)
    gradients = []
    for number, step in ((answer.RANDOM, expected.random), (0, expected.first)):
        trainer.load(answer.initial(r, session.seed, device))
        trainer.step(*batches.draw(number))
        gradients.append(gradients_apart(trainer, step))
    for number in range(1, answer.STEPS):
        trainer.step(*batches.draw(number))
    worst = answer.check_weights(trainer, r, expected, session.seed, UNBOUNDED)
    return gradients, replace(changes_apart(trainer, r, expected, session.seed), worst=worst)


def _most(found: Iterable[Apart]) -> Apart:
    each = list(found)
    return Apart(*(max((getattr(x, field.name) for x in each), key=abs) for field in fields(Apart)))


def gradients_apart(trainer: Trainer, expected: answer.Step) -> Apart:
    """A step's gradients beside the answer's, by the norms of `_expected.check_step`; of those that cancel to
    nothing none counts.
    """
    import torch

    got, norm = trainer.gradients(), torch.linalg.vector_norm
    errors, lengths = [], []
    for name, kept in expected.gradients.items():
        own = got[name].detach()
        wanted = kept.to(own.device, torch.float32, non_blocking=True)
        size = float(norm(wanted))
        if size > answer.SMALL * (expected.mean_square * wanted.numel()) ** 0.5:
            apart = own.float().sub_(wanted) if own.dtype != torch.float32 else own - wanted
            errors.append(float(norm(apart)) / size)
            lengths.append(float(apart.mul_(wanted).sum(dtype=torch.float64)) / size**2)
    return _apart(errors, lengths)


def _apart(errors: list[float], lengths: list[float]) -> Apart:
    if not errors:
        return Apart()
    together = math.sqrt(fmean(x * x for x in errors))
    return Apart(max(errors), together, fmean(lengths), max(lengths, key=abs))


def check_step(
    what: str, trainer: Trainer, loss: float, expected: answer.Step, bound: Bound, rounds: Rounding
) -> float:
    """`_expected.check_step`, where a parameter may be off by more than its bound as rounding is; then all of them
    together. Raises `Incorrect`.
    """
    room = ROOM * rounds.gradients.worst
    widened = replace(bound, gradient=max(bound.gradient, room))
    worst = answer.check_step(what, trainer, loss, expected, widened)
    _hold(what, "gradients", gradients_apart(trainer, expected), rounds.gradients, single=worst > bound.gradient)
    return worst


def _hold(what: str, of: str, found: Apart, rounds: Apart, single: bool) -> None:
    """Raises `Incorrect` where all parameters together are off by more than rounding makes; with `single` also
    where one of them is, along the model's.
    """
    most = max(TOGETHER, ROOM * rounds.together)
    room = min(LEFT, max(ASTRAY, ROOM * abs(rounds.astray)))
    if not found.together <= most:
        raise Incorrect(
            f"{what}: the {of} of all parameters are off by {found.together:.3g} of their norms, "
            f"allowed {most:.3g} with products in 8 bits"
        )
    if not abs(found.along) <= ALONG:
        raise Incorrect(
            f"{what}: along the model's, the {of} of all parameters are {1 + found.along:.3g} times them on "
            f"average, allowed {1 - ALONG:.3g} to {1 + ALONG:.3g} with products in 8 bits"
        )
    if single and not abs(found.astray) <= room:
        raise Incorrect(
            f"{what}: along the model's, the {of} of one parameter are {1 + found.astray:.3g} times them, "
            f"allowed {1 - room:.3g} to {1 + room:.3g} with products in 8 bits"
        )


def check_weights(
    trainer: Trainer,
    recipe: Recipe,
    expected: answer.Expected,
    seed: int,
    bound: Bound,
    rounds: Rounding = NOTHING,
) -> float:
    """`_expected.check_weights`, then all parameters together. Raises `Incorrect`."""
    widened = replace(bound, change=max(bound.change, ROOM * rounds.changes.worst))
    worst = answer.check_weights(trainer, recipe, expected, seed, widened)
    found = changes_apart(trainer, recipe, expected, seed)
    _hold(f"after {answer.STEPS} steps", "changes", found, rounds.changes, single=worst > bound.change)
    return worst


def changes_apart(trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int) -> Apart:
    """What three steps changed beside the answer's, beyond what storing rounds away."""
    import torch

    got, norm = trainer.weights(), torch.linalg.vector_norm
    # Masters are rounded when all is over; weights without any in each step.
    rounds = answer.ROUNDING[recipe.dtype] * (1 if recipe.stored == "master32" else answer.STEPS)
    errors, lengths = [], []
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
            # rounding is independent of the rest
            errors.append(math.sqrt(max(0.0, off**2 - rounded**2)) / change)
    return _apart(errors, lengths)


DEFINITION = (
    rounding,
    _rounded,
    gradients_apart,
    check_step,
    check_weights,
    changes_apart,
    tuple(x.changes.products for x in EMULATED),
    TOGETHER,
    ALONG,
    ASTRAY,
    LEFT,
    SEEN,
)
"""What a case of products in 8 bits is known by, beside its answer."""
