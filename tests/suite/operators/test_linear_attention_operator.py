"""The linear_attention operator: its cases, its reference against the recurrence as written, its tolerance."""

from __future__ import annotations

import warnings

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import ssd
from kernelmark.suite.operators.linear_attention import OPERATOR, inputs, reference

AXES = {"B": 2, "S": 150, "H": 3, "K": 16, "D": 8}
CPU = torch.device("cpu")


def names(plan):
    return [case.name for grid in OPERATOR.plans[plan] for case in OPERATOR.expand(grid)]


def sequential(q, k, v, g, initial_state, return_final_state):
    """The recurrence, position by position."""
    state = torch.zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=v.dtype)
    state = state if initial_state is None else initial_state
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkd->bhd", q[:, t], state))
    o = torch.stack(outputs, 1)
    return (o, state) if return_final_state else o


def drawn(dtype="fp32", axes=AXES, **options):
    return inputs(OPERATOR.case(axes, dtype, "forward", **options), CPU, torch.Generator().manual_seed(0))


def test_standard_has_exactly_these_cases():
    model = "H16-K128-D128"
    sizes = {"forward": ("B8-S2048", "B2-S8192", "B1-S32768", "B1-S131072")}
    sizes["backward"] = ("B8-S2048", "B2-S8192", "B1-S131072")
    expected = {f"{size}-{model}-bf16-{pass_}" for pass_, all_ in sizes.items() for size in all_}
    expected.add(f"B2-S8192-{model}-states-bf16-forward")
    assert sorted(names("standard")) == sorted(expected)
    assert names("quick") == [f"B2-S8192-{model}-bf16-forward"]
    assert not set(names("full")) & set(names("standard"))


def test_costs():
    axes = {"B": 2, "S": 1024, "H": 16, "K": 64, "D": 128}
    forward, backward, both = (
        OPERATOR.case(axes, "bf16", pass_) for pass_ in ("forward", "backward", "forward_backward")
    )
    assert forward.bytes == 2 * 2048 * 16 * (2 * 64 + 2 * 128 + 1)
    assert backward.bytes == 2 * 2048 * 16 * (4 * 64 + 3 * 128 + 2)
    assert both.bytes == forward.bytes + backward.bytes
    assert forward.flops == 4 * 2048 * 16 * 64 * 128
    assert both.flops == forward.flops + backward.flops
    assert OPERATOR.case(axes, "bf16", "forward", states=True).bytes - forward.bytes == 2 * 2 * 16 * 64 * 128 * 4
    assert forward.tokens == 2048


def test_gates_are_those_of_a_model():
    g = drawn(axes=AXES | {"S": 4000})["g"]
    assert -0.4 < float(g.min()) < float(g.max()) < 0
    assert -0.06 < float(g.mean()) < -0.04


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("S", "held"), [(1, 9), (64, 9), (150, 9), (330, 9), (330, 2), (330, 1)])
def test_reference_is_the_recurrence(monkeypatch, states, S, held):
    """However many chunks are held; with gradients."""
    monkeypatch.setattr(ssd, "HELD", held * AXES["B"] * AXES["H"] * ssd.CHUNK**2)
    given = drawn(axes=AXES | {"S": S}, states=states)
    leaves = [name for name, x in given.items() if isinstance(x, torch.Tensor)]
    ours, theirs = (
        {name: x.double().requires_grad_() if name in leaves else x for name, x in given.items()} for _ in range(2)
    )
    got, want = (y if isinstance(y, tuple) else (y,) for y in (reference(**ours), sequential(**theirs)))
    torch.testing.assert_close(got, want)
    gradients = [torch.randn(x.shape, dtype=torch.float64) for x in got]
    torch.testing.assert_close(
        torch.autograd.grad(got, [ours[name] for name in leaves], gradients),
        torch.autograd.grad(want, [theirs[name] for name in leaves], gradients),
    )


def test_reference_of_nothing():
    given = drawn(axes=AXES | {"S": 0}, states=True)
    o, state = reference(**given)
    assert o.shape == (2, 0, 3, 8)
    torch.testing.assert_close(state, given["initial_state"])


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("states", [False, True])
def test_eager_is_right(dtype, pass_, states):
    case = OPERATOR.case(AXES, dtype, pass_, states=states)
    bench = Workbench.build(OPERATOR, case, CPU, seed=1)
    result = bench.comparable(bench.call(EAGER["linear_attention"]["torch"](case))())
    deviation(result, bench.references, OPERATOR.tolerances[dtype])
    assert not bench.changed()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("S", [1, 64, 150])
def test_cpu_kernel(dtype, states, S):
    """As its functions are written: Inductor takes long for them."""
    with warnings.catch_warnings():
        # Importing Inductor warns of torch.jit, which it still uses itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        from kernelmark.kernels.cpu.linear_attention import linear_attention
    case = OPERATOR.case(AXES | {"S": S}, dtype, "forward_backward", states=states)
    with torch.compiler.set_stance("force_eager"):
        bench = Workbench.build(OPERATOR, case, CPU, seed=1)
        result = bench.comparable(bench.call(linear_attention)())
        deviation(result, bench.references, OPERATOR.tolerances[dtype])


def wrong_gates(g, **rest):
    """Each decay a tenth too strong."""
    return reference(g=g * 1.1, **rest)


def without_the_token_itself(v, **rest):
    return reference(v=torch.nn.functional.pad(v, (0, 0, 0, 0, 1, 0))[:, :-1], **rest)


def one_wrong_element(**given):
    o = reference(**given).clone()
    o[0, 77, 1, 3] += 0.5 * o.square().mean().sqrt()
    return o


@pytest.mark.parametrize("wrong", [wrong_gates, without_the_token_itself, one_wrong_element])
def test_tolerance_fails_what_is_broken(wrong):
    case = OPERATOR.case(AXES | {"H": 8, "K": 64}, "bf16", "forward")
    bench = Workbench.build(OPERATOR, case, CPU, seed=3)
    wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in bench.inputs.items()}
    with pytest.raises(Incorrect):
        deviation([wrong(**wide)], bench.references, OPERATOR.tolerances["bf16"])
