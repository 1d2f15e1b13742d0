"""Products of few rows with MXFP4 weights for Hopper, played in fp32 (`player.py`)."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.matmul import _matmul_hopper, _weights_hopper
from kernelmark.suite.operators.mx_matmul import dequantized, quantized

from .player import Tiles, nothing, play


def tiles(x, shape, strides, block, layout):
    return Tiles(x, *block)


def widened(words, scale, operand):
    """The operand in the order in which the matrix units see K: as the table in `_weights_hopper.py` says it."""
    words = words.as_subclass(torch.Tensor).int()
    codes = torch.stack([words >> (4 * i) & 15 for i in range(8)], -1)  # row, t, w, e·i
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((table, -table))[codes.long()].view(64, 4, 4, 2, 4)
    numbers = numbers * torch.exp2(scale.as_subclass(torch.Tensor).float() - 133)[:, :, None, None, None]
    return numbers.permute(0, 2, 4, 1, 3).reshape(64, 128)  # row, w, i, t, e


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(3, 200, 544), (17, 128, 1024), (40, 130, 96), (5, 800, 96), (64, 130, 2880)]
)
def test_right(monkeypatch, M, N, K, programs):
    play(
        monkeypatch, (_matmul_hopper, _weights_hopper), keep=("_order",),
        TensorMap=tiles, _layout=nothing, product_layout=nothing, thread_barrier=nothing,
        words_layout=nothing, widened=widened,
    )  # fmt: skip
    # What each module took from the other is what is played there.
    for name in ("Work", "add_up", "load", "stages"):
        monkeypatch.setattr(_weights_hopper, name, getattr(_matmul_hopper, name))
    monkeypatch.setattr(_weights_hopper, "multiprocessors", lambda x: programs)
    x, weight = torch.randn(M, K), torch.randn(N, K)
    q, scales, _ = quantized(weight, "mxfp4")
    out = torch.full((M, N), torch.nan)
    _weights_hopper.few_rows(x, q, scales, out)
    want = x.double() @ dequantized(q, scales, "mxfp4", None, torch.float64).T
    torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-4)


def ran(ptx, **registers):
    """Registers as int64 after PTX of instructions with three operands, which have 32 bits."""
    for line in ptx.strip("{} ").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        name, to, a, b = line.replace(",", " ").split()
        a, b = (registers[x] if x in registers else int(x, 0) for x in (a, b))
        if name == "mul.bf16x2":
            halves = [
                ((a >> at & 0xFFFF).short().view(torch.bfloat16) * (b >> at & 0xFFFF).short().view(torch.bfloat16))
                .view(torch.int16).long() & 0xFFFF
                for at in (0, 16)
            ]  # fmt: skip
            registers[to] = halves[0] | halves[1] << 16
        else:
            of = {"and.b32": "__and__", "shr.u32": "__rshift__", "mul.lo.u32": "__mul__"}
            registers[to] = getattr(a, of[name])(b) & 0xFFFFFFFF
    return registers


def test_the_instructions_that_widen():
    """All codes beside random ones, times the smallest scale that loses nothing, one, and the largest."""
    words = torch.randint(0, 1 << 32, (4096,))
    for at in range(8):
        words[16 * at : 16 * at + 16] = (
            words[16 * at : 16 * at + 16] & ~(15 << 4 * at) | torch.arange(16) << 4 * at
        )
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table)).double()
    for scale in (1, 120, 134):
        pair = torch.full_like(words, scale * 0x800080 + 0x3C003C00)
        found = ran(_weights_hopper._nibbles.fn(), **{"$4": words, "$5": pair})
        for i in range(4):
            for half in range(2):
                got = (found[f"${i}"] >> 16 * half & 0xFFFF).short().view(torch.bfloat16).double()
                assert torch.equal(got * 64, table[words >> (4 * i + 16 * half) & 15] * 2.0 ** (scale - 127))
