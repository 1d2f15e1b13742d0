"""Rows added by their numbers: the gradient of an embedding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels.matmul._lookup import add_rows

from .layouts import LAYOUTS, laid


@settings(max_examples=30)  # the interpreter takes its time
@given(
    M=st.integers(0, 20),
    N=st.integers(0, 40),
    count=st.integers(1, 30),
    used=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    lie=st.sampled_from(LAYOUTS),
)
def test_agrees(M, N, count, used, dtype, lie):
    """Of tensors that lie as they may, with numbers that many rows have and some have not."""
    x = laid(M, N, dtype, lie)
    numbers = torch.randint(count - min(used, count), count, (M,))
    sums = torch.randn(count, N).to(dtype)
    want = sums.double().index_add_(0, numbers, x.double())
    add_rows(sums, x, numbers)
    rounded = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(sums.double(), want, rtol=rounded, atol=1e-5)


def test_the_same_each_time():
    x, numbers = torch.randn(40, 20), torch.randint(0, 3, (40,))
    found = [torch.zeros(3, 20) for _ in range(4)]
    for sums in found:
        add_rows(sums, x.clone(), numbers)
    assert all(torch.equal(sums, found[0]) for sums in found)


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (TypeError, "x must be a tensor", {"x": [1.0]}),
        (ValueError, r"x has shape \(2,\), expected 2 dimensions", {"x": torch.ones(2)}),
        (ValueError, r"numbers has shape \(3,\)", {"numbers": torch.zeros(3, dtype=torch.int64)}),
        (TypeError, "numbers has dtype torch.int32", {"numbers": torch.zeros(2, dtype=torch.int32)}),
        (TypeError, "sums has dtype torch.float16", {"sums": torch.zeros(4, 3, dtype=torch.float16)}),
        (ValueError, r"sums has shape \(4, 2\), expected \(rows, 3\)", {"sums": torch.zeros(4, 2)}),
        (ValueError, r"sums has strides \(1, 4\)", {"sums": torch.zeros(3, 4).t()}),
    ],
)
def test_wrong_arguments(error, message, changed):
    right = {"sums": torch.zeros(4, 3), "x": torch.ones(2, 3), "numbers": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        add_rows(**{**right, **changed})


def test_registration():
    given = torch.zeros(4, 5), torch.randn(9, 5), torch.randint(0, 4, (9,))
    torch.library.opcheck(torch.ops.kernelmark.add_rows.default, given)
