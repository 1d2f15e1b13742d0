"""Our decode step of a state-space model."""

import pytest
import torch
from kernelmark.kernels.state_space.selective_state_update import selective_state_update
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.operators.selective_state_update import OPERATOR, reference

AXES = {"B": 3, "H": 4, "P": 6, "N": 5, "G": 2}


def build(axes=AXES, dtype="fp32", **options):
    case = OPERATOR.case(axes, dtype, "forward", **options)
    return OPERATOR.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))


def expected(inputs):
    wide = {
        k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in inputs.items()
    }
    return list(reference(**wide))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("state", ["fp32", "same"])
@pytest.mark.parametrize("form", ["head", "channel"])
@pytest.mark.parametrize("axes", [AXES, {"B": 2, "H": 2, "P": 64, "N": 128, "G": 1}])
def test_agrees(axes, form, state, dtype):
    inputs = build(axes, dtype, form=form, state=state)
    wanted = expected(inputs)
    y = selective_state_update(**inputs)
    deviation([y, inputs["state"]], wanted, OPERATOR.tolerances[dtype])


@pytest.mark.parametrize("form", ["head", "channel"])
def test_strides(form):
    """The state is updated where it lies; everything else may be a part of something larger."""
    inputs = build(form=form)
    whole = torch.randn(3, 5, 4, 6)
    inputs["state"] = whole.permute(0, 2, 3, 1)
    inputs["x"] = torch.randn(3, 40)[:, 3:27].view(3, 4, 6)
    inputs["B"] = torch.randn(3, 5, 2).transpose(1, 2)
    before = whole.clone()
    wanted = expected(inputs)
    y = selective_state_update(**inputs)
    assert not torch.equal(whole, before)
    deviation([y, whole.permute(0, 2, 3, 1)], wanted, OPERATOR.tolerances["fp32"])


def test_without_heads_and_what_is_optional():
    state, x, dt = torch.randn(3, 6, 5), torch.randn(3, 6), torch.rand(3, 6)
    A, B, C = -torch.rand(6, 5), torch.randn(3, 5), torch.randn(3, 5)
    after = state * (dt[..., None] * A).exp() + (dt * x)[..., None] * B[:, None]
    y = selective_state_update(state, x, dt, A, B, C)
    torch.testing.assert_close(state, after)
    torch.testing.assert_close(y, (after * C[:, None]).sum(-1))


def test_slots():
    """Sequences find their states by slot; one without a slot is left out."""
    inputs = build()
    pool = torch.randn(7, 4, 6, 5)
    slots = torch.tensor([5, -1, 2])
    wanted_y, wanted = expected(inputs | {"state": pool[slots.clamp(min=0)]})
    before = pool.clone()
    y = selective_state_update(**inputs | {"state": pool}, slots=slots)
    torch.testing.assert_close(y[[0, 2]].double(), wanted_y[[0, 2]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool[[5, 2]].double(), wanted[[0, 2]], rtol=1e-5, atol=1e-5)
    assert not y[1].any()
    assert torch.equal(pool[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])


def test_extreme_steps():
    """A step of e⁻³⁰ still counts, one of 1e4 forgets everything, and nothing overflows."""
    inputs = build()
    inputs["dt_bias"] = torch.tensor([-30.0, -60.0, 0.0, 1e4])
    inputs["dt"] = torch.zeros(3, 4)
    inputs["state"] = torch.zeros(3, 4, 6, 5)
    inputs["D"] = torch.zeros(4)
    wanted = expected(inputs)
    y = selective_state_update(**inputs)
    for h in range(3):
        torch.testing.assert_close(inputs["state"][:, h].double(), wanted[1][:, h], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(y.double(), wanted[0], rtol=1e-5, atol=1e-2)


def test_empty():
    assert selective_state_update(**build({**AXES, "B": 0})).shape == (0, 4, 6)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "state must be a tensor", {"state": None}),
        (ValueError, r"x has shape \(3, 4, 7\), expected \(3, 4, 6\)", {"x": torch.ones(3, 4, 7)}),
        (ValueError, r"A has shape \(4, 6, 5\), expected \(4,\)", {"A": torch.ones(4, 6, 5)}),
        (ValueError, "B has 3 groups, which do not divide the 4 heads", {"B": torch.ones(3, 3, 5)}),
        (ValueError, r"C has shape \(3, 2, 4\)", {"C": torch.ones(3, 2, 4)}),
        (ValueError, r"D has shape \(6,\)", {"D": torch.ones(6)}),
        (TypeError, "slots has dtype torch.float32", {"slots": torch.ones(3)}),
        (ValueError, "dt_bias is on meta", {"dt_bias": torch.ones(4, device="meta")}),
    ],
)
def test_wrong_arguments(error, message, change):
    with pytest.raises(error, match=message):
        selective_state_update(**build() | change)


@pytest.mark.parametrize("form", ["head", "channel"])
def test_registration(form):
    inputs = build(form=form)
    torch.library.opcheck(torch.ops.kernelmark.selective_state_update.default, (*inputs.values(), None))


def test_compiled():
    inputs = build()
    other = inputs | {"state": inputs["state"].clone()}
    compiled = torch.compile(
        lambda **given: selective_state_update(**given) + 1, backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(**inputs), selective_state_update(**other) + 1)
    torch.testing.assert_close(inputs["state"], other["state"])
