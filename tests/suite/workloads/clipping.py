"""A trainer whose update clips, for tests of what asks for one."""

from __future__ import annotations

import torch
from kernelmark.suite.workloads._trainer import PartsTrainer


class Clipping(PartsTrainer):
    """Of an AdamW that clips, and says of which norm; by the wrong one, if it is told so."""

    def by(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def optimizer(self, device):
        adamw = super().optimizer(device)
        self.clips = 0

        def clipped(grads, max_norm, **given):
            self.clips += 1
            norm = torch.nn.utils.get_total_norm(grads)
            scale = self.by((max_norm / (norm + 1e-6)).clamp(max=1.0))
            adamw(grads=[x * scale for x in grads], **given)
            return norm

        def update(**given):
            adamw(**given)

        update.clipped = clipped
        return update
