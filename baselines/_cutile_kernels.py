"""Kernels in cuTile, whose compiler reads functions, their annotations and the names of their module.

They are written after its documentation, forward passes alone: tiles of fixed sizes, loads that its compiler gives
to the tensor memory accelerator where it can.
"""

# mypy: disable-error-code="no-untyped-def, valid-type"
# cuTile has types of its own: mypy does not see a kernel's.

from __future__ import annotations

from typing import Any

ct: Any = None
Size: Any = None
Flag: Any = None
ZERO: Any = None
"""Set by `compiled`."""

LOG2E = 1.4426950408889634


def compiled(function: Any) -> Any:
    """A kernel of one of the functions below."""
    global ct, Size, Flag, ZERO
    import cuda.tile as ct

    Size, Flag, ZERO = ct.Constant[int], ct.Constant[bool], ct.PaddingMode.ZERO
    return ct.kernel(function)


def product(a, b, out, rows: Size, columns: Size, step: Size):
    """a (M, K) @ b (K, N), summed in fp32: a tile of the result a block."""
    y, x = ct.bid(0), ct.bid(1)
    acc = ct.full((rows, columns), 0, dtype=ct.float32)
    for k in range(ct.num_tiles(a, axis=1, shape=(rows, step))):
        left = ct.load(a, index=(y, k), shape=(rows, step), padding_mode=ZERO)
        right = ct.load(b, index=(k, x), shape=(step, columns), padding_mode=ZERO)
        acc = ct.mma(left, right, acc)  # acc += A @ B
    ct.store(out, index=(y, x), tile=ct.astype(acc, out.dtype))


def rms_norm(x, weight, out, width: Size, columns: Size, eps: float):
    """Of each row of x (M, D), D being `width` and `columns` the next power of two: a row a block."""
    row = ct.bid(0)
    wide = ct.astype(ct.load(x, index=(row, 0), shape=(1, columns), padding_mode=ZERO), ct.float32)
    scale = ct.rsqrt(ct.sum(wide * wide, axis=1, keepdims=True) / width + eps)
    factors = ct.astype(ct.load(weight, index=(0,), shape=(columns,), padding_mode=ZERO), ct.float32)
    ct.store(out, index=(row, 0), tile=ct.astype(wide * scale * factors, out.dtype))


def layer_norm(x, weight, bias, out, width: Size, columns: Size, eps: float):
    """Of each row of x (M, D), D being `width` and `columns` the next power of two: a row a block."""
    row = ct.bid(0)
    wide = ct.astype(ct.load(x, index=(row, 0), shape=(1, columns), padding_mode=ZERO), ct.float32)
    centred = wide - ct.sum(wide, axis=1, keepdims=True) / width
    there = ct.arange(columns, dtype=ct.int32) < width
    centred = ct.where(there, centred, 0.0)
    scale = ct.rsqrt(ct.sum(centred * centred, axis=1, keepdims=True) / width + eps)
    factors = ct.astype(ct.load(weight, index=(0,), shape=(columns,), padding_mode=ZERO), ct.float32)
    shift = ct.astype(ct.load(bias, index=(0,), shape=(columns,), padding_mode=ZERO), ct.float32)
    ct.store(out, index=(row, 0), tile=ct.astype(centred * scale * factors + shift, out.dtype))


def softmax(x, out, columns: Size):
    """Of each row of x (M, D), `columns` being the next power of two of D: a row a block."""
    row = ct.bid(0)
    tile = ct.load(x, index=(row, 0), shape=(1, columns), padding_mode=ct.PaddingMode.NEG_INF)
    wide = ct.astype(tile, ct.float32)
    numerators = ct.exp(wide - ct.max(wide, axis=1, keepdims=True))
    y = numerators / ct.sum(numerators, axis=1, keepdims=True)
    ct.store(out, index=(row, 0), tile=ct.astype(y, out.dtype))


def swiglu(gate, up, out, columns: Size):
    """silu(gate) · up of matrices (M, N): a piece of a row a block."""
    row, piece = ct.bid(0), ct.bid(1)
    wide = ct.astype(ct.load(gate, index=(row, piece), shape=(1, columns), padding_mode=ZERO), ct.float32)
    other = ct.astype(ct.load(up, index=(row, piece), shape=(1, columns), padding_mode=ZERO), ct.float32)
    ct.store(out, index=(row, piece), tile=ct.astype(wide / (1 + ct.exp(-wide)) * other, out.dtype))


def attention(q, k, v, out, scale: float, shared: Size, width: Size, rows: Size, columns: Size, causal: Flag):
    """softmax(q·kᵀ · scale)·v of q (B·H, S, D), k and v (B·Hkv, Sk, D), D being `width`, with running maximum and
    sum: some queries of a head a block. `shared` query heads read a key head.
    """
    piece, head = ct.bid(0), ct.bid(1)
    keys = k.shape[1]
    own = ct.reshape(ct.load(q, index=(head, piece, 0), shape=(1, rows, width), padding_mode=ZERO), (rows, width))
    largest = ct.full((rows, 1), -float("inf"), dtype=ct.float32)
    total = ct.full((rows, 1), 0.0, dtype=ct.float32)
    acc = ct.full((rows, width), 0.0, dtype=ct.float32)
    row = piece * rows + ct.reshape(ct.arange(rows, dtype=ct.int32), (rows, 1))
    # A tile of queries sees no key behind its last one.
    end = ct.cdiv(ct.minimum((piece + 1) * rows, keys) if causal else keys, columns)
    for step in range(end):
        turned = ct.load(
            k, index=(head // shared, 0, step), shape=(1, width, columns), order=(0, 2, 1), padding_mode=ZERO
        )
        scores = ct.full((rows, columns), 0.0, dtype=ct.float32)
        scores = ct.mma(own, ct.reshape(turned, (width, columns)), scores) * (scale * LOG2E)
        column = step * columns + ct.reshape(ct.arange(columns, dtype=ct.int32), (1, columns))
        if causal:
            scores = ct.where((column < keys) & (column <= row), scores, -float("inf"))
        else:
            scores = ct.where(column < keys, scores, -float("inf"))
        higher = ct.maximum(largest, ct.max(scores, axis=1, keepdims=True))
        p = ct.exp2(scores - higher)
        shrunk = ct.exp2(largest - higher)
        total = total * shrunk + ct.sum(p, axis=1, keepdims=True)
        some = ct.load(v, index=(head // shared, step, 0), shape=(1, columns, width), padding_mode=ZERO)
        acc = ct.mma(ct.astype(p, v.dtype), ct.reshape(some, (columns, width)), acc * shrunk)
        largest = higher
    y = ct.reshape(ct.astype(acc / total, out.dtype), (1, rows, width))
    ct.store(out, index=(head, piece, 0), tile=y)
