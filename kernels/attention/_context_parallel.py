"""Attention of one sequence over several GPUs: two ways to bring queries and keys together. How it is cut, and in
which order chunks come, is said by `_chunks`.

* `gathered`: all ranks' K and V, full-size tiles and no merges; (n-1)/n of K and V in memory beside a rank's own.
  Where copy engines bring them (`_pulled`) and a kernel can wait for them, one call attends to chunks as they come
  (`_as_they_come`). Else it is one call for each of a rank's two chunks, over the keys up to its end: most come
  while the early chunk is attended to. The backward pass keeps them, and has the chunks' gradients with
  themselves computed while those of other ranks' keys are added up.
* `ring`: K and V go round, a pair of chunks a step, and outputs over parts of the keys are merged by their
  log-sum-exp. Two pairs of chunks in memory, whatever the number of GPUs; the backward pass goes round once more.

Both are given what attends, an `Attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ._chunks import chunks_of


class Attention(NamedTuple):
    """Attention of q to k and v under a mask, the last query and the last key being in one place.

    `forward(out, q, k, v, mask)` writes the output and gives its natural log-sum-exp. `backward(grad, q, k, v,
    out, lse, mask)` gives the gradients in q, k and v of an output over these keys and others, as far as these
    have a part in it. `merge(out, level, part, lse)` adds the output over further keys to one and its log-sum-exp,
    in place; `part` and `lse` are contiguous. `as_they_come(out, q, k, v, mask, signals)` is `forward` of a rank's
    two chunks of queries and all chunks of keys, for which it waits by itself.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str], torch.Tensor]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    merge: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    as_they_come: Callable[..., torch.Tensor] | None = None


class Signals(NamedTuple):
    """What a kernel waits by: a word and a table behind it in memory, and what the word was before the call."""

    memory: torch.Tensor
    begun: int


