"""Which kernels compute a call of attention, forward and backward, and their launches.

The portable kernels load through pointers or, where `describable` says so, by the tensor memory accelerator; on
compute capability 9.0 the modules `_attention_hopper_*.py` have kernels of their own for the shapes that
`_hopper.py` names. What runs follows from device, shapes, strides and, backward, from whether PyTorch is asked for
deterministic algorithms: nothing else.

`launch_*` decides at each call; `prepare_*` decides once for all calls whose inputs are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from .._common import capability
from .._launch import room
from ._portable_backward import planned_backward, planned_gradient_in_sinks
from ._portable_forward import planned_forward
from ._tile_functions import LOG2E
from ._tiling import bounded, describable, heads_in_l2, like, output_like, row_contiguous

if TYPE_CHECKING:
    from ._attention_hopper_forward_paired import Schedule

SHORT = (64, 255)
"""Sequences up to this, where values have up to 128 columns and more, take the portable forward kernel. 64 tokens
are one of its tiles and half of one of Hopper's, for which an H200 takes as long again to set up barriers and
tensor maps. Of more columns nothing was measured below 256.
"""

HOPPER = ("forward", "backward")
"""Passes that the kernels for Hopper do, where they can."""
TAKEN = frozenset({("forward", "sinks"), ("forward", "cap"), ("backward", "sinks"), ("backward", "cap")})
"""By pass what those kernels do of sinks and caps; the rest is the portable kernels'."""

LARGEST_CAP = 1000.0
"""Of caps above it scores over them are so small that fp16, in which those kernels take tanh, has few digits."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values, or these themselves."""
Path = Literal["pointers", "descriptors", "hopper"]
"""How tiles are loaded, and by which kernels: the portable ones through pointers or by the tensor memory
accelerator, or those for Hopper, of which the backward pass's are the two that add nothing up in memory."""


class Hopper(NamedTuple):
    """The modules for Hopper: what they share; the forward pass with a tile scheduler, and with paired tiles; the
    backward pass, the deterministic one, and that of wide heads.
    """

    common: ModuleType
    forward: ModuleType
    paired: ModuleType
    backward: ModuleType
    deterministic: ModuleType
    wide: ModuleType


@cache
def hopper_modules(device: torch.device) -> Hopper | None:
    """Where the device is one: compute capability 9.0, no other."""
    if capability(device) != (9, 0):
        return None
    from .. import _hopper as common
    from . import (
        _attention_hopper_backward,
        _attention_hopper_backward_deterministic,
        _attention_hopper_backward_wide,
        _attention_hopper_forward,
        _attention_hopper_forward_paired,
    )

    return Hopper(
        common,
        _attention_hopper_forward,
        _attention_hopper_forward_paired,
        _attention_hopper_backward,
        _attention_hopper_backward_deterministic,
        _attention_hopper_backward_wide,
    )


def _descriptors(path: Path | None, *tensors: torch.Tensor) -> bool:
    """Whether the portable kernels load by the tensor memory accelerator: as asked for, or where they can.

    Raises `NotImplementedError` where what is asked for cannot be.
    """
    if path == "pointers":
        return False
    if path == "hopper":
        raise NotImplementedError("the kernels for Hopper do not take these inputs on this device")
    tma = describable(*tensors)
    if path is not None and not tma:
        raise NotImplementedError("descriptors cannot describe these inputs on this device")
    return tma


def launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    path: Path | None = None,
    schedule: Schedule | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Any, Any]:
    """The output, in `out` if that is given, and its log-sum-exp in base 2, +inf where nothing is seen. A window
    of 0 is none.

    The best path that inputs and device allow, unless one is asked for; that one, or `NotImplementedError`. With a
    schedule, the kernel for Hopper is that of pairs of tiles.
    """
    B, H, S, _ = q.shape
    Sk = k.shape[2]
    window = bounded(window, S, Sk)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    hopper = hopper_modules(q.device) if path in (None, "hopper") and "forward" in HOPPER else None
    if _portable("forward", sinks, cap):
        hopper = None
    out = output_like(q, v) if out is None else out
    if out.numel() == 0:
        return out, lse
    if hopper is not None and path is None and max(S, Sk) <= SHORT[v.shape[-1] > 128]:
        hopper = None
    if hopper is not None and not hopper.common.mappable(out):  # it was given
        hopper = None
    if hopper is not None:
        logits = None if sinks is None else sinks.contiguous()
        if schedule is None and hopper.forward.takes(q, k, v):
            section = _section(q, k, causal, window)
            hopper.forward.forward(q, k, v, out, lse, causal, window, section, logits, cap)
            return out, lse
        if Sk == S and hopper.common.fits(q, k, v, hopper.common.FORWARD_WIDTHS):
            hopper.paired.forward(q, k, v, out, lse, causal, window, schedule, logits, cap)
            return out, lse
    q, k, v = row_contiguous(q), row_contiguous(k), row_contiguous(v)
    tma = _descriptors(path, q, k, v)
    planned_forward(q, k, v, out, causal, window, sinks, cap, tma)(q, k, v, out, lse, sinks)
    return out, lse


