"""What all systems of a training case share: model, slice, recipe, and the numbers that follow. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...registry.store.record import Case
from ..model import Chosen, Model, chosen
from ..operator import BYTES
from ..operators.newton_schulz import STEPS as ITERATIONS

HYPERPARAMETERS: Mapping[str, float] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
"""Of AdamW, for every parameter. The rate is large beside the rounding of bf16 weights, so that updates show."""

PEAK_BF16 = 989.4e12
"""Dense bf16 FLOP/s that NVIDIA states for the H100 and H200 (SXM): what MFU is a fraction of, whatever the dtype.
"""

STATES: Mapping[str, tuple[int | None, int | None]] = {
    "plain": (None, None),
    "master32": (4, 4),
    "muon": (None, None),
    "muon_master32": (4, 4),
}
"""Bytes of a master copy and of one moment, of each option of `state`; None: no master, moments like the weights.
AdamW's, or Muon's (`_muon`), which has one moment of the matrices of layers.
"""

LARGE_ANSWER = 4_000_000_000
"""Parameters of the largest model whose answer is computed at once; of more it is in pieces. Of 8 B parameters, a
vocabulary of 128,256 and sequences of 8,192 tokens, all logits and their gradients had no room beside 16 bytes of
each. Rows of models up to 3.2 B were recorded before, and are known by how their answers were computed.
"""
LARGEST_ANSWER = 8_500_000_000
"""Parameters of the largest model whose answer is computed whole: weights, gradients and moments in fp32 are 16
bytes of each, and an update needs some more beside, of 141 GB.
"""
CHECKED_LAYERS = 2
"""Layers that systems of a larger one are checked with."""


@dataclass(frozen=True)
class Recipe:
    """A case of training, read."""

    chosen: Chosen
    B: int
    S: int
    accumulation: int
    dtype: str
    products: str
    """The dtype that products inside layers may have at the least: what the floor counts and the bound is of."""
    state: str
    clip: float

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.accumulation * self.B * self.S

    @property
    def parameters(self) -> int:
        """Parameters of the model or the slice."""
        return self.chosen.model.parameters(self.chosen.configuration)

    @property
    def stored(self) -> str:
        """How AdamW's states are stored: an option `state` of the operator `adamw`."""
        return self.state.removeprefix("muon_").replace("muon", "plain")

    @property
    def hidden(self) -> tuple[str, ...]:
        """The names of the weights that Muon updates; none where AdamW does all."""
        return self.chosen.model.hidden(self.chosen.configuration) if self.state.startswith("muon") else ()

    @property
    def update_flops(self) -> int:
        """Of the iterations of Muon's step: half of the symmetric products, as `newton_schulz` counts them."""
        weights, found = self.chosen.model.weights(self.chosen.configuration), 0
        for name in self.hidden:
            *several, M, N = weights[name].shape
            r, s = sorted((M, N))
            found += math.prod(several) * ITERATIONS * (3 * r * r * s + r**3)
        return found

    @property
    def moment(self) -> str:
        """The dtype of a moment."""
        return "fp32" if self.stored == "master32" else self.dtype

    @property
    def moments(self) -> int:
        """Elements of all moments: two of each parameter that AdamW updates, one of each that Muon does."""
        weights = self.chosen.model.weights(self.chosen.configuration)
        return 2 * self.parameters - sum(weights[name].size for name in self.hidden)

    @property
    def resident(self) -> int:
        """Bytes that weights, gradients and states alone take."""
        master, moment = STATES[self.state]
        own = BYTES[self.dtype]
        return self.parameters * (2 * own + (master or 0)) + self.moments * (moment or own)

    @property
    def checked(self) -> Recipe:
        """What systems are held to the answer of: where the model is too large, its first layers alone."""
        if self.parameters <= LARGEST_ANSWER:
            return self
        return replace(self, chosen=self.chosen.first(CHECKED_LAYERS))

    @property
    def large(self) -> bool:
        """Whether its answer is computed in pieces."""
        return self.parameters > LARGE_ANSWER

    @property
    def flops(self) -> int:
        """Of a step's products: forward and backward once, attention causal, nothing computed twice."""
        return self.chosen.model.training_flops(self.chosen.configuration, self.S, self.tokens)

    @property
    def bytes(self) -> int:
        """What any program must move for a step: weights once a pass, gradients out and in, weights and states in
        and out once more for the update, tokens.

        Activations may stay on chip as far as this floor knows; norms and clipping may be made where gradients
        are.
        """
        master, moment = STATES[self.state]
        own = BYTES[self.dtype]
        passes = 2 * self.accumulation * own
        gradients = 2 * self.accumulation * own
        weights = own + (2 * master if master else own)
        moments = 2 * self.moments * (moment or own)
        return self.parameters * (passes + gradients + weights) + moments + 16 * self.tokens

    def mfu(self, step_ms: float) -> float:
        """Model FLOP/s utilization: of bf16's dense peak, recompute never counted."""
        return self.flops / (step_ms * 1e-3) / PEAK_BF16

    def limit_ms(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The floor of a step: products at one rate and compulsory bytes at another, one after the other. Muon's
        iterations are products of the step, though not of the model.
        """
        return 1e3 * ((self.flops + self.update_flops) / flops_per_s + self.bytes / bytes_per_s)


def recipe(case: Case, models: Mapping[str, Model]) -> Recipe:
    """A case, read. Raises `InputError` for an unknown model or a slice of more layers than it has."""
    options: Mapping[str, Any] = case.options
    found = chosen(models, str(options["model"]))
    if options["slice"] != "whole":
        found = found.first(int(str(options["slice"]).removeprefix("first")))
    return Recipe(
        chosen=found,
        B=case.axes["B"],
        S=case.axes["S"],
        accumulation=case.axes["A"],
        dtype=case.dtype,
        products=case.dtype if options["products"] == "dtype" else str(options["products"]),
        state=str(options["state"]),
        clip=float(options["clip"]),
    )
