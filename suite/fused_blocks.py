"""What our kernels are fused of, beyond the operators: attention of a whole projection; layer norms that add
first; products whose gradients are summed where they are made; AdamW that clips; quantized gradients with their
sums; layers in E4M3 with a scale for 128 elements, whose norms, gates and activations write 8 bits: what precision
`parts_1x128_fused` is, beside `parts_1x128`, which reads again what these wrote in 16 bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .system import Stock

Products = Callable[..., Any]


def _kernels(catalog: Stock, name: str) -> Any:
    """The file of one of our kernels, which has what they are fused of beside the operator."""
    return catalog.own_file("kernels", name)


def packed(catalog: Stock, attention: Callable[..., Any]) -> Callable[..., Any]:
    """Our attention, which takes a whole projection too: `packed(projected, mask)` is an attribute of it."""
    return _beside(attention, "packed", getattr(_kernels(catalog, "attention"), "attention_packed", None))


def added(catalog: Stock, norm: Callable[..., Any]) -> Callable[..., Any]:
    """Our layer norm, which adds a residual before too: `added(x, residual, weight, bias, eps)`, the norm and the
    sum, is an attribute of it.
    """
    return _beside(norm, "added", getattr(_kernels(catalog, "layer_norm"), "add_layer_norm", None))


def clipped(catalog: Stock, adamw: Callable[..., Any]) -> Callable[..., Any]:
    """Our AdamW, which clips gradients too: `clipped(…, max_norm=…)`, their norm, is an attribute of it."""
    return _beside(adamw, "clipped", getattr(_kernels(catalog, "adamw"), "adamw_clipped", None))


def _beside(part: Callable[..., Any], name: str, whole: Callable[..., Any] | None) -> Callable[..., Any]:
    """A part with what it is fused of for an attribute. Of a commit from before there was that it is left as it
    is.
    """
    if whole is None:
        return part

    def call(**given: Any) -> Any:
        return part(**given)

    setattr(call, name, whole)
    return call


def multiplied(catalog: Stock) -> Callable[..., Any]:
    """`linear(x, weight, bias=None)` by PyTorch's products, with fewer passes over memory in the backward pass.
    A bias's gradient is a sum of our own. Of a table whose rows are looked up by their numbers
    (`looked_up(tokens, table)`, an attribute: see `model.py`) gradients are added to what a product by it gave.
    Where several weights multiply one input (`several(x, *weights)`, another), the products of its gradient add
    what those before them gave. Inputs have two dimensions or more.
    """
    import torch
    from torch.autograd.function import once_differentiable
    from torch.nn import functional

    kernels = _kernels(catalog, "linear")
    sums: Any = getattr(kernels, "sums_of_columns", None)
    add_rows: Any = getattr(kernels, "add_rows", None)

    def weighed(dout: Any, x: Any) -> Any:
        """The gradient of a weight: doutᵀ x."""
        return dout.t() @ x.flatten(0, -2)

    class Biased(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return functional.linear(x, weight, bias)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dout: Any) -> Any:
            x, weight = ctx.saved_tensors
            wanted, given = ctx.needs_input_grad, dout.flatten(0, -2)
            return (
                (given @ weight).view(x.shape) if wanted[0] else None,
                weighed(given, x) if wanted[1] else None,
                sums(given) if wanted[2] else None,
            )

    class Several(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, *weights: Any) -> Any:
            ctx.save_for_backward(x, *weights)
            return tuple(functional.linear(x, weight) for weight in weights)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *given: Any) -> Any:
            x, *weights = ctx.saved_tensors
            wanted, *trained = ctx.needs_input_grad
            given = tuple(dout.flatten(0, -2) for dout in given)
            dx = None
            if wanted:
                dx = given[0] @ weights[0]  # Σᵢ doutᵢ Wᵢ
                for dout, weight in zip(given[1:], weights[1:], strict=True):
                    dx.addmm_(dout, weight)
                dx = dx.view(x.shape)
            pairs = zip(given, trained, strict=True)
            return dx, *(weighed(dout, x) if needed else None for dout, needed in pairs)

    class LookedUp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tokens: Any, table: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(tokens)
            ctx.shape = table.shape
            return functional.embedding(tokens, table), table.view_as(table)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, drows: Any, dtable: Any) -> Any:
            (tokens,) = ctx.saved_tensors
            # What a product gave is nobody else's: a graph's backward pass runs once.
            dtable = drows.new_zeros(ctx.shape) if dtable is None else dtable.contiguous()
            add_rows(dtable, drows.flatten(0, -2), tokens.flatten())
            return None, dtable

    biased: Callable[..., Any] = Biased.apply
    added: Callable[..., Any] = Several.apply

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        if bias is None or sums is None or not torch.is_grad_enabled():
            return functional.linear(x, weight, bias)
        return biased(x, weight, bias)

    def several(x: Any, *weights: Any) -> Any:
        if not torch.is_grad_enabled():
            return tuple(functional.linear(x, weight) for weight in weights)
        return added(x, *weights)

    # A function has what it is given.
    linear.several = several  # type: ignore[attr-defined]
    if add_rows is not None:
        linear.looked_up = LookedUp.apply  # type: ignore[attr-defined]
    return linear


class FewRowKernels(NamedTuple):
    """Products of few rows, with a residual added (`rows_added`), of their norm (`rows_normed`), and of that the
    queries, keys and values, turned and written (`rows_turned`), of heads that are as long as `turns` allows, on
    devices that `here` allows. `scaled`: by weights in E4M3 with a scale a row, too.
    """

    added: Callable[..., Any]
    normed: Callable[..., Any]
    turned: Callable[..., Any]
    turns: Callable[[int], bool]
    here: Callable[..., bool]
    scaled: bool


def few_rows(catalog: Stock) -> FewRowKernels | None:
    """Our products of few rows with what is beside them; None in a commit from before that, of which a few had
    them for one row alone: its decode steps have nine launches a layer.
    """
    kernels = _kernels(catalog, "matmul")
    if not hasattr(kernels, "rows_added"):
        return None
    scaled = "scale" in inspect.signature(kernels.rows_added).parameters
    return FewRowKernels(
        kernels.rows_added, kernels.rows_normed, kernels.rows_turned, kernels.turns, kernels.rows_here, scaled
    )


QUANTIZED = {"summed": "both_summed", "turned": "rows_both", "turned_summed": "rows_both_summed"}
"""What `by_rows` and `by_blocks` (`products.py`) ask of who quantizes, by our kernels' names."""


