"""The interpreter that the tests use does what Triton's does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from triton import language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl
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


def _value(kind, *shape):
    data = np.ones(shape or (1,), dtype=interpreter._get_np_dtype(kind))
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def _outcome(function, *arguments):
    """Types, numbers and how they are stored, or what is wrong with the arguments."""
    try:
        made = function(interpreter.interpreter_semantic, *arguments)
    except (TypeError, ValueError, AttributeError, IncompatibleTypeErrorImpl) as error:
        return type(error)
    return [(str(x.type), x.handle.data.dtype, x.handle.data.shape, x.handle.data.tolist()) for x in made]


KINDS = tl.int1, tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.float32, tl.float64
NUMBERS = True, 0, 3, -3, 1 << 31, 1 << 62, -(1 << 40), 0.5, 1e300, float("inf")
CHECKS = [(False, False, True, False), (True, True, True, False), (False, False, True, True), (False,) * 4]
"""Of what may be a pointer, whether it is arithmetic, and whether it divides: as the language's operators ask."""


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("checks", CHECKS)
@pytest.mark.parametrize("kind", [*KINDS, tl.pointer_type(tl.float32)], ids=str)
def test_operands_become_what_triton_makes_of_them(kind, checks):
    own, tritons = quick_interpreter._check_operands, quick_interpreter._checked_operands
    others = [*KINDS, tl.pointer_type(tl.float32), tl.pointer_type(tl.int32)]
    rest = [*NUMBERS, *(_value(x, *shape) for x in others for shape in ((), (4,)))]
    for one in (_value(kind), _value(kind, 4)):
        for other in rest:
            for pair in ((one, other), (other, one)):
                if any(isinstance(x, tl.tensor) for x in pair):
                    assert _outcome(own, *pair, *checks) == _outcome(tritons, *pair, *checks), pair


@pytest.mark.parametrize("first", [(), (1,), (4,), (1, 4), (4, 1), (4, 4), (2, 4), (2, 1, 4)])
@pytest.mark.parametrize("second", [(), (1,), (4,), (1, 4), (4, 1), (4, 4), (8, 4), (1, 2, 1)])
def test_sizes_become_what_triton_makes_of_them(first, second):
    pair = _value(tl.int32, *first), _value(tl.float32, *second)
    own, tritons = quick_interpreter._broadcast, quick_interpreter._broadcast_values
    assert _outcome(own, *pair) == _outcome(tritons, *pair)


def test_blocks_that_are_alike_are_of_equal_types():
    for kind in (tl.int32, tl.pointer_type(tl.int32), tl.pointer_type(tl.int32, const=True)):
        for shape in ([4], [tl.constexpr(2), 8], tl.tuple([2, 2])):
            own, again, tritons = (object.__new__(tl.block_type) for _ in range(3))
            quick_interpreter._init_block_type(own, kind, shape)
            quick_interpreter._init_block_type(again, kind, shape)
            quick_interpreter._make_block_type(tritons, kind, shape)
            for x in (own, again):
                assert (str(x), x.numel, x.scalar) == (str(tritons), tritons.numel, tritons.scalar)
                assert x == tritons
                assert x.to_ir(interpreter.interpreter_builder) == tritons
    for wrong in ([3], [], (4,)):
        with pytest.raises((ValueError, TypeError, AssertionError)):
            tl.block_type(tl.int32, wrong)


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
