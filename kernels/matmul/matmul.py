"""Matrix products of 16-bit numbers and of fp32 as TF32, with a bias or a gate in the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch

from .._common import FLOATING, capability, check, lined, multiprocessors, operator
from .._launch import prepared, room
from . import _few_rows as few_rows
from . import _matmul as portable
from ._dispatch import SIXTEEN, Choice, choose, filled
from ._rows_turned import rows_turned, turns
from ._schedules import CHUNK

Three: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

__all__ = ["matmul", "matmul_add", "rows_added", "rows_here", "rows_normed", "rows_turned", "turns"]


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """a @ b + bias, summed in fp32 and rounded once; `gated`: silu(a @ b[:, :N]) · (a @ b[:, N:]) of b (K, 2N).

    a (M, K), b (K, N) and bias (N,) in one of bf16, fp16 and fp32 to (M, N). Both matrices may lie in memory row
    by row or column by column: `matmul(x, weight.t())` is a linear layer. fp32 is multiplied as TF32 (10 bits).
    Not differentiable: `linear` is.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names the
    argument.
    """
    result: torch.Tensor = _matmul(a, b, bias, gated)
    return result


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> None:
    """Raises what `matmul` says."""
    check("a", a, dim=2)
    check("b", b, dim=2, like=a, dtypes=(a.dtype,))
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected ({a.shape[1]}, N)")
    if gated:
        if b.shape[1] % 2:
            raise ValueError(f"b has shape {tuple(b.shape)}, expected an even number of columns: gate and factor")
        if bias is not None:
            raise ValueError("bias is given, but a gated product takes none")
    if bias is not None:
        check("bias", bias, shape=b.shape[1:], like=a, dtypes=(a.dtype,))


def _empty(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1] // (2 if gated else 1))


def _launch(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    out = _empty(a, b, bias, gated)
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        out.zero_()
        return out if bias is None else out.add_(bias)
    weight = b.t()
    bias = bias if bias is None else bias.contiguous()
    if few_rows.takes(a, weight):
        few_rows.multiply(a, weight, out, gated, bias)
    elif on_hopper(a):
        _on_hopper(a, weight, out, gated, bias)
    else:
        portable.multiply(a, weight, out, gated, bias=bias)
    return out


def on_hopper(a: torch.Tensor) -> bool:
    """Whether products of such a matrix are the kernel's for Hopper, unless they have few rows."""
    return capability(a.device)[0] == 9 and a.dtype in FLOATING[:2]


def hopper_adds() -> bool:
    """Whether the kernel for Hopper can add to its output with this Triton."""
    from .._pipeline import ADDS

    return ADDS


def _on_hopper(
    a: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    adds: bool = False,
) -> None:
    """out = a · weightᵀ, or out += with `adds`."""
    from . import _matmul_hopper as hopper  # where Gluon may be missing, it is not needed

    a, weight = hopper.loadable(a), hopper.loadable(weight)
    target = out if hopper.mapped(out) else hopper.aligned(out)
    if adds and target is not out:
        target.copy_(out)
    chosen = _chosen(a, weight, out, gated, bias is not None, adds)
    hopper.multiply(
        a, weight, target, chosen.schedule, chosen.dealt, chosen.section, bias=bias, split=chosen.split
    )
    if target is not out:
        out.copy_(target)