def _portable(part: Literal["forward", "backward"], sinks: torch.Tensor | None, cap: float) -> bool:
    """Whether the portable kernels alone compute this pass."""
    capped = cap > LARGEST_CAP or (cap > 0 and (part, "cap") not in TAKEN)
    return capped or (sinks is not None and (part, "sinks") not in TAKEN)


def _section(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int) -> int:
    """Query heads whose tiles are taken before others' are."""
    B, H, S, _ = q.shape
    if 0 < 4 * window <= S:
        # Under a short window neighbours of a head read the same keys, and others share nothing.
        return B * H
    groups = H // k.shape[1]
    # With a full mask all tiles are as long: those of one key head at a time, which read the same keys.
    return heads_in_l2(k, groups) if causal else groups


def prepare_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    out: torch.Tensor | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`launch_forward` of all inputs that are alike. Where the kernel with a tile scheduler runs or the portable
    one, all but memory and addresses is decided here. Given an `out`, it is for such, and is called with one.
    """
    B, H, S, D = q.shape
    device, short = q.device, max(S, k.shape[2]) <= SHORT[v.shape[-1] > 128]
    hopper = hopper_modules(device) if "forward" in HOPPER else None
    portable = hopper is None or short or _portable("forward", sinks, cap)
    if q.numel() == 0 or v.numel() == 0:
        return launch_forward
    if hopper is not None and v.shape[-1] != D and not hopper.forward.takes(q, k, v):
        portable = True
    window = bounded(window, S, k.shape[2])
    out = output_like(q, v) if out is None else out
    if portable:
        like_these = row_contiguous(q), row_contiguous(k), row_contiguous(v)
        output, of_lse = _made(out), room((B, H, S), torch.float32, device)
        kernel = planned_forward(*like_these, out, causal, window, sinks, cap, _descriptors(None, *like_these))

        def launched_portable(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            causal: bool,
            window: int,
            sinks: torch.Tensor | None = None,
            cap: float = 0.0,
            *,
            out: torch.Tensor | None = None,
        ) -> tuple[Any, Any]:
            lse, out = of_lse(), output() if out is None else out
            kernel(row_contiguous(q), row_contiguous(k), row_contiguous(v), out, lse, sinks)
            return out, lse

        return launched_portable
    assert hopper is not None
    if not hopper.forward.takes(q, k, v):
        return launch_forward
    of_sinks = None if sinks is None else sinks.dtype
    section = _section(q, k, causal, window)
    plan = hopper.forward.planned(q, k, v, out, causal, window, section, of_sinks, cap)
    run, output, of_lse = hopper.forward.run, _made(out), room((B, H, S), torch.float32, device)

    def launched(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[Any, Any]:
        lse, out = of_lse(), output() if out is None else out
        run(plan, q, k, v, out, lse, None if sinks is None else sinks.contiguous())
        return out, lse

    return launched


def _made(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes memory for a dense tensor like this."""
    return room(x.shape, x.dtype, x.device, x.stride())


