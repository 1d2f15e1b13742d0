"""Latent attention of new tokens for Hopper: 512 latent and 64 rotary dimensions, 16-bit numbers.

A program has 64 rows of one sequence, which are its new tokens' heads, and a part of the cache. A row's output has
512 columns: 256 registers of a thread, if one warp group had them all. So two have half of the columns each, as
FlashMLA does (github.com/deepseek-ai/FlashMLA). One, the scorer, computes scores, softmax and the first half of
O += P·C; the other reads P from shared memory and computes the second half. The scores of the next block of keys
are multiplied while the values of this one are, by both, so that the matrix units have work during the softmax.

A vector of the cache is the key and, but for its rotary part, the value: a block of 64 is loaded once, page by
page, by the tensor memory accelerator, in four pieces of 128 columns and one of 64. Shared memory holds the
queries and two blocks. Blocks are walked from the last one, so that those which the end of the cache or a new
token's place cuts come first; what lies behind the end is overwritten by zeros, as it may be no number.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `queries` | the rows' queries | the producer's copy | 1, bytes | the scorer, 0 |
| `keys.full` | each block's buffer | the producer's copy | 1, bytes | both, 0 |
| `keys.empty` | the same | each, after O += P·C | 2 | producer, 1 |
| `weights.ready` | P and what O is scaled with | the scorer | 1 | the other, 0 |
| `weights.free` | the same | the other, both read | 1 | the scorer, 1 |

No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
"""

import functools
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .._common import on
from .._hopper import (
    LOWEST,
    ROWS,
    Says,
    flat_mapping,
    kernel_key,
    launch,
    mappable,
    placed,
    product_layout,
    shared_layout,
    tensor_map,
    unpack,
)
from .._pipeline import Handshake, aggregate, barriers, copy_in, cursor, tile_buffers
from ._attention_varlen_hopper import clear_tail
from ._softmax import apply_mask, lane_sums, pack, pin, products, rescale

LATENT, ROTARY = 512, 64
"""Dimensions that the kernel is for."""
KEYS = 64
"""Vectors of a block."""
PIECE = 128
"""Columns of a piece of the latent dimensions: of four, a warp group has two as values."""
STAGES = 2
REGISTERS = 240


@dataclass(frozen=True)
class Config:
    """The kernel at compile time: vectors of a page; whether there is one part of a cache; rows of a program,
    vectors of a block, columns of a piece, blocks in flight, registers of a consumer's thread.
    """

    page: int
    whole: bool
    rows: int = ROWS
    keys: int = KEYS
    piece: int = PIECE
    rotary: int = ROTARY
    stages: int = STAGES
    registers: int = REGISTERS

    @property
    def loaded(self) -> int:
        """Vectors of a load, which are of one page."""
        return min(self.page, self.keys)


def takes(q: torch.Tensor, cache: torch.Tensor, latent: int) -> bool:
    """Whether the kernel computes attention of such tensors; the device is not looked at."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and (latent, q.shape[-1] - latent) == (LATENT, ROTARY)
        and (q.shape[1] == 1 or q.stride(1) == q.shape[2] * q.stride(2))  # tokens' heads are rows
        and mappable(q)
        and cache.is_contiguous()
        and cache.data_ptr() % 16 == 0
        and 0 < cache.shape[0] * cache.shape[1] < 1 << 31
    )


@aggregate
class Keys(Handshake):
    """Blocks of the cache: pieces of latent columns (4 · stages, KEYS, PIECE), and rotary ones (stages, KEYS,
    ROTARY).
    """

    latent: gl.shared_memory_descriptor
    rotary: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, latent, rotary, full, empty):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.latent = latent
        self.rotary = rotary
        self.full = full
        self.empty = empty

    @gluon.jit
    def block(self, at):  # type: ignore[no-untyped-def]  # as above
        """The pieces of a block."""
        return _joined(self.latent, self.rotary, at.stage)

    @gluon.jit
    def value(self, at, i: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
        """The ith piece of a block's values."""
        return self.latent.index(at.stage * 4 + i)


