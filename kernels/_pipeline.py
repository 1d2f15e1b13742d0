"""What the partitions of a warp-specialised kernel share: rings of buffers, cursors into them, a queue of tiles.

A ring is a row of buffers in shared memory with two barriers each. The producer waits until a buffer is empty,
announces how many bytes come, and asks for the copy, whose last byte completes `full`. A consumer waits for
`full`, reads, and arrives at `empty`. A barrier has a phase, 0 or 1, that flips each time all who must have
arrived; a wait names the phase whose end it waits for. A consumer's cursor starts at phase 0, a producer's at
1, since a wait for the phase before the first returns at once.

No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
Constructors are constexpr functions, so that they are part of a kernel's hash.
"""

from triton._C.libtriton import gluon_ir, ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Of tiles, by the tensor memory accelerator: their names from Triton 3.9 on, and before."""


RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Whether Triton's word has no underscore, as from 3.9 on."""


@gluon.jit
def viewed(buffer, TYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The same bytes of shared memory as numbers of another type, in another shape and layout."""
    return buffer.reinterpret(TYPE, SHAPE, LAYOUT) if RENAMED else buffer._reinterpret(TYPE, SHAPE, LAYOUT)


@gluon.constexpr_function
def _layout(rows, columns, dtype):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


@gluon.jit
def tile_buffers(  # type: ignore[no-untyped-def]  # as above
    dtype: gl.constexpr, COUNT: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr
):
    """Room for so many tiles in shared memory, each as the matrix units and tensor maps of any rank have it."""
    return gl.allocate_shared_memory(dtype, [COUNT, rows, columns], _layout(rows, columns, dtype))


@gluon.jit
def _part(buffer, tensor):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of a buffer the first rows, as many as a tile of the tensor has; its first sizes are 1 where the buffer has
    none.
    """
    RANK: gl.constexpr = len(tensor.block_type.shape)
    if len(buffer.shape) < RANK:
        buffer = buffer.reshape([1] * (RANK - len(buffer.shape)) + buffer.shape)
    if RANK > 1:
        ROWS: gl.constexpr = tensor.block_type.shape[RANK - 2]
        if buffer.shape[RANK - 2] > ROWS:
            buffer = buffer.slice(0, ROWS, RANK - 2)
    return buffer


@gluon.jit
def copy_in(tensor, place, barrier, buffer):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Asks for the tile at `place`, zeros where the tensor has none, to be announced by a barrier. Of a buffer of
    more rows the others stay as they are.
    """
    async_load(tensor, place, barrier, _part(buffer, tensor))


@gluon.jit
def copy_pieces(tensor, place, barrier, buffers, at, PIECES: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """`copy_in` of a tile in one piece, or in more by columns, of a tensor (B, H, S, D). They lie in buffers one
    after the other, from piece `at` times so many on.
    """
    if PIECES == 1:
        copy_in(tensor, place, barrier, buffers.index(at))
    else:
        COLUMNS: gl.constexpr = tensor.block_type.shape[3]
        for i in gl.static_range(PIECES):
            column = place[3] + i * COLUMNS
            copy_in(tensor, [place[0], place[1], place[2], column], barrier, buffers.index(at * PIECES + i))


@gluon.jit
def pieces(buffers, at, PIECES: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The pieces of a tile, one or three."""
    if PIECES == 1:
        found = (buffers.index(at),)
    else:
        found = (buffers.index(at * 3), buffers.index(at * 3 + 1), buffers.index(at * 3 + 2))
    return found


@gluon.jit
def copy_out(tensor, place, buffer):  # type: ignore[no-untyped-def]  # as above
    """Has a tile written at `place`, as far as the tensor goes: of a buffer of more rows the first ones."""
    async_store(tensor, place, _part(buffer, tensor))


@gluon.jit
def add_out(tensor, place, buffer):  # type: ignore[no-untyped-def]  # as above
    """As `copy_out`, adding to what is there. `ADDS`: whether Triton has it."""
    _reduce(tensor, place, _part(buffer, tensor))


@builtin
def _reduce(tensor, place, buffer, _semantic=None):  # type: ignore[no-untyped-def]  # as above
    """Adds a buffer of the map's shape."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor.handle, place, buffer.handle)


ADDS = hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce") and hasattr(ir, "DESCRIPTOR_REDUCE_KIND")
"""Whether Triton's builder has the instruction `cp.reduce.async.bulk.tensor`; Gluon's Python does not."""


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The next buffer of a ring, and the phase of its barriers: another each time round."""
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@aggregate
class Cursor:
    """A place in a ring: a buffer, and the phase of its barriers to wait for."""

    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, stage, phase, STAGES):  # type: ignore[no-untyped-def]  # as above
        self.stage = stage
        self.phase = phase
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def advanced(self):  # type: ignore[no-untyped-def]  # as above
        """The next place."""
        stage, phase = advance(self.stage, self.phase, self.STAGES)
        return Cursor(stage, phase, self.STAGES)