def quantized(catalog: Stock, quantize: Callable[..., Any]) -> None:
    """Gives it those for attributes; in a commit from before there were some, the others."""
    kernels = _kernels(catalog, "fp8_quant")
    for name, own in QUANTIZED.items():
        if hasattr(kernels, own):
            setattr(quantize, name, getattr(kernels, own))


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


def layer_normed(catalog: Stock, quantize: Products, product: Products) -> Callable[..., Any]:
    """`layer_normed(x, residual, gain, bias, eps, weight, weight_bias)`: h = x + residual, or x, and the layer
    norm of h by `gain` and `bias` times a weight, with its bias. As in `normed`, the norm is in memory in 8 bits
    alone.
    """
    import torch

    norm, blocks = _of_layer_norms(catalog)

    class Normed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, residual: Any, gain: Any, bias: Any, eps: float, w: Any, of_w: Any) -> Any:
            h, mean, rstd = norm.add_moments(x, residual, eps)
            y, scale, *across = blocks.layer_norm_both(h.flatten(0, -2), *_flat(mean, rstd), gain, bias)
            w, of_weight, *turned = quantize(w, "tile_both")
            ctx.save_for_backward(h, mean, rstd, gain, *across, *turned)
            ctx.added = residual is not None
            return h, product(y, w.t(), scale, of_weight.t(), "block", of_w).view(*h.shape[:-1], -1)

        @staticmethod
        def backward(ctx: Any, dh: Any, dout: Any) -> Any:
            h, mean, rstd, gain, y, of_y, w, of_weight = ctx.saved_tensors
            g, scale, across, of_g, dbias = blocks.both_summed(dout.flatten(0, -2).contiguous())
            dy = product(g, w.t(), scale, of_weight.t(), "block").view(h.shape)
            dw = product(across, y.t(), of_g, of_y.t(), "group")
            dx, *of_norm = norm.gradients(dy, dh, h, gain, mean, rstd)
            return dx, dx if ctx.added else None, *of_norm, None, dw, dbias

    apply: Callable[..., Any] = Normed.apply
    return apply


