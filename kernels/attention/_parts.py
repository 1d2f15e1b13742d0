"""Parts of a cache, which several programs attend to, joined: for decoding."""

from __future__ import annotations

import triton
import triton.language as tl

LONGEST_PARTS = 128
"""Most parts of one sequence; joining them reads them all."""


@triton.jit(do_not_specialize=["parts"])
def join(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, sums, levels, parts, D: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The output of one query, WIDTH of its columns by the second coordinate: the mean of its parts, weighed by
    the sums of exponentials they stand for.
    """
    at = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    width = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    level = tl.load(levels + at * parts + part, part < parts, float("-inf"))
    highest = tl.max(level, 0)
    weight = tl.exp2(level - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    inside = (part < parts)[:, None] & (width < D)[None, :]
    values = tl.load(sums + (at * parts + part)[:, None] * D + width[None, :], inside, 0.0)
    value = tl.sum(values * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * D + width, value.to(out.dtype.element_ty), width < D)
