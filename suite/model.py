"""What a model is: published configurations as numbers, and a module in plain PyTorch whose parts are operators.
Of an `Architecture` there are the numbers alone.

A model's file builds one `Model`. Everything that a floor or a list needs (weights by name with their shapes,
parts with their cases and how often they are called) is pure; only `module` imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..registry.errors import InputError, unknown
from .operator import Option

if TYPE_CHECKING:
    import torch

Parts: TypeAlias = Mapping[str, Callable[..., Any]]
"""The callables of a model's parts by the part's name, and `linear(x, weight, bias=None)`, by which layers
multiply. What runs a model may give `several(x, *weights)` and `gated(x, gate, up)` too, see there, and the parts
that a model has only where they are named (`Model.named`).
"""

FINAL_GAIN = 4.0
"""Mean of the final norm's weight at the start. It makes the first gradients' norm larger than what clipping lets
through, so that a step which does not clip gives another answer than one that does.
"""


@dataclass(frozen=True)
class Weight:
    """One parameter: its shape, and how it is drawn, normal around `mean`.

    `share` is the part of it that one token is multiplied with: 1 for a matrix, 0 for a table that is only looked
    up and for what is added or scales a row, k / E for the matrices of E experts of which a token takes k.
    """

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    share: float = 0.0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def matrix(rows: int, columns: int, gain: float = 1.0, share: float = 1.0) -> Weight:
    """The weight (rows, columns) of a linear layer, drawn so that inputs of variance 1 give outputs of gain²."""
    return Weight((rows, columns), gain * columns**-0.5, share=share)


def gains(width: int, mean: float = 1.0) -> Weight:
    """The weight (width,) of a norm. Not all ones: norms exchanged by mistake must give another answer."""
    return Weight((width,), 0.1 * mean, mean)


def biases(width: int) -> Weight:
    """A bias (width,), not zero, so that one that is left out shows in the answer."""
    return Weight((width,), 0.02)


def several(parts: Parts) -> Callable[..., Sequence[Any]]:
    """`several(x, *weights)`: x times each of these weights; one product after the other, if neither a part nor
    `linear`, by an attribute of that name, does it.
    """
    linear = parts["linear"]

    def one_by_one(x: Any, *weights: Any) -> Sequence[Any]:
        return tuple(linear(x, weight) for weight in weights)

    own: Callable[..., Sequence[Any]] = getattr(linear, "several", one_by_one)
    return parts.get("several", own)


def looked_up(parts: Parts) -> Callable[..., tuple[Any, Any]]:
    """`looked_up(tokens, table)`: the rows of a table by their numbers, and the table, for who else multiplies by
    it: its gradient is one. By PyTorch, if `linear` does it not, by an attribute of that name.
    """
    from torch.nn import functional

    def plain(tokens: Any, table: Any) -> tuple[Any, Any]:
        return functional.embedding(tokens, table), table

    own: Callable[..., tuple[Any, Any]] = getattr(parts["linear"], "looked_up", plain)
    return own


def gated(parts: Parts) -> Callable[..., Any]:
    """`gated(x, gate, up)`: part `gate` of x times both weights; of two products, if neither what runs the model
    does it nor a part that stands for all three.
    """
    both, whole = several(parts), parts.get("gate_up_swiglu")

    def together(x: Any, gate: Any, up: Any) -> Any:
        assert whole is not None
        return whole(x=x, gate=gate, up=up)

    def apart(x: Any, gate: Any, up: Any) -> Any:
        gated, other = both(x, gate, up)
        return parts["gate"](gate=gated, up=other)

    return parts.get("gated") or (apart if whole is None else together)


@dataclass(frozen=True)
class Part:
    """A place in a model that an operator's implementation is put into.

    `axes` and `options` make the operator's case, of one micro-batch; `calls` is how often it is called for that.
    """

    name: str
    operator: str
    axes: Mapping[str, int]
    calls: int
    options: Mapping[str, Option] = field(default_factory=dict)


LINEAR = "linear"
"""The operator of the products inside layers. Each shape of weight is a part of that name and the shape's."""


def linear_part(N: int, K: int) -> str:
    """The name of the products with weights (N, K)."""
    return f"{LINEAR}_{N}x{K}"


@dataclass(frozen=True)
class Bound:
    """How far a system may be from the model in fp32, relative: the loss; each parameter's gradient by its norm;
    and the change of each parameter over three steps, by its norm, beside what storing the parameter rounds away.
    """

    loss: float
    gradient: float
    change: float


BOUNDS: Mapping[str, Bound] = {
    "fp32": Bound(loss=1e-4, gradient=2e-3, change=5e-2),
    "bf16": Bound(loss=2e-2, gradient=1.5e-1, change=4e-1),
    "e4m3": Bound(loss=3e-2, gradient=4e-1, change=6e-1),
}
"""By the dtype of the products. Adam's first steps are nearly the signs of the gradients, so that of a change
about the square root of the gradients' own error is to be expected: 0.25 for 5 %. What is planted (a dropped
gradient, a skipped layer, a broken mask, an optimizer that does nothing) is off by about 1.
"""