def fed(catalog: Stock, quantize: Products, product: Products) -> Callable[..., Any]:
    """`fed(x, residual, gain, bias, eps, up, up_bias, down, down_bias)`: h = x + residual, or x, and of h a
    feed-forward behind a layer norm: gelu(norm · up + up_bias), by its tanh form, times `down`, with its bias. The
    norm, what gelu gives and the gradient of what it takes are in memory in 8 bits alone.
    """
    import torch

    norm, blocks = _of_layer_norms(catalog)

    class Fed(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Any, residual: Any, gain: Any, bias: Any, eps: float, up: Any, up_bias: Any, *down: Any
        ) -> Any:
            h, mean, rstd = norm.add_moments(x, residual, eps)
            y, scale, *across = blocks.layer_norm_both(h.flatten(0, -2), *_flat(mean, rstd), gain, bias)
            w, of_weight, *turned = quantize(up, "tile_both")
            inner = product(y, w.t(), scale, of_weight.t(), "block", up_bias)
            y, scale, *of_gelu = blocks.gelu_both(inner)
            w, of_weight, *of_down = quantize(down[0], "tile_both")
            out = product(y, w.t(), scale, of_weight.t(), "block", down[1])
            ctx.save_for_backward(h, mean, rstd, gain, inner, *across, *turned, *of_gelu, *of_down)
            ctx.added = residual is not None
            return h, out.view(h.shape)

        @staticmethod
        def backward(ctx: Any, dh: Any, dout: Any) -> Any:
            h, mean, rstd, gain, inner, *held = ctx.saved_tensors
            y, of_y, up, of_up, z, of_z, down, of_down = held
            g, scale, across, of_g, down_bias = blocks.both_summed(dout.flatten(0, -2).contiguous())
            dz = product(g, down.t(), scale, of_down.t(), "block")
            of_weight = product(across, z.t(), of_g, of_z.t(), "group")
            g, scale, across, of_g, up_bias = blocks.gelu_gradient_both_summed(dz, inner)
            dy = product(g, up.t(), scale, of_up.t(), "block").view(h.shape)
            dup = product(across, y.t(), of_g, of_y.t(), "group")
            dx, *of_norm = norm.gradients(dy, dh, h, gain, mean, rstd)
            return dx, dx if ctx.added else None, *of_norm, None, dup, up_bias, of_weight, down_bias

    apply: Callable[..., Any] = Fed.apply
    return apply


def _of_layer_norms(catalog: Stock) -> tuple[Any, Any]:
    """The files of the two kernels. Raises `NotImplementedError` for a commit from before they were fused."""
    norm, blocks = _kernels(catalog, "layer_norm"), _kernels(catalog, "fp8_quant")
    if not hasattr(blocks, "layer_norm_both"):
        raise NotImplementedError("this commit's layer norms do not write 8 bits")
    return norm, blocks


def _flat(*moments: Any) -> list[Any]:
    """Of rows, without the dimensions before them."""
    return [x.flatten() for x in moments]
