"""The online softmax of the forward kernels for Hopper: masks, row sums, packed P, and the step over one block
of keys.

A loop carries each 16-bit number in a register of its own, so P goes round two in a word (`pack`). The sums are
scaled down only where a row max has risen by more than RESCALE_THRESHOLD in base 2, as in FlashAttention-4:
until then P is up to 2^8 large, which neither its rounding nor its sum minds. Each lane adds up the P of its
own columns, as in FlashAttention-3, and lanes meet once a tile. `pin` keeps the row max before the wait for O
+= P·V; otherwise ptxas sinks the softmax below that wait and the overlap with the product is lost.

No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from .._hopper import LOG2E, LOWEST, unpack
from .._pipeline import Cursors, pieces

_LOG2E = gl.constexpr(LOG2E)
RESCALE_THRESHOLD = gl.constexpr(8.0)
"""How far, in base 2, a row max may rise before what is added up is scaled down."""


def scales(D: int, cap: float) -> tuple[float, float]:
    """(what scores are multiplied with for exponents of 2, what products of queries and keys are before tanh): of
    a cap of 0, which is none, these are the products themselves, and the second number is 0.
    """
    root = math.sqrt(D)
    return (LOG2E * cap, 1 / (root * cap)) if cap else (LOG2E / root, 0.0)


@aggregate
class Softmax:
    """A tile's state: O (64, D) not yet divided, P of the last block packed, row sums by lane (64, 4), row max."""

    o: gl.tensor
    p: gl.tensor
    row_sum: gl.tensor
    row_max: gl.tensor

    @gluon.constexpr_function
    def __init__(self, o, p, row_sum, row_max):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.o = o
        self.p = p
        self.row_sum = row_sum
        self.row_max = row_max


@gluon.jit
def tanh(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of fp32 numbers by one instruction of the exponential unit, with a relative error of up to 2^-11."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of fp32 numbers by one instruction of the exponential unit, right to a unit in the last place."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def capped(s, INNER: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """tanh(S·INNER) of products of queries and keys; these themselves where INNER is 0. `dtype` is what P is
    rounded to: in bf16 the bound of `tanh`'s error is that of this rounding for a score of 4; in fp16 it could be
    the largest error of all, so that two instructions compute what one does.
    """
    if INNER > 0:
        if dtype == gl.bfloat16:
            s = tanh(s * INNER)
        else:
            # tanh(x) = 1 - 2 / (1 + e^2x)
            s = 1.0 - 2.0 * reciprocal(1.0 + gl.exp2(s * (2.0 * _LOG2E * INNER)))
    return s


@gluon.jit
def with_sink(row_max, row_sum, sinks, head):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(row max, row sum, what O and the sum before are scaled with, whether a row sees nothing) with a sink: one
    more logit of a head, which has no value and may be above all scores. None is no sinks.
    """
    empty = row_max == LOWEST
    shrunk = 1.0
    if sinks is not None:
        sink = gl.load(sinks + head).to(gl.float32) * _LOG2E
        top = gl.maximum(row_max, sink)
        shrunk = gl.exp2(row_max - top)
        row_max, row_sum = top, row_sum * shrunk + gl.exp2(sink - top)
        empty = row_sum == 0.0
    return row_max, row_sum, shrunk, empty


@gluon.jit
def apply_mask(s, limit, SPAN: gl.constexpr, HIGH: gl.constexpr, LOW: gl.constexpr):  # type: ignore[no-untyped-def]
    """-inf, with HIGH, beyond column `limit` of each row and, with LOW, before the last SPAN columns up to there.
    Column 8i + 2j + k is lane j's register (i, k): compared with what is left of the limit after the lane's own
    columns, i and k are constants, which take no registers.
    """
    ROWS: gl.constexpr = s.shape[0]
    KEYS: gl.constexpr = s.shape[1]
    split = s.reshape([ROWS, KEYS // 8, 4, 2])
    layout: gl.constexpr = split.type.layout
    no_pair: gl.constexpr = gl.SliceLayout(3, layout)
    no_lane: gl.constexpr = gl.SliceLayout(2, layout)
    of_rows: gl.constexpr = gl.SliceLayout(2, no_pair)
    limits = gl.expand_dims(gl.convert_layout(limit, gl.SliceLayout(1, of_rows)), 1)
    limits = gl.expand_dims(gl.expand_dims(limits, 2), 3)
    lanes = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, no_pair))), 0)
    lanes = gl.expand_dims(gl.expand_dims(lanes, 1), 3)
    eights = gl.expand_dims(gl.arange(0, KEYS // 8, gl.SliceLayout(0, of_rows)), 0)
    eights = gl.expand_dims(gl.expand_dims(eights, 2), 3)
    pair = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, no_lane))), 0)
    pair = gl.expand_dims(gl.expand_dims(pair, 1), 2)
    left = limits - 2 * lanes
    if HIGH:
        split = gl.where(left >= 8 * eights + pair, split, float("-inf"))
    if LOW:
        split = gl.where(left - SPAN < 8 * eights + pair, split, float("-inf"))
    return gl.convert_layout(split.reshape([ROWS, KEYS]), s.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _rounding(dtype):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return "cvt.rn." + ("bf16x2" if dtype == gl.bfloat16 else "f16x2") + ".f32 $0, $2, $1;"


@gluon.jit
def pack(p, dtype: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """P as it goes round a loop: (rows, keys / 2) words of two."""
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    a, b = gl.split(p.reshape([ROWS, KEYS // 2, 2]))
    return gl.inline_asm_elementwise(_rounding(dtype), "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _rescaling(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX of `count` products of numbers and factors, which are left out where all factors of a warp are 1. Of a
    thread's numbers the first and the third lie in its two rows, each of which has one factor.
    """
    scaled = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i}; " for i in range(count))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * count}, 0f3F800000;"
        f" setp.neu.f32 q, ${2 * count + 2}, 0f3F800000; or.pred p, p, q;"
        f" vote.sync.any.pred p, p, 0xffffffff; @!p bra done; {scaled} done: }}"
    )


