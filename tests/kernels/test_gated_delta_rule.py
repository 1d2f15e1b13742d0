"""Our gated delta rule through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels.state_space.gated_delta_rule import gated_delta_rule
from kernelmark.suite.operators.gated_delta_rule import OPERATOR, reference
from torch._subclasses.fake_tensor import FakeTensorMode


def drawn(B=1, S=70, H=2, K=16, D=16, dtype="fp32", **options):
    case = OPERATOR.case({"B": B, "S": S, "H": H, "K": K, "D": D}, dtype, "forward", **options)
    return OPERATOR.built(case, torch.device("cpu"), torch.Generator().manual_seed(S + K))


def agree(given, dtype="fp32"):
    wide = {x: y.double() if isinstance(y, torch.Tensor) else y for x, y in given.items()}
    got, want = (y if isinstance(y, tuple) else (y,) for y in (gated_delta_rule(**given), reference(**wide)))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= OPERATOR.tolerances[dtype].norm * b.norm()


@settings(max_examples=4)
@given(
    S=st.integers(1, 130),
    K=st.integers(1, 40),
    D=st.integers(1, 70),
    B=st.integers(1, 2),
    states=st.booleans(),
)
def test_any_shape(S, K, D, B, states):
    agree(drawn(B, S, 1, K, D, states=states))


def test_fp16():
    agree(drawn(S=130, K=32, D=32, dtype="fp16", states=True), "fp16")


def test_views():
    """Views of one projection, and gates of heads before tokens."""
    given = drawn(B=2, S=70, H=2)
    whole = torch.cat([given[x] for x in "qkv"], 2)
    given |= dict(zip("qkv", whole.split(2, 2), strict=True))
    given["g"] = given["g"].transpose(1, 2).contiguous().transpose(1, 2)
    given["beta"] = torch.stack((given["beta"],) * 2, -1)[..., 0]
    agree(given)


def test_a_state_continues_a_sequence():
    given = drawn(S=100, states=True)
    whole = gated_delta_rule(**given)
    cut = ("q", "k", "v", "g", "beta")
    first, state = gated_delta_rule(**given | {x: given[x][:, :37] for x in cut})
    rest, last = gated_delta_rule(**given | {x: given[x][:, 37:] for x in cut} | {"initial_state": state})
    torch.testing.assert_close(torch.cat((first, rest), 1), whole[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, whole[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [{"S": 0}, {"B": 0}, {"H": 0}], ids=str)
def test_empty(axes):
    given = drawn(**axes, states=True)
    o, last = gated_delta_rule(**given)
    assert o.shape == given["v"].shape
    assert torch.equal(last, given["initial_state"])


def test_keys_that_repeat_are_written_over():
    """With rates of 1 and no decay a key has the last value that was given to it."""
    given = drawn(S=66, H=1, K=2, D=4)
    k = torch.zeros(1, 66, 1, 2)
    k[0, ::2, 0, 0] = k[0, 1::2, 0, 1] = 1
    ones = torch.ones(1, 66, 1)
    o = gated_delta_rule(k, k, given["v"], 0 * ones, ones)
    torch.testing.assert_close(o, given["v"])


def test_a_gradient_is_refused():
    given = drawn()
    given["v"].requires_grad_()
    with pytest.raises(NotImplementedError, match="forward pass only"):
        gated_delta_rule(**given)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's own forward mode uses
def test_forward_mode_is_refused():
    """It would give a derivative of zero without a word."""
    given = drawn(S=4)
    with torch.autograd.forward_ad.dual_level():
        given["v"] = torch.autograd.forward_ad.make_dual(given["v"], torch.ones_like(given["v"]))
        with pytest.raises(NotImplementedError, match="gated_delta_rule has no derivative in forward mode"):
            gated_delta_rule(**given)


@pytest.mark.parametrize("states", [False, True])
def test_fake_tensors(states):
    given = drawn(S=4, D=3, states=states)
    real = gated_delta_rule(**given)
    with FakeTensorMode() as mode:
        fake = {x: mode.from_tensor(y) if isinstance(y, torch.Tensor) else y for x, y in given.items()}
        found = gated_delta_rule(**fake)
    real, found = (x if states else (x,) for x in (real, found))
    assert [(x.shape, x.stride(), x.dtype) for x in found] == [(x.shape, x.stride(), x.dtype) for x in real]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 4, 2, 257)}, ValueError, "key dimension 257"),
        ({"k": torch.zeros(1, 4, 2, 15)}, ValueError, r"k has shape \(1, 4, 2, 15\)"),
        ({"beta": torch.zeros(1, 4, 3)}, ValueError, r"beta has shape \(1, 4, 3\)"),
        ({"q": torch.zeros(1, 4, 2, 16).half()}, TypeError, "q has dtype torch.float16"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        gated_delta_rule(**(drawn(S=4) | change))


def test_a_decay_of_nothing_begins_anew():
    given_, alone = drawn(S=40), drawn(S=40)
    given_["g"] = given_["g"].clone()
    given_["g"][0, 20] = float("-inf")
    behind = {
        name: x[:, 20:] if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[1] == 40 else x
        for name, x in alone.items()
    }
    o, want = (
        y[0] if isinstance(y, tuple) else y for y in (gated_delta_rule(**given_), gated_delta_rule(**behind))
    )
    torch.testing.assert_close(o[:, 20:], want, rtol=1e-4, atol=1e-5)
