"""Mamba-3's recurrence on a CPU: chunks as matrix products, compiled by Inductor, between them a loop."""

from __future__ import annotations

import math

import torch

CHUNK = 64


def mamba3(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    adt: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels/state_space/mamba3.py`: y (B, S, H, P) in x's dtype."""
    chunks = -(-x.shape[1] // CHUNK)
    # A sum over all positions: in fp32 it would lose what tells neighbours apart.
    rates = torch.tanh(angles.double())[:, :, None] * dt.double()[..., None]
    turns = (rates.cumsum(1).mul(0.5).frac() * 2 * math.pi).float()
    read, added, kept, inner, carried = _chunks(x, B, C, dt, adt, trap, turns, B_bias, C_bias)
    state = torch.zeros_like(added[:, 0])
    entries = []
    for chunk in range(chunks):
        entries.append(state)
        state = torch.addcmul(added[:, chunk], state, kept[:, chunk, :, None, None])
    return _join(read, torch.stack(entries, 1), inner, carried, x, D, z)


def _cut(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H, …) to (B, chunks, H, CHUNK, …) in fp32, zeros behind."""
    wide = torch.nn.functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK))
    return wide.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).transpose(2, 3)


def _turned(x: torch.Tensor, bias: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """(B, S, H, N) of B or C (B, S, G, N) with a head's bias, the first pairs of neighbours turned."""
    A = turns.shape[3]
    wide = x.float().repeat_interleave(turns.shape[2] // x.shape[2], 2) + bias.float()
    a, b = wide[..., : 2 * A].unflatten(-1, (A, 2)).unbind(-1)
    cos, sin = turns.cos(), turns.sin()
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((pairs.flatten(-2), wide[..., 2 * A :]), -1)


@torch.compile(dynamic=False)
def _chunks(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    adt: torch.Tensor,
    trap: torch.Tensor,
    turns: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """C turned, and of each chunk what it adds to the state, what it keeps of it, its own part of y, and each
    position's share of the state before the chunk.
    """
    keys, queries = _cut(_turned(B, B_bias, turns)), _cut(_turned(C, C_bias, turns))
    share = torch.sigmoid(trap.float())
    now = share * dt.float()
    after = torch.nn.functional.pad(((1 - share) * dt.float())[:, 1:], (0, 0, 0, 1))
    # No logarithm below -104, which is a factor of 0 in fp32: sums with -inf among them have no differences.
    given, logs, own, weight = _cut(x), _cut(adt).clamp(min=-104.0).cumsum(-1), _cut(now), _cut(now + after)
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(-1)
    factor = (logs[..., :, None] - logs[..., None, :]).masked_fill(~earlier, float("-inf")).exp()
    factor = factor * weight[..., None, :] + torch.diag_embed(own)
    inner = (queries @ keys.mT * factor) @ given
    whole = logs[..., -1:]
    added = (keys * ((whole - logs).exp() * weight)[..., None]).mT @ given
    return queries, added, whole.squeeze(-1).exp(), inner, logs.exp()


@torch.compile(dynamic=False)
def _join(
    read: torch.Tensor,
    entries: torch.Tensor,
    inner: torch.Tensor,
    carried: torch.Tensor,
    x: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
) -> torch.Tensor:
    """y (B, S, H, P) from the chunks' own parts and the states before them (B, chunks, H, N, P)."""
    y = inner + read @ entries * carried[..., None]
    y = y.transpose(2, 3).flatten(1, 2)[:, : x.shape[1]]
    if D is not None:
        y = y + x.float() * D.float()[:, None]
    if z is not None:
        y = y * torch.nn.functional.silu(z.float())
    return y.to(x.dtype)
