"""One computation behind three operators: normalization of rows, with or without mean, bias and residual.

How a row is shared out depends on its length and on how many there are:

| plan | forward | backward |
|---|---|---|
| whole | a row in registers, in a block of a power of two | the same, every n-th row a program |
| parts | a row in registers, in parts of 16 bytes a thread | the same, every n-th row a program |
| pieces | a row twice, then from the cache | means first, then one piece of every n-th row |
| spread | few long rows: a piece a program, sums exchanged | means first, then all rows of some columns |
| cluster | the same, by programs that share memory | – |

In backward each program keeps its part of the weight's gradient in registers and a second kernel adds the parts;
the order of summation is fixed, so results repeat bit by bit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from .._common import INTERPRETED, cdiv, multiprocessors, power_of_2

Norm = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""y, h = x + residual, mean, rstd = 1 / √(variance or mean square + eps)."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Forward x, residual, weight and bias; backward dy, dh, x and weight. Where there is none, any other tensor."""

PIECE = 16 if INTERPRETED else 4096

PARTS_FROM = 8 if INTERPRETED else 64

MOST_PARTS = 8

SPREAD = 32 if INTERPRETED else 32768

SPREAD_PIECES = (8, 32) if INTERPRETED else (2048, 8192)

SPREAD_MOST = 1024


class Plan(NamedTuple):
    """How rows are shared out, and how a program has them.

    `whole`: `rows` rows, each in a block of a power of two. `parts`: `rows` rows, each in `parts` parts of `block`
    elements; `flag`: the weight is read ahead. `pieces`: one row, twice, in pieces of `block`. `spread`: one piece
    of `block` elements of one row. `cluster`: the same, `parts` programs a cluster; `flag` as for `parts`. For
    `whole`, `flag` means to read x again rather than to hold it.
    """

    kind: Literal["whole", "parts", "pieces", "spread", "cluster"]
    rows: int
    block: int
    parts: int
    warps: int
    flag: bool = False


def spread(x: torch.Tensor, N: int, D: int, least: int = SPREAD) -> int:
    """Elements of a piece of a row that is spread over programs; 0 where rows are many, short or too long."""
    if least > D or (processors := multiprocessors(x)) < N:
        return 0
    # Four programs a multiprocessor, but no piece so small that starting it takes longer than its work.
    piece = min(max(power_of_2(N * D // (4 * processors)), SPREAD_PIECES[0]), SPREAD_PIECES[1])
    return piece if cdiv(D, piece) < SPREAD_MOST else 0
