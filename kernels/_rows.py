"""Rows at 16-byte boundaries, for widths and strides that are no multiple of 16 bytes.

A thread reads and writes 16 bytes at a time only where the compiler knows that an address is a multiple of 16. A
row of 50257 numbers of two bytes starts at another offset from such a boundary than the row before it, so a kernel
that counts columns from the row's start accesses two bytes at a time. Here columns are counted from the last
boundary at or before the start: `shift` elements belong to what lies before, and the last vector may hold elements
behind the row's end. Vectors are read whole and masked in registers, which reads at most 15 bytes beside the row,
never beyond the 16 bytes that one of its own elements lies in. They are written whole inside of the row and by
element at its two ends.

`Access` says what is known of a launch's rows:

| VECTOR | SHIFTED | rows |
|---|---|---|
| elements of 16 bytes | false | start at a boundary; the width is a multiple of VECTOR |
| elements of 16 bytes | true | start anywhere, but in all tensors at the same distance from a boundary |
| 1 | false | start at different distances, so one element at a time; or the compiler sees by itself how they lie |
| 0 | false | the last, where in addition no block of a row is cut: no masks |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ._common import cdiv, power_of_2


class Access(NamedTuple):
    """How rows are accessed: elements at a time, and whether a row's first lies inside of its vector."""

    VECTOR: int
    SHIFTED: bool

    @property
    def margin(self) -> int:
        """Elements by which a row may be longer, counted from the boundary before its start."""
        return self.VECTOR - 1 if self.SHIFTED else 0

    @property
    def period(self) -> int:
        """Rows from one to the next that lies equally."""
        return self.VECTOR if self.SHIFTED else 1

    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {"VECTOR": self.VECTOR, "SHIFTED": self.SHIFTED}

    def evenly(self, D: int, block: int) -> dict[str, Any]:
        """The same where D columns are taken in blocks: with VECTOR 0, for no masks, if none of these is cut."""
        return {"VECTOR": 0, "SHIFTED": False} if self == PLAIN and D % block == 0 else self.constants()


PLAIN = Access(1, False)


def access(tensors: Sequence[torch.Tensor], strides: Sequence[int], D: int) -> Access:
    """The access to rows of D elements of all these tensors, each with its elements from row to row."""
    first = tensors[0]
    size = first.element_size()
    start, vector = first.data_ptr() % 16, 16 // size
    anywhere, seen = D % vector, D % 16
    for tensor, stride in zip(tensors, strides, strict=True):
        place = tensor.data_ptr() % 16
        if tensor.element_size() != size or place != start or (stride - strides[0]) % vector:
            return PLAIN
        anywhere |= place | stride % vector
        seen |= place | stride % 16
    return Access(vector, bool(anywhere)) if seen else PLAIN


