"""Attention to chunks of keys as copy engines bring them, in one launch of the kernel for Hopper: an online
softmax goes on from chunk to chunk, so that there are no parts and nothing to merge.

Behind each chunk's copy the stream that copies writes a word, which goes up by one a chunk. The kernel's producers
wait for it before they ask for a chunk's first block (`_attention_hopper_forward.py`). Copies are in one order, so
that the word says of all chunks whether they are there. It goes on from call to call: what an earlier call wrote
is always less than what a later one waits for, and nothing has to be set back. (Numbers are compared by their
difference: only a word that nobody wrote for 2^31 chunks would be mistaken.)

That a kernel waits which may hold all multiprocessors is no danger for three reasons. Copies and words need none:
they are the copy engines' and the stream's own. They are queued before the kernel is, so that no queue which
streams share has them behind it. And it starts behind the meeting of all ranks that says that their keys lie
there, so that copies wait for nothing else.

A CUDA graph would write the same numbers at each replay, and a captured write may be a kernel: what is captured
takes the other way (`attention_context_parallel.py`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _dispatch
from ._chunks import TABLE, coming, table, walks
from ._context_parallel import Signals
from .attention import _check, _natural

try:
    from torch._C._distributed_c10d import _SymmetricMemory

    _write: Any = _SymmetricMemory.stream_write_value32
except (ImportError, AttributeError):  # a PyTorch that has none
    _write = None


HEADS = 8
"""Key heads of which two bytes a number come, at .377e12 bytes a second between two H200, as fast as a tile of 128
rows meets them, at 770e12 operations a second of 132 multiprocessors.
"""
PIECE = 8 << 20
"""Bytes of a copy that takes as long as the host takes to queue the next one, at least."""


class Chunks:
    """The word and the table of one rank, mask and length of chunks: in memory of a device, int32."""

    def __init__(self, rank: int, world: int, mask: str, length: int, keys: int, device: torch.device) -> None:
        """For blocks of so many keys, which divide the length."""
        line = [0, len(coming(rank, world, mask)), *[0] * (TABLE - 2)]
        numbers = line + table(walks(rank, world, mask), length, keys)
        self.memory = torch.tensor(numbers, dtype=torch.int32, device=device)
        self._word = self.memory[:1].view(torch.uint32)
        self._count = 0

    def begin(self) -> Signals:
        """Of a call whose chunks come next."""
        return Signals(self.memory, self._count - (self._count >> 31 << 32))

    def came(self) -> None:
        """One more, of one sequence, has come when what is queued in the current stream is done."""
        self._count = (self._count + 1) % (1 << 32)
        _write(self._word, 0, self._count)


@functools.lru_cache(256)
def _chunks(*of: Any) -> Chunks:
    """The same ones for all calls: a word must be known to whoever counts on."""
    return Chunks(*of)


def chunks(q: torch.Tensor, mask: str, rank: int, world: int) -> Chunks | None:
    """For a rank's queries (B, H, 2·L, D), keys and values of the same D and dtype: None where the kernel does not
    take these, or a graph is captured.
    """
    hopper = _dispatch.hopper_modules(q.device) if "forward" in _dispatch.HOPPER else None
    if hopper is None or _write is None or torch.cuda.is_current_stream_capturing():
        return None
    keys = hopper.common.KEYS
    length, odd = divmod(q.shape[2], 2)
    if odd or length % keys or not hopper.common.fits(q, q, q):
        return None
    return _chunks(rank, world, mask, length, keys, q.device)


def pieces(B: int, heads: int, length: int, D: int, itemsize: int) -> int:
    """In how many parts of the key heads a chunk of so many tokens comes. Where they are many it takes longer to
    come than a tile takes to meet it: then it is better that some heads have all their chunks soon.
    """
    found = 1
    # Of one sequence only, whose heads can be taken for sequences. No copies so short that the host is late.
    while B == 1 and heads // found > HEADS and heads // found % 2 == 0:
        if 2 * heads * length * D * itemsize // (2 * found) < PIECE:
            break
        found *= 2
    return found


def attention_as_they_come(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, signals: Signals
) -> torch.Tensor:
    """Writes attention of a rank's two chunks q (B, H, 2·L, D) to `out`, contiguous and of q's shape, and gives
    its natural log-sum-exp (B, H, 2·L). k and v (B, Hkv, 2·P·L, D) hold those of all ranks, of which those of
    others come as `Chunks` counts them. For what `chunks` has approved of.
    """
    _check(q, k, v, mask == "causal", 0, None, 0.0)
    hopper = _dispatch.hopper_modules(q.device)
    assert hopper is not None
    level = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    section = _dispatch._section(q, k, mask == "causal", 0)
    hopper.forward.forward_as_they_come(q, k, v, out, level, mask == "causal", section, *signals)
    return _natural(level)
