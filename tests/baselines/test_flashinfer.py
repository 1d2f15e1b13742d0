"""Which pages FlashInfer is told of: all of ours that are in use, in order, and no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kernelmark.baselines.flashinfer import in_use


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([1, 4, 16]))
def test_pages_in_use(lengths, page):
    across = -(-max(lengths) // page)
    tables = [[f"{b}:{i}" for i in range(across)] for b in range(len(lengths))]
    flat = [x for table in tables for x in table]
    starts, places, last = in_use(lengths, page, across)
    assert len(starts) == len(lengths) + 1
    for b, length in enumerate(lengths):
        pages = [flat[place] for place in places[starts[b] : starts[b + 1]]]
        tokens = [(p, t) for p in pages for t in range(page)]
        told = tokens[: (len(pages) - 1) * page + last[b]]
        assert told == [(tables[b][t // page], t % page) for t in range(length)]
