"""Our state-space duality, on the interpreter: chunks of 16 there."""

import pytest
import torch
from kernelmark.kernels.state_space import ssd as module
from kernelmark.kernels.state_space._ssd_forward import Launch, launch
from kernelmark.kernels.state_space.ssd import ssd
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.operators.ssd import OPERATOR, inputs, reference

CPU = torch.device("cpu")
SMALL = {"B": 2, "S": 37, "H": 2, "P": 16, "N": 16, "G": 1}
BOTH = {"states": True, "packed": True}


@pytest.fixture
def one_segment(monkeypatch):
    """All of a sequence in one program."""
    monkeypatch.setattr(module, "segments", lambda programs, chunks, slots: 1)


@pytest.fixture
def many_segments(monkeypatch):
    """At most two chunks in a program."""
    monkeypatch.setattr(module, "segments", lambda programs, chunks, slots: -(-chunks // 2))


def drawn(axes=SMALL, dtype="fp32", seed=0, **options):
    return inputs(OPERATOR.case(axes, dtype, "forward", **options), CPU, torch.Generator().manual_seed(seed))


def raised(given):
    return {
        name: x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }


def compare(given, dtype="fp32", leaves=OPERATOR.gradients):
    """Results, with `initial_state` its gradient too, against the reference in fp64."""
    given = dict(given)
    wide = raised(given)
    leaves = [name for name in (*leaves, "initial_state") if given.get(name) is not None]
    for name in leaves:
        given[name] = given[name].detach().requires_grad_()
        wide[name].requires_grad_()
    got, want = (y if isinstance(y, tuple) else (y,) for y in (ssd(**given), reference(**wide)))
    tolerance = OPERATOR.tolerances[dtype]
    deviation([x.detach() for x in got], [x.detach() for x in want], tolerance)
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in got]
    ours = torch.autograd.grad(got, [given[name] for name in leaves], gradients)
    theirs = torch.autograd.grad(want, [wide[name] for name in leaves], [x.double() for x in gradients])
    assert [x.dtype for x in ours] == [given[name].dtype for name in leaves]
    deviation(ours, theirs, tolerance)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "axes",
    [
        SMALL,
        {"B": 1, "S": 1, "H": 1, "P": 1, "N": 1, "G": 1},
        {"B": 1, "S": 48, "H": 6, "P": 24, "N": 20, "G": 3},
        {"B": 1, "S": 18, "H": 17, "P": 16, "N": 16, "G": 1},
    ],
)
def test_agrees(agrees, axes, dtype):
    agrees("ssd", axes, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("axes", [SMALL, SMALL | {"B": 1, "H": 4, "G": 2, "S": 80}])
def test_segments(many_segments, axes, dtype):
    """States are passed between segments, forward and backward, from the initial one to the final one."""
    compare(drawn(axes, dtype, states=True), dtype)
    compare(drawn(axes, dtype, **BOTH), dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_one_segment(one_segment, dtype):
    compare(drawn(dtype=dtype, states=True), dtype)
    compare(drawn(dtype=dtype, **BOTH), dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("start", [1, 15, 16, 17, 32, 36])
def test_a_sequence_begins_anywhere(many_segments, start, dtype):
    """At a chunk's border, at a segment's, at the last position."""
    given = drawn(dtype=dtype, states=True)
    given["seq_idx"] = (torch.arange(37) >= start).int().repeat(2, 1)
    compare(given, dtype)


def test_sequences_in_a_row_are_independent():
    given = drawn(SMALL | {"B": 1, "S": 40})
    lengths = [3, 16, 21]
    given["seq_idx"] = torch.arange(3).repeat_interleave(torch.tensor(lengths)).int()[None]
    together = ssd(**given)
    given["seq_idx"] = None
    pieces = zip(*(given[name].split(lengths, 1) for name in ("x", "dt", "B", "C")), strict=True)
    alone = [ssd(**given | dict(zip(("x", "dt", "B", "C"), piece, strict=True))) for piece in pieces]
    torch.testing.assert_close(together, torch.cat(alone, 1))


def test_a_state_continues_a_sequence():
    given = drawn()
    whole, last = ssd(**given | {"return_final_state": True})
    cut = {name: given[name].split(21, 1) for name in ("x", "dt", "B", "C")}
    first, state = ssd(**given | {name: x[0] for name, x in cut.items()} | {"return_final_state": True})
    second, end = ssd(
        **given | {name: x[1] for name, x in cut.items()} | {"initial_state": state, "return_final_state": True}
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)


def test_strong_and_weak_decays():
    """Steps of 1e-8, decays of exp(-800) a position: no overflow, and gradients stay finite and right."""
    given = drawn(SMALL | {"H": 4}, states=True)
    given["dt_bias"] = torch.tensor([-18.0, 20.0, -18.0, 3.0])
    given["A"] = torch.tensor([-40.0, -40.0, -1e-3, -1e-3])
    compare(given)


def test_without_what_is_optional():
    given = drawn(SMALL | {"S": 20})
    x, dt, A, B, C = (given[name] for name in ("x", "dt", "A", "B", "C"))
    step = dt.abs()
    zero = torch.zeros(2)
    expected = reference(*(t.double() for t in (x, step, A, B, C, zero, zero)), None, None, False, False)
    leaves = [t.requires_grad_() for t in (x, step, A, B, C)]
    y = ssd(*leaves)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y, ssd(*leaves, zero, zero))
    got = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(ssd(*leaves, zero, zero).square().sum(), leaves))


def test_wide_heads():
    """Heads of 128 and more are computed as several; 136 is padded."""
    compare(drawn(SMALL | {"P": 136, "B": 1, "S": 20}, states=True))
    compare(drawn(SMALL | {"P": 128, "B": 1, "S": 20}))
    compare(drawn(SMALL | {"P": 65, "B": 1, "S": 20}))


def test_the_gradient_of_a_wide_head_is_rounded_once():
    """Not that of each head it is computed as: bf16 has no 257, whose sum with -256 it has."""
    x, one, given = torch.ones(1, 1, 1, 128), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 128)
    given[..., 0], given[..., 64] = 257, -256
    dt, D = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((1, 1, 1), (1,)))
    y = ssd(x, dt, -torch.ones(1), one, one, D)
    assert [x.item() for x in torch.autograd.grad(y, (dt, D), given)] == [1, 1]