@aggregate
class Weights:
    """What the scorer tells of a block: P (ROWS, KEYS) in 16 bits, and by row what O before it is scaled with;
    when all blocks are done, what O is multiplied by.
    """

    p: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, p, factors, ready, free):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.p = p
        self.factors = factors
        self.ready = ready
        self.free = free


@aggregate
class Pipes:
    """What the warp groups share: pieces of the queries and their barrier, the cache, P."""

    latent: gl.shared_memory_descriptor
    rotary: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor
    keys: Keys
    weights: Weights

    @gluon.constexpr_function
    def __init__(self, latent, rotary, queries, keys, weights):  # type: ignore[no-untyped-def]  # as above
        self.latent = latent
        self.rotary = rotary
        self.queries = queries
        self.keys = keys
        self.weights = weights


@gluon.jit
def _joined(latent, rotary, at):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The five pieces of a tile."""
    return (
        latent.index(at * 4), latent.index(at * 4 + 1), latent.index(at * 4 + 2), latent.index(at * 4 + 3),
        rotary.index(at),
    )  # fmt: skip


@aggregate
class Share:
    """A program's: sequence, first row, of so many, part, its first vector, the first behind it, blocks, and the
    sequence's length.
    """

    batch: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    part: gl.tensor
    low: gl.tensor
    high: gl.tensor
    count: gl.tensor
    length: gl.tensor

    @gluon.constexpr_function
    def __init__(  # type: ignore[no-untyped-def]  # Triton's types are its own
        self, batch, row, rows, part, low, high, count, length
    ):
        self.batch = batch
        self.row = row
        self.rows = rows
        self.part = part
        self.low = low
        self.high = high
        self.count = count
        self.length = length


@gluon.jit
def _share(lengths, rows, blocks, parts, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """This program's share. Blocks of rows are the fastest coordinate: they read the same vectors. A block there
    is always; it may be hidden as a whole.
    """
    program = gl.program_id(0)
    block = program % blocks
    part = program // blocks % parts
    batch = program // blocks // parts
    length = gl.load(lengths + batch)
    each = (length + parts - 1) // parts
    each = (each + c.keys - 1) // c.keys * c.keys
    low = part * each
    high = gl.minimum(low + each, length)
    count = gl.maximum((high - low + c.keys - 1) // c.keys, 1)
    return Share(batch, block * c.rows, rows, part, low, high, count, length)


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]  # as above
    latent, rotary, table, at, start, last, keys, c: gl.constexpr
):
    """The producer's: asks for the block of vectors that begins at place `start`, page by page of `table`, of
    which none behind `last`'s is read.
    """
    full = keys.acquire(at, (4 * latent.block_type.nbytes + rotary.block_type.nbytes) * (c.keys // c.loaded))
    LOADS: gl.constexpr = c.keys // c.loaded
    for i in gl.static_range(LOADS):
        place = gl.minimum(start + i * c.loaded, last)
        row = gl.load(table + place // c.page) * c.page + place % c.page // c.loaded * c.loaded
        for j in gl.static_range(4):
            to = keys.latent.index(at.stage * 4 + j).slice(i * c.loaded, c.loaded)
            copy_in(latent, [row, j * c.piece], full, to)
        to = keys.rotary.index(at.stage).slice(i * c.loaded, c.loaded)
        copy_in(rotary, [row, 4 * c.piece], full, to)


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]  # as above
    q, q_rotary, cache, cache_rotary, table, stride, lengths, pipes, rows, blocks, parts, c: gl.constexpr
):
    """Loads the rows' queries, then blocks of vectors, the last ones first."""
    share = _share(lengths, rows, blocks, parts, c)
    mbarrier.expect(pipes.queries, 4 * q.block_type.nbytes + q_rotary.block_type.nbytes)
    for i in gl.static_range(4):
        copy_in(q, [share.batch, 0, share.row, i * c.piece], pipes.queries, pipes.latent.index(i))
    copy_in(q_rotary, [share.batch, 0, share.row, 4 * c.piece], pipes.queries, pipes.rotary.index(0))
    own = table + share.batch.to(gl.int64) * stride
    last = gl.maximum(share.high - 1, 0)
    at = cursor(1, c.stages)
    for i in range(0, share.count):
        start = share.low + (share.count - 1 - i) * c.keys
        _fetch(cache, cache_rotary, own, at, start, last, pipes.keys, c)
        at = at.advanced()


