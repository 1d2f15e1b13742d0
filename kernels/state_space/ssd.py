"""Mamba-2's state-space duality (Dao and Gu, arXiv 2405.21060), forward and backward, in chunks.

    h ← exp(step · A) h + step · x ⊗ B        y = h C + D x        step = softplus(dt + dt_bias)

What it costs: x is read and y written, both (B, S, H, P); B and C are shared by the heads of a group and come
from the L2 cache. So the forward pass keeps the state of a head in registers and walks through the sequence
chunk by chunk, each one a few matrix products; nothing else of the size of x is read or written. The sequence
is cut into segments only where batch and heads do not fill the device, which reads x once more. In fp32, whose
products have their operands in registers and leave no room there for a state, the states of all chunks are
written instead, and every chunk is a program of its own.

The backward pass writes the states and their gradients at the border of every chunk, and then has one program
for each chunk and group, over all heads: no atomics, gradients are the same in every run.
"""

from __future__ import annotations

from typing import Any

import torch

from .._common import INTERPRETED, capability, cdiv, check, lined, multiprocessors, on, operator
from ._ssd_backward import chunk_backward, from_states, reduce_gradients
from ._ssd_forward import Recurrence, block, scan, scan_segments, states, steps, tma, y_from_states

CHUNK = 16 if INTERPRETED else 64
"""Positions of a chunk: the least that fills a matrix instruction, as the work within one grows with it."""

RESIDENT = 2
"""Programs of the scan that a multiprocessor runs at a time."""

MOST_SEGMENTS = 16

STATES = 0.35
"""What the states of segments cost, as a part of the scan."""

WIDEST = 128
"""From this head dimension on a head is computed as several, each of half of it; see `narrow`."""


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y (B, S, H, P) in x's dtype, and with `return_final_state` the last state (B, H, P, N) in fp32.

    x (B, S, H, P), B and C (B, S, G, N) in one of bf16, fp16, fp32; G divides H, and head h reads group
    h // (H / G). dt (B, S, H); A, D and dt_bias (H,); initial_state (B, H, P, N); each in any of the three. N
    from 1 to 256. A should be negative. With `dt_softplus` the step is softplus(dt + dt_bias).

    `seq_idx` (B, S), int32, holds several sequences in a row: positions of one number belong together and
    follow each other. The initial state is that of the first, the final state that of the last.

    Matrix products have operands of x's dtype and sums in fp32; fp32 inputs are multiplied as fp32, not TF32.
    Decays are differences of sums within a chunk, in fp32, and never positive exponents where A is negative.
    Differentiable once in all tensors but seq_idx. Raises `TypeError` for a wrong dtype and `ValueError` for a
    wrong shape or device.
    """
    batch, S, H, P, N = sizes(x, B, C)
    check("dt", dt, shape=(batch, S, H), like=x)
    check("A", A, shape=(H,), like=x)
    for name, tensor, shape in (
        ("D", D, (H,)),
        ("dt_bias", dt_bias, (H,)),
        ("initial_state", initial_state, (batch, H, P, N)),
    ):
        if tensor is not None:
            check(name, tensor, shape=shape, like=x)
    if seq_idx is not None:
        check("seq_idx", seq_idx, shape=(batch, S), dtypes=(torch.int32,), like=x)
    if narrow(x.dtype, P, N):
        y, final = _narrow(x, dt, A, B, C, D, dt_bias, initial_state, seq_idx, dt_softplus)
    else:
        y, final = _ssd(x, dt, A, B, C, D, dt_bias, initial_state, seq_idx, dt_softplus)
    return (y, final) if return_final_state else y


def sizes(x: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Batch, S, H, P and N of x (B, S, H, P), B and C (B, S, G, N); raises what `ssd` says if they are not."""
    check("x", x, dim=4)
    batch, S, H, P = x.shape
    check("B", B, dim=4, dtypes=(x.dtype,), like=x)
    G, N = B.shape[2:]
    if H and (G == 0 or H % G):
        raise ValueError(f"B has {G} groups, which do not divide the {H} heads of x")
    if not 1 <= N <= 256:
        raise ValueError(f"B has state dimension {N}, expected 1 to 256")
    check("B", B, shape=(batch, S, G, N))
    check("C", C, shape=(batch, S, G, N), dtypes=(x.dtype,), like=x)
    return batch, S, H, P, N


