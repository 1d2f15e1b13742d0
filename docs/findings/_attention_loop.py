"""The inner loop of attention for Hopper, small: one warp group, scores of the next block under the values of
this one.

Compiled only; the findings differ in its constants.
"""

# mypy: ignore-errors  # Triton's language has types of its own
# ruff: noqa: SIM108  # what a branch of constants leaves out is not compiled; both sides of an expression are

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait


@gluon.constexpr_function
def _rounding():
    return "cvt.rn.bf16x2.f32 $0, $2, $1;"


@gluon.jit
def pack(p, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Probabilities in bf16, two in a 32-bit word."""
    a, b = gl.split(p.reshape([ROWS, KEYS // 2, 2]))
    return gl.inline_asm_elementwise(_rounding(), "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(packed, ROWS: gl.constexpr, KEYS: gl.constexpr, OPERAND: gl.constexpr):
    """The same as the operand of a product: the registers are the same."""
    twos = gl.zeros([ROWS, KEYS], gl.int16, OPERAND).reshape([ROWS, KEYS // 2, 2])
    HALVES: gl.constexpr = twos.type.layout
    one = gl.expand_dims(gl.convert_layout(packed, gl.SliceLayout(2, HALVES), assert_trivial=True), 2)
    two = one + gl.zeros([ROWS, KEYS // 2, 2], gl.int32, HALVES)
    half = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [two], dtype=gl.int16, is_pure=True, pack=2)
    return gl.convert_layout(
        half.to(gl.bfloat16, bitcast=True).reshape([ROWS, KEYS]), OPERAND, assert_trivial=True
    )


@gluon.jit
def pin(x):
    """x; a store that never happens keeps what x depends on before the next wait."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 i; mov.b32 i, $1; setp.eq.s32 p, i, 0x7fabcdef; @p st.shared.b32 [i], i;"
        " mov.f32 $0, $1; }",
        "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def attention_loop(
    out, n, scale, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    PACK: gl.constexpr, PIN: gl.constexpr, DRAIN: gl.constexpr,
):  # fmt: skip
    """PACK: probabilities go round the loop in words. PIN: the row maximum is pinned before the wait for P·V.
    DRAIN: no product is in flight at the end of the loop's body; else P·V is.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], gl.bfloat16)
    OF_S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    OF_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OF_O, k_width=2)
    q = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], SHARED)
    ks = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, D], SHARED)
    vs = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, D], SHARED)
    zero = gl.zeros([ROWS, KEYS], gl.float32, OF_S)
    acc = gl.zeros([ROWS, D], gl.float32, OF_O)
    s = warpgroup_mma(q, ks.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    top = gl.max(s, 1) * scale
    p = gl.exp2(s * scale - gl.expand_dims(top, 1))
    total = gl.sum(p, 1)
    if PACK:
        carried = pack(p, ROWS, KEYS)
    else:
        carried = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
    if not DRAIN:
        acc = warpgroup_mma_init(acc)
    for j in range(1, n):
        s = warpgroup_mma(q, ks.index(j % 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        if not DRAIN:
            acc = warpgroup_mma_wait(1, deps=[acc])
        if PACK:
            weights = unpack(carried, ROWS, KEYS, OPERAND)
        else:
            weights = carried
        acc = warpgroup_mma(weights, vs.index((j + 1) % 2), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        higher = gl.maximum(top, gl.max(s, 1) * scale)
        if PIN:
            higher = pin(higher)
        p = gl.exp2(s * scale - gl.expand_dims(higher, 1))
        total = total * gl.exp2(top - higher) + gl.sum(p, 1)
        if DRAIN:
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        top = higher
        if PACK:
            carried = pack(p, ROWS, KEYS)
        else:
            carried = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
    if not DRAIN:
        acc = warpgroup_mma_wait(0, deps=[acc])
    acc = acc / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OF_O)), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, OF_O)), 1)
    column = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, OF_O)), 0)
    gl.store(out + row * D + column, acc)


SIGNATURE = {"out": "*fp32", "n": "i32", "scale": "fp32"}
SIZES = {"ROWS": 64, "KEYS": 128, "D": 128}
