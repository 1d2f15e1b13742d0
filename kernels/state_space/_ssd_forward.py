"""The forward kernels of `ssd.py`: steps, states of segments, the passing of states, the scan itself, and for fp32
the reading of states.

Chunks are the sequence's pieces of CHUNK positions, within which the recurrence is a masked matrix product; a
segment is what one program walks through, chunk by chunk, with the state in registers. Where batch and heads
alone fill the device there is one segment a sequence and no state is ever written; else the states of all
segments are computed first (x and B read once more), passed on, and every segment starts from its own.

Scratch is padded: steps to whole chunks (with steps of 0, which change nothing), states to whole tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import INTERPRETED, cdiv, power_of_2
from .._pointwise import softplus

ENTRIES = 1024
"""Numbers of a state that one program of the passing kernel carries."""

PIECE = 8 if INTERPRETED else 16
"""What one product in fp32 sums over, where that is a loop: without tensor cores, a thread has all that it
multiplies in registers, and all of a product's multiplications are instructions of their own.
"""


@dataclass(frozen=True)
class Launch:
    """Warps of a program, and chunks (or heads) whose loads are in flight in its loop."""

    warps: int
    stages: int


# ---------------------------------------------------------------------------------------------------------
# Tiles: (rows, width) blocks of one head of a (B, S, H, P) tensor.


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, batch, row, head, stride_b, stride_s, stride_h, S,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr, first=0,
):  # fmt: skip
    """Rows `row` to `row + ROWS` of a head, zero beyond S and beyond WIDTH; 64-bit products with strides. COLUMNS
    of them, from `first` on; with TMA WIDTH is a multiple of COLUMNS.
    """
    if TMA:
        tile = x.load([tl.cast(batch, tl.int32), row, head * WIDTH + first]).reshape([ROWS, COLUMNS])
    else:
        rows = tl.arange(0, ROWS)
        columns = first + tl.arange(0, COLUMNS)
        start = x + batch * stride_b + tl.cast(head, tl.int64) * stride_h + tl.cast(row, tl.int64) * stride_s
        pointers = start + (rows.to(tl.int64) * stride_s)[:, None] + columns[None, :]
        inside = (row + rows < S)[:, None]
        if WIDTH % COLUMNS != 0:
            inside = inside & (columns < WIDTH)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, tile, batch, row, head, S, H,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Writes a tile to a contiguous (B, S, H, WIDTH) tensor."""
    if TMA:
        tile = tile.to(x.dtype).reshape([1, ROWS, COLUMNS])
        x.store([tl.cast(batch, tl.int32), row, head * WIDTH], tile)
    else:
        rows = row + tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        start = x + (batch * S * H + head) * WIDTH
        pointers = start + (rows.to(tl.int64) * H * WIDTH)[:, None] + columns[None, :]
        inside = (rows < S)[:, None]
        if WIDTH != COLUMNS:
            inside = inside & (columns < WIDTH)[None, :]
        tl.store(pointers, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def sequences(ids, batch, row, S, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Sequence numbers of a chunk of `ids` (B, S), of the position before it and of its last position.

    Before the first position comes the first sequence (its initial state), after the last nothing new.
    """
    at = tl.minimum(row + tl.arange(0, CHUNK), S - 1)
    own = tl.load(ids + batch * S + at)
    before = tl.load(ids + batch * S + tl.maximum(row - 1, 0))
    last = tl.load(ids + batch * S + tl.minimum(row + CHUNK - 1, S - 1))
    return own, before, last


# ---------------------------------------------------------------------------------------------------------
# Kernels.


@triton.jit
def _steps(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dt, A, bias, step, decay, stride_b, stride_s, stride_h, S, H, chunks,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """dt (B, S, H) to `step` (B, H, S') after bias and softplus, and `decay`, log₂ of the decay from the chunk's
    start to each position, inclusive: sums of step · A within a chunk. S' is S in whole chunks. With GATES dt is
    the logarithm of a position's decay itself, and every step is 1.
    """
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    rows = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (rows < S)[:, None] & (heads < H)[None, :]
    pointers = dt + batch * stride_b + (rows.to(tl.int64) * stride_s)[:, None] + (heads * stride_h)[None, :]
    value = tl.load(pointers, inside, 0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + heads, heads < H, 0.0).to(tl.float32)[None, :]
    if SOFTPLUS:
        value = softplus(value)
    value = tl.where(inside, value, 0.0)
    if GATES:
        sums = tl.cumsum(value * 1.4426950408889634, 0)  # log₂e
        value = tl.where(inside, 1.0, 0.0)
    else:
        rate = tl.load(A + heads, heads < H, 0.0).to(tl.float32) * 1.4426950408889634
        sums = tl.cumsum(value * rate[None, :], 0)
    at = (batch * H + heads)[:, None] * (chunks * CHUNK) + rows[None, :]
    tl.store(step + at, tl.trans(value), (heads < H)[:, None])
    tl.store(decay + at, tl.trans(sums), (heads < H)[:, None])


@triton.jit
def _states(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, step, decay, ids, entry, each, result, total,
    stride_xb, stride_xs, stride_xh, stride_bb, stride_bs, stride_bg,
    S, H, batches, groups, chunks, per, segments, left,
    P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    REVERSE: tl.constexpr, ENTRY: tl.constexpr, EACH: tl.constexpr, RESULT: tl.constexpr,
    PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states of one segment of one head, which begin with `entry` (or 0).

    Forward, state ← decay · state + Σ (step · decay to the end) x ⊗ B. With REVERSE, from the last chunk to
    the first, for the gradient of the state: x is then the gradient of y and b is C, and
    state ← decay · state + Σ (decay from the start) x ⊗ C.
    With EACH the state that each chunk starts from goes to `each` (B, chunks, H, tile); with RESULT the last
    one goes to `result` (B, H, segments, tile), and log₂ of the segment's decay to `total` (B, H, segments).
    The first `left` programs of a full grid are not in this one.
    """
    program = tl.program_id(0) + left
    head = program % H
    batch = program // H % batches
    segment = program // (H * batches)
    group = head // groups
    place = batch.to(tl.int64) * H + head
    wide = batch.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    tile = tl.arange(0, BLOCK_P)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    spot = (place * segments + segment) * (BLOCK_P * BLOCK_N)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if ENTRY:
        state += tl.load(entry + spot + tile)
    step += place * chunks * CHUNK
    decay += place * chunks * CHUNK
    first = segment * per
    count = tl.minimum(per, chunks - first)
    sums = 0.0
    for turn in tl.range(0, count, num_stages=STAGES):
        chunk = first + turn
        if REVERSE:
            chunk = first + count - 1 - turn
        row = chunk * CHUNK
        given = load_tile(x, wide, row, head, stride_xb, stride_xs, stride_xh, S, P, CHUNK, BLOCK_P, TMA)
        other = load_tile(b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, BLOCK_N, TMA)
        sofar = tl.load(decay + row + rows)
        whole = tl.load(decay + row + CHUNK - 1)
        weight = tl.exp2(sofar) if REVERSE else tl.exp2(whole - sofar) * tl.load(step + row + rows)
        if PACKED:
            own, before, last = sequences(ids, wide, row, S, CHUNK)
            weight = tl.where(own == (before if REVERSE else last), weight, 0.0)
            whole = tl.where(before == last, whole, float("-inf"))
        if EACH:
            to = ((wide * chunks + chunk) * H + head) * (BLOCK_P * BLOCK_N)
            tl.store(each + to + tile, state.to(each.dtype.element_ty))
        given = (given.to(tl.float32) * weight[:, None]).to(other.dtype)
        state = tl.dot(tl.trans(given), other, state * tl.exp2(whole), input_precision=PRECISION)
        sums += whole
    if RESULT:
        tl.store(result + spot + tile, state)
        tl.store(total + place * segments + segment, sums)


@triton.jit
def _pass(  # type: ignore[no-untyped-def]  # Triton's types are its own
    states, total, entry, result, segments,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, ENTRY: tl.constexpr, RESULT: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """`states` (B, H, segments, tile), what each segment adds, become what each starts from, in place. With
    REVERSE from the last segment to the first. With RESULT what follows the last one goes to `result`
    (B, H, tile); without, what that adds is not read.
    """
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    state = tl.zeros([ENTRIES], tl.float32)
    if ENTRY:
        state += tl.load(entry + place * SIZE + at)
    for turn in range(0, segments):
        segment = turn
        if REVERSE:
            segment = segments - 1 - turn
        pointers = states + (place * segments + segment) * SIZE + at
        if RESULT or turn < segments - 1:
            added = tl.load(pointers)
            tl.store(pointers, state)
            state = state * tl.exp2(tl.load(total + place * segments + segment)) + added
        else:
            tl.store(pointers, state)
    if RESULT:
        tl.store(result + place * SIZE + at, state)


@triton.jit
def _scan(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, step, decay, skip, ids, entry, y, result,
    stride_xb, stride_xs, stride_xh, stride_bb, stride_bs, stride_bg, stride_cb, stride_cs, stride_cg,
    S, H, batches, groups, chunks, per, segments,
    P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    SKIP: tl.constexpr, ENTRY: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y of one segment of one head, with the state (N, P) in registers from chunk to chunk.

    Programs beside each other have neighbouring heads at the same chunk: B and C come from the L2 cache.
    """
    program = tl.program_id(0)
    head = program % H
    batch = program // H % batches
    segment = program // (H * batches)
    group = head // groups
    place = batch.to(tl.int64) * H + head
    wide = batch.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    causal = rows[:, None] >= rows[None, :]
    tile = tl.arange(0, BLOCK_P)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    spot = (place * segments + segment) * (BLOCK_P * BLOCK_N)
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if ENTRY:
        state += tl.load(entry + spot + tile)
    if SKIP:
        through = tl.load(skip + head).to(tl.float32)
    step += place * chunks * CHUNK
    decay += place * chunks * CHUNK
    first = segment * per
    for chunk in tl.range(first, tl.minimum(first + per, chunks), num_stages=STAGES):
        row = chunk * CHUNK
        read = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, BLOCK_N, TMA)
        written = load_tile(b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, BLOCK_N, TMA)
        sofar = tl.load(decay + row + rows)
        size = tl.load(step + row + rows)
        whole = tl.load(decay + row + CHUNK - 1)
        carried = tl.exp2(sofar)
        weight = tl.exp2(whole - sofar) * size
        visible = causal
        if PACKED:
            own, before, last = sequences(ids, wide, row, S, CHUNK)
            visible = visible & (own[:, None] == own[None, :])
            carried = tl.where(own == before, carried, 0.0)
            weight = tl.where(own == last, weight, 0.0)
            whole = tl.where(before == last, whole, float("-inf"))
        scores = tl.dot(read, tl.trans(written), input_precision=PRECISION)
        # The difference of exponents only where it is not positive: no overflow.
        scores *= tl.exp2(tl.where(visible, sofar[:, None] - sofar[None, :], float("-inf"))) * size[None, :]
        out = tl.dot(read, state.to(read.dtype), input_precision=PRECISION) * carried[:, None]
        given = load_tile(x, wide, row, head, stride_xb, stride_xs, stride_xh, S, P, CHUNK, BLOCK_P, TMA)
        out = tl.dot(scores.to(given.dtype), given, out, input_precision=PRECISION)
        wider = given.to(tl.float32)
        if SKIP:
            out += wider * through
        weighted = (wider * weight[:, None]).to(given.dtype)
        state = tl.dot(tl.trans(written), weighted, state * tl.exp2(whole), input_precision=PRECISION)
        store_tile(y, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, TMA)
    if segment == segments - 1:
        tl.store(result + place * (BLOCK_P * BLOCK_N) + tile, state)


@triton.jit
def _read(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, step, decay, skip, ids, h, y,
    stride_xb, stride_xs, stride_xh, stride_bb, stride_bs, stride_bg, stride_cb, stride_cs, stride_cg,
    S, H, groups, chunks,
    P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y of one chunk of one head from the state h (B, chunks, H, tile) that the chunk starts from, in fp32.

    A product in fp32 has its operands in registers, so that it is made of pieces, PIECE of what is summed over,
    by loops that stay loops.
    """
    program = tl.program_id(0)
    head = program % H
    chunk = program // H % chunks
    wide = (program // H // chunks).to(tl.int64)
    group = head // groups
    place = wide * H + head
    row = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    few = tl.arange(0, PIECE)
    at = place * chunks * CHUNK + row
    sofar = tl.load(decay + at + rows)
    carried = tl.exp2(sofar)
    if PACKED:
        own, before, _ = sequences(ids, wide, row, S, CHUNK)
        carried = tl.where(own == before, carried, 0.0)
    spot = ((wide * chunks + chunk) * H + head) * (BLOCK_P * BLOCK_N)
    tile = tl.arange(0, BLOCK_P)[:, None] * BLOCK_N + few[None, :]
    out = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    for n in tl.range(0, N, PIECE, num_stages=STAGES):
        read = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, PIECE, False, n)
        state = tl.load(h + spot + n + tile)
        out = tl.dot(read, tl.trans(state), out, input_precision="ieee")
    out *= carried[:, None]
    for j in tl.range(0, CHUNK, PIECE, num_stages=1):
        scores = tl.zeros([CHUNK, PIECE], tl.float32)
        for n in tl.range(0, N, PIECE, num_stages=STAGES):
            read = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, PIECE, False, n)
            written = load_tile(
                b, wide, row + j, group, stride_bb, stride_bs, stride_bg, S, N, PIECE, PIECE, False, n
            )
            scores = tl.dot(read, tl.trans(written), scores, input_precision="ieee")
        visible = rows[:, None] >= (j + few)[None, :]
        if PACKED:
            theirs = tl.load(ids + wide * S + tl.minimum(row + j + few, S - 1))
            visible = visible & (own[:, None] == theirs[None, :])
        past = tl.load(decay + at + j + few)
        # The difference of exponents only where it is not positive: no overflow.
        scores *= tl.exp2(tl.where(visible, sofar[:, None] - past[None, :], float("-inf")))
        scores *= tl.load(step + at + j + few)[None, :]
        given = load_tile(x, wide, row + j, head, stride_xb, stride_xs, stride_xh, S, P, PIECE, BLOCK_P, False)
        out = tl.dot(scores, given, out, input_precision="ieee")
    if SKIP:
        given = load_tile(x, wide, row, head, stride_xb, stride_xs, stride_xh, S, P, CHUNK, BLOCK_P, False)
        out += given * tl.load(skip + head).to(tl.float32)
    store_tile(y, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, False)


# ---------------------------------------------------------------------------------------------------------
# Launches. All tensors are checked; x, B and C have a contiguous last dimension.


def launch(kernel: str, dtype: torch.dtype, N: int) -> Launch:
    """How `kernel` is launched: in 16 bits as measured on an H200 with N = 128, in fp32 with as many warps as it
    takes to have registers for operands.
    """
    if dtype == torch.float32:
        return {"states": Launch(8, 1), "read": Launch(4, 1), "inner": Launch(16, 1), "outer": Launch(8, 1)}[
            kernel
        ]
    # A larger state has shared memory for two programs of a multiprocessor in one stage only.
    scan = Launch(4, 2) if block(N) <= 128 else Launch(4, 1)
    return {"states": Launch(4, 3), "scan": scan, "inner": Launch(4, 1), "outer": Launch(4, 3)}[kernel]


def block(width: int) -> int:
    """Columns of a tile: a power of two that a matrix instruction takes."""
    return max(16, power_of_2(width))


def steps(
    dt: torch.Tensor, A: torch.Tensor | None, bias: torch.Tensor | None, use_softplus: bool, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, decay), each (B, H, S in whole chunks), fp32: see `_steps`. Without A, dt is gates."""
    B, S, H = dt.shape
    chunks = cdiv(S, chunk)
    both = torch.empty(2, B, H, chunks * chunk, dtype=torch.float32, device=dt.device)
    _steps[(B * chunks, cdiv(H, 16))](
        dt, dt if A is None else A, dt if bias is None else bias, both[0], both[1], *dt.stride(), S, H, chunks,
        CHUNK=chunk, HEADS=16, BIAS=bias is not None, SOFTPLUS=use_softplus, GATES=A is None, num_warps=4,
    )  # fmt: skip
    return both[0], both[1]


def tma(chunk: int, *tensors: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can load (chunk, P) tiles of these (B, S, H, P) tensors: heads side
    by side, tiles whole, addresses and strides in units of 16 bytes.
    """
    for x in tensors:
        B, S, H, P = x.shape
        size = x.element_size()
        if size != 2 or block(P) != P or P > 256 or chunk > S or x.stride(3) != 1 or (H > 1 and x.stride(2) != P):
            return False
        outer = x.stride(1) if B == 1 else x.stride(0)
        if x.data_ptr() % 16 or any(stride <= 0 or stride * size % 16 for stride in (x.stride(1), outer)):
            return False
    return True


def source(x: torch.Tensor, chunk: int, described: bool, width: int | None = None) -> Any:
    """What `load_tile` takes for a (B, S, H, P) tensor: a descriptor of (1, chunk, width) blocks, or itself."""
    if not described:
        return x
    B, S, H, P = x.shape
    outer = x.stride(0) if B > 1 else S * x.stride(1)
    return TensorDescriptor(x, [B, S, H * P], [outer, x.stride(1), 1], [1, chunk, width or P])


def states(
    x: torch.Tensor, b: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, ids: torch.Tensor | None,
    entry: torch.Tensor | None, each: torch.Tensor | None, result: torch.Tensor | None,
    total: torch.Tensor | None, *, segments: int, chunk: int, reverse: bool, described: bool,
    last: bool = True, how: Launch | None = None,
) -> None:  # fmt: skip
    """Launches `_states`; what is None is not read or not written. Without `last` the last segment is left out
    (in reverse the first), whose result nobody wants.
    """
    B, S, H, P = x.shape
    G, N = b.shape[2:]
    chunks = cdiv(S, chunk)
    how = how or launch("states", x.dtype, N)
    none = step
    _states[((segments if last else segments - 1) * B * H,)](
        source(x, chunk, described), source(b, chunk, described), step, decay, none if ids is None else ids,
        none if entry is None else entry, none if each is None else each, none if result is None else result,
        none if total is None else total, *x.stride()[:3], *b.stride()[:3],
        S, H, B, H // G, chunks, cdiv(chunks, segments), segments, 0 if last or not reverse else B * H,
        P, N, chunk, block(P), block(N), reverse, entry is not None, each is not None, result is not None,
        ids is not None, described, precision(x.dtype), how.stages, num_warps=how.warps,
    )  # fmt: skip


def pass_on(
    local: torch.Tensor, total: torch.Tensor, entry: torch.Tensor | None, *, reverse: bool, last: bool = True
) -> torch.Tensor | None:
    """Launches `_pass` on `local` (B, H, segments, tile), in place; with `last` gives the state after all."""
    B, H, segments, height, width = local.shape
    size = height * width
    result = torch.empty(B, H, height, width, dtype=torch.float32, device=local.device) if last else None
    entries = min(ENTRIES, size)
    _pass[(B * H, size // entries)](
        local, total, local if entry is None else entry, local if result is None else result, segments,
        size, entries, entry is not None, last, reverse, num_warps=4,
    )  # fmt: skip
    return result


def scan(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, decay: torch.Tensor,
    skip: torch.Tensor | None, ids: torch.Tensor | None, entry: torch.Tensor | None, y: torch.Tensor,
    result: torch.Tensor, *, segments: int, chunk: int, described: bool, how: Launch | None = None,
) -> None:  # fmt: skip
    """Launches `_scan` into y and result, in 16 bits."""
    B, S, H, P = x.shape
    G, N = b.shape[2:]
    chunks = cdiv(S, chunk)
    how = how or launch("scan", x.dtype, N)
    none = step
    _scan[(segments * B * H,)](
        source(x, chunk, described), source(b, chunk, described), source(c, chunk, described), step, decay,
        none if skip is None else skip, none if ids is None else ids, none if entry is None else entry,
        source(y, chunk, described), result, *x.stride()[:3], *b.stride()[:3], *c.stride()[:3],
        S, H, B, H // G, chunks, cdiv(chunks, segments), segments,
        P, N, chunk, block(P), block(N), skip is not None, entry is not None,
        ids is not None, described, precision(x.dtype), how.stages, num_warps=how.warps,
    )  # fmt: skip


def read(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, decay: torch.Tensor,
    skip: torch.Tensor | None, ids: torch.Tensor | None, h: torch.Tensor, y: torch.Tensor, *, chunk: int,
    how: Launch | None = None,
) -> None:  # fmt: skip
    """Launches `_read` into y, in fp32; h is (B, chunks, H, tile)."""
    B, S, H, P = x.shape
    G, N = b.shape[2:]
    chunks = cdiv(S, chunk)
    how = how or launch("read", x.dtype, N)
    _read[(B * chunks * H,)](
        x, b, c, step, decay, step if skip is None else skip, step if ids is None else ids, h, y,
        *x.stride()[:3], *b.stride()[:3], *c.stride()[:3], S, H, H // G, chunks,
        P, N, chunk, block(P), block(N), PIECE, skip is not None, ids is not None, how.stages, num_warps=how.warps,
    )  # fmt: skip


def precision(dtype: torch.dtype) -> str:
    """fp32 means fp32; for the others the argument has no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"
