"""What of a step's activations is computed again for the backward pass: by layers, by cost, by part."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..model import Part
from ..system import Recompute

if TYPE_CHECKING:
    import torch

    Parts = Mapping[str, Callable[..., Any]]

CHEAP = ("rms_norm", "layer_norm", "gated_rms_norm", "gelu", "swiglu", "geglu")
"""Operators whose results `by_part` does not keep: a pass over memory each, beside products that take more."""
GATES = ("gelu", "swiglu", "geglu")
"""Of these, those that the wide products of a feed-forward go into."""
JOINED = "add_rms_norm"
"""Gives (y, h): y is the norm of h, which its own backward pass and the residual stream keep."""
NARROW = 3
"""`by_part_wide` keeps the wide products of every third layer."""


def budget(how: Recompute) -> float | None:
    """The `activation_memory_budget` that one of the compiler's stands for."""
    return int(how.removeprefix("budget_")) / 100 if how.startswith("budget_") else None


def around_layers(layers: Any, how: Recompute) -> None:
    """Has a module's layers, or some of them, computed again."""
    if how in ("every_layer", "every_second", "by_cost"):
        for layer in list(layers)[:: 2 if how == "every_second" else 1]:
            layer.forward = _again(layer.forward, how == "by_cost")


def _again(forward: Callable[..., Any], by_cost: bool) -> Callable[..., Any]:
    """A layer's pass of which the inputs are kept and, by cost, the results of `worth_keeping` operations."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    chosen: dict[str, Any] = {}
    if by_cost:
        chosen["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def again(*inputs: Any) -> Any:
        # No model has dropout: there is no random state to restore, which a captured graph could not.
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **chosen)

    return again


def _policy(context: Any, operation: Any, *arguments: Any, **rest: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    shapes = [tuple(x.shape) for x in arguments if hasattr(x, "shape")]
    keep = worth_keeping(operation.name(), shapes)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def worth_keeping(operation: str, shapes: list[tuple[int, ...]]) -> bool:
    """Whether an operation on tensors of these shapes costs more than its result's bytes are worth.

    An element of a product (M, K) × (K, N) costs 2·K operations. Kept are products with K ≥ N, whose results are
    no wider than their inputs; wider ones, as those that feed a gate, take most of the memory. Attention is kept:
    an element of it costs as much as the sequence is long.
    """
    name = operation.partition("::")[2].partition(".")[0]
    if "attention" in name:
        return True
    if name == "linear":
        N, K = shapes[1]
        return K >= N
    if name in ("mm", "addmm"):
        K, N = shapes[-1]
        return K >= N
    return False


@dataclass
class _Result:
    """How a result is made again. It is made once for all who kept it, and forgotten when the last has it."""

    call: Callable[..., Any]
    inputs: dict[str, Any]
    keepers: int = 0
    _taken: int = 0
    _made: Any = None

    def __call__(self) -> torch.Tensor:
        import torch

        if self._made is None:
            with torch.no_grad():
                self._made = self.call(**{name: _given(x) for name, x in self.inputs.items()})
        found: torch.Tensor = self._made
        self._taken += 1
        if self._taken >= self.keepers:
            self._made, self._taken = None, 0
        return found


@dataclass(frozen=True)
class _Kept:
    """What is kept in place of a tensor: a view of a result that can be made again."""

    result: _Result
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def _given(x: Any) -> Any:
    """The tensor that is meant."""
    if not isinstance(x, _Kept):
        return x
    return x.result().as_strided(x.shape, x.strides, x.offset)


@dataclass
class ByPart:
    """A model whose norms and gates keep their inputs alone. What is multiplied with their results gets these
    computed again, by the same calls on the same inputs; a norm that is fused with an addition by the plain one.

    A result is known by its memory, which nothing else can have while a weak reference to it is held.
    """

    wide: bool
    _results: dict[int, tuple[Any, _Result]] = field(default_factory=dict)
    _products: dict[int, tuple[Any, _Result]] = field(default_factory=dict)
    _narrow: bool = True

    def parts(self, places: tuple[Part, ...], parts: Parts) -> dict[str, Callable[..., Any]]:
        """A model's callables, their results noted. Raises NotImplementedError for a model without such parts."""
        operators = {x.name: x.operator for x in places}
        if not set(operators.values()) & {*CHEAP, JOINED}:
            raise NotImplementedError("the model has neither norms nor gates as parts")
        norm = next((parts[name] for name, x in operators.items() if x == "rms_norm"), None)
        found = dict(parts)
        for name, operator in operators.items():
            if operator in CHEAP:
                found[name] = self._noted(parts[name], operator in GATES)
            elif operator == JOINED and norm is not None:
                found[name] = self._joined(parts[name], norm)
        if self.wide:
            found["linear"] = self._multiplied(parts["linear"])
        return found

    def around(self, module: Any) -> None:
        """Has a module's passes keep what is noted, not the tensors."""
        from torch.autograd.graph import saved_tensors_hooks

        for place, layer in enumerate(module.layers):
            layer.forward = self._within(layer.forward, self.wide and place % NARROW != NARROW - 1)
        forward = module.forward

        def passed(*inputs: Any) -> Any:
            try:
                with saved_tensors_hooks(self._pack, _given):
                    return forward(*inputs)
            finally:
                self._results.clear()
                self._products.clear()

        module.forward = passed

    def _within(self, forward: Callable[..., Any], wide: bool) -> Callable[..., Any]:
        def layer(*inputs: Any) -> Any:
            self._narrow = not wide
            try:
                return forward(*inputs)
            finally:
                self._narrow = True
                for noted in (self._results, self._products):
                    for key in [x for x, (alive, _) in noted.items() if alive.expired()]:
                        del noted[key]

        return layer

    def _noted(self, call: Callable[..., Any], gate: bool) -> Callable[..., Any]:
        def noted(**inputs: Any) -> Any:
            if gate:
                self._feeding(inputs)
            out = call(**inputs)
            self._note(self._results, out, call, inputs)
            return out

        return noted

    def _joined(self, call: Callable[..., Any], norm: Callable[..., Any]) -> Callable[..., Any]:
        def joined(x: Any, residual: Any, weight: Any, eps: float) -> Any:
            y, h = call(x=x, residual=residual, weight=weight, eps=eps)
            self._note(self._results, y, norm, {"x": h, "weight": weight, "eps": eps})
            return y, h

        return joined

    def _multiplied(self, linear: Callable[..., Any]) -> Callable[..., Any]:
        def multiplied(x: Any, weight: Any, bias: Any = None) -> Any:
            out = linear(x, weight, bias)
            if not self._narrow and weight.shape[0] > weight.shape[1]:
                self._note(self._products, out, multiply, {"x": x, "weight": weight, "bias": bias})
            return out

        def multiply(x: Any, weight: Any, bias: Any) -> Any:
            return linear(x, weight, bias)

        return multiplied

    def _feeding(self, inputs: Mapping[str, Any]) -> None:
        """Products that go into a gate are made again too; those that go elsewhere are kept."""
        for x in inputs.values():
            key = _memory(x)
            if key in self._products:
                self._results[key] = self._products.pop(key)

    def _note(
        self, where: dict[int, tuple[Any, _Result]], out: Any, call: Callable[..., Any], inputs: Mapping[str, Any]
    ) -> None:
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        if torch.is_grad_enabled() and out.requires_grad:
            kept = {name: self._pack(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
            storage = out.untyped_storage()
            where[storage._cdata] = (StorageWeakRef(storage), _Result(call, kept))

    def _pack(self, x: torch.Tensor) -> Any:
        """What is kept of a tensor."""
        found = self._results.get(_memory(x))
        if found is None:
            return x.detach() if x.requires_grad and not x.is_leaf else x
        found[1].keepers += 1
        return _Kept(found[1], tuple(x.shape), x.stride(), int(x.storage_offset()))


def _memory(x: Any) -> int:
    """What tells a tensor's memory from other memory, views of it not."""
    return int(x.untyped_storage()._cdata) if hasattr(x, "untyped_storage") else 0


def kept_bytes(forward: Callable[[], Any], device: torch.device) -> int:
    """Bytes that are there after a forward pass and were not before: what the backward pass needs of it.

    On a GPU by its allocator. On a CPU, whose allocator keeps no account, counted over the tensors that PyTorch's
    operations make; memory that compiled code takes is not seen there.
    """
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = forward()
        torch.cuda.synchronize()
        found = torch.cuda.memory_allocated() - before
        del loss
        return found
    with _counting() as alive:
        loss = forward()
        found = alive()
        del loss
    return found


@contextlib.contextmanager
def _counting() -> Iterator[Callable[[], int]]:
    """Within it memory is counted that operations make; what is given says how many bytes of it are alive."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    made: dict[int, tuple[Any, int]] = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if hasattr(x, "untyped_storage")}
            out = call(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                key = _memory(x)
                if key and key not in given:
                    storage = x.untyped_storage()
                    made[key] = (StorageWeakRef(storage), storage.nbytes())
            return out

    with Counting():  # type: ignore[no-untyped-call]  # torch does not annotate it
        yield lambda: sum(size for alive, size in made.values() if not alive.expired())
