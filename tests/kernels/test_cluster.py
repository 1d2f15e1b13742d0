"""Programs in clusters: how rows are shared out, and what a launch hands over. The exchange itself needs a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from kernelmark.kernels import _cluster as module
from kernelmark.kernels import _launch
from kernelmark.kernels._cluster import ClusterLaunch, few_registers, most_members, share
from kernelmark.kernels.activation import softmax
from kernelmark.kernels.norm import _norm_forward, gated_rms_norm
from kernelmark.kernels.norm._norm import Plan

from . import gate


def cluster(operator, rows, D, size=2, most=16, processors=132):
    """(piece, members, warps) of an operator's rows on an H200, or None for its other plans."""
    shifted = D * size % 16 > 0
    held = 2 if operator in ("softmax backward", "gated_rms_norm") else 1
    if operator.startswith("softmax"):
        piece = softmax.largest_piece(rows, D, size, shifted, held == 2, processors)
    elif operator == "gated_rms_norm":
        piece = gated_rms_norm.largest_piece(rows, D, size, shifted, processors)
    else:
        residual, centred = operator == "add_rms_norm", operator == "layer_norm"
        piece = _norm_forward.largest_piece(rows, D, size, shifted, residual, centred, processors)
    return share(rows, D, 16 // size - 1 if shifted else 0, size, held, piece, most, processors)


@pytest.mark.parametrize(
    ("operator", "rows", "D", "size", "expected"),
    [
        ("softmax", 64, 65536, 2, (8192, 8, 8)),
        ("softmax", 64, 262144, 2, (16384, 16, 16)),
        ("softmax", 2048, 65536, 2, None),
        ("softmax", 64, 262143, 2, None),
        ("softmax", 5, 42886, 4, (4096, 11, 8)),
        ("softmax", 89, 93732, 2, None),
        ("softmax backward", 64, 65536, 2, (16384, 4, 16)),
        ("softmax backward", 89, 93732, 2, (8192, 12, 16)),
        ("softmax backward", 2048, 65536, 2, (16384, 4, 16)),
        ("rms_norm", 64, 65536, 2, (8192, 8, 8)),
        ("rms_norm", 64, 262144, 2, (16384, 16, 16)),
        ("rms_norm", 2048, 65536, 2, (8192, 8, 8)),
        ("rms_norm", 706, 254372, 2, None),
        ("rms_norm", 16, 20001, 2, (2048, 10, 4)),
        ("rms_norm", 64, 50257, 2, (8192, 7, 16)),
        ("rms_norm", 2, 175078, 2, None),
        ("layer_norm", 64, 65536, 2, (8192, 8, 8)),
        ("layer_norm", 117, 48606, 4, None),
        ("layer_norm", 1082, 90002, 2, None),
        ("add_rms_norm", 64, 65536, 2, (8192, 8, 8)),
        ("add_rms_norm", 436, 48664, 2, (8192, 6, 8)),
        ("add_rms_norm", 5, 55279, 4, (4096, 14, 8)),
        ("gated_rms_norm", 27, 75586, 4, None),
        ("gated_rms_norm", 1293, 93012, 2, None),
        ("gated_rms_norm", 64, 65536, 2, (8192, 8, 16)),
    ],
)
def test_what_was_measured_goes_where_it_was_fastest(operator, rows, D, size, expected):
    assert cluster(operator, rows, D, size) == expected


@pytest.mark.parametrize(
    ("operator", "rows", "D", "size"),
    [
        # Nothing near was measured: fp32 of more than a few rows, more rows that start anywhere, other lengths.
        ("softmax", 64, 65536, 4),
        ("softmax backward", 17, 65536, 4),
        ("softmax backward", 64, 40960, 2),
        ("softmax backward", 132, 49152, 2),
        ("softmax backward", 132, 93732, 2),
        ("softmax backward", 64, 131080, 2),
        ("softmax backward", 40, 104000, 2),
        ("rms_norm", 17, 65536, 4),
        ("rms_norm", 67, 50257, 2),
        ("rms_norm", 64, 40001, 2),
        ("rms_norm", 132, 40960, 2),
        ("rms_norm", 132, 65544, 2),
        ("rms_norm", 64, 32760, 2),
        ("rms_norm", 16, 19992, 2),
        ("add_rms_norm", 64, 65544, 2),
        ("layer_norm", 64, 50257, 2),
        ("layer_norm", 100, 48000, 2),
        ("layer_norm", 32, 65536, 2),
        ("layer_norm", 132, 65536, 2),
        ("gated_rms_norm", 64, 50257, 2),
        ("gated_rms_norm", 132, 65536, 2),
    ],
)
def test_other_rows_stay_with_other_plans(operator, rows, D, size):
    assert cluster(operator, rows, D, size) is None


def test_members_are_as_many_as_the_gpu_takes():
    assert cluster("rms_norm", 64, 131072) == (16384, 8, 16)
    assert cluster("rms_norm", 64, 262152) is None  # more than sixteen pieces
    assert cluster("rms_norm", 64, 262144, most=8) is None
    assert cluster("rms_norm", 5, 55279, 4, most=8) is None
    assert cluster("rms_norm", 5, 32768, 4, most=8) == (4096, 8, 8)
    assert cluster("rms_norm", 16, 65536) == (4096, 16, 4)
    assert cluster("rms_norm", 16, 65001) == (4096, 16, 8)  # by element: more threads
    assert cluster("rms_norm", 64, 65536, most=0) is None


@pytest.fixture
def meeting(monkeypatch):
    """Under the interpreter, which runs one program after another, those of a launch find what they gave to each
    other at the launch before: the second of two alike is as on a GPU.
    """
    given = {}

    def exchange(pairs, *numbers):
        program = int(tl.program_id(0).handle.data[0])
        given[program] = [x.handle.data.item() if isinstance(x, tl.tensor) else x for x in numbers]
        return program

    def of_members(program, which, member, members, other):
        program, members = (int(x.handle.data.item()) for x in (program, members))
        found = tl.zeros(member.shape, tl.float32) + other
        start = program // members * members
        for i in range(members):
            found.handle.data[i] = given.get(start + i, (0.0, 0.0))[int(which)]
        return found

    for where in (softmax, _norm_forward, gated_rms_norm):
        for name, function in (("begin", lambda: 0), ("exchange", exchange), ("of_members", of_members)):
            monkeypatch.setattr(where, name, function)
    return lambda run, *tensors: [run(*tensors) for _ in range(2)][1]


# numpy's warnings, through the interpreter.
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid", "ignore:All-NaN", "ignore:overflow")
@pytest.mark.parametrize("D", [90, 96])
def test_softmax_of_members(meeting, D):
    """At rows that start anywhere and at rows at boundaries; a member whose numbers are all ruled out, or far
    below another's; nothing at all, infinity, NaN, and equal numbers that are the lowest.
    """
    x, dy = torch.randn(9, D).mul_(3), torch.randn(9, D)
    x[1, :40], x[2, 30:] = -torch.inf, torch.finfo(torch.float32).min
    x[3], x[4], x[5, 80], x[6, 3] = -torch.inf, torch.finfo(torch.float32).min, torch.inf, torch.nan
    x[7, 50] = 1e38
    plan = softmax.Plan("cluster", 16, 4, 6)
    y = meeting(softmax.prepare(x, plan), x)
    want = x.double().softmax(-1)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-7, equal_nan=True)
    y, dy, want = y[[0, 1, 2, 8]], dy[:4], want[[0, 1, 2, 8]]
    dx = meeting(softmax.prepare_backward(dy, y, plan), dy, y)
    slope = want * (dy - (want * dy).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("D", [90, 96])
@pytest.mark.parametrize("ahead", [False, True])
def test_norms_of_members(meeting, D, ahead):
    x, residual, weight, bias = torch.randn(3, D) + 5, torch.randn(3, D), torch.randn(D), torch.randn(D)
    plan = Plan("cluster", 1, 16, 6, 4, ahead)
    for given in ((x, None, weight, None), (x, residual, weight, None), (x, None, weight, bias)):
        y, h, mean, rstd = meeting(_norm_forward.prepare_forward(*given, 1e-5, True, plan), *given)
        summed = x.double() if given[1] is None else x.double() + residual
        if given[3] is None:
            want = torch.nn.functional.rms_norm(summed, (D,), weight.double(), 1e-5)
        else:
            want = torch.nn.functional.layer_norm(summed, (D,), weight.double(), bias.double(), 1e-5)
            torch.testing.assert_close(mean.double(), summed.mean(-1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-5)
        assert h is None or torch.equal(h, x + residual)
        spread = summed.square().mean(-1) if mean is None else summed.var(-1, unbiased=False)
        torch.testing.assert_close(rstd.double(), (spread + 1e-5).rsqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("D", [90, 96])
@pytest.mark.parametrize("first", [False, True])
def test_gated_norms_of_members(meeting, monkeypatch, D, first):
    x, z, weight = torch.randn(3, D), torch.randn(3, D), torch.randn(D)
    monkeypatch.setattr(gated_rms_norm, "spread_plan", lambda *_: Plan("cluster", 1, 16, 6, 4))
    run = gated_rms_norm.prepare_forward(x, z, weight, 1e-5, D, first, True)
    y, rstd = meeting(run, x, z, weight, 1e-5, D, first)
    gate = torch.nn.functional.silu(z.double())
    inner = x.double() * gate if first else x.double()
    want = torch.nn.functional.rms_norm(inner, (D,), weight.double(), 1e-5)
    torch.testing.assert_close(y.double(), want if first else want * gate, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rstd[:, 0].double(), (inner.square().mean(-1) + 1e-5).rsqrt(), rtol=1e-5, atol=0)


def test_clusters_are_of_hopper_and_as_large_as_it_is_whole(monkeypatch):
    x = torch.empty(1)
    assert most_members(x) == 0  # by the interpreter
    monkeypatch.setattr(module, "INTERPRETED", False)
    for capability, processors, expected in (
        ((9, 0), 132, 16),
        ((9, 0), 60, 8),
        ((8, 0), 108, 0),
        ((0, 0), 132, 0),
    ):
        monkeypatch.setattr(module, "capability", lambda device, found=capability: found)
        monkeypatch.setattr(module, "multiprocessors", lambda tensor, found=processors: found)
        assert most_members(x) == expected
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(_launch, "_DIRECT", False)  # a version of Triton whose launches are not known
    assert most_members(x) == 0


class Kernel:
    """A stand-in for what Triton compiles, which notes launches."""

    arg_names = ("pair", "out", "n", "BLOCK", "LAST")

    def __init__(self):
        self.warmed, self.launched = [], []
        self.compiled = SimpleNamespace(
            function="function",
            packed_metadata=(4, 1, 640),
            launch_metadata=lambda *arguments: "about",
            run=lambda *arguments: self.launched.append(arguments),
        )

    def warmup(self, *arguments, grid, **constants):
        self.warmed.append((grid, arguments, constants))
        return self.compiled


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_launch, "_device", lambda: 0)
    monkeypatch.setattr(_launch, "_stream", lambda index: 100)
    return Kernel()


@pytest.mark.parametrize("members", [8, 11])
def test_each_launch_says_how_many_run_together(kernel, monkeypatch, members):
    asked = []
    monkeypatch.setattr(
        module, "driver", SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace(
            cuOccupancyMaxActiveClusters=lambda *given: asked.append(given)
        )))
    )  # fmt: skip
    launch = ClusterLaunch(kernel, members, (3 * members,), 5, LAST=2, BLOCK=64, num_warps=4)
    tensors = [torch.empty(3) for _ in range(4)]
    for x, y in zip(tensors[::2], tensors[1::2], strict=True):
        launch(torch.device("cuda", 0), (x, None), y)
    ((grid, arguments, constants),) = kernel.warmed
    assert grid == (3 * members,)
    assert arguments[2:] == (5,)
    assert constants == {"BLOCK": 64, "LAST": 2, "num_warps": 4}
    first, second = kernel.launched
    # Triton's launcher multiplies the grid by the programs of a cluster.
    assert first[:7] == (3, 1, 1, 100, "function", (4, members, 640), "about")
    assert first[9][0] is tensors[0]
    assert first[10:] == (tensors[1], 5, 64, 2)
    assert second[:6] == (3, 1, 1, 100, "function", (4, members, 640))
    assert second[9:] == ((tensors[2].data_ptr(), 0), tensors[3].data_ptr(), 5, 64, 2)
    # More than eight have to be allowed to a kernel.
    assert asked == ([] if members == 8 else [("function", 640, 11)])


