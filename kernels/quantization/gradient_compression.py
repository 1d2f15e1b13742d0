"""Gradient compression with error feedback (Seide et al. 2014; Stich et al., arXiv 1809.07599): one pass.

What a step's compression loses is kept and added to the next step's gradient: payload and new residual
together are always gradient + residual. The payload is one buffer of bytes, so that one collective sends it:

* "int8", "fp8" (e4m3): a byte an element, N rounded up to a multiple of 128, the last ones 0; then an fp32
  scale for each 128 elements, with value = byte · scale.
* "topk": of each 1024 elements the `keep` largest in magnitude, exactly; of equal ones the first. First the
  values of all chunks, in the gradient's dtype, then their places in the chunk in 16 bits, both in ascending
  order of place. Where a last chunk has fewer elements than `keep`, places beyond its end stand for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import (
    INTERPRETED,
    cdiv,
    check,
    choice,
    dense_like,
    most_registers,
    needs_e4m3,
    on,
    on_e4m3,
    operator,
    power_of_2,
)

GROUP = 128
"""Elements that share a scale."""

CHUNK = 1024
"""Elements that top-k chooses among; one warp holds them, 32 a thread."""

SCHEMES = ("int8", "fp8", "topk")

LARGEST = {"int8": 127.0, "fp8": 448.0}

GROUPS = 4 if INTERPRETED else 16
"""Groups of a program of four warps: each in 16 threads of one warp, so that maxima need no shared memory."""

REGISTERS = 96
"""Registers a thread of top-k, which would take 158: programs of one warp hide each other's waits, and on an H200
96 measured faster than 128."""

_OCTAVE = {torch.bfloat16: 1 << 7, torch.float16: 1 << 10, torch.float32: 1 << 23}
"""How far the bits of a number and of its double are apart."""


def gradient_compression(
    gradient: torch.Tensor, residual: torch.Tensor, scheme: str = "int8", keep: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, new residual) of gradient + residual; the module says what the payload holds.

    gradient in bf16, fp16 or fp32 of any shape, taken as N elements in order; residual of the same shape in one
    of these dtypes. payload is uint8 of `payload_bytes(N, scheme, keep, dtype)`; the new residual is like the
    old one, contiguous, and is sum - value in fp32, rounded. The sum is fp32, for "topk" rounded to the
    gradient's dtype, which is what is compared and sent. A group of magnitudes below 1e-30 counts as 1e-30
    large. `keep` from 1 to 1024 concerns "topk" alone. Raises TypeError for a wrong type or dtype, ValueError
    for a wrong shape, device, scheme or keep; the message names the argument.
    """
    check("gradient", gradient)
    check("residual", residual, shape=gradient.shape, like=gradient)
    check_scheme(scheme, keep)
    compressed: tuple[torch.Tensor, torch.Tensor] = _compression(gradient, residual, scheme, keep)
    return compressed


def check_scheme(scheme: str, keep: int) -> None:
    """Raises ValueError that names the argument."""
    choice("scheme", scheme, SCHEMES)
    if not 1 <= keep <= CHUNK:
        raise ValueError(f"keep is {keep}, expected 1 to {CHUNK}")


def payload_bytes(size: int, scheme: str, keep: int, dtype: torch.dtype) -> int:
    """Bytes of the payload of so many elements."""
    if scheme == "topk":
        return cdiv(size, CHUNK) * keep * (dtype.itemsize + 2)
    return cdiv(size, GROUP) * (GROUP + 4)


