"""Attention of 8-bit floats (E4M3), forward only, after FlashAttention-3's (Shah et al., arXiv 2407.08608, §3.3).

Both products run on the matrix units in E4M3. What that takes beyond `attention.py`:

* The weights of a block of keys are rounded to E4M3 before they are multiplied with V. They are at most 1 after
  the row's maximum is taken off; times 2⁸ they use the format's range up to 256, and what is lost to its smallest
  number begins at 2⁻¹⁸ of the row's largest weight instead of 2⁻¹⁰. Their sum is taken before rounding, in fp32.
* The second product sums over keys, and 8-bit matrix instructions want the numbers of one sum side by side. So the
  kernel reads V as (B, Hkv, D, S). A `v` that lies so in memory is taken as it is; any other is copied, which
  moves 2·B·Hkv·S·D bytes. `quantize_heads` can write it so at no cost.
* Hopper's matrix units keep about 14 bits of an fp32 sum of 8-bit products. There one chain of instructions sums
  over the D features of a score, or over the keys of one block (at most 128) of the output, and the default of
  `max_num_imprecise_acc` splits no chain. Blocks are added up in fp32, by the multiply-add that takes the place of
  the multiplication with the change of the maximum: summed there too, 16384 keys would be cut 512 times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import FLOATING, capability, cdiv, check, choice, needs_e4m3, on, operator, power_of_2
from .._online_softmax import weighted
from ._tile_functions import LOG2E, load_tile, program_place, store_contiguous
from ._tiling import Tiles, heads_in_l2, row_contiguous

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""E4M3's largest number."""
SMALLEST = 1e-30
"""A head whose numbers are smaller counts as so large, so that its scale is one."""
OFFSET = tl.constexpr(8.0)
"""Weights are multiplied by 2 to this."""
LEAST_SCALE = tl.constexpr(1e-37)
"""The least that scores are multiplied by: a product of scales that is 0 would make NaN of what is masked."""


@dataclass(frozen=True)
class Config:
    """The attention kernel at compile time: head dimension, rows of a block of queries and of keys, columns of a
    tile, the mask, and whether the tensor memory accelerator loads.
    """

    D: int
    queries: int
    keys: int
    width: int
    causal: bool
    tma: bool


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v of q (B, H, S, D), k and v (B, Hkv, S, D), each times its scale, as (B, H, S, D).

    q, k and v in float8_e4m3fn, on one device; D from 1 to 256; Hkv divides H, and query head h reads key head
    h // (H / Hkv). The scales are fp32 and positive, one a head: q_scale (B, H), k_scale and v_scale (B, Hkv).
    `mask` "causal" hides the keys after a query. The result is contiguous, in `out_dtype`: bf16, fp16 or fp32.

    A `v` whose sequence dimension is the contiguous one is read as it is; any other layout costs a copy of it
    (module docstring). From bf16, `quantize_heads` makes the inputs.

    Weights are rounded to E4M3 (three binary digits): against exact attention of the same 8-bit inputs that is a
    relative error of two to three percent, whatever S is. Forward only. Needs matrix units for E4M3: compute
    capability 8.9 or later.

    Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape, device or mask, and
    `NotImplementedError` where a gradient would be needed.
    """
    choice("mask", mask, ("causal", "full"))
    if out_dtype not in FLOATING:
        raise TypeError(f"out_dtype is {out_dtype}, expected {' or '.join(str(x) for x in FLOATING)}")
    check("q", q, dim=4, dtypes=(E4M3,))
    B, H, S, D = q.shape
    if not 1 <= D <= 256:
        raise ValueError(f"q has head dimension {D}, expected 1 to 256")
    check("k", k, dim=4, dtypes=(E4M3,), like=q)
    heads = k.shape[1]
    if H and (heads == 0 or H % heads):
        raise ValueError(f"k has {heads} heads, which do not divide the {H} of q")
    check("k", k, shape=(B, heads, S, D), dtypes=(E4M3,))
    check("v", v, shape=(B, heads, S, D), dtypes=(E4M3,), like=q)
    check("q_scale", q_scale, shape=(B, H), dtypes=(torch.float32,), like=q)
    check("k_scale", k_scale, shape=(B, heads), dtypes=(torch.float32,), like=q)
    check("v_scale", v_scale, shape=(B, heads), dtypes=(torch.float32,), like=q)
    if torch.is_grad_enabled():
        given = {"q": q, "k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        for name, x in given.items():
            if x.requires_grad:
                raise NotImplementedError(f"{name} requires a gradient: attention_fp8 has no backward pass")
    output: torch.Tensor = _attention_fp8(q, k, v, q_scale, k_scale, v_scale, mask == "causal", out_dtype)
    return output


def quantize_heads(
    x: torch.Tensor, layout: Literal["rowmajor", "colmajor"] = "rowmajor", groups: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x8, scale) of x (B, H, S, D) in bf16, fp16 or fp32: x8 · scale ≈ x, the largest number of a head at 448.

    x8 is float8_e4m3fn (B, H, S, D), rounded to nearest even: contiguous with layout "rowmajor"; with "colmajor",
    which `attention_fp8` wants of v, the sequence is the contiguous dimension, padded in memory to a multiple of
    16. scale is fp32 (B, H); `groups` consecutive heads share one, as FlashAttention-3 demands of the query heads
    of a key head. NaN stays NaN; a head with an infinity becomes NaN and zeros.

    One launch reads x for the scales, a second reads it again and writes: 5 bytes an element in bf16.

    Raises `TypeError` for a wrong dtype and `ValueError` for a wrong shape, device, layout or `groups`.
    """
    choice("layout", layout, ("rowmajor", "colmajor"))
    check("x", x, dim=4)
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"groups is {groups}, which does not divide the {x.shape[1]} heads of x")
    quantized: tuple[torch.Tensor, torch.Tensor] = _quantize_heads(x, layout == "colmajor", groups)
    return quantized


