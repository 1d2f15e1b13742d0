"""One decode step of a selective state-space model (Gu and Dao, arXiv 2312.00752; 2405.21060): state in place.

    state ← exp(dt · A) · state + dt · x ⊗ B        y = state · C + D · x, times silu(z) where there is a z

Bound by memory: the state is read and written once, everything else is small beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, on, operator, power_of_2
from .._pointwise import silu, softplus

TILES = {4: (512, 1), 2: (8192, 8)}
"""Elements of the state and warps of a program, by the bytes of an element: the fastest on an H200 for a state
(256, 80, 64, 128)."""


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advances `state` by one token, in place, and returns y.

    state (B, H, P, N); x, z and y (B, H, P); B and C (B, G, N), where G divides H and head h reads group
    h // (H / G). Two forms: a step and a decay a head as in Mamba-2, dt (B, H), A, D and dt_bias (H,); or
    one a channel as in Mamba-1, dt (B, H, P), A (H, P, N), D and dt_bias (H, P). A state (B, D, N) without
    heads takes x, dt and z (B, D), A (D, N), B and C (B, N), D and dt_bias (D,).

    With `slots` (B,), int32 or int64, the state of sequence b is state[slots[b]], of any number of slots;
    sequences with a negative slot are left out: no state changes for them, and their y is 0. Slots must
    differ.

    bf16, fp16 or fp32 each; y has x's dtype; computed in fp32. The step is dt + dt_bias, through softplus
    with `dt_softplus`. Not differentiable. Raises TypeError for a wrong type or dtype, ValueError for a
    wrong shape or device; the message names the argument.
    """
    check("state", state)
    if state.dim() == 3:
        check("x", x, dim=2)
        check("dt", dt, dim=2)
        check("A", A, dim=2)
        check("B", B, dim=2)
        check("C", C, dim=2)
        y = selective_state_update(
            state.unsqueeze(1),
            x.unsqueeze(1),
            dt.unsqueeze(1),
            A.unsqueeze(0),
            B.unsqueeze(1),
            C.unsqueeze(1),
            *(t if t is None else t.unsqueeze(-2) for t in (D, z, dt_bias)),
            dt_softplus,
            slots,
        )
        return y.squeeze(1)
    check("state", state, dim=4)
    check("x", x, dim=3, like=state)
    _, H, P, N = state.shape
    batch = x.shape[0]
    if slots is None:
        check("x", x, shape=(state.shape[0], H, P))
    else:
        check("slots", slots, dtypes=(torch.int32, torch.int64), shape=(batch,), like=state)
        check("x", x, shape=(batch, H, P))
    check("dt", dt, like=state)
    tied = dt.dim() == 2
    each = (H,) if tied else (H, P)
    check("dt", dt, shape=(batch, *each))
    check("A", A, shape=(H,) if tied else (H, P, N), like=state)
    check("B", B, dim=3, like=state)
    groups = B.shape[1]
    if H and (groups == 0 or H % groups):
        raise ValueError(f"B has {groups} groups, which do not divide the {H} heads of state")
    check("B", B, shape=(batch, groups, N))
    check("C", C, shape=(batch, groups, N), like=state)
    if D is not None:
        check("D", D, shape=each, like=state)
    if z is not None:
        check("z", z, shape=(batch, H, P), like=state)
    if dt_bias is not None:
        check("dt_bias", dt_bias, shape=each, like=state)
    result: torch.Tensor = _update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots)
    return result


class Inputs(NamedTuple):
    """As in `selective_state_update`; what flags say is missing is another tensor."""

    x: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    bias: Any
    slots: Any


class Sizes(NamedTuple):
    """Heads, channels of a head, numbers of a channel's state, and heads that read one group of B and C."""

    H: Any
    P: Any
    N: Any
    share: Any


class Batches(NamedTuple):
    """Strides from sequence to sequence."""

    x: Any
    dt: Any
    B: Any
    C: Any
    z: Any


class Flags(NamedTuple):
    """Known when compiling: one step a head, what there is, and whether steps go through softplus."""

    TIED: bool
    HAS_D: bool
    HAS_Z: bool
    HAS_BIAS: bool
    SOFTPLUS: bool
    SLOTS: bool