def test_what_is_computed_as_several_heads():
    """A tile that is too large: heads of 128, and of more than 64 with large states or in fp32."""
    for dtype in (torch.bfloat16, torch.float16):
        assert [module.narrow(dtype, P, 128) for P in (64, 65, 127, 128)] == [False, False, False, True]
        assert [module.narrow(dtype, P, 129) for P in (64, 65, 127, 128)] == [False, True, True, True]
    assert [module.narrow(torch.float32, P, 16) for P in (64, 65, 128)] == [False, True, True]


def test_launches():
    """What was tuned in 16 bits stays as it is; fp32 needs more registers, and has more threads."""
    tuned = {"states": (4, 3), "scan": (4, 2), "chunk_backward": (4, 1), "from_states": (4, 3)}
    for kernel, (warps, stages) in tuned.items():
        for N in (16, 64, 128):
            assert launch(kernel, torch.bfloat16, N) == launch(kernel, torch.float16, N) == Launch(warps, stages)
    assert launch("scan", torch.bfloat16, 256) == Launch(4, 1)
    for kernel in ("states", "chunk_backward", "from_states"):
        assert launch(kernel, torch.float32, 128).warps > launch(kernel, torch.bfloat16, 128).warps


def test_strides():
    """x, B and C as parts of one projection, dt with heads outside, gradients that are expanded."""
    given = drawn(SMALL | {"S": 20, "G": 2})
    projection = torch.randn(2, 20, 2 * 16 + 2 * 2 * 16 + 5)
    x, B, C, _ = projection.split([32, 32, 32, 5], -1)
    given |= {"x": x.unflatten(-1, (2, 16)), "B": B.unflatten(-1, (2, 16)), "C": C.unflatten(-1, (2, 16))}
    given["dt"] = torch.randn(2, 2, 20).transpose(1, 2)
    compare(given)
    given |= {"A": -torch.rand(4)[::2], "D": torch.randn(4)[::2], "dt_bias": torch.randn(4)[::2]}
    compare(given)
    given["x"] = torch.randn(2, 20, 16, 2).transpose(2, 3)
    compare(given)
    leaf = given["x"].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(ssd(**given | {"x": leaf}).sum(), leaf)
    wide = raised(given)
    wide["x"].requires_grad_()
    (expected,) = torch.autograd.grad(reference(**wide).sum(), wide["x"])
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


