"""The selective scan of Mamba-1 (Gu and Dao, arXiv 2312.00752), with its gate, from a state of zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch

HELD = 1 << 25
"""Numbers of state that the reference holds at a time: those of a chunk of tokens."""


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
    """Token by token: h = exp(Δ · A) · h + Δ · B · u; y = (C · h + D · u) · silu(z)."""
    import torch
    from torch.utils.checkpoint import checkpoint

    assert delta_softplus
    step = torch.nn.functional.softplus(delta + delta_bias[:, None], threshold=50.0)
    x = step * u
    h = u.new_zeros(u.shape[0], u.shape[1], A.shape[1])
    size = max(1, HELD // max(1, h.numel()))
    pieces = []
    for start in range(0, u.shape[2], size):
        tokens = slice(start, start + size)
        y, h = checkpoint(
            _walk, h, step[..., tokens], x[..., tokens], A, B[..., tokens], C[..., tokens],
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        pieces.append(y)
    y = torch.cat(pieces, -1) if pieces else torch.zeros_like(u)
    return (y + D[:, None] * u) * torch.nn.functional.silu(z)


def _walk(
    h: torch.Tensor, step: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(C · h (B, D, S), h (B, D, N) behind the last) of a chunk of tokens, one by one."""
    import torch

    decay = (step[..., None] * A[:, None]).exp()
    enters = x[..., None] * B.transpose(1, 2)[:, None]
    states = []
    for s in range(step.shape[-1]):
        h = h * decay[:, :, s] + enters[:, :, s]
        states.append(h)
    return torch.einsum("bdsn,bns->bds", torch.stack(states, 2), C), h


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
