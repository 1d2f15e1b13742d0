"""Whether a chunk meets its own keys before others' have come, in causal attention over several GPUs.

Let a chunk's keys take a time c to come, and a chunk's queries with as many keys, all visible, a time s. Of P
ranks rank r has r chunks to come before its early one can be attended to, and 2·(P - 1 - r) more before its late
one.

* In two calls, one a chunk, the last rank waits for (P - 1)·c, as nothing is there to compute; rank 0 has its
  early chunk, s/2, beside 2·(P - 1)·c. No other waits for longer than one of these.
* Own keys first, every rank has one chunk with itself, s/2, before the wait for the early chunk's, and rank 0
  both, s. It waits for longest, 2·(P - 1)·c - s if that is positive.

So the longest wait is shorter by the lesser of (P - 1)·c and s/2. That costs each rank a merge of one chunk. Both
are in proportion to the chunk's length, where the whole is to its square: for long sequences neither matters, and
a merge takes memory.

All ranks come to the same, as they ask of the same shapes. The figures are those of H200: elsewhere they decide
which of two right ways is taken.
"""

from __future__ import annotations

COPIED = 0.377e12
"""Bytes a second of a copy engine between two H200."""
MULTIPLIED = 770e12
"""Operations a second of attention forward, of 32,768 tokens and heads of 128 in bf16."""
MERGED = 4e12
"""Bytes a second that a merge reads and writes, of the 4.8e12 of the memory."""
LAUNCHED_S = 20e-6
"""A call of attention and a merge more, with what prepares and follows them."""
WORTH = 1 / 80
"""Of the whole that must be won. Of four GPUs with 8 key heads for 32, a wait was seen at 65,536 tokens, where
1.7 % is to be won, and none at 131,072, where it is 0.9 %.
"""


def pays(B: int, H: int, Hkv: int, length: int, D: int, world: int, itemsize: int) -> bool:
    """For chunks of `length` tokens of B sequences."""
    coming = 2 * B * Hkv * length * D * itemsize / COPIED
    square = 4 * B * H * length * length * D / MULTIPLIED
    # Of the chunk's output two parts are read and their sum is written.
    merge = 3 * B * H * length * D * itemsize / MERGED + LAUNCHED_S
    # A rank's two chunks see as many keys as 2·P chunks have.
    return min((world - 1) * coming, square / 2) - merge > WORTH * 2 * world * square
