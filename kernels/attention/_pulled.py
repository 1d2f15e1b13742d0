"""K and V of all ranks by copy engines: what the first call needs first, the rest beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..collective._peers import Peers
from ._context_parallel import chunks_of, scattered

FIRST, REST = 1, 2
"""Copies beside one another, in the order in which they are needed."""


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
        peers, length, world = self._peers, k.shape[2] // 2, self._peers.world
        shape, all_ = (2, *k.shape), (2, *k.shape[:2], 2 * world * length, k.shape[3])

        def chunk(whole: torch.Tensor, rank: int, half: int) -> torch.Tensor:
            """A rank's chunk where all lie in order."""
            at = chunks_of(rank, world)[half] * length
            return whole[..., at : at + length, :]

        def laid(rank: int, half: int) -> torch.Tensor:
            """A rank's chunk where that rank has laid it."""
            if not self._kept:
                return chunk(peers.place(rank, all_, k.dtype), rank, half)
            return peers.place(rank, shape, k.dtype)[..., half * length : (half + 1) * length, :]

        def bring(rank: int, half: int) -> None:
            """Of each head a piece of memory in one, which is what an engine copies."""
            target, source = (x.flatten(0, -3) for x in (chunk(whole, rank, half), laid(rank, half)))
            for to, given in zip(target, source, strict=True):
                to.copy_(given)

        whole = k.new_empty(all_) if self._kept else peers.place(peers.rank, all_, k.dtype)
        for half in (0, 1):
            for to, given in zip(laid(peers.rank, half), (k, v), strict=True):
                to.copy_(given[:, :, half * length : (half + 1) * length])
        peers.meet(0)

        others = peers.others()
        with peers.beside(FIRST):
            for rank in others:
                if mask == "full" or rank < peers.rank:
                    bring(rank, 0)
        with peers.beside(REST):
            peers.wait(FIRST)  # it has the links to itself
            for rank in others:
                if mask != "full" and rank > peers.rank:
                    bring(rank, 0)
            for rank in others:
                if mask == "full" or rank > peers.rank:  # the late chunks of earlier ranks come after all of ours
                    bring(rank, 1)
        for half in (0, 1) if self._kept else ():
            bring(peers.rank, half)
        return whole

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
