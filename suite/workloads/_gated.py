"""Blocks of attention chosen by gates that learn beside the model: one gate a layer, by distillation.

A choice has no derivative, so the model's loss does not train a gate. In each training pass a layer's gate makes
one step towards the weights that dense attention gives to the blocks of the pass's first sequence
(`suite/operators/_gates.py`). The choice that a pass is made with comes before that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..operators import _gates
from ..operators.adamw import reference as adamw
from ..operators.attention_sparse import GATE, choose, scores
from ._fp8 import entered

if TYPE_CHECKING:
    import torch

RATE = 5e-3
"""Of Adam. The model moves on while gates learn, so that it does not fall."""
ADAM = {"lr": RATE, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
LEAST = 3
"""Blocks of a sequence from which on a row has any choice: its own block is always seen."""


@dataclass
class Gates:
    """The gates of a model's layers. Call it with queries and keys: which blocks are seen, (B, H, n, n) bool."""

    left_out: int
    learns: bool = True
    """Whether a pass with gradients trains them."""
    layer: int = 0
    """Whose pass is under way; `around` keeps it."""
    held: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """By layer: gate (Hkv, D, G) and Adam's two moments, fp32, and how many steps it has made, int64 ()."""

    def around(self, layers: Any) -> None:
        """Hears of each pass of a model's layers which of them it is of."""

        def enter(layer: int) -> None:
            self.layer = layer

        entered(layers, enter)

    def __call__(self, q: Any, k: Any) -> Any:
        q, k = q.detach(), k.detach()
        chosen = choose(scores(q, k, "causal", *self.both(q, k)), "causal", self.left_out)
        self.learn(q, k)
        return chosen

    def both(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's gates of queries (H, D, G) and of keys (Hkv, D, G), in their dtype."""
        return _gates.both(self._own(q, k)[0].to(q.dtype), q.shape[1])

    def learn(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """One step on the first sequence, in a pass that trains and where rows have a choice."""
        import torch

        if self.learns and torch.is_grad_enabled() and -(-q.shape[2] // _gates.BLOCK) >= LEAST:
            self._learn(q[:1], k[:1], self._own(q, k))

    def _own(self, q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        """The layer's, made when it is first asked for: the same start in every arm and replicate."""
        import torch

        if self.layer not in self.held:
            generator = torch.Generator().manual_seed(self.layer)
            D = q.shape[-1]
            gate = _gates.started(k.shape[1], D, min(GATE, D), lambda *x: torch.randn(*x, generator=generator))
            made = [gate, torch.zeros_like(gate), torch.zeros_like(gate), torch.zeros((), dtype=torch.int64)]
            # How many steps there were is the host's to know, and never waited for.
            self.held[self.layer] = [*(x.to(q.device) for x in made[:3]), made[3]]
        return self.held[self.layer]

    def _learn(self, q: torch.Tensor, k: torch.Tensor, own: list[torch.Tensor]) -> None:
        """One step on one sequence."""
        import torch

        gate, m, v, count = own
        with torch.no_grad():
            target = _gates.weights(q, k, "causal")
            means = _gates.pooled(q.float()), _gates.pooled(k.float())
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            loss = _gates.gate_loss(*_gates.both(leaf, q.shape[1]), *means, target, "causal")
            (grad,) = torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            count += 1
            stepped = adamw([gate], [grad], [m], [v], None, int(count), **ADAM)
            for x, new in zip((gate, m, v), stepped, strict=True):
                x.copy_(new)

    def state(self) -> dict[int, list[torch.Tensor]]:
        """What the next pass's choices depend on."""
        return {layer: list(own) for layer, own in self.held.items()}

    def restore(self, state: Mapping[int, list[torch.Tensor]]) -> None:
        """Goes on from there."""
        self.held = {layer: [*(x.clone() for x in own[:3]), own[3].cpu().clone()] for layer, own in state.items()}