@triton.jit
def _step(  # type: ignore[no-untyped-def]  # Triton's types are its own
    state, given, y, sizes, state_strides, strides, flags: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """ROWS channels of one head of one sequence."""
    H, P, N, share = sizes
    state_b, state_h, state_p, state_n = state_strides
    blocks = tl.cdiv(P, ROWS)
    program = tl.program_id(0)
    p = (program % blocks) * ROWS + tl.arange(0, ROWS)
    h = (program // blocks) % H
    b = (program // blocks // H).to(tl.int64)
    n = tl.arange(0, WIDTH)
    channel = h * P + p
    inside = (p < P)[:, None] & (n < N)[None, :]
    slot = b
    if flags.SLOTS:
        slot = tl.load(given.slots + b).to(tl.int64)
        if slot < 0:
            tl.store(y + b * H * P + channel, tl.zeros([ROWS], y.dtype.element_ty), p < P)
            return
    at = slot * state_b + h.to(tl.int64) * state_h + (p.to(tl.int64) * state_p)[:, None] + (n * state_n)[None, :]
    before = tl.load(state + at, inside, 0.0).to(tl.float32)
    x = tl.load(given.x + b * strides.x + channel, p < P, 0.0).to(tl.float32)
    group = h // share
    enters = tl.load(given.B + b * strides.B + group * N + n, n < N, 0.0).to(tl.float32)
    leaves = tl.load(given.C + b * strides.C + group * N + n, n < N, 0.0).to(tl.float32)
    if flags.TIED:
        step = tl.load(given.dt + b * strides.dt + h).to(tl.float32)
        if flags.HAS_BIAS:
            step += tl.load(given.bias + h).to(tl.float32)
        if flags.SOFTPLUS:
            step = softplus(step)
        decay = tl.exp(step * tl.load(given.A + h).to(tl.float32))
        # h ← exp(Δ A) h + Δ x ⊗ B
        after = before * decay + (x * step)[:, None] * enters[None, :]
    else:
        step = tl.load(given.dt + b * strides.dt + channel, p < P, 0.0).to(tl.float32)
        if flags.HAS_BIAS:
            step += tl.load(given.bias + channel, p < P, 0.0).to(tl.float32)
        if flags.SOFTPLUS:
            step = softplus(step)
        rate = tl.load(given.A + channel[:, None] * N + n[None, :], inside, 0.0).to(tl.float32)
        after = before * tl.exp(step[:, None] * rate) + (x * step)[:, None] * enters[None, :]
    tl.store(state + at, after.to(state.dtype.element_ty), inside)
    # y = h · C + D x
    result = tl.sum(after * leaves[None, :], 1)
    if flags.HAS_D:
        if flags.TIED:
            result += x * tl.load(given.D + h).to(tl.float32)
        else:
            result += x * tl.load(given.D + channel, p < P, 0.0).to(tl.float32)
    if flags.HAS_Z:
        result *= silu(tl.load(given.z + b * strides.z + channel, p < P, 0.0).to(tl.float32))
    tl.store(y + b * H * P + channel, result.to(y.dtype.element_ty), p < P)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with everything behind its first dimension contiguous; a copy only where it is not."""
    inner = tensor[0] if tensor.shape[0] else tensor
    return tensor if inner.is_contiguous() else tensor.contiguous()


def _launch(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    slots: torch.Tensor | None,
    elements: int = 0,
    warps: int = 0,
) -> torch.Tensor:
    """`elements` of the state and `warps` a program, 0 for the usual ones."""
    y = _empty(state, x)
    if x.numel() == 0:
        return y
    _, H, P, N = state.shape
    x, dt, B, C = _packed(x), _packed(dt), _packed(B), _packed(C)
    gate = x if z is None else _packed(z)
    A = A.contiguous()
    usual = TILES[state.element_size()]
    elements, warps = elements or usual[0], warps or usual[1]
    width = power_of_2(max(N, 1))
    height = max(1, min(elements // width, power_of_2(P)))
    skip = A if D is None else D.contiguous()
    bias = A if dt_bias is None else dt_bias.contiguous()
    there = (D is not None, z is not None, dt_bias is not None)
    flags = Flags(dt.dim() == 2, *there, dt_softplus, slots is not None)
    with on(x):
        _step[(x.shape[0] * H * cdiv(P, height),)](
            state,
            Inputs(x, dt, A, B, C, skip, gate, bias, x if slots is None else slots.contiguous()),
            y,
            Sizes(H, P, N, H // B.shape[1]),
            state.stride(),
            Batches(x.stride(0), dt.stride(0), B.stride(0), C.stride(0), gate.stride(0)),
            flags,
            ROWS=height,
            WIDTH=width,
            num_warps=warps,
        )
    return y


def _empty(state: torch.Tensor, x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_update = operator(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? slots) -> Tensor",
    _launch,
    _empty,
)
