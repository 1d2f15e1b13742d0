"""attention_window through Triton's interpreter; its kernels are tested in test_attention.py."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention.attention import attention
from kernelmark.kernels.attention.attention_window import attention_window


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("W", [2, 24, 100])
def test_agrees(agrees, mask, W):
    agrees("attention_window", {"B": 1, "H": 2, "Hkv": 1, "S": 90, "D": 16, "W": W}, mask=mask)


def test_it_is_attention():
    q, k, v = (torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert torch.equal(attention_window(q, k, v, "full", 7), attention(q, k, v, "full", window=7))


def test_errors():
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match="window is 0"):
        attention_window(q, q, q, "causal", 0)
