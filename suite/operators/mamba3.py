"""Mamba-3's recurrence of one input and one output a head (Lahoti et al., arXiv 2603.15569).

What a projection and its elementwise operations leave to a kernel: states that turn, inputs by the trapezoidal
rule, a skip connection and a gate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Result, Tolerance, grid, torch_dtype
from .ssd import chained, chunks, joined, pieces

if TYPE_CHECKING:
    import torch

FLOOR = 1e-4
"""The least rate of a decay, as the model has it."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x and z (B, S, H, P), B and C (B, S, G, N), trap (B, S, H) and angles (B, S, A) in the case's dtype; steps
    dt and logarithms of decays adt (B, S, H), B_bias and C_bias (H, N) and D (H,) in fp32.

    As the model has them when it is initialized: steps softplus(of a number + a bias) from 0.001 to 0.1, evenly in
    the logarithm of the bias, adt the step times -softplus(of a number), biases about 1. trap and angles come from
    a projection, before their sigmoid and tanh.
    """
    import torch

    B, S, H, P, N, G, A = (case.axes[axis] for axis in ("B", "S", "H", "P", "N", "G", "A"))
    dtype = torch_dtype(case.dtype)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype)

    step = 0.001 * 100 ** torch.rand(H, device=device, generator=generator)
    dt = torch.nn.functional.softplus(draw(B, S, H) / 2 + step + torch.log(-torch.expm1(-step)))
    return {
        "x": draw(B, S, H, P, dtype=dtype),
        "B": draw(B, S, G, N, dtype=dtype),
        "C": draw(B, S, G, N, dtype=dtype),
        "dt": dt,
        "adt": -dt * torch.nn.functional.softplus(draw(B, S, H)).clamp(min=FLOOR),
        "trap": draw(B, S, H, dtype=dtype),
        "angles": draw(B, S, A, dtype=dtype),
        "B_bias": 1 + draw(H, N) / 4,
        "C_bias": 1 + draw(H, N) / 4,
        "D": draw(H) / 4,
        "z": draw(B, S, H, P, dtype=dtype),
    }


def reference(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    adt: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
) -> Result:
    """h ← a h + (1 - λ) dt a x' ⊗ k' + λ dt x ⊗ k and y = (h q + D x) silu(z).

    a = exp(adt), λ = sigmoid(trap), x' and k' are x and k of the position before. k and q are B + B_bias and
    C + C_bias, of which the first A pairs of neighbours are turned by the sum, over positions so far, of
    π tanh(angles) dt.

    By chunks of positions, as in `ssd`: within one the recurrence is written out as sums over pairs of positions,
    one for each of its two inputs. What a piece of chunks holds is computed again for the backward pass, so that
    memory is bounded by the results and one state a piece.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    batch, S, H, P = x.shape
    N, A = B.shape[3], angles.shape[2]
    carried = tuple(x.new_zeros(batch, H, *shape) for shape in ((P, N), (A,), (1, P), (1, N)))
    sizes = pieces(S, batch * H, P * N)
    parts = []
    for piece in zip(*(t.split(sizes, 1) for t in (x, B, C, dt, adt, trap, angles, z)), strict=True):
        y, *carried = checkpoint(
            _piece, *piece, B_bias, C_bias, D, *carried, use_reentrant=False, preserve_rng_state=False
        )
        parts.append(y)
    return torch.cat(parts, 1) if parts else x.clone()


