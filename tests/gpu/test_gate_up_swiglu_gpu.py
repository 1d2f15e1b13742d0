"""Gate and up in one product on a GPU against fp64: every tile, sizes that none divides, equal bits each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernelmark.kernels.matmul import _dispatch as dispatch
from kernelmark.kernels.matmul.gate_up_swiglu import gate_up_swiglu

CUDA = torch.device("cuda")
CLOSE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-3}
LAUNCHES = 50


def drawn(M, N, K, dtype):
    torch.manual_seed(M + N + K)
    weights = ((torch.randn(N, K, device=CUDA) * K**-0.5).to(dtype) for _ in range(2))
    return torch.randn(M, K, device=CUDA).to(dtype), *weights


def wide(x, gate, up):
    """(the gated product, gate, up)."""
    first, second = (x.double() @ weight.double().t() for weight in (gate, up))
    return first * first.sigmoid() * second, first, second


def near(found, want, dtype):
    assert (found.double() - want).norm() <= CLOSE[dtype] * want.norm()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(2047, 11008, 4096), (1000, 1001, 999), (17, 33, 70), (1, 4104, 512), (130, 264, 72)]
)
def test_against_fp64(M, N, K, dtype):
    given = drawn(M, N, K, dtype)
    plain = gate_up_swiglu(*given)
    assert all(torch.equal(gate_up_swiglu(*given), plain) for _ in range(LAUNCHES))
    leaves = [x.clone().requires_grad_() for x in given]
    found = gate_up_swiglu(*leaves)
    assert torch.equal(found, plain)
    raised = [x.double().requires_grad_() for x in given]
    want = wide(*raised)[0]
    near(found.detach(), want.detach(), dtype)
    dy = torch.randn(M, N, device=CUDA).to(dtype)
    gradients = torch.autograd.grad(found, leaves, dy)
    for got, expected in zip(gradients, torch.autograd.grad(want, raised, dy.double()), strict=True):
        near(got, expected, dtype)


@pytest.mark.parametrize("schedule", dispatch.DUAL)
@pytest.mark.parametrize("preactivations", [False, True])
def test_every_tile(schedule, preactivations):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    from kernelmark.kernels.matmul import _dual_hopper as hopper

    given = drawn(777, 1208, 328, torch.bfloat16)
    outputs = tuple(torch.full((777, 1208), torch.nan, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    hopper.multiply(*given, outputs, replace(schedule, preactivations=preactivations), dispatch.SECTION)
    for got, want in zip(outputs, wide(*given)[: 3 if preactivations else 1], strict=False):
        near(got, want, torch.bfloat16)
    if not preactivations:
        assert all(y.isnan().all() for y in outputs[1:])
