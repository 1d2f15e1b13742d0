"""The terms on which libraries take part: copies, refusals, conversions."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch
from kernelmark.baselines import _terms


class Overwriting(torch.autograd.Function):
    """x², whose backward pass writes its result over what forward saved, as Liger's gates do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return x.detach().mul_(2 * dy)


def test_sparing_keeps_inputs_and_a_second_gradient():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    call = _terms.sparing(lambda x: Overwriting.apply(x))
    y = call(x=x)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(y, x, torch.ones(3), retain_graph=True)
        assert gradient.tolist() == [2, 4, 6]
    assert x.tolist() == [1, 2, 3]
    bare = Overwriting.apply(x)
    torch.autograd.grad(bare, x, torch.ones(3))
    assert x.tolist() == [2, 4, 6]  # without it, the input is gone


def test_a_conversion_is_named_and_stays_so():
    def conversion(x):
        return x.contiguous()

    call = _terms.refusing(_terms.forcing(lambda x: conversion(x) + 1, conversion), ValueError)
    assert call.conversion is conversion
    assert call(x=torch.ones(2)).tolist() == [2, 2]
    assert not hasattr(_terms.refusing(lambda x: x, ValueError), "conversion")


def test_what_is_made_of_a_weight_is_made_once_for_its_contents():
    made = []

    def prepare(q, scale):
        made.append((q.tolist(), scale))
        return q * 2

    kept = _terms.keeping(prepare, "q", "scale")
    q = torch.tensor([1.0, 2.0])
    assert kept(q=q, scale=None) is kept(q=q, scale=None)
    q.detach().copy_(torch.tensor([3.0, 4.0]))
    assert kept(q=q, scale=None).tolist() == [6.0, 8.0]
    other = q.clone()
    assert kept(q=other, scale=None).tolist() == [6.0, 8.0]
    assert made == [([1.0, 2.0], None), ([3.0, 4.0], None), ([3.0, 4.0], None)]


def test_a_refusal_is_unsupported_only_at_first():
    def call(x):
        assert x > 0, "only positive\nnumbers"
        return x

    checked = _terms.refusing(call, AssertionError)
    with pytest.raises(NotImplementedError, match="^only positive$"):
        checked(x=-1)
    assert checked(x=1) == 1
    with pytest.raises(AssertionError):  # it took the case before: this is no refusal
        checked(x=-1)


def test_other_errors_stay_errors():
    def call(x):
        raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        _terms.refusing(call, AssertionError, ValueError)(x=1)


def test_a_runtime_error_is_a_refusal_by_its_words():
    def call(error):
        raise error

    checked = _terms.refusing(call, ValueError, saying="doesn't support feature dim")
    with pytest.raises(NotImplementedError, match=r"^This layer norm doesn't support feature dim >= 64KB\.$"):
        checked(error=RuntimeError("This layer norm doesn't support feature dim >= 64KB.\nSee there."))
    with pytest.raises(NotImplementedError, match="^other words$"):
        checked(error=ValueError("other words"))
    for error in (RuntimeError("CUDA error"), torch.OutOfMemoryError("CUDA out of memory"), TypeError("a slip")):
        with pytest.raises(type(error), match=str(error)):
            checked(error=error)


def test_several_words_of_a_refusal():
    def call(said):
        raise RuntimeError(said)

    for said in ("no such scale here", "rows too narrow"):
        with pytest.raises(NotImplementedError, match=said):
            _terms.refusing(call, saying=("such scale", "too narrow"))(said=said)
    with pytest.raises(RuntimeError, match="device lost"):
        _terms.refusing(call, saying=("such scale", "too narrow"))(said="device lost")


def test_a_bare_assertion_is_quoted(tmp_path):
    path = tmp_path / "library.py"  # pytest gives assertions of its own files messages
    path.write_text("def call(x):\n    assert x > 0\n    return x\n")
    call = runpy.run_path(str(path))["call"]
    with pytest.raises(NotImplementedError, match="^assert x > 0$"):
        _terms.refusing(call, AssertionError)(x=-1)


def test_forward_only():
    @_terms.forward_only("The library")
    def factory(case):
        """Its docs."""
        return abs

    assert factory.__doc__ == "Its docs."
    assert factory(SimpleNamespace(pass_="forward")) is abs
    for pass_ in ("backward", "forward_backward"):
        with pytest.raises(NotImplementedError, match="The library has no backward pass"):
            factory(SimpleNamespace(pass_=pass_))
