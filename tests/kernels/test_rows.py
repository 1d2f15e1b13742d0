"""Rows at 16-byte boundaries: what is said of them, and that they are accessed whole and nothing beside them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernelmark.kernels._rows import (
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
)


@pytest.mark.parametrize(
    ("width", "stride", "start", "expected"),
    [
        (48, 48, 0, PLAIN),  # multiples of 16 elements, which the compiler sees
        (40, 40, 0, Access(8, False)),
        (40, 48, 8, Access(8, False)),
        (41, 48, 0, Access(8, True)),
        (41, 41, 0, Access(8, True)),
        (48, 50, 0, Access(8, True)),
        (48, 48, 3, Access(8, True)),
    ],
)
def test_access_of_one_tensor(width, stride, start, expected):
    x = torch.empty(stride * 4 + start, dtype=torch.bfloat16)[start:].as_strided((4, width), (stride, 1))
    assert access((x,), (stride,), width) == expected


def test_access_of_tensors_that_lie_differently_is_by_element():
    x, y = torch.empty(4, 41), torch.empty(4, 48)
    assert access((x, x), (41, 41), 41) == Access(4, True)
    assert access((x, y), (41, 48), 41) == PLAIN
    assert access((x, x.view(-1)[1:]), (41, 41), 40) == PLAIN
    assert access((x, x.to(torch.float16)), (41, 41), 41) == PLAIN


@pytest.mark.parametrize("vector", [4, 8])
@pytest.mark.parametrize("most", [2, 4, 8])
@pytest.mark.parametrize("D", [8, 65, 100, 768, 1001, 5120, 16384, 24577, 32768])
def test_parts_cover_a_row(D, most, vector):
    for N in (1, 37, 100000):
        rows, warps, parts, part = parts_of(D, vector, N, 8, most, 2048)
        assert part * parts >= D > part * (parts - 1)
        assert warps & (warps - 1) == part & (part - 1) == rows & (rows - 1) == 0
        assert parts <= most or warps == 32
        assert rows * parts * part <= 2 * max(2048, parts * part)


@triton.jit
def _copy(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    y,
    N,
    D,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Adds 1 to rows: with one part as a row of its own, with more in parts."""
    first, row, down = same_rows(tl.program_id(0), ROWS, VECTOR, SHIFTED)
    shift = shift_of(x, first * x_stride, SHIFTED)
    source = boundary(x, first * x_stride, shift, VECTOR) + down * x_stride
    target = boundary(y, first * D, shift, VECTOR) + down * D
    if PARTS == 1:
        col = tl.arange(0, BLOCK)[None, :]
        value = get(source, col, shift, shift + D, row < N, 0.0, "", VECTOR, SHIFTED)
        put(target, col, value + 1.0, shift, shift + D, row < N, "", VECTOR, SHIFTED)
    else:
        for i in tl.static_range(PARTS):
            value = get_part(source, shift, shift + D, row < N, 0.0, i, BLOCK, PARTS, VECTOR, SHIFTED)
            put_part(target, value + 1.0, shift, shift + D, row < N, i, BLOCK, PARTS, VECTOR, SHIFTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("D", [8, 13, 29, 31])
def test_a_row_is_written_whole_and_nothing_beside_it(D, dtype):
    N = 11
    x = torch.randn(N + 2, D).to(dtype)[1:-1]
    memory = torch.full((N + 2, D), 7.0, dtype=dtype)
    y = memory[1:-1]
    reach = access((x, y), (D, D), D)
    # As above: both start one row behind what is aligned.
    assert bool(D % reach.VECTOR) == reach.SHIFTED
    for rows, block in ((1, 64), (2, 16), (2, 8)):
        parts = -(-(D + reach.margin) // block)
        y.fill_(torch.nan)
        grid = (-(-N // (rows * reach.period)) * reach.period,)
        _copy[grid](x, y, N, D, D, rows, block, parts, **reach.constants())
        assert torch.equal(y, x + 1)
        assert memory[0].eq(7).all()
        assert memory[-1].eq(7).all()
