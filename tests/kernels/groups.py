"""Products of groups tile by tile in PyTorch: what `_grouped_hopper.multiply` computes, in fp64."""

from __future__ import annotations

import torch
from kernelmark.suite.operators.moe import product_of

BLOCK = 128


def _widened(scale, rows, columns, height):
    return scale.double().repeat_interleave(height, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def multiply(a, b, out, tiles, schedule, section, scale_a=None, scale_b=None, out_scale=None):
    assert tiles.height == schedule.height
    N, K = out.shape[-1], a.shape[-1]
    total = int(tiles.total)
    assert total <= tiles.most
    for group, row in zip(tiles.groups[:total].tolist(), tiles.rows[:total].tolist(), strict=True):
        rows = slice(row, row + tiles.height)
        where = (group, rows) if schedule.masked else (rows,)
        assert row + tiles.height <= out.shape[-2] or schedule.masked, "in the output"
        x = a[where].double()
        pieces = b[group].double().split(N)
        if schedule.scales == "block":
            x = x * _widened(scale_a[where], x.shape[0], K, 1)
            scales = scale_b[group].split(-(-N // BLOCK))
            pieces = [w * _widened(s, N, K, BLOCK) for w, s in zip(pieces, scales, strict=True)]
        elif schedule.scales == "row":
            x = x * scale_a[where].double()
            pieces = [w * scale_b[group].double() for w in pieces]
        parts = [x @ w.T for w in pieces]
        assert len(parts) == 1 + schedule.gated
        y = product_of(*parts, schedule.limit) if schedule.gated else parts[0]
        if schedule.quantized:
            blocks = torch.nn.functional.pad(y, (0, -N % BLOCK)).view(y.shape[0], -1, BLOCK)
            scale = blocks.abs().amax(-1).clamp(min=1e-30) / 448
            out_scale[where] = scale.float()
            y = (blocks / scale[..., None]).flatten(1)[:, :N].float()
        out[where] = y.to(out.dtype)
