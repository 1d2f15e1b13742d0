"""Sums of columns."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels.matmul import _columns as module
from kernelmark.kernels.matmul._columns import sums_of_columns

from .layouts import LAYOUTS, laid


@settings(max_examples=30)  # the interpreter takes its time
@given(
    M=st.integers(0, 90),
    N=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    lie=st.sampled_from(LAYOUTS),
    multiprocessors=st.integers(1, 8),
)
def test_agrees(M, N, dtype, lie, multiprocessors):
    """Of tensors that lie as they may, in any number of groups of rows."""
    x = laid(M, N, dtype, lie)
    with mock.patch.object(module, "multiprocessors", return_value=multiprocessors):
        found = module._prepare(x)(x)
    assert found.dtype == dtype
    rounded = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(found.double(), x.double().sum(0), rtol=rounded, atol=1e-5)


def test_the_same_each_time():
    x = torch.randn(300, 20)
    assert all(torch.equal(sums_of_columns(x), sums_of_columns(x.clone())) for _ in range(3))


@pytest.mark.parametrize(
    ("error", "message", "x"),
    [
        (TypeError, "x must be a tensor", [1.0]),
        (TypeError, "x has dtype torch.int64", torch.ones(2, 2, dtype=torch.int64)),
        (ValueError, r"x has shape \(2,\), expected 2 dimensions", torch.ones(2)),
    ],
)
def test_wrong_arguments(error, message, x):
    with pytest.raises(error, match=message):
        sums_of_columns(x)


def test_registration():
    torch.library.opcheck(torch.ops.kernelmark.sums_of_columns.default, (torch.randn(9, 5),))
