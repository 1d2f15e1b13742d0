"""The forward pass of attention over packed sequences for Hopper (compute capability 9.0), in Gluon.

The schedule is that of `_attention_hopper_forward.py`: a producer warp group loads tiles through the tensor memory
accelerator, three others at 64 columns and two at 128 compute 64 rows each, with the scores of the next block of
keys under the values of this one.

A unit of work is one tile: 192 or 128 query rows of one head of one sequence. Tiles are aligned to their
sequence's end, as the causal mask is: the first of a sequence may begin before it, where what it reads is computed
and not stored; a group whose rows all lie there computes one block of keys, under a causal mask as many as such
rows would see. So no row sees a key beyond its sequence under a causal mask, and the rows that are missing are
missing where keys are fewest. Blocks of keys start where the sequence does, at any row of the packed tensors; the
last is read beyond it, where keys are hidden and values overwritten with zeros before they are multiplied (a NaN
of a neighbour would outlive a probability of 0).

Each group starts at its own diagonal: blocks of keys that all of its rows lie before are released unread. Its
first block is masked, and the next one where the diagonal of its 64 rows lies across two. Windows, sinks and caps
of scores are as in that file.

Programs are persistent, one a multiprocessor, and take the next unit as they come to it, by a counter in the list
of `attention_varlen.listed`, as FlashAttention-3's do. That has sequences by their keys, the most first; a
sequence's tiles come in sections of heads whose K and V fit into L2 together, of each the longest first. Who
computes a row does not change its numbers.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `q.full` | each group's rows of Q | the producer's copy | 1, bytes | that group, 0 |
| `q.empty` | the same | that group, after its last S | 1 | producer, 1 |
| `k.full`, `v.full` | each buffer | the producer's copy | 1, bytes | all groups, 0 |
| `k.empty` | each buffer | each group, after S = Q·Kᵀ | groups | producer, 1 |
| `v.empty` | each buffer | each group, after O += P·V | groups | producer, 1 |
| `pingpong` (64 columns) | a group | the one before, products issued | 1 | that group, 1 for the first, else 0 |
| `tiles.ready` | the next tile | producer | 1 | all groups, 0 |
| `tiles.free` | the same | each group, the tile read | groups | producer, 1 |

Taken for bf16 and fp16, sequences of more than 512 tokens among them, D of 64 or 128 and heads side by side, or
another D from 40 to 128: `takes`.
No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .._common import multiprocessors, on, power_of_2
from .._hopper import (
    ROWS,
    TensorMap,
    launch,
    mappable,
    product_layout,
    sectioned,
    shared_layout,
    thread_barrier,
)
from .._pipeline import (
    Cursors,
    Pipes,
    aggregate,
    at_buffer,
    barriers,
    copy_in,
    copy_out,
    cursor,
    ring,
    tile_buffers,
    tile_queue,
)
from ._attention_hopper_forward import DIVISIONS, Config
from ._softmax import (
    apply_mask,
    capped,
    first_block,
    last_values,
    scales,
    scores,
    skip_block,
    step,
    with_sink,
)

FIELDS: gl.constexpr = gl.constexpr(8)
"""Numbers of a listed unit, as in `attention_varlen`."""
SECTION = 24 << 20
"""Bytes of K and V that a section of heads may have, to stay in L2."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: int) -> bool:
    """Whether all kernels for Hopper, of both passes, take these inputs, with sequences of `longest` queries at
    most; the device is not looked at. Tokens may be apart, as those of a packed projection are, but a token's
    heads not.
    """
    D = q.shape[2]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and D in (64, 128)
        and longest > 512
        and all(
            x.data_ptr() % 16 == 0
            and x.stride(2) == 1
            and (x.stride(1) == D or x.shape[1] == 1)
            and x.stride(0) % 8 == 0
            and 0 < x.stride(0) < 1 << 39
            and x.shape[0] > 0
            for x in (q, k, v)
        )
    )


