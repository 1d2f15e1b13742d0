"""What the attention kernels for Hopper (compute capability 9.0) share: tensor maps, launches, layouts, masks."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._common import power_of_2

LOG2E = 1.4426950408889634
LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32 number, below which no row max goes: unlike -inf it can be subtracted from -inf."""
ROWS = 64
"""Query rows of one consumer warp group."""
KEYS = 128
"""Keys of one step; as many as a tile of two groups has rows, so that the causal mask cuts one block of keys only."""
WIDTHS = (64, 128)
"""Columns of tiles that both passes have, and lists of blocks (`_attention_sparse_hopper.py`)."""
FORWARD_WIDTHS = (64, 128, 256)
"""Columns of tiles that the forward pass has."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, widths: tuple[int, ...] = WIDTHS) -> bool:
    """Whether tiles of one of these widths take the inputs; the device is not looked at."""
    _, _, S, D = q.shape
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and D % 8 == 0
        and power_of_2(D) in widths
        and S >= 1024
        and S % (4 * ROWS) == 0
        and q.numel() // D < 1 << 31
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))
    )


def dense(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and at an address that a tensor map takes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@gluon.constexpr_function
def product_layout(columns):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of what a warp group multiplies: 64 rows and so many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def sectioned(nth, n, heads, section):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, which of its n blocks) is the nth piece of work where sections of heads come one after the other, of
    each the first block of every head, then the second.
    """
    first = nth // (section * n) * section
    nth -= first * n
    width = gl.minimum(section, heads - first)
    block = nth // width
    return first + nth - block * width, block


@gluon.jit
def visible(queries, keys, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Whether a query sees a key, by their places, which broadcast against each other."""
    if CAUSAL:
        seen = queries >= keys
        if WINDOW:
            seen = seen & (queries < keys + WINDOW)
    else:
        seen = (queries < keys + WINDOW) & (keys < queries + WINDOW)
    return seen


class TensorMap(TensorDescriptor):
    """A descriptor of what `fits` has approved of: made without checks, which take longer than the launch."""

    def __post_init__(self) -> None: ...


@functools.cache
def shared_layout(rows: int, D: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a 16-bit tile in shared memory."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, D], element)


@functools.cache
def plain_layout(rank: int) -> gl.NVMMASharedLayout:
    """Of fp32 as it lies in memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def tensor_map(x: torch.Tensor, rows: int) -> TensorMap:
    """Blocks of `rows` rows of a contiguous (…, D) tensor, their columns a power of two."""
    D = x.shape[-1]
    width = power_of_2(D)
    return TensorMap(x, [x.numel() // D, D], [D, 1], [rows, width], shared_layout(rows, width, x.dtype))


compiled: dict[Hashable, Any] = {}
"""Kernels by what their code depends on."""


def launch(kernel: Any, key: Hashable, grid: int, *arguments: Any) -> None:
    """`kernel[(grid,)](*arguments)`, past the just-in-time compiler's look at each argument, which takes longer
    than the launch. `key` must hold all that the compiled code depends on, the device included.
    """
    found = compiled.get(key)
    if found is None:
        compiled[key] = kernel[(grid,)](*arguments, num_warps=4)
    else:
        found[(grid, 1, 1)](*arguments)
