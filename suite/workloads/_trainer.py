"""A program that takes whole optimizer steps: what `train` measures, and how one is made of parts."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ...registry.store.record import EAGER
from .._transformer_engine import Linears
from ..measure.verify import Incorrect
from ..operator import torch_dtype
from ..system import OPTIMIZER, Assembly, Execution
from ._graphs import captured
from ._host_states import HostStates, HostUpdate, InTurn, Streams
from ._muon import Muon
from ._parallel import Parallel, Single
from ._recipe import HYPERPARAMETERS, Recipe
from ._recompute import ByPart, around_layers, budget, kept_bytes

if TYPE_CHECKING:
    import torch

    Named = Mapping[str, torch.Tensor]


class Trainer(Protocol):
    """What a system's factory gives. Names are those of the model's weights, whatever the system calls them."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes these weights, and an optimizer that has made no step; builds on the first call."""
        ...

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One whole step on int64 (A, B, S) each: gradients of A micro-batches, clipped, and the update.

        Gives the mean loss, a scalar on the device; never waits for the device.
        """
        ...

    def gradients(self) -> Named:
        """What the last step's update was made of: gradients after clipping, until the next step begins."""
        ...

    def weights(self) -> Named:
        """The parameters as they are now."""
        ...


COMPILED: Mapping[str, dict[str, Any]] = {
    "compile": {},
    "reduce_overhead": {"mode": "reduce-overhead"},
    "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "aot_eager": {"backend": "aot_eager"},
    "cudagraphs": {"backend": "cudagraphs"},
}
"""Arguments of torch.compile by execution."""