def sections(
    payload: torch.Tensor, size: int, scheme: str, keep: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of a payload in their dtypes: values and scales, or values and places."""
    if scheme == "topk":
        middle = cdiv(size, CHUNK) * keep * dtype.itemsize
        return payload[:middle].view(dtype), payload[middle:].view(torch.int16)
    middle = cdiv(size, GROUP) * GROUP
    kind = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
    return payload[:middle].view(kind), payload[middle:].view(torch.float32)


@triton.jit
def load(pointer, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """What is inside, 0 elsewhere; all of it where nothing is masked."""
    if MASKED:
        return tl.load(pointer, inside, 0.0)
    else:
        return tl.load(pointer)


@triton.jit
def store(pointer, value, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """As `load`."""
    if MASKED:
        tl.store(pointer, value, inside)
    else:
        tl.store(pointer, value)


@triton.jit
def quantized(  # type: ignore[no-untyped-def]  # Triton's types are its own
    gradient,
    residual,
    values,
    scales,
    rest,
    at,
    group,
    N,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Some groups of N elements, at offsets `at` (groups, GROUP) and `group`."""
    total = load(gradient + at, at < N, MASKED).to(tl.float32) + load(residual + at, at < N, MASKED).to(tl.float32)
    there = group * GROUP < N
    largest = tl.maximum(tl.max(tl.abs(total), 1), 1e-30)
    scale = largest / LARGEST
    store(scales + group, scale, there, MASKED)
    scaled = total * (LARGEST / largest)[:, None]
    if INTEGER:
        # To the nearest, to even: the sum has no digits for a fraction.
        scaled = (scaled + 12582912.0) - 12582912.0
        sent = scaled.to(tl.int8)
    else:
        scaled = on_e4m3(scaled)
        sent = scaled.to(values.dtype.element_ty)
    # Whole groups of the payload: what is beyond the end is 0 as well.
    store(values + at, sent, there[:, None], MASKED)
    store(rest + at, (total - scaled * scale[:, None]).to(rest.dtype.element_ty), at < N, MASKED)


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]  # Triton's types are its own
    gradient,
    residual,
    values,
    scales,
    rest,
    N,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """GROUPS groups a program."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = first + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Only the last program masks: a mask at an odd size would split every 16-byte access.
    if (first + GROUPS) * GROUP <= N:
        quantized(gradient, residual, values, scales, rest, at, group, N, LARGEST, INTEGER, GROUP, False)
    else:
        quantized(gradient, residual, values, scales, rest, at, group, N, LARGEST, INTEGER, GROUP, True)


@triton.jit
def _sum(gradient, residual, values, at, left, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """gradient + residual in the gradient's dtype, and an integer in the order of magnitudes; -1 past the end."""
    total = load(gradient + at, at < left, MASKED).to(tl.float32)
    total += load(residual + at, at < left, MASKED).to(tl.float32)
    total = total.to(values.dtype.element_ty)
    bits = tl.abs(total).to(tl.int16 if total.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)
    bits = bits.to(tl.int32)
    if MASKED:
        bits = tl.where(at < left, bits, -1)
    return total, bits


