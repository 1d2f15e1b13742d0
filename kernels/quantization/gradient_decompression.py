"""The way back from `gradient_compression`: its payload to a dense gradient, one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, cdiv, check, needs_e4m3, on, operator
from .gradient_compression import CHUNK, GROUP, check_scheme, load, payload_bytes, sections, store

GROUPS = 4 if INTERPRETED else 32
"""Groups of a program of four warps."""

CHUNKS = 4
"""Chunks of a program."""


def gradient_decompression(
    payload: torch.Tensor, size: int, dtype: torch.dtype, scheme: str = "int8", keep: int = 8
) -> torch.Tensor:
    """The gradient that a payload of `gradient_compression` stands for: (size,) in `dtype`.

    payload (bytes,) in uint8, contiguous, 4-byte aligned; size, dtype, scheme and keep as they were given to the
    compression. "topk" gives 0 where nothing was sent. Raises TypeError for a wrong type or dtype, ValueError
    for a wrong length, device, alignment, scheme or keep; the message names the argument.
    """
    check("payload", payload, dtypes=(torch.uint8,), dim=1)
    check_scheme(scheme, keep)
    if dtype not in FLOATING:
        raise TypeError(f"dtype is {dtype}, expected {' or '.join(str(x) for x in FLOATING)}")
    if size < 0:
        raise ValueError(f"size is {size}, expected 0 or more")
    if payload.shape[0] != (expected := payload_bytes(size, scheme, keep, dtype)):
        raise ValueError(f"payload has {payload.shape[0]} bytes, {scheme} of {size} elements has {expected}")
    dense: torch.Tensor = _decompression(payload, size, dtype, scheme, keep)
    return dense


@triton.jit
def dequantized(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values, scales, dense, at, group, N, GROUP: tl.constexpr, MASKED: tl.constexpr
):
    """The way back from `quantized`."""
    there = group * GROUP < N
    # The payload has whole groups.
    value = load(values + at, there[:, None], MASKED).to(tl.float32)
    value *= load(scales + group, there, MASKED)[:, None]
    store(dense + at, value.to(dense.dtype.element_ty), at < N, MASKED)


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values, scales, dense, N, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """GROUPS groups a program."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = first + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if (first + GROUPS) * GROUP <= N:
        dequantized(values, scales, dense, at, group, N, GROUP, False)
    else:
        dequantized(values, scales, dense, at, group, N, GROUP, True)


@triton.jit
def _scatter(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values, places, dense, N, KEEP, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr
):
    """CHUNKS chunks a program: zeros, and then what was sent. SLOTS is KEEP or more, a power of two."""
    first = tl.program_id(0).to(tl.int64) * CHUNKS
    slot = tl.arange(0, SLOTS)
    chunk = first + tl.arange(0, CHUNKS)
    sent = (chunk * CHUNK < N)[:, None] & (slot < KEEP)[None, :]
    source = chunk[:, None] * KEEP + slot[None, :]
    value = tl.load(values + source, sent)
    to = chunk[:, None] * CHUNK + tl.load(places + source, sent, 0).to(tl.int32)
    at = first * CHUNK + tl.arange(0, CHUNK * CHUNKS)
    tl.store(dense + at, tl.zeros([CHUNK * CHUNKS], tl.float32).to(dense.dtype.element_ty), at < N)
    # The zeros are other threads'.
    tl.debug_barrier()
    tl.store(dense + to, value, sent & (to < N))


def _empty(payload: torch.Tensor, size: int, dtype: torch.dtype, scheme: str, keep: int) -> torch.Tensor:
    """Memory for the gradient."""
    return torch.empty(size, dtype=dtype, device=payload.device)


def _launch(payload: torch.Tensor, size: int, dtype: torch.dtype, scheme: str, keep: int) -> torch.Tensor:
    dense = _empty(payload, size, dtype, scheme, keep)
    if size:
        payload = payload.contiguous()
        if payload.data_ptr() % 4:
            raise ValueError("payload is not 4-byte aligned")
        run(payload, dense, scheme, keep)
    return dense


def run(
    payload: torch.Tensor,
    dense: torch.Tensor,
    scheme: str,
    keep: int,
    groups: int = GROUPS,
    chunks: int = CHUNKS,
    warps: int = 4,
) -> None:
    """The launch; `groups` or `chunks` a program."""
    if scheme == "fp8":
        needs_e4m3("gradient_decompression of E4M3", dense)
    N = dense.numel()
    values, second = sections(payload, N, scheme, keep, dense.dtype)
    with on(payload):
        if scheme == "topk":
            slots = triton.next_power_of_2(keep)
            _scatter[(cdiv(N, CHUNK * chunks),)](
                values, second, dense, N, keep, CHUNK=CHUNK, CHUNKS=chunks, SLOTS=slots, num_warps=warps
            )
        else:
            _dequantize[(cdiv(N, GROUP * groups),)](
                values, second, dense, N, GROUPS=groups, GROUP=GROUP, num_warps=warps
            )


_decompression = operator(
    "gradient_decompression(Tensor payload, int size, ScalarType dtype, str scheme, int keep) -> Tensor",
    _launch,
    _empty,
)
