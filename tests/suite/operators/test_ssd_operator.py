"""The ssd operator: its cases, its reference against the recurrence as it is written, its tolerance."""

from __future__ import annotations

import warnings

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import ssd as module
from kernelmark.suite.operators.ssd import OPERATOR, inputs, reference

AXES = {"B": 2, "S": 150, "H": 4, "P": 8, "N": 16, "G": 2}
CPU = torch.device("cpu")


def names(plan):
    return [case.name for grid in OPERATOR.plans[plan] for case in OPERATOR.expand(grid)]


def sequential(x, dt, A, B, C, D, dt_bias, initial_state, seq_idx, dt_softplus, return_final_state):
    """The recurrence, position by position."""
    groups = x.shape[2] // B.shape[2]
    step = dt + dt_bias
    step = torch.log1p(torch.exp(step)) if dt_softplus else step
    state = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1], dtype=x.dtype)
    state = state if initial_state is None else initial_state
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(step[:, t] * A)
        if seq_idx is not None and t:
            decay = decay * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None]
        written, read = (y[:, t].repeat_interleave(groups, 1) for y in (B, C))
        state = state * decay[..., None, None]
        state = state + torch.einsum("bh,bhp,bhn->bhpn", step[:, t], x[:, t], written)
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, read) + D[:, None] * x[:, t])
    y = torch.stack(outputs, 1)
    return (y, state) if return_final_state else y


def drawn(dtype="fp32", seed=0, axes=AXES, **options):
    case = OPERATOR.case(axes, dtype, "forward", **options)
    return inputs(case, CPU, torch.Generator().manual_seed(seed))


def raised(given):
    return {
        name: x.double().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }


def test_standard_has_exactly_these_cases():
    model = "H80-P64-N128-G1"
    sizes = {"forward": ("B8-S2048", "B2-S8192", "B1-S32768", "B1-S131072")}
    sizes["backward"] = ("B8-S2048", "B2-S8192", "B1-S131072")
    expected = {f"{size}-{model}-bf16-{pass_}" for pass_, all_ in sizes.items() for size in all_}
    expected.add(f"B2-S8192-{model}-states-packed-bf16-forward")
    assert sorted(names("standard")) == sorted(expected)
    assert names("quick") == [f"B2-S8192-{model}-bf16-forward"]
    assert not set(names("full")) & set(names("standard"))


def test_costs():
    axes = {"B": 2, "S": 1024, "H": 80, "P": 64, "N": 128, "G": 1}
    forward, backward, both = (
        OPERATOR.case(axes, "bf16", pass_) for pass_ in ("forward", "backward", "forward_backward")
    )
    assert forward.bytes == 2 * 2048 * (2 * 80 * 64 + 2 * 128 + 80)
    assert backward.bytes == 2 * 2048 * (3 * 80 * 64 + 4 * 128 + 2 * 80)
    assert both.bytes == forward.bytes + backward.bytes
    assert forward.flops == 4 * 2048 * 80 * 64 * 128
    assert both.flops == forward.flops + backward.flops
    with_states = OPERATOR.case(axes, "bf16", "forward", states=True, packed=True)
    assert with_states.bytes - forward.bytes == 2 * 2 * 80 * 64 * 128 * 4 + 2048 * 4
    assert forward.tokens == 2048


def test_inputs_are_those_of_the_model():
    given = drawn(axes=AXES | {"H": 64, "S": 4000}, packed=True, states=True)
    start = torch.nn.functional.softplus(given["dt_bias"])
    assert 0.001 < start.min() < 0.002
    assert 0.05 < start.max() < 0.1001
    assert given["A"].max() <= -1
    assert given["A"].min() >= -16
    ids = given["seq_idx"]
    assert ids.dtype == torch.int32
    assert ids[:, 0].tolist() == [0, 0]
    assert set(ids.diff(dim=1).flatten().tolist()) == {0, 1}
    assert given["initial_state"].shape == (2, 64, 8, 16)
    assert drawn()["seq_idx"] is None


@pytest.mark.parametrize("options", [{}, {"states": True}, {"packed": True}, {"states": True, "packed": True}])
@pytest.mark.parametrize(("S", "held"), [(1, 9), (64, 9), (150, 9), (330, 9), (330, 2), (330, 1)])
def test_reference_is_the_recurrence(monkeypatch, options, S, held):
    """However many chunks are held, also where a sequence begins at a chunk's border; with gradients."""
    monkeypatch.setattr(module, "HELD", held * AXES["B"] * AXES["H"] * module.CHUNK**2)
    given = drawn(axes=AXES | {"S": S}, **options)
    if options.get("packed"):
        starts = torch.tensor([64, 70, 140, 256, 322])
        given["seq_idx"] = torch.bucketize(torch.arange(S), starts, right=True).int().repeat(2, 1)
    ours, theirs = raised(given), raised(given)
    got, want = (y if isinstance(y, tuple) else (y,) for y in (reference(**ours), sequential(**theirs)))
    torch.testing.assert_close(got, want)
    leaves = [*OPERATOR.gradients, *(["initial_state"] if "states" in options else [])]
    gradients = [torch.randn(x.shape, dtype=torch.float64) for x in got]
    torch.testing.assert_close(
        torch.autograd.grad(got, [ours[name] for name in leaves], gradients),
        torch.autograd.grad(want, [theirs[name] for name in leaves], gradients),
    )


