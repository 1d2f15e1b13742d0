"""The answer to a training case: loss, gradients and updated weights of the same model in fp32, and the check."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..catalog import Catalog
from ..measure.host_copies import copies
from ..measure.verify import Incorrect
from ..model import Bound, Chosen, draw
from ..operator import torch_dtype
from ._random import generator
from ._recipe import HYPERPARAMETERS, Recipe

if TYPE_CHECKING:
    import torch

    from ._trainer import Trainer

STEPS = 3
"""Steps after which weights are compared."""

SMALL = 1e-2
"""A parameter's gradient counts as at least so large, beside what its size would have of all: what cancels to
nothing (the bias of keys) has no relative error.
"""

TOGETHER = 4096
"""Tokens of a pass of the answer, about: one long sequence or several short ones, which alone are all launches."""

ROUNDING: Mapping[str, float] = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-25}
"""Half a unit of the last place, relative: what storing a parameter may round away in a step."""


@dataclass(frozen=True)
class Batches:
    """Tokens of a case by step, drawn on the device from the replicate's seed.

    The first `STEPS` and the one at a random step are what is checked; all others only have to be fresh.
    """

    recipe: Recipe
    seed: int
    device: torch.device

    def draw(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) int64 (A, B, S), targets the tokens one place on."""
        import torch

        r = self.recipe
        shape = (r.accumulation, r.B, r.S + 1)
        chance = generator(self.seed, self.device, step)
        drawn = torch.randint(0, r.chosen.configuration.vocabulary, shape, generator=chance, device=self.device)
        return drawn[..., :-1].contiguous(), drawn[..., 1:].contiguous()


@dataclass(frozen=True)
class Step:
    """One step of the model in fp32: its loss, the norm of its gradients, and these, clipped, on the host.

    `mean_square` is that of an element of all of them, taken once: every system is held to it.
    """

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    mean_square: float


@dataclass(frozen=True)
class Expected:
    """The answer. `first` is the first step, `random` one on another batch from the same weights; `changed` is
    what three steps make of the weights, on the host in fp32.
    """

    first: Step
    random: Step
    changed: dict[str, torch.Tensor]


RANDOM = -1
"""The number of the batch at the random step, for `Batches.draw`; far from the others as seeds go."""


def initial(recipe: Recipe, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights at the start."""
    chosen = recipe.chosen
    yield from draw(chosen.model.weights(chosen.configuration), seed, torch_dtype(recipe.dtype), device)


def compute(recipe: Recipe, catalog: Catalog, seed: int, device: torch.device) -> Expected:
    """The answer, by the operators' own references in fp32, some sequences at a time, layers computed again."""
    import torch

    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return _compute(recipe, catalog, seed, device)
    finally:
        torch.set_float32_matmul_precision(kept)


def _compute(recipe: Recipe, catalog: Catalog, seed: int, device: torch.device) -> Expected:
    import torch

    module = reference_module(recipe.chosen, recipe.S, catalog, device, {})
    module.recompute = True
    batches = Batches(recipe, seed, device)
    own = dict(module.named_parameters())

    def reset() -> None:
        for name, values in initial(recipe, seed, device):
            own[name].data.copy_(values)

    reset()
    later = _step(module, own, batches.draw(RANDOM), recipe)
    moments = {name: (_zeros(x), _zeros(x)) for name, x in own.items()}
    first = None
    for step in range(STEPS):
        this = _step(module, own, batches.draw(step), recipe, keep=step == 0)
        first = first or this
        _update(own, moments, step + 1, catalog.operator("adamw").reference)
    assert first is not None
    return Expected(first, later, copies(own, torch.float32))


def _zeros(x: Any) -> Any:
    import torch

    return torch.zeros_like(x, requires_grad=False)


def reference_module(
    chosen: Chosen, S: int, catalog: Catalog, device: torch.device, instead: Mapping[str, Callable[..., Any]]
) -> Any:
    """The model in fp32, its parts the operators' references but for those given `instead`."""
    import torch
    from torch.nn import functional

    parts: dict[str, Callable[..., Any]] = {
        x.name: catalog.operator(x.operator).reference for x in chosen.model.parts(chosen.configuration, 1, S)
    }
    with torch.device("meta"):
        module: Any = chosen.model.module(chosen.configuration, {**parts, "linear": functional.linear, **instead})
    module = module.to(torch.float32).to_empty(device=device)
    module.prepare(S, device, torch.float32)
    return module


def _step(
    module: Any,
    own: Mapping[str, Any],
    batch: tuple[torch.Tensor, torch.Tensor],
    recipe: Recipe,
    keep: bool = True,
) -> Step:
    """One step's gradients, clipped, left in the parameters too; on the host only those to `keep`."""
    import torch

    for x in own.values():
        x.grad = None
    tokens, targets = (x.flatten(0, 1) for x in batch)
    loss = 0.0
    several = max(1, TOGETHER // recipe.S)
    for some, wanted in zip(tokens.split(several), targets.split(several), strict=True):
        value = module(some, wanted) * (len(some) / len(tokens))
        value.backward()
        loss += float(value.detach())
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.grad) for x in own.values()])))
    if recipe.clip and norm > recipe.clip:
        for x in own.values():
            x.grad.mul_(recipe.clip / norm)
    if not keep:
        return Step(loss, norm, {}, 0.0)
    # As the case stores its own: 2**-9 of an element is nothing beside bf16's bounds, and 8 billion are 16 GB.
    kept = torch_dtype(recipe.dtype)
    norms = [torch.linalg.vector_norm(x.grad.to(kept), dtype=torch.float32) for x in own.values()]
    squares = float(torch.stack(norms).double().square().sum())
    size = sum(x.numel() for x in own.values())
    return Step(loss, norm, copies({name: x.grad for name, x in own.items()}, kept), squares / size)