class Arriving(Protocol):
    """All ranks' K and V on their way."""

    signals: Signals | None
    """What a kernel can wait for them by, from `start` on; None where only what is queued behind `wait` can."""

    def start(self, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
        """Of this rank's chunks, (B, Hkv, 2·L, D) each, memory for those of all, (2, B, Hkv, 2·P·L, D) by any
        strides, which will hold what a call of this mask reads, until `end` if no gradients are asked for.
        """
        ...

    def wait(self, chunks: int) -> None:
        """What is queued from here on finds so many first chunks there."""
        ...

    def end(self) -> None:
        """All has been waited for."""
        ...

    def give_back(
        self, dk: torch.Tensor, dv: torch.Tensor, length: int
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Adds up all ranks' gradients in the first keys of the sequence, each (B, Hkv, chunks·L, D), beside what
        is queued next; what is given waits for those in a rank's own two chunks.
        """
        ...


class AtOnce:
    """By one collective of the default process group."""

    signals: Signals | None = None

    def start(self, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
        world, own = dist.get_world_size(), torch.stack((k, v))
        flat = own.new_empty((world * own.shape[0], *own.shape[1:]))
        dist.all_gather_into_tensor(flat, own)
        halves = [x.chunk(2, -2) for x in flat.chunk(world)]
        return torch.cat([x[0] for x in halves] + [x[1] for x in reversed(halves)], -2)

    def wait(self, chunks: int) -> None:
        """They are there."""

    def end(self) -> None:
        """Nothing is left."""

    def give_back(
        self, dk: torch.Tensor, dv: torch.Tensor, length: int
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        return scattered(dk, dv, length)


class Brought:
    """K and V as another way brought them to its first call, again and again; nothing is sent after that, and
    gradients in other ranks' keys stay here. What computes so computes as much as with communication.
    """

    def __init__(self, first: Arriving) -> None:
        self._first = first
        self._whole: torch.Tensor | None = None
        self.signals: Signals | None = None

    def start(self, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
        if self._whole is None:
            self._whole = self._first.start(k, v, mask)
            self.signals = self._first.signals
            self._first.wait(2 * dist.get_world_size())
            self._first.end()
        return self._whole

    def wait(self, chunks: int) -> None:
        """They are there."""

    def end(self) -> None:
        """Nothing is left."""

    def give_back(
        self, dk: torch.Tensor, dv: torch.Tensor, length: int
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part alone of the gradients in its two chunks."""
        shape = (*dk.shape[:2], length, dk.shape[3])

        def own(x: torch.Tensor) -> torch.Tensor:
            chunks = x.split(length, 2)
            numbers = chunks_of(dist.get_rank(), dist.get_world_size())
            return torch.cat([chunks[i] if i < len(chunks) else x.new_zeros(shape) for i in numbers], 2)

        return lambda: (own(dk), own(dv))


def gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: str,
    attention: Attention,
    arriving: Arriving | None = None,
) -> torch.Tensor:
    """Attention of this rank's q (B, H, 2·L, D) to all ranks' k and v (B, Hkv, 2·L, D): like q.

    Raises ValueError for an odd length.
    """
    _chunk(q)
    out: torch.Tensor = _Gathered.apply(q, k, v, mask, attention, arriving or AtOnce())
    return out


def _chunk(q: torch.Tensor) -> int:
    if q.shape[2] % 2:
        raise ValueError(f"q has {q.shape[2]} rows, expected two chunks of the same length")
    return q.shape[2] // 2


class _Gathered(torch.autograd.Function):
    """Backward, every rank has gradients in the keys that it saw; each owner gets the sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: str,
        attention: Attention,
        arriving: Arriving,
    ) -> torch.Tensor:
        length, rank, world = _chunk(q), dist.get_rank(), dist.get_world_size()
        whole = arriving.start(k, v, mask)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if arriving.signals is not None and attention.as_they_come is not None:
            lse = attention.as_they_come(out, q, whole[0], whole[1], mask, arriving.signals)
            levels = [lse] if mask == "full" else [*lse.split(length, 2)]
            arriving.wait(2 * world)
        elif mask == "full":
            arriving.wait(2 * world)
            levels = [attention.forward(out, q, whole[0], whole[1], mask)]
        else:
            levels = []
            halves = zip(*(x.split(length, 2) for x in (out, q)), chunks_of(rank, world), strict=True)
            for to, own, number in halves:
                arriving.wait(number + 1)
                levels.append(attention.forward(to, own, *whole[..., : (number + 1) * length, :], mask))
        arriving.end()
        ctx.save_for_backward(q, k, v, whole, out, *levels)
        ctx.given = mask, attention, arriving
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]  # theirs takes *grads
        q, k, v, whole, out, *levels = ctx.saved_tensors
        mask, attention, arriving = ctx.given
        length = _chunk(q)
        if mask == "full":
            dq, dk, dv = attention.backward(grad, q, whole[0], whole[1], out, levels[0], mask)
            return dq, *arriving.give_back(dk, dv, length)(), None, None, None
        # First each chunk with all keys before it: as many scores on every rank, so that none waits for another.
        # The late chunk sees all that the early one does.
        before: list[torch.Tensor | None] = [None, None]
        sums: tuple[torch.Tensor, ...] = ()
        for half, number in reversed([*enumerate(chunks_of(dist.get_rank(), dist.get_world_size()))]):
            if number:
                own = slice(half * length, (half + 1) * length)
                seen = whole[..., : number * length, :]
                given = grad[:, :, own], q[:, :, own], *seen, out[:, :, own], levels[half]
                before[half], *found = attention.backward(*given, "full")
                for total, more in zip(sums, found, strict=False):
                    total[:, :, : number * length] += more
                sums = sums or tuple(found)
        given_back = arriving.give_back(*sums, length)
        # Then, while these are added up, both chunks with themselves, in one call.
        given = (*(_as_batches(x, length) for x in (grad, q, k, v, out)), torch.stack(levels, 1).flatten(0, 1))
        dq, dk, dv = (_as_one(x) for x in attention.backward(*given, mask))
        for half, part in enumerate(before):
            if part is not None:
                dq[:, :, half * length : (half + 1) * length] += part
        return dq, *(x + y for x, y in zip((dk, dv), given_back(), strict=True)), None, None, None


def _as_batches(x: torch.Tensor, length: int) -> torch.Tensor:
    """(B, heads, 2·L, D) as (2·B, heads, L, D); of one sequence no copy."""
    return x.unflatten(2, (2, length)).movedim(2, 1).flatten(0, 1)


def _as_one(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_as_batches`."""
    return x.unflatten(0, (-1, 2)).movedim(1, 2).flatten(2, 3)


def scattered(dk: torch.Tensor, dv: torch.Tensor, length: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """`Arriving.give_back` by one reduce-scatter of the default process group."""
    world = dist.get_world_size()
    parts = dk.new_empty((world, 2, *dk.shape[:2], 2 * length, dk.shape[3]))
    for rank in range(world):
        for half, number in enumerate(chunks_of(rank, world)):
            place = parts[rank][..., half * length : (half + 1) * length, :]
            if number * length < dk.shape[2]:
                for to, given in zip(place, (dk, dv), strict=True):
                    to.copy_(given[:, :, number * length : (number + 1) * length])
            else:
                place.zero_()
    own = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(own, parts.flatten(0, 1), async_op=True)

    def wait() -> tuple[torch.Tensor, torch.Tensor]:
        work.wait()
        return own[0], own[1]

    return wait


Send = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Sends to the next rank; what is given waits for what the one before sends."""


def ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: str,
    attention: Attention,
    send: Send | None = None,
) -> torch.Tensor:
    """As `gathered`, with K and V going round. Raises ValueError for an odd length."""
    _chunk(q)
    out: torch.Tensor = _Ring.apply(q, k, v, mask, attention, send or _send_on)
    return out


def stay(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What is called for sending, and sends nothing: a rank's own keys stand for those of others."""
    return lambda: tensor


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: str,
        attention: Attention,
        send: Send,
    ) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        level = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        travelling = torch.stack((k, v))
        for step in range(dist.get_world_size()):
            arriving = send(travelling) if step + 1 < dist.get_world_size() else None
            for rows, keys, part in _visible(step, q.shape[2] // 2, mask):
                found = torch.empty_like(q[:, :, rows], memory_format=torch.contiguous_format)
                lse = attention.forward(found, q[:, :, rows], *travelling[:, :, :, keys], part)
                attention.merge(out[:, :, rows], level[:, :, rows], found, lse)
                del found  # the next part's memory
            if arriving is not None:
                travelling = arriving()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, level)
        ctx.given = mask, attention, send
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]  # theirs takes *grads
        q, k, v, result, level = ctx.saved_tensors
        mask, attention, send = ctx.given
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        travelling = torch.stack((k, v))
        owed = torch.zeros(travelling.shape, dtype=torch.float32, device=q.device)
        for step in range(dist.get_world_size()):
            arriving = send(travelling) if step + 1 < dist.get_world_size() else None
            for rows, keys, part in _visible(step, q.shape[2] // 2, mask):
                own = (x[:, :, rows] for x in (result, level))
                given = grad[:, :, rows], q[:, :, rows], *travelling[:, :, :, keys], *own
                found = attention.backward(*given, part)
                dq[:, :, rows] += found[0]
                owed[0][:, :, keys] += found[1]
                owed[1][:, :, keys] += found[2]
            # Gradients go round with their keys and come home with the last step.
            owed = send(owed)()
            if arriving is not None:
                travelling = arriving()
        return dq.to(q.dtype), owed[0].to(k.dtype), owed[1].to(v.dtype), None, None, None


def _send_on(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return lambda: tensor
    tensor = tensor.contiguous()
    arriving = torch.empty_like(tensor)
    both = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % world),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % world),
    ]
    works = dist.batch_isend_irecv(both)

    def wait() -> torch.Tensor:
        for x in works:
            x.wait()
        return arriving

    return wait