def test_nothing():
    given = drawn(states=True)
    none = {name: given[name][:, :0] for name in ("x", "dt", "B", "C")}
    state = given["initial_state"].requires_grad_()
    y, last = ssd(**given | none)
    assert y.shape == (2, 0, 2, 16)
    assert torch.equal(last, state)
    assert torch.equal(torch.autograd.grad(last.sum(), state)[0], torch.ones_like(state))
    y, last = ssd(**given | none | {"initial_state": None})
    assert torch.equal(last, torch.zeros(2, 2, 16, 16))


def test_gradient_of_the_final_state_alone():
    given = drawn(states=True)
    leaf = given["x"].requires_grad_()
    _, last = ssd(**given)
    wide = raised(given)
    wide["x"].requires_grad_()
    got = torch.autograd.grad(last.square().sum(), leaf)[0]
    want = torch.autograd.grad(reference(**wide)[1].square().sum(), wide["x"])[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("N", [16, 12])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_results_can_be_changed_in_place(one_segment, dtype, N):
    """Also of states that are as large as the tiles they are computed in."""
    given = drawn(SMALL | {"N": N}, dtype, states=True)
    given["x"].requires_grad_()
    for result in ssd(**given):
        assert torch.equal(result.detach().clone(), result.mul_(2) / 2)


def test_segments_fill_the_device():
    """Full rounds of programs, but no segments where they gain less than their states cost."""
    assert module.segments(640, 32, 264) == 1
    assert module.segments(80, 2048, 264) == 13
    assert module.segments(1, 8, 264) == 2
    assert module.segments(1, 1, 264) == 1
    for chunks in range(1, 70):
        count = module.segments(1, chunks, 264)
        per = -(-chunks // count)
        assert (count - 1) * per < chunks <= count * per


X, T, A, B = torch.ones(2, 5, 4, 8), torch.ones(2, 5, 4), torch.ones(4), torch.ones(2, 5, 2, 8)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "x must be a tensor, not NoneType", {"x": None}),
        (ValueError, r"x has shape \(5, 4, 8\), expected 4 dimensions", {"x": X[0]}),
        (TypeError, "B has dtype torch.float16", {"B": B.half()}),
        (ValueError, "B has 3 groups, which do not divide the 4 heads of x", {"B": torch.ones(2, 5, 3, 8)}),
        (ValueError, "B has state dimension 257, expected 1 to 256", {"B": torch.ones(2, 5, 2, 257)}),
        (ValueError, r"B has shape \(2, 4, 2, 8\), expected \(2, 5, 2, 8\)", {"B": B[:, :4]}),
        (ValueError, r"C has shape \(2, 5, 1, 8\)", {"C": B[:, :, :1]}),
        (ValueError, r"dt has shape \(2, 5, 3\)", {"dt": T[..., :3]}),
        (ValueError, r"A has shape \(3,\), expected \(4,\)", {"A": A[:3]}),
        (TypeError, "A has dtype torch.int64", {"A": A.long()}),
        (ValueError, r"D has shape \(4, 8\), expected \(4,\)", {"D": torch.ones(4, 8)}),
        (ValueError, "dt_bias is on meta", {"dt_bias": A.to("meta")}),
        (ValueError, "initial_state has shape", {"initial_state": torch.ones(2, 4, 8, 9)}),
        (TypeError, "seq_idx has dtype torch.int64", {"seq_idx": torch.ones(2, 5, dtype=torch.int64)}),
        (ValueError, "seq_idx has shape", {"seq_idx": torch.ones(2, 4, dtype=torch.int32)}),
    ],
)
def test_wrong_arguments(error, message, change):
    with pytest.raises(error, match=message):
        ssd(**{"x": X, "dt": T, "A": A, "B": B, "C": B} | change)


@pytest.mark.parametrize("options", [{}, BOTH])
def test_registration(options):
    given = drawn(SMALL | {"S": 20}, **options)
    tensors = [given[name] for name in (*OPERATOR.gradients, "initial_state")]
    tensors = [x if x is None else x.requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.kernelmark.ssd.default, (*tensors, given["seq_idx"], True))


@pytest.mark.parametrize("none", ["B", "H"])
def test_nothing_of_wide_heads(none):
    given = drawn({"B": 1, "S": 5, "H": 2, "P": 128, "N": 128, "G": 1})
    if none == "B":
        given |= {name: given[name][:0] for name in ("x", "dt", "B", "C")}
    else:
        given |= {name: given[name][:, :, :0] for name in ("x", "dt")}
        given |= {name: given[name][:0] for name in ("A", "D", "dt_bias")}
    y = ssd(**given)
    assert (y[0] if isinstance(y, tuple) else y).shape == given["x"].shape