def parts_of(D: int, vector: int, N: int, period: int, most: int, elements: int) -> tuple[int, int, int, int]:
    """(rows, warps, parts, elements of a part) of a program for N rows of D elements, held in at most `most` parts
    of one vector a thread; several rows, of up to `elements` elements together, where they are short.
    """
    warps = 1
    while warps < 32 and cdiv(D, 32 * warps * vector) > most:
        warps *= 2
    part = min(32 * warps * vector, power_of_2(D))
    rows = power_of_2(max(1, min(elements // power_of_2(D), cdiv(N, period))))
    if rows > 1:
        warps = power_of_2(rows * cdiv(D, part) * part // (32 * vector * min(most, 4)))
    return rows, min(warps, 32), cdiv(D, part), part


@triton.jit
def same_rows(program, ROWS: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first, rows (ROWS, 1), rows from the first to each) of a program whose rows lie equally to 16-byte
    boundaries: as a vector has VECTOR elements, each VECTOR-th row does.
    """
    PERIOD: tl.constexpr = VECTOR if SHIFTED else 1
    program = program.to(tl.int64)
    first = program // PERIOD * (PERIOD * ROWS) + program % PERIOD
    down = tl.arange(0, ROWS)[:, None].to(tl.int64) * PERIOD
    return first, first + down, down


@triton.jit
def shift_of(base, offset, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Elements from the 16-byte boundary at or before base + offset to it."""
    if SHIFTED:
        SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
        return (((base + offset).to(tl.int64) % 16) // SIZE).to(tl.int32)
    else:
        return 0


@triton.jit
def boundary(base, offset, shift, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The 16-byte boundary at or before base + offset, which has `shift` elements between the two."""
    # Added here: what is said of a function's own argument is lost where the function is inlined.
    pointer = base + (offset - shift)
    if VECTOR > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def touched(col, end, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Whether columns' vectors hold an element before `end`: equal for a whole vector, and so read at once."""
    if VECTOR == 0:
        return tl.full(col.shape, 1, tl.int1)
    if VECTOR > 1:
        end = (end + VECTOR - 1) // VECTOR * VECTOR
    return col < end


@triton.jit
def within(col, shift, end, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Whether columns are the row's own."""
    inside = col < end
    if SHIFTED:
        inside &= col >= shift
    return inside


@triton.jit
def get(pointer, col, shift, end, rows, other, HINT: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's elements at columns, `other` where these are not the row's; `rows` masks rows, or is True."""
    value = tl.load(pointer + col, touched(col, end, VECTOR) & rows, other, eviction_policy=HINT)
    if SHIFTED:
        value = tl.where(within(col, shift, end, SHIFTED), value, tl.full((), other, tl.float32).to(value.dtype))
    return value


@triton.jit
def put(pointer, col, value, shift, end, rows, HINT: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a row's elements at columns: whole vectors at once, those at its two ends by element."""
    value = value.to(pointer.dtype.element_ty)
    if SHIFTED:
        whole = (col >= (shift + VECTOR - 1) // VECTOR * VECTOR) & (col < end // VECTOR * VECTOR)
        tl.store(pointer + col, value, whole & rows, eviction_policy=HINT)
        tl.store(pointer + col, value, (col >= shift) & (col < end) & ~whole & rows)
    else:
        tl.store(pointer + col, value, touched(col, end, VECTOR) & rows, eviction_policy=HINT)


@triton.jit
def of_columns(weight, col, shift, end, HINT: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A weight's numbers for columns of a row, by element where the row is shifted."""
    inside = within(col, shift, end, SHIFTED) if SHIFTED else touched(col, end, VECTOR)
    return tl.load(weight + (col - shift), inside, 0.0, eviction_policy=HINT)


@triton.jit
def get_part(  # type: ignore[no-untyped-def]  # Triton's types are its own
    pointer,
    shift,
    end,
    rows,
    other,
    PLACE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """`get` of the n-th (PLACE) of a row's PARTS parts of PART columns. PARTS is not more than the row needs:
    there are masks only where the row may begin or end.
    """
    col = PLACE * PART + tl.arange(0, PART)[None, :]
    EDGE: tl.constexpr = PLACE >= PARTS - 1 - SHIFTED or (SHIFTED and PLACE == 0)
    return get(pointer, col, shift, end, rows, other, "", VECTOR if EDGE else 0, SHIFTED and EDGE)


@triton.jit
def put_part(  # type: ignore[no-untyped-def]  # Triton's types are its own
    pointer,
    value,
    shift,
    end,
    rows,
    PLACE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """`put` of the n-th (PLACE) of a row's PARTS parts of PART columns, as `get_part`."""
    col = PLACE * PART + tl.arange(0, PART)[None, :]
    EDGE: tl.constexpr = PLACE >= PARTS - 1 - SHIFTED or (SHIFTED and PLACE == 0)
    put(pointer, col, value, shift, end, rows, "", VECTOR if EDGE else 0, SHIFTED and EDGE)


@triton.jit
def of_part(  # type: ignore[no-untyped-def]  # Triton's types are its own
    weight,
    shift,
    end,
    ROWS: tl.constexpr,
    PLACE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """A weight's numbers for the n-th (PLACE) of a row's PARTS parts of PART columns, (1 or ROWS, PART): read in
    vectors, as many rows as there are of what it is multiplied with, so that each warp reads its own in the layout
    that it needs.
    """
    col = PLACE * PART + tl.arange(0, PART)[None, :]
    if not SHIFTED:
        col += tl.zeros([ROWS, 1], tl.int32)
    EDGE: tl.constexpr = PLACE >= PARTS - 1 - SHIFTED or (SHIFTED and PLACE == 0)
    return of_columns(weight, col, shift, end, "evict_last", VECTOR if EDGE else 0, SHIFTED and EDGE)