class PartsTrainer:
    """A trainer of a model's own module with any parts, and AdamW by any implementation of that operator."""

    def __init__(
        self, recipe: Recipe, assembly: Assembly, spread: Parallel | None = None, followed: int = 0
    ) -> None:
        system = assembly.system
        if system.execution == "graph" and spread is not None and not spread.captured:
            raise NotImplementedError("a CUDA graph of forward and backward is of one process")
        if system.execution != "eager" and spread is not None and spread.divided:
            raise NotImplementedError("a step that ranks share is executed eagerly")
        if system.precision != "case" and recipe.products == recipe.dtype:
            raise NotImplementedError(f"this case's products are in {recipe.dtype}; float8 is another recipe's")
        if system.precision == "te_delayed" and system.recompute != "none":
            raise NotImplementedError(
                "delayed scales move between a pass and its repetition: it would be another pass"
            )
        if system.recompute.startswith("by_part") and system.execution not in ("eager", "graph"):
            raise NotImplementedError("torch.compile chooses itself what it keeps; by part is for eager execution")
        if budget(system.recompute) is not None and system.execution not in (*COMPILED, "blocks"):
            raise NotImplementedError("activation_memory_budget is torch.compile's; this system compiles nothing")
        if system.states != "device" and spread is not None and not spread.captured:
            raise NotImplementedError("states are held on the host by one process")
        if recipe.hidden and system.states != "device":
            raise NotImplementedError("states on the host are AdamW's; this case's optimizer is Muon")
        if recipe.hidden and spread is not None and not spread.captured:
            raise NotImplementedError("Muon's steps are of whole matrices, in one process")
        if system.states == "host_streamed" and system.execution == "graph":
            raise NotImplementedError("a graph's backward pass does not say when a gradient is there")
        self.recipe = recipe
        self.assembly = assembly
        self.parallel: Parallel = spread or Single()
        self.followed = followed
        """Steps over which its loss is held against one process's."""
        self.execution: Execution = system.execution
        self._module: Any = None
        self._forward: Any = None
        self.linear: Callable[..., Any] | None = None
        """How its layers multiply; there once it is built."""
        self._update: Callable[..., Any] | None = None
        self._clipping_update: Callable[..., Any] | None = None
        """An update that clips too: where the recipe clips, of states on the device and whole gradients."""
        self._norm: Any = None
        """Of the gradients that the last one clipped, on the device, until they are asked for."""
        self._loss: Callable[..., Any] | None = None
        self._names: list[str] = []
        self._params: list[Any] = []
        self._states: dict[str, list[Any]] = {}
        self.host: HostStates | HostUpdate | None = None
        """States that lie on the host; None where they are on the device."""
        self._steps = 0
        self.hyperparameters: dict[str, float] = dict(HYPERPARAMETERS)

    def of(self, recipe: Recipe) -> PartsTrainer:
        """The same system, in one process, of another recipe of the case's."""
        return type(self)(recipe, self.assembly)

    @property
    def products(self) -> str:
        """The dtype of its products, which says how far off it may be."""
        return self.recipe.dtype if self.assembly.system.precision == "case" else self.recipe.products

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        import torch

        left: dict[str, Any] = {}
        with torch.no_grad():
            for name, values in weights:
                if self._module is None:
                    self._build(values.device)
                if not left:
                    left = dict(zip(self._names, self._params, strict=True))
                self.parallel.put(left.pop(name), values)
            for master, own in zip(self._states["masters"], self._params, strict=False):
                master.copy_(self.parallel.own(own))
            for x in (*self._states["exp_avgs"], *self._states["exp_avg_sqs"]):
                x.zero_()
        if left:
            raise ValueError(f"no values for {', '.join(left)}")
        if self.host is not None:
            self.host.reset()
        self._steps, self._norm = 0, None

    def _build(self, device: torch.device) -> None:
        """The module on the device, with memory for its weights and states; and what it is executed by."""
        import torch

        r = self.recipe
        chosen, dtype = r.chosen, torch_dtype(r.dtype)
        parts = self.parts(device)
        if self.execution == "blocks":
            parts["loss"] = torch.compile(parts["loss"], dynamic=False)
        recompute = self.assembly.system.recompute
        by_part = ByPart(recompute == "by_part_wide") if recompute.startswith("by_part") else None
        if by_part is not None:
            parts = by_part.parts(chosen.model.parts(chosen.configuration, r.B, r.S), parts)
        with torch.device("meta"):
            module = chosen.model.module(chosen.configuration, parts)
        self._module = module.to(dtype).to_empty(device=device)
        self._module.prepare(r.S, device, dtype)
        if by_part is not None:
            by_part.around(self._module)
        around_layers(self._module.layers, recompute)
        if self.execution == "blocks":
            for layer in self._module.layers:
                layer.compile(dynamic=False)
        self._forward = self.parallel.spread(self._module)
        self.linear = parts["linear"]
        if isinstance(self.linear, Linears):
            self._forward = within(self.linear.forward, self._forward)
        names, params = zip(*self._module.named_parameters(), strict=True)
        self._names, self._params = list(names), list(params)
        self._update = self.optimizer(device)
        held = [self.parallel.own(x.detach()) for x in params]
        self._states = {"exp_avgs": [], "exp_avg_sqs": [], "masters": []}
        if self.assembly.system.states == "device":
            for name, dtype in self.states().items():
                self._states[name] = [torch.empty_like(x, dtype=dtype) for x in held]
            if seconds := self._states["exp_avg_sqs"]:
                for i in self._matrices:
                    seconds[i] = seconds[i].new_empty(0)
        else:
            self.host = self.on_host(device)
        if r.clip and self.host is None and self.parallel.replicated:
            self._clipping_update = getattr(self._update, "clipped", None)
        self._loss = self._executed()

    def states(self) -> dict[str, torch.dtype]:
        """The dtypes of what an update needs of each parameter beside its gradient."""
        import torch

        moment = torch_dtype(self.recipe.moment)
        masters = {"masters": torch.float32} if self.recipe.stored == "master32" else {}
        return {"exp_avgs": moment, "exp_avg_sqs": moment, **masters}

    def on_host(self, device: torch.device) -> HostStates | HostUpdate:
        """States in the host's memory, as the system has them. Raises NotImplementedError where all memory is."""
        if device.type != "cuda":
            raise NotImplementedError("states are on the host as they are: this device is the host")
        how = self.assembly.system.states
        if how == "host_updated":
            return HostUpdate(self._params, self.states())
        return HostStates(self._params, self.states(), Streams() if how == "host_streamed" else InTurn())

    def parts(self, device: torch.device) -> dict[str, Callable[..., Any]]:
        """The callables of the model's parts, and how its layers multiply."""
        r = self.recipe
        found = self.assembly.parts(r.chosen, r.B, r.S, r.dtype, device.type)
        return found | {**self.parallel.parts(self.assembly, r.chosen, r.B, r.S, r.dtype, device.type)}

    def optimizer(self, device: torch.device) -> Callable[..., Any]:
        """The implementation of AdamW for weights and states as the recipe stores them, and of Muon where it has
        that.
        """
        r = self.recipe
        sizes = {"T": len(r.chosen.model.weights(r.chosen.configuration)), "D": r.chosen.configuration.width}
        options = {"sizes": "llama", "state": r.stored}
        where = "cpu" if self.assembly.system.states == "host_updated" else device.type
        adamw = self.assembly.call(OPTIMIZER, "adamw", sizes, options, r.dtype, where)
        if not r.hidden:
            return self.assembly.beside(OPTIMIZER, "adamw", adamw, where)
        shapes = {name: x.shape for name, x in r.chosen.model.weights(r.chosen.configuration).items()}
        several = Counter(shapes[name] for name in r.hidden)
        by_shape = {}
        for shape, count in several.items():
            sizes = {"T": count * math.prod(shape[:-2]), "M": shape[-2], "N": shape[-1]}
            by_shape[shape] = self.assembly.call("newton_schulz", "newton_schulz", sizes, {}, r.dtype, device.type)
        return Muon(adamw, by_shape, self._matrices)

    @property
    def _matrices(self) -> list[int]:
        """Places of the weights that Muon updates."""
        own = set(self.recipe.hidden)
        return [i for i, name in enumerate(self._names) if name in own]

    def _executed(self) -> Callable[..., Any]:
        """`loss(tokens, targets)`, which leaves gradients in the parameters, by this system's execution."""
        import torch

        forward = self._forward
        if self.execution == "graph":
            return _Captured(self._module, self._params, self.recipe.accumulation)
        if self.execution not in ("eager", "blocks"):
            forward = torch.compile(forward, dynamic=False, **COMPILED[self.execution])
            self._forward = forward

        def loss(tokens: Any, targets: Any) -> Any:
            if self.execution == "reduce_overhead":
                torch.compiler.cudagraph_mark_step_begin()
            value = forward(tokens, targets)
            self.backward(value / self.recipe.accumulation if self.recipe.accumulation > 1 else value)
            # Of a graph's memory, which the next replay writes to.
            return (
                value.detach().clone() if self.execution in ("reduce_overhead", "cudagraphs") else value.detach()
            )

        return loss

    def backward(self, loss: Any) -> None:
        """Leaves the gradients of a micro-batch's share of the loss in the parameters."""
        loss.backward()

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from torch._functorch import config

        assert self._loss is not None, "a trainer is loaded before it steps"
        if isinstance(self._loss, _Captured):
            self._loss.begin()
        else:
            _forget(self._params)
        if self.host is not None:
            self.host.begin(partial(self._updated, self._steps + 1))
        total = None
        # Compiled backward passes run once on their saved tensors here, and may overwrite them. The worker forbids
        # that for operators, whose backward pass it repeats.
        compiling: dict[str, Any] = {"donated_buffer": True}
        if (share := budget(self.assembly.system.recompute)) is not None:
            compiling["activation_memory_budget"] = share
        with config.patch(compiling) if self._steps == 0 else contextlib.nullcontext():
            for i, (some, wanted) in enumerate(zip(tokens, targets, strict=True), 1):
                if self.host is not None:  # before all are there, nobody knows how much to clip
                    self.host.listen(i == len(tokens) and not self.recipe.clip)
                with self.parallel.last(i == len(tokens)):
                    value = self._loss(some, wanted)
                if i == 1 and self._unheard:
                    for p in self._params:
                        p.main_grad = p.grad  # where products may add the next ones', if they can
                total = value if total is None else total + value
        assert total is not None
        for name, p in zip(self._names, self._params, strict=True):
            if p.grad is None:
                raise Incorrect(f"{name} has no gradient")
        self.clip()
        self.update()
        mean: torch.Tensor = total / len(tokens) if len(tokens) > 1 else total
        return mean

    @property
    def _unheard(self) -> bool:
        """Whether a gradient may change without a word: nothing sends or streams gradients, or compiled them."""
        return self.execution == "eager" and self._alone

    @property
    def _alone(self) -> bool:
        """Whether it is one process, with states on the device; ways to spread it over ranks are `Single`s too."""
        return self.host is None and type(self.parallel) is Single

    def clip(self) -> None:
        """Scales all gradients so that their norm is at most the recipe's, without waiting for it; an update that
        clips leaves them as they are.
        """
        if self._clipping_update is None:
            self.parallel.clip(self._params, self.recipe.clip)

    def update(self) -> None:
        """One step of AdamW over all parameters."""
        import torch

        self._steps += 1
        if self.host is not None:
            self.host.finish()
            return
        with torch.no_grad():
            self._updated(
                self._steps,
                params=[self.parallel.own(x.detach()) for x in self._params],
                grads=[self.parallel.own(x.grad) for x in self._params],
                exp_avgs=self._states["exp_avgs"],
                exp_avg_sqs=self._states["exp_avg_sqs"],
                masters=self._states["masters"] or None,
            )

    def _updated(self, step: int, **tensors: Any) -> None:
        """The update of some parameters, in the step of this number."""
        if self._clipping_update is not None:
            self._norm = self._clipping_update(
                **tensors, step=step, max_norm=self.recipe.clip, **self.hyperparameters
            )
            return
        assert self._update is not None
        self._update(**tensors, step=step, **self.hyperparameters)

    def activations(self, tokens: torch.Tensor, targets: torch.Tensor) -> int | None:
        """Bytes that the backward pass of a micro-batch (B, S) keeps of its forward pass; None where that cannot
        be seen from outside.
        """
        system = self.assembly.system
        if self.execution not in ("eager", "blocks", "compile") or not self.parallel.captured:
            return None
        if tokens.device.type != "cuda" and (system.base != EAGER or system.parts or self.execution != "eager"):
            return None
        return kept_bytes(lambda: self._forward(tokens, targets), tokens.device)

    def gradients(self) -> Named:
        if self._norm is not None:
            self._clipped_in_place()
        named = zip(self._names, self._params, strict=True)
        return {name: self.parallel.whole(x, x.grad) for name, x in named if x.grad is not None}

    def _clipped_in_place(self) -> None:
        """Makes the gradients what an update that clips took them for. The first one leaves that in the first
        moments, (1 - β₁) g, whatever it says of the norm: by gradients of another scale Adam hardly steps
        otherwise.
        """
        import torch

        grads = [x.grad for x in self._params]
        if self._steps == 1:
            torch._foreach_copy_(grads, self._states["exp_avgs"])
            torch._foreach_div_(grads, 1 - self.hyperparameters["beta1"])
        else:
            torch._foreach_mul_(grads, (self.recipe.clip / (self._norm + 1e-6)).clamp(max=1.0))
        self._norm = None

    def weights(self) -> Named:
        named = zip(self._names, self._params, strict=True)
        return {name: self.parallel.whole(x, x.detach()) for name, x in named}


