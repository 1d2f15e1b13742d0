"""Transformer Engine's `Linear` on weights that are ours, with what its recipe remembers of tensors before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RECIPES: Mapping[str, str] = {
    "te_tensorwise": "Float8CurrentScaling",
    "te_delayed": "DelayedScaling",
    "te_1x128": "Float8BlockScaling",
}
"""Its recipes, by precision."""
FIRST_SCALE = 2.0**16
"""Of gradients in E5M2 before one was seen, by delayed scaling. Its own is 1, at which those of a mean over
thousands of tokens are nothing. It ends with the first step.
"""


class Linears:
    """`linear(x, weight, bias=None)` by one `Linear` a weight. Raises `ImportError` without the library."""

    def __init__(self, precision: str) -> None:
        import transformer_engine.pytorch as te
        from torch.utils.weak import WeakTensorKeyDictionary
        from transformer_engine.common import recipe

        self._te = te
        self._recipe = getattr(recipe, RECIPES[precision])()
        self._modules: Any = WeakTensorKeyDictionary()
        self._lent: Any = WeakTensorKeyDictionary()
        self._within = False

    def __call__(self, x: Any, weight: Any, bias: Any = None) -> Any:
        from torch.func import functional_call

        owner = self._lent.get(weight, weight)
        fresh = owner not in self._modules
        if fresh:
            N, K = weight.shape
            # On meta: its own parameters are never used.
            made = self._te.Linear(K, N, bias=bias is not None, params_dtype=weight.dtype, device="meta")
            self._modules[owner] = made
        module = self._modules[owner]
        own = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        with self.forward():
            found = functional_call(module, own, (x,))
        if fresh:
            for scale, _ in _remembered(module, "scaling_bwd"):
                scale.fill_(FIRST_SCALE)
        return found

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A model's forward pass: at its end, not after each product, scales follow from what was seen."""
        if self._within:
            yield
            return
        self._within = True
        try:
            with self._te.autocast(enabled=True, recipe=self._recipe):
                yield
        finally:
            self._within = False

    @contextlib.contextmanager
    def lent(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
        """Within it the first of each pair is multiplied as the second, a weight of ours, would be: by the scales
        that are remembered of that. What is remembered is as before afterwards.
        """
        before = dict(self._modules)
        modules = before.values()
        kept = [(x, x.clone()) for module in modules for key in KEYS for y in _remembered(module, key) for x in y]
        for twin, own in pairs:
            self._lent[twin] = own
        try:
            yield
        finally:
            self._lent.clear()
            self._modules.clear()
            self._modules.update(before)
            for x, was in kept:
                x.copy_(was)

    def scales(self, weight: Any) -> Mapping[str, Any]:
        """What the input, the weight and the gradient of the next product with a weight are divided by, as far as
        that follows from those before.
        """
        module = self._modules.get(self._lent.get(weight, weight))
        found: dict[str, Any] = {}
        for key, names in (("scaling_fwd", ("input", "weight")), ("scaling_bwd", ("gradient",))):
            for scale, _ in _remembered(module, key):
                found |= {name: 1 / scale[i] for i, name in enumerate(names)}
        return found


KEYS = ("scaling_fwd", "scaling_bwd")
"""Where a module keeps the states of its recipe."""


def _remembered(module: Any, key: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The scales of a module's tensors in one direction, and the largest magnitudes that were seen of them;
    nothing by recipes that remember nothing.
    """
    state: Any = (getattr(module, "fp8_meta", None) or {}).get(key)
    if hasattr(state, "amax_history"):
        yield state.scale, state.amax_history