def _chosen(
    a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gated: bool, bias: bool, adds: bool
) -> Choice:
    """How Hopper multiplies these."""
    from . import _matmul_hopper as hopper

    M, K = a.shape
    chosen = choose(SIXTEEN, M, out.shape[1], K, gated, multiprocessors(a))
    a_turned = hopper.turned(a)
    schedule = replace(
        chosen.schedule,
        a_turned=a_turned,
        b_turned=hopper.turned(weight),
        bias=bias,
        filled=0 if a_turned else filled(chosen.schedule, M),
    )
    if adds:
        schedule = replace(schedule, adds=True, written=CHUNK * 2 // out.element_size())
    return replace(chosen, schedule=schedule)


def planned(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None] | None:
    """`matmul` of all tensors that are alike, as a function of (a, b, out, bias) to be called where their device
    is the current one: of few rows, and on Hopper where nothing has to be copied first, all but memory and
    addresses is decided here. Else None. Of what that is called with only addresses are read: transposes and other
    views of the same memory do as well.
    """
    weight, device = b.t(), a.device
    if out.numel() == 0 or a.shape[1] == 0 or not (bias is None or bias.is_contiguous()):
        return None
    if few_rows.takes(a, weight):
        if lined(a) is not a:
            return None
        launch = few_rows.planned(a, weight, out, gated, bias)
        return lambda a, b, out, bias: launch(device, a, b, out, out if bias is None else bias, few_rows.ALONE)
    if not on_hopper(a):
        return None
    from . import _matmul_hopper as hopper

    if not all(map(hopper.mapped, (a, weight, out))):
        return None
    chosen = _chosen(a, weight, out, gated, bias is not None, False)
    multiply = hopper.planned(
        a, weight, out, chosen.schedule, chosen.dealt, chosen.section, bias=bias, split=chosen.split
    )
    return lambda a, b, out, bias: multiply(a, b, out, None, None, bias)


def _prepare(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, gated: bool
) -> Callable[..., torch.Tensor]:
    """`_launch` of all inputs that are alike."""
    like = _empty(a, b, bias, gated)
    multiply = planned(a, b, like, bias, gated)
    if multiply is None:
        return _launch
    made = room(like.shape, like.dtype, a.device)

    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
        out = made()
        multiply(a, b, out, bias)
        return out

    return run


_matmul = operator(
    "matmul(Tensor a, Tensor b, Tensor? bias, bool gated) -> Tensor",
    prepared(_prepare, _check),
    _empty,
    check=_check,
)


def matmul_add(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a @ b where out lies, without reading it: the product, rounded to out's dtype, is added by the memory
    where a GPU can have it so, and else in the kernel.

    a (M, K) and b (K, N) as `matmul` takes them; out (M, N), contiguous, of their dtype or in fp32, such as a
    gradient of which this is another part. Raises as `matmul` does.
    """
    check("a", a, dim=2)
    check("b", b, dim=2, like=a, dtypes=(a.dtype,))
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected ({a.shape[1]}, N)")
    check("out", out, shape=(a.shape[0], b.shape[1]), like=a, dtypes=(a.dtype, torch.float32))
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}, expected rows one after the other")
    _matmul_add(out, a, b)


def _add(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if out.numel() == 0 or a.shape[1] == 0:
        return
    weight = b.t()
    if on_hopper(a) and hopper_adds():
        _on_hopper(a, weight, out, adds=True)
    else:
        portable.multiply(a, weight, out, adds=True)


_matmul_add = operator("matmul_add(Tensor(a!) out, Tensor a, Tensor b) -> ()", _add, lambda out, a, b: None)


def rows_here(device: torch.device, e4m3: bool = False) -> bool:
    """Whether a device has `rows_added`, `rows_normed` and `rows_turned`: NVIDIA's from Ampere on, from Ada on of
    weights in E4M3.
    """
    return few_rows.here(device, e4m3)


def rows_added(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> Three:
    """(h, y, squares) of up to 16 rows: h (M, N) = residual + a (M, K) times b (K, N), which is rounded before it
    is added, as by itself; y = h · weight (N,), rounded; squares (M, parts) in fp32 have the sum of a row's h²
    among them. What a step of decoding has between a product and the RMS norm behind it, which `rows_normed`
    multiplies.

    In bf16 or fp16, b the transpose of rows that are dense: of a's dtype or, with `scale` (N,) in fp32 that its
    columns are multiplied with, in E4M3; a is not quantized. y is not normalized: in fp16 it is infinite where h ·
    weight is too large. Not differentiable. Raises TypeError for a wrong type or dtype, ValueError for a wrong
    shape, layout or device; the message names the argument. NotImplementedError where `rows_here` says no.
    """
    found: Three = _rows_added(a, b, residual, weight, scale)
    return found


def rows_normed(
    y: torch.Tensor,
    squares: torch.Tensor,
    b: torch.Tensor,
    eps: float = 1e-6,
    gated: bool = False,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(M, N): y / √(mean(h²) + eps), never rounded, times b (K, N); `gated` as in `matmul`.

    y (M, K) is h · weight; squares (M, parts) are any numbers whose sum is that of a row's h², as
    `rows_added` gives both. As `rows_added` otherwise.
    """
    found: torch.Tensor = _rows_normed(y, squares, b, eps, gated, scale)
    return found


def _check_rows_added(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    few_rows.check_rows("a", a, b, scale)
    check("residual", residual, shape=(len(a), b.shape[1]), like=a, dtypes=(a.dtype,))
    check("weight", weight, shape=b.shape[1:], like=a, dtypes=(a.dtype,))


def _check_rows_normed(
    y: torch.Tensor, squares: torch.Tensor, b: torch.Tensor, eps: float, gated: bool, scale: torch.Tensor | None
) -> None:
    few_rows.check_rows("y", y, b, scale)
    few_rows.check_squares(squares, y)
    if gated and b.shape[1] % 2:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected an even number of columns: gate and factor")


def _of_residual(residual: torch.Tensor, weight: torch.Tensor) -> Three:
    """`rows_added` of a product with nothing."""
    squares = residual.new_zeros(len(residual), few_rows.parts(*residual.shape), dtype=torch.float32)
    squares[:, :1] = residual.float().square().sum(1, keepdim=True)
    return residual.clone(), residual * weight, squares


def _prepare_rows_added(
    a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None
) -> Callable[..., Three]:
    device, (M, N) = a.device, residual.shape
    if a.numel() == 0 or N == 0:
        return lambda a, b, residual, weight, scale: _of_residual(residual, weight)
    of_h, of_squares = room((M, N), a.dtype, device), room((M, few_rows.parts(M, N)), torch.float32, device)
    launch = few_rows.planned(lined(a), b.t(), of_h(), added=True)

    def run(
        a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None
    ) -> Three:
        h, y, squares = of_h(), of_h(), of_squares()
        beside = None, residual.contiguous(), weight.contiguous(), y, squares, few_rows.dense(scale)
        launch(device, lined(a), b.t(), h, h, beside)
        return h, y, squares

    return run


def _prepare_rows_normed(
    y: torch.Tensor, squares: torch.Tensor, b: torch.Tensor, eps: float, gated: bool, scale: torch.Tensor | None
) -> Callable[..., torch.Tensor]:
    device, made = y.device, room((len(y), b.shape[1] // (2 if gated else 1)), y.dtype, y.device)
    if y.numel() == 0 or b.shape[1] == 0:
        return lambda y, *_: made().zero_()
    launch = few_rows.planned(lined(y), b.t(), made(), gated, normed=squares.shape[1], eps=float(eps))

    def run(
        y: torch.Tensor,
        squares: torch.Tensor,
        b: torch.Tensor,
        eps: float,
        gated: bool,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        out = made()
        beside = squares.contiguous(), None, None, None, None, few_rows.dense(scale)
        launch(device, lined(y), b.t(), out, out, beside)
        return out

    return run


_rows_added = operator(
    "matmul_rows_added(Tensor a, Tensor b, Tensor residual, Tensor weight, Tensor? scale)"
    " -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_rows_added, _check_rows_added),
    lambda a, b, residual, weight, scale: (
        a.new_empty(residual.shape),
        a.new_empty(residual.shape),
        a.new_empty(len(a), few_rows.parts(len(a), b.shape[1]), dtype=torch.float32),
    ),
    check=_check_rows_added,
)
_rows_normed = operator(
    "matmul_rows_normed(Tensor y, Tensor squares, Tensor b, float eps, bool gated, Tensor? scale) -> Tensor",
    prepared(_prepare_rows_normed, _check_rows_normed),
    lambda y, squares, b, eps, gated, scale: y.new_empty(len(y), b.shape[1] // (2 if gated else 1)),
    check=_check_rows_normed,
)
