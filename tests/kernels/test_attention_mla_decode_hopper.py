"""Decoding from latent vectors by the kernel for Hopper: which vectors are loaded, who computes which columns.

Gluon has no interpreter: the kernel is played as a whole (`player.py`).
"""

from __future__ import annotations

import math

import pytest
import torch
from kernelmark.kernels.attention import _attention_mla_decode_hopper as hopper
from kernelmark.kernels.attention import _attention_varlen_hopper as varlen
from kernelmark.kernels.attention import attention_mla_decode as module

from .player import play

SCALE = 0.1


@pytest.fixture
def _played(monkeypatch):
    play(monkeypatch, (hopper, varlen))
    monkeypatch.setattr(varlen, "thread_barrier", lambda: None)


def draw(lengths, Sq, H, page):
    """q, a cache of scattered pages whose places behind each length hold no numbers, the table, lengths."""
    generator = torch.Generator().manual_seed(sum(lengths) + H)
    across = max(1, -(-max(lengths) // page))
    q = torch.randn(len(lengths), Sq, H, 576, generator=generator)
    cache = torch.full((len(lengths) * across, page, 576), math.nan)
    table = torch.randperm(len(lengths) * across, generator=generator).int().view(len(lengths), across)
    for b, length in enumerate(lengths):
        for place in range(length):
            number = int(table[b, place // page])
            cache[number, place % page] = torch.randn(576, generator=generator)
        table[b, -(-length // page) :] = 1 << 28
    return q, cache, table, torch.tensor(lengths, dtype=torch.int32)


def wanted(q, cache, table, lengths):
    B, Sq, H, _ = q.shape
    out = torch.zeros(B, Sq, H, 512, dtype=torch.float64)
    page = cache.shape[1]
    for b, length in enumerate(lengths.tolist()):
        seen = [cache[int(table[b, x // page]), x % page] for x in range(length)]
        for i in range(Sq):
            count = length - Sq + i + 1
            if count > 0:
                keys = torch.stack(seen[:count]).double()
                weights = (q[b, i].double() @ keys.T * SCALE).softmax(-1)
                out[b, i] = weights @ keys[:, :512]
    return out


def attend(q, cache, table, lengths, parts):
    B, Sq, H, _ = q.shape
    out = torch.full((B, Sq, H, 512), math.nan)
    if parts == 1:
        hopper.attend(q, cache, table, lengths, out, out, out, module.LOG2E * SCALE, 1)
        return out
    sums, levels = torch.full((B, Sq, H, parts, 512), math.nan), torch.full((B, Sq, H, parts), math.nan)
    hopper.attend(q, cache, table, lengths, out, sums, levels, module.LOG2E * SCALE, parts)
    assert not sums.isnan().any()
    highest = levels.amax(-1, keepdim=True)
    weights = torch.exp2(levels - torch.where(highest == -math.inf, 0.0, highest))
    total = weights.sum(-1, keepdim=True)
    return (sums * weights[..., None]).sum(3) / torch.where(total == 0, 1.0, total)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "Sq", "H", "page"),
    [
        ((64,), 1, 64, 64),
        ((200, 7), 1, 128, 64),
        ((130,), 3, 30, 16),
        ((65, 300), 2, 16, 32),
        ((256, 129), 1, 5, 128),
        ((2, 0, 1), 4, 7, 64),  # tokens that see nothing, a sequence without any
        ((191,), 70, 1, 64),  # more new tokens than a block has vectors
    ],
)
def test_right(lengths, Sq, H, page, parts):
    given = draw(lengths, Sq, H, page)
    torch.testing.assert_close(attend(*given, parts).double(), wanted(*given), rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("rise", [-4.0, 0.5, 2.0])
def test_maxima_that_rise(rise):
    """Toward the first vectors, which come last, by less than what is let pass, by more, and in single rows."""
    q, cache, table, lengths = draw((320,), 1, 64, 64)
    q[..., 0] = 1 / SCALE
    q[:, :, 5::7, 0] = 0
    for place in range(320):
        cache[int(table[0, place // 64]), place % 64, 0] = (320 - place) // 64 * rise * module.LOG2E
    given = q, cache, table, lengths
    torch.testing.assert_close(attend(*given, 1).double(), wanted(*given), rtol=1e-4, atol=1e-4)


def test_what_the_kernel_takes():
    def takes(q=(2, 1, 16), latent=512, columns=576, dtype=torch.bfloat16, page=64):
        cache = torch.empty(4, page, columns, dtype=dtype)
        return hopper.takes(torch.empty(*q, columns, dtype=dtype), cache, latent)

    assert takes()
    assert takes(q=(2, 3, 5), dtype=torch.float16, page=16)
    assert not takes(dtype=torch.float32)
    assert not takes(latent=256)
    assert not takes(columns=544)
    q, cache = torch.empty(2, 4, 3, 576, dtype=torch.bfloat16), torch.empty(4, 64, 576, dtype=torch.bfloat16)
    assert hopper.takes(q[:, :1], cache, 512)
    assert not hopper.takes(q[:, :, :2], cache, 512)  # tokens' heads are no rows of one stride
    assert hopper.takes(q[:, ::2][:, :1], cache, 512)
    assert not hopper.takes(q, torch.empty(4, 2, 64, 576, dtype=torch.bfloat16)[:, 0], 512)
    assert not hopper.takes(q, cache[:0], 512)


@pytest.mark.parametrize(
    ("programs", "tokens", "parts"),
    [
        (256, 4096, 1),  # two rounds, nearly full
        (2, 131072, 64),  # 66 have as many blocks
        (2, 2000, 16),  # of two blocks, none has fewer
        (1, 131072, 128),
        (128, 4096, 1),
        (100, 4096, 1),
        (180, 8192, 2),  # three rounds of half of the cache, not two of all of it
        (1, 64, 1),
        (1, 0, 1),
        (1000, 131072, 1),
    ],
)
def test_parts_of_a_cache(programs, tokens, parts):
    assert module.split(programs, tokens, hopper.KEYS, 132) == parts
