"""Gluon's operations played by PyTorch, warp groups by threads: a kernel for Hopper without one.

What is played is what can go wrong in a kernel: which tiles are copied where, which barrier waits for which
arrival (a missing one is a thread that waits in vain), which numbers are hidden, and which rows are written.
Numbers are fp32 throughout; registers, swizzles and the order of asynchronous reads are the compiler's and the
device's.
"""

from __future__ import annotations

import inspect
import math
import threading
from types import SimpleNamespace

import torch
from kernelmark.kernels import _hopper, _pipeline
from kernelmark.kernels._common import power_of_2
from kernelmark.kernels.attention import _gradients, _softmax
from triton.experimental.gluon.language import constexpr

SECONDS = 20
"""After which a wait is in vain; a whole test takes a few."""


class Number(torch.Tensor):
    """A tensor or a number with the habits of Triton's: integer division goes toward zero, and what is added to a
    variable makes another number.
    """

    type = SimpleNamespace(layout=None)

    def __floordiv__(self, other):
        return torch.div(self, other, rounding_mode="trunc")

    def __mod__(self, other):
        return torch.fmod(self, other)

    def __iadd__(self, other):  # a value never changes
        return self + other

    def __isub__(self, other):
        return self - other


COUNTING = threading.Lock()


def number(x):
    return torch.as_tensor(x).as_subclass(Number)


class Pointer:
    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)


def pointer(x):
    """To a tensor's first number; of one with gaps, to all that lies behind it."""
    if x.is_contiguous():
        return Pointer(x.view(-1))
    behind = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return Pointer(x.as_strided((behind,), (1,)))


def pointed(x):
    """What a kernel is given: pointers for tensors, in tuples too."""
    if isinstance(x, tuple):
        return tuple(map(pointed, x))
    return pointer(x) if isinstance(x, torch.Tensor) else x


def load(pointer, mask=None, other=None, cache_modifier=""):
    at = number(pointer.offset)
    if mask is None:
        return number(pointer.memory[at.as_subclass(torch.Tensor).long()].clone())  # of one number it is a view
    mask = torch.as_tensor(mask)
    return number(torch.where(mask, pointer.memory[torch.where(mask, at, 0).long()], other))


def store(pointer, value, mask=None, eviction_policy=""):
    at, value = torch.broadcast_tensors(torch.as_tensor(pointer.offset), value)
    mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.expand(at.shape)
    pointer.memory[at[mask].long()] = value[mask]


def add(pointer, value, sem):
    with COUNTING:
        before = int(pointer.memory[int(pointer.offset)])
        pointer.memory[int(pointer.offset)] += value
    return number(before)


def exchange(pointer, value, sem):
    with COUNTING:
        before = int(pointer.memory[int(pointer.offset)])
        pointer.memory[int(pointer.offset)] = value
    return number(before)


class Barrier:
    """Phases that end with so many arrivals; a copy into shared memory is done when it is asked for."""

    def __init__(self):
        self.changed = threading.Condition()
        self.parity = 0

    def init(self, count):
        self.count = self.pending = count

    def arrive(self):
        with self.changed:
            assert self.pending > 0
            self.pending -= 1
            if self.pending == 0:
                self.pending = self.count
                self.parity ^= 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            assert self.changed.wait_for(lambda: self.parity != parity, SECONDS), "nobody arrives"


class Loading:
    """A barrier's phase that ends when the bytes that were announced have come."""

    bytes = 0


def stored(layout, B, H, S, D, generator):
    """Random numbers (B, H, S, D): contiguous, as (B, S, H, D), or as part of a projection of more heads."""
    if layout == "bhsd":
        return torch.randn(B, H, S, D, generator=generator)
    heads = H + 3 * (layout == "projection")
    return torch.randn(B, S, heads, D, generator=generator)[:, :, heads - H :].transpose(1, 2)


class Shared:
    def __init__(self, data):
        self.data, self.dtype, self.shape = data, data.dtype, data.shape

    def index(self, i):
        return Shared(self.data[int(i)])

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(shape))

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return number(self.data.clone())

    def store(self, x):
        self.data.copy_(x)


class Barriers(list):
    def index(self, i):
        return self[i]


