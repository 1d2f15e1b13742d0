"""The kernels for Hopper without one: Gluon's operations played by PyTorch, warp groups by threads.

What is played is what can go wrong in them: which tiles are copied where, which barrier waits for which arrival (a
missing one is a thread that waits in vain), which numbers are hidden, and which rows are written. Numbers are fp32
throughout; registers, swizzles and the order of asynchronous reads are the compiler's and the device's.
"""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from kernelmark.kernels import _attention_varlen_hopper as forward
from kernelmark.kernels import _attention_varlen_hopper_backward as backward
from kernelmark.kernels import attention_varlen as module
from kernelmark.suite.operators.attention_varlen import reference

SECONDS = 20
"""After which a wait is in vain; a whole test takes a few."""


class Number(torch.Tensor):
    """A tensor or a number with the habits of Triton's: integer division goes toward zero."""

    type = SimpleNamespace(layout=None)

    def __floordiv__(self, other):
        return torch.div(self, other, rounding_mode="trunc")

    def __mod__(self, other):
        return torch.fmod(self, other)


COUNTING = threading.Lock()


def number(x):
    return torch.as_tensor(x).as_subclass(Number)


class Pointer:
    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)


def load(pointer, mask=None, other=None):
    at = number(pointer.offset)
    if mask is None:
        return number(pointer.memory[at.as_subclass(torch.Tensor).long()])
    return number(torch.where(mask, pointer.memory[torch.where(mask, at, 0).long()], other))


def store(pointer, value, mask=None):
    at, value = torch.broadcast_tensors(torch.as_tensor(pointer.offset), value)
    mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.expand(at.shape)
    pointer.memory[at[mask].long()] = value[mask]


def add(pointer, value, sem):
    with COUNTING:
        before = int(pointer.memory[int(pointer.offset)])
        pointer.memory[int(pointer.offset)] += value
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


class Shared:
    def __init__(self, data):
        self.data, self.dtype = data, data.dtype

    def index(self, i):
        return Shared(self.data[i])

    def slice(self, start, length):
        return Shared(self.data[start : start + length])

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
    """A tensor map: zeros beyond the tensor, nothing written there."""

    def __init__(self, matrix, rows, columns):
        self.matrix, self.dtype, self.layout = matrix, torch.float32, None
        self.block_type = SimpleNamespace(nbytes=4 * rows * columns, shape=(rows, columns))

    def place(self, at):
        row, column = (int(x) for x in at)
        rows, columns = self.block_type.shape
        low, high = min(max(row, 0), len(self.matrix)), min(max(row + rows, 0), len(self.matrix))
        return slice(low, high), slice(column, column + columns), slice(low - row, high - row)


def copy_in(tiles, at, barrier, target):
    rows, columns, inside = tiles.place(at)
    target.data.zero_()
    target.data[inside] = tiles.matrix[rows, columns]
    barrier.expected.bytes -= tiles.block_type.nbytes
    assert barrier.expected.bytes >= 0
    if barrier.expected.bytes == 0:
        barrier.arrive()


def copy_out(tiles, at, source):
    rows, columns, inside = tiles.place(at)
    tiles.matrix[rows, columns] = source.data[inside]


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
    """Gluon's language, and the launch of a kernel program by program."""

    def __init__(self):
        self.program = self.programs = 0
        self.gl = SimpleNamespace(
            int64=torch.int64,
            float32=torch.float32,
            program_id=lambda axis: number(self.program),
            num_programs=lambda axis: self.programs,
            load=load,
            atomic_add=add,
            int32=torch.int32,
            full=lambda shape, value, dtype, layout: number(torch.full(shape, int(value), dtype=dtype)),
            SwizzledSharedLayout=nothing,
            store=store,
            minimum=lambda a, b: number(torch.minimum(number(a), number(b))),
            maximum=lambda a, b: number(torch.maximum(number(a), number(b))),
            cast=lambda x, dtype: number(x).to(dtype),
            where=lambda c, a, b: number(torch.where(c, a, b)),
            exp2=torch.exp2,
            log2=torch.log2,
            max=lambda x, axis: number(x.amax(axis)),
            sum=lambda x, axis: number(x.sum(axis)),
            arange=lambda low, high, layout: number(torch.arange(low, high)),
            zeros=lambda shape, dtype, layout: number(torch.zeros(shape)),
            zeros_like=torch.zeros_like,
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            convert_layout=lambda x, layout: x,
            static_range=range,
            warp_specialize=specialize,
            allocate_shared_memory=allocate,
            NVMMADistributedLayout=nothing,
            DotOperandLayout=nothing,
            SliceLayout=nothing,
            BlockedLayout=nothing,
        )

    def launch(self, kernel, key, grid, *arguments):
        self.programs = grid
        given = [Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x for x in arguments]
        for self.program in range(grid):
            kernel(*given)


