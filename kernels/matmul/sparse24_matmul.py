"""Matrix products with weights of which two of each four neighbours are 0 (2:4), stored without them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, INTERPRETING, cdiv, check, on, operator
from .matmul import matmul

FEW = 64
"""Rows of x up to which weights are expanded on their way to the matrix units, which they then limit. Of more
rows the matrix units are the limit, and 2:4 saves nothing without their own sparse products, which Triton has
none of."""
SPLIT = 2048
"""Steps of K that one program computes of a product of few rows."""


def sparse24_matmul(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T of x (M, K) and a weight (N, K) of which each group of four columns has two numbers.

    values (N, K/2) has them in x's dtype, bf16 or fp16; positions, bytes (N, K/8), where they are in their
    groups: four bits a group, the first one's place in the lower two, the lower group in the lower four. `pack24`
    makes both. K is a multiple of 8. More than 64 rows are multiplied by `weight`, the same in dense form: given,
    or made here.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names the
    argument.
    """
    check("x", x, dim=2, dtypes=FLOATING[:2])
    K = x.shape[1]
    if K % 8:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected a multiple of 8 columns")
    check("values", values, dim=2, like=x, dtypes=(x.dtype,))
    N = values.shape[0]
    check("values", values, shape=(N, K // 2), dtypes=(x.dtype,))
    check("positions", positions, shape=(N, K // 8), like=x, dtypes=(torch.uint8,))
    if weight is not None:
        check("weight", weight, shape=(N, K), like=x, dtypes=(x.dtype,))
    result: torch.Tensor = _sparse24_matmul(x, values, positions, weight)
    return result


def pack24(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, positions) of a weight (N, K), K a multiple of 8: of each four columns the two largest magnitudes,
    of equal ones the first, which are all there is if the weight is 2:4 already.
    """
    check("weight", weight, dim=2, dtypes=FLOATING[:2])
    if weight.shape[1] % 8:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected a multiple of 8 columns")
    values, positions = _pack24(weight)
    return values, positions


@triton.jit
def _pack(  # type: ignore[no-untyped-def]  # Triton's types are its own
    weight, values, positions, count, BLOCK: tl.constexpr
):
    """BLOCK pairs of groups a program, each a byte of positions. Groups do not know rows."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < count
    byte = tl.zeros([BLOCK], tl.int32)
    for half in tl.static_range(2):
        at = weight + pair * 8 + half * 4
        a = tl.load(at, inside, 0.0)
        b = tl.load(at + 1, inside, 0.0)
        c = tl.load(at + 2, inside, 0.0)
        d = tl.load(at + 3, inside, 0.0)
        w, x, y, z = (
            tl.abs(a.to(tl.float32)),
            tl.abs(b.to(tl.float32)),
            tl.abs(c.to(tl.float32)),
            tl.abs(d.to(tl.float32)),
        )
        # A number is kept if at most one other comes before it: a larger one, or an equal one in front of it.
        keep_a = ((x > w).to(tl.int32) + (y > w).to(tl.int32) + (z > w).to(tl.int32)) < 2
        keep_b = ((w >= x).to(tl.int32) + (y > x).to(tl.int32) + (z > x).to(tl.int32)) < 2
        keep_c = ((w >= y).to(tl.int32) + (x >= y).to(tl.int32) + (z > y).to(tl.int32)) < 2
        first = tl.where(keep_a, 0, tl.where(keep_b, 1, 2))
        second = tl.where(keep_a, tl.where(keep_b, 1, tl.where(keep_c, 2, 3)), tl.where(keep_b & keep_c, 2, 3))
        to = values + pair * 4 + half * 2
        tl.store(to, tl.where(first == 0, a, tl.where(first == 1, b, c)), inside)
        tl.store(to + 1, tl.where(second == 1, b, tl.where(second == 2, c, d)), inside)
        byte += (first + 4 * second) << (4 * half)
    tl.store(positions + pair, byte.to(tl.uint8), inside)


@triton.jit
def _expand(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values, positions, weight, count, BLOCK: tl.constexpr
):
    """BLOCK groups a program: a kept number at its place, 0 elsewhere."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < count
    byte = tl.load(positions + group // 2, inside, 0).to(tl.int32)
    code = byte >> (group % 2 * 4).to(tl.int32)
    first = tl.load(values + 2 * group, inside, 0.0)
    second = tl.load(values + 2 * group + 1, inside, 0.0)
    for place in tl.static_range(4):
        number = tl.where((code & 3) == place, first, tl.where((code >> 2 & 3) == place, second, 0.0))
        tl.store(weight + 4 * group + place, number.to(weight.dtype.element_ty), inside)


@triton.jit
def _few_rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, values, positions, partial, M, N, K, lead,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Partial sums (splits, M, N) in fp32: of a tile over SPLIT steps of K, STEP groups of four at a time. Each
    place of a group is a product of its own.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    some = (columns % N).to(tl.int64)
    start = tl.program_id(1) * SPLIT
    step = tl.arange(0, STEP)
    across = K // 4
    inside = (rows < M)[:, None]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for k in range(start // 4, tl.minimum(start + SPLIT, K) // 4, STEP):
        group = k + step
        there = (group < across)[None, :]
        at = some[:, None] * across + group[None, :]
        byte = tl.load(positions + at // 2, there, 0).to(tl.int32)
        code = byte >> (group % 2 * 4)[None, :]
        # Two numbers of 16 bits a word, the first in its lower half.
        pair = tl.load(values + at, there, 0)
        for place in tl.static_range(4):
            half = tl.where((code & 3) == place, pair, tl.where((code >> 2 & 3) == place, pair >> 16, 0))
            w = half.to(tl.int16).to(x.dtype.element_ty, bitcast=True)
            y = tl.load(x + rows[:, None] * lead + 4 * group[None, :] + place, inside & there, 0.0)
            if INTERPRETING:  # which multiplies the bits of 16-bit numbers
                w = w.to(tl.float32)
                y = y.to(tl.float32)
            acc = tl.dot(w, tl.trans(y), acc)  # acc += W[:, place::4] @ X[:, place::4].T
    at = partial + (tl.program_id(1) * M + rows.to(tl.int64))[None, :] * N + columns[:, None]
    tl.store(at, acc, (rows < M)[None, :] & (columns < N)[:, None])


@triton.jit
def _sum(partial, out, count, splits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The sums of the partial sums, in order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(0, splits):
        acc += tl.load(partial + tl.cast(i, tl.int64) * count + place, inside, 0.0)
    tl.store(out + place, acc.to(out.dtype.element_ty), inside)


def _empty(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


def _launch(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    out = _empty(x, values, positions, weight)
    (M, K), N = x.shape, values.shape[0]
    if out.numel() == 0 or K == 0:
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    values, positions = values.contiguous(), positions.contiguous()
    if M > FEW:
        if weight is None:
            weight = x.new_empty(N, K)
            block = 256 if INTERPRETED else 1024
            with on(x):
                _expand[(cdiv(weight.numel() // 4, block),)](values, positions, weight, weight.numel() // 4, block)
        return matmul(x, weight.t())
    columns, step, split = (32, 16, 64) if INTERPRETED else (64, 32, SPLIT)
    splits = cdiv(K, split)
    partial = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
    block = 256 if INTERPRETED else 1024
    with on(x):
        _few_rows[(cdiv(N, columns), splits)](
            x, values.view(torch.int32), positions, partial, M, N, K, x.stride(0),
            16 if M <= 16 else 32 if M <= 32 else 64, columns, step, split, num_warps=4, num_stages=4,
        )  # fmt: skip
        _sum[(cdiv(M * N, block),)](partial, out, M * N, splits, block)
    return out


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    N, K = weight.shape
    return weight.new_empty(N, K // 2), weight.new_empty(N, K // 8, dtype=torch.uint8)


def _launch_pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, positions = _packed(weight)
    if positions.numel():
        block = 64 if INTERPRETED else 512
        with on(weight):
            _pack[(cdiv(positions.numel(), block),)](
                weight.contiguous(), values, positions, positions.numel(), block
            )
    return values, positions


_sparse24_matmul = operator(
    "sparse24_matmul(Tensor x, Tensor values, Tensor positions, Tensor? weight) -> Tensor", _launch, _empty
)
_pack24 = operator("pack24(Tensor weight) -> (Tensor, Tensor)", _launch_pack, _packed)