def _piece(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    adt: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor,
    z: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    turn: torch.Tensor,
    last_x: torch.Tensor,
    last_k: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """y (B, L, H, P) of L positions, and of the last of them the state, the angle (B, H, A), x and k."""
    import torch

    groups = x.shape[2] // max(1, B.shape[2])
    x, B, C, dt, adt, trap, z = (chunks(t) for t in (x, B, C, dt, adt, trap, z))
    turns = (math.pi * torch.tanh(chunks(angles[:, :, None])) * dt[..., None]).cumsum(-2)
    starts = torch.cat((turn[None], turns[..., -1, :])).cumsum(0)
    turns = turns + starts[:-1, :, :, None]
    cos, sin = turns.cos(), turns.sin()
    k, q = (_turned(t.repeat_interleave(groups, 2) + u[:, None], cos, sin) for t, u in ((B, B_bias), (C, C_bias)))

    logs = adt.cumsum(-1)
    seen = torch.ones(2 * logs.shape[-1:], dtype=torch.bool, device=x.device).tril()
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    carried = logs.exp()[..., None]
    rest = (logs[..., -1:] - logs).exp()[..., None]
    share = torch.sigmoid(trap)
    first = x * (share * dt)[..., None], k
    second = _before(last_x, x) * ((1 - share) * dt * adt.exp())[..., None], _before(last_k, k)

    (y1, added1), (y2, added2) = (
        ((q @ key.mT * decays) @ given, (given * rest).mT @ key) for given, key in (first, second)
    )
    entering, state = chained(state, carried[..., -1:, :], added1 + added2)
    y = y1 + y2 + (q @ entering.mT) * carried
    y = (y + D[:, None, None] * x) * torch.nn.functional.silu(z)
    return joined(y), state, starts[-1], x[-1, ..., -1:, :], k[-1, ..., -1:, :]


def _before(last: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x (R, B, H, T, …) of the position before each; `last` (B, H, 1, …) is that before the first."""
    import torch

    return torch.cat((torch.cat((last[None], x[:-1, ..., -1:, :])), x[..., :-1, :]), -2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (…, N) with its first pairs of neighbours turned by A angles (…, A)."""
    import torch

    A = cos.shape[-1]
    a, b = x[..., : 2 * A].unflatten(-1, (A, 2)).unbind(-1)
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((pairs.flatten(-2), x[..., 2 * A :]), -1)


def bytes_(case: Case) -> int:
    """Forward reads x, z, B, C, trap and angles, and dt and adt in fp32, and writes y; backward reads those and
    y's gradient and writes theirs.
    """
    B, S, H, P, N, G, A = (case.axes[axis] for axis in ("B", "S", "H", "P", "N", "G", "A"))
    wide, narrow, steps, rates = {
        "forward": (3, 2, 1, 1),
        "backward": (5, 4, 2, 2),
        "forward_backward": (8, 6, 3, 3),
    }[case.pass_]
    moved = (wide * H * P + narrow * G * N + steps * H + rates * A) * BYTES[case.dtype]
    return (moved + 2 * steps * H * 4) * B * S


def flops(case: Case) -> int:
    """As of `ssd`: into the state and out of it, two products of P × N a head and position; backward five."""
    B, S, H, P, N = (case.axes[axis] for axis in ("B", "S", "H", "P", "N"))
    products = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    return products * 2 * B * S * H * P * N


MODEL: dict[str, Any] = {"H": 64, "P": 64, "N": 128, "G": 1, "A": 32}
"""A model dimension of 2048, expanded to 4096, and a state of which half turns, as mamba-ssm's module has it."""


OPERATOR = Operator(
    name="mamba3",
    summary="Mamba-3's scan: a recurrence that turns, by the trapezoidal rule, with skip and gate",
    axes={
        "B": "batch",
        "S": "sequence",
        "H": "heads",
        "P": "head dimension",
        "N": "state dimension",
        "G": "groups of heads that share B and C",
        "A": "angles, each of a pair of the state dimension",
    },
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("x", "B", "C", "dt", "adt", "trap", "angles", "B_bias", "C_bias", "D", "z"),
    tolerances={
        # As of ssd: operands of matrix products are rounded to the inputs' dtype, scores and states among them.
        "bf16": Tolerance(norm=1.5e-2, absolute=8e-2, relative=5e-2),
        "fp16": Tolerance(norm=2e-3, absolute=1e-2, relative=8e-3),
        "fp32": Tolerance(norm=5e-5, absolute=2e-4, relative=1e-4),
    },
    plans={
        "quick": (grid("forward", B=2, S=8192, **MODEL),),
        "quick_cpu": (grid("forward", B=1, S=256, H=8, P=64, N=64, G=1, A=16, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=8, S=2048, **MODEL),
            grid("forward", "backward", B=2, S=8192, **MODEL),
            grid("forward", B=1, S=32768, **MODEL),
            grid("forward", "backward", B=1, S=131072, **MODEL),
        ),
        "full": (
            grid("forward", "backward", dtypes=["fp16", "fp32"], B=2, S=4096, **MODEL),
            grid("forward", B=4, S=[1, 63, 4095], H=24, P=[64, 128], N=64, G=8, A=32),
            # Of a single position all is turned alike: the gradient of its angles is 0 but for rounding.
            grid("backward", B=4, S=[63, 4095], H=24, P=[64, 128], N=64, G=8, A=32),
            grid("backward", B=1, S=32768, **MODEL),
        ),
    },
)