def launch_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int = 0,
    grad_lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    path: Path | None = None,
    gradients: Gradients | None = None,
) -> tuple[Any, Any, Any, Any]:
    """dQ, dK, dV, in `gradients` if these are given, and the gradient in sinks, empty where there are none. `lse`
    and the gradient in it are of base 2. `path` as in `launch_forward`; the unordered kernel for Hopper is taken
    where none is asked for, nor PyTorch for deterministic algorithms, and heads have up to 128 columns, values as
    many as keys.
    """
    S, Sk = q.shape[2], k.shape[2]
    window = bounded(window, S, Sk)
    dq, dk, dv = gradients or (like(q), like(k), like(v))
    ds = like_sinks(q, sinks)
    if dq.numel() == 0 or dk.numel() == 0:
        ds.zero_()
        if sinks is not None and grad_lse is not None and Sk == 0:
            # A row that sees no key has its sink for its log-sum-exp.
            ds.copy_(LOG2E * grad_lse.sum((0, 2)))
        return dq.zero_(), dk.zero_(), dv.zero_(), ds
    q, k, v, grad = row_contiguous(q), row_contiguous(k), row_contiguous(v), row_contiguous(grad)
    hopper = hopper_modules(q.device) if path in (None, "hopper") and "backward" in HOPPER else None
    wide = hopper is not None and hopper.wide.takes(q, k, v)
    fixed = path == "hopper" or torch.are_deterministic_algorithms_enabled() or q.shape[-1] != v.shape[-1] or wide
    if hopper is not None and not (
        Sk == S if wide else hopper.forward.takes(q, k, v) and _sized(hopper, S, Sk, causal, window, cap, fixed)
    ):
        hopper = None
    if _portable("backward", sinks, cap):
        hopper = None
    if hopper is not None:
        grad, out = hopper.common.mapped(grad), hopper.common.mapped(out)
        if lse.data_ptr() % 16 or not lse.is_contiguous():
            lse = lse.clone(memory_format=torch.contiguous_format)
        level, delta = hopper.deterministic.statistics(out, grad, lse)
        if grad_lse is not None:
            # A row's log-sum-exp has the probabilities for its derivative: dS = P ∘ (dP + dlse - delta).
            delta[..., :S].sub_(grad_lse, alpha=LOG2E)
        if fixed or not hopper.backward.AVAILABLE:
            given = grad, q, k, v, level, delta, dq, dk, dv, causal, window
            if wide:
                hopper.wide.backward(*given, cap)
            else:
                hopper.deterministic.backward(*given)
        else:
            hopper.backward.backward(grad, q, k, v, level, delta, dq, dk, dv, causal, window, cap=cap)
        planned_gradient_in_sinks(sinks, lse, delta.shape[2])(sinks, lse, delta, ds)
        return dq, dk, dv, ds
    tma = _descriptors(path, q, k, v, grad)
    run = planned_backward(q, k, v, grad, out, (dq, dk, dv), causal, window, cap, tma)
    delta = run(q, k, v, grad, out, lse, grad_lse, dq, dk, dv)
    planned_gradient_in_sinks(sinks, lse, S)(sinks, lse, delta, ds)
    return dq, dk, dv, ds


def _sized(hopper: Hopper, S: int, Sk: int, causal: bool, window: int, cap: float, fixed: bool) -> bool:
    """Whether the backward pass for Hopper takes these lengths; the deterministic one as many keys as queries,
    whose scores have no cap.
    """
    if fixed or not hopper.backward.AVAILABLE:
        return Sk == S and not cap
    found: bool = hopper.backward.takes(S, Sk, causal, window)
    return found


