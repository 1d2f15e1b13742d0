"""The forward pass of attention for Hopper (compute capability 9.0) with paired tiles, in Gluon.

The schedule is FlashAttention-3's (Shah et al., arXiv 2407.08608), as far as Gluon has the means: a producer warp
group loads tiles of Q, K and V through the tensor memory accelerator, two consumers compute 64 rows each, and
within each of them the scores of the next block of keys are multiplied while the values of this one are.

Programs are persistent: one a multiprocessor, each with its share of the work. A unit of work is a pair of
query blocks of one head, the first with the last, the second with the last but one: under a causal mask all
units are equally long. Consecutive units belong to one head, so that its K and V stay in L2. Where S is no
multiple of 256, the last rows are computed over zeros and not stored.

Under a window the walk over the keys starts and ends at it. The blocks that its edges or the causal mask cut are
steps of their own before and after the others, which know no mask.

Tiles are 64, 128 or 256 columns wide. A head dimension between these is filled up with zeros by the tensor memory
accelerator, which also leaves out what lies beyond it when it stores. At 256 columns keys come in blocks of 64
and the output goes through the buffer of Q: registers and shared memory hold no more.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `q.full` | each consumer's rows of Q | the producer's copy | 1, bytes | that consumer, 0 |
| `q.empty` | the same | that consumer, after its last S, or with O stored | 1 | producer, 1 |
| `k.full`, `v.full` | each buffer | the producer's copy | 1, bytes | both consumers, 0 |
| `k.empty` | each buffer | each consumer, after S = Q·Kᵀ | 2 | producer, 1 |
| `v.empty` | each buffer | each consumer, after O += P·V | 2 | producer, 1 |
| `pingpong` | each consumer | the other, its products issued | 1 | that consumer, 1 for the first, else 0 |

Taken for what `_hopper.fits` approves of. Tiles of 64 and 128 columns are left to `_attention_hopper_forward.py`,
unless a schedule is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._common import multiprocessors, on, power_of_2
from .._hopper import KEYS, LOWEST, ROWS, launch, product_layout, tensor_map, visible
from .._pipeline import Ring, at_buffer, barriers, copy_in, copy_out, cursor, ring, tile_buffers
from ._softmax import capped, scales, with_sink


@dataclass(frozen=True)
class Schedule:
    """Blocks of K and V in flight, whether the two consumers take turns at the matrix units, the share of
    exponentials that the FMA units compute (one of so many, 0: none), registers, and keys of a block.
    """

    stages: int
    pingpong: bool
    share: int = 0
    registers: int = 240
    keys: int = KEYS


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: columns of a tile, the mask, a window of 0 being none, whether keys beyond the
    last must be hidden, the schedule, whether the output goes through the buffer of Q; what products of queries
    and keys are multiplied with before tanh, 0 without a cap; rows of a consumer.
    """

    width: int
    causal: bool
    window: int
    tail: bool
    schedule: Schedule
    reuse: bool
    inner: float = 0.0
    rows: int = ROWS

    @property
    def keys(self) -> int:
        """Of a block."""
        return self.schedule.keys

    @property
    def ratio(self) -> int:
        """Blocks of keys in a tile's rows."""
        return 2 * self.rows // self.keys


SCHEDULES = {
    (64, True): Schedule(3, True, share=8),
    (64, False): Schedule(3, True),
    (128, True): Schedule(2, False),
    (128, False): Schedule(2, True),
    (256, True): Schedule(2, False, keys=64),
    (256, False): Schedule(2, False, keys=64),
}
"""By width and whether causal, as measured on an H200 before there was a tile scheduler: ping-pong keeps one
consumer's exponentials under the other's products, but at D = 128 the diagonal's uneven work makes the waiting
cost more. One exponential of eight on the FMA units pays at D = 64 causal only. Those of 64 and 128 columns are
taken where one is asked for, as docs/stages does; `_attention_hopper_forward.py` is faster. Those of 256 follow
from what fits, not from a measurement."""


