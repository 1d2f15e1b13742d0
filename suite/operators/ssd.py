"""Mamba-2's state-space duality (Dao and Gu, arXiv 2405.21060): a recurrence, one decay a head and position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.record import Case
from ..operator import BYTES, Inputs, Operator, Result, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

CHUNK = 64
"""Positions that the reference computes at a time."""

SEQUENCES = 8
"""Sequences in a row, on average, with option packed."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (B, S, H, P), dt (B, S, H), B and C (B, S, G, N) in the case's dtype; A, D and dt_bias (H,) in fp32.

    Steps and decays as Mamba-2 is initialized: softplus(dt_bias) from 0.001 to 0.1, evenly in the logarithm, A
    from -1 to -16. dt, which a projection gives in the model, has a standard deviation of 1/2. D x is small
    beside the scan, so that an error of the scan is large in y. With option states an initial state
    (B, H, P, N) in fp32 and the final one asked for; with option packed `seq_idx` (B, S), the numbers of
    sequences of random lengths.
    """
    import torch

    B, S, H, P, N, G = (case.axes[axis] for axis in ("B", "S", "H", "P", "N", "G"))
    dtype = torch_dtype(case.dtype)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype)

    def even(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    step = 0.001 * 100 ** even(H)
    starts = even(B, S) < SEQUENCES / max(1, S)
    starts[:, :1] = False
    return {
        "x": draw(B, S, H, P, dtype=dtype),
        "dt": draw(B, S, H, dtype=dtype) / 2,
        "A": -1 - 15 * even(H),
        "B": draw(B, S, G, N, dtype=dtype),
        "C": draw(B, S, G, N, dtype=dtype),
        "D": draw(H) / 4,
        "dt_bias": step + torch.log(-torch.expm1(-step)),
        "initial_state": draw(B, H, P, N) if case.options["states"] else None,
        "seq_idx": starts.cumsum(1, dtype=torch.int32) if case.options["packed"] else None,
        "dt_softplus": True,
        "return_final_state": bool(case.options["states"]),
    }


def reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    dt_softplus: bool,
    return_final_state: bool,
) -> Result:
    """The recurrence h ← exp(step · A) h + step · x ⊗ B, y = h C + D x, a chunk of positions at a time.

    Within a chunk the recurrence is written out as sums over pairs of positions, which is the same in exact
    arithmetic; intermediate results of a chunk are computed again for the backward pass and never kept, so that
    memory is bounded by the results and one state a chunk. seq_idx cuts the recurrence where it changes.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    step = dt + dt_bias
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    ids = torch.zeros(dt.shape[:2], dtype=torch.int32, device=dt.device) if seq_idx is None else seq_idx
    state = initial_state
    if state is None:
        state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])
    parts = []
    pieces = [t.split(CHUNK, 1) if t.shape[1] else () for t in (x, step, B, C, ids)]
    before = ids[:, :1]
    for piece in zip(*pieces, strict=True):
        y, state = checkpoint(_chunk, *piece, before, A, D, state, use_reentrant=False, preserve_rng_state=False)
        before = piece[-1][:, -1:]
        parts.append(y)
    y = torch.cat(parts, 1) if parts else x.clone()
    return (y, state) if return_final_state else y


