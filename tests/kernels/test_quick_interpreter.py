"""The interpreter that the tests use does what Triton's does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from triton import language as tl
from triton.runtime import interpreter

from . import quick_interpreter


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _four_times(x, y):
    at = tl.arange(0, 4)
    tl.store(y + at, _twice(_twice(tl.load(x + at))))


def test_types_are_the_interpreters():
    names = tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES + tl.dtype.FP_TYPES
    kinds = [tl.dtype(x) for x in names]
    for kind in (*kinds, *map(tl.pointer_type, kinds)):
        for shaped in (kind, tl.block_type(kind, [4])):
            assert interpreter._get_np_dtype(shaped) == quick_interpreter._find_dtype.__wrapped__(shaped)


def test_the_language_is_tritons_again_after_a_launch():
    before = {name: getattr(tl, name) for name in quick_interpreter._builtins(tl)}
    x, y = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    for _ in range(2):
        _four_times[(1,)](x, y)
        assert torch.equal(y, 4 * x)
        assert {name: getattr(tl, name) for name in before} == before
        y.zero_()


def test_integers_that_overflow_are_told_where_it_debugs(monkeypatch):
    builder = interpreter.interpreter_builder
    x, y = torch.full((4,), 1 << 30, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    _four_times[(1,)](x, y)
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))
    with pytest.raises(interpreter.InterpreterError, match="int32 overflow detected for operation add"):
        _four_times[(1,)](x, y)