def within(
    around: Callable[[], contextlib.AbstractContextManager[None]], call: Callable[..., Any]
) -> Callable[..., Any]:
    """The same call, each time within a context of its own."""

    def wrapped(*given: Any) -> Any:
        with around():
            return call(*given)

    return wrapped


def _forget(params: Iterable[Any]) -> None:
    """No gradients, nor anything that products may add to."""
    for p in params:
        p.grad = p.main_grad = None


class _Captured:
    """Forward and backward as CUDA graphs, captured at the first call; gradients stay where they are.

    One graph writes the gradients of a step's first micro-batch; where there are `shares` of them, another one
    adds those of each later one. They take turns in one pool of memory.
    """

    def __init__(self, module: Any, params: Sequence[Any], shares: int) -> None:
        self._module = module
        self._params = params
        self._shares = shares
        self._graphs: list[tuple[Any, Any]] = []
        """Each with the loss that it leaves."""
        self._inputs: tuple[Any, ...] = ()
        self._done = 0
        """Micro-batches of this step."""

    def begin(self) -> None:
        """The next call is of a step's first micro-batch."""
        self._done = 0

    def __call__(self, tokens: Any, targets: Any) -> Any:
        if not self._graphs:
            self._capture(tokens, targets)
        for own, given in zip(self._inputs, (tokens, targets), strict=True):
            own.copy_(given)
        graph, value = self._graphs[min(self._done, 1)]
        self._done += 1
        graph.replay()
        return value.clone()

    def _first(self) -> Any:
        _forget(self._params)
        return self._both()

    def _later(self) -> Any:
        for p in self._params:
            p.main_grad = p.grad  # where products may add theirs, if they can
        return self._both()

    def _both(self) -> Any:
        value = self._module(*self._inputs)
        (value / self._shares if self._shares > 1 else value).backward()
        return value.detach()

    def _capture(self, tokens: Any, targets: Any) -> None:
        self._inputs = (tokens.clone(), targets.clone())
        calls = [self._first, self._later] if self._shares > 1 else [self._first]
        self._graphs = captured(tokens.device, *calls, forget=partial(_forget, self._params))