def test_registers_leave_room_for_other_programs():
    assert few_registers(8192, 16, True) == {"maxnreg": 64}
    assert few_registers(16384, 8, False) == {"maxnreg": 80}
    assert few_registers(16384, 16, False) == few_registers(8192, 8, False) == few_registers(4096, 8, True) == {}


def test_a_profiler_sees_launches(kernel, monkeypatch):
    enter, leave = SimpleNamespace(calls=[print]), SimpleNamespace(calls=[])
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", enter)
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", leave)
    launch = ClusterLaunch(kernel, 2, (4,), 5, LAST=2, BLOCK=64)
    for _ in range(3):
        launch(torch.device("cuda", 0), (torch.empty(1), None), torch.empty(1))
    assert [x[7:9] for x in kernel.launched] == [(enter, leave)] * 3


def test_rows_of_clusters_are_read_and_written_once():
    """Compiled for Hopper: loads and stores of 16 bytes, one of each of its vectors a thread, nothing spilled."""
    found = [x for x in gate.compiled("9.0", ["softmax"]) if x["kernel"].startswith("_split")]
    by_kernel = {x["kernel"]: x for x in found if "D131072" in x["case"]}
    assert set(by_kernel) == {"_split", "_split_gradient"}
    # 64 rows of 131072: 16384 elements of 8 and 16 warps, eight and four vectors a thread of each tensor.
    assert (by_kernel["_split"]["wide"], by_kernel["_split_gradient"]["wide"]) == (16, 12)
    assert [x for x in found if x["spilled"]] == []
