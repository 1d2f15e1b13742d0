"""The gated delta rule: linear attention whose state forgets, and takes back what a key held before
(Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464; Qwen3-Next's linear layers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Result, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

CHUNK = 64
"""Positions that the reference takes at a time."""
HELD = 1 << 26
"""Numbers of one kind that a piece of chunks may hold."""
NORMALIZER = 16
"""By which a gate's logarithm is divided, as in `linear_attention`."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q and k (B, S, H, K), v (B, S, H, D) and beta (B, S, H) in the case's dtype, g (B, S, H) in fp32.

    As a layer makes them: q and k of length 1, q with the scale 1 / √K, beta a sigmoid, and g the logarithm of
    one, divided by 16. With option states an initial state (B, H, K, D) in fp32 and the final one asked for.
    """
    import torch
    from torch.nn import functional

    B, S, H, K, D = (case.axes[axis] for axis in ("B", "S", "H", "K", "D"))
    dtype = torch_dtype(case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    return {
        "q": (functional.normalize(draw(B, S, H, K), dim=-1) * K**-0.5).to(dtype),
        "k": functional.normalize(draw(B, S, H, K), dim=-1).to(dtype),
        "v": draw(B, S, H, D).to(dtype),
        "g": functional.logsigmoid(draw(B, S, H)) / NORMALIZER,
        "beta": draw(B, S, H).sigmoid().to(dtype),
        "initial_state": draw(B, H, K, D) if case.options["states"] else None,
        "return_final_state": bool(case.options["states"]),
    }


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    return_final_state: bool,
) -> Result:
    """S ← exp(g) (S − β k (kᵀ S)) + β k vᵀ, o = q S by chunks of positions, whose triangular systems are solved.

    What a piece of chunks holds is computed again for the backward pass, so that memory is bounded by the results
    and one state a piece.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    B, S, H, K = q.shape
    D = v.shape[-1]
    state = v.new_zeros(B, H, K, D) if initial_state is None else initial_state
    size = CHUNK * max(1, HELD // max(1, B * H * max(CHUNK * (K + D), K * D)))
    parts = []
    for piece in zip(*(x.split(size, 1) for x in (q, k, v, g, beta)), strict=True):
        if not S:
            break
        o, state = checkpoint(_piece, *piece, state, use_reentrant=False, preserve_rng_state=False)
        parts.append(o)
    o = torch.cat(parts, 1) if parts else v.clone()
    return (o, state) if return_final_state else o


def _piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o (B, L, H, D), the state after it (B, H, K, D)) of L positions."""
    import torch
    from torch.nn.functional import pad

    S = q.shape[1]

    def cut(t: torch.Tensor) -> torch.Tensor:
        """(B, L, H, …) to (chunks, B, H, CHUNK, …), zeros behind the last position: they change nothing."""
        padded = pad(t, (0, 0) * (t.dim() - 2) + (0, -S % CHUNK))
        chunks: torch.Tensor = padded.unflatten(1, (-1, CHUNK)).movedim((1, 3), (0, 2))
        return chunks

    q, k, v, logs, beta = cut(q), cut(k), cut(v), cut(g).cumsum(-1), cut(beta)[..., None]
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    carried = logs.exp()[..., None]
    # (1 + A) U = β (V − exp(g) K S), of which U is what the state takes: A is what keys before hold of a key.
    system = (beta * (k @ k.mT) * decays).tril(-1)
    both = torch.cat((beta * v, beta * carried * k), -1)
    own, past = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    rest = k * (logs[..., -1:] - logs).exp()[..., None]
    entering, taken = [], []
    for kept, added, x, y in zip(carried[..., -1:, :], rest, own, past, strict=True):
        entering.append(state)
        taken.append(x - y @ state)
        state = torch.addcmul(added.mT @ taken[-1], kept, state)
    o = (q @ k.mT * decays) @ torch.stack(taken) + carried * (q @ torch.stack(entering))
    return o.movedim((0, 2), (1, 3)).flatten(1, 2)[:, :S], state


def bytes_(case: Case) -> int:
    """Forward reads q, k, v, g, beta and writes o; backward reads those and o's gradient and writes five
    gradients. The gates, and the states where there are such, are in fp32.
    """
    B, S, H, K, D = (case.axes[axis] for axis in ("B", "S", "H", "K", "D"))
    keys, values, rates, states = {
        "forward": (2, 2, 1, 2),
        "backward": (4, 3, 2, 2),
        "forward_backward": (6, 5, 3, 4),
    }[case.pass_]
    moved = ((keys * K + values * D + rates) * BYTES[case.dtype] + 4 * rates) * B * S * H
    return moved + (states * B * H * K * D * 4 if case.options["states"] else 0)


def flops(case: Case) -> int:
    """As of `linear_attention`, and what a key held before is one product of K × D more a position: three forward;
    backward seven.
    """
    B, S, H, K, D = (case.axes[axis] for axis in ("B", "S", "H", "K", "D"))
    products = {"forward": 3, "backward": 7, "forward_backward": 10}[case.pass_]
    return products * 2 * B * S * H * K * D


HEADS: dict[str, Any] = {"H": 16, "K": 128, "D": 128}
"""As `linear_attention` has them."""


OPERATOR = Operator(
    name="gated_delta_rule",
    summary="Linear attention with the gated delta rule, one decay and one rate a head and position",
    axes={"B": "batch", "S": "sequence", "H": "heads", "K": "key dimension", "D": "head dimension of values"},
    options={"states": (False, True)},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("q", "k", "v", "g", "beta"),
    tolerances={
        # As of linear_attention: operands of matrix products, states among them, are rounded to the inputs' dtype.
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
            grid("forward", options={"states": True}, B=2, S=8192, **HEADS),
        ),
        "full": (
            grid("forward", "backward", dtypes="fp16", B=2, S=4096, **HEADS),
            grid("forward", "backward", options={"states": True}, B=4, S=1000, **HEADS),
            grid("forward", "backward", B=4, S=[1, 63, 4095], H=8, K=64, D=[64, 96]),
            grid("forward", B=1, S=131072, **HEADS),
        ),
    },
)
