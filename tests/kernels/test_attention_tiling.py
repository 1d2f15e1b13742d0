"""When the portable kernels of attention load by the tensor memory accelerator."""

from __future__ import annotations

import torch
from kernelmark.kernels.attention import _tiling as module


def test_descriptors_are_for_long_sequences_with_even_strides(monkeypatch):
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype)

    assert module.describable(empty(1, 2, 1024, 8))
    assert module.describable(empty(1, 1024, 2, 16).transpose(1, 2))
    assert not module.describable(empty(1, 2, 1024, 8, dtype=torch.float32))
    assert not module.describable(empty(1, 2, 1023, 8))
    assert not module.describable(empty(1, 2, 1024, 9))
    assert not module.describable(empty(1, 2, 1024, 17)[..., 1:])
    assert not module.describable(empty(1, 1, 1024, 16).expand(1, 4, 1024, 16))
    monkeypatch.setattr(module, "capability", lambda device: (8, 0))
    assert not module.describable(empty(1, 2, 1024, 8))
