"""Kernels behind cross-entropy: losses of rows of logits, and their gradient, alone or in the same pass.

Forward keeps running maxima and sums of exponentials (online softmax, Milakov and Gimelshein, arXiv
1805.02867). Every thread has its own for each of its 16-byte vectors, so that nothing waits for other
threads before the end of the row and there is one exponential more a vector, not an element.

With p = softmax(x), L = logsumexp(x), target t, smoothing ε over V tokens (Szegedy et al., arXiv 1512.00567) and
weight z of L² (the z-loss of PaLM, arXiv 2204.02311), a row's loss is L - (1-ε) x_t - ε mean(x) + z L², and its
gradient p (1 + 2 z L) - (1-ε) [j = t] - ε / V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .._common import INTERPRETED, capability, cdiv, multiprocessors, operator, power_of_2
from .._launch import Launch, prepared, room
from .._online_softmax import LOWEST, lowered, over_lanes, with_terms
from .._rows import (
    PLAIN,
    Access,
    access,
    boundary,
    get,
    get_part,
    parts_of,
    put,
    put_part,
    same_rows,
    shift_of,
    within,
)

LANES = 4 if INTERPRETED else 512
"""Running maxima of a program of eight warps: two a thread. The interpreter has few, to turn the loops."""

PIECE = 32 if INTERPRETED else 4096
"""Elements of a program of the backward pass, four warps."""

SHORT = 16 if INTERPRETED else 4096
"""Longest row of which a program has several, or one in registers."""

VECTORS_FROM = 8 if INTERPRETED else 64
"""Shortest such row that is worth accesses of 16 bytes where rows do not start at their boundaries."""

SPLIT = (8, 32) if INTERPRETED else (2048, 8192)
"""Smallest and largest piece of a row, in elements, where rows are fewer than multiprocessors."""

LONG = 1 << 17
"""Row in bytes above which a program that makes loss and gradient in one pass has 32 warps, not 16."""


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]  # Triton's types are its own
    logits,
    shift,
    V,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    KEEP: tl.constexpr,
):
    """(maximum, log of the sum of exponentials above it, mean) of a row; the mean only where smoothing needs it.

    KEEP asks the cache to hold the row, which is read again.
    """
    at = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    end = shift + V
    # Finite, so that the difference of two is never NaN.
    highest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    plain = tl.zeros([LANES], tl.float32)
    for start in range(0, end, LANES * EACH):
        col = start + at
        hint: tl.constexpr = "evict_last" if KEEP else ""
        x = get(logits, col, shift, end, True, float("-inf"), hint, VECTOR, SHIFTED).to(tl.float32)
        if SMOOTH:
            plain += tl.sum(tl.where(within(col, shift, end, SHIFTED), x, 0.0), 1)
        highest, total = with_terms(x, highest, total)
    top, total = over_lanes(highest, total)
    return top, tl.log(total), tl.sum(plain, 0) / V


@triton.jit
def _loss(  # type: ignore[no-untyped-def]  # Triton's types are its own
    hit, top, rest, mean, smoothing, z, SMOOTH: tl.constexpr, SQUARE: tl.constexpr
):
    """A row's loss; in this order large logits cancel exactly."""
    loss = (top - hit) + rest
    if SMOOTH:
        loss += smoothing * (((top - mean) + rest) - loss)
    if SQUARE:
        loss += z * (top + rest) * (top + rest)
    return loss


@triton.jit
def _slope(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, top, rest, hit, V, smoothing, z, SMOOTH: tl.constexpr, SQUARE: tl.constexpr
):
    """Derivative of a row's loss by its logits x; `hit` is true at the target."""
    # In this order an offset that all logits have cancels exactly, as in the loss.
    value = tl.exp2((x - top) * 1.4426950408889634 - rest * 1.4426950408889634)
    if SQUARE:
        value *= 1.0 + 2.0 * z * (top + rest)
    if SMOOTH:
        value -= smoothing / V
        return tl.where(hit, value - (1.0 - smoothing), value)
    return tl.where(hit, value - 1.0, value)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    logits,
    target,
    losses,
    lses,
    V,
    stride,
    ignore_index,
    smoothing,
    z,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """Loss of one row, and (maximum, log of the sum of exponentials above it), to lses (M, 2)."""
    row = tl.program_id(0).to(tl.int64)
    shift = shift_of(logits, row * stride, SHIFTED)
    start = boundary(logits, row * stride, shift, VECTOR)
    top, rest, mean = _statistics(start, shift, V, LANES, EACH, VECTOR, SHIFTED, SMOOTH, False)
    t = tl.load(target + row)
    hit = tl.load(logits + row * stride + t, (t >= 0) & (t < V), float("nan")).to(tl.float32)
    loss = _loss(hit, top, rest, mean, smoothing, z, SMOOTH, SQUARE)
    tl.store(losses + row, tl.where(t == ignore_index, 0.0, loss))
    tl.store(lses + 2 * row, top)
    tl.store(lses + 2 * row + 1, rest)


