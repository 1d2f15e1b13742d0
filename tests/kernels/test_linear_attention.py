"""Our linear attention, on the interpreter: chunks of 16 there."""

import pytest
import torch
from kernelmark.kernels.state_space import ssd as shared
from kernelmark.kernels.state_space.linear_attention import linear_attention
from kernelmark.kernels.state_space.ssd import ssd
from kernelmark.suite.operators.linear_attention import OPERATOR, inputs, reference

CPU = torch.device("cpu")
SMALL = {"B": 2, "S": 37, "H": 2, "K": 16, "D": 16}


def drawn(axes=SMALL, dtype="fp32", **options):
    return inputs(OPERATOR.case(axes, dtype, "forward", **options), CPU, torch.Generator().manual_seed(0))


def raised(given):
    return {name: x.detach().double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def compare(given):
    """Results and all gradients, the initial state's too, against the reference in fp64."""
    wide, leaves = raised(given), [name for name, x in given.items() if isinstance(x, torch.Tensor)]
    given = {name: x.detach().requires_grad_() if name in leaves else x for name, x in given.items()}
    for name in leaves:
        wide[name].requires_grad_()
    got, want = (y if isinstance(y, tuple) else (y,) for y in (linear_attention(**given), reference(**wide)))
    gradients = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in got]
    differentiated = torch.autograd.grad(got, [given[x] for x in leaves], gradients)
    expected = torch.autograd.grad(want, [wide[x] for x in leaves], [x.double() for x in gradients])
    for a, b in zip((*got, *differentiated), (*want, *expected), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5 * float(b.detach().abs().max()))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])  # the interpreter has no bf16 products
@pytest.mark.parametrize(
    "axes",
    [
        SMALL,
        {"B": 1, "S": 1, "H": 1, "K": 1, "D": 1},
        {"B": 1, "S": 48, "H": 3, "K": 20, "D": 24},
        {"B": 1, "S": 18, "H": 17, "K": 16, "D": 16},
    ],
)
def test_agrees(agrees, axes, dtype):
    agrees("linear_attention", axes, dtype)


@pytest.mark.parametrize("segments", [1, 2])
def test_states(monkeypatch, segments):
    """From the initial state to the final one, in one segment and in several."""
    monkeypatch.setattr(shared, "segments", lambda programs, chunks, slots: -(-chunks // 2) if segments > 1 else 1)
    compare(drawn(states=True))
    compare(drawn(SMALL | {"S": 80, "D": 24}, states=True))


def test_wide_heads():
    compare(drawn(SMALL | {"D": 136, "B": 1, "S": 20}, states=True))


def test_it_is_ssd_with_steps_of_one():
    """Where a decay is the same everywhere, ssd with step 1 computes it too."""
    given = drawn()
    decay = torch.tensor([-0.1, -2.0])
    given["g"] = decay.expand(2, 37, 2)
    expected = ssd(given["v"], torch.ones(2, 37, 2), decay, given["k"], given["q"])
    torch.testing.assert_close(linear_attention(**given), expected)


def test_strong_decays_and_none():
    """exp(-800) a position, and no decay at all."""
    given = drawn(states=True)
    given["g"] = torch.tensor([-800.0, 0.0]).expand(2, 37, 2).contiguous()
    compare(given)


def test_strides():
    """q, k and v as parts of one projection, gates with heads outside."""
    given = drawn()
    parts = torch.randn(2, 37, 2, 16 * 3).split(16, -1)
    given |= dict(zip("qkv", parts, strict=True)) | {"g": -torch.rand(2, 2, 37).transpose(1, 2)}
    compare(given)


def test_nothing():
    given = drawn(states=True)
    none = {name: given[name][:, :0] for name in "qkvg"}
    o, last = linear_attention(**given | none)
    assert o.shape == (2, 0, 2, 16)
    assert torch.equal(last, given["initial_state"])


Q, V, G = torch.ones(2, 5, 4, 8), torch.ones(2, 5, 4, 6), torch.ones(2, 5, 4)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "v must be a tensor, not NoneType", {"v": None}),
        (ValueError, r"v has shape \(5, 4, 6\), expected 4 dimensions", {"v": V[0]}),
        (TypeError, "q has dtype torch.float16", {"q": Q.half()}),
        (ValueError, r"q has shape \(2, 5, 3, 8\), expected \(2, 5, 4, 8\)", {"q": Q[:, :, :3]}),
        (ValueError, "q has key dimension 257, expected 1 to 256", {"q": torch.ones(2, 5, 4, 257)}),
        (ValueError, r"k has shape \(2, 5, 4, 7\), expected \(2, 5, 4, 8\)", {"k": Q[..., :7]}),
        (TypeError, "k has dtype torch.bfloat16", {"k": Q.bfloat16()}),
        (ValueError, r"g has shape \(2, 5, 3\)", {"g": G[..., :3]}),
        (
            ValueError,
            r"initial_state has shape \(2, 4, 6, 8\), expected",
            {"initial_state": torch.ones(2, 4, 6, 8)},
        ),
        (ValueError, "initial_state is on meta", {"initial_state": torch.ones(2, 4, 8, 6, device="meta")}),
    ],
)
def test_wrong_arguments(error, message, change):
    with pytest.raises(error, match=message):
        linear_attention(**{"q": Q, "k": Q, "v": V, "g": G} | change)


@pytest.mark.parametrize("states", [False, True])
def test_registration(states):
    given = drawn(SMALL | {"S": 20}, states=states)
    v, g, k, q = (given[name].requires_grad_() for name in "vgkq")
    state = given["initial_state"]
    state = None if state is None else state.mT.contiguous().requires_grad_()
    torch.library.opcheck(torch.ops.kernelmark.ssd.default, (v, g, None, k, q, None, None, state, None, False))


@pytest.mark.parametrize("reset", [float("-inf"), -1e9])
def test_a_decay_of_nothing_begins_anew(reset):
    """With gradients: what comes before has none in what comes behind."""
    given = drawn()
    given["g"] = given["g"].clone()
    given["g"][0, 3] = given["g"][1, 20] = reset
    given = {name: x.detach().requires_grad_() if name in "qkv" else x for name, x in given.items()}
    o = linear_attention(**given)
    o = o[0] if isinstance(o, tuple) else o
    behind = {name: x.detach()[:1, 3:] if name in "qkvg" else x for name, x in given.items()}
    behind["g"] = behind["g"].clone()
    behind["g"][0, 0] = 0.0
    alone = linear_attention(**behind)
    torch.testing.assert_close(o[:1, 3:], alone[0] if isinstance(alone, tuple) else alone, rtol=1e-3, atol=1e-4)
    o[0, 3:].sum().backward()
    assert not given["k"].grad[0, :3].any()
    assert given["k"].grad.isfinite().all()
