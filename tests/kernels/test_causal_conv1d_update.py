"""Our decode step of a causal convolution."""

import pytest
import torch
from kernelmark.kernels.convolution import causal_conv1d_update as module
from kernelmark.kernels.convolution.causal_conv1d import causal_conv1d
from kernelmark.kernels.convolution.causal_conv1d_update import causal_conv1d_update
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.operators.causal_conv1d_update import OPERATOR, reference


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("axes", [{"B": 3, "D": 5, "W": 4}, {"B": 2, "D": 600, "W": 4}, {"B": 2, "D": 7, "W": 2}])
def test_agrees(axes, activation, dtype):
    case = OPERATOR.case(axes, dtype, "forward", activation=activation)
    inputs = OPERATOR.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    expected = reference(
        **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()},
    )
    y = causal_conv1d_update(**inputs)
    deviation([y, inputs["conv_state"]], list(expected), OPERATOR.tolerances[dtype])


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("length", [3, 4, 6])
@pytest.mark.parametrize("turned", [False, True])
def test_steps_are_the_convolution(length, W, turned):
    """Token by token, with a state of any length and strides, the values are those of the whole sequence."""
    x, weight, bias = torch.randn(2, 5, 9), torch.randn(5, W), torch.randn(5)
    state = torch.zeros(2, length, 5).transpose(1, 2) if turned else torch.zeros(2, 5, length)
    steps = [causal_conv1d_update(x[..., s], state, weight, bias) for s in range(9)]
    torch.testing.assert_close(torch.stack(steps, -1), causal_conv1d(x, weight, bias))
    assert torch.equal(state, x[..., -length:])


@pytest.mark.parametrize("W", [3, 4])
@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_sequences_of_a_program(sequences, W):
    x, state, weight, bias = torch.randn(5, 70), torch.randn(5, 70, W), torch.randn(70, W), torch.randn(70)
    want = reference(x, state.clone(), weight, bias, "silu")
    y = module._launch(x, state, weight, bias, True, block=64, sequences=sequences)
    torch.testing.assert_close((y, state), tuple(want), rtol=1e-5, atol=1e-5)


def test_without_bias_and_empty():
    state = torch.zeros(2, 3, 4)
    assert (
        causal_conv1d_update(torch.ones(2, 3), state, torch.ones(3, 4), None, "none").tolist() == [[1.0] * 3] * 2
    )
    assert causal_conv1d_update(torch.ones(0, 3), torch.zeros(0, 3, 4), torch.ones(3, 4)).shape == (0, 3)


X, STATE, WEIGHT = torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(3, 4)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "weight has 5 taps", (X, STATE, torch.ones(3, 5))),
        (ValueError, "conv_state holds 2 tokens, expected 3 or more", (X, STATE[..., :2], WEIGHT)),
        (ValueError, r"conv_state has shape \(2, 4, 4\)", (X, torch.ones(2, 4, 4), WEIGHT)),
        (TypeError, "conv_state has dtype torch.float16", (X, STATE.half(), WEIGHT)),
        (ValueError, r"bias has shape \(2,\)", (X, STATE, WEIGHT, torch.ones(2))),
        (ValueError, "activation is 'relu'", (X, STATE, WEIGHT, None, "relu")),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        causal_conv1d_update(*arguments)


def test_registration():
    arguments = torch.randn(2, 3), torch.randn(2, 3, 4), torch.randn(3, 4), torch.randn(3), True
    torch.library.opcheck(torch.ops.kernelmark.causal_conv1d_update.default, arguments)
