"""Losses of rows of logits and their gradients in one launch, for Hopper (compute capability 9.0), in Gluon.

The formulas are those of `_cross_entropy.py`. What bounds the launch is memory, so a row is read once and stays in
shared memory until its gradient is written. Programs are persistent, one a multiprocessor, and take rows as far
apart as there are programs. Each has partitions of warps, which pass chunks of a row through a ring of slots:

* `_producer` asks for chunks by the tensor memory accelerator. What lies beyond a row is not read.
* `_consumer`, one a group of warps, has a part of every chunk, and goes over a row twice. Pass 1 finds the maximum
  and the sum of exponentials as chunks arrive. Every thread has its own of both, so that nothing waits for other
  threads before the end of the row. Then the groups exchange theirs. Pass 2 reads the chunks again, writes the
  gradient and gives up the slots. The next row comes into these meanwhile.

Triton has the warps of a partition meet at every chunk. Of several groups others have work then.

The first chunks of a row for which the ring has too few slots are given up in pass 1. H of them stay in registers.
The others are copied once more, from the L2 cache. Pass 2 takes them after those that stay in the ring, so that
slots are given up in the order in which they were filled. Where chunk H + K is the first that stays, of C:

    copied     0 … H-1,  H … H+K-1,  H+K … C-1,  H … H+K-1,  then the next row
    pass 1     0 … H-1,  H … H+K-1,  H+K … C-1
    pass 2                           H+K … C-1,  H … H+K-1,  0 … H-1 from registers
    given up   0 … H+K-1 in pass 1, what is copied after them in pass 2

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `full` | each slot | the producer's copy | 1, bytes | each group, 0; in pass 2 only for what is copied again |
| `empty` | each slot | each group, the slot read for the last time | groups | producer, 1 |
| `summed` | the row | each group, its sums on the shelf | groups | each group, 0 |

The shelf has room for the sums of two rows: whoever writes those of a row has waited for those of the row before,
and nobody has written these without having read those before them.

Gradients may go over the logits. A chunk is in shared memory when its own place is written, the target's logit has
been read before anything is, and nothing that was written is read again.

No `from __future__ import annotations` here, as in `_pipeline.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .._common import cdiv, multiprocessors, on
from .._hopper import LOWEST, Says, TensorMap, kernel_key, launch, placed
from .._pipeline import Ring, aggregate, barriers, cursor, viewed

if TYPE_CHECKING:
    from ._cross_entropy import Options

LOG2E = gl.constexpr(1.4426950408889634)
LINE = 64
"""Elements of a line of a chunk: 128 bytes. A row begins at a line, and is read to the end of its last one."""
VECTOR = 8
"""Elements of 16 bytes."""
WIDE = gl.constexpr(LINE)
EACH = gl.constexpr(VECTOR)
SHORTEST = 48 * 1024
"""Elements of the shortest row that this takes. Of shorter ones each waits longer for its sums: of 8,192 to 32,000
an H200 reads and writes 2.0 to 3.3 TB/s, and there the portable kernel was not timed beside it.
"""


@dataclass(frozen=True)
class Schedule:
    """Groups that compute, and warps of each; lines of a chunk; slots of the ring; of a long row, slots that hold
    nothing at the end of pass 1, for the copies that come next, and chunks that registers hold; how gradients are
    cached. Tuned on an H200, with vocabularies of 8,192 to 151,936.
    """

    groups: int = 2
    warps: int = 8
    lines: int = 128
    slots: int = 14
    ahead: int = 2
    held: int = 4
    hint: str = ""

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return self.lines * LINE

    @property
    def lanes(self) -> int:
        """Running maxima of a group: one a thread."""
        return 32 * self.warps

    @property
    def parts(self) -> int:
        """Vectors of a chunk that a thread has."""
        return self.chunk // (self.groups * self.lanes * VECTOR)

    @property
    def registers(self) -> int:
        """Of a thread that computes; the producer's get what is left."""
        return {12: 160, 16: 112}.get(self.groups * self.warps, 240)


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: the schedule, what it leaves out where it is zero, whether it writes gradients or
    has pass 1 alone, and how many chunks registers hold.
    """

    schedule: Schedule
    smooth: bool
    square: bool
    gradients: bool
    held: int


class Rows(NamedTuple):
    """Of a launch: rows, their elements, lines from row to row of logits and of gradients, chunks of a row, copies
    of chunks for a row, and how many whole chunks are given up in pass 1, with those that registers hold.
    """

    M: Any
    V: Any
    pitch: Any
    out_pitch: Any
    chunks: Any
    copies: Any
    passing: Any


class Weights(NamedTuple):
    """What the loss is."""

    ignore_index: Any
    smoothing: Any
    z: Any


class Row(NamedTuple):
    """What pass 2 knows of a row: the target, -1 for none, its maximum, the log of its sum of exponentials above
    that, and the factor of its gradient.
    """

    target: Any
    top: Any
    rest: Any
    factor: Any


@aggregate
class Shelf:
    """Where groups exchange sums of a row: maxima, sums of exponentials and of logits of two rows, (6, groups);
    and the barrier that those of all groups are there.
    """

    sums: gl.shared_memory_descriptor
    summed: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, sums, summed):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.sums = sums
        self.summed = summed

    @gluon.jit
    def put(self, place, value, s: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
        """A group's number."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [s.warps], [0])
        self.sums.index(place).slice(GROUP, 1).store(gl.full([1], value, gl.float32, one))

    @gluon.jit
    def get(self, place, s: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
        """The number of each group."""
        return self.sums.index(place).load(gl.BlockedLayout([1], [32], [s.warps], [0]))

    @gluon.jit
    def exchange(  # type: ignore[no-untyped-def]  # as above
        self, phase, top, total, plain, c: gl.constexpr, GROUP: gl.constexpr
    ):
        """(maximum, sum of exponentials above it, sum of logits) of all groups."""
        s: gl.constexpr = c.schedule
        place = phase * 3
        self.put(place, top, s, GROUP)
        self.put(place + 1, total, s, GROUP)
        if c.smooth:
            self.put(place + 2, plain, s, GROUP)
        mbarrier.arrive(self.summed, count=1)
        mbarrier.wait(self.summed, phase)
        # Σ = Σᵢ Σᵢ' exp(mᵢ - m) over groups with maximum mᵢ and sum Σᵢ'
        tops = self.get(place, s)
        top = gl.max(tops, 0)
        total = gl.sum(self.get(place + 1, s) * _lowered(tops, top), 0)
        if c.smooth:
            plain = gl.sum(self.get(place + 2, s), 0)
        return top, total, plain


@gluon.constexpr_function
def _shared(rank):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of 16-bit lines as they lie in memory. Threads read vectors beside each other: without bank conflicts."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=rank)


@gluon.constexpr_function
def _vectors(s):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A group's part of a chunk in registers: a lane is a thread, which has a vector of each part."""
    return gl.BlockedLayout([s.parts, 1, 8], [1, 32, 1], [1, s.warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _lanes(s):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """One number a lane."""
    return gl.SliceLayout(0, gl.SliceLayout(2, _vectors(s)))


@gluon.jit
def _parted(buffers, s: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The parts of slots that groups have, (parts, lanes, 8) each."""
    SHAPE: gl.constexpr = [s.slots * s.groups, s.parts, s.lanes, EACH]
    return viewed(buffers, buffers.dtype, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def _read(chunks, at, s: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A group's part of a slot."""
    return chunks.index(at.stage * s.groups + GROUP).load(_vectors(s))


@gluon.jit
def _anew(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The same numbers in whole registers. The compiler does not see that they are the same, and so makes what it
    needs of them here, in place of holding it from elsewhere in more registers.
    """
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@gluon.jit
def _columns(s: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Where the elements of a group's part of a chunk are in the chunk."""
    LAYOUT: gl.constexpr = _vectors(s)
    PART: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    ELEMENT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    part = gl.arange(0, s.parts, PART)[:, None, None]
    lane = _anew(gl.arange(0, s.lanes, _lanes(s)))[None, :, None]
    each = gl.arange(0, EACH, ELEMENT)[None, None, :]
    return ((GROUP * s.parts + part) * s.lanes + lane) * EACH + each


@gluon.jit
def _producer(logits, ring, rows, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Asks for the chunks of each row, and once more for the first of them that nothing holds."""
    s: gl.constexpr = c.schedule
    at = cursor(1, s.slots)
    row = gl.program_id(0)
    while row < rows.M:
        for i in range(0, rows.copies):
            chunk = gl.where(i < rows.chunks, i, i - rows.chunks + c.held)
            ring.fetch(at, logits, [row, chunk * s.lines, 0])
            at = at.advanced()
        row += gl.num_programs(0)


@gluon.jit
def _lowered(highest, top):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """exp(highest - top) of finite maxima, as in `_online_softmax.py`."""
    return gl.exp2(gl.maximum(highest * 0.5 - top * 0.5, -500.0) * (2.0 * LOG2E))


@gluon.jit
def _with_chunk(x, highest, total):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Lanes' maxima and sums of exp(x - maximum), with a chunk added."""
    # m' = max(m, max x), Σ' = Σ · exp(m - m') + Σ exp(x - m')
    higher = gl.maximum(highest, gl.max(gl.max(x, 2), 0))
    terms = gl.exp2((x - higher[None, :, None]) * LOG2E)
    return higher, total * _lowered(highest, higher) + gl.sum(gl.sum(terms, 2), 0)


@gluon.jit
def _counted(x, inside, sums, c: gl.constexpr, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Lanes' maxima, sums of exponentials and, for smoothing, sums of logits, with a chunk's elements inside."""
    highest, total, plain = sums
    x = x.to(gl.float32)
    if c.smooth:
        own = gl.where(inside, x, 0.0) if MASKED else x
        plain = plain + gl.sum(gl.sum(own, 2), 0)
    if MASKED:
        x = gl.where(inside, x, float("-inf"))
    highest, total = _with_chunk(x, highest, total)
    return highest, total, plain


@gluon.jit
def _pass_on(ring, at):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Gives up a slot in pass 1. A load of it may still be under way, which is not ordered before what the tensor
    memory accelerator writes.
    """
    fence_async_shared()
    ring.release(at)


@gluon.jit
def _statistics(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, chunks, at, rows, shelf, phase, hit, c: gl.constexpr, GROUP: gl.constexpr
):
    """Pass 1: (maximum, log of the sum of exponentials above it, mean, chunks that registers hold, place of the
    first slot that is kept, place after the row). `hit` is the target's logit, or another number that is not above
    the row's maximum.
    """
    s: gl.constexpr = c.schedule
    HELD: gl.constexpr = c.held
    # Finite, so that the difference of two is never NaN.
    highest = gl.full([s.lanes], LOWEST, gl.float32, _lanes(s))
    zeros = gl.full([s.lanes], 0.0, gl.float32, _lanes(s))
    sums = (highest, zeros, zeros)
    held = ()
    for _ in gl.static_range(HELD):
        ring.wait(at)
        x = _anew(_read(chunks, at, s, GROUP))
        held += (x,)
        sums = _counted(x, True, sums, c, False)
        _pass_on(ring, at)
        at = at.advanced()
    for _ in range(HELD, rows.passing):
        ring.wait(at)
        sums = _counted(_read(chunks, at, s, GROUP), True, sums, c, False)
        _pass_on(ring, at)
        at = at.advanced()
    kept = at
    for _ in range(rows.passing, rows.V // s.chunk):
        ring.wait(at)
        sums = _counted(_read(chunks, at, s, GROUP), True, sums, c, False)
        at = at.advanced()
    if rows.V % s.chunk != 0:
        ring.wait(at)
        inside = rows.V // s.chunk * s.chunk + _columns(s, GROUP) < rows.V
        sums = _counted(_read(chunks, at, s, GROUP), inside, sums, c, True)
        if not c.gradients:
            _pass_on(ring, at)
        at = at.advanced()
    highest, total, plain = sums
    # With the target's logit, which changes nothing, so that all threads have read it before any goes on.
    top = gl.max(gl.maximum(highest, hit), 0)
    total = gl.sum(total * _lowered(highest, top), 0)
    sum_of_row = gl.sum(plain, 0) if c.smooth else 0.0
    top, total, sum_of_row = shelf.exchange(phase, top, total, sum_of_row, c, GROUP)
    mean = sum_of_row / rows.V if c.smooth else 0.0
    return top, gl.log(total), mean, held, kept, at


@gluon.jit
def _loss(hit, top, rest, mean, weights, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A row's loss; in this order large logits cancel exactly."""
    # L - (1-ε) x_t - ε mean(x) + z L²
    loss = (top - hit) + rest
    if c.smooth:
        loss += weights.smoothing * (((top - mean) + rest) - loss)
    if c.square:
        loss += weights.z * (top + rest) * (top + rest)
    return loss


@gluon.jit
def _slopes(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, start, row, V, weights, c: gl.constexpr, GROUP: gl.constexpr
):
    """Derivatives of a row's loss by the logits of a chunk that begins at `start`."""
    # p (1 + 2 z L) - (1-ε) [j = t] - ε / V
    s: gl.constexpr = c.schedule
    # In this order an offset that all logits have cancels exactly, as in the loss.
    value = gl.exp2((x - row.top) * LOG2E - row.rest * LOG2E)
    if c.square:
        value *= 1.0 + 2.0 * weights.z * (row.top + row.rest)
    if c.smooth:
        value -= weights.smoothing / V
    # One chunk of a row has the target.
    if (row.target >= start) & (row.target < start + s.chunk):
        less = value - (1.0 - weights.smoothing) if c.smooth else value - 1.0
        value = gl.where(_columns(s, GROUP) == row.target - start, less, value)
    return value * row.factor


@gluon.jit
def _put(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, value, room, s: gl.constexpr, GROUP: gl.constexpr, MASKED: gl.constexpr
):
    """A chunk's gradients, of which `room` are the row's; whole vectors at once, what is left by element."""
    own = _columns(s, GROUP)
    if MASKED:
        whole = room // EACH * EACH
        gl.store(out + own, value, own < whole, eviction_policy=s.hint)
        if whole < room:
            gl.store(out + own, value, (own >= whole) & (own < room))
    else:
        gl.store(out + own, value, eviction_policy=s.hint)


@gluon.jit
def _write(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, nth, row, out, V, weights, c: gl.constexpr, GROUP: gl.constexpr, MASKED: gl.constexpr
):
    """Writes a group's gradients of the row's `nth` chunk x."""
    s: gl.constexpr = c.schedule
    start = nth * s.chunk
    value = _slopes(x.to(gl.float32), start, row, V, weights, c, GROUP)
    _put(out + start, gl.cast(value, x.dtype), V - start, s, GROUP, MASKED)


@gluon.jit
def _written(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, chunks, at, nth, row, out, V, weights, c: gl.constexpr, GROUP: gl.constexpr, MASKED: gl.constexpr
):
    """`_write` of a slot's chunk. What is written has been read, so that the slot can be given up."""
    s: gl.constexpr = c.schedule
    _write(_read(chunks, at, s, GROUP), nth, row, out, V, weights, c, GROUP, MASKED)
    ring.release(at)
    return at.advanced()


@gluon.jit
def _gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, chunks, held, kept, at, row, out, rows, weights, c: gl.constexpr, GROUP: gl.constexpr
):
    """Pass 2: the chunks that slots kept, those that are copied again, and those that registers hold, for which no
    slot waits. The place after them.
    """
    HELD: gl.constexpr = c.held
    whole = rows.V // c.schedule.chunk
    for nth in range(rows.passing, whole):
        kept = _written(ring, chunks, kept, nth, row, out, rows.V, weights, c, GROUP, False)
    if rows.V % c.schedule.chunk != 0:
        kept = _written(ring, chunks, kept, whole, row, out, rows.V, weights, c, GROUP, True)
    for nth in range(HELD, rows.passing):
        ring.wait(at)
        at = _written(ring, chunks, at, nth, row, out, rows.V, weights, c, GROUP, False)
    for nth in gl.static_range(HELD):
        _write(_anew(held[nth]), nth, row, out, rows.V, weights, c, GROUP, False)
    return at


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, shelf, target, share, losses, logits, dlogits, rows, weights, c: gl.constexpr, GROUP: gl.constexpr
):
    """A group's part of both passes over each row; the first one's its loss."""
    s: gl.constexpr = c.schedule
    chunks = _parted(ring.buffers, s)
    part = gl.load(share) if c.gradients else 0.0
    at = cursor(0, s.slots)
    phase = gl.to_tensor(0)
    nth = gl.program_id(0)
    t = gl.load(target + nth)
    while nth < rows.M:
        following = nth + gl.num_programs(0)
        # Before it is needed: the address of the target's logit would wait for it.
        upcoming = gl.load(target + following, following < rows.M, 0)
        there = (t >= 0) & (t < rows.V)
        wide = nth.to(gl.int64)
        hit = gl.load(logits + (wide * (rows.pitch * WIDE) + t), there, 0.0).to(gl.float32)
        known = gl.where(there, hit, LOWEST)
        top, rest, mean, held, kept, at = _statistics(
            ring, chunks, at, rows, shelf, phase, known, c, GROUP
        )  # fmt: skip
        phase = phase ^ 1
        ignored = t == weights.ignore_index
        if GROUP == 0:
            loss = _loss(gl.where(there, hit, float("nan")), top, rest, mean, weights, c)
            gl.store(losses + nth, gl.where(ignored, 0.0, loss))
        if c.gradients:
            row = Row(gl.where(there, t, -1).to(gl.int32), top, rest, gl.where(ignored, 0.0, part))
            out = dlogits + wide * (rows.out_pitch * WIDE)
            at = _gradients(ring, chunks, held, kept, at, row, out, rows, weights, c, GROUP)
        nth = following
        t = upcoming


@gluon.jit(
    do_not_specialize=["M", "V", "pitch", "out_pitch", "count", "copies", "passing", "ignore_index"],
    do_not_specialize_on_alignment=["target", "share", "losses"],
)
def kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    tiles, logits, target, share, losses, dlogits, M, V, pitch, out_pitch, count, copies, passing, ignore_index,
    smoothing, z, c: gl.constexpr,
):  # fmt: skip
    """The ring, then the partitions. `tiles` is a map of the logits by lines. Without gradients `share` and
    `dlogits` are some tensors.
    """
    s: gl.constexpr = c.schedule
    buffers = gl.allocate_shared_memory(tiles.dtype, [s.slots, s.lines, WIDE], _shared(2))
    ring = Ring(buffers, barriers(s.slots, 1), barriers(s.slots, s.groups))
    sums = gl.allocate_shared_memory(gl.float32, [6, s.groups], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shelf = Shelf(sums, barriers(1, s.groups).index(0))
    rows = Rows(M, V, pitch, out_pitch, count, copies, passing)
    weights = Weights(ignore_index, smoothing, z)
    gl.warp_specialize(
        [
            (_producer, (tiles, ring, rows, c)),
            (_consumer, (ring, shelf, target, share, losses, logits, dlogits, rows, weights, c, 0)),
            (_consumer, (ring, shelf, target, share, losses, logits, dlogits, rows, weights, c, 1)),
            (_consumer, (ring, shelf, target, share, losses, logits, dlogits, rows, weights, c, 2)),
            (_consumer, (ring, shelf, target, share, losses, logits, dlogits, rows, weights, c, 3)),
        ][: s.groups + 1],
        [s.warps, s.warps, s.warps, s.warps][: s.groups],
        [s.registers, s.registers, s.registers, s.registers][: s.groups],
    )


@functools.cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3)


@functools.lru_cache(256)
def _lined(M: int, V: int, pitch: int, lines: int) -> Says:
    """What the map of logits (M, V) by lines says: beyond a row's last line are zeros, and nothing is read."""
    return Says(vars(TensorMap(None, [M, cdiv(V, LINE), LINE], [pitch, LINE, 1], [1, lines, LINE], _layout())))


def fits(logits: torch.Tensor, dlogits: torch.Tensor) -> bool:
    """Whether this takes rows of logits and of gradients that lie like these; the device is not looked at."""
    V = logits.shape[1]
    rows = all(x.stride(1) == 1 and x.stride(0) >= V and x.stride(0) % LINE == 0 for x in (logits, dlogits))
    numbers = logits.dtype in (torch.bfloat16, torch.float16) and dlogits.dtype == logits.dtype
    vectors = logits.data_ptr() % 16 == 0 and dlogits.data_ptr() % 16 == 0
    return V >= SHORTEST and numbers and rows and vectors and lined(logits)


def lined(logits: torch.Tensor) -> bool:
    """Whether a row may be read to the end of its last line: it has all of it, or memory has such lines too."""
    return logits.shape[1] % LINE == 0 or logits.data_ptr() % (LINE * logits.element_size()) == 0


def losses_and_gradients(
    logits: torch.Tensor, dlogits: torch.Tensor, options: "Options", schedule: Schedule | None = None
) -> Callable[..., None]:
    """As the function of that name in `_cross_entropy.py`, for what `fits`, and calls whose logits are `lined`."""
    return _planned(logits, dlogits, options, schedule or Schedule(), True)


def losses_alone(
    logits: torch.Tensor, options: "Options", schedule: Schedule | None = None
) -> Callable[[torch.device, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """As the function of that name in `_cross_entropy.py`; see `losses_and_gradients`."""
    launch = _planned(logits, logits, options, schedule or Schedule(), False)
    return lambda device, logits, target, losses: launch(device, logits, target, losses, losses, logits)


def _planned(
    logits: torch.Tensor, dlogits: torch.Tensor, options: "Options", s: Schedule, gradients: bool
) -> Callable[..., None]:
    """A launch of (device, logits, target, share, losses, dlogits)."""
    M, V = logits.shape
    pitch, out_pitch = logits.stride(0), dlogits.stride(0)
    chunks, passing, smooth = cdiv(V, s.chunk), V // s.chunk, options.smoothing != 0
    copies, held = chunks, 0
    if gradients:
        passing = max(chunks - (s.slots - s.ahead), 0)
        # Smoothing needs some registers itself.
        held = min(passing, max(s.held - smooth, 0))
        copies += passing - held
    c = Config(s, smooth, options.z_loss != 0, gradients, held)
    numbers = options.numbers()
    # A number's type follows from its size.
    key = kernel_key(kernel, logits.device, logits.dtype, c, numbers[0].bit_length() > 31)
    says = _lined(M, V, pitch, s.lines)
    programs = min(multiprocessors(logits), M)
    sizes = M, V, pitch // LINE, out_pitch // LINE, chunks, copies, passing

    def run(
        device: torch.device,
        logits: torch.Tensor,
        target: torch.Tensor,
        share: torch.Tensor,
        losses: torch.Tensor,
        dlogits: torch.Tensor,
    ) -> None:
        with on(logits):
            launch(
                kernel, key, programs, placed(logits, says), logits, target, share, losses, dlogits, *sizes,
                *numbers, c,
            )  # fmt: skip

    return run
