"""Mamba-3's recurrence of one input and one output a head (Lahoti et al., arXiv 2603.15569).

What a projection and its elementwise operations leave to a kernel: states that turn, inputs by the trapezoidal
rule, a skip connection and a gate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...registry.record import Case
from ..operator import BYTES, Inputs, Operator, Result, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

CHUNK = 64
"""Positions that the reference computes at a time."""

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

    A chunk of positions at a time, within which the recurrence is written out as sums over pairs of positions,
    one for each of its two inputs. What a chunk holds is computed again for the backward pass, so that memory is
    bounded by the results and one state a chunk.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    batch, _, H, P = x.shape
    N, A = B.shape[3], angles.shape[2]
    carried = tuple(x.new_zeros(batch, *shape) for shape in ((H, P, N), (H, A), (1, H, P), (1, H, N)))
    parts = []
    pieces = [t.split(CHUNK, 1) if t.shape[1] else () for t in (x, B, C, dt, adt, trap, angles, z)]
    for piece in zip(*pieces, strict=True):
        y, *carried = checkpoint(
            _chunk, *piece, B_bias, C_bias, D, *carried, use_reentrant=False, preserve_rng_state=False
        )
        parts.append(y)
    return torch.cat(parts, 1) if parts else x.clone()


def _chunk(
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

    turns = turn[:, None] + (math.pi * torch.tanh(angles)[:, :, None] * dt[..., None]).cumsum(1)
    groups = x.shape[2] // max(1, B.shape[2])
    k, q = (_turned(t.repeat_interleave(groups, 2) + u, turns) for t, u in ((B, B_bias), (C, C_bias)))
    logs = adt.transpose(1, 2).cumsum(-1)
    L = x.shape[1]
    seen = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    rest = (logs[..., -1:] - logs).exp().transpose(1, 2)
    y = torch.einsum("bihn,bhpn->bihp", q, state) * logs.exp().transpose(1, 2)[..., None]
    state = state * logs[..., -1:, None].exp()
    share = torch.sigmoid(trap)
    before = torch.cat((last_x, x[:, :-1]), 1), torch.cat((last_k, k[:, :-1]), 1)
    for (given, key), weight in (((x, k), share * dt), (before, (1 - share) * dt * adt.exp())):
        given = given * weight[..., None]
        y = y + torch.einsum("bhij,bjhp->bihp", torch.einsum("bihn,bjhn->bhij", q, key) * decays, given)
        state = state + torch.einsum("bjhp,bjhn->bhpn", given * rest[..., None], key)
    y = (y + D[:, None] * x) * torch.nn.functional.silu(z)
    return y, state, turns[:, -1], x[:, -1:], k[:, -1:]


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x (…, N) with its first pairs of neighbours turned by the angles (…, A)."""
    import torch

    A = turns.shape[-1]
    a, b = x[..., : 2 * A].unflatten(-1, (A, 2)).unbind(-1)
    cos, sin = turns.cos(), turns.sin()
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
