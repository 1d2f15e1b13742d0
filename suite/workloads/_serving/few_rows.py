"""A decode step of few sequences whose norms are multiplied by the products behind them, whose sums are made by
those before, and whose keys and values go from their product to the cache: a layer of Llama's shape has three
launches less, each of which takes as long as a small product's.

A model's module calls a product, then `add_norm` with what it gave, then the products behind that. Here the first
call only notes what is asked, as `Later`; `add_norm` makes it, with the residual added, and notes the norm, as
`Normed`; what multiplies that norm makes it, and of queries, keys and values is noted too, as `Projected`, until
they are turned and written.

Matrices in E4M3 with a scale a row are multiplied so as well, by inputs in 16 bits: a step quantizes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ... import fused_blocks
from ...model import Chosen
from .products import Products
from .quantized import Quantized

BEHIND = ("output", "down")
"""Matrices of a layer whose products are added to the stream."""

DTYPES = ("bf16",)
"""Dtypes of such steps: in fp16 what is not normalized may be too large."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight (N, K) as the kernels take it: transposed, with a scale of each row (N,), or None."""

    b: Any
    scale: Any = None


@dataclass(frozen=True, eq=False)
class Later:
    """x (…, K) times weight (N, K) transposed, which is not made yet."""

    x: Any
    weight: Any

    def view_as(self, other: Any) -> Later:
        """Of one token a sequence all shapes are a row each."""
        return self


@dataclass(frozen=True, eq=False)
class Normed:
    """An RMS norm, which is not made: y (B, K) is what is normalized times the norm's weight, and `squares` have
    the sum of the former's squares among them.
    """

    y: Any
    squares: Any
    eps: float

    def flatten(self, *dimensions: int) -> Normed:
        """Of one token a sequence all shapes are a row each."""
        return self


@dataclass(frozen=True, eq=False)
class Projected:
    """Queries, keys and values together, `x` times a matrix, none of which are made. Each of them is this."""

    x: Normed
    matrix: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        """Sequences, one token each, and however many numbers."""
        return (len(self.x.y), 1, 0)

    def view(self, *shape: int) -> Projected:
        """They are made in the shape that is wanted in the end."""
        return self

    def transpose(self, *dimensions: int) -> Projected:
        """They are made in the shape that is wanted in the end."""
        return self


