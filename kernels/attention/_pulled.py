"""K and V of all ranks by copy engines: what the first call needs first, the rest beside it.

Every memory here is (B, tokens, 2, Hkv, D), of each token its keys beside its values: a chunk of a sequence is one
piece of memory, so that it takes one copy. Attention sees it as (2, B, Hkv, tokens, D), by strides.

A rank pulls one chunk at a time. At each step all ranks pull from the one as many places away, so no two from the
same, as long as they take as long; nothing makes them wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..collective._peers import Peers
from ._context_parallel import chunks_of, scattered

FIRST, REST = 1, 2
"""Copies one after another, in the order in which they are needed."""


def shared_bytes(k: torch.Tensor, world: int, kept: bool) -> int:
    """What a rank's place must hold for its k: its own K and V, and those of all where these are not kept."""
    return 2 * k.numel() * k.element_size() * (1 if kept else world)


class Pulled:
    """Chunks of peers, each pulled from where that peer has laid it (`_context_parallel.Arriving`).

    What is `kept` for a backward pass lies in memory of its own, as the next call uses places anew. Else chunks
    come to the place itself, where a rank's own are at once what peers pull and what it reads.
    """

    def __init__(self, peers: Peers, kept: bool = True) -> None:
        self._peers, self._kept = peers, kept
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

        def bring(rank: int, half: int) -> None:
            """Of each sequence a piece of memory in one, which is what an engine copies."""
            for to, given in zip(whole[:, chunks_of(rank, world)[half]], laid(rank)[:, half], strict=True):
                to.copy_(given)

        whole = k.new_empty(all_) if kept else peers.place(peers.rank, all_, k.dtype)
        places = laid(peers.rank).unbind(3)
        for to, given in zip(places, (k, v), strict=True):
            _copy(to, given.unflatten(2, (2, -1)).permute(0, 2, 3, 1, 4))
        peers.meet(0)

        # Early chunks from the rank before, and on downwards: so earlier ranks' are first, which are needed first.
        # Late ones from the rank after, and on upwards: who needs fewer ends sooner, and no two meet at one.
        before, after = peers.others()[::-1], peers.others()
        with peers.beside(FIRST):
            for rank in before:
                if mask == "full" or rank < peers.rank:
                    bring(rank, 0)
        with peers.beside(REST):
            peers.wait(FIRST)  # it has the links to itself
            for rank in before:
                if mask != "full" and rank > peers.rank:
                    bring(rank, 0)
            for rank in after:
                if mask == "full" or rank > peers.rank:  # the late chunks of earlier ranks come after all of ours
                    bring(rank, 1)
        for half in (0, 1) if kept else ():
            bring(peers.rank, half)
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
