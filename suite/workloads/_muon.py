"""Muon as an optimizer of training: matrices of layers step by their orthogonalized momentum, all else by AdamW.

K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024: Nesterov's momentum, five
Newton-Schulz iterations, and AdamW for embeddings, the output projection, norms and biases. Rates are those of
Liu et al., arXiv 2502.16982 (`match_rms_adamw` of `torch.optim.Muon`): AdamW's times 0.2 √max(M, N), so that both
kinds of parameters have one rate and one decay.

The answer and its check are functions of their own, not branches of `_expected`: what AdamW's cases compute is
what it was before there was Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..catalog import Catalog
from ..measure.host_copies import copies
from ..measure.verify import Incorrect
from ..model import Bound
from ..operators.newton_schulz import STEPS as ITERATIONS
from ..operators.newton_schulz import reference as orthogonal
from . import _expected as answer
from ._recipe import HYPERPARAMETERS, Recipe

if TYPE_CHECKING:
    import torch

    from ._trainer import Trainer

MOMENTUM = 0.95
"""Of Nesterov's kind: the step is along (1 - μ) g + μ b, with b ← μ b + (1 - μ) g."""


def rate(lr: float, shape: Sequence[int]) -> float:
    """Of one parameter."""
    return lr * 0.2 * math.sqrt(max(shape[-2:]))


# The answer.


def reference(p: Any, g: Any, b: Any) -> tuple[Any, Any]:
    """(new parameter, new momentum) of one matrix or a stack of them."""
    import torch

    b = MOMENTUM * b + (1 - MOMENTUM) * g
    along = (MOMENTUM * b + (1 - MOMENTUM) * g).reshape(-1, *p.shape[-2:])
    # A matrix of zeros, of an expert without tokens, makes no step.
    some = torch.linalg.vector_norm(along, dim=(1, 2), keepdim=True) > 0
    step = torch.where(some, orthogonal(torch.where(some, along, 1.0), ITERATIONS), 0.0)
    lr = HYPERPARAMETERS["lr"]
    return p * (1 - lr * HYPERPARAMETERS["weight_decay"]) - rate(lr, p.shape) * step.reshape(p.shape), b


def compute(recipe: Recipe, catalog: Catalog, seed: int, device: torch.device) -> answer.Expected:
    """As `_expected.compute`, with weights that Muon steps."""
    import torch

    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return _compute(recipe, catalog, seed, device)
    finally:
        torch.set_float32_matmul_precision(kept)


def _compute(recipe: Recipe, catalog: Catalog, seed: int, device: torch.device) -> answer.Expected:
    import torch

    module = answer.reference_module(recipe.chosen, recipe.S, catalog, device, {})
    module.recompute = True
    batches = answer.Batches(recipe, seed, device)
    own = dict(module.named_parameters())
    for name, values in answer.initial(recipe, seed, device):
        own[name].data.copy_(values)
    later = answer._step(module, own, batches.draw(answer.RANDOM), recipe)
    matrices = recipe.hidden
    rest = {name: x for name, x in own.items() if name not in matrices}
    moments = {name: (answer._zeros(x), answer._zeros(x)) for name, x in rest.items()}
    momenta = {name: answer._zeros(own[name]) for name in matrices}
    steps = []
    for step in range(answer.STEPS):
        steps.append(answer._step(module, own, batches.draw(step), recipe, keep=step == 0))
        answer._update(rest, moments, step + 1, catalog.operator("adamw").reference)
        with torch.no_grad():
            for name, b in momenta.items():
                p, b_new = reference(own[name], own[name].grad, b)
                own[name].copy_(p)
                b.copy_(b_new)
    return answer.Expected(steps[0], later, copies(own, torch.float32))


def check_weights(trainer: Trainer, recipe: Recipe, expected: answer.Expected, seed: int, bound: Bound) -> float:
    """As `_expected.check_weights`. A change of a matrix counts by its product with the gradient, which is to a
    direction what the gradient of an element is to Adam's step: directions that are nothing but rounding are
    stepped along as far as any other.
    """
    import torch

    got, matrices, worst = trainer.weights(), frozenset(recipe.hidden), 0.0
    norm = torch.linalg.vector_norm
    for name, before in answer.initial(recipe, seed, next(iter(got.values())).device):
        gradient = expected.first.gradients[name].to(before.device, non_blocking=True).float()
        wanted = expected.changed[name].to(before.device, non_blocking=True)

        def counted(x: Any, name: str = name, gradient: Any = gradient) -> Any:
            return x @ gradient.mT if name in matrices else x * gradient.abs()

        change = float(norm(counted(wanted - before)))
        rounded = answer.STEPS * answer.ROUNDING[recipe.dtype] * float(norm(counted(wanted)))
        off = float(norm(counted(got[name].detach().float() - wanted)))
        error = max(0.0, off - rounded) / change if change else off
        if not error <= bound.change:
            raise Incorrect(
                f"after {answer.STEPS} steps: the change of {name} is off by {error:.3g} of its norm, "
                f"allowed {bound.change:.3g}"
            )
        worst = max(worst, error)
    return worst


