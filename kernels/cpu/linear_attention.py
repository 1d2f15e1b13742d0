"""Linear attention with one decay a head and position on a CPU: chunks as matrix products, between them a loop."""

from __future__ import annotations

import torch

CHUNK = 64


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `kernels/state_space/linear_attention.py`: o (B, S, H, D) in v's dtype, and with `return_final_state`
    (B, H, K, D) in fp32.
    """
    S = v.shape[1]
    added, kept, inner, carried = _chunks(q, k, v, g)
    state = torch.zeros_like(added[:, 0]) if initial_state is None else initial_state.float()
    entries = []
    for chunk in range(added.shape[1]):
        entries.append(state)
        state = torch.addcmul(added[:, chunk], state, kept[:, chunk, :, None, None])
    o = _join(q, torch.stack(entries, 1), inner, carried, S, v.dtype)
    return (o, state) if return_final_state else o


def _cut(x: torch.Tensor) -> torch.Tensor:
    """(B, S, H, …) to (B, chunks, H, CHUNK, …) in fp32, zeros behind."""
    wide = torch.nn.functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK))
    return wide.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]).transpose(2, 3)


@torch.compile(dynamic=False)
def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each chunk: what it adds to the state, what it keeps of it, its own part of o, and each position's share
    of the state before the chunk.
    """
    # No logarithm below -104, which is a factor of 0 in fp32: sums with -inf among them have no differences.
    queries, keys, values, logs = _cut(q), _cut(k), _cut(v), _cut(g).clamp(min=-104.0).cumsum(-1)
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    inner = (queries @ keys.mT * decays) @ values
    whole = logs[..., -1:]
    added = (keys * (whole - logs).exp()[..., None]).mT @ values
    return added, whole.squeeze(-1).exp(), inner, logs.exp()


@torch.compile(dynamic=False)
def _join(
    q: torch.Tensor, entries: torch.Tensor, inner: torch.Tensor, carried: torch.Tensor, S: int, dtype: torch.dtype
) -> torch.Tensor:
    """o (B, S, H, D) from the chunks' own parts and the states before them (B, chunks, H, K, D)."""
    o = inner + _cut(q) @ entries * carried[..., None]
    return o.transpose(2, 3).flatten(1, 2)[:, :S].to(dtype)