def _update(
    own: Mapping[str, Any],
    moments: dict[str, tuple[Any, Any]],
    step: int,
    reference: Callable[..., Any],
) -> None:
    """A step of AdamW in fp32 by the operator's reference, tensor by tensor."""
    import torch

    with torch.no_grad():
        for name, x in own.items():
            m, v = moments[name]
            p, m_new, v_new = reference([x], [x.grad], [m], [v], None, step, **HYPERPARAMETERS)
            x.copy_(p)
            m.copy_(m_new)
            v.copy_(v_new)


def check_step(what: str, trainer: Trainer, loss: float, expected: Step, bound: Bound) -> float:
    """The largest relative error of the step's gradients. Raises `Incorrect` for a wrong loss or gradient."""
    import torch

    off = abs(loss - expected.loss) / abs(expected.loss)
    if not off <= bound.loss:
        raise Incorrect(f"{what}: the loss is {loss:.6g}, the model's {expected.loss:.6g}")
    got = trainer.gradients()
    worst, where = 0.0, ""
    for name, kept in expected.gradients.items():
        if name not in got:
            raise Incorrect(f"{what}: {name} has no gradient")
        own = got[name].detach()
        if own.shape != kept.shape:
            raise Incorrect(f"{what}: the gradient of {name} has shape {tuple(own.shape)}")
        # One copy in fp32 beside the system: of a table of 128,256 tokens it is 2 GB.
        wanted = kept.to(own.device, non_blocking=True)
        apart = wanted.to(torch.float32, copy=True).sub_(own)
        least = SMALL * (expected.mean_square * wanted.numel()) ** 0.5
        norm = max(float(torch.linalg.vector_norm(wanted, dtype=torch.float32)), least)
        error = float(torch.linalg.vector_norm(apart)) / norm
        if math.isnan(error):
            raise Incorrect(f"{what}: the gradient of {name} is not finite")
        if error > worst:
            worst, where = error, name
    if not worst <= bound.gradient:
        raise Incorrect(
            f"{what}: the gradient of {where} is off by {worst:.3g} of its norm, allowed {bound.gradient:.3g}"
        )
    return worst


def check_weights(
    trainer: Trainer, recipe: Recipe, expected: Expected, seed: int, bound: Bound, roundings: int = STEPS
) -> float:
    """The largest relative error of what three steps changed, beyond what storing may round away so many times:
    weights that have masters in fp32 are rounded once. Raises `Incorrect`.

    Elements count by their gradient: of one that is nothing but rounding (of the bias of keys, which changes no
    score) Adam makes as large a step as of any other.
    """
    import torch

    got = trainer.weights()
    norm = torch.linalg.vector_norm
    worst, where = 0.0, ""
    for name, before in initial(recipe, seed, next(iter(got.values())).device):
        if name not in got:
            raise Incorrect(f"after {STEPS} steps: there is no {name}")
        # What is narrow stays so: with fp32 it is computed in fp32, without a copy of that size.
        share = expected.first.gradients[name].to(before.device, non_blocking=True).abs()
        wanted = expected.changed[name].to(before.device, non_blocking=True)
        change = float(norm((wanted - before).mul_(share)))
        rounded = roundings * ROUNDING[recipe.dtype] * float(norm(wanted * share))
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


def random_step(seed: int, steps: int) -> int:
    """Which of the timed steps is checked: the same for all systems of a case in a replicate."""
    return random.Random(f"{seed}/checked").randrange(steps)