@triton.jit
def _short_rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    logits,
    target,
    losses,
    lses,
    M,
    V,
    stride,
    ignore_index,
    smoothing,
    z,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """As `_rows`, for ROWS whole rows a program, held in PARTS parts of PART columns."""
    LOG2E: tl.constexpr = 1.4426950408889634
    first, row, down = same_rows(tl.program_id(0), ROWS, VECTOR, SHIFTED)
    inside = row < M
    shift = shift_of(logits, first * stride, SHIFTED)
    source = boundary(logits, first * stride, shift, VECTOR)
    source += tl.multiple_of(down * stride, [VECTOR, VECTOR])
    end = shift + V
    # Before the sums, which hide the wait.
    t = tl.load(target + row, inside, 0)
    hit = tl.load(logits + row * stride + t, inside & (t >= 0) & (t < V), float("nan")).to(tl.float32)
    held = ()
    highest = tl.full([ROWS, PART], LOWEST, tl.float32)
    plain = tl.zeros([ROWS, PART], tl.float32)
    for i in tl.static_range(PARTS):
        x = get_part(source, shift, end, inside, float("-inf"), i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32)
        held += (x,)
        highest = tl.maximum(highest, x)
        if SMOOTH:
            own = within(i * PART + tl.arange(0, PART)[None, :], shift, end, SHIFTED)
            plain += tl.where(own & inside, x, 0.0)
    top = tl.max(highest, 1)[:, None]
    total = tl.zeros([ROWS, PART], tl.float32)
    for i in tl.static_range(PARTS):
        # Σ exp(x - max); of a row that is not there 1, for its logarithm.
        total += tl.exp2((held[i] - top) * LOG2E)
    rest = tl.log(tl.where(inside, tl.sum(total, 1)[:, None], 1.0))
    mean = tl.sum(plain, 1)[:, None] / V
    loss = _loss(hit, top, rest, mean, smoothing, z, SMOOTH, SQUARE)
    tl.store(losses + row, tl.where(t == ignore_index, 0.0, loss), inside)
    tl.store(lses + 2 * row, top, inside)
    tl.store(lses + 2 * row + 1, rest, inside)


