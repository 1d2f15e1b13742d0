"""What kernels for Hopper (compute capability 9.0) share: tensor maps, launches, layouts, operands that lie in
registers; for attention, masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._common import power_of_2
from ._launch import _DIRECT as DIRECT
from ._launch import _device as current_device
from ._launch import _observed as observed
from ._launch import _stream as current_stream
from ._launch import launcher, straight

try:
    from triton.backends.nvidia.driver import make_tensordesc_arg as make_map
except ImportError:
    make_map = None

LOG2E = 1.4426950408889634
LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32 number, below which no row max goes: unlike -inf it can be subtracted from -inf."""
ROWS = 64
"""Query rows of one consumer warp group."""
KEYS = 128
"""Keys of one step; as many as a tile of two groups has rows: the causal mask cuts one block of keys only."""
WIDTHS = (64, 128)
"""Columns of tiles that both passes have, and lists of blocks (`_attention_sparse_hopper.py`)."""
FORWARD_WIDTHS = (64, 128, 256)
"""Columns of tiles that the forward pass has."""
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Among the threads of a warp group: its name from Triton 3.7 on, and before."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, widths: tuple[int, ...] = WIDTHS) -> bool:
    """Whether tiles of one of these widths take the inputs, of any lengths and any strides that a tensor map
    takes; the device is not looked at.
    """
    D = q.shape[-1]
    return v.shape[-1] == D and D % 8 == 0 and power_of_2(D) in widths and loadable(q, k, v)


def loadable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether tensor maps take the inputs, of any lengths and head dimensions, and numbers their rows."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0 and _loadable(
        q.dtype, q.shape, k.shape, q.stride(), k.stride(), v.stride()
    )


Strides = tuple[int, ...]


@functools.lru_cache(4096)
def _loadable(
    dtype: torch.dtype,
    of_q: torch.Size,
    of_k: torch.Size,
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
) -> bool:
    B, H, S, _ = of_q
    return (
        dtype in (torch.bfloat16, torch.float16)
        and of_k[2] > 0
        and B * H * (S + 2 * ROWS) < 1 << 31
        and _strides_fit(of_q, q_strides)
        and _strides_fit(of_k, k_strides)
        and _strides_fit(of_k, v_strides)
    )


