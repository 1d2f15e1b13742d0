"""K and V of all ranks by copy engines: what the first call needs first, the rest beside it."""

from __future__ import annotations

import torch

from ..collective._peers import Peers
from ._context_parallel import chunks_of

FIRST, REST = 1, 2
"""Copies beside one another, in the order in which they are needed."""


class Pulled:
    """Chunks of peers, each pulled from where that peer has laid it (`_context_parallel.Arriving`)."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._early = chunks_of(peers.rank, peers.world)[0]

    def start(self, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
        peers, length, shape = self._peers, k.shape[2] // 2, (2, *k.shape)
        whole = k.new_empty((*shape[:-2], 2 * peers.world * length, shape[-1]))
        own = peers.place(peers.rank, shape, k.dtype)
        for place, given in zip(own, (k, v), strict=True):
            place.copy_(given)
        peers.meet(0)

        def bring(rank: int, half: int) -> None:
            """A chunk: of each head a piece of memory in one, which is what an engine copies."""
            at = chunks_of(rank, peers.world)[half] * length
            there = own if rank == peers.rank else peers.place(rank, shape, k.dtype)
            target = whole[..., at : at + length, :].flatten(0, -3)
            source = there[..., half * length : (half + 1) * length, :].flatten(0, -3)
            for to, given in zip(target, source, strict=True):
                to.copy_(given)

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
        for half in (0, 1):
            bring(peers.rank, half)
        return whole

    def wait(self, chunks: int) -> None:
        self._peers.wait(FIRST)
        if chunks > self._early + 1:
            self._peers.wait(REST)

    def end(self) -> None:
        self._peers.meet(1)  # all have pulled: the next call may lay its own
