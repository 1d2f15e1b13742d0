"""Our softmax."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels import _cluster
from kernelmark.kernels.activation import softmax as module
from kernelmark.kernels.activation.softmax import softmax

# Held in registers forward and backward, forward alone, and neither: split.
AXES = [(5, 17), (3, 32), (9, 1), (3, 64), (2, 37), (1, 65), (2, 200), (7, 301), (12, 70)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("sizes", AXES)
def test_agrees(agrees, sizes, dtype):
    agrees("softmax", dict(zip("MD", sizes, strict=True)), dtype)


def test_agrees_in_bf16(agrees):
    agrees("softmax", {"M": 3, "D": 100}, "bf16")


def test_agrees_with_strides(agrees):
    axes = {"M": 5, "D": 37}
    for x in (torch.randn(37, 5).t(), torch.randn(5, 50)[:, 3:40], torch.randn(2, 3, 70)[:, ::2], torch.randn(37)):
        agrees("softmax", axes, change=lambda given, x=x: {"x": x})


@pytest.mark.parametrize("D", [90, 96])
def test_every_plan_gives_the_same(D):
    """At rows that start anywhere between two 16-byte boundaries, and at rows that start at one."""
    x, dy = torch.randn(6, D).mul_(3), torch.randn(6, D)
    want = x.double().softmax(-1)
    slope = want * (dy - (want * dy).sum(-1, keepdim=True))
    for plan in (
        module.Plan("whole", 2, 4),
        module.Plan("parts", 2, 4, 3, 32) if D == 96 else module.Plan("parts", 2, 4, 4, 32),
        module.Plan("pieces", 4, 4),
        module.Plan("split", 32, 4),
        module.Plan("split", 16, 4),
        module.Plan("split", 128, 4),
    ):
        y = module.prepare(x, plan)(x)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-7)
        dx = module.prepare_backward(dy, y, plan)(dy, y)
        torch.testing.assert_close(dx.double(), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("M", [1, 2, 64, 300, 65536])
@pytest.mark.parametrize("D", [1, 16, 64, 65, 129, 4096])
def test_plans_cover_the_rows(M, D, backward):
    """With any plan there is room for a row, and parts cover it."""
    x = torch.empty(1, 1)
    chosen = module.plan(x, M, D, backward)
    if chosen.kind == "whole":
        assert (module.LIMIT if not backward else module.BACKWARD_LIMIT) >= D
        assert chosen.size == 1 or chosen.size * module.power_of_2(D) <= 2048
        return
    if chosen.kind == "split":
        assert module.PIECES[0] <= chosen.size <= module.PIECES[1]
        assert M <= module.MOST


def test_clusters_take_long_rows(monkeypatch):
    monkeypatch.setattr(_cluster, "most_members", lambda x: 16)
    for where in (_cluster, module):
        monkeypatch.setattr(where, "multiprocessors", lambda x: 132)
    x = torch.empty(1, 1, dtype=torch.bfloat16)
    # (elements of a program, warps, members): forward no more than eight warps.
    assert module.plan(x, 64, 262144, False) == module.Plan("cluster", 16384, 8, 16)
    assert module.plan(x, 2048, 65536, True) == module.Plan("cluster", 16384, 16, 4)
    assert module.plan(x, 2048, 65536, False).kind != "cluster"
    assert module.plan(x, 64, 262143, False, module.Access(8, True)).kind != "cluster"


@pytest.mark.parametrize("D", [20, 50, 100])
def test_extreme_values(D):
    """Large values do not overflow, what is ruled out has no probability, and equal values share."""
    x = torch.full((2, D), -torch.inf)
    x[0, 3], x[0, D - 1], x[1, 7] = 1e38, 1e38, -5e37
    x.requires_grad_()
    y = softmax(x)
    want = torch.zeros(2, D)
    want[0, 3] = want[0, D - 1] = 0.5
    want[1, 7] = 1.0
    assert torch.equal(y, want)
    dx = torch.autograd.grad(y[0].sum(), x)[0]
    assert dx[0].abs().max() < 1e-6


# numpy's warnings, through the interpreter; NaN is the answer.
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:All-NaN slice")
@pytest.mark.parametrize("D", [20, 100])
@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_no_answer_is_nan(value, D):
    x = torch.zeros(2, D)
    x[0] = value
    y = softmax(x)
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], torch.full((D,), 1 / D))


def test_nothing():
    x = torch.randn(0, 5, requires_grad=True)
    y = softmax(x)
    assert y.shape == torch.autograd.grad(y, x, y)[0].shape == (0, 5)
    assert softmax(torch.randn(3, 0)).shape == (3, 0)


@pytest.mark.parametrize(
    ("error", "message", "x"),
    [
        (TypeError, "x must be a tensor, not list", []),
        (TypeError, "x has dtype torch.int64", torch.ones(3, dtype=torch.int64)),
        (ValueError, r"x has shape \(\)", torch.tensor(1.0)),
        (ValueError, "x is on meta", torch.ones(3, device="meta")),
    ],
)
def test_wrong_arguments(error, message, x):
    with pytest.raises(error, match=message):
        softmax(x)


def test_registration():
    x = torch.randn(4, 9, requires_grad=True)
    torch.library.opcheck(torch.ops.kernelmark.softmax.default, (x,))
    torch.library.opcheck(torch.ops.kernelmark.softmax_backward.default, (x.detach(), x.detach().softmax(-1)))


@pytest.mark.parametrize("D", [17, 100, 300])
def test_rows_of_the_lowest_number_are_uniform(D):
    """As masks by `finfo.min` leave rows of which nothing is to be seen."""
    for dtype in (torch.float32, torch.bfloat16):
        y = softmax(torch.full((3, D), torch.finfo(dtype).min, dtype=dtype))
        torch.testing.assert_close(y.float(), torch.full((3, D), 1 / D), rtol=1e-2, atol=0)