Storage: TypeAlias = Literal["bshd", "packed"]
"""How a model leaves queries, keys and values in memory: each its own projection (B, S, H, D), or all of them
views of one.
"""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is published of a model: numbers, and the calls that follow from them. It cannot be run.

    * `configurations`: the published ones by name, each a frozen type with `layers`, `width`, `vocabulary`.
    * `parts(configuration, B, S)`: where operators are called for B sequences of S tokens, in the order of a pass.
    * `longest(configuration)`: the longest sequence it takes, None for any.
    * `lengths`: the lengths of sequence that it is run at, where these are given; empty: any.
    * `decodes`: whether it makes one token after the other.
    """

    name: str
    summary: str
    configurations: Mapping[str, Any]
    parts: Callable[[Any, int, int], tuple[Part, ...]]
    longest: Callable[[Any], int | None] = lambda configuration: None
    storage: Storage = "bshd"
    lengths: tuple[int, ...] = ()
    decodes: bool = True


@dataclass(frozen=True, kw_only=True)
class Model(Architecture):
    """An architecture that can be run.

    * `weights(configuration)`: all parameters by name, in the order of the module's; a tied table once.
    * `attention(configuration)`: the sum over layers of heads × head dimension that S × S scores are computed
      with; a mask that hides nothing counts twice what a causal one does.
    * `named(configuration, B, S)`: parts that stand for `linear` and others, where a system names them.
    * `fused(configuration)`: what of `fused_blocks.py` it asks for in the place of norms, gates and activations
      and the products behind them; nothing, where it has none that are fused.
    * `module(configuration, parts)`: an `nn.Module` with those parameters. `forward(tokens, targets)` takes int64
      (B, S) each and gives the mean loss, a scalar. `prepare(S, device, dtype)` makes what depends on positions.
      With the attribute `recompute` set, each layer is computed again for the backward pass.
    """

    weights: Callable[[Any], Mapping[str, Weight]]
    attention: Callable[[Any], int]
    module: Callable[[Any, Parts], torch.nn.Module]
    bounds: Mapping[str, Bound] = field(default_factory=lambda: BOUNDS)
    named: Callable[[Any, int, int], tuple[Part, ...]] = lambda configuration, B, S: ()
    fused: Callable[[Any], tuple[str, ...]] = lambda configuration: ()

    def products(self, configuration: Any, B: int, S: int) -> tuple[Part, ...]:
        """What layers multiply by `linear`, of a micro-batch: a part for each shape of weight, with a bias or not.
        Weights of experts and routers are multiplied otherwise, and the output projection in the loss.
        """
        return tuple(
            Part(linear_part(N, K), LINEAR, {"M": B * S, "N": N, "K": K}, calls, {"bias": bias})
            for (N, K, bias), calls in _multiplied_in_layers(self.weights, configuration).items()
        )

    def parameters(self, configuration: Any) -> int:
        """How many parameters it has; a tied table counts once."""
        return sum(x.size for x in self.weights(configuration).values())

    def multiplied(self, configuration: Any) -> int:
        """N_mm: the weights that a token is multiplied with. The output projection is in, tied or not; the lookup
        of an embedding is not; of experts those that a token takes.
        """
        return round(sum(x.size * x.share for x in self.weights(configuration).values()))

    def hidden(self, configuration: Any) -> tuple[str, ...]:
        """The weights that Muon updates where it does: matrices of layers that tokens are multiplied with."""
        weights = self.weights(configuration)
        return tuple(name for name, x in weights.items() if "layers." in name and x.share > 0 and len(x.shape) > 1)

    def training_flops(self, configuration: Any, S: int, tokens: int) -> int:
        """Operations of forward and backward for so many tokens in sequences of S; nothing twice."""
        each = 6 * self.multiplied(configuration) + 6 * S * self.attention(configuration)
        return each * tokens


@functools.cache  # whoever reads a catalog asks this of every model, for each part that a system names
def _multiplied_in_layers(
    weights_of: Callable[[Any], Mapping[str, Weight]], configuration: Any
) -> Mapping[tuple[int, int, bool], int]:
    """How often layers multiply by a weight (N, K), with a bias or not."""
    weights = weights_of(configuration)
    found: dict[tuple[int, int, bool], int] = {}
    for name, weight in weights.items():
        table = name.rpartition(".")[2] in ("embedding", "head", "router")
        if weight.share == 1 and len(weight.shape) == 2 and not table:
            N, K = weight.shape
            key = N, K, f"{name}_bias" in weights
            found[key] = found.get(key, 0) + 1
    return found


@dataclass(frozen=True)
class Chosen:
    """A model in one of its configurations."""

    model: Model
    name: str
    configuration: Any

    def named(self, B: int, S: int) -> tuple[Part, ...]:
        """The parts that are another's than PyTorch's only where a system names them: its products, and what
        stands for some of these together with other parts.
        """
        model, configuration = self.model, self.configuration
        return (*model.products(configuration, B, S), *model.named(configuration, B, S))

    def first(self, layers: int) -> Chosen:
        """Only its first layers, with all before and after them. Raises `InputError` for more than it has."""
        have = self.configuration.layers
        if not 1 <= layers <= have:
            raise InputError(f"{self.name} has {have} layers; a slice has 1 to {have}, not {layers}.")
        return dataclasses.replace(self, configuration=dataclasses.replace(self.configuration, layers=layers))


def chosen(models: Mapping[str, Model], name: str) -> Chosen:
    """The model that has a configuration of that name. Raises `InputError` naming what exists."""
    for model in models.values():
        if name in model.configurations:
            return Chosen(model, name, model.configurations[name])
    raise unknown("model", name, sorted(x for model in models.values() for x in model.configurations))


def draw(
    weights: Mapping[str, Weight], seed: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters at the start, one after the other, rounded to the dtype that a case stores them in.

    A parameter depends on the seed, its name and its shape alone, so that a slice has the same first layers.
    """
    import torch

    for name, weight in weights.items():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        values = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float32)
        values = values.mul_(weight.std).add_(weight.mean).to(dtype)  # the wide ones go before these are used
        yield name, values
