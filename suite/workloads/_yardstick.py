"""How far rounding alone takes three steps of a large model from its answer: PyTorch's own parts, run as they are.

Adam's first steps are nearly the signs of gradients, and later gradients are those at weights that earlier steps
made. In a wide and deep model what was rounded goes on growing, by how much depends on the tokens: of Llama 3.1 8B
with sequences of 8,192 tokens in bf16 torch.compile's step was off by .06 of a parameter's change in one run, and
PyTorch's own by .46 in another, where every other system's was by about as much (`20261128-032023-68ba`, and
`train-h200` as it was at commit 1b885290). A bound of .4 then refuses right systems. So a system may be off by a
quarter more than PyTorch's step as it is, where that is more than the bound. What a fault makes adds to rounding
as squares do: at .46 one shows from .35 on.

Of large models of experts the same holds of routers' gradients. Rounding sends tokens that two experts score alike
to the other one: in bf16 they are off by .30 to .35 with PyTorch's own parts, too, where .3 is allowed
(`20261130-090340-c33b`, Mixtral 8x7B's first four layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from ...registry.store.record import EAGER
from ..catalog import Catalog
from ..measure.verify import Incorrect
from ..model import Bound
from ..system import Assembly, System
from . import _expected as answer
from ._recipe import Recipe
from ._trainer import PartsTrainer

if TYPE_CHECKING:
    from ..measure.session import Session
    from ._trainer import Trainer

ROOM = 1.25
"""How many times as far as PyTorch's own step a system may be."""
ROUTER = ".router"
"""How the name of a layer's router ends."""
UNBOUNDED = Bound(loss=inf, gradient=inf, change=inf)

Check = Callable[[PartsTrainer, Recipe, answer.Expected, int, Bound], float]
"""`check_weights` of the case's optimizer."""


def change(r: Recipe, catalog: Catalog, session: Session, expected: answer.Expected, check: Check) -> float:
    """The largest relative error of what three steps of PyTorch's own parts change; 0 where these cannot be run in
    one process, or not in the memory that there is.
    """
    import torch

    if session.group.size > 1:
        return 0.0
    device = session.device.torch_device
    try:
        trainer = PartsTrainer(r, Assembly(System(EAGER), catalog))
        trainer.load(answer.initial(r, session.seed, device))
        batches = answer.Batches(r, session.seed, device)
        for step in range(answer.STEPS):
            trainer.step(*batches.draw(step))
        return check(trainer, r, expected, session.seed, UNBOUNDED)
    except (torch.OutOfMemoryError, MemoryError, NotImplementedError, Incorrect):
        return 0.0


def gradient(r: Recipe, catalog: Catalog, session: Session, expected: answer.Expected) -> float:
    """The largest relative error of a router's gradient of PyTorch's own parts, in the steps that are checked; 0
    as for `change`.
    """
    import torch

    if session.group.size > 1:
        return 0.0
    device = session.device.torch_device
    try:
        trainer = PartsTrainer(r, Assembly(System(EAGER), catalog))
        batches = answer.Batches(r, session.seed, device)
        found = []
        for number, step in ((answer.RANDOM, expected.random), (0, expected.first)):
            trainer.load(answer.initial(r, session.seed, device))
            loss = float(trainer.step(*batches.draw(number)))
            found.append(
                answer.check_step("PyTorch's own step", trainer, loss, _of(step, routers=True), UNBOUNDED)
            )
        return max(found)
    except (torch.OutOfMemoryError, MemoryError, NotImplementedError, Incorrect):
        return 0.0


def check_step(
    what: str, trainer: Trainer, loss: float, expected: answer.Step, bound: Bound, scattered: float
) -> float:
    """`_expected.check_step`, where routers' gradients may be off by a quarter more than so much."""
    wide = replace(bound, gradient=max(bound.gradient, ROOM * scattered))
    others = answer.check_step(what, trainer, loss, _of(expected, routers=False), bound)
    return max(others, answer.check_step(what, trainer, loss, _of(expected, routers=True), wide))


def _of(step: answer.Step, *, routers: bool) -> answer.Step:
    """A step's answer with the gradients of routers alone, or without them."""
    kept = {name: x for name, x in step.gradients.items() if name.endswith(ROUTER) == routers}
    return replace(step, gradients=kept)


def allowed(bound: Bound, rounding: float) -> Bound:
    """A bound that right systems keep where rounding alone takes three steps so far."""
    return replace(bound, change=max(bound.change, ROOM * rounding))