@gluon.jit
def _tell(weights, p, factors, phase):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The scorer's: leaves P and factors for the other group, once it has read those before. The next phase."""
    mbarrier.wait(weights.free, phase)
    weights.p.store(p)
    weights.factors.store(factors)
    mbarrier.arrive(weights.ready, count=1)
    return phase ^ 1


@gluon.jit
def _write(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, sums, x, share, column, parts, dtype: gl.constexpr, c: gl.constexpr
):
    """Some columns of the output, or of a part's, of the rows that there are."""
    layout: gl.constexpr = x.type.layout
    PIECE: gl.constexpr = c.piece
    row = share.row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    at = share.batch.to(gl.int64) * share.rows + row
    there = gl.expand_dims(row < share.rows, 1)
    if c.whole:
        to = out + (gl.expand_dims(at * (4 * c.piece), 1) + gl.expand_dims(columns, 0))
        gl.store(to, x.to(dtype), mask=there)
    else:
        at = (at * parts + share.part) * (4 * c.piece)
        gl.store(sums + (gl.expand_dims(at, 1) + gl.expand_dims(columns, 0)), x, mask=there)


@gluon.jit
def _scorer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, sums, levels, lengths, pipes, tokens, heads, blocks, parts, scale, c: gl.constexpr
):
    """Scores and their softmax in base 2 over blocks of vectors, and the first half of the output."""
    ROWS: gl.constexpr = c.rows
    KEYS: gl.constexpr = c.keys
    PIECE: gl.constexpr = c.piece
    score: gl.constexpr = product_layout(KEYS)
    sum_layout: gl.constexpr = product_layout(PIECE)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sum_layout, k_width=2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    dtype: gl.constexpr = pipes.latent.dtype
    share = _share(lengths, tokens * heads, blocks, parts, c)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    rows = gl.arange(0, c.rows, score_rows)
    # The last vector that a row sees, counted from the part's first one.
    seen = share.length - tokens + (share.row + rows) // heads
    seen = gl.minimum(seen, share.high - 1) - share.low
    # Blocks that not every row sees as a whole, the first at least.
    whole = gl.minimum(share.length - tokens + 1, share.high) - share.low
    cut = gl.maximum(share.count - gl.maximum(whole, 0) // c.keys, 1)
    q = _joined(pipes.latent, pipes.rotary, 0)
    at = cursor(0, c.stages)
    last = share.count - 1
    mbarrier.wait(pipes.queries, 0)
    pipes.keys.wait(at)
    # S = Q·Cᵀ
    s = warpgroup_mma_wait(0, deps=[products(q, pipes.keys.block(at), zero)])
    s = apply_mask(s, seen - last * c.keys, 0, True, False)
    beyond = share.high - share.low - last * c.keys
    if beyond < c.keys:
        clear_tail(pipes.keys.value(at, 0), beyond, c.keys, c.piece)
        clear_tail(pipes.keys.value(at, 1), beyond, c.keys, c.piece)
    one = gl.zeros([ROWS, PIECE], gl.float32, sum_layout)
    two = gl.zeros([ROWS, PIECE], gl.float32, sum_layout)
    row_max = gl.maximum(gl.max(s, 1) * scale, LOWEST)
    # P = 2^(S·scale - m)
    weights = gl.exp2(s * scale - gl.expand_dims(row_max, 1))
    row_sum = lane_sums(weights)
    p = pack(weights, dtype)
    phase = _tell(pipes.weights, weights.to(dtype), gl.full([ROWS], 1.0, gl.float32, score_rows), 1)
    begin = 1
    for run in gl.static_range(2):
        until = cut if run == 0 else share.count
        for i in range(begin, until):
            following = at.advanced()
            pipes.keys.wait(following)
            # S = Q·Cᵀ
            s = products(q, pipes.keys.block(following), zero)
            before = unpack(p, dtype, operand)
            # O += P·C, of the block before
            one = warpgroup_mma(before, pipes.keys.value(at, 0), one, is_async=True)
            two = warpgroup_mma(before, pipes.keys.value(at, 1), two, is_async=True)
            s = warpgroup_mma_wait(2, deps=[s])
            if run == 0:
                s = apply_mask(s, seen - (last - i) * c.keys, 0, True, False)
            top = gl.max(s, 1) * scale
            # Not behind as in `_softmax.py`: a row's few large weights are then near 1, where 16 bits round less.
            highest = pin(gl.maximum(row_max, top))
            # P = 2^(S·scale - m)
            weights = gl.exp2(s * scale - gl.expand_dims(highest, 1))
            correction = gl.exp2(row_max - highest)
            row_max = highest
            phase = _tell(pipes.weights, weights.to(dtype), correction, phase)
            one, two, before = warpgroup_mma_wait(0, deps=[one, two, before])
            pipes.keys.release(at)
            p = pack(weights, dtype)
            # l = l·2^(m_old - m) + rowsum(P)
            by_lane = gl.convert_layout(correction, gl.SliceLayout(1, row_sum.type.layout))
            row_sum = row_sum * gl.expand_dims(by_lane, 1) + lane_sums(weights)
            # O *= 2^(m_old - m)
            one = rescale(one, correction)
            two = rescale(two, correction)
            at = following
        begin = gl.maximum(until, begin)
    before = unpack(p, dtype, operand)
    # O += P·C, of the last block
    one = warpgroup_mma(before, pipes.keys.value(at, 0), one, is_async=True)
    two = warpgroup_mma(before, pipes.keys.value(at, 1), two, is_async=True)
    total = gl.convert_layout(gl.sum(row_sum, 1), score_rows)
    empty = row_max == LOWEST
    part = gl.where(empty, 0.0, 1.0 / total)
    mbarrier.wait(pipes.weights.free, phase)
    pipes.weights.factors.store(part)
    mbarrier.arrive(pipes.weights.ready, count=1)
    if not c.whole:
        level = gl.where(empty, float("-inf"), row_max + gl.log2(total))
        row = share.row + rows
        place = (share.batch.to(gl.int64) * share.rows + row) * parts + share.part
        gl.store(levels + place, level, mask=row < share.rows)
    one, two, before = warpgroup_mma_wait(0, deps=[one, two, before])
    pipes.keys.release(at)
    part = gl.expand_dims(gl.convert_layout(part, gl.SliceLayout(1, sum_layout)), 1)
    _write(out, sums, one * part, share, 0, parts, dtype, c)
    _write(out, sums, two * part, share, PIECE, parts, dtype, c)


@gluon.jit
def _other(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, sums, lengths, pipes, rows, blocks, parts, c: gl.constexpr
):
    """The second half of the output, from what the scorer tells."""
    ROWS: gl.constexpr = c.rows
    PIECE: gl.constexpr = c.piece
    layout: gl.constexpr = product_layout(PIECE)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    share = _share(lengths, rows, blocks, parts, c)
    one = gl.zeros([ROWS, PIECE], gl.float32, layout)
    two = gl.zeros([ROWS, PIECE], gl.float32, layout)
    at = cursor(0, c.stages)
    phase = 0
    beyond = share.high - share.low - (share.count - 1) * c.keys
    pipes.keys.wait(at)
    if beyond < c.keys:
        clear_tail(pipes.keys.value(at, 2), beyond, c.keys, c.piece)
        clear_tail(pipes.keys.value(at, 3), beyond, c.keys, c.piece)
    for _ in range(0, share.count):
        mbarrier.wait(pipes.weights.ready, phase)
        phase ^= 1
        p = pipes.weights.p.load(operand)
        factors = pipes.weights.factors.load(of_rows)
        mbarrier.arrive(pipes.weights.free, count=1)
        pipes.keys.wait(at)
        # O = O·2^(m_old - m) + P·C
        one = rescale(one, factors)
        two = rescale(two, factors)
        one = warpgroup_mma(p, pipes.keys.value(at, 2), one, is_async=True)
        two = warpgroup_mma(p, pipes.keys.value(at, 3), two, is_async=True)
        one, two, p = warpgroup_mma_wait(0, deps=[one, two, p])
        pipes.keys.release(at)
        at = at.advanced()
    mbarrier.wait(pipes.weights.ready, phase)
    part = gl.expand_dims(pipes.weights.factors.load(of_rows), 1)
    _write(out, sums, one * part, share, 2 * PIECE, parts, pipes.latent.dtype, c)
    _write(out, sums, two * part, share, 3 * PIECE, parts, pipes.latent.dtype, c)


@gluon.jit(
    do_not_specialize=["stride", "tokens", "heads", "blocks", "parts"],
    do_not_specialize_on_alignment=["table", "lengths"],
)
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, q_rotary, cache, cache_rotary, table, lengths, out, sums, levels,
    stride, tokens, heads, blocks, parts, scale, c: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. `out` (B, Sq, H, C) of a whole cache; else parts' sums, divided,
    (B, Sq, H, parts, C) and their base-2 log-sum-exp. `stride` of the block table.
    """
    dtype: gl.constexpr = q.dtype
    latent = tile_buffers(dtype, 4, c.rows, c.piece)
    rotary = tile_buffers(dtype, 1, c.rows, c.rotary)
    keys = Keys(
        tile_buffers(dtype, 4 * c.stages, c.keys, c.piece),
        tile_buffers(dtype, c.stages, c.keys, c.rotary),
        barriers(c.stages, 1),
        barriers(c.stages, 2),
    )
    weights = Weights(
        tile_buffers(dtype, 1, c.rows, c.keys).index(0),
        gl.allocate_shared_memory(gl.float32, [c.rows], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        barriers(1, 1).index(0),
        barriers(1, 1).index(0),
    )
    pipes = Pipes(latent, rotary, barriers(1, 1).index(0), keys, weights)
    rows = tokens * heads
    gl.warp_specialize(
        [
            (
                _producer,
                (q, q_rotary, cache, cache_rotary, table, stride, lengths, pipes, rows, blocks, parts, c),
            ),
            (_scorer, (out, sums, levels, lengths, pipes, tokens, heads, blocks, parts, scale, c)),
            (_other, (out, sums, lengths, pipes, rows, blocks, parts, c)),
        ],
        [4, 4],
        [c.registers, c.registers],
    )


@functools.lru_cache(256)
def _vectors(tokens: int, loaded: int, columns: int, dtype: torch.dtype) -> Says:
    """What a tensor map of pieces of so many vectors of a cache says."""
    block = loaded, columns
    return flat_mapping((tokens, LATENT + ROTARY), block, shared_layout(*block, dtype))


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    levels: torch.Tensor,
    scale: float,
    parts: int,
) -> None:
    """Writes the output of one part, or of more their sums and levels, as the portable kernel does. `scale` is in
    base 2. For tensors that `takes` approves of; the table's rows are contiguous.
    """
    B, Sq, H, D = q.shape
    rows = q.as_strided((B, 1, Sq * H, D), (q.stride(0), D, q.stride(2), 1))
    page = cache.shape[1]
    c = Config(page, parts == 1)
    blocks = -(-Sq * H // ROWS)
    key = kernel_key(_kernel, q.device, q.dtype, c)
    queries = [tensor_map(rows, ROWS, columns) for columns in (PIECE, ROTARY)]
    vectors = [placed(cache, _vectors(cache.shape[0] * page, c.loaded, x, cache.dtype)) for x in (PIECE, ROTARY)]
    with on(q):
        launch(
            _kernel, key, B * blocks * parts, *queries, *vectors, block_table, lengths, out, sums, levels,
            block_table.stride(0), Sq, H, blocks, parts, scale, c,
        )  # fmt: skip
