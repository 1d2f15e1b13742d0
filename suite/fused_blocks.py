"""What our kernels are fused of, beyond the operators: attention of a whole projection; quantized gradients with
their sums; layers in E4M3 with a scale for 128 elements, whose norms and gates write 8 bits: what precision
`parts_1x128_fused` is, beside `parts_1x128`, which reads again what these wrote in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .system import Stock

Products = Callable[..., Any]


def _kernels(catalog: Stock, name: str) -> Any:
    """The file of one of our kernels, which has what they are fused of beside the operator."""
    return catalog.own_file("kernels", name)


def packed(catalog: Stock, attention: Callable[..., Any]) -> Callable[..., Any]:
    """Our attention, which takes a whole projection too: `packed(projected, mask)` is an attribute of it. That of
    a commit from before it took one is left as it is.
    """
    whole = getattr(_kernels(catalog, "attention"), "attention_packed", None)
    if whole is None:
        return attention

    def call(**given: Any) -> Any:
        return attention(**given)

    call.packed = whole  # type: ignore[attr-defined]  # functions have any
    return call


def summed(catalog: Stock) -> Callable[..., Any] | None:
    """A gradient (M, N) quantized as it is and transposed, and the sums of its columns, of one read; None in a
    commit from before that.
    """
    found: Callable[..., Any] | None = getattr(_kernels(catalog, "fp8_quant"), "both_summed", None)
    return found


def normed(catalog: Stock, quantize: Products, product: Products) -> Callable[..., Any]:
    """`normed(x, residual, weight, eps, *weights)`: h = x + residual, or x, and the RMS norm of h by `weight`
    times each of the weights. The norm is quantized as it is and transposed where it is computed, once for all
    weights, and is in memory in 8 bits alone. In the backward pass the products of its gradient are
    summed, and one kernel makes the gradient of h of that sum and of what came to h otherwise.
    """
    import torch

    norm, blocks = _kernels(catalog, "add_rms_norm"), _kernels(catalog, "fp8_quant")

    class Normed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, residual: Any, gain: Any, eps: float, *weights: Any) -> Any:
            h, rstd = norm.add_rms(x, residual, eps)
            y, scale, *across = blocks.norm_both(h.flatten(0, -2), rstd.flatten(), gain)
            found, turned = [], []
            for weight in weights:
                w, of_weight, *other = quantize(weight, "tile_both")
                found.append(product(y, w.t(), scale, of_weight.t(), "block").view(*h.shape[:-1], -1))
                turned += other
            ctx.save_for_backward(h, rstd, gain, *across, *turned)
            ctx.added = residual is not None
            return h, *found

        @staticmethod
        def backward(ctx: Any, dh: Any, *given: Any) -> Any:
            h, rstd, gain, y, of_y, *turned = ctx.saved_tensors
            dy: Any = None
            gradients = []
            for dout, w, of_weight in zip(given, turned[::2], turned[1::2], strict=True):
                g, scale, across, of_g = quantize(dout.flatten(0, -2).contiguous(), "both")
                part = product(g, w.t(), scale, of_weight.t(), "block")
                dy = part if dy is None else dy.add_(part)
                gradients.append(product(across, y.t(), of_g, of_y.t(), "group"))
            dx, dgain = norm.gradients(dy.view(h.shape), dh, h, gain, rstd)
            return dx, dx if ctx.added else None, dgain, None, *gradients

    apply: Callable[..., Any] = Normed.apply
    return apply


def down(catalog: Stock, quantize: Products, product: Products) -> Callable[..., Any]:
    """`down(gate, up, weight)`: silu(gate) · up times a weight, in memory in 8 bits alone."""
    import torch

    gates, blocks = _kernels(catalog, "swiglu"), _kernels(catalog, "fp8_quant")

    class Down(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any, weight: Any) -> Any:
            y, scale, *across = blocks.swiglu_both(gate.flatten(0, -2), up.flatten(0, -2))
            w, of_weight, *turned = quantize(weight, "tile_both")
            ctx.save_for_backward(gate, up, *across, *turned)
            return product(y, w.t(), scale, of_weight.t(), "block").view(*gate.shape[:-1], -1)

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            gate, up, y, of_y, w, of_weight = ctx.saved_tensors
            g, scale, across, of_g = quantize(dout.flatten(0, -2).contiguous(), "both")
            dy = product(g, w.t(), scale, of_weight.t(), "block").view(gate.shape)
            dgate, dup = gates.gradients(dy, gate, up)
            return dgate, dup, product(across, y.t(), of_g, of_y.t(), "group")

    apply: Callable[..., Any] = Down.apply
    return apply