class Tiles:
    """A tensor map of (rows, columns) or of numbers in a row: zeros beyond the tensor, nothing written there."""

    def __init__(self, tensor, *block):
        self.tensor, self.layout = tensor, None
        self.dtype = torch.int32 if tensor.dtype == torch.int32 else torch.float32
        self.strides = tensor.stride()
        self.block_type = SimpleNamespace(nbytes=4 * math.prod(block), shape=[*block])

    def place(self, at):
        """What of the tensor, and what of the tile."""
        of_tensor, of_tile = [], []
        for start, size, length in zip(map(int, at), self.block_type.shape, self.tensor.shape, strict=True):
            low, high = (min(max(x, 0), length) for x in (start, start + size))
            of_tensor.append(slice(low, high))
            of_tile.append(slice(low - start, high - start))
        return tuple(of_tensor), tuple(of_tile)


def part(tiles, buffer):
    """Of a buffer the first rows, as many as a tile has."""
    shape = tiles.block_type.shape
    if len(shape) > 1 and buffer.data.dim() > 1:
        return buffer.data.narrow(-2, 0, shape[-2]).view(shape)
    return buffer.data.view(shape)


def copy_in(tiles, at, barrier, target):
    of_tensor, of_tile = tiles.place(at)
    tile = part(tiles, target).zero_()
    tile[of_tile] = tiles.tensor[of_tensor]
    barrier.expected.bytes -= tiles.block_type.nbytes
    assert barrier.expected.bytes >= 0
    if barrier.expected.bytes == 0:
        barrier.arrive()


def copy_out(tiles, at, source):
    assert min(map(int, at)) >= 0, "an illegal instruction on an H200"
    of_tensor, of_tile = tiles.place(at)
    tiles.tensor[of_tensor] = part(tiles, source)[of_tile]


def reduce(tiles, at, source):
    of_tensor, of_tile = tiles.place(at)
    with COUNTING:
        tiles.tensor[of_tensor] += source.data[of_tile]


def expect(barrier, bytes):
    barrier.expected = Loading()
    barrier.expected.bytes = bytes


def allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) == 2 else Barrier()
    return Shared(torch.zeros(shape, dtype=dtype) if dtype == torch.int32 else torch.full(shape, torch.nan))


def specialize(parts, warps, registers):
    failures = []

    def run(function, arguments):
        try:
            function(*arguments)
        except BaseException as error:  # raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def multiply(a, b, c, use_acc=True, is_async=False):
    a = a.data if isinstance(a, Shared) else a
    product = a @ b.data
    return number(product + c if use_acc else product)