@gluon.constexpr_function
def _exp2_of(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX of 2^x of `count` numbers: the last as a polynomial, the others on the exponential unit."""
    unit = "".join(f"ex2.approx.ftz.f32 ${i}, ${count + i};" for i in range(count - 1))
    return (
        f"{{ .reg .f32 t, n, f, p; {unit} max.f32 f, ${2 * count - 1}, 0fC2FC0000; add.rn.f32 t, f, 0f4B400000;"
        " sub.rn.f32 n, t, 0f4B400000; sub.rn.f32 f, f, n; fma.rn.f32 p, f, 0f3D61A4AC, 0f3E786D32;"
        " fma.rn.f32 p, p, f, 0f3F317A8D; fma.rn.f32 p, p, f, 0f3F7FFB58; .reg .b32 i, j;"
        f" mov.b32 i, t; shl.b32 i, i, 23; mov.b32 j, p; add.s32 j, i, j; mov.b32 ${count - 1}, j; }}"
    )


@gluon.constexpr_function
def _constraints_of(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return ",".join(["=f"] * count + ["f"] * count)


@gluon.jit
def _exp2(x, SHARE: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """2^x of x ≤ 0. One of SHARE numbers is computed by the FMA units instead of the exponential unit, which
    at D = 64 is as busy as the matrix units; 0: none.

    That one is split into an integer, added to the exponent's bits, and a fraction in [-½, ½], whose power is
    a polynomial of degree 3 (relative error 8e-5, a fiftieth of bf16's rounding): FlashAttention-4's remedy.
    """
    if SHARE == 0:
        p = gl.exp2(x)
    else:
        p = gl.inline_asm_elementwise(
            _exp2_of(SHARE), _constraints_of(SHARE), [x], dtype=gl.float32, is_pure=True, pack=SHARE
        )
    return p


@gluon.jit
def _unit(step, units, n, length, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(batch·head, query block, blocks of keys, the last of them) of a program's step: two steps make a unit."""
    unit = gl.program_id(0) + step // 2 * gl.num_programs(0)
    pairs = n // 2
    head = unit // pairs
    first = unit % pairs
    block = first if step % 2 == 1 else n - 1 - first
    count = (length + c.keys - 1) // c.keys
    if c.causal:
        count = (block + 1) * c.ratio
    last = count - 1
    if c.window:
        # From the last block that the tile's last row sees to the first that its first row sees.
        if not c.causal:
            last = gl.minimum(block * c.ratio + (c.window + 2 * c.rows - 2) // c.keys, last)
        # Of a block beyond the sequence none is seen, and one is walked.
        count = gl.maximum(last + 1 - gl.maximum(block * c.ratio - (c.window + c.keys - 2) // c.keys, 0), 1)
    return head, block, count, last


@gluon.jit
def _end(run: gl.constexpr, begin, count, distance, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Where a run of steps ends that begins at `begin`, of `count` blocks the first `distance` after the tile's
    own first. Run 0 is cut by the causal mask or the window's end, 1 is seen by every row, 2 is cut by the
    window's start.
    """
    end = count
    if run == 0:
        CLEAN_AFTER: gl.constexpr = -1 if c.causal else c.window // c.keys - 1
        end = gl.minimum(gl.maximum(distance - CLEAN_AFTER, 1), count)
    elif c.window and run == 1:
        CLEAN_BEFORE: gl.constexpr = (c.window - 2 * c.rows) // c.keys
        end = gl.maximum(gl.minimum(distance + CLEAN_BEFORE + 1, count), begin)
    return end


@gluon.jit
def _steps(units):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Steps of this program."""
    return 2 * ((units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0))


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, queries, keys, values, units, n, length, heads, groups, c: gl.constexpr
):
    """Loads each tile's two halves of Q, then its blocks of K and V, the last keys first."""
    at = cursor(1, c.schedule.stages)
    q_phase = 1
    for step in range(0, _steps(units)):
        head, block, count, last = _unit(step, units, n, length, c)
        batch = head // heads
        head = head % heads
        row = block * 2 * c.rows
        for i in gl.static_range(2):
            full = queries.acquire(at_buffer(i, q_phase), q.block_type.nbytes)
            copy_in(q, [batch, head, row + i * c.rows, 0], full, queries.buffers.index(i))
        q_phase ^= 1
        for j in range(0, count):
            keys.fetch(at, k, [batch, head // groups, (last - j) * c.keys, 0])
            values.fetch(at, v, [batch, head // groups, (last - j) * c.keys, 0])
            at = at.advanced()


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, lse, sinks, queries, keys, values, staged, pingpong, units, n, length, heads, scale,
    c: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """One half of every tile: online softmax in base 2 over blocks of keys, the last keys first.

    Without a window only the first blocks, on the diagonal, need the causal mask. In the loop K runs one block
    ahead of V. A row may see nothing in its first blocks.
    """
    CAUSAL: gl.constexpr = c.causal
    WINDOW: gl.constexpr = c.window
    PINGPONG: gl.constexpr = c.schedule.pingpong
    SHARE: gl.constexpr = c.schedule.share
    # Runs of steps as `_end` numbers them.
    FROM: gl.constexpr = 0 if (CAUSAL and c.ratio > 1) or (WINDOW and not CAUSAL) else 1
    UNTIL: gl.constexpr = 3 if WINDOW else 2
    dtype: gl.constexpr = out.dtype
    ROWS: gl.constexpr = c.rows
    KEYS: gl.constexpr = c.keys
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(KEYS)
    sums: gl.constexpr = product_layout(WIDTH)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    sums_rows: gl.constexpr = gl.SliceLayout(1, sums)
    q = queries.buffers.index(HALF)
    o = staged.index(HALF)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    rows = gl.arange(0, c.rows, score_rows)
    columns = gl.arange(0, c.keys, gl.SliceLayout(0, score))
    at_k = cursor(0, c.schedule.stages)
    at_v = cursor(0, c.schedule.stages)
    q_phase = 0
    turn_phase = 1 - HALF
    for step in range(0, _steps(units)):
        head, block, count, last = _unit(step, units, n, length, c)
        distance = last - block * c.ratio  # of the first block, in blocks of keys
        # How far this half's first row is from that block's first key.
        below = HALF * c.rows
        if CAUSAL:
            below -= (c.ratio - 1) * c.keys
        elif WINDOW:
            below -= distance * c.keys
        queries.wait(at_buffer(HALF, q_phase))
        q_phase ^= 1
        keys.wait(at_k)
        # S = Q·Kᵀ
        s = warpgroup_mma(q, keys.buffers.index(at_k.stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        keys.release(at_k)
        at_k = at_k.advanced()
        s = capped(s, c.inner, dtype)
        if CAUSAL or WINDOW:
            seen = visible(gl.expand_dims(rows + below, 1), gl.expand_dims(columns, 0), CAUSAL, WINDOW)
            s = gl.where(seen, s, float("-inf"))
        if c.tail:
            s = gl.where(gl.expand_dims(columns < length - last * c.keys, 0), s, float("-inf"))
        row_max = gl.maximum(gl.max(s, 1) * scale, LOWEST)
        # P = 2^(S·scale - m)
        p = _exp2(s * scale - gl.expand_dims(row_max, 1), SHARE)
        row_sum = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), operand)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, sums)
        begin = 1
        for run in gl.static_range(FROM, UNTIL):
            end = _end(run, begin, count, distance, c)
            for j in range(begin, end):
                keys.wait(at_k)
                if PINGPONG:
                    mbarrier.wait(pingpong.index(HALF), turn_phase)
                    turn_phase ^= 1
                # S = Q·Kᵀ
                tile = keys.buffers.index(at_k.stage).permute((1, 0))
                s = warpgroup_mma(q, tile, zero, use_acc=False, is_async=True)
                values.wait(at_v)
                # O += P·V, of the block before
                acc = warpgroup_mma(weights, values.buffers.index(at_v.stage), acc, is_async=True)
                if PINGPONG:
                    mbarrier.arrive(pingpong.index(1 - HALF), count=1)
                s = warpgroup_mma_wait(1, deps=[s])
                keys.release(at_k)
                s = capped(s, c.inner, dtype)
                if run != 1:
                    ahead = below + j * c.keys
                    seen = visible(gl.expand_dims(rows + ahead, 1), gl.expand_dims(columns, 0), CAUSAL, WINDOW)
                    s = gl.where(seen, s, float("-inf"))
                raised = gl.maximum(row_max, gl.max(s, 1) * scale)
                # P = 2^(S·scale - m)
                p = _exp2(s * scale - gl.expand_dims(raised, 1), SHARE)
                correction = gl.exp2(row_max - raised)
                # l = l·2^(m_old - m) + rowsum(P)
                row_sum = row_sum * correction + gl.sum(p, 1)
                row_max = raised
                acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
                values.release(at_v)
                # O *= 2^(m_old - m)
                acc = acc * gl.expand_dims(gl.convert_layout(correction, sums_rows), 1)
                weights = gl.convert_layout(p.to(dtype), operand)
                at_k = at_k.advanced()
                at_v = at_v.advanced()
            begin = end
        if not c.reuse:
            # The last product with Q is done: the next tile's can be loaded.
            queries.release(at_buffer(HALF, q_phase))
        values.wait(at_v)
        # O += P·V
        acc = warpgroup_mma(weights, values.buffers.index(at_v.stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        values.release(at_v)
        at_v = at_v.advanced()
        row = block * 2 * c.rows + HALF * c.rows
        # Not by its row sum, which is that of what the FMA units computed: 2^-126 for -inf.
        row_max, row_sum, shrunk, empty = with_sink(row_max, row_sum, sinks, head % heads)
        level = gl.where(empty, float("inf"), row_max + gl.log2(row_sum))
        gl.store(lse + (head * length + row) + rows, level, mask=row + rows < length)
        share = gl.where(empty, 0.0, shrunk / row_sum)
        acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
        if not c.reuse:
            tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
        o.store(acc.to(dtype))
        fence_async_shared()
        copy_out(out, [head // heads, head % heads, row, 0], o)
        if c.reuse:
            tma.store_wait(pendings=0)
            queries.release(at_buffer(HALF, q_phase))
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["units", "n", "length", "heads", "groups"], do_not_specialize_on_alignment=["sinks"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lse, sinks, units, n, length, heads, groups, scale, c: gl.constexpr
):
    """Buffers and barriers, then the three warp groups. `n` tiles a head, an even number, `units` B·H·n / 2.
    `sinks` and `scale` as in `_attention_hopper_forward.py`.
    """
    buffers = tile_buffers(q.dtype, 2, c.rows, c.width)
    staged = buffers if c.reuse else tile_buffers(q.dtype, 2, c.rows, c.width)
    queries = Ring(buffers, barriers(2, 1), barriers(2, 1))
    keys = ring(k, c.keys, c.width, c.schedule.stages, 2)
    values = ring(v, c.keys, c.width, c.schedule.stages, 2)
    pingpong = barriers(2, 1 if c.schedule.pingpong else 0)
    gl.warp_specialize(
        [
            (_producer, (q, k, v, queries, keys, values, units, n, length, heads, groups, c)),
            (
                _consumer,
                (out, lse, sinks, queries, keys, values, staged, pingpong, units, n, length, heads, scale, c, 0),
            ),
            (
                _consumer,
                (out, lse, sinks, queries, keys, values, staged, pingpong, units, n, length, heads, scale, c, 1),
            ),
        ],
        [4, 4],
        [c.schedule.registers, c.schedule.registers],
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int = 0,
    schedule: Schedule | None = None,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> None:
    """Writes the output and its base-2 log-sum-exp (B, H, S), +inf for a row that sees nothing. A window of 0 is
    none, as is a cap. For inputs that `_hopper.fits` approves of for FORWARD_WIDTHS, as many keys as queries;
    sinks (H,) are contiguous.
    """
    B, H, S, D = q.shape
    width = power_of_2(D)
    s = schedule or SCHEDULES[width, causal]
    scale, inner = scales(D, cap)
    of_sinks = None if sinks is None else sinks.dtype
    c = Config(width, causal, window, not causal and S % s.keys != 0, s, width > 128, inner)
    n = 2 * -(-S // (4 * c.rows))
    units = B * H * n // 2
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, of_sinks, c), min(units, multiprocessors(q)),
            tensor_map(q, c.rows), tensor_map(k, c.keys), tensor_map(v, c.keys), tensor_map(out, c.rows),
            lse, sinks, units, n, S, H, H // k.shape[1], scale, c,
        )  # fmt: skip
