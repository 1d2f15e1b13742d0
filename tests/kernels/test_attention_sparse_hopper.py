"""The walk over lists for Hopper: who computes which rows, and what comes of it.

Gluon has no interpreter: the kernel is played as a whole (`player.py`).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.kernels import _hopper as common
from kernelmark.kernels.attention import _attention_hopper_forward as hopper
from kernelmark.kernels.attention import _attention_sparse_hopper as sparse
from kernelmark.kernels.attention import attention_sparse as module

from .player import play

BLOCK = sparse.KEYS


@pytest.fixture(scope="module", autouse=True)
def _plain_numbers():
    patch = pytest.MonkeyPatch()
    patch.setattr(common, "gl", SimpleNamespace(minimum=min))
    patch.setattr(sparse, "sectioned", common.sectioned.fn)
    yield
    patch.undo()


@given(st.integers(1, 13), st.integers(1, 9), st.integers(1, 12))
def test_tiles(n, heads, section):
    """They cover every block of every head once; sections come one after the other, of each the last first."""
    found = [sparse._tile.fn(t, n, heads, section) for t in range(heads * n)]
    assert sorted(found) == [(head, block) for head in range(heads) for block in range(n)]
    order = [(head // section, -block) for head, block in found]
    assert order == sorted(order)


@pytest.fixture
def played(monkeypatch):
    """The counter, which launches share."""
    counter = torch.zeros(1, dtype=torch.int32)
    play(
        monkeypatch,
        (hopper, sparse),
        counter=lambda q: counter,
        multiprocessors=lambda q: 5,
    )
    return counter


def draw(B, H, Hkv, S, D):
    generator = torch.Generator().manual_seed(S + D)
    return [torch.randn(B, heads, S, D, generator=generator) for heads in (H, Hkv, Hkv)]


def masks(heads, n, share):
    """Masks of blocks, in which a row has none and the last one has all."""
    blocks = torch.rand(heads, n, n, generator=torch.Generator().manual_seed(n)) < share
    blocks[:, 1] = False
    blocks[0, n - 1] = True
    return blocks


def forward(q, k, v, blocks, causal, section, lse=None):
    """What is not listed is no block's number."""
    kept = blocks & torch.ones_like(blocks).tril() if causal else blocks
    lists = torch.full(blocks.shape, 1 << 20, dtype=torch.int32)
    for head, of_head in enumerate(kept):
        for row, of_row in enumerate(of_head):
            chosen = of_row.nonzero().flatten().flip(0)
            lists[head, row, : max(len(chosen), 1)] = chosen if len(chosen) else row
    out = torch.full_like(q, math.nan)
    sparse.forward(q, k, v, out, lists, kept.sum(-1, dtype=torch.int32), causal, section, lse)
    return out


def wanted(q, k, v, blocks, causal):
    """In fp64."""
    B, H, S, D = q.shape
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(H // k.shape[1], 1) for x in (k, v))
    seen = blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    seen = (seen.tril() if causal else seen).repeat(B * H // len(blocks), 1, 1).view(B, H, S, S)
    return (q @ k.mT * D**-0.5).masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0) @ v


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("causal", [True, False])
def test_log_sum_exp(causal):
    """In base 2, +inf for a row that sees nothing; the output is the same without it."""
    q, k, v = draw(1, 2, 1, 512, 64)
    blocks = masks(2, 4, 0.5)
    lse = torch.full((1, 2, 512), math.nan)
    out = forward(q, k, v, blocks, causal, 1, lse)
    assert torch.equal(out, forward(q, k, v, blocks, causal, 1))
    seen = blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    seen = seen.tril() if causal else seen
    scores = (q.double() @ k.double().mT * 64**-0.5)[0].masked_fill(~seen, -math.inf)
    level = scores.logsumexp(-1) / math.log(2)
    torch.testing.assert_close(lse[0].double(), level.masked_fill(level.isinf(), math.inf), rtol=1e-5, atol=1e-4)


def same(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("B", "H", "Hkv", "S", "D", "own", "share", "section"),
    [
        (1, 2, 1, 768, 64, 2, 0.2, 2),  # a list a head
        (2, 2, 2, 512, 40, 1, 0.6, 1),  # one for all
        (2, 2, 1, 1280, 64, 4, 0.5, 3),  # of each sequence its own
        (1, 4, 2, 768, 128, 4, 0.4, 2),
        (1, 1, 1, 512, 64, 1, 0.0, 8),  # fewer tiles than programs, most without a key
    ],
)
def test_right(played, causal, B, H, Hkv, S, D, own, share, section):
    inputs, blocks = draw(B, H, Hkv, S, D), masks(own, S // BLOCK, share)
    same(forward(*inputs, blocks, causal, section), wanted(*inputs, blocks, causal))
    assert played.item() == 0


def test_launches_share_a_counter(played):
    for H, S in ((3, 512), (1, 256), (2, 768)):
        inputs, blocks = draw(1, H, 1, S, 48), masks(1, S // BLOCK, 0.5)
        same(forward(*inputs, blocks, True, 1), wanted(*inputs, blocks, True))
        assert played.item() == 0


@pytest.mark.usefixtures("played")
def test_a_key_that_is_no_number():
    """Rows before it do not see it, those of its own block included, nor does a row that does not list it."""
    inputs, blocks = draw(1, 2, 1, 768, 64), torch.ones(1, 6, 6, dtype=torch.bool)
    blocks[:, 4, 3] = False
    expected = wanted(*inputs, blocks, True)
    inputs[1][:, :, 400] = math.nan
    out = forward(*inputs, blocks, True, 2)
    for rows in (slice(0, 400), slice(512, 640)):
        same(out[:, :, rows], expected[:, :, rows])
    assert out[:, :, 400:512].isnan().all()
    assert out[:, :, 640:].isnan().all()


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_nothing(causal):
    """Scores of -inf throughout: zeros."""
    q, k, v = draw(1, 1, 1, 512, 64)
    q[..., 0], k[..., 0] = 1, -math.inf
    assert forward(q, k, v, masks(1, 4, 0.5), causal, 1).eq(0).all()


@pytest.mark.parametrize("D", [64, 40, 96, 128])
def test_taken_on_a_device_for_it(monkeypatch, played, D):
    monkeypatch.setattr(module, "hopper_modules", lambda device: SimpleNamespace(common=common))
    launches = []
    launch = sparse.launch
    monkeypatch.setattr(sparse, "launch", lambda *given: (launches.append(D), launch(*given)))
    q, k, v = (x.bfloat16() for x in draw(1, 2, 1, 1024, D))
    blocks = masks(1, 8, 0.3)
    out = module.walk(q, k, v, *module.listed(blocks, True), True)
    torch.testing.assert_close(out.double(), wanted(q, k, v, blocks, True), rtol=2e-2, atol=2e-2)
    assert launches == [D]
