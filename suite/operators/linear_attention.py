"""Linear attention with one decay a head and position (Yang et al., arXiv 2312.06635; Dao and Gu, 2405.21060)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Result, Tolerance, grid, torch_dtype
from .ssd import chained, chunks, joined, pieces

if TYPE_CHECKING:
    import torch

NORMALIZER = 16
"""By which a gate's logarithm is divided, so that a model remembers at the start (arXiv 2312.06635)."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q and k (B, S, H, K), v (B, S, H, D) and g (B, S, H) in the case's dtype.

    Gates are those of a model: g = logsigmoid(of a normal number) / 16. q has the scale 1 / √K. With option states
    an initial state (B, H, K, D) in fp32 and the final one asked for.
    """
    import torch

    B, S, H, K, D = (case.axes[axis] for axis in ("B", "S", "H", "K", "D"))
    dtype = torch_dtype(case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    return {
        "q": (draw(B, S, H, K) * K**-0.5).to(dtype),
        "k": draw(B, S, H, K).to(dtype),
        "v": draw(B, S, H, D).to(dtype),
        "g": (torch.nn.functional.logsigmoid(draw(B, S, H)) / NORMALIZER).to(dtype),
        "initial_state": draw(B, H, K, D) if case.options["states"] else None,
        "return_final_state": bool(case.options["states"]),
    }


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None,
    return_final_state: bool,
) -> Result:
    """S ← exp(g) S + k vᵀ, o = q S by chunks of positions: within one, sums over pairs of positions, as in `ssd`.

    What a piece of chunks holds is computed again for the backward pass, so that memory is bounded by the results
    and one state a piece.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    state = initial_state
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    sizes = pieces(v.shape[1], v.shape[0] * v.shape[2], q.shape[3] * v.shape[3])
    parts = []
    for piece in zip(*(x.split(sizes, 1) for x in (q, k, v, g)), strict=True):
        o, state = checkpoint(_piece, *piece, state, use_reentrant=False, preserve_rng_state=False)
        parts.append(o)
    o = torch.cat(parts, 1) if parts else v.clone()
    return (o, state) if return_final_state else o


def _piece(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o (B, L, H, D), the state after it (B, H, K, D)) of L positions."""
    import torch

    q, k, v, g = (chunks(x) for x in (q, k, v, g))
    logs = g.cumsum(-1)
    seen = torch.ones(2 * logs.shape[-1:], dtype=torch.bool, device=q.device).tril()
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    carried = logs.exp()[..., None]
    rest = (logs[..., -1:] - logs).exp()[..., None]
    entering, state = chained(state, carried[..., -1:, :], (k * rest).mT @ v)
    return joined((q @ k.mT * decays) @ v + (q @ entering) * carried), state


def bytes_(case: Case) -> int:
    """Forward reads q, k, v, g and writes o; backward reads those and o's gradient and writes four gradients. The
    states, in fp32, where there are such.
    """
    B, S, H, K, D = (case.axes[axis] for axis in ("B", "S", "H", "K", "D"))
    keys, values, gates, states = {
        "forward": (2, 2, 1, 2),
        "backward": (4, 3, 2, 2),
        "forward_backward": (6, 5, 3, 4),
    }[case.pass_]
    moved = (keys * K + values * D + gates) * B * S * H * BYTES[case.dtype]
    return moved + (states * B * H * K * D * 4 if case.options["states"] else 0)


def flops(case: Case) -> int:
    """As of `ssd`: into the state and out of it, two products of K × D a head and position; backward five."""
    B, S, H, K, D = (case.axes[axis] for axis in ("B", "S", "H", "K", "D"))
    products = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    return products * 2 * B * S * H * K * D


HEADS: dict[str, Any] = {"H": 16, "K": 128, "D": 128}
"""A width of 2048, as attention has it in its large cases."""


OPERATOR = Operator(
    name="linear_attention",
    summary="Linear attention with one decay a head and position",
    axes={"B": "batch", "S": "sequence", "H": "heads", "K": "key dimension", "D": "head dimension of values"},
    options={"states": (False, True)},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("q", "k", "v", "g"),
    tolerances={
        # As of ssd: operands of matrix products are rounded to the inputs' dtype, scores and states among them.
        "bf16": Tolerance(norm=1.5e-2, absolute=8e-2, relative=5e-2),
        "fp16": Tolerance(norm=2e-3, absolute=1e-2, relative=8e-3),
        "fp32": Tolerance(norm=5e-5, absolute=2e-4, relative=1e-4),
    },
    plans={
        "quick": (grid("forward", B=2, S=8192, **HEADS),),
        "quick_cpu": (grid("forward", B=1, S=512, H=4, K=64, D=64, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=8, S=2048, **HEADS),
            grid("forward", "backward", B=2, S=8192, **HEADS),
            grid("forward", B=1, S=32768, **HEADS),
            grid("forward", "backward", B=1, S=131072, **HEADS),
            grid("forward", options={"states": True}, B=2, S=8192, **HEADS),
        ),
        "full": (
            grid("forward", "backward", dtypes=["fp16", "fp32"], B=2, S=4096, **HEADS),
            grid("forward", "backward", options={"states": True}, B=4, S=1000, **HEADS),
            grid("forward", "backward", B=4, S=[1, 63, 4095], H=8, K=64, D=[64, 96]),
            grid("forward", "backward", B=2, S=4096, H=4, K=256, D=[256, 512]),
        ),
    },
)