class FewRows:
    """How such steps multiply and normalize. `turns`: queries and keys are turned as they are projected."""

    def __init__(
        self,
        products: Products,
        kernels: fused_blocks.FewRowKernels,
        layers: Any,
        turns: bool,
        quantized: Quantized | None,
    ) -> None:
        self._products, self._kernels, self._turns, self._quantized = products, kernels, turns, quantized
        self._behind = {id(getattr(x, name)) for x in layers for name in BEHIND}
        self._matrices: dict[tuple[int, ...], Matrix | None] = {}

    def parts(self, others: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Those in the place of the others of a step, of which `head` is for logits."""
        own: dict[str, Callable[..., Any]] = {
            "linear": partial(self.linear, others["linear"]),
            "head": partial(self.linear, others["head"]),
            "several": partial(self.several, others["several"]),
            "gated": self.gated,
            "add_norm": self.add_norm,
        }
        if not self._turns or "write" not in others:
            return own
        return own | {
            "several": partial(self.projected, others["several"]),
            "write": partial(self.write, others["write"]),
        }

    def linear(self, plain: Callable[..., Any], x: Any, weight: Any, bias: Any = None) -> Any:
        """x (B, 1, K) or (B, K) times weight (N, K) transposed; later, where it is added to the stream."""
        if isinstance(x, Normed):
            return self._of_norm(x, self._matrix(weight))
        if id(weight) in self._behind and bias is None:
            return Later(x, weight)
        return plain(x, weight, bias)

    def several(self, plain: Callable[..., Any], x: Any, *weights: Any) -> Sequence[Any]:
        """x times each of these, (B, 1, N) each: views of one product where they are one matrix in memory."""
        if not isinstance(x, Normed):
            found: Sequence[Any] = plain(x, *weights)
            return found
        whole = self._joined(weights)
        if whole is None:
            return tuple(self._of_norm(x, self._matrix(weight))[:, None] for weight in weights)
        found = self._of_norm(x, whole)[:, None].split([len(weight) for weight in weights], -1)
        return found

    def projected(self, plain: Callable[..., Any], x: Any, *weights: Any) -> Sequence[Any]:
        """Queries, keys and values, not made where x is a norm that is not."""
        whole = self._joined(weights)
        if not isinstance(x, Normed) or whole is None:
            return self.several(plain, x, *weights)
        return (Projected(x, whole),) * len(weights)

    def write(self, plain: Callable[..., Any], q: Any, k: Any, v: Any, layout: str, **where: Any) -> Any:
        """The turned queries (B, 1, H, D); keys and values are in the cache. `plain` does it with what is made."""
        if not isinstance(q, Projected):
            return plain(q=q, k=k, v=v, layout=layout, **where)
        x = q.x
        given = {**where, "eps": x.eps, **_scaled(q.matrix)}
        return self._kernels.turned(x.y, x.squares, q.matrix.b, **given)

    def gated(self, x: Any, gate: Any, up: Any) -> Any:
        """silu(x · gate) · (x · up), (B, N)."""
        whole = self._joined((gate, up))
        assert isinstance(x, Normed)
        assert whole is not None
        return self._of_norm(x, whole, gated=True)

    def add_norm(self, x: Any, residual: Any, weight: Any, eps: float) -> tuple[Normed, Any]:
        """The norm of x + residual, not made, and that sum, (B, 1, N)."""
        assert isinstance(x, Later)
        matrix = self._matrix(x.weight)
        rows = x.x.flatten(0, -2), residual.flatten(0, -2)
        h, y, squares = self._kernels.added(rows[0], matrix.b, rows[1], weight, **_scaled(matrix))
        return Normed(y, squares, eps), h.view_as(residual)

    def _matrix(self, weight: Any) -> Matrix:
        found = self._joined((weight,))
        assert found is not None
        return found

    def _joined(self, weights: Sequence[Any]) -> Matrix | None:
        """The one matrix that these are in memory, or None."""
        key = tuple(map(id, weights))  # of the module's parameters, which stay
        if key not in self._matrices:
            self._matrices[key] = self._found(weights)
        return self._matrices[key]

    def _found(self, weights: Sequence[Any]) -> Matrix | None:
        if self._quantized is not None and (held := self._quantized.held(weights)) is not None:
            values, scale = held
            return Matrix(values.t(), scale.flatten())
        whole = weights[0] if len(weights) == 1 else self._products.joined(weights)
        return None if whole is None else Matrix(whole.t())

    def _of_norm(self, x: Normed, matrix: Matrix, gated: bool = False) -> Any:
        return self._kernels.normed(x.y, x.squares, matrix.b, x.eps, gated, **_scaled(matrix))


def _scaled(matrix: Matrix) -> dict[str, Any]:
    """The scale by name, if there is one: kernels of older commits have none."""
    return {} if matrix.scale is None else {"scale": matrix.scale}


def few_rows(
    products: Products, chosen: Chosen, layers: Any, dtype: str, quantized: Quantized | None = None
) -> FewRows | None:
    """What decodes up to `products.FEW` sequences so: our own kernels for GPUs, launched or in a graph by hand, in
    layers of Llama's shape and one of `DTYPES`, their matrices in that, or in E4M3 with a scale a row where the
    system's products of these are ours too. None elsewhere.
    """
    c, system = chosen.configuration, products.assembly.system
    if chosen.model.name != "llama" or c.norms != "before" or c.experts or c.multipliers is not None:
        return None
    if dtype not in DTYPES or not products.own or system.execution not in ("eager", "graph"):
        return None
    others = (("add_norm", "add_rms_norm"), ("gate", "swiglu"))
    if not all(products.fused("matmul", *x) for x in others):
        return None
    kernels = fused_blocks.few_rows(products.assembly.catalog)
    device = layers[0].output.device
    if kernels is None or not kernels.here(device):
        return None
    if quantized is not None and not (quantized.own and kernels.scaled and kernels.here(device, True)):
        return None
    turns = c.qk_norm == "none" and kernels.turns(c.head)
    return FewRows(products, kernels, layers, turns, quantized)