@gluon.jit
def clear_tail(v, beyond, KEYS: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Zeros over rows from `beyond` on. Each warp group that multiplies them does it, with the same result."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    for i in gl.static_range(KEYS // 32):
        part = v.slice(i * 32, 32)
        x = part.load(layout)
        part.store(gl.where(gl.expand_dims(rows + i * 32 < beyond, 1), x, gl.zeros_like(x)))
    fence_async_shared()
    # Triton would put it where the tile is read: into the loop, for all the tiles that are whole.
    thread_barrier()


@aggregate
class Units:
    """The list of `attention_varlen.listed` with its room for rows, query heads, those that share a key head, and
    keys that a section of heads may have.
    """

    table: gl.tensor
    rows: gl.tensor
    heads: gl.tensor
    groups: gl.tensor
    hold: gl.tensor

    @gluon.constexpr_function
    def __init__(self, table, rows, heads, groups, hold):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.table = table
        self.rows = rows
        self.heads = heads
        self.groups = groups
        self.hold = hold

    @gluon.jit
    def total(self):  # type: ignore[no-untyped-def]  # as above
        """Units of all heads."""
        return gl.load(self.table + self.rows * FIELDS) * self.heads

    @gluon.jit
    def take(self):  # type: ignore[no-untyped-def]  # as above
        """The next unit, after those that programs begin with."""
        return gl.num_programs(0) + gl.atomic_add(self.table + self.rows * FIELDS + 1, 1, sem="relaxed")


@gluon.jit
def _tile(units, unit, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, start, length, key start, keys, first row, which may be negative, first and last block of keys) of a
    unit. A block of keys there is always; it may be hidden as a whole.
    """
    row = units.table + unit // units.heads * FIELDS
    start = gl.load(row)
    length = gl.load(row + 1)
    key_start = gl.load(row + 2)
    keys = gl.load(row + 3)
    within = unit - gl.load(row + 4) * units.heads
    n = gl.load(row + 5)
    section = gl.minimum(gl.maximum(units.hold // gl.maximum(keys, 1), 1) * units.groups, units.heads)
    head, nth = sectioned(within, n, units.heads, section)
    seen = keys
    if c.causal:
        seen = keys - nth * (c.rows * c.groups)
    last = gl.maximum(seen - 1, 0) // c.keys
    low = 0
    if c.window:
        place = keys - (nth + 1) * (c.rows * c.groups)  # the first row's, in keys
        low = gl.maximum(place - c.window + 1, 0) // c.keys
        if not c.causal:
            last = gl.minimum(gl.maximum(place + (c.rows * c.groups) + c.window - 2, 0) // c.keys, last)
    return head, start, length, key_start, keys, length - (nth + 1) * (c.rows * c.groups), low, last


@gluon.jit
def place_of_tile(row, column, D: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Of a tile of `tiles_of` that begins at a row of the packed tensors: `column` is where its head begins, or,
    where heads have other columns than a tile, which it is.
    """
    return [row, column] if WIDTH == D else [column, row, 0]


@gluon.jit
def tile_of_head(row, head, D: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """`place_of_tile` of a head."""
    return place_of_tile(row, head * D if WIDTH == D else head, D, WIDTH)


@gluon.jit
def _producer(q, k, v, pipes, units, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Loads each tile's parts of Q and its blocks of K and V, the last keys first, and takes the next tile."""
    GROUPS: gl.constexpr = c.groups
    at_k = cursor(1, c.stages)
    at_v = cursor(1, c.stages)
    q_phase = 1
    tile_phase = 1
    total = units.total()
    unit = gl.program_id(0)
    while unit < total:
        head, start, _, key_start, _, first, low, last = _tile(units, unit, c)
        row = start + first
        key = key_start + last * c.keys
        column = head
        key_column = head // units.groups
        if c.width == c.D:
            column = head * c.width
            key_column = head // units.groups * c.width
        # Keys do not wait for those who still use the queries before.
        pipes.k.fetch(at_k, k, place_of_tile(key, key_column, c.D, c.width))
        for i in gl.static_range(GROUPS):
            full = pipes.q.acquire(at_buffer(i, q_phase), q.block_type.nbytes)
            copy_in(q, place_of_tile(row + i * c.rows, column, c.D, c.width), full, pipes.q.buffers.index(i))
        q_phase ^= 1
        for j in range(0, last + 1 - low):
            at_k = at_k.advanced()
            pipes.v.fetch(at_v, v, place_of_tile(key, key_column, c.D, c.width))
            at_v = at_v.advanced()
            key = key - c.keys
            if j < last - low:
                pipes.k.fetch(at_k, k, place_of_tile(key, key_column, c.D, c.width))
        unit = units.take()
        tile_phase = pipes.tiles.push(unit, tile_phase)


@gluon.constexpr_function
def _narrow(c):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Whether both ends of the window can cut a block. Under a causal mask the diagonal may lie across two: rows
    begin anywhere.
    """
    return c.window > 0 and (2 * c.keys if c.causal else c.keys) > c.window


@gluon.jit
def _steps(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, pipes, zero, state, at, within, edge, first, end, scale, c: gl.constexpr, GROUP: gl.constexpr
):
    """(state, next places) of a group after the blocks of keys behind its `first` one, down to `end`, under a
    window; its first row's place is `edge`. Run 0 is cut by the window's end, 1 is seen by every row, 2 is cut by
    the window's start.
    """
    SPAN: gl.constexpr = c.window + c.ahead
    NARROW: gl.constexpr = _narrow(c)
    count = first + 1 - end
    after = 1
    for run in gl.static_range(3):
        until = count
        if run == 0:  # the blocks after the last that all rows see as a whole
            until = gl.maximum(first + 1 - gl.maximum(edge + c.ahead + 1, 0) // c.keys, 1)
            until = gl.minimum(until, count)
        elif run == 1:  # from there to the first such
            until = first + 1 - gl.maximum(edge + c.rows - c.window + c.keys - 1, 0) // c.keys
            until = gl.maximum(gl.minimum(until, count), after)
        for j in range(after, until):
            limit = within + (edge + c.ahead - (first - j) * c.keys)
            state, at = step(
                q, pipes, zero, state, at, limit, scale, c,
                GROUP, SPAN, run != 1 and (run == 0 or NARROW), run != 1 and (run == 2 or NARROW), c.inner,
            )  # fmt: skip
        after = until
    return state, at


@gluon.jit
def _write(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, plain, acc, row, begin, head, heads, c: gl.constexpr
):
    """Results of a group whose first row, negative, lies before its sequence: a tile's store would begin in the
    sequence before.
    """
    layout: gl.constexpr = acc.type.layout
    own = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
    column = gl.arange(0, c.width, gl.SliceLayout(0, layout))
    pointers = gl.expand_dims((begin + own).to(gl.int64) * (heads * c.D), 1) + gl.expand_dims(
        head * c.D + column, 0
    )
    there = gl.expand_dims(own >= 0, 1)
    if c.width != c.D:
        there = there & gl.expand_dims(column < c.D, 0)
    gl.store(plain + pointers, acc.to(out.dtype), mask=there)


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, plain, lse, sinks, staged, pipes, units, tokens, scale, c: gl.constexpr, GROUP: gl.constexpr
):
    """One group's rows of every tile: online softmax in base 2 over blocks of keys, the last keys first. In the
    loop K runs one block ahead of V. A sink is counted when a tile's keys are. Under a window the walk and its
    runs of steps are those of `_attention_hopper_forward.py`.
    """
    WINDOW: gl.constexpr = c.window
    AHEAD: gl.constexpr = c.ahead
    SPAN: gl.constexpr = c.window + c.ahead
    NARROW: gl.constexpr = _narrow(c)
    ROWS: gl.constexpr = c.rows
    KEYS: gl.constexpr = c.keys
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(KEYS)
    sums: gl.constexpr = product_layout(WIDTH)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    sums_rows: gl.constexpr = gl.SliceLayout(1, sums)
    q = (pipes.q.buffers.index(GROUP),)
    o = staged.index(GROUP)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    within = gl.arange(0, c.rows, score_rows)
    at = Cursors(cursor(0, c.stages), cursor(0, c.stages), gl.to_tensor(1 if GROUP == 0 else 0))
    q_phase = 0
    tile_phase = 0
    total = units.total()
    unit = gl.program_id(0)
    while unit < total:
        head, begin, length, _, keys, row, low, last = _tile(units, unit, c)
        row += GROUP * c.rows
        # The last key that this group's first row sees, before the sequence where it sees none.
        edge = row + keys - length
        end = low
        cut = 0
        if WINDOW:
            outside = row + c.rows <= 0
            end = gl.where(outside, low, gl.maximum(edge - WINDOW + 1, 0) // c.keys)
            first = gl.minimum(gl.maximum(edge + c.rows - 1 + AHEAD, 0) // c.keys, last)
            first = gl.where(outside, low, first)
        elif c.causal:
            first = gl.maximum(edge + c.rows - 1, 0) // c.keys
            cut = first - gl.maximum(edge, 0) // c.keys  # blocks after the first that the mask cuts: one or none
        else:
            first = gl.where(row + c.rows <= 0, 0, last)
        start = first * c.keys
        for _ in range(first, last):
            at = skip_block(pipes, at, c, GROUP)
        pipes.q.wait(at_buffer(GROUP, q_phase))
        q_phase ^= 1
        s, at = scores(q, pipes, zero, at)
        s = capped(s, c.inner, out.dtype)
        if start + c.keys > keys:
            pipes.v.wait(at.v)
            clear_tail(pipes.v.buffers.index(at.v.stage), keys - start, c.keys, c.width)
        if WINDOW:
            limits = within + (edge + AHEAD - start)
            if NARROW:
                s = apply_mask(s, limits, SPAN, True, True)
                s = apply_mask(s, within * 0 + (keys - 1 - start), 0, True, False)
            else:
                s = apply_mask(s, gl.minimum(limits, keys - 1 - start), SPAN, True, False)
        else:
            limits = within + (edge - start) if c.causal else within * 0 + (keys - 1 - start)
            s = apply_mask(s, limits, 0, True, False)
        state = first_block(s, gl.zeros([ROWS, WIDTH], gl.float32, sums), scale, out.dtype)
        if WINDOW:
            state, at = _steps(q, pipes, zero, state, at, within, edge, first, end, scale, c, GROUP)
        else:
            if c.causal:
                # By j, though it is 0: what did not change in the loop would be compared before it, needed or not.
                for j in range(0, cut):
                    limit = within + (edge - start + (j + 1) * c.keys)
                    state, at = step(q, pipes, zero, state, at, limit, scale, c, GROUP, 0, True, False, c.inner)
            for _ in range(cut, first):
                state, at = step(q, pipes, zero, state, at, within, scale, c, GROUP, 0, False, False, c.inner)
        # The last product with Q is done: the next tile's can be loaded.
        pipes.q.release(at_buffer(GROUP, q_phase))
        acc, at = last_values(state, pipes, at)
        if WINDOW:
            for _ in range(low, end):
                at = skip_block(pipes, at, c, GROUP)
        if row + c.rows > 0:
            places = within + row
            row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), score_rows)
            row_max, row_sum, shrunk, empty = with_sink(state.row_max, row_sum, sinks, head)
            level = gl.where(empty, float("inf"), row_max + gl.log2(row_sum))
            gl.store(lse + head.to(gl.int64) * tokens + begin + places, level, mask=places >= 0)
            share = gl.where(empty, 0.0, shrunk / row_sum)
            acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
            if row >= 0:
                tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
                o.store(acc.to(out.dtype))
                fence_async_shared()
                copy_out(out, tile_of_head(begin + row, head, c.D, c.width), o)
            else:
                _write(out, plain, acc, row, begin, head, units.heads, c)
        unit, tile_phase = pipes.tiles.pop(tile_phase)
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=["rows", "heads", "groups", "hold", "tokens"], do_not_specialize_on_alignment=["sinks"]
)
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, plain, lse, sinks, table, rows, heads, groups, hold, tokens, scale, c: gl.constexpr
):
    """Buffers and barriers, then the warp groups. `plain` is `out` as a pointer, `tokens` its rows; a section of
    heads may have `hold` keys. `sinks` and `scale` as in `_attention_hopper_forward.py`.
    """
    queries = ring(q, c.rows, c.width, c.groups, 1)
    staged = tile_buffers(q.dtype, c.groups, c.rows, c.width)
    keys = ring(k, c.keys, c.width, c.stages, c.groups)
    values = ring(v, c.keys, c.width, c.stages, c.groups)
    pipes = Pipes(queries, keys, values, barriers(c.groups, 1 if c.pingpong else 0), tile_queue(c.groups))
    units = Units(table, rows, heads, groups, hold)
    gl.warp_specialize(
        [
            (_producer, (q, k, v, pipes, units, c)),
            (_consumer, (out, plain, lse, sinks, staged, pipes, units, tokens, scale, c, 0)),
            (_consumer, (out, plain, lse, sinks, staged, pipes, units, tokens, scale, c, 1)),
            (_consumer, (out, plain, lse, sinks, staged, pipes, units, tokens, scale, c, 2)),
        ][: c.groups + 1],
        [4, 4, 4][: c.groups],
        [c.registers, c.registers, c.registers][: c.groups],
    )


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: int) -> bool:
    """Whether the forward pass and the unordered backward one take these inputs: what `fits` approves of, or heads
    of other columns, which may be apart.
    """
    D = q.shape[2]
    if D in DIVISIONS:
        return fits(q, k, v, longest)
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and D % 8 == 0
        and power_of_2(D) in DIVISIONS
        and longest > 512
        and all(x.shape[0] > 0 and mappable(x) for x in (q, k, v))
    )


def tiles_of(x: torch.Tensor, rows: int) -> TensorMap:
    """Of blocks of `rows` tokens of one head: as `packed`, or by a dimension of heads, so that a tile's columns
    beyond a head's are zeros, and are not written.
    """
    T, heads, D = x.shape
    if D in DIVISIONS:
        return packed(x, rows)
    # The stride of a dimension of one may be anything; a tensor map wants a valid one.
    strides = x.stride(1) if heads > 1 else D, x.stride(0) if T > 1 else D, 1
    block = 1, rows, power_of_2(D)
    return TensorMap(x, [heads, T, D], [*strides], [*block], _layout(block, x.dtype))


@functools.cache
def _layout(block: tuple[int, int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a (1, rows, width) block in shared memory."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([*block], element)


def packed(x: torch.Tensor, rows: int) -> TensorMap:
    """Blocks of `rows` tokens of one head of what `fits` has approved of: head h at column h · D."""
    T, heads, D = x.shape
    return TensorMap(x, [T, heads * D], [x.stride(0), 1], [rows, D], shared_layout(rows, D, x.dtype))


def unit(D: int) -> int:
    """Query rows of a tile, which is a unit of the list."""
    return ROWS * DIVISIONS[power_of_2(D)][0]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    causal: bool,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> None:
    """Writes the output and its base-2 log-sum-exp (H, T), +inf for a row that sees nothing, from a list of units
    of `unit(D)` rows of queries. A window of 0 is none, as is a cap. For inputs that `takes` approves of; sinks
    (H,) are contiguous. A list is good for one call: what is taken is counted in it.
    """
    T, H, D = q.shape
    hold = SECTION // (2 * D * k.element_size())
    scale, inner = scales(D, cap)
    width = power_of_2(D)
    c = Config(width, causal, window, False, False, D, *DIVISIONS[width], inner)
    of_sinks = None if sinks is None else sinks.dtype
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, of_sinks, c), min(rows * H, multiprocessors(q)),
            tiles_of(q, c.rows), tiles_of(k, c.keys), tiles_of(v, c.keys), tiles_of(out, c.rows), out, lse, sinks,
            table, rows, H, H // k.shape[1], hold, T, scale, c,
        )  # fmt: skip
