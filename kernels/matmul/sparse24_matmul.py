"""Matrix products with weights of which two of each four neighbours are 0 (2:4), stored without them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, capability, cdiv, check, on, operator
from .matmul import matmul

FEW = 64
"""Rows of x up to which a weight is multiplied on Hopper as it is stored, made dense in registers."""
SIZE = 256 if INTERPRETED else 1024
"""Groups or numbers of a program."""


def sparse24_matmul(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T of x (M, K) and a weight (N, K) of which each group of four columns has two numbers.

    values (N, K/2) has them in x's dtype, bf16 or fp16; positions, bytes (N, K/8), where they are in their
    groups: four bits a group, the first one's place in the lower two, the lower group in the lower four. `pack24`
    makes both. K is a multiple of 8. `weight` is the same in dense form: given or made here, it is what x is
    multiplied by, since Triton has no sparse products. On Hopper up to 64 rows, where K is a multiple of 128, are
    multiplied by values and positions instead, made dense in registers. Differentiable in x, in values, and in
    weight where it is not 0, as sparse training needs: its other gradients are 0.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names the
    argument.
    """
    check("x", x, dim=2, dtypes=FLOATING[:2])
    check_weight(x, values, positions, weight)
    result: torch.Tensor = _sparse24_matmul(x, values, positions, weight)
    return result


def check_weight(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> None:
    """Raises TypeError or ValueError, naming the argument, where the weight is not one that x (M, K) is multiplied
    by: values (N, K/2) in x's dtype, positions (N, K/8) in uint8 and the dense form (N, K), if there is one.
    """
    K = x.shape[1]
    if K % 8:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected a multiple of 8 columns")
    check("values", values, dim=2, like=x, dtypes=(x.dtype,))
    N = values.shape[0]
    check("values", values, shape=(N, K // 2), dtypes=(x.dtype,))
    check("positions", positions, shape=(N, K // 8), like=x, dtypes=(torch.uint8,))
    if weight is not None:
        check("weight", weight, shape=(N, K), like=x, dtypes=(x.dtype,))


def pack24(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, positions) of a weight (N, K), K a multiple of 8: of each four columns the two largest magnitudes,
    of equal ones the first, which are all there is if the weight is 2:4 already.

    weight is in bf16 or fp16, and so are values (N, K/2); positions (N, K/8) are uint8. Raises TypeError for a
    wrong type or dtype, ValueError for a wrong shape.
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
def _pick(dense, positions, values, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """BLOCK groups a program: the two numbers at their positions, the inverse of `_expand`."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < count
    code = tl.load(positions + group // 2, inside, 0).to(tl.int32) >> (group % 2 * 4).to(tl.int32)
    tl.store(values + 2 * group, tl.load(dense + 4 * group + (code & 3), inside), inside)
    tl.store(values + 2 * group + 1, tl.load(dense + 4 * group + (code >> 2 & 3), inside), inside)


@triton.jit
def _mask(dense, weight, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """BLOCK numbers a program, set to 0 where the weight is."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    none = tl.load(weight + at, at < count, 1.0) == 0
    tl.store(dense + at, tl.zeros([BLOCK], dense.dtype.element_ty), none & (at < count))


def expanded(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The dense form (N, K) of values (N, K/2), of 8 or 16 bits, at their positions (N, K/8)."""
    N, half = values.shape
    weight = torch.empty(N, 2 * half, dtype=values.dtype, device=values.device)
    values, to = values.contiguous(), weight
    if values.itemsize == 1:  # whose 0 is the byte 0
        values, to = values.view(torch.uint8), weight.view(torch.uint8)
    with on(values):
        _expand[(cdiv(weight.numel() // 4, SIZE),)](values, positions.contiguous(), to, weight.numel() // 4, SIZE)
    return weight


def _empty(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


def _launch(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    out = _empty(x, values, positions, weight)
    if out.numel() == 0 or x.shape[1] == 0:
        return out.zero_()
    if x.shape[0] <= FEW and capability(x.device)[0] == 9 and x.stride(1) == 1:
        from . import _sparse24_hopper as hopper  # where Gluon may be missing, it is not needed

        if hopper.fits(values, positions):
            hopper.few_rows(x, values, positions, out)
            return out
    return matmul(x, (expanded(values, positions) if weight is None else weight).t())


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, values, positions, weight = ctx.saved_tensors
    of_x, of_values, _, of_weight = ctx.needs_input_grad[-4:]
    dx, picked, dense = gradients(dy, x, values, positions, weight, of_x, of_values, of_weight)
    return dx if of_x else None, picked if of_values else None, None, dense if of_weight else None


def _launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor | None,
    of_x: bool,
    of_values: bool,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dX, d values, dW); those that are not wanted are empty."""
    dx, picked, dense = (x.new_empty(0) for _ in range(3))
    if of_x:
        dx = matmul(dy, expanded(values, positions) if weight is None else weight)  # dX = dY @ W
    if of_values or of_weight:
        whole = matmul(dy.t(), x)  # dW = dY.T @ X
        count = whole.numel()
        with on(x):
            if of_values:
                picked = torch.empty_like(values, memory_format=torch.contiguous_format)
                if count:
                    _pick[(cdiv(count // 4, SIZE),)](whole, positions.contiguous(), picked, count // 4, SIZE)
            if weight is not None and of_weight and count:
                _mask[(cdiv(count, SIZE),)](whole, weight.contiguous(), count, SIZE)
        dense = whole if of_weight else dense
    return dx, picked, dense


def _fake_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor | None,
    of_x: bool,
    of_values: bool,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = x.new_empty(0)
    wide = x.new_empty(values.shape[0], x.shape[1]) if of_weight else x.new_empty(0)
    return x.new_empty(x.shape) if of_x else none, values.new_empty(values.shape) if of_values else none, wide


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


gradients = operator(
    "sparse24_matmul_backward(Tensor dy, Tensor x, Tensor values, Tensor positions, Tensor? weight, bool of_x, "
    "bool of_values, bool of_weight) -> (Tensor, Tensor, Tensor)",
    _launch_backward,
    _fake_gradients,
)
_sparse24_matmul = operator(
    "sparse24_matmul(Tensor x, Tensor values, Tensor positions, Tensor? weight) -> Tensor",
    _launch,
    _empty,
    _save,
    _backward,
)
_pack24 = operator("pack24(Tensor weight) -> (Tensor, Tensor)", _launch_pack, _packed)
