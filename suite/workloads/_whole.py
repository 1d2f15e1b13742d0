"""Trainers of whole programs of others: a model of somebody's own class by PyTorch's clipping and fused AdamW, or
by an engine that does all of a step but the loss.
"""

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

    def parameters(self) -> Mapping[str, tuple[torch.nn.Parameter, Callable[[torch.Tensor], torch.Tensor]]]:
        """Its parameters by our names, each with what makes of it a view whose elements are in our order."""
        ...

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of int64 (B, S) each."""
        ...


class Engine(Program, Protocol):
    """What a baseline's factory gives where backward pass, clipping and update are its own."""

    stored: tuple[str, ...]
    """How it can store states, by names of the operator `adamw`."""

    def start(self, stored: str, batch: int, accumulation: int, clip: float, adamw: Mapping[str, float]) -> None:
        """Its engine of the model that was built last, for steps of so many micro-batches of so many sequences."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients of a micro-batch's mean loss; a step's are averaged."""
        ...

    def update(self) -> None:
        """Ends a micro-batch; after the last of a step it clips and updates."""
        ...

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """A step's gradient, after its last backward pass and before its update: not clipped."""
        ...


class WholeTrainer:
    """Steps of a whole program; a `Trainer`."""

    def __init__(self, recipe: Recipe, program: Program) -> None:
        if recipe.hidden:
            raise NotImplementedError("this program steps by AdamW; this case's optimizer is Muon")
        self._takes(recipe.stored, program)
        self.products: str = getattr(program, "products", None) or recipe.dtype
        """The dtype of its products, which says how far off it may be."""
        self.recipe = recipe
        self.program = program
        self._own: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {}
        self._shapes = {
            name: x.shape for name, x in recipe.chosen.model.weights(recipe.chosen.configuration).items()
        }
        self._optimizer: Any = None
        self._params: list[Any] = []

    @staticmethod
    def _takes(stored: str, program: Any) -> None:
        """Raises NotImplementedError for states that are stored as the program cannot."""
        if stored != "plain":
            raise NotImplementedError("PyTorch's AdamW keeps moments in its parameters' dtype, and no masters")

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
            missing = [x for x in self._shapes if x not in self._own]
            if missing:
                raise NotImplementedError(f"this program has no {', '.join(missing)}")
        else:
            with torch.no_grad():
                for name, values in weights:
                    p, ordered = self._own[name]
                    ours = ordered(p.detach())
                    ours.copy_(values.view(ours.shape))
        # Two weights of ours may be one parameter.
        self._params = list(dict.fromkeys(x for x, _ in self._own.values()))
        h = HYPERPARAMETERS
        # Anew, and its states with it; memory of the last one's is reused.
        self._optimizer = None
        self._optimizer = torch.optim.AdamW(
            self._params,
            lr=h["lr"],
            betas=(h["beta1"], h["beta2"]),
            eps=h["eps"],
            weight_decay=h["weight_decay"],
            fused=True,
        )

    def _seen(self, name: str, of: Callable[[Any], Any]) -> Any:
        """A parameter's values or gradient, as we store it."""
        p, ordered = self._own[name]
        return ordered(of(p)).reshape(self._shapes[name])

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
            torch.nn.utils.clip_grad_norm_(self._params, self.recipe.clip, foreach=True)
        self._optimizer.step()
        mean: torch.Tensor = total
        return mean

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """After clipping."""
        return {name: self._seen(name, lambda x: x.grad) for name in self._own}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """As they are now."""
        return {name: self._seen(name, lambda x: x.detach()) for name in self._own}


class EngineTrainer(WholeTrainer):
    """Steps of an engine. It lets go of gradients when it updates: those of the first step after `load` are copied
    before, which are all that anybody asks for; no other step has that copy.
    """

    program: Engine

    @staticmethod
    def _takes(stored: str, program: Any) -> None:
        if stored not in program.stored:
            raise NotImplementedError(f"this engine stores states as {' or '.join(program.stored)}, not {stored}")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes these weights, in a model and an engine anew: an engine has more states than anybody can reset."""
        r = self.recipe
        self._own = {}
        self._kept: dict[str, Any] | None = None
        self.program.build(r.chosen, r.S, weights)
        self._own = self.program.parameters()
        self.program.start(r.stored, r.B, r.accumulation, r.clip, HYPERPARAMETERS)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One whole step on int64 (A, B, S) each."""
        import torch

        total: Any = 0.0
        first = self._kept is None
        for i, (some, wanted) in enumerate(zip(tokens, targets, strict=True), 1):
            value = self.program.loss(some, wanted)
            self.program.backward(value)
            if first and i == len(tokens):
                self._kept = {name: self._copied(name) for name in self._own}
            self.program.update()
            total = total + value.detach()
        if first and self.recipe.clip:
            assert self._kept is not None
            norm = torch.nn.utils.get_total_norm(list(self._kept.values()))
            share = (self.recipe.clip / (norm + 1e-6)).clamp(max=1.0)
            self._kept = {name: x * share for name, x in self._kept.items()}
        mean: torch.Tensor = total / len(tokens)
        return mean

    def _copied(self, name: str) -> Any:
        p, ordered = self._own[name]
        found = self.program.gradient(p)
        if found is None:
            raise Incorrect(f"{name} has no gradient")
        return ordered(found.detach().view(p.shape)).reshape(self._shapes[name]).to(p.device, copy=True)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Those of the first step after `load`, after clipping."""
        assert self._kept is not None, "a step is made before its gradients are asked for"
        return self._kept
