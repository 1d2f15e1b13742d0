"""Our Newton-Schulz iterations."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.optimizer.newton_schulz import newton_schulz
from kernelmark.suite.operators.newton_schulz import reference


def close(grads: torch.Tensor, steps: int, norm: float) -> None:
    want = reference(grads.double(), steps)
    found = newton_schulz(grads, steps)
    assert found.dtype == grads.dtype
    assert found.shape == grads.shape
    assert (found.double() - want).norm() <= norm * want.norm()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


# The number of tiles of a triangle, odd sizes, one row, one column, and more rows than columns.
@pytest.mark.parametrize("shape", [(2, 33, 40), (1, 40, 17), (1, 1, 20), (2, 19, 1), (1, 49, 81)])
def test_agrees(shape):
    close(torch.randn(shape), 2, 1e-5)


def test_a_parameter_is_taken():
    """Outside of `torch.no_grad` too; what is computed of it is not differentiable."""
    grads = torch.nn.Parameter(torch.randn(1, 3, 4))
    found = newton_schulz(grads, 1)
    assert not found.requires_grad
    assert torch.equal(found, newton_schulz(grads.detach(), 1))


def test_agrees_in_bf16():
    close(torch.randn(1, 16, 30).bfloat16(), 5, 5e-2)  # the interpreter rounds to bf16 toward zero


def test_strides():
    grads = torch.randn(20, 2, 50).transpose(0, 1)[:, :17, 3:40:2]
    kept = grads.clone()
    close(grads, 2, 1e-5)
    assert torch.equal(grads, kept)


def test_each_matrix_has_its_own_norm():
    grads = torch.randn(3, 7, 20) * torch.tensor([1e-20, 1.0, 1e10])[:, None, None]
    close(grads[:1], 2, 1e-5)
    close(grads, 2, 1e-5)


def test_the_singular_values_are_near_to_1():
    spectrum = torch.linalg.svdvals(newton_schulz(torch.randn(1, 16, 40)))
    assert 0.6 < spectrum.min() < spectrum.max() < 1.3


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 4, 0)])
def test_nothing(shape):
    assert newton_schulz(torch.ones(shape)).shape == shape


def test_zeros_stay_zeros():
    assert not newton_schulz(torch.zeros(1, 5, 6)).any()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "grads must be a tensor, not float", (1.0,)),
        (TypeError, "grads has dtype torch.int32", (torch.ones(1, 2, 3, dtype=torch.int32),)),
        (ValueError, "grads has shape", (torch.ones(2, 3),)),
        (ValueError, "steps is 0, expected at least 1", (torch.ones(1, 2, 3), 0)),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        newton_schulz(*arguments)


def test_registration():
    torch.library.opcheck(torch.ops.kernelmark.newton_schulz.default, (torch.randn(1, 5, 6), 1))


@pytest.mark.parametrize("size", [1e-19, 1e-24, 1e-30])
def test_a_tiny_gradient_is_finite(size):
    grads = torch.randn(1, 16, 24) * size
    found = newton_schulz(grads, 5)
    assert found.isfinite().all()
    if size > 1e-20:
        torch.testing.assert_close(found, newton_schulz(grads / size, 5), rtol=1e-3, atol=1e-3)
