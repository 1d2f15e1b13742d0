"""Our selective scan."""

import pytest
import torch
import triton
import triton.language as tl
from kernelmark.kernels.state_space import _selective_scan_hopper as hopper
from kernelmark.kernels.state_space import selective_scan as module
from kernelmark.kernels.state_space._channel_sums import added, fours
from kernelmark.kernels.state_space.selective_scan import selective_scan
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.operators.selective_scan import OPERATOR, reference


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("axes", [{"B": 2, "D": 5, "S": 13, "N": 2}, {"B": 1, "D": 20, "S": 8, "N": 3}])
def test_agrees(agrees, axes, dtype):
    agrees("selective_scan", axes, dtype)


@pytest.mark.parametrize("S", [1, 3, 4])
def test_short(agrees, S):
    agrees("selective_scan", {"B": 1, "D": 3, "S": S, "N": 1})


def test_agrees_with_strides(agrees):
    axes = {"B": 2, "D": 6, "S": 8, "N": 2}

    def parts(given):
        both = torch.randn(2, 12, 16)
        return {
            "u": both[:, :6, 8:],
            "z": both[:, 6:, 8:],
            "B": torch.randn(2, 8, 2).transpose(1, 2),
            "delta": torch.randn(2, 8, 6).transpose(1, 2),
            "A": -torch.rand(2, 6).t(),
        }

    agrees("selective_scan", axes, change=parts)


