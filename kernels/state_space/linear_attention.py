"""Linear attention with one decay a head and position: gated retention, as in Mamba-2, RetNet and simple GLA.

    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ        o_t = q_t S_t

That is `ssd` with k, q and v in the places of B, C and x, a group a head, and decays that are given instead of
made of steps: the same kernels, forward and backward (Dao and Gu, arXiv 2405.21060; Yang et al., Gated Linear
Attention, arXiv 2312.06635).
"""

from __future__ import annotations

import torch

from .._common import check
from .ssd import _narrow, _ssd, narrow


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """o (B, S, H, D) in v's dtype, and with `return_final_state` the last state (B, H, K, D) in fp32.

    q and k (B, S, H, K) and v (B, S, H, D) in one of bf16, fp16, fp32; g (B, S, H), the logarithms of the decays,
    and initial_state (B, H, K, D), each in any of the three. K from 1 to 256. g should not be positive. Scores are
    not scaled: scale q.

    Matrix products have operands of v's dtype and sums in fp32; fp32 inputs are multiplied as fp32, not TF32.
    Differentiable once in all tensors. Raises `TypeError` for a wrong dtype and `ValueError` for a wrong shape or
    device.
    """
    check("v", v, dim=4)
    B, S, H, D = v.shape
    check("q", q, dim=4, dtypes=(v.dtype,), like=v)
    K = q.shape[3]
    if not 1 <= K <= 256:
        raise ValueError(f"q has key dimension {K}, expected 1 to 256")
    check("q", q, shape=(B, S, H, K))
    check("k", k, shape=(B, S, H, K), dtypes=(v.dtype,), like=v)
    check("g", g, shape=(B, S, H), like=v)
    state = None
    if initial_state is not None:
        check("initial_state", initial_state, shape=(B, H, K, D), like=v)
        state = initial_state.mT
    call = _narrow if narrow(v.dtype, D, K) else _ssd
    o, final = call(v, g, None, k, q, None, None, state, None, False)
    return (o, final.mT) if return_final_state else o