@gluon.jit
def cursor(phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """At a ring's first buffer: phase 0 for a consumer, 1 for the producer."""
    return Cursor(gl.to_tensor(0), gl.to_tensor(phase), STAGES)


@gluon.jit
def at_buffer(i, phase):  # type: ignore[no-untyped-def]  # as above
    """A cursor that stays: at buffer i, of which one consumer alone reads."""
    return Cursor(gl.to_tensor(i), gl.to_tensor(phase), 1)


class Handshake:
    """What the producer and the consumers of a ring do with its barriers: the methods of every aggregate that has
    `full` and `empty`, a barrier a stage each. Not an aggregate itself: Triton takes the methods of an aggregate's
    base over, its fields not.
    """

    @gluon.jit
    def acquire(self, at, NBYTES: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
        """The producer's: once a stage is empty, announces so many bytes at its full barrier, which it returns."""
        mbarrier.wait(self.empty.index(at.stage), at.phase)
        full = self.full.index(at.stage)
        mbarrier.expect(full, NBYTES)
        return full

    @gluon.jit
    def wait(self, at):  # type: ignore[no-untyped-def]  # as above
        """A consumer's: until the stage is full."""
        mbarrier.wait(self.full.index(at.stage), at.phase)

    @gluon.jit
    def release(self, at):  # type: ignore[no-untyped-def]  # as above
        """A consumer's: it has read the stage."""
        mbarrier.arrive(self.empty.index(at.stage), count=1)


@aggregate
class Ring(Handshake):
    """Buffers (stages, rows, columns), and for each a barrier that it is full and one that it is empty."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty):  # type: ignore[no-untyped-def]  # as above
        self.buffers = buffers
        self.full = full
        self.empty = empty

    @gluon.jit
    def fetch(self, at, tensor, place, PIECES: gl.constexpr = 1):  # type: ignore[no-untyped-def]  # as above
        """The producer's: asks for the tile of a tensor at `place`, once the buffer is empty."""
        full = self.acquire(at, PIECES * tensor.block_type.nbytes)
        copy_pieces(tensor, place, full, self.buffers, at.stage, PIECES)


@gluon.jit
def ring(  # type: ignore[no-untyped-def]  # as above
    tensor, rows: gl.constexpr, columns: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PIECES: gl.constexpr = 1,
):  # fmt: skip
    """A ring of tiles of a tensor, whose buffers are empty when so many consumers have read them. Tiles in pieces
    lie one piece after the other.
    """
    buffers = tile_buffers(tensor.dtype, STAGES * PIECES, rows, columns)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, CONSUMERS)
    return Ring(buffers, full, empty)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Barriers that so many arrivals complete; with none they are not initialised.

    Triton lays scratch memory over a barrier that nothing waits for: one that is not used must not be initialised.
    """
    new = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        if ARRIVALS > 0:
            mbarrier.init(new.index(i), count=ARRIVALS)
    return new


@gluon.jit
def take(counter, total):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The next tile, after those that programs begin with. The last one to take leaves the counter at 0."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == total - 1:  # as many are taken as there are tiles
        gl.atomic_add(counter, -total, sem="relaxed")
    return gl.num_programs(0) + taken


@aggregate
class TileQueue:
    """Where the producer, which takes tiles off the global counter, hands each on to the consumers."""

    tile: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tile, ready, free):  # type: ignore[no-untyped-def]  # as above
        self.tile = tile
        self.ready = ready
        self.free = free

    @gluon.jit
    def push(self, tile, phase):  # type: ignore[no-untyped-def]  # as above
        """The producer's: the next tile, when all consumers have read the one before. The next phase."""
        mbarrier.wait(self.free, phase)
        self.tile.store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        mbarrier.arrive(self.ready, count=1)
        return phase ^ 1

    @gluon.jit
    def pop(self, phase):  # type: ignore[no-untyped-def]  # as above
        """A consumer's: (the next tile, the next phase)."""
        mbarrier.wait(self.ready, phase)
        tile = gl.max(self.tile.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(self.free, count=1)
        return tile, phase ^ 1


@gluon.jit
def tile_queue(CONSUMERS: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """An empty queue for so many consumers."""
    tile = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=CONSUMERS)
    return TileQueue(tile, ready, free)


@aggregate
class Pipes:
    """What the partitions of a forward pass share: Q, one buffer a consumer; K and V; the order of consumers at
    the matrix units; the tiles.
    """

    q: Ring
    k: Ring
    v: Ring
    pingpong: gl.shared_memory_descriptor
    tiles: TileQueue

    @gluon.constexpr_function
    def __init__(self, q, k, v, pingpong, tiles):  # type: ignore[no-untyped-def]  # as above
        self.q = q
        self.k = k
        self.v = v
        self.pingpong = pingpong
        self.tiles = tiles


@aggregate
class Cursors:
    """A consumer's places in the rings of K and V, and the phase of its ping-pong barrier."""

    k: Cursor
    v: Cursor
    pingpong: gl.tensor

    @gluon.constexpr_function
    def __init__(self, k, v, pingpong):  # type: ignore[no-untyped-def]  # as above
        self.k = k
        self.v = v
        self.pingpong = pingpong


@aggregate
class Pair:
    """Two tensors' tiles that stay for a block of a program's work, in halves of 64 rows (2, 64, D), with a
    barrier a half. The first's may be in pieces of columns. Where there is room for the next block too, whose
    halves are 2 and 3, each block has a barrier that its halves are empty.
    """

    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, first, second, full, empty):  # type: ignore[no-untyped-def]  # as above
        self.first = first
        self.second = second
        self.full = full
        self.empty = empty

    @gluon.jit
    def fetch(self, half, one, two, place, PIECES: gl.constexpr = 1):  # type: ignore[no-untyped-def]  # as above
        """The producer's: asks for a half of both at `place`."""
        mbarrier.expect(self.full.index(half), PIECES * one.block_type.nbytes + two.block_type.nbytes)
        copy_pieces(one, place, self.full.index(half), self.first, half, PIECES)
        copy_in(two, place, self.full.index(half), self.second.index(half))

    @gluon.jit
    def wait(self, half, phase=0):  # type: ignore[no-untyped-def]  # as above
        """A consumer's: until a half of both is there."""
        mbarrier.wait(self.full.index(half), phase)


@gluon.jit
def pair(  # type: ignore[no-untyped-def]  # as above
    one, two, rows: gl.constexpr, columns: gl.constexpr, PIECES: gl.constexpr = 1, PART: gl.constexpr = 0,
    BLOCKS: gl.constexpr = 1,
):  # fmt: skip
    """Room for two halves of each of two tensors, of one block or of two; PART columns of a piece of the first, 0
    for as many as the second's.
    """
    first = tile_buffers(one.dtype, 2 * BLOCKS * PIECES, rows, PART if PART else columns)
    second = tile_buffers(two.dtype, 2 * BLOCKS, rows, columns)
    return Pair(first, second, barriers(2 * BLOCKS, 1), barriers(BLOCKS, 2 if BLOCKS > 1 else 0))


@aggregate
class PairRing(Handshake):
    """A ring of tiles of two tensors, which are loaded, read and released together; as in a `Pair`."""

    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, first, second, full, empty):  # type: ignore[no-untyped-def]  # as above
        self.first = first
        self.second = second
        self.full = full
        self.empty = empty

    @gluon.jit
    def fetch(self, at, one, two, place, PIECES: gl.constexpr = 1):  # type: ignore[no-untyped-def]  # as above
        """The producer's: asks for the tiles of both at `place`, once the buffers are empty."""
        full = self.acquire(at, PIECES * one.block_type.nbytes + two.block_type.nbytes)
        copy_pieces(one, place, full, self.first, at.stage, PIECES)
        copy_in(two, place, full, self.second.index(at.stage))