@triton.jit
def _pieces_of_rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    logits,
    sums,
    V,
    pieces,
    stride,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """(maximum, sum of exponentials above it, sum) of one piece of a row, to sums (3, rows · pieces)."""
    LOG2E: tl.constexpr = 1.4426950408889634
    at = tl.program_id(0)
    row = (at // pieces).to(tl.int64)
    col = at % pieces * BLOCK + tl.arange(0, BLOCK)
    shift = shift_of(logits, row * stride, SHIFTED)
    source = boundary(logits, row * stride, shift, VECTOR)
    end = shift + V
    x = get(source, col, shift, end, True, float("-inf"), "", VECTOR, SHIFTED).to(tl.float32)
    # Finite, so that the difference of two is never NaN.
    top = tl.maximum(tl.max(x, 0), LOWEST)
    count = tl.num_programs(0)
    tl.store(sums + at, top)
    tl.store(sums + count + at, tl.sum(tl.exp2((x - top) * LOG2E), 0))
    if SMOOTH:
        tl.store(sums + 2 * count + at, tl.sum(tl.where(within(col, shift, end, SHIFTED), x, 0.0), 0))


@triton.jit
def _joined_rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    logits,
    target,
    sums,
    losses,
    lses,
    V,
    pieces,
    stride,
    ignore_index,
    smoothing,
    z,
    ALL: tl.constexpr,
    SMOOTH: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """As `_rows`, from what `_pieces_of_rows` has of it."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(target + row)
    hit = tl.load(logits + row * stride + t, (t >= 0) & (t < V), float("nan")).to(tl.float32)
    part = tl.arange(0, ALL)
    at = sums + row * pieces + part
    count = tl.num_programs(0) * pieces
    tops = tl.load(at, part < pieces, LOWEST)
    # Σ = Σᵢ Σᵢ' exp(mᵢ - m) over pieces with maximum mᵢ and sum Σᵢ'
    top = tl.max(tops, 0)
    total = tl.load(at + count, part < pieces, 0.0) * lowered(tops, top)
    rest = tl.log(tl.sum(total, 0))
    mean = 0.0
    if SMOOTH:
        mean = tl.sum(tl.load(at + 2 * count, part < pieces, 0.0), 0) / V
    loss = _loss(hit, top, rest, mean, smoothing, z, SMOOTH, SQUARE)
    tl.store(losses + row, tl.where(t == ignore_index, 0.0, loss))
    tl.store(lses + 2 * row, top)
    tl.store(lses + 2 * row + 1, rest)


@triton.jit
def _rows_and_gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    logits,
    target,
    share,
    losses,
    dlogits,
    V,
    strides,
    ignore_index,
    smoothing,
    z,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SQUARE: tl.constexpr,
    HINT: tl.constexpr,
):
    """Loss of one row, and its gradient times share. dlogits may be logits: threads write what they have read."""
    row = tl.program_id(0).to(tl.int64)
    shift = shift_of(logits, row * strides[0], SHIFTED)
    source = boundary(logits, row * strides[0], shift, VECTOR)
    result = boundary(dlogits, row * strides[1], shift, VECTOR)
    t = tl.load(target + row)
    # Before anything is written over it.
    hit = tl.load(logits + row * strides[0] + t, (t >= 0) & (t < V), float("nan")).to(tl.float32)
    top, rest, mean = _statistics(source, shift, V, LANES, EACH, VECTOR, SHIFTED, SMOOTH, True)
    loss = _loss(hit, top, rest, mean, smoothing, z, SMOOTH, SQUARE)
    tl.store(losses + row, tl.where(t == ignore_index, 0.0, loss))
    factor = tl.where(t == ignore_index, 0.0, tl.load(share))
    at = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    end = shift + V
    for start in range(0, end, LANES * EACH):
        col = start + at
        x = get(source, col, shift, end, True, float("-inf"), "evict_first", VECTOR, SHIFTED).to(tl.float32)
        value = _slope(x, top, rest, col == t + shift, V, smoothing, z, SMOOTH, SQUARE) * factor
        put(result, col, value, shift, end, True, HINT, VECTOR, SHIFTED)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dloss,
    share,
    logits,
    target,
    lses,
    dlogits,
    V,
    pieces,
    stride,
    ignore_index,
    smoothing,
    z,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """Gradient of a piece of one row times dloss / rows that count."""
    row = tl.program_id(0) // pieces
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    row = row.to(tl.int64)
    t = tl.load(target + row)
    factor = tl.where(t == ignore_index, 0.0, tl.load(dloss).to(tl.float32) * tl.load(share))
    shift = shift_of(logits, row * stride, SHIFTED)
    logits = boundary(logits, row * stride, shift, VECTOR)
    dlogits = boundary(dlogits, row * V, shift, VECTOR)
    end = shift + V
    x = get(logits, col, shift, end, True, float("-inf"), "", VECTOR, SHIFTED).to(tl.float32)
    top, rest = tl.load(lses + 2 * row), tl.load(lses + 2 * row + 1)
    value = _slope(x, top, rest, col == t + shift, V, smoothing, z, SMOOTH, SQUARE) * factor
    put(dlogits, col, value, shift, end, True, "", VECTOR, SHIFTED)


@triton.jit
def _short_gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dloss,
    share,
    logits,
    target,
    lses,
    dlogits,
    M,
    V,
    stride,
    ignore_index,
    smoothing,
    z,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """As `_gradients`, for ROWS whole rows a program, in PARTS parts of PART columns."""
    first, row, down = same_rows(tl.program_id(0), ROWS, VECTOR, SHIFTED)
    inside = row < M
    shift = shift_of(logits, first * stride, SHIFTED)
    source = boundary(logits, first * stride, shift, VECTOR)
    source += tl.multiple_of(down * stride, [VECTOR, VECTOR])
    result = boundary(dlogits, first * V, shift, VECTOR)
    result += tl.multiple_of(down * V, [VECTOR, VECTOR])
    end = shift + V
    t = tl.load(target + row, inside, ignore_index)
    top, rest = tl.load(lses + 2 * row, inside, 0.0), tl.load(lses + 2 * row + 1, inside, 0.0)
    factor = tl.where(t == ignore_index, 0.0, tl.load(dloss).to(tl.float32) * tl.load(share))
    for i in tl.static_range(PARTS):
        x = get_part(source, shift, end, inside, float("-inf"), i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32)
        col = i * PART + tl.arange(0, PART)[None, :]
        value = _slope(x, top, rest, col == t + shift, V, smoothing, z, SMOOTH, SQUARE) * factor
        put_part(result, value, shift, end, inside, i, PART, PARTS, VECTOR, SHIFTED)


@triton.jit
def _mean(losses, target, loss, share, M, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean loss of the rows that count, and 1 / their number; one program, so that the order is fixed."""
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, M, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses + row, row < M, 0.0)
        counts = tl.load(target + row, row < M, ignore_index) != ignore_index
        count += counts.to(tl.float32)
    part = 1.0 / tl.sum(count, 0)
    tl.store(share, part)
    tl.store(loss, (tl.sum(total, 0) * part).to(loss.dtype.element_ty))