def prepare_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int,
    grad_lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    cap: float,
    gradients: Gradients | None = None,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """`launch_backward` of all inputs that are alike: where nothing has to be copied first, all but memory and
    addresses is decided here. Given `gradients`, it is for such, and is called with them.
    """
    S, Sk = q.shape[2], k.shape[2]
    hopper = hopper_modules(q.device) if "backward" in HOPPER else None
    # Kernels that each call is decided for: with other values than keys, and of wide heads.
    apart = q.shape[-1] != v.shape[-1] or q.shape[-1] > 128
    plain = all(x is row_contiguous(x) for x in (q, k, v, grad)) and lse.is_contiguous()
    if not plain or q.numel() == 0 or v.numel() == 0 or Sk == 0:
        return launch_backward
    window = bounded(window, S, Sk)
    gradients = gradients or (like(q), like(k), like(v))
    of_q, of_k, of_v = map(_made, gradients)
    of_sinks = _made(like_sinks(q, sinks))
    if (
        hopper is None
        or _portable("backward", sinks, cap)
        or not (
            Sk == S
            if hopper.wide.takes(q, k, v)
            else hopper.forward.takes(q, k, v) and _sized(hopper, S, Sk, causal, window, cap, apart)
        )
    ):
        tma = _descriptors(None, q, k, v, grad)
        kernels = planned_backward(q, k, v, grad, out, gradients, causal, window, cap, tma)
        to_sinks = planned_gradient_in_sinks(sinks, lse, S)

        def portable(
            grad: torch.Tensor,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor,
            causal: bool,
            window: int,
            grad_lse: torch.Tensor | None,
            sinks: torch.Tensor | None,
            cap: float,
            *,
            gradients: Gradients | None = None,
        ) -> tuple[Any, Any, Any, Any]:
            dq, dk, dv = gradients or (of_q(), of_k(), of_v())
            ds = of_sinks()
            delta = kernels(q, k, v, grad, out, lse, grad_lse, dq, dk, dv)
            to_sinks(sinks, lse, delta, ds)
            return dq, dk, dv, ds

        return portable
    mappable = hopper.common.mappable
    if apart or not (mappable(grad) and mappable(out) and lse.data_ptr() % 16 == 0 and hopper.backward.AVAILABLE):
        return launch_backward
    of_rows = hopper.deterministic.planned_statistics(out, grad, zeroed=True)
    plan = hopper.backward.planned(grad, q, k, v, *gradients, causal, window, cap=cap)
    of_sums = room(plan.sums, torch.float32, q.device)
    statistics, run = hopper.deterministic.run_statistics, hopper.backward.run
    to_sinks = planned_gradient_in_sinks(sinks, lse, of_rows.shape[2])

    def launched(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        window: int,
        grad_lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        cap: float,
        *,
        gradients: Gradients | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        if torch.are_deterministic_algorithms_enabled():
            return launch_backward(
                grad, q, k, v, out, lse, causal, window, grad_lse, sinks, cap, gradients=gradients
            )
        dq, dk, dv = gradients or (of_q(), of_k(), of_v())
        ds = of_sinks()
        sums = of_sums()
        level, delta = statistics(of_rows, out, grad, lse, sums)
        if grad_lse is not None:
            delta[..., :S].sub_(grad_lse, alpha=LOG2E)
        run(plan, grad, q, k, v, level, delta, dq, dk, dv, sums)
        to_sinks(sinks, lse, delta, ds)
        return dq, dk, dv, ds

    return launched


def thirds(projected: torch.Tensor) -> Gradients:
    """(B, H, S, D) views of queries, keys and values, or of their gradients, in (B, S, 3, H, D)."""
    q, k, v = projected.transpose(1, 3).unbind(2)
    return q, k, v


def prepare_packed(projected: torch.Tensor, causal: bool) -> Callable[..., tuple[Any, Any]]:
    """The forward pass of all three in one tensor: the output (B, S, H, D), and its log-sum-exp."""
    B, S, _, H, D = projected.shape
    memory = room((B, S, H, D), projected.dtype, projected.device)
    # Not as the queries lie, whose batch or heads may come first in memory.
    run = prepare_forward(*thirds(projected), causal, 0, out=memory().transpose(1, 2))

    def launched(projected: torch.Tensor, causal: bool) -> tuple[Any, Any]:
        found = memory()
        return found, run(*thirds(projected), causal, 0, out=found.transpose(1, 2))[1]

    return launched


def prepare_packed_backward(
    grad: torch.Tensor, projected: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool
) -> Callable[..., Any]:
    """The gradient in one tensor that has all three: kernels write it where it lies."""

    def given(
        grad: torch.Tensor, projected: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool
    ) -> Any:
        rest = out.transpose(1, 2), lse, causal, 0, None, None, 0.0
        return grad.transpose(1, 2), *thirds(projected), *rest

    memory = room(projected.shape, projected.dtype, projected.device)
    run = prepare_backward(*given(grad, projected, out, lse, causal), gradients=thirds(memory()))

    def launched(*arguments: Any) -> Any:
        found = memory()
        run(*given(*arguments), gradients=thirds(found))
        return found

    return launched


def like_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Memory for the gradient in sinks; of none where there are none."""
    return q.new_empty(0) if sinks is None else torch.empty_like(sinks)
