"""How the portable kernels of attention cut a call into tiles, and what these are loaded from: on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import capability, power_of_2, roomy

L2_SHARE = 24 << 20
"""Bytes of K and V that the programs of one time should share: less than half of an H100's or H200's L2."""


@dataclass(frozen=True)
class Tiles:
    """Rows of the resident tile, rows of the streamed tile, and how a kernel is compiled."""

    resident: int
    streamed: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: head dimension, rows of a block of queries and of keys, columns of a tile, the
    mask, a window of 0 being none, whether the tensor memory accelerator loads, whether the last block of queries
    is not whole, a cap of scores, 0 being none, and dimension and columns of values.
    """

    D: int
    queries: int
    keys: int
    width: int
    causal: bool
    window: int
    tma: bool
    ragged: bool
    cap: float
    Dv: int
    width_v: int


def configured(
    q: torch.Tensor, v: torch.Tensor, t: Tiles, of_keys: bool, causal: bool, window: int, tma: bool, cap: float
) -> Config:
    """Of tiles whose resident side are queries or, with `of_keys`, keys."""
    queries, keys = (t.streamed, t.resident) if of_keys else (t.resident, t.streamed)
    D, Dv = q.shape[-1], v.shape[-1]
    ragged = of_keys and q.shape[2] % queries != 0
    return Config(D, queries, keys, tile_width(D), causal, window, tma, ragged, cap, Dv, tile_width(Dv))


def bounded(window: int, S: int, Sk: int) -> int:
    """A window that hides nothing is none, which is 0."""
    return window if window < max(S, Sk) else 0


def tiles(kernel: Literal["forward", "keys", "queries"], q: torch.Tensor, window: int = 0) -> Tiles:
    """The tiles of a kernel: as large as shared memory and registers hold.

    Hopper and the Blackwell of data centres have 227 KiB of shared memory and matrix instructions that read it;
    others have at least 99 KiB.
    """
    D = q.shape[-1]
    if q.dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if D > 64 else Tiles(64, 32, 4, 2)
    if not roomy(capability(q.device)):
        return modest(kernel, D)
    if kernel == "forward":
        if q.shape[2] <= 512:
            # Few blocks: smaller ones use more of the device. As measured on an H200, Blackwell's were not.
            return Tiles(64, 32, 4, 3) if 64 < D <= 128 else Tiles(64, 64, 4, 2)
        if D > 64:
            # Four warps have no registers for the loops that a window adds.
            return Tiles(128, 64, 8 if D > 128 or window else 4, 2)
        return Tiles(128, 128, 8, 3)
    if D > 128:
        return Tiles(64, 32, 8, 2)
    if kernel == "queries":
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 64, 4, 2) if D > 64 else Tiles(64, 64, 4, 3)


def modest(kernel: Literal["forward", "keys", "queries"], D: int) -> Tiles:
    """For 16-bit numbers in 99 KiB of shared memory."""
    if D > 128:
        return Tiles(32 if kernel == "keys" else 64, 32, 4, 1)
    return Tiles(64, 32, 4, 2) if D > 64 else Tiles(64, 64, 4, 2)


def tile_width(D: int) -> int:
    """Columns of a tile: a power of two that a matrix instruction takes."""
    return max(16, power_of_2(D))


def row_contiguous(x: torch.Tensor) -> torch.Tensor:
    """With a contiguous last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def describable(*tensors: torch.Tensor) -> bool:
    """Whether tiles are loaded by the tensor memory accelerator: in bf16 and fp16 from 1024 rows on, since
    descriptors cost host time, and where addresses and strides are in units of 16 bytes.
    """
    first = tensors[0]
    if capability(first.device)[0] < 9 or first.shape[2] < 1024 or first.element_size() != 2:
        return False
    return all(
        x.data_ptr() % 16 == 0
        and x.numel() > 0
        and x.stride(-1) == 1
        and all(
            0 < stride < 1 << 40 and stride * x.element_size() % 16 == 0
            for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
            if size > 1
        )
        for x in tensors
    )


def source(x: torch.Tensor, rows: int, tma: bool) -> Any:
    """What a kernel loads tiles from: a descriptor of (1, 1, rows, width) blocks, or the tensor itself."""
    if not tma:
        return x
    # The stride of a dimension of one is arbitrary; a descriptor wants a valid one all the same.
    strides = [stride if size > 1 else x.shape[-1] * 16 for stride, size in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], [1, 1, rows, tile_width(x.shape[-1])])


def like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of the same shape, in the order of the same dimensions, the last one contiguous."""
    new = torch.empty_like(x)
    return new if new.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def output_like(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Memory for the output: like q, of v's head dimension."""
    if v.shape[-1] == q.shape[-1]:
        return like(q)
    order = sorted(range(3), key=lambda i: -q.stride(i))
    new = torch.empty([q.shape[i] for i in order] + [v.shape[-1]], dtype=q.dtype, device=q.device)
    return new.permute(*(order.index(i) for i in range(3)), 3)


def heads_in_l2(k: torch.Tensor, groups: int) -> int:
    """How many query heads work at a time so that their K and V stay in L2."""
    S, D = k.shape[2:]
    return max(1, L2_SHARE // max(1, 2 * S * D * k.element_size())) * groups