@gluon.constexpr_function
def _rescaling_constraints(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    # Numbers lie where their products will: so none is written before all are read.
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale(o, correction):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """O with its rows times `correction`, passed over by warps whose factors are all 1."""
    PACK: gl.constexpr = o.shape[0] * o.shape[1] // 128  # all that a thread has
    factors = gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, o.type.layout)), 1) + gl.zeros_like(o)
    return gl.inline_asm_elementwise(
        _rescaling(PACK), _rescaling_constraints(PACK), [o, factors], dtype=gl.float32, is_pure=True, pack=PACK
    )


@gluon.jit
def pin(row_max):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """`row_max`, computed before what is waited for after this. A predicated shared-memory store, never taken (its
    condition is a NaN that no instruction makes), acts as a compiler barrier: ptxas moves no such thing behind a
    wait for a product.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 i; mov.b32 i, $1; setp.eq.s32 p, i, 0x7fabcdef; @p st.shared.b32 [i], i;"
        " mov.f32 $0, $1; }",
        "=f,f", [row_max], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def lane_sums(p):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Sums (rows, 4) of what each of the four lanes that share a row has of it."""
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def products(a, b, zero):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A·Bᵀ, not waited for, of tiles that are tuples of as many pieces (rows, columns), whose columns follow each
    other.
    """
    COUNT: gl.constexpr = len(a)
    s = zero
    for i in gl.static_range(COUNT):
        # S += Aᵢ·Bᵢᵀ
        s = warpgroup_mma(a[i], b[i].permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def scores(q, pipes, zero, at):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(S = Q·Kᵀ with a tile's first block of keys, the next places). Q as in `products`."""
    pipes.k.wait(at.k)
    # S = Q·Kᵀ
    s = warpgroup_mma_wait(0, deps=[products(q, pieces(pipes.k.buffers, at.k.stage, len(q)), zero)])
    pipes.k.release(at.k)
    return s, Cursors(at.k.advanced(), at.v, at.pingpong)


