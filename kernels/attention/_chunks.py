"""The chunks that attention over several GPUs meets, in the order in which they come: numbers, and a table of
them.

The sequence has 2·P chunks for P ranks. Rank r holds chunks r and 2·P - 1 - r ("zigzag"): under a causal mask the
early chunk sees few keys and the late one many, and every rank computes the same number of scores.

A rank pulls one chunk at a time. At each step all ranks pull from the one as many places away, so no two from the
same, as long as they take as long: early chunks from the rank before, and on downwards; then late ones from the
rank after, and on upwards. So those of earlier ranks' come first which the early chunk waits for, and who needs
fewer ends sooner.

Rows of a chunk of queries see their own chunk under the mask, then others whole: this rank's other one, which is
there, then those of other ranks as they come. Nothing here is for a GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TABLE = 32
"""Numbers of 4 bytes before the table: a line of memory, whose first one is the word that says how many chunks
have come, and the second one how many come of a sequence.
"""
FIELDS = 4
"""Numbers that the table has of a chunk of queries, before its lists."""


class Walk(NamedTuple):
    """What rows of one of a rank's chunks see."""

    half: int
    """Which of the rank's two chunks they are of, in the order in which it holds them."""
    own: int
    """The number of that chunk, whose keys come first."""
    others: tuple[tuple[int, int], ...]
    """Further chunks, each with how many other ranks' chunks have come when it has: 0 for one that is there."""


def chunks_of(rank: int, world: int) -> tuple[int, int]:
    """The numbers of a rank's two chunks."""
    return rank, 2 * world - 1 - rank


def holder(number: int, world: int) -> tuple[int, int]:
    """(the rank that holds a chunk, which of its two that is)."""
    return (number, 0) if number < world else (2 * world - 1 - number, 1)


def coming(rank: int, world: int, mask: str) -> list[int]:
    """The chunks of other ranks that a rank's rows see, in the order in which they come. Under a causal mask the
    first `rank` of these are all that its early chunk sees.
    """
    steps = range(1, world)
    early = [chunks_of((rank - step) % world, world)[0] for step in steps]
    late = [chunks_of((rank + step) % world, world)[1] for step in steps]
    return [x for x in early + late if mask == "full" or x < chunks_of(rank, world)[1]]


def walks(rank: int, world: int, mask: str) -> list[Walk]:
    """Of both of a rank's chunks, the late one first: under a causal mask its rows see more, and what is long goes
    before what is short.
    """
    found = []
    numbers = chunks_of(rank, world)
    for half in (1, 0):
        own, other = numbers[half], numbers[1 - half]
        order = [(other, 0), *((x, i) for i, x in enumerate(coming(rank, world, mask), 1))]
        found.append(Walk(half, own, tuple(x for x in order if mask == "full" or x[0] < own)))
    return found


def table(of: Sequence[Walk], length: int, keys: int) -> list[int]:
    """What a kernel reads of two walks over chunks of `length` tokens, in blocks of `keys`, which divide it: of
    each the first row of queries, the first row of its own keys, how many blocks the others have, and where its
    list begins; then lists, of each other chunk the row with which its last block begins and how many have come.
    Places are counted from TABLE numbers before.
    """
    heads: list[int] = []
    lists: list[int] = []
    for walk in of:
        place = TABLE + len(of) * FIELDS + len(lists)
        heads += [walk.half * length, walk.own * length, len(walk.others) * length // keys, place]
        for number, come in walk.others:
            lists += [(number + 1) * length - keys, come]
    return heads + lists
