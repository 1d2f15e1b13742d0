"""Matrix products with weights of which two of each four neighbours are 0 (2:4), stored without them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, cdiv, check, on, operator
from .matmul import matmul


def sparse24_matmul(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T of x (M, K) and a weight (N, K) of which each group of four columns has two numbers.

    values (N, K/2) has them in x's dtype, bf16 or fp16; positions, bytes (N, K/8), where they are in their
    groups: four bits a group, the first one's place in the lower two, the lower group in the lower four. `pack24`
    makes both. K is a multiple of 8. `weight` is the same in dense form: given or made here, it is what x is
    multiplied by, since Triton has no sparse products.

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


def _empty(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


def _launch(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    out = _empty(x, values, positions, weight)
    K, N = x.shape[1], values.shape[0]
    if out.numel() == 0 or K == 0:
        return out.zero_()
    if weight is None:
        values, positions, weight = values.contiguous(), positions.contiguous(), x.new_empty(N, K)
        block = 256 if INTERPRETED else 1024
        with on(x):
            _expand[(cdiv(weight.numel() // 4, block),)](values, positions, weight, weight.numel() // 4, block)
    return matmul(x, weight.t())


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