def narrow(dtype: torch.dtype, P: int, N: int) -> bool:
    """Whether heads of P with states of P x N are computed as several heads of 64: what is larger has no room in
    registers or shared memory.
    """
    return P >= WIDEST or (P > WIDEST // 2 and (dtype == torch.float32 or N > 128))


def _narrow(x: torch.Tensor, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any, initial: Any, *rest: Any) -> Any:
    """The same with heads of 64: the rows of a head's state depend on nothing of each other."""
    batch, S, H, P = x.shape
    width = WIDEST // 2
    parts = cdiv(P, width)
    padding = parts * width - P
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
        initial = None if initial is None else torch.nn.functional.pad(initial, (0, 0, 0, padding))
    if initial is not None:
        initial = initial.reshape(batch, H * parts, width, initial.shape[-1])
    # In fp32: a head's gradient is the sum of its parts', which is rounded to 16 bits once, and not each of them.
    dt, A, D, bias = (None if t is None else t.float().repeat_interleave(parts, -1) for t in (dt, A, D, bias))
    y, final = _ssd(x.reshape(batch, S, H * parts, width), dt, A, B, C, D, bias, initial, *rest)
    y, final = y.view(batch, S, H, parts * width), final.view(batch, H, parts * width, final.shape[-1])
    return (y[..., :P], final[:, :, :P]) if padding else (y, final)


# ---------------------------------------------------------------------------------------------------------
# Launches.


def segments(programs: int, chunks: int, slots: int) -> int:
    """Segments of a sequence, with `programs` of each, of which `slots` run at a time: as the last round of
    programs is full and the states, where there is more than one, cost little. Each has four chunks or more.
    """

    def cost(count: int) -> float:
        return cdiv(programs * count, slots) * cdiv(chunks, count) * (1 if count == 1 else 1 + STATES)

    best = min(range(1, max(1, min(MOST_SEGMENTS, chunks // 4)) + 1), key=cost)
    return cdiv(chunks, cdiv(chunks, best))


def _padded(state: torch.Tensor | None, height: int, width: int) -> torch.Tensor | None:
    """A state (B, H, P, N) as whole tiles (B, H, 1, height, width), fp32 and contiguous."""
    if state is None:
        return None
    P, N = state.shape[2:]
    wide = torch.nn.functional.pad(state.float(), (0, width - N, 0, height - P))
    return wide.contiguous().unsqueeze(2)


def _entries(
    x: torch.Tensor, b: torch.Tensor, recurrence: Recurrence, count: int, reverse: bool, described: bool,
    last: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The state that each of `count` segments starts from, (B, H, count, tile), None for zeros; and the state
    after all of them where `last` asks for it and there are several. The recurrence's entry is the initial state.
    """
    batch, _, H, P = x.shape
    if count == 1:
        return recurrence.entry, None
    local = torch.empty(batch, H, count, block(P), block(b.shape[-1]), dtype=torch.float32, device=x.device)
    total = torch.empty(batch, H, count, dtype=torch.float32, device=x.device)
    states(
        x, b, recurrence._replace(entry=None), None, local, total,
        segments=count, chunk=CHUNK, reverse=reverse, described=described, last=last,
    )  # fmt: skip
    return local, scan_segments(local, total, recurrence.entry, reverse=reverse, last=last)


def _all_states(
    x: torch.Tensor, b: torch.Tensor, recurrence: Recurrence, count: int, reverse: bool, described: bool,
    last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The state that each chunk starts from, (B, chunks, H, tile) in x's dtype; and the one after all of them,
    (B, H, tile) in fp32, empty where `last` does not ask for it. The initial one has a dimension of 1 before its
    tile. In `reverse` from the last chunk to the first.
    """
    batch, S, H, P = x.shape
    tile = (block(P), block(b.shape[-1]))
    entry, after = _entries(x, b, recurrence, count, reverse, described, last)
    each = torch.empty(batch, cdiv(S, CHUNK), H, *tile, dtype=x.dtype, device=x.device)
    result = total = None
    if last and after is None:
        result = torch.empty(batch, H, 1, *tile, dtype=torch.float32, device=x.device)
        total = torch.empty(batch, H, 1, dtype=torch.float32, device=x.device)
        after = result.squeeze(2)
    states(
        x, b, recurrence._replace(entry=entry), each, result, total,
        segments=count, chunk=CHUNK, reverse=reverse, described=described,
    )  # fmt: skip
    return each, recurrence.step.new_empty(0) if after is None else after


def _launch(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor | None, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None, bias: torch.Tensor | None, initial: torch.Tensor | None, ids: torch.Tensor | None,
    softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(y, the last state). Without A, dt is the logarithm of the decay and x enters the state as it is."""
    batch, S, H, P = x.shape
    N = B.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y, _unchanged(x, B, initial)
    x, B, C = lined(x), lined(B), lined(C)
    A, D, bias, ids = (None if t is None else t.contiguous() for t in (A, D, bias, ids))
    described = _described(x, B, C)
    count = segments(batch * H, cdiv(S, CHUNK), RESIDENT * multiprocessors(x))
    with on(x):
        entry = _padded(initial, block(P), block(N))
        recurrence = Recurrence(*steps(dt, A, bias, softplus, CHUNK), ids=ids, entry=entry)
        if x.dtype == torch.float32:
            h, result = _all_states(x, B, recurrence, count, False, described, True)
            y_from_states(x, B, C, recurrence._replace(skip=D, entry=h), y, chunk=CHUNK)
            return y, _of_tiles(result, P, N)
        entry, _ = _entries(x, B, recurrence, count, False, described, False)
        result = torch.empty(batch, H, block(P), block(N), dtype=torch.float32, device=x.device)
        recurrence = recurrence._replace(skip=D, entry=entry)
        scan(x, B, C, recurrence, y, result, segments=count, chunk=CHUNK, described=described)
    return y, _of_tiles(result, P, N)


def _of_tiles(state: torch.Tensor, P: int, N: int) -> torch.Tensor:
    """(B, H, P, N) of tiles, also where they are that large no view of them: autograd refuses to change in place
    what a function gives as one.
    """
    part = state[:, :, :P, :N].contiguous()
    found: torch.Tensor = torch.ops.aten._unsafe_view(part, part.shape)
    return found


def _unchanged(x: torch.Tensor, B: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
    """The final state of sequences without positions, or of none: a new tensor."""
    if initial is not None:
        return initial.to(torch.float32, copy=True)
    return torch.zeros(x.shape[0], *x.shape[2:], B.shape[-1], dtype=torch.float32, device=x.device)


def _described(*tensors: torch.Tensor) -> bool:
    """Whether the kernels load chunks of these by the tensor memory accelerator."""
    return tma(CHUNK, *tensors) and capability(tensors[0].device)[0] >= 9


def _launch_backward(
    grad: torch.Tensor, dfinal: torch.Tensor | None,
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor | None, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None, bias: torch.Tensor | None, initial: torch.Tensor | None, ids: torch.Tensor | None,
    softplus: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    batch, S, H, P = x.shape
    N = B.shape[-1]
    if x.numel() == 0:
        gradients = [t.zero_() for t in _shaped(x, dt, A, B, C, D, bias, initial)]
        if initial is not None and dfinal is not None:
            gradients[-1].copy_(dfinal)
        return tuple(gradients)
    x, B, C, grad = lined(x), lined(B), lined(C), lined(grad)
    A, D, bias, ids = (None if t is None else t.contiguous() for t in (A, D, bias, ids))
    described = _described(x, B, C, grad)
    count = segments(batch * H, cdiv(S, CHUNK), RESIDENT * multiprocessors(x))
    height, width = block(P), block(N)
    with on(x):
        recurrence = Recurrence(*steps(dt, A, bias, softplus, CHUNK), ids=ids)
        starting = recurrence._replace(entry=_padded(initial, height, width))
        h, _ = _all_states(x, B, starting, count, False, described, False)
        ending = recurrence._replace(entry=_padded(dfinal, height, width))
        g, first = _all_states(grad, C, ending, count, True, described, initial is not None)
        tiles: dict[str, Any] = {"chunk": CHUNK, "described": described}
        dx, dscores, dskip, parts = chunk_backward(x, B, C, grad, recurrence._replace(skip=D), h, g, **tiles)
        dB = from_states(x, C, recurrence, g, dscores, dC=False, **tiles)
        dC = from_states(grad, B, recurrence, h, dscores, dC=True, **tiles)
        ddt, dA, dbias = reduce_gradients(parts, recurrence.step, A, dt, softplus, CHUNK)
    dinitial = dA
    if initial is not None:
        dinitial = first[:, :, :P, :N].to(initial.dtype).contiguous()
    empty = dA.new_empty(0)
    return (
        dx, ddt, dA if A is None else dA.to(A.dtype), dB, dC,
        empty if D is None else dskip.sum((0, 1)).to(D.dtype),
        empty.clone() if bias is None else dbias.to(bias.dtype),
        empty.clone() if initial is None else dinitial,
    )  # fmt: skip


def _shaped(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Memory for the gradients, contiguous; none for what is not given."""
    return tuple(
        x.new_empty(0, dtype=torch.float32) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in (x, *others)
    )


# ---------------------------------------------------------------------------------------------------------
# Autograd.


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.softplus = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    if grad is None:
        if dfinal is None:
            return (None,) * 10
        grad = torch.zeros_like(tensors[0])
    gradients = _gradients(grad, dfinal, *tensors, ctx.softplus)
    return (*(None if t is None else g for t, g in zip(tensors[:8], gradients, strict=True)), None, None)


_INPUTS = (
    "Tensor x, Tensor dt, Tensor? A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor? initial_state,"
    " Tensor? seq_idx, bool softplus"
)

_ssd = operator(
    f"ssd({_INPUTS}) -> (Tensor, Tensor)",
    _launch,
    lambda x, dt, A, B, C, D, bias, initial, ids, softplus: (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape[0], *x.shape[2:], B.shape[-1], dtype=torch.float32, device=x.device),
    ),
    _save,
    _differentiate,
)

_gradients = operator(
    f"ssd_backward(Tensor grad, Tensor? dfinal, {_INPUTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda grad, dfinal, x, dt, A, B, C, D, bias, initial, ids, softplus: _shaped(
        x, dt, A, B, C, D, bias, initial
    ),
)