@gluon.jit
def pair_ring(  # type: ignore[no-untyped-def]  # as above
    one, two, rows: gl.constexpr, columns: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr = 1,
    PART: gl.constexpr = 0,
):  # fmt: skip
    """A ring for two consumers; PART as in `pair`."""
    first = tile_buffers(one.dtype, STAGES * PIECES, rows, PART if PART else columns)
    second = tile_buffers(two.dtype, STAGES, rows, columns)
    return PairRing(first, second, barriers(STAGES, 1), barriers(STAGES, 2))


@aggregate
class Statistics:
    """What comes with the tiles of Q and dO of a `PairRing`: their log-sum-exp and delta (stages, rows), fp32; and
    the barriers that Q is there.
    """

    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, lse, delta, q_full):  # type: ignore[no-untyped-def]  # as above
        self.lse = lse
        self.delta = delta
        self.q_full = q_full


@aggregate
class Exchange:
    """What the two consumers of a backward pass exchange, as one of them sees it: dS of both halves, twice;
    what it stages for dQ; its own barriers and the other's.
    """

    ds: gl.shared_memory_descriptor
    staged: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    other_ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    other_free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(  # type: ignore[no-untyped-def]  # as above
        self, ds, staged, ready, other_ready, free, other_free
    ):
        self.ds = ds
        self.staged = staged
        self.ready = ready
        self.other_ready = other_ready
        self.free = free
        self.other_free = other_free


@aggregate
class BackwardPipes:
    """What a consumer of a backward pass in one kernel reads and exchanges: its block of K and V, and maybe the
    next; Q and dO with their statistics; dS.
    """

    resident: Pair
    stream: PairRing
    statistics: Statistics
    exchange: Exchange

    @gluon.constexpr_function
    def __init__(self, resident, stream, statistics, exchange):  # type: ignore[no-untyped-def]  # as above
        self.resident = resident
        self.stream = stream
        self.statistics = statistics
        self.exchange = exchange


@aggregate
class Blocks:
    """The blocks of a backward pass: `n` of each of `heads`, of which a batch has `per_batch`, taken in
    sections of heads; `groups` query heads share a key head; a head's rows.
    """

    n: gl.tensor
    heads: gl.tensor
    per_batch: gl.tensor
    section: gl.tensor
    groups: gl.tensor
    length: gl.tensor

    @gluon.constexpr_function
    def __init__(self, n, heads, per_batch, section, groups, length):  # type: ignore[no-untyped-def]  # as above
        self.n = n
        self.heads = heads
        self.per_batch = per_batch
        self.section = section
        self.groups = groups
        self.length = length