def _visible(step: int, length: int, mask: str) -> list[tuple[slice, slice, str]]:
    """Rows of q, keys of the pair that arrived with a step, and the mask between them, where any is visible."""
    rank, world = dist.get_rank(), dist.get_world_size()
    source = (rank - step) % world
    whole = slice(0, 2 * length)
    if mask == "full":
        return [(whole, whole, "full")]
    first, second = slice(0, length), slice(length, 2 * length)
    if source == rank:  # each chunk its own, and the late one the early one: aligned at the end, that is causal
        return [(first, first, "causal"), (second, first, "full"), (second, second, "causal")]
    # Of an earlier rank the early chunk comes before both of ours; of a later one, both come before our late one.
    return [(whole, first, "full")] if source < rank else [(second, whole, "full")]


def merge(out: torch.Tensor, level: torch.Tensor, part: torch.Tensor, lse: torch.Tensor) -> None:
    """`Attention.merge` of an `out` and `level` in fp32 or wider, on any device."""
    lse = lse.to(level.dtype)
    together = torch.logaddexp(level, lse)
    out.mul_((level - together).exp().nan_to_num_(0.0)[..., None])
    # In one step: `part` in fp32, and its product, would be as large as all that a rank holds beside.
    out.addcmul_(part, (lse - together).exp()[..., None])
    level.copy_(together)


class Held(NamedTuple):
    """Bytes that a rank holds at most in a forward pass, without log-sum-exps and what its allocator rounds up."""

    inputs: int
    """q, k and v."""
    keys: int
    """K and V of other ranks, with those that lie beside the inputs to be sent, in memory shared or not."""
    output: int
    """The output; of a ring with what it is made of."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def held(
    B: int,
    H: int,
    Hkv: int,
    S: int,
    D: int,
    world: int,
    itemsize: int,
    form: str,
    kept: bool,
) -> Held:
    """Of `form` "gathered" (by copy engines) or "ring", over S tokens in all; `kept`: for a backward pass."""
    queries, keys = (B * heads * S // world * D * itemsize for heads in (H, Hkv))
    if form == "ring":
        # A pair that is attended to and one that arrives; fp32 sums, and the part over the keys of one step.
        return Held(queries + 2 * keys, 4 * keys, queries * 4 // itemsize + queries)
    # Without gradients all keys lie where peers read a rank's own; else beside them.
    return Held(queries + 2 * keys, 2 * keys * (world + kept), queries)