def _strides_fit(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and all(
        size == 1 or (stride % 8 == 0 and 0 < stride < 1 << 39)
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def mappable(x: torch.Tensor) -> bool:
    """Whether a tensor map takes a 16-bit tensor: its last dimension contiguous, addresses and strides in units of
    16 bytes. The stride of a dimension of one does not matter.
    """
    return x.data_ptr() % 16 == 0 and _strides_fit(x.shape, x.stride())


def mapped(x: torch.Tensor) -> torch.Tensor:
    """As it is where a tensor map takes it, else a contiguous copy."""
    return x if mappable(x) else x.clone(memory_format=torch.contiguous_format)


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


@gluon.jit
def unpack(packed, dtype: gl.constexpr, OPERAND: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Words (rows, columns / 2) of two 16-bit numbers as the operand of a product: the registers are the same."""
    ROWS: gl.constexpr = packed.shape[0]
    COLUMNS: gl.constexpr = 2 * packed.shape[1]
    twos = gl.zeros([ROWS, COLUMNS], gl.int16, OPERAND).reshape([ROWS, COLUMNS // 2, 2])
    HALVES: gl.constexpr = twos.type.layout
    one = gl.expand_dims(gl.convert_layout(packed, gl.SliceLayout(2, HALVES), assert_trivial=True), 2)
    two = one + gl.zeros([ROWS, COLUMNS // 2, 2], gl.int32, HALVES)
    half = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [two], dtype=gl.int16, is_pure=True, pack=2)
    return gl.convert_layout(half.to(dtype, bitcast=True).reshape([ROWS, COLUMNS]), OPERAND, assert_trivial=True)


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


@functools.cache
def tile_layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a (1, 1, rows, width) block in shared memory, where it is a (rows, width) tile."""
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], element)


@functools.lru_cache(4096)
def mapping(shape: torch.Size, strides: Strides, rows: int, dtype: torch.dtype, columns: int = 0) -> Says:
    """What a tensor map of blocks of `rows` rows of one head of a (B, H, S, D) tensor says, but for where the
    tensor is. Columns of blocks are those, a power of two, or 0 for one block over all.
    """
    D = shape[-1]
    width = columns or power_of_2(D)
    # The stride of a dimension of one may be anything; a tensor map wants a valid one.
    valid = [stride if size > 1 else D for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    layout = tile_layout(rows, width, dtype)
    # By its own constructor: other fields are as this Triton has them.
    return Says(vars(TensorMap(None, list(shape), [*valid, 1], [1, 1, rows, width], layout)))


def flat_mapping(shape: Sequence[int], block: Sequence[int], layout: gl.NVMMASharedLayout) -> Says:
    """What a tensor map of blocks of contiguous memory of at most two dimensions says, but for where it is."""
    return Says(vars(TensorMap(None, list(shape), [shape[-1], 1][-len(shape) :], list(block), layout)))


class Says:
    """What a tensor map says but for where its tensor is; equal to nothing but itself."""

    __slots__ = ("fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


class Placed:
    """A tensor and what its tensor map says: `launch` makes the map, or has it from an earlier launch."""

    __slots__ = ("base", "says")

    def __init__(self, base: torch.Tensor, says: Says) -> None:
        self.base = base
        self.says = says

    def map(self) -> TensorMap:
        """As Triton takes it."""
        new = TensorMap.__new__(TensorMap)
        vars(new).update(self.says.fields, base=self.base)
        return new


placed = Placed
"""The tensor map of this tensor that says so."""


def tensor_map(x: torch.Tensor, rows: int, columns: int = 0) -> Placed:
    """Of a tensor that is `mappable`: see `mapping`."""
    return placed(x, mapping(x.shape, x.stride(), rows, x.dtype, columns))


def flat_map(x: torch.Tensor, rows: int) -> TensorMap:
    """Blocks of `rows` rows of a contiguous (…, D) tensor as one matrix, their columns a power of two."""
    D = x.shape[-1]
    width = power_of_2(D)
    return TensorMap(x, [x.numel() // D, D], [D, 1], [rows, width], shared_layout(rows, width, x.dtype))


compiled: dict[Hashable, Compiled] = {}
"""Kernels by what their code depends on."""
MOST_MAPS = 4096
"""Tensor maps that one kernel remembers; where more come by, it starts anew."""


class Compiled:
    """A compiled kernel, Triton's `kernel`, and how it is launched.

    Where Triton makes tensor maps in a way that is known, they are made here, and kept by address and by what they
    say, which is all that is in one: memory that was freed and given to another tensor is no special case. Making
    one takes as long as a launch, and in a training step the same addresses come again and again.
    """

    __slots__ = ("_bound", "_maps", "_says", "kernel")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._bound: dict[int, Callable[[tuple[Any, ...]], bool]] = {}
        """By the number of programs."""
        self._says: dict[int, Any] = {}
        """What the launcher knows of tensor maps, where that is known, by place among the arguments."""
        self._maps: dict[tuple[int, Says], tuple[Any, ...]] = {}

    def _bind(self, grid: int, arguments: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], bool]:
        """Of tensors those are handed over by address that stand where the first call's do; one elsewhere is left
        to Triton's function in C.
        """
        function, together, middle = straight(self.kernel)
        function, self._says = described(function) or (function, {})
        places = ""
        for place, x in enumerate(arguments):
            mapped = type(x) is Placed or place in self._says
            places += "m" if mapped else "a" if isinstance(x, torch.Tensor) else "x"
        if len(self._bound) >= MOST_MAPS:
            self._bound.clear()
        assert current_stream is not None
        given = places, ..., current_device, current_stream, self._maps, Placed, self._made
        found = self._bound[grid] = launcher((function, together, middle), (grid, 1, 1), (), *given)
        return found

    def _made(self, place: int, x: Any) -> tuple[Any, ...]:
        """What a tensor map is handed over as."""
        says = self._says.get(place)
        if says is None:
            return (usual(x),)
        if type(x) is not Placed:
            return tuple(make_map(x, says))
        key, maps = (x.base.data_ptr(), x.says), self._maps
        found = maps.get(key)
        if found is None:
            if len(maps) >= MOST_MAPS:
                maps.clear()
            found = maps[key] = tuple(make_map(x.map(), says))
        return found

    def __call__(self, grid: int, arguments: tuple[Any, ...]) -> None:
        bound = self._bound.get(grid)
        if bound is None and DIRECT and not observed():
            bound = self._bind(grid, arguments)
        # As Triton's own launch in the end, without launch metadata and hooks.
        if bound is None or not bound(arguments):
            self.kernel[(grid, 1, 1)](*map(usual, arguments))


def described(function: Any) -> tuple[Any, dict[int, Any]] | None:
    """The launcher behind the one of Triton's that makes tensor maps first, and what it knows of each by its place
    among the arguments. None where this is not such a function.
    """
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    held = dict(zip(names, (x.cell_contents for x in getattr(function, "__closure__", None) or ()), strict=True))
    if make_map is None or not {"launcher", "tensordesc_indices", "tensordesc_meta"} <= held.keys():
        return None
    says = dict(zip(sorted(held["tensordesc_indices"]), held["tensordesc_meta"], strict=True))
    return None if None in says.values() else (held["launcher"], says)


def usual(x: Any) -> Any:
    """An argument as Triton takes it."""
    return x.map() if type(x) is Placed else x


def launch(kernel: Any, key: Hashable, grid: int, *arguments: Any, num_warps: int = 4) -> None:
    """`kernel[(grid,)](*arguments)`, past the just-in-time compiler's look at each argument, which takes longer
    than the launch. `key` must hold all that the compiled code depends on, the device included: dtypes, constants,
    and of numbers that the kernel specialises on their values; pointers are to multiples of 16 bytes.
    """
    found = compiled.get(key)
    if found is None:
        made = kernel[(grid,)](*map(usual, arguments), num_warps=num_warps)
        if made is not None:  # the interpreter compiles nothing
            compiled[key] = Compiled(made)
    else:
        found(grid, arguments)


class Key:
    """What compiled code depends on: one object for what is equal (`kernel_key`), found by its identity."""

    __slots__ = ("depends",)

    def __init__(self, *depends: Hashable) -> None:
        self.depends = depends

    def __repr__(self) -> str:
        return f"Key{self.depends}"


@functools.cache
def kernel_key(*depends: Hashable) -> Key:
    """The one key of what is equal to this."""
    return Key(*depends)