@gluon.jit
def first_block(s, zero_o, scale, dtype: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The state after a tile's first block of scores."""
    row_max = gl.maximum(gl.max(s, 1) * scale, LOWEST)
    # P = 2^(S·scale - m)
    p = gl.exp2(s * scale - gl.expand_dims(row_max, 1))
    return Softmax(zero_o, pack(p, dtype), lane_sums(p), row_max)


@gluon.jit
def skip_block(pipes, at, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Releases a block of K and of V unread, as only what is there may be, and passes the turn on."""
    pipes.k.wait(at.k)
    pipes.k.release(at.k)
    pipes.v.wait(at.v)
    pipes.v.release(at.v)
    pingpong = at.pingpong
    if c.pingpong:
        mbarrier.wait(pipes.pingpong.index(GROUP), pingpong)
        pingpong = pingpong ^ 1
        mbarrier.arrive(pipes.pingpong.index((GROUP + 1) % c.groups), count=1)
    return Cursors(at.k.advanced(), at.v.advanced(), pingpong)


@gluon.jit
def step(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, pipes, zero, state, at, limit, scale, c: gl.constexpr,
    GROUP: gl.constexpr, SPAN: gl.constexpr, HIGH: gl.constexpr, LOW: gl.constexpr, INNER: gl.constexpr = 0.0,
):  # fmt: skip
    """One block of keys, with the values of the block before, whose P the state has: (state, next places). Q as
    in `products`. HIGH and LOW: which ends of what rows see may cut it, as in `apply_mask`. The row max lags
    behind by RESCALE_THRESHOLD at most, for P and row sums alike. Scores that are capped are tanh(S·INNER).
    """
    pingpong = at.pingpong
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=state.o.type.layout, k_width=2)
    pipes.k.wait(at.k)
    if c.pingpong:
        mbarrier.wait(pipes.pingpong.index(GROUP), pingpong)
        pingpong = pingpong ^ 1
    # S = Q·Kᵀ
    s = products(q, pieces(pipes.k.buffers, at.k.stage, len(q)), zero)
    pipes.v.wait(at.v)
    before = unpack(state.p, pipes.v.buffers.dtype, operand)
    # O += P·V, of the block before
    o = warpgroup_mma(before, pipes.v.buffers.index(at.v.stage), state.o, is_async=True)
    if c.pingpong:
        mbarrier.arrive(pipes.pingpong.index((GROUP + 1) % c.groups), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    pipes.k.release(at.k)
    s = capped(s, INNER, pipes.k.buffers.dtype)
    if HIGH or LOW:
        s = apply_mask(s, limit, SPAN, HIGH, LOW)
    top = gl.max(s, 1) * scale
    row_max = pin(gl.where(top - state.row_max > RESCALE_THRESHOLD, top, state.row_max))
    # P = 2^(S·scale - m)
    p = gl.exp2(s * scale - gl.expand_dims(row_max, 1))
    correction = gl.exp2(state.row_max - row_max)
    o, before = warpgroup_mma_wait(0, deps=[o, before])
    pipes.v.release(at.v)
    by_lane = gl.convert_layout(correction, gl.SliceLayout(1, state.row_sum.type.layout))
    # l = l·2^(m_old - m) + rowsum(P)
    row_sum = state.row_sum * gl.expand_dims(by_lane, 1) + lane_sums(p)
    packed = pack(p, pipes.v.buffers.dtype)
    # O *= 2^(m_old - m). Last, because it is a branch, before which ptxas finishes what comes before it.
    o = rescale(o, correction)
    return Softmax(o, packed, row_sum, row_max), Cursors(at.k.advanced(), at.v.advanced(), pingpong)


@gluon.jit
def last_values(state, pipes, at):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(O with a tile's last block of values, the next places)."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=state.o.type.layout, k_width=2)
    pipes.v.wait(at.v)
    p = unpack(state.p, pipes.v.buffers.dtype, operand)
    # O += P·V
    o = warpgroup_mma(p, pipes.v.buffers.index(at.v.stage), state.o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    pipes.v.release(at.v)
    return o, Cursors(at.k, at.v.advanced(), at.pingpong)
