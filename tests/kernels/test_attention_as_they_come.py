"""One launch over chunks of keys that come while it runs, played as a whole (`player.py`): copies in a thread of
their own, late by chance, into memory that is no number before.
"""

from __future__ import annotations

import math
import random
import threading
import time
from itertools import product

import pytest
import torch
from kernelmark.kernels.attention import _as_they_come
from kernelmark.kernels.attention import _attention_hopper_forward as hopper
from kernelmark.kernels.attention._as_they_come import Chunks
from kernelmark.kernels.attention._chunks import chunks_of, coming, walks
from kernelmark.kernels.attention._tiling import output_like

from .player import SECONDS, play, stored


def await_word(word, number):
    """As the device does, but not for ever."""
    end = time.monotonic() + SECONDS
    asked.append(int(number))
    while (int(word.memory[0]) - int(number)) % (1 << 32) >> 31 and time.monotonic() < end:  # its sign, in 32 bits
        time.sleep(0.0005)
    assert time.monotonic() < end, "it never comes"


asked: list[int] = []


@pytest.fixture
def played(monkeypatch):
    """The counter, which launches share."""
    counter = torch.zeros(1, dtype=torch.int32)
    play(monkeypatch, (hopper,), counter=lambda q: counter, await_word=await_word, TABLE=32, FIELDS=4)
    monkeypatch.setattr(_as_they_come, "_write", write)
    asked.clear()
    return counter


def write(word, place, value):
    """As a stream does."""
    word[place : place + 1] = torch.tensor([value], dtype=torch.uint32)


def draw(B, H, Hkv, world, L, D, layout="bshd"):
    """The whole sequence: q, k, v."""
    generator = torch.Generator().manual_seed(world * L + D)
    return [stored(layout, B, heads, 2 * world * L, D, generator) for heads in (H, Hkv, Hkv)]


def rows_of(rank, world, L):
    return torch.cat([torch.arange(x * L, (x + 1) * L) for x in chunks_of(rank, world)])


def wanted(q, k, v, mask, places):
    """The output and the log-sum-exp in base 2 of rows at these places, in fp64."""
    q, k, v = q[:, :, places].double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if mask == "causal":
        s = s.masked_fill(torch.arange(k.shape[2]) > places[:, None], -math.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1) / math.log(2)


class Host:
    """A rank whose peers' chunks are copied by a thread, in the order of `coming`, behind each of which its word
    goes up.
    """

    def __init__(self, rank, world, mask, L, late=0.004):
        self.rank, self.world, self.mask, self.L = rank, world, mask, L
        self.late = random.Random(rank + L)
        self.most = late
        self.chunks = Chunks(rank, world, mask, L, hopper.KEYS, torch.device("cpu"))

    def call(self, q, k, v, section=2):
        """(output, log-sum-exp in base 2) of this rank's rows."""
        B, heads, S, D = k.shape
        L, out_of = self.L, rows_of(self.rank, self.world, self.L)
        q = self.rows(q, out_of)
        # Of each token its keys beside its values, as copy engines bring them.
        whole = torch.full((B, S, 2, heads, D), math.nan)
        parts = whole.permute(2, 0, 3, 1, 4)

        def bring(sequence, number):
            rows = slice(number * L, (number + 1) * L)
            for to, given in zip(parts, (k, v), strict=True):
                to[sequence, :, rows] = given[sequence, :, rows]

        def copies():
            for sequence, number in product(range(B), coming(self.rank, self.world, self.mask)):
                time.sleep(self.late.uniform(0, self.most))
                bring(sequence, number)
                self.chunks.came()

        for sequence, number in product(range(B), chunks_of(self.rank, self.world)):
            bring(sequence, number)
        signals = self.chunks.begin()
        thread = threading.Thread(target=copies, daemon=True)
        thread.start()
        out, lse = torch.full_like(output_like(q, v), math.nan), torch.full(q.shape[:3], math.nan)
        hopper.forward_as_they_come(q, *parts, out, lse, self.mask == "causal", section, *signals)
        thread.join()
        return out, lse

    @staticmethod
    def rows(q, places):
        """Of queries, stored in the order in which they are."""
        return q.transpose(1, 2)[:, places].transpose(1, 2)

    def check(self, q, k, v, section=2):
        out, lse = self.call(q, k, v, section)
        want = wanted(q, k, v, self.mask, rows_of(self.rank, self.world, self.L))
        for got, right in zip((out, lse), want, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("world", "rank"), [(w, r) for w in (2, 3, 4) for r in range(w)])
