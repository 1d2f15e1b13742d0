"""Kernels in Helion, whose compiler reads functions and the names of their module.

They are written after its documentation, forward passes alone. Helion chooses tiles, loops and indexing by
searching at the first call of a shape, with its own effort `full`, for ten minutes at most or as long as its own
`HELION_AUTOTUNE_BUDGET_SECONDS` says, always from the same seed; what it finds it keeps on disk.
"""

from __future__ import annotations

import os
from typing import Any

torch: Any = None
hl: Any = None
"""Set by `searched`."""

LOG2E = 1.4426950408889634


def searched(function: Any) -> Any:
    """A kernel of one of the functions below."""
    global torch, hl
    import helion
    import helion.language as hl
    import torch

    seconds = int(os.environ.get("HELION_AUTOTUNE_BUDGET_SECONDS", "600"))
    return helion.kernel(function, static_shapes=True, autotune_budget_seconds=seconds, autotune_random_seed=0)


def product(a: Any, b: Any) -> Any:
    """a (M, K) @ b (K, N) in a's dtype, summed in fp32."""
    M, K = a.size()
    _, N = b.size()
    out = torch.empty([M, N], dtype=a.dtype, device=a.device)
    for rows, columns in hl.tile([M, N]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for depth in hl.tile(K):
            acc = torch.addmm(acc, a[rows, depth], b[depth, columns])  # acc += A @ B
        out[rows, columns] = acc.to(a.dtype)
    return out


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Of each row of x (M, D)."""
    M, _ = x.size()
    out = torch.empty_like(x)
    for rows in hl.tile(M):
        wide = x[rows, :].to(torch.float32)
        scale = torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + eps)
        out[rows, :] = (wide * scale * weight[:].to(torch.float32)).to(x.dtype)
    return out


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Of each row of x (M, D)."""
    M, _ = x.size()
    out = torch.empty_like(x)
    for rows in hl.tile(M):
        wide = x[rows, :].to(torch.float32)
        centred = wide - torch.mean(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(torch.mean(centred * centred, dim=-1, keepdim=True) + eps)
        y = centred * scale * weight[:].to(torch.float32) + bias[:].to(torch.float32)
        out[rows, :] = y.to(x.dtype)
    return out


def softmax(x: Any) -> Any:
    """Of each row of x (M, D)."""
    M, _ = x.size()
    out = torch.empty_like(x)
    for rows in hl.tile(M):
        wide = x[rows, :].to(torch.float32)
        numerators = torch.exp(wide - torch.amax(wide, dim=-1, keepdim=True))
        out[rows, :] = (numerators / torch.sum(numerators, dim=-1, keepdim=True)).to(x.dtype)
    return out


def swiglu(gate: Any, up: Any) -> Any:
    """silu(gate) · up of matrices (M, N)."""
    out = torch.empty_like(gate)
    for tile in hl.tile(gate.size()):
        wide = gate[tile].to(torch.float32)
        out[tile] = (wide * torch.sigmoid(wide) * up[tile].to(torch.float32)).to(gate.dtype)
    return out


def losses(logits: Any, target: Any) -> Any:
    """logsumexp(logits) - logits[target] of each row of logits (M, V), in fp32."""
    M, V = logits.size()
    out = torch.empty([M], dtype=torch.float32, device=logits.device)
    flat = logits.view(-1)
    for rows in hl.tile(M):
        hit = hl.load(flat, [rows.index * V + target[rows]])
        wide = logits[rows, :].to(torch.float32)
        largest = torch.amax(wide, dim=-1)
        total = torch.sum(torch.exp(wide - largest[:, None]), dim=-1)
        out[rows] = torch.log(total) + largest - hit.to(torch.float32)
    return out


def attention(q: Any, k: Any, v: Any, causal: hl.constexpr) -> Any:
    """softmax(q·kᵀ / √D)·v of q (B·H, S, D), k and v (B·Hkv, Sk, D), with running maximum and sum."""
    H, S, D = q.size()
    D = hl.specialize(D)
    shared = hl.specialize(H // k.size(0))
    keys = k.transpose(1, 2)
    out = torch.empty_like(q)
    scale = LOG2E / D**0.5
    for head, rows in hl.tile([H, S], block_size=[1, None]):
        largest = hl.full([rows], float("-inf"), dtype=torch.float32)
        total = hl.zeros([rows], dtype=torch.float32)
        acc = hl.zeros([rows, D], dtype=torch.float32)
        own = q[head.begin, rows, :]
        other = head.begin // shared
        # A tile of queries sees no key behind its last one.
        end = rows.end if causal else k.size(1)
        for some in hl.tile(0, end):
            scores = hl.dot(own, keys[other, :, some], out_dtype=torch.float32) * scale
            if causal:
                scores = torch.where(rows.index[:, None] >= some.index[None, :], scores, float("-inf"))
            higher = torch.maximum(largest, torch.amax(scores, -1))
            p = torch.exp2(scores - higher[:, None])
            shrunk = torch.exp2(largest - higher)
            total = total * shrunk + torch.sum(p, -1)
            acc = hl.dot(p.to(v.dtype), v[other, some, :], acc=acc * shrunk[:, None])
            largest = higher
        out[head.begin, rows, :] = (acc / total[:, None]).to(q.dtype)
    return out
