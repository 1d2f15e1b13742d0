"""The kernels of packed sequences for Hopper without one, played by PyTorch (`player.py`)."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernelmark.kernels import _attention_varlen_hopper as forward
from kernelmark.kernels import _attention_varlen_hopper_backward as backward
from kernelmark.kernels import attention_varlen as module
from kernelmark.suite.operators.attention_varlen import reference

from .player import Tiles, nothing, number, play


@pytest.fixture
def _played(monkeypatch):
    play(
        monkeypatch,
        (forward, backward),
        _barrier=nothing,
        _exp2=lambda x, share: number(torch.exp2(x)),
        _pack=lambda p, *_: p,
        _unpack=lambda packed, *_: packed,
        LOWEST=torch.finfo(torch.float32).min,
        FIELDS=module.FIELDS.value,
        packed=lambda x, rows: Tiles(x.view(x.shape[0], -1), rows, x.shape[2]),
    )


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


CASES = pytest.mark.parametrize(
    ("lengths", "keys", "heads", "D"),
    [
        # Whole blocks; an odd one; one row; empty; a tail in the second half of a block; in the first.
        ([256, 128, 1, 0, 330, 20], None, (2, 1), 64),
        # Both sides longer, a mask that cuts two blocks of keys, and one that hides all of a block.
        ([130, 300, 64], [270, 40, 0], (2, 2), 64),
        ([70, 129], [129, 200], (2, 1), 128),
    ],
)


@pytest.mark.usefixtures("_played")
@CASES
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("spoilt", "dynamic"), [(False, True), (True, True), (False, False)])
def test_output_and_gradients(lengths, keys, heads, D, mask, spoilt, dynamic):
    """Of every sequence, also of the neighbours of one that is all NaN."""
    keys = lengths if keys is None else keys
    generator = torch.Generator().manual_seed(sum(lengths))
    H, Hkv = heads

    def draw(tokens, heads):
        return torch.randn(tokens, heads, D, generator=generator)

    q, k, v = draw(sum(lengths), H), draw(sum(keys), Hkv), draw(sum(keys), Hkv)
    grad = draw(sum(lengths), H)
    cu, cu_keys = starts(lengths), starts(keys)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, cu, cu_keys, max(lengths), max(keys), mask)
    wanted = [expected.detach(), *torch.autograd.grad(expected, wide, grad.double())]
    if spoilt:
        for x, at in ((q, cu), (grad, cu), (k, cu_keys), (v, cu_keys)):
            x[at[1] : at[2]] = torch.nan
    causal = mask == "causal"
    out = torch.full_like(q, torch.nan)
    lse = torch.full((H, sum(lengths)), torch.nan)
    table, rows = module.listed(cu, cu_keys, len(q), forward.UNIT)
    forward.forward(q, k, v, out, lse, table, rows, causal, forward.SCHEDULES[D, causal], dynamic)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    lists = module.listed(cu, cu_keys, len(q), backward.BLOCK), module.listed(cu_keys, cu, len(k), backward.BLOCK)
    level, delta = module.statistics(grad, out, lse, *lists[0], backward.BLOCK)
    backward.backward(grad, q, k, v, level, delta, *gradients, *lists, causal)
    for name, got, want, at in zip(
        ("output", "dq", "dk", "dv"), (out, *gradients), wanted, (cu, cu, cu_keys, cu_keys), strict=True
    ):
        if spoilt:
            keep = torch.ones(len(got), dtype=torch.bool)
            keep[at[1] : at[2]] = False
            got, want = got[keep], want[keep]
        torch.testing.assert_close(
            got.double(), want, rtol=1e-4, atol=2e-5, msg=lambda x, name=name: f"{name}: {x}"
        )