def test_right_in_every_rank(played, monkeypatch, world, rank, mask):
    """Grouped heads, several programs, and a chunk of one block."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 3)
    Host(rank, world, mask, 128).check(*draw(1, 4, 2, world, 128, 64))
    assert played.item() == 0


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(
    ("B", "H", "Hkv", "L", "D", "section"),
    [
        (1, 2, 1, 384, 64, 2),  # two tiles of 192 rows
        (1, 3, 1, 256, 64, 1),  # tiles of 192 begin before their chunk, or end behind it
        (2, 2, 1, 256, 40, 4),
        (1, 4, 4, 256, 128, 2),
        (2, 4, 1, 384, 96, 3),
        (1, 1, 1, 640, 72, 8),
    ],
)
def test_right(played, monkeypatch, mask, programs, B, H, Hkv, L, D, section):
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: programs)
    world = 2
    for rank in range(world):
        Host(rank, world, mask, L).check(*draw(B, H, Hkv, world, L, D), section)
    assert played.item() == 0


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "projection"])
@pytest.mark.parametrize("rank", [0, 2])
def test_any_layout_of_queries(monkeypatch, layout, rank):
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 2)
    Host(rank, 3, "causal", 256).check(*draw(2, 4, 2, 3, 256, 64, layout))


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("L", [128, 256, 384, 512])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_tiles_of_both_heights(played, monkeypatch, groups, L, mask):
    """Rows of a tile that are of the other chunk, or of none, are not written."""
    monkeypatch.setattr(hopper, "division", lambda *of: hopper.SMALLER if groups == 2 else hopper.DIVISIONS[64])
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 2)
    for rank in range(2):
        Host(rank, 2, mask, L).check(*draw(1, 2, 1, 2, L, 64))
    assert played.item() == 0


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("before", [0, 3, (1 << 31) - 3, (1 << 32) - 2])
def test_calls_go_on_counting(before):
    """A word is of the call that wrote it: the next call's rows do not take it for their own. Beyond 2^31, where
    the sign turns, and 2^32.
    """
    host = Host(1, 3, "causal", 128, late=0.01)
    host.chunks._count = before
    write(host.chunks._word, 0, before)
    for heads in (2, 1, 3):
        host.check(*draw(1, heads, 1, 3, 128, 64))
    assert host.chunks._count == (before + 3 * len(coming(1, 3, "causal"))) % (1 << 32)


@pytest.mark.usefixtures("played")
def test_a_chunk_is_waited_for_once(monkeypatch):
    """By a program, however many of its tiles need it; by those that need none not at all."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 1)
    host = Host(0, 3, "causal", 256)
    host.check(*draw(1, 3, 1, 3, 256, 64))
    assert asked[:: len(asked) // len(set(asked))] == [1, 2, 3, 4]
    asked.clear()
    host.chunks = Chunks(0, 1, "causal", 256, hopper.KEYS, torch.device("cpu"))
    host.world = 1
    host.check(*draw(1, 3, 1, 1, 256, 64))
    assert asked == []


@pytest.mark.usefixtures("played")
def test_each_sequence_waits_for_its_own_chunks(monkeypatch):
    """One after the other, as tiles come."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 1)
    Host(0, 2, "causal", 128).check(*draw(3, 1, 1, 2, 128, 64), section=1)
    assert asked[:: len(asked) // 6] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("B", "heads", "length", "D", "found"),
    [
        (1, 8, 1 << 20, 128, 1),  # come as fast as they are met
        (1, 32, 4096, 128, 4),
        (2, 32, 4096, 128, 1),  # sequences come one after the other already
        (1, 32, 1024, 128, 2),  # halves of 16 MiB
        (1, 32, 512, 128, 1),
        (1, 12, 4096, 128, 2),
        (1, 9, 4096, 128, 1),
        (1, 40, 4096, 128, 8),
    ],
)
def test_heads_that_would_come_too_slowly_come_in_parts(B, heads, length, D, found):
    assert _as_they_come.pieces(B, heads, length, D, 2) == found


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("place", range(1, 4))
def test_a_word_that_is_awaited_too_early_shows(monkeypatch, place):
    """So the tests above see a chunk that is not waited for."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 1)
    host = Host(1, 3, "causal", 128, late=0.05)
    late = walks(1, 3, "causal")[0].others
    begin = 32 + 8 + 2 * [count for _, count in late].index(place)
    host.chunks.memory[begin + 1] = place - 1
    out, _ = host.call(*draw(1, 1, 1, 3, 128, 64))
    assert out.isnan().any()
