"""Which chunks rows see, in which order they come, and what a kernel is told of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.kernels.attention._chunks import FIELDS, TABLE, Walk, chunks_of, coming, holder, table, walks


@pytest.mark.parametrize(
    ("rank", "causal", "full"),
    [
        (0, [3, 2, 1, 6, 5, 4], [3, 2, 1, 6, 5, 4]),
        (1, [0, 3, 2, 5, 4], [0, 3, 2, 5, 4, 7]),
        (2, [1, 0, 3, 4], [1, 0, 3, 4, 7, 6]),
        (3, [2, 1, 0], [2, 1, 0, 7, 6, 5]),
    ],
)
def test_chunks_of_four_ranks_come_in_this_order(rank, causal, full):
    assert coming(rank, 4, "causal") == causal
    assert coming(rank, 4, "full") == full


def test_walks_of_the_middle_one_of_three_ranks():
    """It holds chunks 1 and 4 of six; the late one's rows see the early one first, which is there."""
    assert walks(1, 3, "causal") == [
        Walk(1, 4, ((1, 0), (0, 1), (2, 2), (3, 3))),
        Walk(0, 1, ((0, 1),)),
    ]
    assert walks(1, 3, "full") == [
        Walk(1, 4, ((1, 0), (0, 1), (2, 2), (3, 3), (5, 4))),
        Walk(0, 1, ((4, 0), (0, 1), (2, 2), (3, 3), (5, 4))),
    ]


def test_the_table_of_two_ranks():
    """Chunks of 256 tokens in blocks of 128: rank 0 holds 0 and 3, rank 1 holds 1 and 2."""
    end = TABLE + 2 * FIELDS
    assert table(walks(0, 2, "causal"), 256, 128) == [
        *(256, 768, 6, end),  # the late chunk: its queries, its keys, three other chunks, their list
        *(0, 0, 0, end + 6),  # the early one sees no other
        *(128, 0, 384, 1, 640, 2),  # last blocks of chunks 0, 1, 2, and how many have come when they have
    ]
    assert table(walks(1, 2, "causal"), 256, 128) == [
        *(256, 512, 4, end), *(0, 256, 2, end + 4), *(384, 0, 128, 1), *(128, 1)
    ]  # fmt: skip


@given(st.integers(1, 9).flatmap(lambda world: st.tuples(st.integers(0, world - 1), st.just(world))))
def test_rows_see_every_chunk_that_they_may_once(place):
    rank, world = place
    for mask in ("causal", "full"):
        come = coming(rank, world, mask)
        for walk in walks(rank, world, mask):
            assert chunks_of(rank, world)[walk.half] == walk.own
            seen = sorted([walk.own, *(x for x, _ in walk.others)])
            assert seen == [*range(walk.own + 1 if mask == "causal" else 2 * world)]
            for number, count in walk.others:
                there = set(chunks_of(rank, world)) | set(come[:count])
                assert number in there
                assert not count or come[count - 1] == number
            counts = [count for _, count in walk.others]
            assert counts == sorted(counts)  # in the order in which they come
    assert coming(rank, world, "causal")[:rank] == [*range(rank)][::-1]


@given(st.integers(2, 9))
def test_no_two_ranks_pull_from_one_while_all_have_something_to_pull(world):
    orders = [coming(rank, world, "full") for rank in range(world)]
    for step in zip(*orders, strict=True):
        assert len({holder(number, world)[0] for number in step}) == world
    for rank in range(world):
        assert [holder(number, world) for number in chunks_of(rank, world)] == [(rank, 0), (rank, 1)]
