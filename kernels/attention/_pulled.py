"""K and V of all ranks by copy engines: what the first call needs first, the rest beside it.

Every memory here is (B, tokens, 2, Hkv, D), of each token its keys beside its values: a chunk of a sequence is one
piece of memory, so that it takes one copy. Attention sees it as (2, B, Hkv, tokens, D), by strides.

A rank pulls one chunk at a time, in an order that `_chunks` says; nothing makes ranks wait for one another. A
kernel may wait for each chunk by itself (`_as_they_come`): then sequences come one after the other, as it takes
them, and a word follows each copy. Else all sequences' early chunks are first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from ..collective._peers import Peers
from ._as_they_come import Chunks
from ._chunks import chunks_of, coming, holder
from ._context_parallel import Signals, scattered

FIRST, REST = 21, 22
"""Streams of copies one after another, in the order in which they are needed. Nothing else is queued there: what a
kernel waits for must not be behind what waits for the kernel's multiprocessors.
"""


def shared_bytes(k: torch.Tensor, world: int, kept: bool) -> int:
    """What a rank's place must hold for its k: its own K and V, and those of all where these are not kept."""
    return 2 * k.numel() * k.element_size() * (1 if kept else world)


class Pulled:
    """Chunks of peers, each pulled from where that peer has laid it (`_context_parallel.Arriving`).

    What is `kept` for a backward pass lies in memory of its own, as the next call uses places anew. Else chunks
    come to the place itself, where a rank's own are at once what peers pull and what it reads. Given `chunks`,
    they are counted as they come.
    """

    def __init__(self, peers: Peers, kept: bool = True, chunks: Chunks | None = None) -> None:
        self._peers, self._kept, self._chunks = peers, kept, chunks
        self.signals: Signals | None = None
        self._early = chunks_of(peers.rank, peers.world)[0]

    def start(self, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
        peers, world, kept = self._peers, self._peers.world, self._kept
        B, heads, rows, D = k.shape
        # By sequence and chunk, of a rank's two or of all.
        own, all_ = ((B, chunks, rows // 2, 2, heads, D) for chunks in (2, 2 * world))

        def laid(rank: int) -> torch.Tensor:
            """A rank's two chunks where that rank has laid them."""
            if kept:
                return peers.place(rank, own, k.dtype)
            early, late = chunks_of(rank, world)
            return peers.place(rank, all_, k.dtype)[:, early : late + 1 : late - early]

        def bring(number: int, sequences: range) -> None:
            """Of each sequence a piece of memory in one, which is what an engine copies."""
            rank, half = holder(number, world)
            for i in sequences:
                whole[i, number].copy_(laid(rank)[i, half])

        whole = k.new_empty(all_) if kept else peers.place(peers.rank, all_, k.dtype)
        places = laid(peers.rank).unbind(3)
        for to, given in zip(places, (k, v), strict=True):
            _copy(to, given.unflatten(2, (2, -1)).permute(0, 2, 3, 1, 4))
        peers.meet(0)

        numbers = coming(peers.rank, world, mask)
        if self._chunks is not None:
            self.signals = self._chunks.begin()
            with peers.beside(FIRST):
                for i, number in product(range(B), numbers):
                    bring(number, range(i, i + 1))
                    self._chunks.came()
        else:
            with peers.beside(FIRST):
                for number in numbers[: self._early]:
                    bring(number, range(B))
            with peers.beside(REST):
                peers.wait(FIRST)  # it has the links to itself
                for number in numbers[self._early :]:
                    bring(number, range(B))
        for number in chunks_of(peers.rank, world) if kept else ():
            bring(number, range(B))
        return whole.flatten(1, 2).permute(2, 0, 3, 1, 4)

    def wait(self, chunks: int) -> None:
        self._peers.wait(FIRST)
        if chunks > self._early + 1:
            self._peers.wait(REST)

    def end(self) -> None:
        self._peers.meet(1)  # all have pulled: the next call may lay its own

    def give_back(
        self, dk: torch.Tensor, dv: torch.Tensor, length: int
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        return scattered(dk, dv, length)


def _copy(to: torch.Tensor, given: torch.Tensor) -> None:
    """As numbers of 8 bytes where both can be seen so: what a strided copy takes goes by how many there are."""
    each = 8 // to.element_size()
    if all(
        x.stride(-1) == 1
        and x.data_ptr() % 8 == 0
        and all(n % each == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in (to, given)
    ):
        to, given = to.view(torch.int64), given.view(torch.int64)
    to.copy_(given)
