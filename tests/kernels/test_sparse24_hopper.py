"""Products of few rows with 2:4 weights for Hopper, played in fp32 (`player.py`)."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.matmul import _matmul_hopper, _sparse24_hopper
from kernelmark.suite.operators.sparse24_matmul import pruned

from .player import Tiles, nothing, play


def order():
    """Of 128 columns, where each lies that the matrix units see: as the table in `_sparse24_hopper.py` says it."""
    return torch.arange(128).view(4, 8, 2, 2).permute(1, 2, 0, 3).reshape(128)


def selected(pair, code):
    """What the PTX of `_select` makes of a word of two values and four bits: two words of two numbers."""
    first, second = (code << 3) & 24, (code << 1) & 24
    selector = (0x54 << first) ^ (0x76 << second) ^ 0x44444444
    held = [pair >> (8 * i) & 255 for i in range(4)] + [0] * 4

    def permuted(selector):
        return sum(held[selector >> (4 * i) & 7] << (8 * i) for i in range(4))

    return permuted(selector & 0xFFFF), permuted(selector >> 16)


def placed(pairs, positions, dtype, operand):
    """The operand in the order in which the matrix units see K, of values in bf16."""
    values = pairs.as_subclass(torch.Tensor).int().contiguous().view(torch.bfloat16).float().view(64, 32, 2)
    shifts = torch.arange(0, 32, 4)
    codes = (positions.as_subclass(torch.Tensor).long()[:, :, None] >> shifts & 15).view(64, 32)
    dense = torch.zeros(64, 32, 4)
    for nth, place in enumerate((codes & 3, codes >> 2)):  # the second first would do too: they differ
        dense.scatter_add_(2, place[:, :, None], values[:, :, nth : nth + 1])
    return dense.view(64, 128)[:, order()]


def test_bytes_are_put_where_they_belong():
    """By PTX's rules for `prmt`, all six pairs of places."""
    for first in range(4):
        for second in range(first + 1, 4):
            dense = [0, 0, 0, 0]
            dense[first], dense[second] = 0x1234, 0xABCD
            got = selected(0xABCD1234, first | second << 2)
            assert got == (dense[0] | dense[1] << 16, dense[2] | dense[3] << 16)


def test_the_order_of_columns():
    x = torch.randn(3, 384)
    assert torch.equal(_sparse24_hopper.ordered(x).view(3, 3, 128), x.view(3, 3, 128)[:, :, order()])


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize(("M", "N", "K"), [(3, 200, 640), (17, 128, 1024), (40, 130, 128), (5, 800, 256)])
def test_right(monkeypatch, M, N, K, programs):
    def tiles(x, shape, strides, block, layout):
        return Tiles(x, *block)

    play(
        monkeypatch, (_matmul_hopper, _sparse24_hopper), keep=("_order",),
        TensorMap=tiles, _layout=nothing, product_layout=nothing, thread_barrier=nothing,
        words_layout=nothing, placed=placed,
    )  # fmt: skip
    for name in ("Work", "add_up"):  # what each module took from the other is what is played there
        monkeypatch.setattr(_sparse24_hopper, name, getattr(_matmul_hopper, name))
    monkeypatch.setattr(_sparse24_hopper, "multiprocessors", lambda x: programs)
    x, (weight, values, positions) = torch.randn(M, K), pruned(torch.randn(N, K).bfloat16())
    out = torch.full((M, N), torch.nan)
    assert _sparse24_hopper.fits(values, positions)
    _sparse24_hopper.few_rows(x, values, positions, out)
    want = x.double() @ weight.double().T
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-4)


def test_what_fits():
    _, values, positions = pruned(torch.randn(8, 256).bfloat16())
    assert _sparse24_hopper.fits(values, positions)
    assert not _sparse24_hopper.fits(values[:, :120].contiguous(), positions[:, :30].contiguous())
    assert not _sparse24_hopper.fits(values[:, :64], positions[:, :16])
    assert not _sparse24_hopper.fits(values.flatten()[8:-120].view(7, 128).clone()[:, 4:], positions[:7])