@triton.jit
def _share(target, share, M, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """1 / the number of rows that count; one program."""
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, M, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = tl.load(target + row, row < M, ignore_index) != ignore_index
        count += counts.to(tl.float32)
    tl.store(share, 1.0 / tl.sum(count, 0))


@triton.jit
def _scale(gradient, dloss, out, size, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """gradient · dloss; nothing to do in place where dloss is 1, as it is of a loss that ends the graph."""
    factor = tl.load(dloss).to(tl.float32)
    if not IN_PLACE or factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(gradient + at, at < size, 0.0).to(tl.float32) * factor
        tl.store(out + at, value.to(out.dtype.element_ty), at < size)


def lanes(logits: torch.Tensor, warps: int, each: int = 2) -> dict[str, int]:
    """Lanes, vector and warps of a program for a row of logits; `each` lanes a thread."""
    vector = 16 // logits.element_size()
    most = LANES * warps // 8 * each // 2
    return {
        "LANES": min(most, max(power_of_2(logits.shape[1]) // vector, 1)),
        "EACH": vector,
        "num_warps": warps,
    }


def flags(smoothing: float, z_loss: float) -> dict[str, bool]:
    """What the kernels leave out where it is zero."""
    return {"SMOOTH": smoothing != 0, "SQUARE": z_loss != 0}


def warps_for_both(logits: torch.Tensor) -> int:
    """Warps of a program that makes loss and gradient in one pass.

    The rows at work at a time should stay in the L2 cache until they are read again: with 16 warps there are four
    a multiprocessor at most.
    """
    return 16 if logits.shape[1] * logits.element_size() <= LONG else 32


class Options(NamedTuple):
    """What the loss is, beside its numbers."""

    ignore_index: int
    smoothing: float
    z_loss: float

    def numbers(self) -> tuple[int, float, float]:
        """As kernels take them."""
        return self.ignore_index, float(self.smoothing), float(self.z_loss)


def losses_of_rows(logits: torch.Tensor, options: Options, warps: int | None = None) -> Callable[..., None]:
    """A launch that fills losses (M,), and maximum and log of the sum of exponentials above it (M, 2), from logits
    (M, V) like these, whose rows are dense, and target: of (device, logits, target, losses, lse). With `warps`,
    one row a program.
    """
    M, V = logits.shape
    stride = logits.stride(0)
    reach = access((logits,), (stride,), V)
    shared = flags(options.smoothing, options.z_loss)
    if warps is None and V <= SHORT:
        tile, grid = _tile(logits, reach)
        return Launch(_short_rows, grid, M, V, stride, *options.numbers(), **tile, **shared)
    if warps is None and multiprocessors(logits) > M and SPLIT[1] < V:
        return _split(logits, options, reach)
    return Launch(
        _rows,
        (M,),
        V,
        stride,
        *options.numbers(),
        **lanes(logits, warps or 8),
        **reach.constants(),
        **shared,
    )


def _tile(logits: torch.Tensor, reach: Access) -> tuple[dict[str, Any], tuple[int]]:
    """Constants and grid of a kernel that has whole rows of logits, at most SHORT each."""
    M, V = logits.shape
    reach = reach if V >= VECTORS_FROM else PLAIN
    rows, warps, parts, part = parts_of(
        V + reach.margin, 16 // logits.element_size(), cdiv(M, multiprocessors(logits)), reach.period, 4, 2048
    )
    tile = {"ROWS": rows, "PART": part, "PARTS": parts, **reach.constants(), "num_warps": warps}
    return tile, (cdiv(M, rows * reach.period) * reach.period,)


def _split(logits: torch.Tensor, options: Options, reach: Access) -> Callable[..., None]:
    """The losses of rows that are long and fewer than multiprocessors: pieces of them, then rows."""
    M, V = logits.shape
    # Four programs a multiprocessor, but no piece so small that starting it takes longer than its work.
    piece = min(max(power_of_2(M * V // (4 * multiprocessors(logits))), SPLIT[0]), SPLIT[1])
    pieces = cdiv(V + reach.margin, piece)
    shared = flags(options.smoothing, options.z_loss)
    stride = logits.stride(0)
    first = Launch(
        _pieces_of_rows,
        (M * pieces,),
        V,
        pieces,
        stride,
        BLOCK=piece,
        **reach.constants(),
        SMOOTH=shared["SMOOTH"],
        num_warps=min(max(piece // 1024, 4), 16),
    )
    second = Launch(
        _joined_rows, (M,), V, pieces, stride, *options.numbers(), ALL=power_of_2(pieces), **shared, num_warps=4
    )

    of_sums = room((3, M, pieces), torch.float32, logits.device)

    def launch(
        device: torch.device, logits: torch.Tensor, target: torch.Tensor, losses: torch.Tensor, lse: torch.Tensor
    ) -> None:
        sums = of_sums()
        first(device, logits, sums)
        second(device, logits, target, sums, losses, lse)

    return launch


def losses_and_gradients(
    logits: torch.Tensor,
    dlogits: torch.Tensor,
    options: Options,
    warps: int | None = None,
    each: int = 2,
    hint: str = "",
) -> Callable[..., None]:
    """A launch that fills losses (M,) of logits (M, V) and their gradients times share, which may go over the
    logits: of (device, logits, target, share, losses, dlogits). With `warps`, by the portable kernel.
    """
    M, V = logits.shape
    strides = (logits.stride(0), dlogits.stride(0))
    portable = Launch(
        _rows_and_gradients,
        (M,),
        V,
        strides,
        *options.numbers(),
        HINT=hint,
        **lanes(logits, warps or warps_for_both(logits), each),
        **access((logits, dlogits), strides, V).constants(),
        **flags(options.smoothing, options.z_loss),
    )
    if warps is not None or not _for_hopper(logits, dlogits):
        return portable
    from . import _cross_entropy_hopper as hopper  # where Gluon may be missing, it is not needed

    return _where_lined(hopper.losses_and_gradients(logits, dlogits, options), portable)


def losses_alone(
    logits: torch.Tensor, options: Options
) -> Callable[[torch.device, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """A launch that fills losses (M,), bit by bit those of `losses_and_gradients` with gradients over the logits:
    of (device, logits, target, losses).
    """
    # As many lanes as there.
    of_rows = losses_of_rows(logits, options, warps_for_both(logits))
    of_lse = room((logits.shape[0], 2), torch.float32, logits.device)

    def portable(device: torch.device, logits: torch.Tensor, target: torch.Tensor, losses: torch.Tensor) -> None:
        of_rows(device, logits, target, losses, of_lse())

    if not _for_hopper(logits, logits):
        return portable
    from . import _cross_entropy_hopper as hopper

    return _where_lined(hopper.losses_alone(logits, options), portable)


def _where_lined(resident: Callable[..., None], portable: Callable[..., None]) -> Callable[..., None]:
    """The one for Hopper where logits lie as it wants them. Calls that are alike have addresses that are so within
    16 bytes alone.
    """
    from . import _cross_entropy_hopper as hopper

    def launch(device: torch.device, logits: torch.Tensor, *others: torch.Tensor) -> None:
        (resident if hopper.lined(logits) else portable)(device, logits, *others)

    return launch


def _for_hopper(logits: torch.Tensor, dlogits: torch.Tensor) -> bool:
    """Whether a kernel keeps rows in shared memory between its two passes: long ones, that give every
    multiprocessor one, on compute capability 9.0.
    """
    if capability(logits.device) != (9, 0) or logits.shape[0] < multiprocessors(logits):
        return False
    from . import _cross_entropy_hopper as hopper

    return hopper.fits(logits, dlogits)


def gradients_of_rows(logits: torch.Tensor, dlogits: torch.Tensor, options: Options) -> Launch:
    """A launch that fills dlogits (M, V), dense, from logits whose rows are dense: of (dloss, share, logits,
    target, lse, dlogits).
    """
    M, V = logits.shape
    reach = access((logits, dlogits), (logits.stride(0), V), V)
    shared = flags(options.smoothing, options.z_loss)
    if V <= SHORT:
        tile, grid = _tile(logits, reach)
        return Launch(_short_gradients, grid, M, V, logits.stride(0), *options.numbers(), **tile, **shared)
    pieces = cdiv(V + reach.margin, PIECE)
    return Launch(
        _gradients,
        (M * pieces,),
        V,
        pieces,
        logits.stride(0),
        *options.numbers(),
        BLOCK=PIECE,
        **reach.constants(),
        **shared,
        num_warps=4,
    )


def mean_of_rows(M: int, ignore_index: int) -> Launch:
    """A launch that fills loss () and share () from those of M rows: of (losses, target, loss, share)."""
    return Launch(_mean, (1,), M, ignore_index, BLOCK=min(power_of_2(M), 8192), num_warps=16)


def share_of_rows(M: int, ignore_index: int) -> Launch:
    """A launch that fills share () = 1 / rows that count: of (target, share)."""
    return Launch(_share, (1,), M, ignore_index, BLOCK=min(power_of_2(M), 8192), num_warps=16)


def _launch_scale(gradient: torch.Tensor, dloss: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _scale_into(gradient, dloss, torch.empty(gradient.shape, dtype=dtype, device=gradient.device))


def _scale_into(gradient: torch.Tensor, dloss: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    _scaling(gradient, dloss, out, out is gradient)
    return out


def _prepare_scaling(
    gradient: torch.Tensor, dloss: torch.Tensor, out: torch.Tensor, in_place: bool
) -> Callable[..., None]:
    size, device = gradient.numel(), gradient.device
    launch = Launch(_scale, (cdiv(size, PIECE),), size, BLOCK=PIECE, IN_PLACE=in_place, num_warps=4)
    if size == 0:
        return lambda *_: None
    return lambda gradient, dloss, out, _: launch(device, gradient, dloss, out)


_scaling = prepared(_prepare_scaling)


_scaled = operator(
    "cross_entropy_scale(Tensor gradient, Tensor dloss, ScalarType dtype) -> Tensor",
    _launch_scale,
    lambda gradient, dloss, dtype: torch.empty(gradient.shape, dtype=dtype, device=gradient.device),
)


def scaled(gradient: torch.Tensor, dloss: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """gradient · dloss in `dtype`, inside a backward pass, for a dense gradient that forward has made and saved.

    In the same memory where it has that dtype and the graph is not kept, so that nobody can ask for the saved one
    again.
    """
    out: torch.Tensor
    plain = (
        type(gradient) is torch.Tensor
        and not dloss.is_neg()  # whose memory has the other sign, which the operator below sees to
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
    )
    # No public function tells whether the graph is kept; AOTAutograd asks the same one.
    if plain and gradient.dtype == dtype and not torch._C._autograd._get_current_graph_task_keep_graph():
        # Detached: a saved output knows the graph that it came from.
        gradient = gradient.detach()
        return _scale_into(gradient, dloss, gradient)
    out = _scaled(gradient, dloss, dtype)
    return out
