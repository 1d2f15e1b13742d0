"""How quack's calls are made: what needs no GPU to be checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.baselines.quack import CHUNK, _chunk


def chunks(tokens, size):
    """Rows of each chunk as quack takes them: the last filled up to 128s."""
    return [-(-min(size, tokens - start) // 128) * 128 for start in range(0, tokens, size)]


@given(tokens=st.integers(1, 40_000), width=st.sampled_from([1024, 2048, 2304, 4096, 5120, 8192]))
def test_no_chunk_is_as_tall_as_the_model_is_wide(tokens, width):
    size = _chunk(tokens, width)
    if width not in chunks(tokens, CHUNK):
        assert size == CHUNK
    elif any(width not in chunks(tokens, x) for x in (CHUNK, CHUNK // 2, CHUNK // 4)):
        assert width not in chunks(tokens, size)


@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 4000])
def test_a_model_as_wide_as_its_own_chunk(tokens):
    assert _chunk(tokens, 4096) == 2048