def awaited(pendings, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def nothing(*args, **kwargs):
    return None


class Device:
    """Gluon's language, and the launch of a kernel program by program, in `order` of their numbers."""

    order = staticmethod(range)

    def __init__(self):
        self.program = self.programs = 0
        self.gl = SimpleNamespace(
            int64=torch.int64,
            float32=torch.float32,
            float16=torch.float32,
            bfloat16=torch.float32,  # numbers are fp32 throughout
            program_id=lambda axis: number(self.program),
            num_programs=lambda axis: self.programs,
            load=load,
            atomic_add=add,
            atomic_xchg=exchange,
            split=lambda x: tuple(number(part) for part in x.unbind(-1)),
            int32=torch.int32,
            full=lambda shape, value, dtype, layout: number(torch.full(shape, number(value).item(), dtype=dtype)),
            SwizzledSharedLayout=nothing,
            store=store,
            minimum=lambda a, b: number(torch.minimum(number(a), number(b))),
            maximum=lambda a, b: number(torch.maximum(number(a), number(b))),
            cast=lambda x, dtype: number(x).to(dtype),
            where=lambda c, a, b: number(torch.where(*(torch.as_tensor(x) for x in (c, a, b)))),
            exp2=torch.exp2,
            log2=torch.log2,
            log=torch.log,
            max=lambda x, axis: number(x.amax(axis)),
            sum=lambda x, axis: number(x.sum(axis)),
            arange=lambda low, high, layout: number(torch.arange(low, high)),
            zeros=lambda shape, dtype, layout: number(torch.zeros([int(x) for x in shape])),
            zeros_like=torch.zeros_like,
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            static_range=range,
            warp_specialize=specialize,
            allocate_shared_memory=allocate,
            to_tensor=number,
            multiple_of=lambda x, values: x,
            NVMMADistributedLayout=nothing,
            DotOperandLayout=nothing,
            SliceLayout=nothing,
            BlockedLayout=nothing,
        )

    def launch(self, kernel, key, grid, *arguments, num_warps=4):
        if not inspect.isfunction(kernel):  # one of those to keep: Triton's interpreter has it
            kernel[(grid,)](*arguments, num_warps=num_warps)
            return
        self.programs = grid
        given = [pointed(x) for x in arguments]
        for program in self.order(grid):
            self.program = program
            kernel(*given)


SOFTMAX = {
    "pack": lambda p, *_: p,
    "unpack": lambda packed, *_: packed,
    "pin": lambda row_max: row_max,
    "rescale": lambda o, correction: o * correction[:, None],
    "tanh": torch.tanh,
    "reciprocal": torch.reciprocal,
}
"""The parts of a step that are instructions of the device, over numbers as they are."""


SHARED = _hopper, _pipeline, _softmax, _gradients
"""Modules that all kernels take parts from."""


def aggregate(cls):
    """An aggregate of Gluon's as a class of Python's: the same fields and methods."""
    constructor = cls.hash_attrs[0]
    fields = list(inspect.signature(getattr(constructor, "fn", constructor)).parameters)[1:]

    def __init__(self, *values):
        vars(self).update(zip(fields, values, strict=True))

    methods = {name: x.fn for name, x in vars(cls).items() if hasattr(x, "fn")}
    return type(cls.__name__, (), {"__init__": __init__, **methods})


def _block(says):
    """Of what a tensor map says, which begins with a shape where memory is looked at as another one."""
    return says[1:] if isinstance(says[0], tuple) else says


def play(monkeypatch, modules, keep=(), **others):
    """Has the Gluon functions of the modules and of what they share, but those to keep, run as Python over what is
    played and `others`.
    """
    device = Device()
    barriers = SimpleNamespace(
        MBarrierLayout=nothing,
        init=lambda barrier, count: barrier.init(count),
        expect=expect,
        wait=lambda barrier, parity: barrier.wait(int(parity)),
        arrive=lambda barrier, count, pred=True: barrier.arrive() if pred else None,
    )
    played = {
        "gl": device.gl,
        "mbarrier": barriers,
        "tma": SimpleNamespace(store_wait=nothing),
        "copy_in": copy_in,
        "copy_out": copy_out,
        "TensorMap": lambda x, shape, strides, block, layout: Tiles(x.view(shape), *block),
        "mapping": lambda shape, strides, rows, dtype, columns=0: (1, 1, rows, columns or power_of_2(shape[-1])),
        "flat_mapping": lambda shape, block, layout: (tuple(shape), *block),
        "placed": lambda x, says: Tiles(x.view(says[0]) if isinstance(says[0], tuple) else x, *_block(says)),
        "tensor_map": lambda x, rows, columns=0: Tiles(x, 1, 1, rows, columns or power_of_2(x.shape[-1])),
        "flat_map": lambda x, rows: Tiles(x.view(-1, x.shape[-1]), rows, power_of_2(x.shape[-1])),
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": awaited,
        "fence_async_shared": nothing,
        "launch": device.launch,
        **SOFTMAX,
        "_layout": nothing,
        "shared_layout": nothing,
        "tile_layout": nothing,
        "plain_layout": nothing,
        **others,
    }
    aggregates = {}
    for each in (*SHARED, *modules):
        for name, value in list(vars(each).items()):
            if name in played:
                monkeypatch.setattr(each, name, played[name])
            elif getattr(value, "__triton_aggregate__", False):
                monkeypatch.setattr(each, name, aggregates.setdefault(value, aggregate(value)))
            elif isinstance(value, constexpr):
                monkeypatch.setattr(each, name, value.value)
            elif hasattr(value, "cache_clear"):  # of what is not played
                monkeypatch.setattr(each, name, value.__wrapped__)
            elif hasattr(value, "fn") and name not in keep:
                monkeypatch.setattr(each, name, value.fn)
