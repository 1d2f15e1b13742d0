"""How a model's layers multiply inputs by weights: `linear(x, weight, bias=None)` in each precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._transformer_engine import Linears


def linear(precision: str) -> Callable[..., Any]:
    """In one of the precisions of `system`. Raises `ImportError` where a library is missing."""
    from torch.nn import functional

    if precision == "case":
        return functional.linear
    if precision == "float8_1x128":
        return _blockwise()
    if precision.startswith("te_"):
        return Linears(precision)
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    if precision.endswith("_e5m2"):
        import torch
        from torchao.float8 import CastConfig

        config = Float8LinearConfig(cast_config_grad_output=CastConfig(target_dtype=torch.float8_e5m2))
    else:
        config = Float8LinearConfig.from_recipe_name(precision.removeprefix("float8_"))
    mm = LinearMMConfig(*(ScaledMMConfig(x, True, False, False) for x in (False, False, False)))

    def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
        out = matmul_with_hp_or_float8_args.apply(x, weight.t(), mm, config)
        return out if bias is None else out + bias

    return multiply


def by_rows(quantize: Callable[..., Any], product: Callable[..., Any]) -> Callable[..., Any]:
    """`linear(x, weight, bias=None)` whose three products are of rows that `quantize(x, "row")` made: values
    (M, K) in E4M3 and scales (M, 1). `product(a, b, scale_a, scale_b, "row", bias=None)` takes b (K, N) as the
    transpose of such rows.

    Who quantizes may do so with the transpose in the same reads, by its attribute `turned`, and sum columns too,
    by `turned_summed`: then what the backward pass multiplies is kept in 8 bits, as in `by_blocks`.
    """
    import torch

    turned: Any = getattr(quantize, "turned", None)
    turned_summed: Any = getattr(quantize, "turned_summed", None)

    def multiply(a: Any, b: Any, bias: Any = None) -> Any:
        """a (M, K) times b (N, K) transposed."""
        (a, scale_a), (b, scale_b) = quantize(a, "row"), quantize(b, "row")
        return times(a, scale_a, b, scale_b, bias)

    def times(a: Any, scale_a: Any, b: Any, scale_b: Any, bias: Any = None) -> Any:
        return product(a, b.t(), scale_a.reshape(-1, 1), scale_b.reshape(1, -1), "row", bias)

    class Once(torch.autograd.Function):
        """Each tensor is quantized once, as it is and transposed, by who does so."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            a, scale, *across = turned(x)
            w, of_weight, *other = turned(weight)
            ctx.save_for_backward(*across, *other)
            return times(a, scale, w, of_weight, bias)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, of_x, w, of_weight = ctx.saved_tensors
            of_bias = None
            if ctx.needs_input_grad[2]:
                g, scale, across, of_grad, of_bias = turned_summed(grad.contiguous())
            else:
                g, scale, across, of_grad = turned(grad.contiguous())
            return times(g, scale, w, of_weight), times(across, of_grad, x, of_x), of_bias

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return multiply(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            grad = grad.contiguous()
            across = grad.t().contiguous(), x.t().contiguous()
            return multiply(grad, weight.t().contiguous()), multiply(*across), _of_bias(ctx, grad)

    if turned is None:
        return _linear(Products.apply)
    return _linear(lambda *given: (Once.apply if torch.is_grad_enabled() else multiply)(*given))


def by_blocks(quantize: Callable[..., Any], product: Callable[..., Any]) -> Callable[..., Any]:
    """`linear(x, weight, bias=None)` as DeepSeek-V3 trains (arXiv 2412.19437): a scale for 128 elements of inputs
    and gradients, along what is summed over, and for 128 × 128 of a weight.

    What both passes multiply is read once, and quantized as it is and transposed: an input and a weight in the
    forward pass, which keeps their transposes in 8 bits for the backward pass, a gradient there. A weight is
    quantized anew in each forward pass: beside its inputs it is small, and a CUDA graph must not keep an old one.

    Who quantizes may sum a gradient's columns in the same read, for the gradient of a bias: its attribute `summed`
    gives those sums too.
    """
    import torch

    summed = getattr(quantize, "summed", None)

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            a, scale, *across = quantize(x, "both")
            w, of_weight, *turned = quantize(weight, "tile_both")
            ctx.save_for_backward(*across, *turned)
            return product(a, w.t(), scale, of_weight.t(), "block", bias)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, of_x, w, of_weight = ctx.saved_tensors
            grad = grad.contiguous()
            if ctx.needs_input_grad[2] and summed is not None:
                g, scale, across, of_grad, of_bias = summed(grad)
            else:
                g, scale, across, of_grad = quantize(grad, "both")
                of_bias = _of_bias(ctx, grad)
            dx = product(g, w.t(), scale, of_weight.t(), "block")
            return dx, product(across, x.t(), of_grad, of_x.t(), "group"), of_bias

    def multiply(x: Any, weight: Any, bias: Any) -> Any:
        if torch.is_grad_enabled():
            return Products.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch does not annotate it
        (a, scale), (w, of_weight) = quantize(x, "block"), quantize(weight, "tile")
        return product(a, w.t(), scale, of_weight.t(), "block", bias)

    return _linear(multiply)


def _of_bias(ctx: Any, grad: Any) -> Any:
    """The gradient of a bias (N,), the last of three inputs, or None where there is none."""
    return grad.sum(0) if ctx.needs_input_grad[2] else None


@dataclass(frozen=True)
class Asks:
    """What a layer asks of `quantize`: granularities and shapes; and of `product`: recipes and (M, N, K)."""

    quantized: tuple[tuple[str, tuple[int, int]], ...]
    multiplied: tuple[tuple[str, tuple[int, int, int]], ...]


def asks(by: Callable[..., Any], M: int, N: int, K: int) -> Asks:
    """What a layer `by_rows` or `by_blocks`, of M rows and a weight (N, K), asks in both passes, and without
    gradients.
    """
    three = (M, N, K), (M, K, N), (N, K, M)
    if by is by_rows:
        shapes = (M, K), (N, K), (M, N), (K, N), (N, M), (K, M)
        return Asks(tuple(("row", x) for x in shapes), tuple(("row", x) for x in three))
    inputs = ("both", (M, K)), ("tile_both", (N, K)), ("both", (M, N)), ("block", (M, K)), ("tile", (N, K))
    return Asks(inputs, tuple(zip(("block", "block", "group"), three, strict=True)))


def _linear(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """`linear(x, weight, bias=None)` of a differentiable function of x (M, K), weight (N, K) and a bias (N,) or
    None.
    """

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        return multiply(x.flatten(0, -2).contiguous(), weight, bias).unflatten(0, x.shape[:-1])

    return linear


def _blockwise() -> Callable[..., Any]:
    """torchao's products with a scale for 128 elements of inputs and 128 × 128 of weights; needs sm_90."""
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
        out = fp8_blockwise_mm.apply(x, weight, 128, x.dtype, False)
        return out if bias is None else out + bias

    return multiply
