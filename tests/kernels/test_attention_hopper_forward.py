"""The forward pass for Hopper with a tile scheduler: who computes which rows, and what comes of it.

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
from kernelmark.kernels.attention import _softmax
from kernelmark.kernels.attention._tiling import output_like

from .player import play, stored


@pytest.fixture(scope="module", autouse=True)
def _plain_numbers():
    patch = pytest.MonkeyPatch()
    for each in (common, hopper):
        patch.setattr(each, "gl", SimpleNamespace(minimum=min, maximum=max))
    patch.setattr(hopper, "sectioned", common.sectioned.fn, raising=False)  # another order may do without it
    yield
    patch.undo()


@given(
    st.sampled_from(sorted(hopper.DIVISIONS)),
    st.integers(1, 13),
    st.integers(1, 9),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 700),
)
def test_tiles(columns, blocks, heads, section, causal, window):
    """They cover every row of every head once; sections come one after the other, of each the last rows first."""
    c = hopper.Config(columns, causal, window, False, False, columns, *hopper.DIVISIONS[columns])
    tile = c.rows * c.groups
    length = 2 * c.rows * blocks
    n = -(-length // tile)
    end = length if causal else n * tile
    grid = SimpleNamespace(n=n, heads=heads, section=section, keys=length, end=end)
    found = [hopper._tile.fn(t, grid, c) for t in range(heads * n)]
    rows = [(head, row) for head, start, *_ in found for row in range(max(start, 0), min(start + tile, length))]
    assert sorted(rows) == [(head, row) for head in range(heads) for row in range(length)]
    for head, start, low, last in found:
        assert head < heads
        # A whole number of groups lies before the sequence, and not all of them.
        assert start > -tile
        assert start % c.rows == 0
        end = start + tile - 1
        ahead = 0 if causal else window - 1 if window else length
        assert last == min(end + ahead, length - 1) // c.keys
        assert low == (max(start - window + 1, 0) // c.keys if window else 0)
    order = [(head // section, -start) for head, start, *_ in found]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("D", "Dv", "rows", "heads", "groups"),
    [
        (64, 64, 197, 656, 2),  # a tile of 192 rows and one of 5
        (64, 64, 384, 192, 3),
        (64, 64, 511, 36, 3),  # 108 tiles are one wave, 144 are two
        (64, 64, 577, 224, 2),
        (64, 64, 1024, 192, 3),  # a ninth less is not enough
        (64, 64, 8192, 64, 3),
        (96, 64, 128, 600, 2),
        (128, 128, 384, 192, 2),  # there is no other
        (192, 128, 128, 600, 2),
    ],
)
def test_tiles_are_divided_by_what_is_left_empty(D, Dv, rows, heads, groups):
    assert hopper.division(D, Dv, rows, heads, 132)[0] == groups


@pytest.fixture
def played(monkeypatch):
    """The counter, which launches share."""
    counter = torch.zeros(1, dtype=torch.int32)
    play(monkeypatch, (hopper,), counter=lambda q: counter)
    return counter


def draw(B, H, Hkv, S, D, keys=None, layout="bhsd", Dv=None):
    generator = torch.Generator().manual_seed(S + D)
    sizes = (H, S, D), (Hkv, keys or S, D), (Hkv, keys or S, Dv or D)
    return [stored(layout, B, *size, generator) for size in sizes]


def forward(q, k, v, causal, section, window=0, sinks=None, cap=0.0):
    out = torch.full_like(output_like(q, v), math.nan)
    lse = torch.full(q.shape[:3], math.nan)
    hopper.forward(q, k, v, out, lse, causal, window, section, sinks, cap)
    return out, lse


def wanted(q, k, v, causal, window=0, sinks=None, cap=0.0):
    """The output and the log-sum-exp in base 2, in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    apart = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    if causal:
        scores = scores.masked_fill(apart < 0, -math.inf)
    if window:
        scores = scores.masked_fill(apart.abs() >= window, -math.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat((scores, sink), -1), torch.nn.functional.pad(v, (0, 0, 0, 1))
    level = scores.logsumexp(-1) / math.log(2)
    return scores.softmax(-1).nan_to_num(0) @ v, torch.where(level == -math.inf, math.inf, level)


def same(got, want, atol=2e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(
    ("B", "H", "Hkv", "S", "D", "section"),
    [
        (1, 4, 2, 256, 64, 4),  # two groups before the sequence
        (1, 3, 3, 512, 40, 2),  # one
        (2, 2, 1, 768, 64, 2),  # none
        (1, 1, 1, 1024, 64, 8),
        (1, 4, 2, 512, 128, 2),
        (2, 3, 3, 256, 96, 4),
    ],
)
def test_right(played, monkeypatch, causal, programs, B, H, Hkv, S, D, section):
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: programs)
    inputs = draw(B, H, Hkv, S, D)
    same(forward(*inputs, causal, section), wanted(*inputs, causal))
    assert played.item() == 0


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("S", "D", "groups"), [(197, 64, 2), (192, 64, 3), (128, 40, 2), (384, 64, 3)])
def test_tiles_of_both_heights(monkeypatch, causal, S, D, groups):
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 1)
    inputs = draw(1, 2, 1, S, D, layout="bshd")
    assert hopper.division(D, D, -(-S // 64) * 64, 2, 1)[0] == groups
    same(forward(*inputs, causal, 2), wanted(*inputs, causal))


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("S", "window"),
    [
        *((512, window) for window in (1, 64, 65, 100, 127, 128, 129, 192, 320)),  # one group before the sequence
        *((640, window) for window in (100, 200, 511, 700)),  # two
        (768, 300),  # none
    ],
)
def test_windows(monkeypatch, causal, S, window, D):
    """One end of a window in a block of keys, both, none; wider than a sequence."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 3)
    inputs = draw(1, 2, 1, S, D)
    same(forward(*inputs, causal, 2, window), wanted(*inputs, causal, window))


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("layout", "S", "keys", "D", "window"),
    [
        ("bshd", 200, 200, 64, 0),
        ("projection", 129, 129, 128, 0),
        ("projection", 333, 333, 128, 65),
        ("bshd", 333, 333, 64, 300),
        ("bhsd", 5, 5, 40, 0),
        # More keys than queries, and fewer: rows that see nothing.
        ("bhsd", 1, 300, 128, 0),
        ("bshd", 70, 333, 64, 0),
        ("bhsd", 130, 600, 64, 100),
        ("bshd", 300, 100, 128, 0),
        ("bshd", 500, 130, 64, 200),
    ],
)
def test_any_length_and_layout(monkeypatch, causal, layout, S, keys, D, window):
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 3)
    inputs = draw(2, 4, 2, S, D, keys, layout)
    same(forward(*inputs, causal, 2, window), wanted(*inputs, causal, window))


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("layout", "S", "keys", "D", "Dv", "window", "cap"),
    [
        ("bhsd", 256, 256, 192, 128, 0, 0),
        ("bshd", 333, 333, 192, 128, 0, 0),  # a first tile that begins before the first query
        ("projection", 129, 129, 136, 72, 0, 0),  # three pieces, the last almost empty
        ("bshd", 70, 333, 192, 128, 0, 3),
        ("bhsd", 300, 100, 168, 128, 0, 0),  # rows that see nothing
        ("bhsd", 500, 500, 192, 128, 200, 0),
        ("bshd", 333, 333, 96, 64, 0, 0),
        ("bhsd", 200, 600, 72, 40, 130, 3),
        ("bshd", 333, 333, 64, 128, 0, 0),
    ],
)
@pytest.mark.parametrize("sunk", [True, False])
def test_values_of_other_columns(monkeypatch, causal, layout, S, keys, D, Dv, window, cap, sunk):
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 3)
    q, k, v = draw(2, 4, 2, S, D, keys, layout, Dv)
    sinks = torch.tensor([-100.0, 0.5, 60.0, -math.inf]) if sunk else None
    options = window, sinks, float(cap)
    same(forward(q, k, v, causal, 2, *options), wanted(q, k, v, causal, *options), atol=1e-4)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("S", "keys", "D", "window", "cap"),
    [
        (200, 200, 64, 0, 0),
        (333, 333, 64, 128, 0),
        (70, 333, 64, 0, 0),
        (300, 100, 128, 0, 3),  # rows that see nothing but the sink
        (200, 200, 72, 0, 3),
        (129, 129, 128, 65, 1),
    ],
)
@pytest.mark.parametrize("sunk", [True, False])
def test_sinks_and_caps(monkeypatch, causal, S, keys, D, window, cap, sunk):
    """Sinks below all scores, above, and absent; a cap that most scores are near."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda q: 3)
    q, k, v = draw(2, 4, 2, S, D, keys, "bshd")
    q *= 3
    sinks = torch.tensor([-100.0, 0.5, 60.0, -math.inf]) if sunk else None
    options = window, sinks, float(cap)
    same(forward(q, k, v, causal, 2, *options), wanted(q, k, v, causal, *options), atol=1e-4)


@pytest.mark.usefixtures("played")
def test_caps_of_fp16(monkeypatch):
    """By two instructions, which are right where scores are far above the cap too."""
    monkeypatch.setattr(_softmax.gl, "bfloat16", torch.bfloat16)  # numbers are fp32, and not its
    q, k, v = draw(1, 2, 1, 200, 64)
    q[:, :, ::3] *= 1000
    same(forward(q, k, v, True, 2, cap=3.0), wanted(q, k, v, True, cap=3.0), atol=1e-4)


def test_launches_share_a_counter(played):
    for H, S in ((3, 256), (1, 128), (2, 384)):
        inputs = draw(1, H, 1, S, 48)
        same(forward(*inputs, True, 1), wanted(*inputs, True))
        assert played.item() == 0


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("rise", [0.5, 2.0, 7.0])
def test_maxima_that_rise(rise, D):
    """From block to block, by less than what is let pass, by more, and in single rows."""
    q, k, v = draw(1, 2, 1, 768, D)
    q[..., 0], k[..., 0] = D**0.5, torch.arange(768, 0, -1) / hopper.KEYS * rise
    q[:, :, 5::7, 0] = 0
    same(forward(q, k, v, False, 2), wanted(q, k, v, False), atol=1e-4)  # scores of 42 have fewer digits


@pytest.mark.usefixtures("played")
def test_a_later_key_that_is_no_number():
    """Rows before it do not see it, those of its own block included."""
    q, k, v = draw(1, 2, 1, 384, 64)
    k[:, :, 200] = math.nan
    out, lse = forward(q, k, v, True, 2)
    seen = slice(0, 200)
    same((out[:, :, seen], lse[..., seen]), wanted(*(x[:, :, seen] for x in (q, k, v)), True))
    assert lse[..., 200:].isnan().all()


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_nothing(causal):
    """Scores of -inf throughout: zeros, and a level below which any other row's share would be 0."""
    q, k, v = draw(1, 1, 1, 256, 64)
    q[..., 0], k[..., 0] = 1, -math.inf
    out, lse = forward(q, k, v, causal, 1)
    assert out.eq(0).all()
    assert lse.eq(math.inf).all()
