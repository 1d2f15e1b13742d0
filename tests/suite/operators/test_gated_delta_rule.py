"""The gated delta rule's reference against the recurrence as written, and PyTorch's implementation against it."""

from __future__ import annotations

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.gated_delta_rule import OPERATOR, reference

CPU = torch.device("cpu")


def recurrence(q, k, v, g, beta, initial_state, return_final_state):
    """Position after position."""
    B, S, H, K = q.shape
    state = torch.zeros(B, H, K, v.shape[-1], dtype=v.dtype) if initial_state is None else initial_state
    rows = []
    for t in range(S):
        state = state * g[:, t, :, None, None].exp()
        held = (k[:, t, :, :, None] * state).sum(2)
        taken = beta[:, t, :, None] * (v[:, t] - held)
        state = state + k[:, t, :, :, None] * taken[:, :, None]
        rows.append((q[:, t, :, :, None] * state).sum(2))
    o = torch.stack(rows, 1)
    return (o, state) if return_final_state else o


@pytest.mark.parametrize(("S", "states"), [(1, False), (64, True), (150, True), (65, False)])
def test_the_reference_is_the_recurrence(S, states):
    case = OPERATOR.case({"B": 2, "S": S, "H": 2, "K": 8, "D": 5}, "fp32", "forward", states=states)
    given = OPERATOR.built(case, CPU, torch.Generator().manual_seed(S))
    wide = {x: y.double().requires_grad_() if isinstance(y, torch.Tensor) else y for x, y in given.items()}
    leaves = [x for x in wide.values() if isinstance(x, torch.Tensor)]
    got, want = (y if isinstance(y, tuple) else (y,) for y in (reference(**wide), recurrence(**wide)))
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(sum(x.square().sum() for x in y), leaves) for y in (got, want))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("states", [False, True])
def test_pytorchs_agrees(pass_, states):
    case = OPERATOR.case({"B": 2, "S": 100, "H": 2, "K": 16, "D": 8}, "fp32", pass_, states=states)
    bench = Workbench.build(OPERATOR, case, CPU, 3)
    call = bench.call(IMPLEMENTATIONS["gated_delta_rule"]["torch"](case))
    deviation(bench.comparable(call()), bench.references, OPERATOR.tolerances["fp32"])


def test_costs():
    axes = {"B": 2, "S": 100, "H": 3, "K": 8, "D": 16}
    case = OPERATOR.case(axes, "bf16", "forward", states=True)
    assert case.flops == 3 * 2 * 2 * 100 * 3 * 8 * 16
    assert case.bytes == 2 * 100 * 3 * ((2 * 8 + 2 * 16 + 1) * 2 + 4) + 2 * (2 * 3 * 8 * 16) * 4