# ---------------------------------------------------------------------------------------------------------
# Scales and layouts.


@triton.jit(do_not_specialize=["H", "blocks", "groups"])
def _largest(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, bits, strides, H, S, blocks, groups,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each group of heads, as the bits of an fp32 number: those are ordered as it is."""
    program = tl.program_id(0)
    place, row = program // blocks, program % blocks * ROWS
    tile = load_tile(x, place // H, place % H, row, strides, S, D, ROWS, WIDTH, False, True)
    largest = tl.max(tl.max(tl.abs(tile.to(tl.float32)), 1), 0)
    tl.atomic_max(bits + place // groups, largest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["H", "blocks", "groups"])
def _lay(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, y, largest, scale, strides, y_strides, H, S, blocks, groups,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    QUANTIZE: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Some rows of a head: quantized with QUANTIZE, the sequence side by side with COLUMNS. `y_strides` are those
    of batch, head and the dimension of y that is not side by side.
    """
    program = tl.program_id(0)
    place, row = program // blocks, program % blocks * ROWS
    batch, head = place // H, place % H
    tile = load_tile(x, batch, head, row, strides, S, D, ROWS, WIDTH, False, True)
    if QUANTIZE:
        most = tl.maximum(tl.load(largest + place // groups), SMALLEST)
        if row == 0 and head % groups == 0:
            tl.store(scale + place // groups, most / LARGEST)
        tile = (tile.to(tl.float32) * (LARGEST / most)).to(y.dtype.element_ty)
    start = y + batch.to(tl.int64) * y_strides[0] + head.to(tl.int64) * y_strides[1]
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    if COLUMNS:
        pointers = start + row + (columns.to(tl.int64) * y_strides[2])[:, None] + rows[None, :]
        tl.store(pointers, tl.trans(tile), mask=(columns < D)[:, None] & (row + rows < S)[None, :])
    else:
        pointers = start + ((row + rows).to(tl.int64) * y_strides[2])[:, None] + columns[None, :]
        tl.store(pointers, tile, mask=(row + rows < S)[:, None] & (columns < D)[None, :])


def _columns(B: int, H: int, S: int, D: int, x: torch.Tensor) -> torch.Tensor:
    """Memory (B, H, S, D) in bytes whose sequences are contiguous and padded to 16, as descriptors want them."""
    memory = torch.empty(B, H, D, cdiv(S, 16) * 16, dtype=torch.uint8, device=x.device)
    return memory[..., :S].mT


ROWS = 128
"""Rows that a program of `_largest` and `_lay` reads."""


def _launch_quantize(x: torch.Tensor, colmajor: bool, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, S, D = x.shape
    y, scale = _quantized(x, colmajor, groups)
    if x.numel() == 0:
        return y, scale.fill_(SMALLEST / LARGEST)
    x = row_contiguous(x)
    bits = torch.zeros(B, H // groups, dtype=torch.int32, device=x.device)
    blocks = cdiv(S, ROWS)
    with on(x):
        _largest[(blocks * B * H,)](x, bits, x.stride()[:3], H, S, blocks, groups, D, ROWS, _width(D), num_warps=4)
        _lay[(blocks * B * H,)](
            x, y, bits.view(torch.float32), scale, x.stride()[:3],
            (*y.stride()[:2], y.stride(3 if colmajor else 2)), H, S, blocks, groups,
            D, ROWS, _width(D), True, colmajor, LARGEST, SMALLEST, num_warps=4,
        )  # fmt: skip
    return y, scale.repeat_interleave(groups, 1) if groups > 1 else scale


def _quantized(x: torch.Tensor, colmajor: bool, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, S, D = x.shape
    scale = torch.empty(B, H // groups, dtype=torch.float32, device=x.device)
    if colmajor:
        return _columns(B, H, S, D, x).view(E4M3), scale
    return torch.empty(x.shape, dtype=E4M3, device=x.device), scale


def transposed(v: torch.Tensor) -> torch.Tensor:
    """v (B, Hkv, S, D) as (B, Hkv, D, S) with a contiguous last dimension; a copy unless v lies so."""
    B, H, S, D = v.shape
    if v.stride(2) == 1 or S == 1:
        return v.mT
    y = _columns(B, H, S, D, v)
    x = row_contiguous(v).view(torch.uint8)
    blocks = cdiv(S, ROWS)
    with on(v):
        # No scales are read or written.
        _lay[(blocks * B * H,)](
            x, y, x, y, x.stride()[:3], (*y.stride()[:2], y.stride(3)), H, S, blocks, 1,
            D, ROWS, _width(D), False, True, LARGEST, SMALLEST, num_warps=4,
        )  # fmt: skip
    return y.view(E4M3).mT


# ---------------------------------------------------------------------------------------------------------
# Attention.


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # Triton's types are its own
    state, q, k, v, batch, head, first, low, high, k_strides, v_strides, S, scale, c: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys `low` to `high` to the state of an online softmax: (sums, row max, row sum). `scale` includes the
    scales and log₂e.
    """
    KEYS: tl.constexpr = c.keys
    WIDTH: tl.constexpr = c.width
    total, row_max, row_sum = state
    rows = first + tl.arange(0, c.queries)
    for start in tl.range(low, high, c.keys):
        keys = load_tile(k, batch, head, start, k_strides, S, c.D, c.keys, c.width, c.tma, MASKED)
        # S = Q·Kᵀ
        scores = tl.dot(q, tl.trans(keys))
        if MASKED:
            columns = start + tl.arange(0, c.keys)
            if c.causal:
                # Keys beyond S are hidden too: they come after every row that is stored.
                scores = tl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
            else:
                scores = tl.where((columns < S)[None, :], scores, float("-inf"))
        # Every row sees key 0, in the first block: the maximum is never -inf.
        weights, correction, row_max, row_sum = weighted(scores, row_max, row_sum, scale, OFFSET)
        if c.tma:
            values = v.load([batch, head, 0, start]).reshape([WIDTH, KEYS])
        else:
            features, columns = tl.arange(0, c.width), start + tl.arange(0, c.keys)
            at = v + batch.to(tl.int64) * v_strides[0] + head.to(tl.int64) * v_strides[1]
            at += (features.to(tl.int64) * v_strides[2])[:, None] + columns[None, :]
            # What a weight of 0 is multiplied with must be no NaN.
            values = tl.load(at, mask=(features < c.D)[:, None] & (columns < S)[None, :], other=0.0)
        # O = O·2^(m_old - m) + P·V, of which Vᵀ lies in memory
        fresh = tl.dot(weights.to(values.dtype), tl.trans(values))
        total = total * correction[:, None] + fresh
    return total, row_max, row_sum


@triton.jit(do_not_specialize=["B", "H", "shared"])
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, q_scale, k_scale, v_scale, out, q_strides, k_strides, v_strides, B, H, S, groups, shared, scale,
    c: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head; v is (B, Hkv, D, S)."""
    BLOCK: tl.constexpr = c.queries
    WIDTH: tl.constexpr = c.width
    block, place = program_place(tl.cdiv(S, c.queries), B * H, shared, c.causal)
    batch, head = place // H, place % H
    key_place = place // groups
    first = block * c.queries
    scale *= tl.load(q_scale + place) * tl.load(k_scale + key_place)
    scale = tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)  # and NaN stays one
    queries = load_tile(q, batch, head, first, q_strides, S, c.D, c.queries, c.width, c.tma, True)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    state = (total, row_max, row_sum)
    if c.causal:
        middle = first // c.keys * c.keys
        high = tl.minimum(first + c.queries, S)
    else:
        middle = S // c.keys * c.keys
        high = S
    state = _attend(
        state, queries, k, v, batch, head // groups, first, 0, middle, k_strides, v_strides, S, scale, c, False
    )  # fmt: skip
    state = _attend(
        state, queries, k, v, batch, head // groups, first, middle, high, k_strides, v_strides, S, scale, c, True
    )  # fmt: skip
    total, row_max, row_sum = state
    total = total * (tl.load(v_scale + key_place) / row_sum)[:, None]
    store_contiguous(out, total, batch, head, first, H, S, c.D, c.queries, c.width)


def tiles(q: torch.Tensor, tma: bool) -> Tiles:
    """The tiles of the portable kernel. Beside the running sum a block's own product is held in registers, and
    without descriptors the pointers are.
    """
    S, D = q.shape[2:]
    if not tma:
        return Tiles(64, 32, 8, 2) if D > 128 else Tiles(64, 64, 8 if D > 64 else 4, 2)
    if S <= 512:
        # Few blocks: smaller ones use more of the device.
        return Tiles(64, 64, 8 if D > 128 else 4, 2)
    # On an H200 faster than 128 rows by 8 warps.
    return Tiles(64, 64, 8, 2) if D > 128 else Tiles(64, 128, 4, 3)


def _width(D: int) -> int:
    """Columns of a tile: a power of two of at least what an 8-bit matrix instruction sums over."""
    return max(32, power_of_2(D))


def _tma(*tensors: torch.Tensor) -> bool:
    """Whether descriptors can load all of these."""
    if capability(tensors[0].device)[0] < 9:
        return False
    return all(
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(
            0 < stride < 1 << 40 and stride % 16 == 0
            for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
            if size > 1
        )
        for x in tensors
    )


def _tile(x: torch.Tensor, rows: int, columns: int, tma: bool) -> Any:
    """What the kernel loads tiles of the last two dimensions from: a descriptor, or the tensor itself."""
    if not tma:
        return x
    # The stride of a dimension of one is arbitrary; a descriptor wants a valid one all the same.
    strides = [stride if size > 1 else x.shape[-1] * 16 for stride, size in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], [1, 1, rows, columns])


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    causal: bool,
    dtype: torch.dtype,
    t: Tiles | None = None,
) -> torch.Tensor:
    B, H, S, D = q.shape
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if out.numel() == 0:
        return out
    needs_e4m3("attention_fp8", q)
    q, k, v = row_contiguous(q), row_contiguous(k), transposed(v)
    scales = q_scale.contiguous(), k_scale.contiguous(), v_scale.contiguous()
    groups = H // k.shape[1]
    tma = _tma(q, k, v)
    t = t or tiles(q, tma)
    width = _width(D)
    c = Config(D, t.resident, t.streamed, width, causal, tma)
    with on(q):
        _forward[(cdiv(S, t.resident) * B * H,)](
            _tile(q, t.resident, width, tma), _tile(k, t.streamed, width, tma), _tile(v, width, t.streamed, tma),
            *scales, out, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            B, H, S, groups, heads_in_l2(k, groups), LOG2E / math.sqrt(D), c,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out


_attention_fp8 = operator(
    "attention_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, bool causal,"
    " ScalarType dtype) -> Tensor",
    _launch,
    lambda q, k, v, q_scale, k_scale, v_scale, causal, dtype: torch.empty(q.shape, dtype=dtype, device=q.device),
)


def _fake_quantize(x: torch.Tensor, colmajor: bool, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    y, _ = _quantized(x, colmajor, groups)
    return y, torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)


_quantize_heads = operator(
    "quantize_heads(Tensor x, bool colmajor, int groups) -> (Tensor, Tensor)", _launch_quantize, _fake_quantize
)
