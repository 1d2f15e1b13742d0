"""A trainer of a model of somebody's own class, as its users train it: PyTorch's clipping and fused AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..measure.verify import Incorrect
from ..model import Chosen
from ._recipe import HYPERPARAMETERS, Recipe

if TYPE_CHECKING:
    import torch


class Program(Protocol):
    """What a baseline's factory gives for `train` where it brings no step of its own."""

    def build(self, chosen: Chosen, S: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Its model for sequences of S tokens, with these weights, in their dtype and on their device."""
        ...

    def parameters(self) -> Mapping[str, tuple[torch.nn.Parameter, bool]]:
        """Its parameters by our names, and whether each is stored transposed."""
        ...

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of int64 (B, S) each."""
        ...


class WholeTrainer:
    """Steps of a whole program; a `Trainer`."""

    def __init__(self, recipe: Recipe, program: Program) -> None:
        if recipe.hidden:
            raise NotImplementedError("this program steps by AdamW; this case's optimizer is Muon")
        if recipe.stored != "plain":
            raise NotImplementedError("PyTorch's AdamW keeps moments in its parameters' dtype, and no masters")
        self.recipe = recipe
        self.program = program
        self._own: Mapping[str, tuple[Any, bool]] = {}
        self._optimizer: Any = None

    def of(self, recipe: Recipe) -> WholeTrainer:
        """The same program, of another recipe; this one is not to be used any more."""
        return type(self)(recipe, self.program)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes these weights, and an optimizer that has made no step."""
        import torch

        if not self._own:
            r = self.recipe
            self.program.build(r.chosen, r.S, weights)
            self._own = self.program.parameters()
            missing = [x for x in r.chosen.model.weights(r.chosen.configuration) if x not in self._own]
            if missing:
                raise NotImplementedError(f"this program has no {', '.join(missing)}")
        else:
            with torch.no_grad():
                for name, values in weights:
                    self._seen(name, lambda x: x.detach()).copy_(values)
        h = HYPERPARAMETERS
        # Anew, and its states with it; memory of the last one's is reused.
        self._optimizer = None
        self._optimizer = torch.optim.AdamW(
            [x for x, _ in self._own.values()],
            lr=h["lr"],
            betas=(h["beta1"], h["beta2"]),
            eps=h["eps"],
            weight_decay=h["weight_decay"],
            fused=True,
        )

    def _seen(self, name: str, of: Callable[[Any], Any]) -> Any:
        """A parameter's values or gradient, as we store it."""
        p, turned = self._own[name]
        found = of(p)
        return found.t() if turned else found

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One whole step on int64 (A, B, S) each."""
        import torch

        self._optimizer.zero_grad(set_to_none=True)
        total: Any = 0.0
        for some, wanted in zip(tokens, targets, strict=True):
            value = self.program.loss(some, wanted) / len(tokens)
            value.backward()
            total = total + value.detach()
        for name, (p, _) in self._own.items():
            if p.grad is None:
                raise Incorrect(f"{name} has no gradient")
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_([p for p, _ in self._own.values()], self.recipe.clip, foreach=True)
        self._optimizer.step()
        mean: torch.Tensor = total
        return mean

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """After clipping."""
        return {name: self._seen(name, lambda x: x.grad) for name in self._own}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """As they are now."""
        return {name: self._seen(name, lambda x: x.detach()) for name in self._own}