@triton.jit
def _sums(numbers, fours_, sums):
    """(32, 16) to the sums over fours of channels, (16, 8), and over all, in each of 8 columns."""
    k = tl.arange(0, 16)
    row = tl.arange(0, 32)[:, None]
    parts = fours(tl.load(numbers + row * 16 + k[None, :]))
    to = k[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(fours_ + to, parts)
    tl.store(sums + to, added(parts))


def test_sums_over_channels():
    """Each number's own, of four neighbours and of all."""
    numbers = torch.randn(32, 16)
    parts, sums = torch.empty(16, 8), torch.empty(16, 8)
    _sums[(1,)](numbers, parts, sums)
    torch.testing.assert_close(parts, numbers.view(8, 4, 16).sum(1).t(), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(sums, numbers.sum(0)[:, None].expand(16, 8), rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_sums_over_channels_hide_nothing(bits):
    """No NaN, of whatever bits: those of tensor cores are ones alone."""
    numbers = torch.zeros(8, 16)
    numbers.view(torch.int32)[3, 5] = bits
    sums = torch.empty(16, 8)
    _total[(1,)](numbers.t().contiguous(), sums)
    assert sums[5].isnan().all()


@triton.jit
def _total(parts, sums):
    """(16, 8) to the sums of rows."""
    to = tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(sums + to, added(tl.load(parts + to)))


@pytest.mark.parametrize("N", [3, 4])
def test_states_of_the_kernel_for_hopper_have_all_their_numbers(monkeypatch, N):
    """It reads as many of B and C as A has, which for an odd number got one more."""
    asked = []

    class Hopper:
        fits = staticmethod(hopper.fits)

        @staticmethod
        def states(kept, u, delta, A, B, C, bias, softplus):
            asked.append((A.shape[1], B.shape[1], C.shape[1]))

    given = {
        name: x.detach().requires_grad_() if torch.is_tensor(x) else x
        for name, x in build({"B": 2, "D": 3, "S": 9, "N": N}).items()
    }
    y = selective_scan(**given)
    monkeypatch.setattr(module, "_hopper", lambda device: Hopper)
    y.sum().backward()
    assert asked == [(4, 4, 4)] * (N == 4)


@pytest.mark.parametrize(("channels", "N"), [(33, 17), (70, 20), (32, 36)])
def test_gradients_of_many_numbers(agrees, channels, N):
    """More than one group of channels, and states whose pairs do not fill a tile of sums, in 16 bits."""
    agrees("selective_scan", {"B": 1, "D": channels, "S": 6, "N": N}, "fp16")


def build(axes, pass_="forward"):
    return OPERATOR.inputs(
        OPERATOR.case(axes, "fp32", pass_), torch.device("cpu"), torch.Generator().manual_seed(1)
    )


def wide(inputs):
    return {k: x.detach().double() if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}


@pytest.mark.parametrize("bias", [-6.0, 3.0])
def test_segments(bias):
    """Cut or whole, with a past that is carried on or forgotten, values and gradients are the same."""
    inputs = build({"B": 1, "D": 3, "S": 31, "N": 2})
    inputs["delta_bias"] = torch.full((3,), bias)
    raised = wide(inputs)
    expected = reference(**raised)
    arguments = list(inputs.values())
    dout = torch.randn(1, 3, 31)
    leaves = [x.requires_grad_() for x in raised.values() if isinstance(x, torch.Tensor)]
    gradients = torch.autograd.grad(reference(**raised), leaves, dout.double())
    for segments in (1, 4):
        y = module._launch(*arguments, segments=segments)
        deviation([y], [expected], OPERATOR.tolerances["fp32"])
        got = module._launch_backward(dout, *arguments, segments=segments)
        deviation(got, gradients, OPERATOR.tolerances["fp32"])


def test_gradients_of_what_is_optional():
    """Without D, z, bias and softplus, only what is there has a gradient."""
    u, delta = torch.randn(2, 3, 9, requires_grad=True), torch.rand(2, 3, 9, requires_grad=True)
    A, B, C = (-torch.rand(3, 2)).requires_grad_(), *(torch.randn(2, 2, 9, requires_grad=True) for _ in range(2))
    given = [u, delta, A, B, C]
    raised = [x.detach().double().requires_grad_() for x in given]

    def plain(u, delta, A, B, C):
        h, ys = 0, []
        for s in range(9):
            h = (delta[:, :, s, None] * A).exp() * h + (delta * u)[:, :, s, None] * B[:, None, :, s]
            ys.append((h * C[:, None, :, s]).sum(-1))
        return torch.stack(ys, -1)

    y, expected = selective_scan(*given), plain(*raised)
    dout = torch.randn_like(y)
    deviation([y.detach()], [expected.detach()], OPERATOR.tolerances["fp32"])
    got = torch.autograd.grad(y, given, dout)
    deviation(got, torch.autograd.grad(expected, raised, dout.double()), OPERATOR.tolerances["fp32"])


@pytest.mark.parametrize("bias", [-40.0, 30.0])
def test_extreme_steps(bias):
    """Steps of e⁻⁴⁰ and of 30: nothing overflows, small steps still count, gradients are finite."""
    inputs = build({"B": 1, "D": 3, "S": 12, "N": 2})
    inputs |= {"delta_bias": torch.full((3,), bias), "D": torch.zeros(3)}
    expected = reference(**wide(inputs))
    y = selective_scan(**inputs)
    deviation([y], [expected], OPERATOR.tolerances["fp32"])
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, torch.Tensor)]
    assert all(g.isfinite().all() for g in torch.autograd.grad(selective_scan(**inputs).sum(), leaves))


def test_hopper_is_chosen_by_capability_and_state(monkeypatch):
    """The kernel itself needs a GPU, where `tests/gpu` runs it."""
    for capability in ((0, 0), (8, 0), (10, 0)):
        module._hopper.cache_clear()
        monkeypatch.setattr(module, "capability", lambda device, c=capability: c)
        assert module._hopper(torch.device("cpu")) is None
    module._hopper.cache_clear()
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    assert module._hopper(torch.device("cpu")) is hopper
    module._hopper.cache_clear()
    u = torch.empty(2, 3, 5)
    assert all(hopper.fits(u, torch.empty(3, N)) for N in (4, 8, 16, 32, 64))
    assert not any(hopper.fits(u, torch.empty(3, N)) for N in (1, 2, 12, 63))


@pytest.mark.parametrize(
    ("batch", "channels", "block"), [(8, 4096, 256), (2, 4096, 64), (1, 4096, 32), (1, 100, 16), (64, 4096, 256)]
)
def test_hopper_fills_the_device(batch, channels, block):
    """With programs of as many channels as each of 132 multiprocessors has."""
    assert hopper.choose(batch, channels, 16, 132).block == block


@pytest.mark.parametrize("N", [4, 8, 16, 32, 64])
def test_hopper_plans(N):
    """What a thread and a multiprocessor hold of the states, of whatever batch."""
    for batch in (1, 2, 3, 8, 100):
        for channels in (1, 60, 1001, 4096):
            plan = hopper.choose(batch, channels, N, 132)
            assert 32 * plan.warps * plan.channels == plan.block * plan.lanes
            assert plan.lanes <= min(N, 32)
            assert plan.channels * N <= hopper.NUMBERS * plan.lanes
            token = 4 * (2 * plan.block + plan.block * plan.lanes + 2 * N)
            assert plan.stages >= 2
            assert plan.stages * plan.tokens * token <= hopper.SHARED
            assert plan.tokens >= 16


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(shape):
    B, D, S = shape
    u, A = torch.randn(shape, requires_grad=True), torch.randn(D, 2, requires_grad=True)
    matrix = torch.randn(B, 2, S)
    y = selective_scan(u, torch.randn(shape), A, matrix, matrix)
    assert y.shape == shape
    assert not torch.autograd.grad(y.sum(), (u, A))[1].any()


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "u must be a tensor", {"u": None}),
        (ValueError, r"delta has shape \(2, 3, 5\), expected \(2, 3, 4\)", {"delta": torch.ones(2, 3, 5)}),
        (ValueError, "A has a state of 65, expected 1 to 64", {"A": torch.ones(3, 65)}),
        (ValueError, r"A has shape \(4, 2\), expected \(3, 2\)", {"A": torch.ones(4, 2)}),
        (ValueError, r"B has shape \(2, 3, 4\), expected \(2, 2, 4\)", {"B": torch.ones(2, 3, 4)}),
        (TypeError, "C has dtype torch.float16, expected torch.float32", {"C": torch.ones(2, 2, 4).half()}),
        (ValueError, r"D has shape \(2,\)", {"D": torch.ones(2)}),
        (ValueError, r"z has shape \(2, 3\)", {"z": torch.ones(2, 3)}),
        (TypeError, "delta_bias has dtype torch.int64", {"delta_bias": torch.ones(3, dtype=torch.int64)}),
    ],
)
def test_wrong_arguments(error, message, change):
    with pytest.raises(error, match=message):
        selective_scan(**build({"B": 2, "D": 3, "S": 4, "N": 2}) | change)


def test_registration():
    inputs = list(build({"B": 2, "D": 3, "S": 4, "N": 2}).values())
    for x in inputs[:8]:
        x.requires_grad_()
    torch.library.opcheck(torch.ops.kernelmark.selective_scan.default, tuple(inputs))
    torch.library.opcheck(torch.ops.kernelmark.selective_scan.default, (*inputs[:5], None, None, None, False))
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.library.opcheck(torch.ops.kernelmark.selective_scan_backward.default, (inputs[0], *inputs))
