"""Programs that pass tokens through a model once: what `forward` measures, and how one is made of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..model import Chosen
from ..system import Assembly
from . import _inference as inference
from ._graphs import captured
from ._trainer import COMPILED

if TYPE_CHECKING:
    import torch


class Passes(Protocol):
    """What a system's factory gives. Names of weights are those of the model, whatever the system calls them."""

    def load(self, chosen: Chosen, B: int, S: int, dtype: str, weights: inference.Weights) -> None:
        """Builds the model for B sequences of S tokens, on the device that the weights are on."""
        ...

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, S, V) of int64 tokens (B, S), without gradients; never waits for the device."""
        ...


class PartsPasses:
    """A model's own module with any parts."""

    def __init__(self, assembly: Assembly) -> None:
        if assembly.system.trains:
            raise NotImplementedError(
                "float8, recomputing and optimizer states are of training; a forward pass is in the case's dtype"
            )
        inference.allowed(assembly, "dtype")
        self.assembly = assembly.inferring
        self._call: Callable[..., Any] | None = None

    def load(self, chosen: Chosen, B: int, S: int, dtype: str, weights: inference.Weights) -> None:
        import torch

        drawn = list(weights)
        device = drawn[0][1].device
        parts = self.assembly.parts(chosen, B, S, dtype, device.type, without=("loss",))
        linear = parts["linear"]
        parts["loss"] = lambda x, weight, target: linear(x, weight)
        module = inference.build(chosen, parts, dtype, S, device)
        with torch.no_grad():
            inference.fill(module, drawn)
        execution = self.assembly.system.execution
        if execution == "graph":
            self._call = _Captured(module)
        elif execution == "blocks":
            for layer in module.layers:
                layer.compile(dynamic=False)
            self._call = module
        else:
            self._call = (
                module if execution == "eager" else torch.compile(module, dynamic=False, **COMPILED[execution])
            )

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        import torch

        assert self._call is not None, "a program is loaded before it runs"
        with torch.no_grad():
            found: torch.Tensor = self._call(tokens, tokens)
        return found.view(*tokens.shape, -1)


class _Captured:
    """A pass as one CUDA graph, captured at the first call; logits lie where the next call writes its own."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._graph: Any = None

    def __call__(self, tokens: Any, targets: Any) -> Any:
        if self._graph is None:
            self._tokens = tokens.clone()
            ((self._graph, self._logits),) = captured(
                tokens.device, lambda: self._module(self._tokens, self._tokens)
            )
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits
