"""The mamba3 operator: its cases, its reference against the recurrence as written, its tolerance."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import ssd
from kernelmark.suite.operators.mamba3 import OPERATOR, inputs, reference

AXES = {"B": 2, "S": 150, "H": 4, "P": 8, "N": 16, "G": 2, "A": 5}
CPU = torch.device("cpu")


def names(plan):
    return [case.name for grid in OPERATOR.plans[plan] for case in OPERATOR.expand(grid)]


def drawn(dtype="fp32", axes=AXES):
    return inputs(OPERATOR.case(axes, dtype, "forward"), CPU, torch.Generator().manual_seed(0))


def sequential(x, B, C, dt, adt, trap, angles, B_bias, C_bias, D, z):
    """The recurrence of the paper, position by position, pairs that turn as complex numbers."""
    A = angles.shape[2]
    groups = x.shape[2] // B.shape[2]

    def turned(t, turn):
        pairs = torch.complex(t[..., 0 : 2 * A : 2].contiguous(), t[..., 1 : 2 * A : 2].contiguous())
        pairs = torch.view_as_real(pairs * torch.polar(torch.ones_like(turn), turn))
        return torch.cat((pairs.flatten(-2), t[..., 2 * A :]), -1)

    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3])
    turn = x.new_zeros(x.shape[0], x.shape[2], A)
    before = torch.zeros_like(state)
    outputs = []
    for t in range(x.shape[1]):
        turn = turn + math.pi * torch.tanh(angles[:, t, None]) * dt[:, t, :, None]
        k = turned(B[:, t].repeat_interleave(groups, 1) + B_bias, turn)
        q = turned(C[:, t].repeat_interleave(groups, 1) + C_bias, turn)
        alpha, share = adt[:, t].exp(), torch.sigmoid(trap[:, t])
        beta, gamma = (1 - share) * dt[:, t] * alpha, share * dt[:, t]
        added = x[:, t, :, :, None] * k[:, :, None]
        state = sum(w[..., None, None] * h for w, h in ((alpha, state), (beta, before), (gamma, added)))
        before = added
        y = torch.einsum("bhpn,bhn->bhp", state, q) + D[:, None] * x[:, t]
        outputs.append(y * torch.nn.functional.silu(z[:, t]))
    return torch.stack(outputs, 1)


def test_standard_has_exactly_these_cases():
    model = "H64-P64-N128-G1-A32"
    sizes = {"forward": ("B8-S2048", "B2-S8192", "B1-S32768", "B1-S131072")}
    sizes["backward"] = ("B8-S2048", "B2-S8192", "B1-S131072")
    expected = [f"{size}-{model}-bf16-{pass_}" for pass_, all_ in sizes.items() for size in all_]
    assert sorted(names("standard")) == sorted(expected)
    assert names("quick") == [f"B2-S8192-{model}-bf16-forward"]
    assert not set(names("full")) & set(names("standard"))


def test_costs():
    axes = {"B": 2, "S": 1024, "H": 64, "P": 64, "N": 128, "G": 1, "A": 32}
    forward, backward, both = (
        OPERATOR.case(axes, "bf16", pass_) for pass_ in ("forward", "backward", "forward_backward")
    )
    assert forward.bytes == 2048 * (2 * (3 * 64 * 64 + 2 * 128 + 64 + 32) + 4 * 2 * 64)
    assert backward.bytes == 2048 * (2 * (5 * 64 * 64 + 4 * 128 + 2 * 64 + 2 * 32) + 4 * 4 * 64)
    assert both.bytes == forward.bytes + backward.bytes
    assert forward.flops == 4 * 2048 * 64 * 64 * 128
    assert both.flops == forward.flops + backward.flops
    assert forward.tokens == 2048


def test_inputs_are_those_of_a_model():
    given = drawn(axes=AXES | {"S": 4000, "H": 64, "G": 1})
    assert 5e-5 < float(given["dt"].min()) < float(given["dt"].max()) < 1
    rate = given["adt"] / given["dt"]
    assert float(rate.max()) <= -1e-4 * (1 - 1e-6)
    assert -0.9 < float(rate.mean()) < -0.7


@pytest.mark.parametrize(("S", "held"), [(1, 9), (64, 9), (150, 9), (330, 9), (330, 2), (330, 1)])
@pytest.mark.parametrize("A", [0, 5, 8])
def test_reference_is_the_recurrence(monkeypatch, S, held, A):
    """However many chunks are held; with gradients."""
    monkeypatch.setattr(ssd, "HELD", held * AXES["B"] * AXES["H"] * ssd.CHUNK**2)
    given = drawn(axes=AXES | {"S": S, "A": A})
    ours, theirs = ({name: x.double().requires_grad_() for name, x in given.items()} for _ in range(2))
    got, want = reference(**ours), sequential(**theirs)
    torch.testing.assert_close(got, want)
    weight = torch.randn(got.shape, dtype=torch.float64)
    leaves = [name for name, x in given.items() if x.numel()]
    torch.testing.assert_close(
        torch.autograd.grad(got, [ours[x] for x in leaves], weight, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(want, [theirs[x] for x in leaves], weight, allow_unused=True, materialize_grads=True),
    )


def test_reference_of_nothing():
    assert reference(**drawn(axes=AXES | {"S": 0})).shape == (2, 0, 4, 8)


@pytest.mark.parametrize("pass_", OPERATOR.passes)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_eager_is_right(dtype, pass_):
    case = OPERATOR.case(AXES, dtype, pass_)
    bench = Workbench.build(OPERATOR, case, CPU, seed=1)
    result = bench.comparable(bench.call(EAGER["mamba3"]["torch"](case))())
    deviation(result, bench.references, OPERATOR.tolerances[dtype])
    assert not bench.changed()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("S", [2, 64, 150])
def test_cpu_kernel(dtype, S):
    """As its functions are written: Inductor takes long for them."""
    with warnings.catch_warnings():
        # Importing Inductor warns of torch.jit, which it still uses itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        from kernelmark.kernels.cpu.mamba3 import mamba3
    case = OPERATOR.case(AXES | {"S": S}, dtype, OPERATOR.passes[-1])
    with torch.compiler.set_stance("force_eager"):
        bench = Workbench.build(OPERATOR, case, CPU, seed=1)
        result = bench.comparable(bench.call(mamba3)())
        deviation(result, bench.references, OPERATOR.tolerances[dtype])


def without_the_second_input(trap, dt, **rest):
    """Euler's rule in the place of the trapezoidal one."""
    return reference(trap=torch.full_like(trap, 30.0), dt=dt, **rest)


def turned_a_position_early(angles, **rest):
    return reference(angles=angles.roll(-1, 1), **rest)


def wrong_way(angles, **rest):
    return reference(angles=-angles, **rest)


def another_gate(z, **rest):
    return reference(z=z + 0.1, **rest)


def one_wrong_element(**given):
    y = reference(**given).clone()
    y[0, 77, 1, 3] += 0.5 * y.square().mean().sqrt()
    return y


@pytest.mark.parametrize(
    "wrong",
    [without_the_second_input, turned_a_position_early, wrong_way, another_gate, one_wrong_element],
)
def test_tolerance_fails_what_is_broken(wrong):
    case = OPERATOR.case(AXES | {"P": 64, "N": 64, "A": 32}, "bf16", "forward")
    bench = Workbench.build(OPERATOR, case, CPU, seed=3)
    wide = {name: x.float() for name, x in bench.inputs.items()}
    with pytest.raises(Incorrect):
        deviation([wrong(**wide)], bench.references, OPERATOR.tolerances["bf16"])
