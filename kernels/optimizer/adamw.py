"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): all tensors of a step in one launch.

A program updates one piece of one tensor. Which piece it finds by two reads: its tensor's number, and that
tensor's row of addresses. Both lie on the device from the first step on and are made anew only when an address or
a size has changed. Gradients are where the allocator finds room for them, which in an eager step is somewhere else
each time: their addresses lie apart, and are all that a step sends, from page-locked memory that PyTorch's
allocator keeps. A step waits for nothing.

Gradients that are clipped are read once more, for their norm, and written never: a step scales what it reads.
"""

from __future__ import annotations

import ctypes
import math
import operator as py
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .._common import FLOATING, INTERPRETED, cdiv, check, operator, power_of_2
from .._launch import Launch, _guards, _stream, check_of, likeness
from ._addresses import addresses, aligned, functions, known_addresses, same

BLOCK = 64 if INTERPRETED else 1024
"""Elements of one round of a program: 8 a thread, one 16-byte access of each 16-bit tensor."""

LARGE = 1 << 22
"""Elements of a tensor, on average, from which on a program has one round and 4 warps; below, 4 rounds and 8.

Tuned on an H200: on 32 tensors of 4096 x 4096 in bf16, fp32 and with masters, and the 288 of a Llama of width
1024.
"""

TABLES = 64
"""Tables that are kept: one for each set of parameters and states, and stream."""

SQUARES = 4
"""Pieces that a program has of the norm of all gradients."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_ROW = 8

Tensors = Sequence[torch.Tensor]


def adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors | None = None,
    *,
    step: int | torch.Tensor,
    lr: float | torch.Tensor = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """One step of AdamW, in place: m ← m + (1 - β₁)(g - m), v ← β₂v + (1 - β₂)g²,
    p ← (1 - lr · weight_decay) p - lr · m̂ / (√v̂ + eps), with m̂ = m / (1 - β₁ⁿ), v̂ = v / (1 - β₂ⁿ), n = step.

    Lists of equally many tensors on one device, of equal shapes at each place; any of bf16, fp16 and fp32, one
    dtype a list; computed in fp32. With `masters` (fp32 copies of the parameters) these are updated and the
    params are written from them without being read. Memory traffic in bytes a parameter, contiguous tensors:

    * params, grads and moments in bf16: 14; in fp32: 28
    * params and grads in bf16, moments and masters in fp32: 28
    * params, grads and moments in bf16, masters in fp32: 20

    `step` counts from 1 and includes this step. As a tensor of one number on the device (fp32 or an integer) it
    is read there, and so is `lr` (fp32): a captured CUDA graph can add to the one and set the other. Addresses
    go to the device when they are new, which a graph cannot capture: take one step before capturing.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, length, device or beta, and
    RuntimeError where a graph is captured before the first step; the message names the argument.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters or ())
    _adamw(*_taken(lists, step, lr, beta1, beta2), beta1, beta2, eps, weight_decay)


def adamw_clipped(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors | None = None,
    *,
    max_norm: float,
    step: int | torch.Tensor,
    lr: float | torch.Tensor = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> torch.Tensor:
    """One step of `adamw` by clipped gradients: c · g, c = min(1, max_norm / (n + 1e-6)), n the norm of all
    gradients together, as in `torch.nn.utils.clip_grad_norm_`. The gradients stay as they are. Gives n, a scalar
    in fp32 on the device, summed in the same order each time. Where it is no number, no parameter is one any more.

    Memory traffic: that of `adamw`, and the gradients once more.

    Raises what `adamw` raises, and ValueError for a `max_norm` that is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, expected more than 0")
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters or ())
    norm: torch.Tensor = _adamw_clipped(
        *_taken(lists, step, lr, beta1, beta2), beta1, beta2, eps, weight_decay, max_norm
    )
    return norm


