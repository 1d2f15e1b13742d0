"""Mamba-2's state-space duality (Dao and Gu, arXiv 2405.21060): a recurrence, one decay a head and position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Result, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

CHUNK = 64
"""Positions of a chunk, within which the reference sums over pairs of positions."""

HELD = 1 << 25
"""Pairs of positions, or numbers of state, of the chunks that the reference computes side by side."""

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
    """The recurrence h ← exp(step · A) h + step · x ⊗ B, y = h C + D x, by chunks of positions (arXiv 2405.21060).

    Within a chunk the recurrence is written out as sums over pairs of positions, which is the same in exact
    arithmetic; seq_idx cuts it where it changes. Chunks are computed side by side, as many as HELD allows, and
    only their states one by one. What such a piece holds is computed again for the backward pass and never kept,
    so that memory is bounded by the results and one state a piece.
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
    sizes = pieces(x.shape[1], x.shape[0] * x.shape[2], x.shape[3] * B.shape[3])
    before = ids[:, :1]
    parts = []
    for piece in zip(*(t.split(sizes, 1) for t in (x, step, B, C, ids)), strict=True):
        y, state = checkpoint(_piece, *piece, before, A, D, state, use_reentrant=False, preserve_rng_state=False)
        before = piece[-1][:, -1:]
        parts.append(y)
    y = torch.cat(parts, 1) if parts else x.clone()
    return (y, state) if return_final_state else y


def pieces(S: int, heads: int, state: int) -> list[int]:
    """The lengths of pieces of S positions: whole chunks, as many as HELD allows, and at the end what is left.

    `heads` are those of all rows together, `state` the numbers of the state of one.
    """
    size = CHUNK * max(1, HELD // max(1, heads * max(CHUNK * CHUNK, state)))
    whole = S - S % CHUNK
    return [length for length in (*[size] * (whole // size), whole % size, S % CHUNK) if length]


def chunks(t: torch.Tensor) -> torch.Tensor:
    """A piece (B, L, H, …) as its chunks (R, B, H, T, …)."""
    cut: torch.Tensor = t.unflatten(1, (-1, min(CHUNK, t.shape[1])))
    return cut.movedim((1, 3), (0, 2)).contiguous()


def joined(t: torch.Tensor) -> torch.Tensor:
    """The opposite of `chunks`."""
    return t.movedim((0, 2), (1, 3)).flatten(1, 2)


def chained(state: torch.Tensor, kept: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """state ← kept · state + added, chunk by chunk (R, …): the states that enter them, and the one behind all."""
    import torch

    entering = []
    for factor, addend in zip(kept, added, strict=True):
        entering.append(state)
        state = torch.addcmul(addend, factor, state)
    return torch.stack(entering), state


def _piece(
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
    x, step, B, C = (chunks(t) for t in (x, step, B, C))
    scores = (C @ B.mT).repeat_interleave(groups, 2)
    B, C = (t.repeat_interleave(groups, 2) for t in (B, C))
    ids = chunks(ids[:, :, None])[:, :, 0]
    before, last = torch.cat((before[None], ids[:-1, :, -1:])), ids[..., -1:]

    given = x * step[..., None]
    logs = (step * A[:, None]).cumsum(-1)
    seen = (ids[..., :, None] == ids[..., None, :]).tril()[:, :, None]
    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    carried = logs.exp().masked_fill((ids != before)[:, :, None], 0.0)
    rest = (logs[..., -1:] - logs).exp().masked_fill((ids != last)[:, :, None], 0.0)
    kept = carried[..., -1, None, None]

    entering, state = chained(state, kept, (given * rest[..., None]).mT @ B)
    y = (scores * decays) @ given + (C @ entering.mT) * carried[..., None] + D[:, None, None] * x
    return joined(y), state


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
