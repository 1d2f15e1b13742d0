"""Cross-entropy on a CPU, as its functions say it: what Inductor makes of them is Inductor's."""

from __future__ import annotations

import pytest
import torch

from .test_attention_on_cpu import loaded


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-3)])
def test_agrees(smoothing, z_loss):
    logits, target = torch.randn(5, 70, requires_grad=True), torch.tensor([0, -100, 8, 69, 3])
    with torch.compiler.set_stance("force_eager"):
        loss = loaded("cross_entropy")(logits, target, smoothing, z_loss)
    wide = logits.detach().double().requires_grad_()
    plain = torch.nn.functional.cross_entropy(wide, target, label_smoothing=smoothing)
    plain = plain + z_loss * wide.logsumexp(-1)[target != -100].square().mean()
    torch.testing.assert_close(loss.double(), plain, rtol=1e-6, atol=1e-6)
    got, wanted = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(plain, wide)[0]
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-7)


def test_a_common_offset_costs_no_digits():
    """Neither losses nor gradients change where all logits are larger; nor those of a linear layer's."""
    plain, target = (torch.randn(5, 70) * 16).round() / 8, torch.arange(5)
    raised = (plain + 2**20).requires_grad_()  # exact: fp32 has eighths there
    plain = plain.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(plain, target)
    with torch.compiler.set_stance("force_eager"):
        loss = loaded("cross_entropy")(raised, target)
        of_layer = loaded("fused_linear_cross_entropy")(torch.eye(5), raised.detach().t().contiguous(), target)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_layer.double(), wanted, rtol=1e-6, atol=1e-6)
    got = torch.autograd.grad(loss, raised)[0]
    torch.testing.assert_close(got.double(), torch.autograd.grad(wanted, plain)[0], rtol=1e-5, atol=1e-7)
