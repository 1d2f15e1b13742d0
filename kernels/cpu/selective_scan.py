"""The selective scan on a CPU: in chunks of tokens, each by log₂ steps of doubling, fused by Inductor.

Composition of (decay, state) pairs is associative (Blelloch 1990); only products of decays are formed, never
quotients, so that long decays become 0 and do not overflow (Martin and Cundy, arXiv 1709.04057).
"""

from __future__ import annotations

import torch

CHUNK = 64


@torch.compile(dynamic=False)
def _chunk(
    h: torch.Tensor, step: torch.Tensor, given: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C · h (B, D, S), the state behind the last token) of a chunk that h (B, D, N) enters."""
    decay = (step[..., None] * A[:, None]).exp()
    state = given[..., None] * B.transpose(1, 2)[:, None]
    state = torch.cat((state[:, :, :1] + decay[:, :, :1] * h[:, :, None], state[:, :, 1:]), 2)
    distance = 1
    while distance < step.shape[2]:
        before, there = state[:, :, :-distance], decay[:, :, distance:]
        state = torch.cat((state[:, :, :distance], state[:, :, distance:] + there * before), 2)
        decay = torch.cat((decay[:, :, :distance], there * decay[:, :, :-distance]), 2)
        distance *= 2
    return (state * C.transpose(1, 2)[:, None]).sum(-1), state[:, :, -1]


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor,
    delta_softplus: bool,
) -> torch.Tensor:
    """u, delta and z (B, D, S), A (D, N), B and C (B, N, S), D and delta_bias (D,) to y; computed in fp32."""
    step = delta.float() + delta_bias.float()[:, None]
    if delta_softplus:
        step = torch.nn.functional.softplus(step)
    wide, given = u.float(), step * u.float()
    h = torch.zeros((*u.shape[:2], A.shape[1]), dtype=torch.float32, device=u.device)
    values = []
    for start in range(0, u.shape[2], CHUNK):
        here = slice(start, start + CHUNK)
        y, h = _chunk(h, step[..., here], given[..., here], A.float(), B[..., here].float(), C[..., here].float())
        values.append(y)
    y = torch.cat(values, -1) + D.float()[:, None] * wide
    return (y * torch.nn.functional.silu(z.float())).to(u.dtype)
