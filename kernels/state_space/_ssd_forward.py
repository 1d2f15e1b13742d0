"""The forward kernels of `ssd.py`: steps, states of segments, the scan over segments, the scan itself, and y from
states for fp32.

Chunks are the sequence's pieces of CHUNK positions, within which the recurrence is a masked matrix product; a
segment is what one program computes, chunk by chunk, with the state in registers. Where batch and heads alone
fill the device there is one segment a sequence and no state is written; else the states of all segments are
computed first (x and B read once more), scanned over segments, and every segment starts from its own.

Names in kernels, with a the sum of step · A · log₂e over the chunk up to a position, inclusive:

    decay[i] = a[i]               chunk_decay = a[last]
    from_start[i] = 2^a[i]        to_end[i] = 2^(a[last] - a[i]) step[i]

Scratch is padded: steps to whole chunks (with steps of 0, which change nothing), states to whole tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import INTERPRETED, cdiv, power_of_2
from .._pointwise import floored, softplus

ENTRIES = 1024
"""Numbers of a state that one program of the scan over segments has."""

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
# Arguments of kernels, in groups.


class Strides(NamedTuple):
    """Of a tensor (B, S, H, …) or (B, S, G, …), in elements."""

    batch: Any
    position: Any
    head: Any


def strides(x: torch.Tensor) -> Strides:
    """Of (B, S, H), or of (B, S, H, P) with a contiguous last dimension."""
    return Strides(*x.stride()[:3])


class Recurrence(NamedTuple):
    """`step` and `decay` (B, H, S in whole chunks) fp32; skip, D (H,); ids (B, S); entry, states to start from."""

    step: Any
    decay: Any
    skip: Any = None
    ids: Any = None
    entry: Any = None

    def only(self, *used: str) -> Recurrence:
        """For a kernel that can use these: some tensor, never read, stands for those that are missing. The others
        are not parameters of it.
        """
        given = {name: self.step if (x := getattr(self, name)) is None else x for name in used}
        return Recurrence(self.step, self.decay, **given)


class Extent(NamedTuple):
    """Positions, heads, and chunks of a sequence."""

    S: Any
    H: Any
    chunks: Any


class Segments(NamedTuple):
    """Of a grid with a program for each segment: heads that share a group, chunks of a segment, segments."""

    S: Any
    H: Any
    batches: Any
    groups: Any
    chunks: Any
    per: Any
    segments: Any


class Sizes(NamedTuple):
    """Of a grid with a program for each chunk and head; `groups` heads share a group."""

    S: Any
    H: Any
    groups: Any
    chunks: Any


class Shape(NamedTuple):
    """Known when compiling: head and state dimension, positions of a chunk, both dimensions as blocks, whether
    tiles come by the tensor memory accelerator, stages of the loop, and what there is
    of a `Recurrence`.
    """

    P: int
    N: int
    CHUNK: int
    BLOCK_P: int
    BLOCK_N: int
    TMA: bool
    STAGES: int
    SKIP: bool
    PACKED: bool
    ENTRY: bool


# ---------------------------------------------------------------------------------------------------------
# Tiles: (rows, width) blocks of one head of a (B, S, H, P) tensor.


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, strides, batch, row, head, S,
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
        start = x + batch * strides.batch + tl.cast(head, tl.int64) * strides.head
        start += tl.cast(row, tl.int64) * strides.position
        pointers = start + (rows.to(tl.int64) * strides.position)[:, None] + columns[None, :]
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
    dt, A, bias, step, decay, strides, extent,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """dt (B, S, H) to `step` (B, H, S') after bias and softplus, and `decay`, log₂ of the decay from the chunk's
    start to each position, inclusive: sums of step · A within a chunk. S' is S in whole chunks. With GATES dt is
    the logarithm of a position's decay itself, and every step is 1.
    """
    S, H, chunks = extent
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    rows = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (rows < S)[:, None] & (heads < H)[None, :]
    pointers = dt + batch * strides.batch + (rows.to(tl.int64) * strides.position)[:, None]
    pointers += (heads * strides.head)[None, :]
    value = tl.load(pointers, inside, 0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + heads, heads < H, 0.0).to(tl.float32)[None, :]
    if SOFTPLUS:
        value = softplus(value)
    value = tl.where(inside, value, 0.0)
    if GATES:
        sums = tl.cumsum(floored(value * 1.4426950408889634), 0)  # log₂e
        value = tl.where(inside, 1.0, 0.0)
    else:
        rate = tl.load(A + heads, heads < H, 0.0).to(tl.float32) * 1.4426950408889634
        sums = tl.cumsum(floored(value * rate[None, :]), 0)
    at = (batch * H + heads)[:, None] * (chunks * CHUNK) + rows[None, :]
    tl.store(step + at, tl.trans(value), (heads < H)[:, None])
    tl.store(decay + at, tl.trans(sums), (heads < H)[:, None])


@triton.jit
def _states(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, recurrence, each, result, total, x_strides, b_strides, sizes, skipped, shape: tl.constexpr,
    REVERSE: tl.constexpr, EACH: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """The states of one segment of one head, which begin with `entry` (or 0).

    Forward, x (B, S, H, P) and B: h ← 2^chunk_decay h + Σ to_end x ⊗ B. With REVERSE, from the last chunk to the
    first, for the gradient g of the state: x is then dy and b is C, and g ← 2^chunk_decay g + Σ from_start dy ⊗ C.

    With EACH the state that each chunk starts from goes to `each` (B, chunks, H, tile); with RESULT the last one
    goes to `result` (B, H, segments, tile), and log₂ of the segment's decay to `total` (B, H, segments). The first
    `skipped` programs of a full grid are not in this one.
    """
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    S, H, batches, groups, chunks, per, segments = sizes
    program = tl.program_id(0) + skipped
    head = program % H
    batch = program // H % batches
    segment = program // (H * batches)
    group = head // groups
    sequence = batch.to(tl.int64) * H + head
    wide = batch.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    tile = tl.arange(0, BLOCK_P)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    offset = (sequence * segments + segment) * (BLOCK_P * BLOCK_N)
    state = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    if shape.ENTRY:
        state += tl.load(recurrence.entry + offset + tile)
    steps = recurrence.step + sequence * chunks * CHUNK
    decays = recurrence.decay + sequence * chunks * CHUNK
    first = segment * per
    count = tl.minimum(per, chunks - first)
    sums = 0.0
    for i in tl.range(0, count, num_stages=shape.STAGES):
        chunk = first + i
        if REVERSE:
            chunk = first + count - 1 - i
        row = chunk * CHUNK
        x_tile = load_tile(x, x_strides, wide, row, head, S, shape.P, CHUNK, BLOCK_P, shape.TMA)
        b_tile = load_tile(b, b_strides, wide, row, group, S, shape.N, CHUNK, BLOCK_N, shape.TMA)
        decay = tl.load(decays + row + rows)
        chunk_decay = tl.load(decays + row + CHUNK - 1)
        weight = tl.exp2(decay) if REVERSE else tl.exp2(chunk_decay - decay) * tl.load(steps + row + rows)
        if shape.PACKED:
            own, before, last = sequences(recurrence.ids, wide, row, S, CHUNK)
            weight = tl.where(own == (before if REVERSE else last), weight, 0.0)
            chunk_decay = tl.where(before == last, chunk_decay, float("-inf"))
        if EACH:
            to = ((wide * chunks + chunk) * H + head) * (BLOCK_P * BLOCK_N)
            tl.store(each + to + tile, state.to(each.dtype.element_ty))
        # h ← 2^chunk_decay h + (weight x)ᵀ · B
        x_tile = (x_tile.to(tl.float32) * weight[:, None]).to(b_tile.dtype)
        state = tl.dot(tl.trans(x_tile), b_tile, state * tl.exp2(chunk_decay), input_precision="ieee")
        sums += chunk_decay
    if RESULT:
        tl.store(result + offset + tile, state)
        tl.store(total + sequence * segments + segment, sums)


@triton.jit
def _scan_segments(  # type: ignore[no-untyped-def]  # Triton's types are its own
    states, total, entry, result, segments,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, ENTRY: tl.constexpr, RESULT: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """`states` (B, H, segments, tile), what each segment adds, become what each starts from, in place. With
    REVERSE from the last segment to the first. With RESULT what follows the last one goes to `result`
    (B, H, tile); without, what the last adds is not read.
    """
    sequence = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    state = tl.zeros([ENTRIES], tl.float32)
    if ENTRY:
        state += tl.load(entry + sequence * SIZE + at)
    for i in range(0, segments):
        segment = i
        if REVERSE:
            segment = segments - 1 - i
        pointers = states + (sequence * segments + segment) * SIZE + at
        if RESULT or i < segments - 1:
            # h ← 2^total h + what the segment adds
            added = tl.load(pointers)
            tl.store(pointers, state)
            state = state * tl.exp2(tl.load(total + sequence * segments + segment)) + added
        else:
            tl.store(pointers, state)
    if RESULT:
        tl.store(result + sequence * SIZE + at, state)


@triton.jit
def _scan(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, recurrence, y, result, x_strides, b_strides, c_strides, sizes, shape: tl.constexpr
):
    """y of one segment of one head, with the state (N, P) in registers from chunk to chunk.

    Programs beside each other have neighbouring heads at the same chunk: B and C come from the L2 cache.
    """
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    S, H, batches, groups, chunks, per, segments = sizes
    program = tl.program_id(0)
    head = program % H
    batch = program // H % batches
    segment = program // (H * batches)
    group = head // groups
    sequence = batch.to(tl.int64) * H + head
    wide = batch.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    causal = rows[:, None] >= rows[None, :]
    tile = tl.arange(0, BLOCK_P)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    offset = (sequence * segments + segment) * (BLOCK_P * BLOCK_N)
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if shape.ENTRY:
        state += tl.load(recurrence.entry + offset + tile)
    if shape.SKIP:
        skip = tl.load(recurrence.skip + head).to(tl.float32)
    steps = recurrence.step + sequence * chunks * CHUNK
    decays = recurrence.decay + sequence * chunks * CHUNK
    first = segment * per
    for chunk in tl.range(first, tl.minimum(first + per, chunks), num_stages=shape.STAGES):
        row = chunk * CHUNK
        c_tile = load_tile(c, c_strides, wide, row, group, S, shape.N, CHUNK, BLOCK_N, shape.TMA)
        b_tile = load_tile(b, b_strides, wide, row, group, S, shape.N, CHUNK, BLOCK_N, shape.TMA)
        decay = tl.load(decays + row + rows)
        step = tl.load(steps + row + rows)
        chunk_decay = tl.load(decays + row + CHUNK - 1)
        from_start = tl.exp2(decay)
        to_end = tl.exp2(chunk_decay - decay) * step
        visible = causal
        if shape.PACKED:
            own, before, last = sequences(recurrence.ids, wide, row, S, CHUNK)
            visible = visible & (own[:, None] == own[None, :])
            from_start = tl.where(own == before, from_start, 0.0)
            to_end = tl.where(own == last, to_end, 0.0)
            chunk_decay = tl.where(before == last, chunk_decay, float("-inf"))
        # scores = C · Bᵀ ∘ 2^(a_i - a_j) step_j
        # The difference of exponents only where it is not positive: no overflow.
        scores = tl.dot(c_tile, tl.trans(b_tile), input_precision="ieee")
        scores *= tl.exp2(tl.where(visible, decay[:, None] - decay[None, :], float("-inf"))) * step[None, :]
        # y = from_start C · h + scores · x + D x
        out = tl.dot(c_tile, state.to(c_tile.dtype), input_precision="ieee") * from_start[:, None]
        x_tile = load_tile(x, x_strides, wide, row, head, S, shape.P, CHUNK, BLOCK_P, shape.TMA)
        out = tl.dot(scores.to(x_tile.dtype), x_tile, out, input_precision="ieee")
        wide_x = x_tile.to(tl.float32)
        if shape.SKIP:
            out += wide_x * skip
        # h ← 2^chunk_decay h + Bᵀ · (to_end x)
        weighted = (wide_x * to_end[:, None]).to(x_tile.dtype)
        state = tl.dot(tl.trans(b_tile), weighted, state * tl.exp2(chunk_decay), input_precision="ieee")
        store_tile(y, out, wide, row, head, S, H, shape.P, CHUNK, BLOCK_P, shape.TMA)
    if segment == segments - 1:
        tl.store(result + sequence * (BLOCK_P * BLOCK_N) + tile, state)


@triton.jit
def _y_from_states(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, recurrence, y, x_strides, b_strides, c_strides, sizes, shape: tl.constexpr, PIECE: tl.constexpr
):
    """y of one chunk of one head from the states that chunks start from, entry (B, chunks, H, tile), in fp32.

    A product in fp32 has its operands in registers, so that it is made of pieces, PIECE of what is summed over,
    by loops that stay loops.
    """
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    S, H, groups, chunks = sizes
    program = tl.program_id(0)
    head = program % H
    chunk = program // H % chunks
    wide = (program // H // chunks).to(tl.int64)
    group = head // groups
    sequence = wide * H + head
    row = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    few = tl.arange(0, PIECE)
    at = sequence * chunks * CHUNK + row
    decay = tl.load(recurrence.decay + at + rows)
    from_start = tl.exp2(decay)
    if shape.PACKED:
        own, before, _ = sequences(recurrence.ids, wide, row, S, CHUNK)
        from_start = tl.where(own == before, from_start, 0.0)
    offset = ((wide * chunks + chunk) * H + head) * (BLOCK_P * BLOCK_N)
    tile = tl.arange(0, BLOCK_P)[:, None] * BLOCK_N + few[None, :]
    # y = from_start C · hᵀ
    out = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    for n in tl.range(0, shape.N, PIECE, num_stages=shape.STAGES):
        c_tile = load_tile(c, c_strides, wide, row, group, S, shape.N, CHUNK, PIECE, False, n)
        state = tl.load(recurrence.entry + offset + n + tile)
        out = tl.dot(c_tile, tl.trans(state), out, input_precision="ieee")
    out *= from_start[:, None]
    for j in tl.range(0, CHUNK, PIECE, num_stages=1):
        # scores = C · Bᵀ ∘ 2^(a_i - a_j) step_j
        scores = tl.zeros([CHUNK, PIECE], tl.float32)
        for n in tl.range(0, shape.N, PIECE, num_stages=shape.STAGES):
            c_tile = load_tile(c, c_strides, wide, row, group, S, shape.N, CHUNK, PIECE, False, n)
            b_tile = load_tile(b, b_strides, wide, row + j, group, S, shape.N, PIECE, PIECE, False, n)
            scores = tl.dot(c_tile, tl.trans(b_tile), scores, input_precision="ieee")
        visible = rows[:, None] >= (j + few)[None, :]
        if shape.PACKED:
            theirs = tl.load(recurrence.ids + wide * S + tl.minimum(row + j + few, S - 1))
            visible = visible & (own[:, None] == theirs[None, :])
        past = tl.load(recurrence.decay + at + j + few)
        # The difference of exponents only where it is not positive: no overflow.
        scores *= tl.exp2(tl.where(visible, decay[:, None] - past[None, :], float("-inf")))
        scores *= tl.load(recurrence.step + at + j + few)[None, :]
        # y += scores · x
        x_tile = load_tile(x, x_strides, wide, row + j, head, S, shape.P, PIECE, BLOCK_P, False)
        out = tl.dot(scores, x_tile, out, input_precision="ieee")
    if shape.SKIP:
        x_tile = load_tile(x, x_strides, wide, row, head, S, shape.P, CHUNK, BLOCK_P, False)
        out += x_tile * tl.load(recurrence.skip + head).to(tl.float32)
    store_tile(y, out, wide, row, head, S, H, shape.P, CHUNK, BLOCK_P, False)


# ---------------------------------------------------------------------------------------------------------
# Launches. All tensors are checked; x, B and C have a contiguous last dimension.


def launch(kernel: str, dtype: torch.dtype, N: int) -> Launch:
    """How `kernel` is launched: in 16 bits as measured on an H200 with N = 128, in fp32 with as many warps as it
    takes to have registers for operands.
    """
    if dtype == torch.float32:
        fp32 = {"states": (8, 1), "y_from_states": (4, 1), "chunk_backward": (16, 1), "from_states": (8, 1)}
        return Launch(*fp32[kernel])
    # A larger state has shared memory for two programs of a multiprocessor in one stage only.
    scan = Launch(4, 2) if block(N) <= 128 else Launch(4, 1)
    others = {"states": (4, 3), "chunk_backward": (4, 1), "from_states": (4, 3)}
    return scan if kernel == "scan" else Launch(*others[kernel])


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
        dt, dt if A is None else A, dt if bias is None else bias, both[0], both[1], strides(dt),
        Extent(S, H, chunks), CHUNK=chunk, HEADS=16, BIAS=bias is not None, SOFTPLUS=use_softplus, GATES=A is None,
        num_warps=4,
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


def shape_of(
    x: torch.Tensor, b: torch.Tensor, recurrence: Recurrence, chunk: int, described: bool, stages: int
) -> Shape:
    """Of kernels for x (B, S, H, P) and b (B, S, G, N)."""
    P, N = x.shape[3], b.shape[3]
    _, _, *there = (part is not None for part in recurrence)
    return Shape(P, N, chunk, block(P), block(N), described, stages, *there)


def segments_of(x: torch.Tensor, b: torch.Tensor, chunk: int, segments: int) -> Segments:
    """Of a grid for x (B, S, H, P) and b (B, S, G, N)."""
    B, S, H, _ = x.shape
    chunks = cdiv(S, chunk)
    return Segments(S, H, B, H // b.shape[2], chunks, cdiv(chunks, segments), segments)


def states(
    x: torch.Tensor, b: torch.Tensor, recurrence: Recurrence, each: torch.Tensor | None,
    result: torch.Tensor | None, total: torch.Tensor | None, *, segments: int, chunk: int, reverse: bool,
    described: bool, last: bool = True, how: Launch | None = None,
) -> None:  # fmt: skip
    """Launches `_states`; what is None is not read or not written. Without `last` the last segment is left out
    (in reverse the first), whose result nobody wants.
    """
    B, _, H, _ = x.shape
    how = how or launch("states", x.dtype, b.shape[3])
    none = recurrence.step
    _states[((segments if last else segments - 1) * B * H,)](
        source(x, chunk, described), source(b, chunk, described), recurrence.only("ids", "entry"),
        none if each is None else each, none if result is None else result, none if total is None else total,
        strides(x), strides(b), segments_of(x, b, chunk, segments), 0 if last or not reverse else B * H,
        shape_of(x, b, recurrence, chunk, described, how.stages), reverse, each is not None, result is not None,
        num_warps=how.warps,
    )  # fmt: skip


def scan_segments(
    local: torch.Tensor, total: torch.Tensor, entry: torch.Tensor | None, *, reverse: bool, last: bool = True
) -> torch.Tensor | None:
    """Launches `_scan_segments` on `local` (B, H, segments, tile), in place; with `last` the state after all."""
    B, H, segments, height, width = local.shape
    size = height * width
    result = torch.empty(B, H, height, width, dtype=torch.float32, device=local.device) if last else None
    entries = min(ENTRIES, size)
    _scan_segments[(B * H, size // entries)](
        local, total, local if entry is None else entry, local if result is None else result, segments,
        size, entries, entry is not None, last, reverse, num_warps=4,
    )  # fmt: skip
    return result


def scan(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, recurrence: Recurrence, y: torch.Tensor,
    result: torch.Tensor, *, segments: int, chunk: int, described: bool, how: Launch | None = None,
) -> None:  # fmt: skip
    """Launches `_scan` into y and result, in 16 bits."""
    B, _, H, _ = x.shape
    how = how or launch("scan", x.dtype, b.shape[3])
    _scan[(segments * B * H,)](
        source(x, chunk, described), source(b, chunk, described), source(c, chunk, described),
        recurrence.only("skip", "ids", "entry"), source(y, chunk, described), result,
        strides(x), strides(b), strides(c), segments_of(x, b, chunk, segments),
        shape_of(x, b, recurrence, chunk, described, how.stages), num_warps=how.warps,
    )  # fmt: skip


def y_from_states(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, recurrence: Recurrence, y: torch.Tensor, *, chunk: int,
    how: Launch | None = None,
) -> None:  # fmt: skip
    """Launches `_y_from_states` into y, in fp32; the recurrence's entry is (B, chunks, H, tile)."""
    B, S, H, _ = x.shape
    chunks = cdiv(S, chunk)
    how = how or launch("y_from_states", x.dtype, b.shape[3])
    _y_from_states[(B * chunks * H,)](
        x, b, c, recurrence.only("skip", "ids", "entry"), y, strides(x), strides(b), strides(c),
        Sizes(S, H, H // b.shape[2], chunks), shape_of(x, b, recurrence, chunk, False, how.stages), PIECE,
        num_warps=how.warps,
    )  # fmt: skip