def _taken(
    lists: tuple[Tensors, ...], step: int | torch.Tensor, lr: float | torch.Tensor, beta1: float, beta2: float
) -> tuple[Any, ...]:
    """Checked, as the operators take them: lists, then step and rate as tensors or None, then as numbers."""
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta}, expected at least 0 and less than 1")
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        _check(*lists)
    count = rate = None
    if isinstance(step, torch.Tensor):
        check("step", step, dtypes=(torch.float32, torch.int32, torch.int64), shape=(), like=_first(lists[0]))
        count, step = step, 1
    elif step < 1:
        raise ValueError(f"step is {step}, expected at least 1")
    if isinstance(lr, torch.Tensor):
        check("lr", lr, dtypes=(torch.float32,), shape=(), like=_first(lists[0]))
        rate, lr = lr, 0.0
    return *map(list, lists), count, rate, step, lr


def _first(tensors: Tensors) -> torch.Tensor | None:
    return tensors[0] if len(tensors) else None


@triton.jit
def _unbias(step, log_beta):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """1 - β^step, without the cancellation where that is near to 0: -expm1(step · ln β)."""
    x = step * log_beta
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0)
    series = 1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * series))
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * series))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _toward(old, new, rest):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(1 - rest) · old + rest · new, from the nearer of the two: it cancels neither, and no two factors miss 1."""
    near = rest < 0.5
    return tl.where(near, old, new) + tl.where(near, rest, rest - 1.0) * (new - old)


@triton.jit
def _piece(  # type: ignore[no-untyped-def]  # Triton's types are its own
    p,
    g,
    m,
    v,
    w,
    inside,
    factor,
    rate,
    decay,
    rest1,
    rest2,
    root,
    eps,
    CLIP: tl.constexpr,
    MASTER: tl.constexpr,
    EXACT: tl.constexpr,
):
    grad = tl.load(g, inside).to(tl.float32)
    if CLIP:
        grad *= factor
    first = tl.load(m, inside).to(tl.float32)
    second = tl.load(v, inside).to(tl.float32)
    value = tl.load(w if MASTER else p, inside).to(tl.float32)
    first = _toward(first, grad, rest1)
    second = _toward(second, grad * grad, rest2)
    if EXACT:
        # Rounded right, where it could be seen: fp32 has no digits to hide an approximate root behind.
        value = decay * value - rate * tl.div_rn(first, tl.sqrt_rn(second) * root + eps)
    else:
        value = decay * value - rate * (first / (tl.sqrt(second) * root + eps))
    tl.store(m, first.to(m.dtype.element_ty), inside)
    tl.store(v, second.to(v.dtype.element_ty), inside)
    if MASTER:
        tl.store(w, value, inside)
    tl.store(p, value.to(p.dtype.element_ty), inside)


@triton.jit
def _address(word, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A word of a row as a pointer; the compiler cannot know what it may assume of one from memory."""
    pointer = tl.load(word).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _step(  # type: ignore[no-untyped-def]  # Triton's types are its own
    table,
    grads,
    owners,
    count,
    lr,
    norm,
    numbers,
    P: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASTER: tl.constexpr,
    EXACT: tl.constexpr,
    COUNT: tl.constexpr,
    RATE: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One piece of ROUNDS · BLOCK elements of one tensor."""
    rate, decay, rest1, rest2, root, eps, weight_decay, log_beta1, log_beta2, most = numbers
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    row = table + owner * 8
    start = (program - tl.load(row)) * (ROUNDS * BLOCK)
    left = tl.load(row + 1) - start
    p = _address(row + 2, P, ALIGNED) + start
    g = _address(grads + owner, G, ALIGNED) + start
    m = _address(row + 3, M, ALIGNED) + start
    v = _address(row + 4, V, ALIGNED) + start
    w = _address(row + 5, tl.float32, ALIGNED) + start
    if RATE:
        rate = tl.load(lr)
        decay = 1.0 - rate * weight_decay
    if COUNT:
        step = tl.load(count).to(tl.float32)
        rate = rate / _unbias(step, log_beta1)
        root = 1.0 / tl.sqrt(_unbias(step, log_beta2))
    elif RATE:
        rate = rate / log_beta1
    factor = 1.0
    if CLIP:
        factor = tl.minimum(most / (tl.load(norm) + 1e-6), 1.0, propagate_nan=tl.PropagateNan.ALL)
    at = tl.arange(0, BLOCK)
    # Only the last piece of a tensor masks: a mask at an odd size would split every 16-byte access.
    if left >= ROUNDS * BLOCK:
        for _ in range(ROUNDS):
            _piece(
                p + at,
                g + at,
                m + at,
                v + at,
                w + at,
                None,
                factor,
                rate,
                decay,
                rest1,
                rest2,
                root,
                eps,
                CLIP,
                MASTER,
                EXACT,
            )
            at += BLOCK
    else:
        for _ in range(ROUNDS):
            _piece(
                p + at,
                g + at,
                m + at,
                v + at,
                w + at,
                at < left,
                factor,
                rate,
                decay,
                rest1,
                rest2,
                root,
                eps,
                CLIP,
                MASTER,
                EXACT,
            )
            at += BLOCK


@triton.jit
def _squares(  # type: ignore[no-untyped-def]  # Triton's types are its own
    table,
    grads,
    owners,
    parts,
    programs,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Σ g² over PIECES of `_step`'s pieces, to parts."""
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    owner = tl.load(owners + piece, piece < programs, 0)
    row = table + owner * 8
    start = (piece - tl.load(row)) * (ROUNDS * BLOCK)
    left = tl.where(piece < programs, tl.load(row + 1) - start, 0)[:, None]
    g = (_address(grads + owner, G, ALIGNED) + start)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([PIECES, BLOCK], tl.float32)
    # As in `_step`: a mask would split every 16-byte access.
    if tl.min(left) >= ROUNDS * BLOCK:
        for _ in range(ROUNDS):
            x = tl.load(g + at).to(tl.float32)
            total += x * x
            at += BLOCK
    else:
        for _ in range(ROUNDS):
            x = tl.load(g + at, at < left, 0.0).to(tl.float32)
            total += x * x
            at += BLOCK
    tl.store(parts + tl.program_id(0), tl.sum(total))


@triton.jit
def _root(parts, norm, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """√Σ of parts; one program, so that the order is fixed."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(parts + at, at < count, 0.0)
    tl.store(norm, tl.sqrt_rn(tl.sum(total, 0)))


@dataclass
class _Table:
    """Addresses on the device: `words` are a row of eight for each tensor, then each program's tensor; `grads` are
    those of the gradients, in the order of the tensors.

    A row: the first program of the tensor, its elements, and the addresses of its param, moments and master.
    `shapes` and `dtypes` are those of each list's tensors; `seen` are the params, moments and masters that are
    known to have them.
    """

    words: torch.Tensor
    owners: torch.Tensor
    programs: int
    aligned: bool
    rounds: int
    warps: int
    dtypes: tuple[torch.dtype, ...]
    shapes: list[torch.Size]
    seen: list[list[weakref.ref[torch.Tensor]]]
    known: Callable[..., bool] | None = None
    """Whether gradients are as the last ones, but for where they lie: PyTorch's guards on those, all in C."""
    addresses: bytes = b""
    """What `grads` holds."""
    together: bool = False
    """Whether gradients are aligned too."""
    grads: torch.Tensor | None = None
    launches: dict[Any, Launch] = field(default_factory=dict)
    norms: dict[Any, tuple[Launch, Launch]] = field(default_factory=dict)


_tables: OrderedDict[Any, _Table] = OrderedDict()
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []
"""What a CUDA graph reads whenever it is replayed, which is never given up: `words` and `grads` of a table."""


def _check(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors) -> None:
    """Raises TypeError or ValueError that names the list and the place in it."""
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if len(masters):
        lists["masters"] = masters
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(f"{name} has {len(tensors)} tensors, params has {len(params)}")
        dtypes: Sequence[torch.dtype] = (torch.float32,) if name == "masters" else FLOATING
        for place, tensor in enumerate(tensors):
            shape = None if name == "params" else params[place].shape
            check(f"{name}[{place}]", tensor, dtypes=dtypes, shape=shape, like=params[0] if place else None)
            dtypes = (tensor.dtype,)
        if tensors and tensors[0].device != params[0].device:
            raise ValueError(f"{name}[0] is on {tensors[0].device}, expected {params[0].device}")


_shape = py.attrgetter("shape")
_dtype = py.attrgetter("dtype")
_device = py.attrgetter("device")


def _plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what lies in memory is the tensors' numbers, one after the other. A gradient's memory may be the
    negative of what it is, where autograd came by a conjugate.
    """
    return all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors))


def _as_noted(tensors: Sequence[torch.Tensor], table: _Table, place: int) -> bool:
    """Whether a list's tensors are what a table was made for, but for where they lie."""
    index = table.words.get_device()
    return (
        list(map(_shape, tensors)) == table.shapes
        and set(map(_dtype, tensors)) == {table.dtypes[place]}
        # A device's number takes half as long as the device; those that have none are told apart by it.
        and (
            set(map(torch.Tensor.get_device, tensors)) == {index}
            if index >= 0
            else set(map(_device, tensors)) == {table.words.device}
        )
        and _plain(tensors)
    )


def _fits(lists: tuple[Tensors, ...], table: _Table) -> bool:
    """Whether all but gradients, at a table's addresses, are what it was made for: memory may have gone to others
    since. It notes the objects.
    """
    for place, tensors in enumerate(lists):
        if place != 1:
            if not _as_noted(tensors, table, place):
                return False
            table.seen[place] = list(map(weakref.ref, tensors))
    return True


def _noted(start: tuple[Any, ...], lists: tuple[Tensors, ...], still: list[torch.Tensor]) -> _Table | None:
    """The table of these very objects, if they lie where they did: an eighth of the time of looking at all of each
    tensor. One that is still the same object has the shape, dtype and device that it had, but where its `data` was
    made another view of the same memory: that is not seen here.
    """
    device, places = still[0].device, None
    others = [list(tensors) for place, tensors in enumerate(lists) if place != 1]
    for key, table in list(_tables.items())[::-1]:  # a list: another thread may have steps of its own
        if key[0] != start:
            continue
        seen, _, *states = table.seen
        if all(same(noted, tensors, device) for noted, tensors in zip((seen, *states), others, strict=True)):
            places = known_addresses(still, device) if places is None else places
            if places == key[1]:
                _tables.move_to_end(key)
                return table
    return None


def _looked_up(
    start: tuple[Any, ...], lists: tuple[Tensors, ...], still: list[torch.Tensor], capturing: bool
) -> _Table | None:
    """The table of other objects at the same addresses."""
    key = start, addresses(still)
    found = _tables.get(key)
    if found is not None:
        _tables.move_to_end(key)
    elif capturing:  # `torch.cuda.graph` captures on a stream of its own, after what was queued
        found = next((x for (y, z), x in reversed(_tables.items()) if (y[1:], z) == (start[1:], key[1])), None)
    return found if found is not None and _fits(lists, found) else None


def _as_the_last(grads: list[torch.Tensor], table: _Table) -> bool:
    """Whether gradients are known to be as the last ones, but for where they lie."""
    try:
        # Guards end the process at one that has no strides, such as a nested tensor.
        return table.known is not None and bool(list(map(torch.Tensor.stride, grads))) and table.known(*grads)
    except (RuntimeError, TypeError):
        return False


def _guarded(grads: list[torch.Tensor]) -> Callable[..., bool] | None:
    """What knows gradients like these again, where there is such."""
    return None if _guards is None else check_of(_guards, grads)


def _table(lists: tuple[Tensors, ...], block: int, rounds: int, warps: int) -> _Table | None:
    """The table of these tensors, from the last time if nothing has moved; None if some are not plain."""
    params, grads, *states = lists
    grads, still = list(grads), [*params, *chain.from_iterable(states)]
    device = params[0].device
    cuda = device.type == "cuda"
    stream = 0
    if cuda:  # an object for it takes as long as a launch
        stream = torch.cuda.current_stream(device).cuda_stream if _stream is None else _stream(device.index)
    capturing = cuda and torch.cuda.is_current_stream_capturing()
    start = (stream, block, rounds, warps, tuple(map(len, lists)))
    found = _noted(start, lists, still) or _looked_up(start, lists, still, capturing)
    if found is not None and _as_the_last(grads, found):
        places = known_addresses(grads, device)
    else:
        places = addresses(grads)
        if found is not None and _as_noted(grads, found, 1):
            found.known = _guarded(grads)
        else:
            found = None
    if found is None:
        if not _plain([*still, *grads]):
            return None
        if capturing:
            raise RuntimeError("params or moments have new addresses: take one step before capturing")
        _check(*lists)
        key = start, addresses(still)
        found = _tables[key] = _build(lists, block, rounds, warps)
        _tables.move_to_end(key)
        while len(_tables) > TABLES:
            _tables.popitem(last=False)
    if places != found.addresses:
        if capturing:
            raise RuntimeError("grads have new addresses: take one step before capturing")
        # Never over the last ones, which a captured graph may read.
        found.grads = _sent(_staged(places, cuda), device)
        found.addresses = places
        found.together = found.aligned and aligned(places)
    if capturing:
        assert found.grads is not None
        _captured.append((found.words, found.grads))
    return found


def _staged(places: bytes, pinned: bool) -> torch.Tensor:
    """Addresses as int64, page-locked or not: written where they are to lie."""
    words = torch.empty(len(places) // 8, dtype=torch.int64, pin_memory=pinned)
    ctypes.memmove(words.data_ptr(), places, len(places))
    return words


def _sent(words: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Page-locked words on the device, from the stream's next kernel on. PyTorch's allocator gives their memory to
    nobody before the transfer is done.
    """
    return words.to(device, non_blocking=True)


def _build(lists: tuple[Tensors, ...], block: int, rounds: int, warps: int) -> _Table:
    params = lists[0]
    functions(params[0].device)  # has them compiled, if need be, before a graph is captured
    sizes = torch.tensor([x.numel() for x in params])
    large = int(sizes.sum()) >= LARGE * len(params)
    rounds, warps = rounds or (1 if large else 4), warps or (4 if large else 8)
    piece = block * rounds
    programs = (sizes + piece - 1) // piece
    total = int(programs.sum())
    staged = torch.zeros(len(params) * _ROW + cdiv(total, 2), dtype=torch.int64, pin_memory=params[0].is_cuda)
    rows = staged[: len(params) * _ROW].view(-1, _ROW)
    rows[:, 0] = programs.cumsum(0) - programs
    rows[:, 1] = sizes
    for place, tensors in enumerate((params, *lists[2:])):
        if tensors:
            rows[:, 2 + place] = torch.tensor([x.data_ptr() for x in tensors])
    owners = torch.arange(len(params), dtype=torch.int32).repeat_interleave(programs)
    staged[len(params) * _ROW :].view(torch.int32)[:total] = owners
    words = _sent(staged, params[0].device)
    return _Table(
        words,
        words[len(params) * _ROW :].view(torch.int32),
        total,
        not bool((rows[:, 2:6] % 16).any()),
        rounds,
        warps,
        tuple(tensors[0].dtype for tensors in lists if tensors),
        [x.shape for x in params],
        [[] if place == 1 else list(map(weakref.ref, tensors)) for place, tensors in enumerate(lists)],
        _guarded(list(lists[1])),
    )


def _launch(*given: Any) -> None:
    _launch_any(given[:5], given[5:])


def _launch_clipped(*given: Any) -> torch.Tensor:
    norm = _empty_norm(given[0])
    _launch_any(given[:5], (*given[5:], norm))
    return norm


def _empty_norm(params: Tensors) -> torch.Tensor:
    """Room for the norm of all gradients, 0 where there are no elements."""
    make = torch.empty if any(map(torch.Tensor.numel, params)) else torch.zeros
    return make((), dtype=torch.float32, device=params[0].device if params else None)


def _launch_any(lists: tuple[Tensors, ...], numbers: tuple[Any, ...]) -> None:
    """Of tensors that lie as they may; numbers as `launch_pieces` takes them."""
    params, _, *states = lists
    try:
        done = params and launch_pieces(lists, *numbers)
    except (AttributeError, TypeError):
        _check(*lists)  # says which is no tensor, such as the gradient of a parameter that was not used
        raise
    if done:
        torch.autograd.graph.increment_version([*params, *chain.from_iterable(states)])
        return
    _check(*lists)
    if not params:
        return
    dense = tuple([x.contiguous().resolve_neg() for x in tensors] for tensors in lists)
    _launch_any(dense, numbers)
    for place in (0, 2, 3, 4):
        for old, new in zip(lists[place], dense[place], strict=True):
            if new is not old:
                old.detach().copy_(new)


def launch_pieces(
    lists: tuple[Tensors, ...],
    count: torch.Tensor | None,
    rate: torch.Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    max_norm: float = 0.0,
    norm: torch.Tensor | None = None,
    block: int = BLOCK,
    rounds: int = 0,
    warps: int = 0,
) -> bool:
    """The launch in pieces of `rounds` · `block` elements, 0 for the usual; False, and nothing done, where a
    tensor is not plain. With `norm`, of clipped gradients, whose norm it then is.
    """
    table = _table(lists, block, rounds, warps)
    if table is None:
        return False
    if not table.programs:
        return True
    if norm is not None:
        _measure(table, norm, block)
    unbias1, unbias2 = (-math.expm1(step * math.log(x)) if x else 1.0 for x in (beta1, beta2))
    logs = [math.log(x) if x else -math.inf for x in (beta1, beta2)]
    if count is None and rate is not None:
        logs[0] = unbias1
    numbers = (
        lr if count is not None else lr / unbias1,
        1.0 - lr * weight_decay,
        1.0 - beta1,
        1.0 - beta2,
        unbias2**-0.5,
        eps,
        weight_decay,
        *logs,
        max_norm,
    )
    words = table.words
    alike = table.together, likeness((count, rate, norm))[0]
    launch = table.launches.get(alike)
    if launch is None:
        _refuse_to_capture(words.device)
        kinds = (count is not None, rate is not None, norm is not None)
        launch = table.launches[alike] = _prepare(table, *kinds, block)
    launch(
        words.device,
        words,
        table.grads,
        table.owners,
        words if count is None else count,
        words if rate is None else rate,
        words if norm is None else norm,
        numbers=(tuple(map(float, numbers)),),  # an integer would be compiled in
    )
    return True


def _refuse_to_capture(device: torch.device) -> None:
    """Raises where a kernel would be compiled and loaded while a graph is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("step, lr or clipping are of another kind than before: take one step before capturing")


def _measure(table: _Table, norm: torch.Tensor, block: int) -> None:
    """Fills the norm of all gradients of a table."""
    device, groups = norm.device, cdiv(table.programs, SQUARES)
    parts = torch.empty(groups, dtype=torch.float32, device=device)
    alike = table.together, likeness((norm, parts))[0]
    both = table.norms.get(alike)
    if both is None:
        _refuse_to_capture(device)
        shared = {"G": _TYPES[table.dtypes[1]], "ALIGNED": table.together, "PIECES": SQUARES, "num_warps": 4}
        squares = Launch(_squares, (groups,), table.programs, BLOCK=block, ROUNDS=table.rounds, **shared)
        root = Launch(_root, (1,), groups, BLOCK=min(power_of_2(groups), 8192), num_warps=16)
        both = table.norms[alike] = squares, root
    squares, root = both
    squares(device, table.words, table.grads, table.owners, parts)
    root(device, parts, norm)


def _prepare(table: _Table, count: bool, rate: bool, clip: bool, block: int) -> Launch:
    """The launch for a table: of words, grads, owners, count, rate and norm."""
    P, G, M, V = (_TYPES[x] for x in table.dtypes[:4])
    masters = len(table.dtypes) > 4
    return Launch(
        _step,
        (table.programs,),
        P=P,
        G=G,
        M=M,
        V=V,
        ALIGNED=table.together,
        MASTER=masters,
        EXACT=masters or tl.float32 == P,
        COUNT=count,
        RATE=rate,
        CLIP=clip,
        BLOCK=block,
        ROUNDS=table.rounds,
        num_warps=table.warps,
    )


_LISTS = (
    "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] masters,"
    " Tensor? count, Tensor? rate, int step, float lr, float beta1, float beta2, float eps, float weight_decay"
)
_adamw = operator(f"adamw({_LISTS}) -> ()", _launch, lambda *_: None)
_adamw_clipped = operator(
    f"adamw_clipped({_LISTS}, float max_norm) -> Tensor",
    _launch_clipped,
    lambda params, *_: _empty_norm(params),
)