@pytest.fixture
def _played(monkeypatch):
    device = Device()
    barriers = SimpleNamespace(
        MBarrierLayout=nothing,
        init=lambda barrier, count: barrier.init(count),
        expect=expect,
        wait=lambda barrier, parity: barrier.wait(int(parity)),
        arrive=lambda barrier, count: barrier.arrive(),
    )
    copies = SimpleNamespace(
        async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=nothing
    )
    played = {
        "gl": device.gl,
        "mbarrier": barriers,
        "tma": copies,
        "warpgroup_mma": multiply,
        "warpgroup_mma_wait": awaited,
        "fence_async_shared": nothing,
        "_barrier": nothing,
        "_exp2": lambda x, share: number(torch.exp2(x)),
        "_pack": lambda p, *_: p,
        "_unpack": lambda packed, *_: packed,
        "LOWEST": torch.finfo(torch.float32).min,
        "FIELDS": module.FIELDS.value,
        "launch": device.launch,
        "packed": lambda x, rows: Tiles(x.view(x.shape[0], -1), rows, x.shape[2]),
    }
    for each in (forward, backward):
        for name, value in vars(each).items():
            if name in played:
                monkeypatch.setattr(each, name, played[name])
            elif hasattr(value, "fn"):
                monkeypatch.setattr(each, name, value.fn)


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


CASES = pytest.mark.parametrize(
    ("lengths", "keys", "heads", "D"),
    [
        # Whole blocks; an odd one; one row; empty; a tail in the second half of a block; in the first.
        ([256, 128, 1, 0, 330, 20], None, (2, 1), 64),
        # Both sides longer, a mask that cuts two blocks of keys, and one that hides all of a block.
        ([130, 300, 64], [270, 40, 0], (2, 2), 64),
        ([70, 129], [129, 200], (2, 1), 128),
    ],
)


@pytest.mark.usefixtures("_played")
@CASES
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("spoilt", "dynamic"), [(False, True), (True, True), (False, False)])
def test_output_and_gradients(lengths, keys, heads, D, mask, spoilt, dynamic):
    """Of every sequence, also of the neighbours of one that is all NaN."""
    keys = lengths if keys is None else keys
    generator = torch.Generator().manual_seed(sum(lengths))
    H, Hkv = heads

    def draw(tokens, heads):
        return torch.randn(tokens, heads, D, generator=generator)

    q, k, v = draw(sum(lengths), H), draw(sum(keys), Hkv), draw(sum(keys), Hkv)
    grad = draw(sum(lengths), H)
    cu, cu_keys = starts(lengths), starts(keys)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, cu, cu_keys, max(lengths), max(keys), mask)
    wanted = [expected.detach(), *torch.autograd.grad(expected, wide, grad.double())]
    if spoilt:
        for x, at in ((q, cu), (grad, cu), (k, cu_keys), (v, cu_keys)):
            x[at[1] : at[2]] = torch.nan
    causal = mask == "causal"
    out = torch.full_like(q, torch.nan)
    lse = torch.full((H, sum(lengths)), torch.nan)
    table, rows = module.listed(cu, cu_keys, len(q), forward.UNIT)
    forward.forward(q, k, v, out, lse, table, rows, causal, forward.SCHEDULES[D, causal], dynamic)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    lists = module.listed(cu, cu_keys, len(q), backward.BLOCK), module.listed(cu_keys, cu, len(k), backward.BLOCK)
    level, delta = module.statistics(grad, out, lse, *lists[0], backward.BLOCK)
    backward.backward(grad, q, k, v, level, delta, *gradients, *lists, causal)
    for name, got, want, at in zip(
        ("output", "dq", "dk", "dv"), (out, *gradients), wanted, (cu, cu, cu_keys, cu_keys), strict=True
    ):
        if spoilt:
            keep = torch.ones(len(got), dtype=torch.bool)
            keep[at[1] : at[2]] = False
            got, want = got[keep], want[keep]
        torch.testing.assert_close(
            got.double(), want, rtol=1e-4, atol=2e-5, msg=lambda x, name=name: f"{name}: {x}"
        )
