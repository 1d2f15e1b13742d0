"""Attention and products of 8 bits on a CPU against the operators' references in fp64."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

import pytest
import torch
from kernelmark.suite.measure.verify import deviation, flat
from kernelmark.suite.operators import fp8_matmul

CPU = torch.device("cpu")
DENSE = {"B": 2, "H": 4, "Hkv": 2, "S": 200, "D": 32}


def loaded(name: str) -> Callable[..., torch.Tensor]:
    """The CPU kernel of that name."""
    with warnings.catch_warnings():
        # Importing Inductor warns of torch.jit, which it still uses itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(importlib.import_module(f"kernelmark.kernels.cpu.{name}"), name)


def compare(name: str, axes: dict[str, int], dtype: str = "fp32", pass_: str = "forward", **options) -> None:
    operator = importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR
    kernel = loaded(name)
    case = operator.case(axes, dtype, pass_, **options)
    inputs = operator.inputs(case, CPU, torch.Generator().manual_seed(1))
    differentiated = operator.gradients if pass_ == "backward" else ()
    leaves = {x: inputs[x].requires_grad_() for x in differentiated if x in inputs}  # optional ones are left out
    wide = {
        x: y.detach().double().requires_grad_(x in leaves)
        if isinstance(y, torch.Tensor) and y.is_floating_point()
        else y
        for x, y in inputs.items()
    }
    with torch.compiler.set_stance("force_eager"):
        result, expected = kernel(**inputs), operator.reference(**wide)
    given = flat(operator.results(result, inputs) if operator.results else result)
    deviation([x.detach() for x in given], [x.detach() for x in flat(expected)], operator.tolerances[dtype])
    if leaves:
        dy = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
        got = torch.autograd.grad(result, list(leaves.values()), dy)
        wanted = torch.autograd.grad(expected, [wide[x] for x in leaves], dy.double())
        deviation(got, wanted, operator.tolerances[dtype])


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_dense(mask, pass_):
    compare("attention", DENSE, pass_=pass_, mask=mask)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [1, 30, 128, 500])
def test_window(mask, window):
    """Narrower than a piece, as wide, and wider than the sequence."""
    compare("attention_window", DENSE | {"S": 300, "W": window}, mask=mask)


def test_gradients_of_a_window():
    compare("attention_window", DENSE | {"S": 300, "W": 40}, pass_="backward", mask="causal")


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("new", [1, 3])
def test_decode(page, new):
    axes = {"B": 3, "Sq": new, "H": 4, "Hkv": 2, "S": 50, "D": 32}
    compare("attention_decode", axes, page=page, lengths="mixed")


def test_a_new_token_that_sees_nothing():
    from kernelmark.kernels.cpu.attention_decode import attention_decode

    q, cache = torch.randn(2, 2, 4, 8), torch.randn(2, 6, 2, 8)
    out = attention_decode(q, cache, cache, None, torch.tensor([0, 1], dtype=torch.int32))
    assert not out[0].any()
    assert not out[1, 0].any()
    torch.testing.assert_close(out[1, 1], cache[1, 0].repeat_interleave(2, 0))


def test_places_beyond_a_length_are_not_read_of_latent_pages():
    kernel = loaded("attention_mla_decode")
    q, cache = torch.randn(2, 1, 2, 20), torch.randn(3, 16, 20)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    table = torch.tensor([[2, 0, -7], [1, 1 << 28, 1 << 28]], dtype=torch.int32)
    out = kernel(q, cache, table, lengths, 16, 0.3)
    torch.testing.assert_close(out, kernel(q, cache, table.clamp(0, 2), lengths, 16, 0.3))
    keys = cache[1, :3]
    wanted = torch.softmax(q[1, 0] @ keys.T * 0.3, -1) @ keys[:, :16]
    torch.testing.assert_close(out[1, 0], wanted)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_eight_bits(mask):
    compare("attention_fp8", DENSE | {"S": 100}, "e4m3", mask=mask)


@pytest.mark.parametrize("recipe", ["block", "row", "tensor", "group", "tile"])
def test_a_product_of_eight_bits(recipe):
    """Two and a half blocks of columns."""
    compare("fp8_matmul", {"M": 20, "N": 200, "K": 320}, "e4m3", recipe=recipe)


def test_a_product_of_eight_bits_adds_a_bias():
    kernel, given = loaded("fp8_matmul"), fp8_matmul.OPERATOR
    case = given.case({"M": 20, "N": 200, "K": 320}, "e4m3", "forward")
    inputs = given.inputs(case, CPU, torch.Generator().manual_seed(1))
    bias = torch.arange(200).bfloat16()
    plain, biased = kernel(**inputs), kernel(**inputs, bias=bias)
    assert biased.dtype == plain.dtype
    torch.testing.assert_close(biased.double(), plain.double() + bias, rtol=2**-7, atol=0.1)


def test_a_layer_in_8_bit_integers():
    compare("int8_linear", {"M": 30, "N": 50, "K": 70}, "int8")


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("pattern", ["static", "dynamic", "learned"])
def test_blocks(mask, pattern):
    """Five blocks, the last of 38 tokens."""
    compare("attention_sparse", DENSE | {"S": 550}, mask=mask, pattern=pattern, sparsity=50)


def test_a_row_without_blocks_gives_zeros():
    from kernelmark.kernels.cpu.attention_sparse import attention_sparse

    x = torch.randn(1, 2, 256, 16)
    blocks = torch.tensor([[[True, False], [False, False]]])
    out = attention_sparse(x, x, x, "full", 90, blocks, None, None)
    assert isinstance(out, torch.Tensor)
    assert out[:, :, :128].any()
    assert not out[:, :, 128:].any()
