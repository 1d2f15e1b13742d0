"""The selective scan of Mamba-1 (Gu and Dao, arXiv 2312.00752), with its gate, from a state of zeros."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch

HELD = 1 << 26
"""Numbers of state that the reference holds at a time: those of a piece of tokens."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """u, delta and z (B, D, S), B and C (B, N, S) in the case's dtype; A (D, N), D and delta_bias (D,) in fp32.

    A is -1 to -N, as a model is initialized. softplus(delta_bias) is log-uniform in [0.001, 0.1]; delta
    varies about it.
    """
    import torch

    B, D, S, N = (case.axes[axis] for axis in ("B", "D", "S", "N"))

    def normal(*shape: int, dtype: str = case.dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch_dtype(dtype))

    step = 0.001 * 100.0 ** torch.rand(D, device=device, generator=generator)
    return {
        "u": normal(B, D, S),
        "delta": normal(B, D, S) * 0.5,
        "A": -torch.arange(1.0, N + 1, device=device).expand(D, N).contiguous(),
        "B": normal(B, N, S),
        "C": normal(B, N, S),
        "D": normal(D, dtype="fp32"),
        "z": normal(B, D, S),
        "delta_bias": step.expm1().log(),
        "delta_softplus": True,
    }


def reference(
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
    """h ← exp(Δ · A) · h + Δ · B · u and y = (C · h + D · u) · silu(z), token by token.

    What a piece of tokens holds is computed again for the backward pass, so that memory is bounded by the results
    and one state a piece.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    assert delta_softplus
    h = u.new_zeros(u.shape[0], u.shape[1], A.shape[1])
    size = max(1, HELD // max(1, h.numel()))
    pieces = (t.split(size, -1) if t.shape[-1] else () for t in (u, delta, z, B, C))
    parts = []
    for piece in zip(*pieces, strict=True):
        y, h = checkpoint(_piece, *piece, A, D, delta_bias, h, use_reentrant=False, preserve_rng_state=False)
        parts.append(y)
    return torch.cat(parts, -1) if parts else torch.zeros_like(u)


def _piece(
    u: torch.Tensor,
    delta: torch.Tensor,
    z: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    delta_bias: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y (B, D, L), h (B, D, N) behind the last) of L tokens.

    They are cut into about √L runs, which are walked side by side, each from a state of zeros. Then the states
    between runs are walked, and each adds to its run what the decays have left of it. Tokens that fill up the
    last run have a step of 0: they change no state.
    """
    import torch

    L = u.shape[-1]
    T = math.isqrt(L)
    runs = -(-L // T)

    def cut(t: torch.Tensor) -> torch.Tensor:
        """(B, …, L) as (T, runs, B, …)."""
        t = torch.nn.functional.pad(t, (0, runs * T - L)).unflatten(-1, (runs, T))
        return t.permute(3, 2, 0, 1).contiguous()

    step = torch.nn.functional.softplus(delta + delta_bias[:, None], threshold=50.0)
    enters = cut(step * u)[..., None] * cut(B)[..., None, :]
    step = cut(step)
    alone = _walk(torch.zeros_like(h), (step[..., None] * A).exp(), enters)
    kept = (step.cumsum(0)[..., None] * A).exp()
    after = _walk(h, kept[-1], alone[-1])
    states = torch.addcmul(alone, kept, torch.cat((h[None], after[:-1])))
    y = (states @ cut(C)[..., None])[..., 0].permute(2, 3, 1, 0).flatten(-2)[..., :L]
    return (y + D[:, None] * u) * torch.nn.functional.silu(z), after[-1]


def _walk(h: torch.Tensor, decay: torch.Tensor, enters: torch.Tensor) -> torch.Tensor:
    """All states of h ← decay · h + enters along the first dimension."""
    import torch

    states = []
    for factor, addend in zip(decay, enters, strict=True):
        h = torch.addcmul(addend, factor, h)
        states.append(h)
    return torch.stack(states)


def bytes_(case: Case) -> int:
    """Forward reads u, delta and z, writes y; backward reads dy as well and writes three gradients. B and C,
    and their gradients, are read and written once."""
    B, D, S, N = (case.axes[axis] for axis in ("B", "D", "S", "N"))
    wide, narrow = {"forward": (4, 2), "backward": (7, 4), "forward_backward": (11, 6)}[case.pass_]
    return (wide * B * D * S + narrow * B * N * S) * BYTES[case.dtype] + 4 * D * (N + 2)


def flops(case: Case) -> int:
    """No matmul."""
    return 0


OPERATOR = Operator(
    name="selective_scan",
    summary="selective scan of Mamba-1 with its gate",
    axes={"B": "batch", "D": "channels", "S": "sequence", "N": "state of a channel"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("u", "delta", "A", "B", "C", "D", "z", "delta_bias"),
    plans={
        "quick": (grid("forward", B=8, D=4096, S=2048, N=16),),
        "quick_cpu": (grid("forward", B=1, D=64, S=16, N=16, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=8, D=4096, S=2048, N=16),
            grid("forward", B=2, D=4096, S=8192, N=16),
            grid("forward", "backward", B=1, D=4096, S=32768, N=16),
            grid("forward", B=1, D=4096, S=131072, N=16),
        ),
        "full": (
            grid("forward", "backward", B=4, D=2048, S=2048, N=16, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", B=1, D=2048, S=2048, N=16),
            grid("forward", "backward", B=3, D=1001, S=1023, N=[8, 13]),
        ),
    },
)
