"""Our gated RMS normalization."""

from functools import partial

import pytest
import torch
from kernelmark.kernels import _cluster
from kernelmark.kernels._rows import PLAIN, Access
from kernelmark.kernels.norm import _norm
from kernelmark.kernels.norm import gated_rms_norm as module
from kernelmark.kernels.norm._norm import Plan
from kernelmark.kernels.norm.gated_rms_norm import gated_rms_norm


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("order", ["gate_first", "norm_first"])
@pytest.mark.parametrize(("D", "G"), [(2, 1), (7, 1), (10, 1), (16, 2), (20, 2), (13, 1), (40, 1), (40, 2)])
def test_agrees(agrees, D, G, order, dtype):
    """Groups that are held in registers, and such that go in pieces: backward from 9 numbers, forward from 17, and
    with the norm first those that fill little of their block.
    """
    agrees("gated_rms_norm", {"B": 2, "S": 5, "D": D, "G": G}, dtype, order=order)


@pytest.mark.parametrize("order", ["gate_first", "norm_first"])
@pytest.mark.parametrize(
    ("S", "D", "dtype"), [(1, 32, "fp16"), (1, 101, "fp32"), (2, 300, "fp32"), (2, 77, "bf16")]
)
def test_few_long_rows(agrees, S, D, dtype, order):
    """Fewer rows than multiprocessors, spread over programs."""
    agrees("gated_rms_norm", {"B": 1, "S": S, "D": D, "G": 1}, dtype, order=order)


@pytest.mark.parametrize("order", ["gate_first", "norm_first"])
@pytest.mark.parametrize(("S", "D", "dtype"), [(5, 48, "fp32"), (5, 77, "bf16"), (7, 101, "fp16")])
def test_columns_of_several_rows(agrees, monkeypatch, S, D, dtype, order):
    """Fewer rows than multiprocessors, and more than a program has at a time."""
    monkeypatch.setattr(_norm, "multiprocessors", lambda x: 8)
    agrees("gated_rms_norm", {"B": 1, "S": S, "D": D, "G": 1}, dtype, order=order)


@pytest.mark.parametrize("order", ["gate_first", "norm_first"])
def test_many_rows_in_two_launches(agrees, order):
    agrees("gated_rms_norm", {"B": 1, "S": 5, "D": 77, "G": 1}, "bf16", order=order)


def test_how_long_rows_are_spread(monkeypatch):
    x, wide = torch.empty(1, 1, dtype=torch.bfloat16), torch.empty(1, 1)
    for where, name, value in (
        (module, "spread", partial(_norm.spread, least=32768)),
        (_norm, "SPREAD_PIECES", (2048, 8192)),
        (module, "TWICE", 8192),
        (module, "PARTS", (64, 65536)),
        (_cluster, "most_members", lambda x: 16),
        *((where, "multiprocessors", lambda x: 132) for where in (module, _norm, _cluster)),
    ):
        monkeypatch.setattr(where, name, value)
    anywhere, fp32 = Access(8, True), Access(4, True)
    plan = module.spread_plan
    assert plan(x, 64, 65536, PLAIN) == Plan("cluster", 1, 8192, 8, 16)
    assert plan(wide, 27, 75586, fp32) == Plan("spread", 1, 4096, 19, 4)
    # Of many rows those that no program holds, where one would read them by element.
    assert plan(x, 1293, 93012, anywhere) == Plan("spread", 1, 8192, 12, 8)
    assert plan(x, 1293, 93008, PLAIN) is None
    assert plan(wide, 1293, 93013, fp32) is None
    assert plan(x, 1293, 32761, anywhere) is None
    assert plan(x, 64, 16384, PLAIN) is None
    monkeypatch.setattr(_cluster, "most_members", lambda x: 0)
    assert plan(x, 64, 65536, PLAIN) == Plan("spread", 1, 8192, 8, 8)


def test_agrees_with_strides(agrees):
    both = torch.randn(2, 3, 30)

    def part(given):
        return {"x": both[..., 2:14], "z": both[..., 16:28], "weight": torch.randn(24)[::2]}

    agrees("gated_rms_norm", {"B": 2, "S": 3, "D": 12, "G": 3}, change=part)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0,)])
def test_empty(shape):
    x, z, weight = (torch.randn(s, requires_grad=True) for s in (shape, shape, shape[-1:]))
    y = gated_rms_norm(x, z, weight)
    assert y.shape == shape
    dx, dz, dweight = torch.autograd.grad(y.sum(), (x, z, weight))
    assert dx.shape == dz.shape == shape
    assert not dweight.any()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor", (None, torch.ones(2, 4), torch.ones(4))),
        (ValueError, r"x has shape \(\)", (torch.ones(()), torch.ones(()), torch.ones(1))),
        (
            ValueError,
            r"z has shape \(2, 5\), expected \(2, 4\)",
            (torch.ones(2, 4), torch.ones(2, 5), torch.ones(4)),
        ),
        (TypeError, "weight has dtype torch.int64", (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4).long())),
        (ValueError, "group is 3", (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 1e-5, 3)),
        (ValueError, "order is 'none'", (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 1e-5, 4, "none")),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        gated_rms_norm(*arguments)


def test_registration():
    x, z, weight = (torch.randn(s, requires_grad=True) for s in ((2, 3, 8), (2, 3, 8), (8,)))
    operators = torch.ops.kernelmark
    torch.library.opcheck(operators.gated_rms_norm_saving.default, (x, z, weight, 1e-5, 4, True))
    x, z, weight = (t.detach() for t in (x, z, weight))
    torch.library.opcheck(operators.gated_rms_norm.default, (x, z, weight, 1e-5, 4, False))
    torch.library.opcheck(
        operators.gated_rms_norm_backward.default, (x, x, z, weight, torch.rand(2, 3, 2), 4, True)
    )


def test_compiled():
    """torch.compile takes the registered operator and differentiates it."""
    x, z, weight = (torch.randn(s, requires_grad=True) for s in ((4, 8), (4, 8), (8,)))
    compiled = torch.compile(lambda *t: gated_rms_norm(*t) * 2, backend="aot_eager", fullgraph=True)
    y, plain = compiled(x, z, weight), gated_rms_norm(x, z, weight) * 2
    torch.testing.assert_close(y, plain)
    for a, b in zip(
        torch.autograd.grad(y.sum(), (x, z, weight)), torch.autograd.grad(plain.sum(), (x, z, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)