def _chunk(
    x: torch.Tensor,
    step: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    ids: torch.Tensor,
    before: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y (B, L, H, P), the state after it (B, H, P, N)) of L positions. `before` (B, 1) is the sequence before."""
    import torch

    groups = x.shape[2] // max(1, B.shape[2])
    B, C = (t.repeat_interleave(groups, 2) for t in (B, C))
    step = step.transpose(1, 2)
    logs = (step * A[:, None]).cumsum(-1)
    L = x.shape[1]
    seen = torch.ones(L, L, dtype=torch.bool, device=x.device).tril() & (ids[:, :, None] == ids[:, None, :])
    exponents = logs[..., :, None] - logs[..., None, :]
    decays = torch.exp(exponents.masked_fill(~seen[:, None], float("-inf")))
    pairs = torch.einsum("bihn,bjhn->bhij", C, B) * decays * step[:, :, None, :]
    carried = torch.exp(logs).masked_fill((ids != before)[:, None], 0.0)
    y = torch.einsum("bhij,bjhp->bihp", pairs, x)
    past = torch.einsum("bihn,bhpn->bihp", C, state)
    y = y + past * carried.transpose(1, 2)[..., None] + D[:, None] * x
    last = ids[:, -1:]
    rest = torch.exp(logs[..., -1:] - logs).masked_fill((ids != last)[:, None], 0.0) * step
    kept = torch.exp(logs[..., -1]).masked_fill(before != last, 0.0)
    weighted = x * rest.transpose(1, 2)[..., None]
    return y, state * kept[..., None, None] + torch.einsum("bjhp,bjhn->bhpn", weighted, B)


def bytes_(case: Case) -> int:
    """Forward reads x, dt, B, C and writes y; backward reads x, dt, B, C and y's gradient and writes theirs.

    The states, in fp32, and `seq_idx` where there are such.
    """
    B, S, H, P, N, G = (case.axes[axis] for axis in ("B", "S", "H", "P", "N", "G"))
    wide, narrow, steps, states, ids = {
        "forward": (2, 2, 1, 2, 1),
        "backward": (3, 4, 2, 2, 1),
        "forward_backward": (5, 6, 3, 4, 2),
    }[case.pass_]
    moved = (wide * H * P + narrow * G * N + steps * H) * B * S * BYTES[case.dtype]
    moved += states * B * H * P * N * 4 if case.options["states"] else 0
    return moved + (ids * B * S * 4 if case.options["packed"] else 0)


def flops(case: Case) -> int:
    """What every form of it computes: into the state and out of it, two products of P × N a head and position;
    backward five, the state among them again. What chunks need beyond that is the price of the form.
    """
    B, S, H, P, N = (case.axes[axis] for axis in ("B", "S", "H", "P", "N"))
    products = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    return products * 2 * B * S * H * P * N


MODEL: dict[str, Any] = {"H": 80, "P": 64, "N": 128, "G": 1}
"""Mamba-2 2.7B: a model dimension of 2560, expanded to 5120."""


OPERATOR = Operator(
    name="ssd",
    summary="Mamba-2's scan: a linear recurrence with one decay a head and position",
    axes={
        "B": "batch",
        "S": "sequence",
        "H": "heads",
        "P": "head dimension",
        "N": "state dimension",
        "G": "groups of heads that share B and C",
    },
    options={"states": (False, True), "packed": (False, True)},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("x", "dt", "A", "B", "C", "D", "dt_bias"),
    tolerances={
        # Operands of matrix products are rounded to the inputs' dtype: masked products, states, scaled inputs.
        # The gradient of A is a sum over all positions of numbers that largely cancel.
        "bf16": Tolerance(norm=1.5e-2, absolute=8e-2, relative=5e-2),
        "fp16": Tolerance(norm=2e-3, absolute=1e-2, relative=8e-3),
        "fp32": Tolerance(norm=5e-5, absolute=2e-4, relative=1e-4),
    },
    plans={
        "quick": (grid("forward", B=2, S=8192, **MODEL),),
        "quick_cpu": (grid("forward", B=1, S=256, H=8, P=64, N=64, G=1, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=8, S=2048, **MODEL),
            grid("forward", "backward", B=2, S=8192, **MODEL),
            grid("forward", B=1, S=32768, **MODEL),
            grid("forward", "backward", B=1, S=131072, **MODEL),
            grid("forward", options={"states": True, "packed": True}, B=2, S=8192, **MODEL),
        ),
        "full": (
            grid("forward", "backward", dtypes=["fp16", "fp32"], B=2, S=4096, **MODEL),
            grid("forward", "backward", options={"states": True, "packed": True}, B=4, S=1000, **MODEL),
            grid("forward", "backward", B=4, S=[1, 63, 4095], H=24, P=[64, 128], N=64, G=8),
            grid("backward", B=1, S=32768, **MODEL),
        ),
    },
)
