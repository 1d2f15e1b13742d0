"""Mamba-2's state-space duality on a CPU: chunks as matrix products, compiled by Inductor, between them a loop."""

from __future__ import annotations

import torch

CHUNK = 64


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `kernels/state_space/ssd.py`: y (B, S, H, P) in x's dtype, and with `return_final_state` (B, H, P, N) in
    fp32.
    """
    batch, S, H, P = x.shape
    chunks = -(-S // CHUNK)
    ids = seq_idx if seq_idx is not None else torch.zeros(batch, S, dtype=torch.int32)
    before = torch.cat((ids[:, :1], ids[:, CHUNK - 1 : S - 1 : CHUNK]), 1)
    added, kept, inner, carried = _chunks(x, dt, A, B, C, D, dt_bias, ids, before, dt_softplus)
    state = torch.zeros(batch, H, P, B.shape[-1]) if initial_state is None else initial_state.float()
    entries = []
    for chunk in range(chunks):
        entries.append(state)
        state = torch.addcmul(added[:, chunk], state, kept[:, chunk, :, None, None])
    y = _join(C, torch.stack(entries, 1), inner, carried, S, x.dtype)
    return (y, state) if return_final_state else y


def _cut(x: torch.Tensor) -> torch.Tensor:
    """(B, S, …) to (B, chunks, CHUNK, …) in fp32, zeros behind."""
    padding = -x.shape[1] % CHUNK
    wide: torch.Tensor = torch.nn.functional.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, padding))
    return wide.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


@torch.compile(dynamic=False)
def _chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    bias: torch.Tensor | None,
    ids: torch.Tensor,
    before: torch.Tensor,
    softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each chunk: what it adds to the state, what it keeps of it, its own part of y, and each position's
    share of the state before the chunk.
    """
    G = B.shape[2]
    groups = x.shape[2] // G
    step = dt.float() if bias is None else dt.float() + bias.float()
    if softplus:
        step = torch.nn.functional.softplus(step)
    step = _cut(step).transpose(2, 3)
    # No logarithm below -104, which is a factor of 0 in fp32: sums with -inf among them have no differences.
    logs = (step * A.float()[:, None]).clamp(min=-104.0).cumsum(-1)
    rows, (given, written, read) = logs[..., -1:], (_cut(t) for t in (x, B, C))
    padding = -ids.shape[1] % CHUNK
    own = torch.cat((ids, ids[:, -1:].expand(-1, padding)), 1).unflatten(1, (-1, CHUNK))
    last = own[..., -1]
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril() & (own[..., :, None] == own[..., None, :])
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~seen[:, :, None], float("-inf")).exp()
    products = torch.einsum("bcign,bcjgn->bcgij", read, written).repeat_interleave(groups, 2)
    inner = torch.einsum("bchij,bcjhp->bcihp", products * decays * step[..., None, :], given)
    if D is not None:
        inner = inner + given * D.float()[:, None]
    rest = ((rows - logs).exp() * step).masked_fill((own != last[..., None])[:, :, None], 0.0)
    weighted = (given * rest.transpose(2, 3)[..., None]).unflatten(3, (G, groups))
    added = torch.einsum("bcjghp,bcjgn->bcghpn", weighted, written).flatten(2, 3)
    carried = logs.exp().masked_fill((own != before[..., None])[:, :, None], 0.0)
    kept = rows.squeeze(-1).exp().masked_fill((before != last)[..., None], 0.0)
    return added, kept, inner, carried


@torch.compile(dynamic=False)
def _join(
    C: torch.Tensor, entries: torch.Tensor, inner: torch.Tensor, carried: torch.Tensor, S: int, dtype: torch.dtype
) -> torch.Tensor:
    """y (B, S, H, P) from the chunks' own parts and the states before them (B, chunks, H, P, N)."""
    read = _cut(C)
    grouped = entries.unflatten(2, (C.shape[2], -1))
    past = torch.einsum("bcign,bcghpn->bcighp", read, grouped).flatten(3, 4)
    y = inner + past * carried.transpose(2, 3)[..., None]
    return y.flatten(1, 2)[:, :S].to(dtype)