def test_pieces_are_of_whole_chunks_and_cover_all():
    chunk, state = module.CHUNK, 4 * module.CHUNK**2
    assert module.pieces(0, 80, state) == []
    assert module.pieces(chunk - 1, 80, state) == [chunk - 1]
    heads = module.HELD // (3 * state)
    assert module.pieces(7 * chunk + 5, heads, state) == [3 * chunk, 3 * chunk, chunk, 5]
    assert module.pieces(6 * chunk, heads, state) == [3 * chunk, 3 * chunk]
    assert module.pieces(2 * chunk, 4 * module.HELD, state) == [chunk, chunk]


def test_reference_survives_strong_and_weak_decays():
    """Steps of 1e-8 and decays of exp(-800) a position: nothing overflows, in fp32 either."""
    given = drawn(axes=AXES | {"S": 70})
    given["dt_bias"] = torch.tensor([-18.0, 20.0, -18.0, 3.0])
    given["A"] = torch.tensor([-40.0, -40.0, -1e-3, -1e-3])
    wide = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in raised(given).items()}
    torch.testing.assert_close(reference(**given).double(), sequential(**wide), rtol=1e-4, atol=1e-5)


def test_reference_of_nothing():
    given = drawn(axes=AXES | {"S": 0}, states=True)
    y, state = reference(**given)
    assert y.shape == (2, 0, 4, 8)
    torch.testing.assert_close(state, given["initial_state"])


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("states", [False, True])
def test_eager_is_right(dtype, pass_, states):
    case = OPERATOR.case(AXES | {"S": 300}, dtype, pass_, states=states)
    bench = Workbench.build(OPERATOR, case, CPU, seed=1)
    deviation(
        bench.comparable(bench.call(EAGER["ssd"]["torch"](case))()), bench.references, OPERATOR.tolerances[dtype]
    )
    assert not bench.changed()


def test_eager_says_what_it_cannot():
    with pytest.raises(NotImplementedError, match="one sequence in a row"):
        EAGER["ssd"]["torch"](OPERATOR.case(AXES, "bf16", "forward", packed=True))


@pytest.fixture
def on_cpu():
    """The CPU kernel as its functions are written: Inductor takes a minute for them."""
    with warnings.catch_warnings():
        # Importing Inductor warns of torch.jit, which it still uses itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        from kernelmark.kernels.cpu.ssd import ssd
    with torch.compiler.set_stance("force_eager"):
        yield ssd


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"states": True, "packed": True}])
@pytest.mark.parametrize("S", [1, 64, 150])
def test_cpu_kernel(on_cpu, dtype, options, S):
    case = OPERATOR.case(AXES | {"S": S}, dtype, "forward_backward", **options)
    bench = Workbench.build(OPERATOR, case, CPU, seed=1)
    deviation(bench.comparable(bench.call(on_cpu)()), bench.references, OPERATOR.tolerances[dtype])


def wrong_decay(A, **rest):
    """Each decay a tenth too strong."""
    return reference(A=A * 1.1, **rest)


def forgets_at_chunks(**given):
    pieces = [
        {
            name: x[:, start : start + module.CHUNK] if name in ("x", "dt", "B", "C") else x
            for name, x in given.items()
        }
        for start in range(0, given["x"].shape[1], module.CHUNK)
    ]
    return torch.cat([reference(**piece) for piece in pieces], 1)


def without_skip(D, **rest):
    return reference(D=torch.zeros_like(D), **rest)


def one_wrong_element(**given):
    y = reference(**given).clone()
    y[0, 77, 1, 3] += 0.5 * y.square().mean().sqrt()
    return y


@pytest.mark.parametrize("wrong", [wrong_decay, forgets_at_chunks, without_skip, one_wrong_element])
def test_tolerance_fails_what_is_broken(wrong):
    case = OPERATOR.case(AXES | {"H": 16, "N": 64}, "bf16", "forward")
    bench = Workbench.build(OPERATOR, case, CPU, seed=3)
    wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in bench.inputs.items()}
    with pytest.raises(Incorrect):
        deviation([wrong(**wide)], bench.references, OPERATOR.tolerances["bf16"])