# A trainer's.


@dataclass(frozen=True)
class Muon:
    """The update of a trainer, in the place of AdamW's: `adamw` of all that is no hidden matrix, and the matrices
    of one shape together by `orthogonalize[shape](grads (T, M, N), steps)`.

    `matrices` are places in the lists; their first moments are the momentum, their second moments are empty.
    """

    adamw: Callable[..., None]
    orthogonalize: Mapping[tuple[int, ...], Callable[..., Any]]
    matrices: Sequence[int]

    def __call__(
        self,
        params: Sequence[Any],
        grads: Sequence[Any],
        exp_avgs: Sequence[Any],
        exp_avg_sqs: Sequence[Any],
        masters: Sequence[Any] | None,
        **numbers: Any,
    ) -> None:
        own = frozenset(self.matrices)
        rest = [i for i in range(len(params)) if i not in own]

        def some(tensors: Sequence[Any], places: Sequence[int]) -> list[Any]:
            return [tensors[i] for i in places]

        lists = (params, grads, exp_avgs, exp_avg_sqs)
        self.adamw(*(some(x, rest) for x in lists), masters=masters and some(masters, rest), **numbers)
        self._step(
            some(params, self.matrices),
            some(grads, self.matrices),
            some(exp_avgs, self.matrices),
            masters and some(masters, self.matrices),
            numbers["lr"],
            numbers["weight_decay"],
        )

    def _step(
        self, params: list[Any], grads: list[Any], momenta: list[Any], masters: Any, lr: float, decay: float
    ) -> None:
        import torch

        dtype = params[0].dtype
        wide = [x.to(momenta[0].dtype) for x in grads]
        torch._foreach_lerp_(momenta, wide, 1 - MOMENTUM)
        along = torch._foreach_lerp(wide, momenta, MOMENTUM)
        held = masters or params
        torch._foreach_mul_(held, 1 - lr * decay)
        for shape, places in _alike(params).items():
            stacked = torch.cat([along[i].reshape(-1, *shape[-2:]).to(dtype) for i in places])
            steps = self.orthogonalize[shape](grads=stacked, steps=ITERATIONS)
            steps = steps.view(len(places), *shape).to(held[0].dtype)
            torch._foreach_add_([held[i] for i in places], list(steps.unbind()), alpha=-rate(lr, shape))
        if masters:
            torch._foreach_copy_(params, masters)


class Together:
    """Optimizers that step one after the other, as one."""

    def __init__(self, *optimizers: Any) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[Any]:
        """Of all."""
        return [group for x in self._optimizers for group in x.param_groups]

    def step(self) -> None:
        """Of all."""
        for x in self._optimizers:
            x.step()

    def state_dict(self) -> list[Any]:
        """Of each."""
        return [x.state_dict() for x in self._optimizers]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Of each."""
        for x, own in zip(self._optimizers, state, strict=True):
            x.load_state_dict(own)


def library(params: Sequence[Any], matrices: Sequence[int]) -> Together:
    """`torch.optim.Muon` of the matrices and PyTorch's fused AdamW of all else, as its documentation has them.
    Raises NotImplementedError where there is none, or where it does not take a parameter.
    """
    import torch

    if not hasattr(torch.optim, "Muon"):
        raise NotImplementedError("this PyTorch has no torch.optim.Muon, which came with 2.9")
    h, own = HYPERPARAMETERS, set(matrices)
    if any(params[i].dim() != 2 for i in matrices):
        raise NotImplementedError("torch.optim.Muon takes no stacks of matrices")
    both: dict[str, Any] = {"lr": h["lr"], "weight_decay": h["weight_decay"]}
    rest = [x for i, x in enumerate(params) if i not in own]
    return Together(
        torch.optim.Muon([params[i] for i in matrices], momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw", **both),
        torch.optim.AdamW(rest, betas=(h["beta1"], h["beta2"]), eps=h["eps"], fused=True, **both),
    )


def _alike(params: Sequence[Any]) -> dict[tuple[int, ...], list[int]]:
    """Places by shape."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(params):
        found.setdefault(tuple(x.shape), []).append(i)
    return found