@triton.jit
def _bisect(bits, low, high, middle, KEEP):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The largest number that at least KEEP of `bits` reach, where they reach `low` and do not reach `high`."""
    while high - low > 1:
        enough = tl.sum((bits >= middle).to(tl.int32), 0) >= KEEP
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = low + (high - low) // 2
    return low


@triton.jit
def _threshold(bits, KEEP, OCTAVE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The KEEP-th largest of `bits`.

    Of the maxima of eight neighbours, which one thread holds, the KEEP-th largest is a bound from below, and
    most often the answer: it takes a look at all to see it. It is searched for in the two octaves below the
    largest first, where it nearly always is.
    """
    most = tl.max(tl.reshape(bits, [CHUNK // 8, 8]), 1)
    high = tl.max(most, 0) + 1
    low = _bisect(most, tl.full([], -1, tl.int32), high, tl.maximum(high - 2 * OCTAVE, 0), KEEP)
    return _bisect(bits, low, high, low + 1, KEEP)


@triton.jit
def _last_equal(equal, spare, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The place of the `spare`-th that is equal to the threshold, if there are more; else the last place."""
    at = tl.arange(0, CHUNK)
    last = tl.full([], CHUNK - 1, tl.int32)
    before = tl.where(tl.sum(equal.to(tl.int32), 0) > spare, -1, last - 1)
    while last - before > 1:
        middle = (before + last) // 2
        enough = tl.sum((equal & (at <= middle)).to(tl.int32), 0) >= spare
        last = tl.where(enough, middle, last)
        before = tl.where(enough, before, middle)
    return last


@triton.jit
def _places(chosen, KEEP, CHUNK: tl.constexpr, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Where KEEP are chosen, in ascending order; SLOTS is KEEP or more.

    One after the other, from eight bits for eight neighbours. A prefix sum and a scattered store take longer:
    Triton hands the addresses round through shared memory, all 1024 of them.
    """
    bit = (1 << tl.arange(0, 8))[None, :]
    mask = tl.sum(tl.where(tl.reshape(chosen, [CHUNK // 8, 8]), bit, 0), 1)
    first = tl.arange(0, CHUNK // 8) * 8
    slot = tl.arange(0, SLOTS)
    found = tl.full([SLOTS], CHUNK - 1, tl.int32)
    for turn in range(KEEP):
        lowest = mask & -mask
        place = first + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        place = tl.where(mask != 0, place, CHUNK - 1)
        nearest = tl.min(place, 0)
        mask = tl.where(place == nearest, mask ^ lowest, mask)
        found = tl.where(slot == turn, nearest, found)
    return found


@triton.jit
def _choose_of(  # type: ignore[no-untyped-def]  # Triton's types are its own
    gradient,
    residual,
    values,
    places,
    rest,
    left,
    KEEP,
    OCTAVE: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The KEEP largest of one chunk of `left` elements."""
    at = tl.arange(0, CHUNK)
    _, bits = _sum(gradient, residual, values, at, left, MASKED)
    low = _threshold(bits, KEEP, OCTAVE, CHUNK)
    spare = KEEP - tl.sum((bits > low).to(tl.int32), 0)
    last = _last_equal(bits == low, spare, CHUNK)
    chosen = (bits > low) | ((bits == low) & (at <= last))
    # The sums are read again, from the cache: to hold them as well takes registers for more programs.
    total, _ = _sum(gradient, residual, values, at, left, MASKED)
    lost = tl.where(chosen, 0.0, total.to(tl.float32))
    store(rest + at, lost.to(rest.dtype.element_ty), at < left, MASKED)
    found = _places(chosen, KEEP, CHUNK, SLOTS)
    slot = tl.arange(0, SLOTS)
    sent, _ = _sum(gradient, residual, values, found, left, True)
    tl.store(values + slot, sent, slot < KEEP)
    tl.store(places + slot, found.to(tl.int16), slot < KEEP)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]  # Triton's types are its own
    gradient,
    residual,
    values,
    places,
    rest,
    N,
    KEEP,
    OCTAVE: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One chunk a program. Only the last one masks, see `_quantize`."""
    chunk = tl.program_id(0).to(tl.int64)
    gradient += chunk * CHUNK
    residual += chunk * CHUNK
    rest += chunk * CHUNK
    values += chunk * KEEP
    places += chunk * KEEP
    left = N - chunk * CHUNK
    if left >= CHUNK:
        _choose_of(gradient, residual, values, places, rest, CHUNK, KEEP, OCTAVE, CHUNK, SLOTS, False)
    else:
        _choose_of(gradient, residual, values, places, rest, left.to(tl.int32), KEEP, OCTAVE, CHUNK, SLOTS, True)


def _empty(
    gradient: torch.Tensor, residual: torch.Tensor, scheme: str, keep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for payload and residual."""
    size = payload_bytes(gradient.numel(), scheme, keep, gradient.dtype)
    return torch.empty(size, dtype=torch.uint8, device=gradient.device), dense_like(residual)


def _launch(
    gradient: torch.Tensor, residual: torch.Tensor, scheme: str, keep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    payload, rest = _empty(gradient, residual, scheme, keep)
    if gradient.numel():
        run(gradient.contiguous(), residual.contiguous(), payload, rest, scheme, keep)
    return payload, rest


def run(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    payload: torch.Tensor,
    rest: torch.Tensor,
    scheme: str,
    keep: int,
    groups: int = GROUPS,
    warps: int = 0,
    registers: int = REGISTERS,
) -> None:
    """The launch for contiguous tensors; `groups` a program of `warps` warps, 0 for the usual number."""
    if scheme == "fp8":
        needs_e4m3("gradient_compression to E4M3", gradient)
    N = gradient.numel()
    values, second = sections(payload, N, scheme, keep, gradient.dtype)
    with on(gradient):
        if scheme == "topk":
            _choose[(cdiv(N, CHUNK),)](
                gradient,
                residual,
                values,
                second,
                rest,
                N,
                keep,
                OCTAVE=_OCTAVE[gradient.dtype],
                CHUNK=CHUNK,
                SLOTS=power_of_2(keep),
                num_warps=warps or 1,
                **most_registers(gradient, registers),
            )
        else:
            _quantize[(cdiv(N, GROUP * groups),)](
                gradient,
                residual,
                values,
                second,
                rest,
                N,
                LARGEST=LARGEST[scheme],
                INTEGER=scheme == "int8",
                GROUPS=groups,
                GROUP=GROUP,
                num_warps=warps or 4,
            )


_compression = operator(
    "gradient_compression(Tensor gradient, Tensor residual, str scheme, int keep) -> (Tensor, Tensor)",
    _launch,
    _empty,
)
