"""Our products with 2:4 weights."""

import pytest
import torch
from kernelmark.kernels.matmul.sparse24_fp8_matmul import sparse24_fp8_matmul
from kernelmark.kernels.matmul.sparse24_matmul import expanded, pack24, sparse24_matmul
from kernelmark.suite.operators import sparse24_fp8_matmul as sparse24_fp8
from kernelmark.suite.operators.sparse24_matmul import pruned


@pytest.mark.parametrize(
    ("axes", "dtype"), [({"M": 5, "N": 40, "K": 96}, "bf16"), ({"M": 17, "N": 33, "K": 72}, "fp16")]
)
def test_agrees(agrees, axes, dtype):
    agrees("sparse24_matmul", axes, dtype)


def test_agrees_with_many_rows(agrees):
    agrees("sparse24_matmul", {"M": 65, "N": 24, "K": 40}, "bf16")


def test_dense_form_is_made_where_it_is_not_given():
    x, (weight, values, positions) = torch.randn(65, 40).half(), pruned(torch.randn(24, 40).half())
    assert torch.equal(sparse24_matmul(x, values, positions), sparse24_matmul(x, values, positions, weight))


def test_gradients_of_packed_values():
    """Those of the dense weight at the places of its numbers."""
    x, (weight, values, positions) = torch.randn(9, 40).half(), pruned(torch.randn(24, 40).half())
    dy = torch.randn(9, 24).half()
    values.requires_grad_()
    (picked,) = torch.autograd.grad(sparse24_matmul(x, values, positions), values, dy)
    weight.requires_grad_()
    (dense,) = torch.autograd.grad(sparse24_matmul(x, values.detach(), positions, weight), weight, dy)
    assert torch.equal(expanded(picked, positions), dense)
    assert dense[weight == 0].eq(0).all()


def test_agrees_in_8_bits(agrees):
    agrees("sparse24_fp8_matmul", {"M": 17, "N": 40, "K": 136}, "e4m3")


def test_dense_form_in_8_bits_is_made_where_it_is_not_given():
    case = sparse24_fp8.OPERATOR.case({"M": 5, "N": 24, "K": 40}, "e4m3", "forward")
    given = sparse24_fp8.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    want = sparse24_fp8_matmul(**given)
    assert torch.equal(sparse24_fp8_matmul(**given | {"weight": None}), want)


def test_packing():
    """The two largest of four, of equal ones the first; what is 2:4 already comes back whole."""
    weight = torch.randint(-2, 3, (40, 96)).bfloat16()
    dense, values, positions = pruned(weight)
    for given in (weight, dense):
        got = pack24(given)
        x = torch.eye(96)[:64].bfloat16()
        assert torch.equal(sparse24_matmul(x, *got), dense.T[:64])
    assert all(torch.equal(a, b) for a, b in zip(pack24(weight), (values, positions), strict=True))


def test_says_what_is_wrong():
    x, values, positions = (
        torch.zeros(2, 16).half(),
        torch.zeros(3, 8).half(),
        torch.zeros(3, 2, dtype=torch.uint8),
    )
    for change, message in (
        ({"x": x[:, :12]}, "expected a multiple of 8 columns"),
        ({"values": values[:, :4]}, r"values has shape \(3, 4\), expected \(3, 8\)"),
        ({"positions": positions[:, :1]}, r"positions has shape \(3, 1\), expected \(3, 2\)"),
        ({"weight": x}, r"weight has shape \(2, 16\), expected \(3, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse24_matmul(**{"x": x, "values": values, "positions": positions} | change)
