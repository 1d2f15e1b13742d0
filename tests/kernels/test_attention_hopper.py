"""Which tiles the kernels for Hopper walk under masks and windows, and which of them they mask; gradients.

Gluon has no interpreter. Its functions of plain numbers are run as Python, with the language's minimum and maximum
in place; that what they say is computed is for `tests/gpu`. Backward passes are played as a whole (`player.py`).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.kernels import _hopper as common
from kernelmark.kernels._common import power_of_2
from kernelmark.kernels.attention import _attention_hopper_backward as backward
from kernelmark.kernels.attention import _attention_hopper_backward_deterministic as deterministic
from kernelmark.kernels.attention import _attention_hopper_backward_wide as wide
from kernelmark.kernels.attention import _attention_hopper_forward_paired as paired

from .player import number, play, reduce, stored

ROWS = common.ROWS
LANGUAGE = SimpleNamespace(minimum=min, maximum=max, program_id=lambda axis: 0, num_programs=lambda axis: 1)


@pytest.fixture(scope="module", autouse=True)
def _plain_numbers():
    patch = pytest.MonkeyPatch()
    for each in (common, paired, deterministic):
        patch.setattr(each, "gl", LANGUAGE)
    yield
    patch.undo()


def places(tile, size):
    return torch.arange(tile * size, (tile + 1) * size)


def seen(queries, keys, causal, window):
    """The mask of places, as it is meant."""
    distance = queries[:, None] - keys
    mask = distance.abs() < (window or 1 << 30)
    return mask & (distance >= 0) if causal else mask


windows = st.integers(1, 700) | st.sampled_from([64, 127, 128, 129, 256, 1000])


def test_the_mask_itself():
    places = torch.arange(40)
    for causal, window in ((True, 0), (True, 5), (False, 5), (True, 1), (False, 39)):
        got = common.visible.fn(places[:, None], places[None, :], causal, window)
        assert torch.equal(got, seen(places, places, causal, window))


@given(st.integers(1, 4), st.booleans(), windows | st.just(0), st.sampled_from([64, 128]))
def test_forward(half, causal, window, keys):
    """Each block that is seen at all is walked once, in descending order, and masked where it is seen in part."""
    n = 2 * half
    per = 2 * ROWS // keys
    c = paired.Config(64, causal, window, False, paired.Schedule(2, False, keys=keys), False)
    first, until = 0 if (causal and per > 1) or (window and not causal) else 1, 3 if window else 2
    blocks = set()
    for step in range(n):
        _, block, count, last = paired._unit.fn(step, half, n, 2 * ROWS * n, c)
        blocks.add(block)
        distance = last - block * per
        masked, clean, begin = ([last] if causal or window else []), ([] if causal or window else [last]), 1
        for run in range(first, until):
            end = paired._end.fn(run, begin, count, distance, c)
            (clean if run == 1 else masked).extend(last - j for j in range(begin, end))
            begin = end
        assert begin == count
        walked = range(last, last - count, -1)
        assert sorted([*masked, *clean], reverse=True) == list(walked)
        queries = places(block, 2 * ROWS)
        for j in range(n * per):
            mask = seen(queries, places(j, keys), causal, window)
            assert (j in walked) == bool(mask.any())
            # The first block is always masked where any is.
            assert j == last or j not in walked or (j in clean) == bool(mask.all())
            assert j not in clean or mask.all()
    assert blocks == set(range(n))


@given(
    st.integers(1, 8),
    st.booleans(),
    windows | st.just(0),
    st.booleans(),
    st.sampled_from([(64, 32), (64, 64), (32, 64)]),
)
def test_backward(n, causal, window, of_keys, division):
    """The walk over queries of a block of keys, and over keys of a block of queries, in tiles."""
    ROWS, tile = division  # half of a block's
    ratio = 2 * ROWS // tile
    for block in range(n):
        before, after = (not causal, True) if of_keys else (True, not causal)
        first, end = deterministic._walk.fn(block, ratio * n, before, after, ROWS, window, tile)
        for j in range(ratio * n):
            one, other = places(block, 2 * ROWS), places(j, tile)
            mask = seen(other, one, causal, window) if of_keys else seen(one, other, causal, window)
            assert (first <= j < end) == bool(mask.any())
            if first <= j < end and (causal or window):
                cut = deterministic._cut.fn(j - ratio * block, before, after, ROWS, window, tile)
                assert cut != bool(mask.all())


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 300, 512, 700, 1000])
def test_walk_over_queries(tile, causal, window):
    """Tiles of queries are walked if they see any of a block of keys, and masked unless they see all of it."""
    n = 6
    tiles = range(2 * ROWS * n // tile)
    for block in range(n):
        first, count = (int(x) for x in backward._span(number(block), len(tiles), causal, ROWS, tile, window))
        # Where all is seen each block starts at a place of its own, and comes back to the first tile.
        walked = range(first, first + count) if causal or window else tiles
        for j in tiles:
            mask = seen(places(j, tile), places(block, 2 * ROWS), causal, window)
            assert (j in walked) == bool(mask.any())
            if j in walked and (causal or window):
                ahead = number(j - 2 * ROWS // tile * block)
                assert bool(backward._cut(ahead, causal, ROWS, tile, window)) != bool(mask.all())


@pytest.fixture
def _played(monkeypatch):
    """With one counter for all launches, which each leaves at 0."""
    counter = torch.zeros(1, dtype=torch.int32)
    play(
        monkeypatch,
        (paired, deterministic, backward, wide),
        keep=("_convert_dq", "_statistics"),
        opaque=lambda x: 0,
        add_out=reduce,
        counter=lambda q: counter,
    )
    yield
    assert counter.item() == 0


def draw(B, H, Hkv, S, D, layout="bhsd", Dv=None):
    generator = torch.Generator().manual_seed(S + D)
    columns = D, D, Dv or D, Dv or D
    return [
        stored(layout, B, heads, S, wide, generator) for heads, wide in zip((H, Hkv, Hkv, H), columns, strict=True)
    ]


def statistics(lse, delta):
    """With room for whole blocks of rows."""
    B, H, S = lse.shape
    levels = torch.full((B, H, -(-S // 128) * 128), math.inf)
    deltas = torch.zeros_like(levels)
    levels[..., :S], deltas[..., :S] = lse, delta
    return levels, deltas


@pytest.mark.parametrize(("S", "D"), [(200, 64), (128, 128), (5, 40)])
def test_statistics_leave_an_accumulator_of_zeros(S, D):
    """With as much room as they have themselves, and no number behind it."""
    out, grad = (torch.randn(2, 3, S, D) for _ in range(2))
    room = -(-S // 128) * 128
    memory = torch.full((6 * room * power_of_2(D) + 256,), math.nan)
    sums = memory[:-256]
    plan = deterministic.planned_statistics(out, grad, zeroed=True)
    level, delta = deterministic.run_statistics(plan, out, grad, torch.zeros(2, 3, S), sums)
    assert not sums.count_nonzero()
    assert memory[-256:].isnan().all()
    torch.testing.assert_close(delta[..., :S], (out * grad).sum(-1))
    assert level.shape == delta.shape == (2, 3, room)


KERNELS = pytest.mark.parametrize("kernels", [backward, deterministic], ids=["unordered", "deterministic"])


def wanted(q, k, v, grad, causal, window=0, cap=0.0):
    """The gradients, the log-sum-exp in base 2, and delta, in fp64."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in wide[1:])
    scores = wide[0] @ keys.mT * q.shape[-1] ** -0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    at = torch.arange(q.shape[2])
    scores = scores.masked_fill(~seen(at, at, causal, window), -math.inf)
    out = scores.softmax(-1) @ values
    gradients = torch.autograd.grad(out, wide, grad.double())
    return gradients, scores.logsumexp(-1).detach() / math.log(2), (out.detach() * grad).sum(-1)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 14))
def test_sections(n, heads, section):
    """Each block of each head once; sections one after the other, of each the first blocks of all heads first."""
    found = [common.sectioned.fn(nth, n, heads, section) for nth in range(heads * n)]
    assert sorted(found) == [(head, block) for head in range(heads) for block in range(n)]
    order = [(head // section, block, head) for head, block in found]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("S", "width", "groups", "heads", "section"),
    [
        (8192, 128, 1, 32, 4),  # 8 MB of each head
        (8192, 128, 4, 8, 4),
        (2048, 128, 1, 128, 16),
        (2048, 64, 1, 40, 20),  # two sections of 20, not one of 32 and one of 8
        (4096, 64, 1, 3, 3),
        (1 << 20, 128, 8, 1, 1),
    ],
)
def test_how_many_heads_take_turns(S, width, groups, heads, section):
    assert deterministic.heads_per_l2_group(S, width, groups, heads) == section


@pytest.mark.parametrize(
    ("B", "H", "Hkv", "S", "D", "section"),
    [
        (1, 64, 8, 4096, 128, 4),  # 32 blocks a head: two sections of 4, not one of 6 and one of 2
        (4, 32, 8, 2048, 128, 11),
        (8, 16, 8, 1500, 128, 16),
        (4, 32, 32, 3072, 64, 8),
        (10, 32, 32, 1500, 64, 16),
        (1, 71, 1, 4096, 64, 1),
        (1, 8, 2, 16384, 64, 2),
        # Not in turns, and as many heads as fit into L2, or 4.
        (2, 32, 8, 4096, 128, 4),
        (1, 40, 8, 5000, 128, 4),
        (1, 40, 40, 4096, 128, 8),
    ],
)
def test_whether_heads_take_turns(B, H, Hkv, S, D, section):
    turns = D == 64 or S <= 2048 or H // Hkv >= 6
    assert backward.order(S, D, H // Hkv, B * Hkv) == (turns, section)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("block", [0, 2, 5])
def test_heads_that_take_turns(groups, block):
    """Of the last tile each head once, then of the one before; neighbouring blocks at different heads."""
    c = SimpleNamespace(turns=True, causal=True, window=0)
    tiles = 12
    first, count = (int(x) for x in backward._span(number(block), tiles, True, ROWS, 64, 0))

    def walk(block):
        outer, inner = backward._loops(groups, count, c)
        whose, turn = number(block % groups), number(tiles - 1)
        for lap in range(outer):
            for i in range(inner):
                yield tuple(int(x) for x in backward._at(lap, i, whose, turn, first, tiles, c))
                whose, turn = backward._next(whose, turn, number(block), groups, c)

    found = list(walk(block))
    by_tile = [found[x : x + groups] for x in range(0, len(found), groups)]
    assert [{j for _, j in x} for x in by_tile] == [{j} for j in range(tiles - 1, first - 1, -1)]
    assert all(sorted(member for member, _ in x) == list(range(groups)) for x in by_tile)
    if groups > 1:
        assert all(one[0] != other[0] for one, other in zip(found, walk(block + 1), strict=True))


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("B", "H", "Hkv", "S", "D", "window"),
    [
        (1, 4, 2, 384, 64, 0),
        (2, 2, 1, 256, 128, 0),
        (1, 1, 1, 512, 128, 0),
        (1, 2, 1, 256, 96, 0),
        (1, 1, 1, 384, 40, 0),
        (1, 4, 2, 512, 64, 128),
        (1, 2, 1, 640, 128, 100),
        (2, 2, 1, 512, 64, 200),
        (1, 2, 2, 384, 96, 1),
        (1, 1, 1, 384, 128, 1000),
    ],
)
@KERNELS
def test_gradients(kernels, B, H, Hkv, S, D, window, causal):
    check(kernels, draw(B, H, Hkv, S, D), causal, window)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("layout", "B", "H", "Hkv", "S", "D", "window"),
    [
        ("bshd", 2, 4, 2, 200, 64, 0),
        ("projection", 1, 2, 1, 129, 128, 0),
        ("bshd", 1, 2, 1, 330, 64, 100),
        ("projection", 1, 1, 1, 257, 96, 300),
        ("bhsd", 1, 1, 1, 7, 128, 0),
    ],
)
@KERNELS
def test_any_length_and_layout(kernels, layout, B, H, Hkv, S, D, window, causal):
    check(kernels, draw(B, H, Hkv, S, D, layout), causal, window)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("layout", "B", "H", "Hkv", "S", "D", "Dv", "window"),
    [
        ("bhsd", 1, 2, 2, 256, 192, 128, 0),
        ("bshd", 2, 4, 2, 200, 192, 128, 0),
        ("projection", 1, 2, 1, 129, 136, 72, 0),  # three pieces, the last almost empty
        ("bshd", 1, 2, 1, 330, 192, 128, 100),
        ("bhsd", 1, 1, 1, 7, 168, 128, 0),
        ("bshd", 1, 2, 1, 257, 96, 64, 0),
        ("bhsd", 1, 4, 2, 256, 64, 128, 150),
    ],
)
def test_gradients_with_values_of_other_columns(layout, B, H, Hkv, S, D, Dv, window, causal):
    check(deterministic, draw(B, H, Hkv, S, D, layout, Dv), causal, window)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("layout", "B", "H", "Hkv", "S", "D", "window"),
    [
        ("bhsd", 1, 2, 1, 256, 256, 0),
        ("bshd", 2, 4, 2, 200, 192, 0),
        ("projection", 1, 2, 1, 129, 136, 0),
        ("bshd", 1, 4, 1, 330, 256, 100),
        ("bhsd", 1, 1, 1, 64, 248, 0),  # half of the room that statistics have
        ("bhsd", 1, 2, 2, 7, 256, 3),
        ("bshd", 1, 2, 1, 192, 256, 64),
    ],
)
def test_gradients_of_wide_heads(layout, B, H, Hkv, S, D, window, causal):
    check(wide, draw(B, H, Hkv, S, D, layout), causal, window)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    ("B", "H", "Hkv", "S", "D"), [(1, 6, 2, 400, 128), (2, 5, 1, 300, 64), (1, 3, 3, 385, 128)]
)
def test_heads_in_order_and_in_turns(monkeypatch, turns, B, H, Hkv, S, D):
    monkeypatch.setattr(backward, "order", lambda *_: (turns, 2))
    check(backward, draw(B, H, Hkv, S, D, "bshd"), True, 0)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("schedule", [(128, 2, True, True), (128, 2, False, True), (64, 3, True, True)])
def test_queries_with_a_barrier_of_their_own(monkeypatch, schedule, causal):
    monkeypatch.setitem(backward.SCHEDULES, (64, causal), backward.Schedule(*schedule))
    check(backward, draw(1, 4, 2, 200, 64, "bshd"), causal, 0)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@KERNELS
def test_scores_so_low_that_weights_beyond_the_end_overflow(kernels, causal):
    """2^(0 - level), of a key beyond the end, is inf, and inf · 0 is NaN."""
    q, k, v, grad = draw(1, 1, 1, 140, 64)
    check(kernels, (q.abs() + 3.5, -k.abs() - 3.5, v, grad), causal, 0, atol=1e-3)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("S", "D", "window"), [(200, 64, 0), (130, 128, 65), (256, 72, 0), (200, 256, 0), (130, 192, 65)]
)
def test_gradients_of_capped_scores(S, D, window, causal):
    q, k, v, grad = draw(1, 2, 1, S, D, "bshd")
    check(wide if D > 128 else backward, (3 * q, k, v, grad), causal, window, cap=2.0)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("S", "D", "window"), [(200, 256, 0), (333, 192, 70)])
def test_wide_heads_with_sinks_and_caps(causal, S, D, window):
    """The forward pass of paired tiles."""
    q, k, v, _ = draw(2, 4, 2, S, D, "bshd")
    q *= 3
    sinks = torch.tensor([-100.0, 0.5, 60.0, -math.inf])
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    paired.forward(q, k, v, out, lse, causal, window, None, sinks, 2.0)
    keys, values = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = 2 * (q.double() @ keys.mT * D**-0.5 / 2).tanh()
    at = torch.arange(S)
    scores = scores.masked_fill(~seen(at, at, causal, window), -math.inf)
    scores = torch.cat((scores, sinks.double()[:, None, None].expand(2, 4, S, 1)), -1)
    torch.testing.assert_close(out.double(), scores.softmax(-1)[..., :S] @ values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1) / math.log(2), rtol=1e-4, atol=1e-4)


def check(kernels, inputs, causal, window, atol=2e-5, cap=0.0):
    expected, lse, delta = wanted(*inputs, causal, window, cap)
    q, k, v, grad = inputs
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    more = {"cap": cap} if cap else {}
    kernels.backward(grad, q, k, v, *statistics(lse, delta), *found, causal, window, **more)
    for name, got, want in zip(("dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-4, atol=atol, msg=lambda x, name=name: f"{name}: {x}"
        )


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize(
    ("kernels", "D"),
    [(backward, 64), (deterministic, 64), (wide, 256)],
    ids=["unordered", "deterministic", "wide"],
)
def test_gradients_in_sections_of_heads(monkeypatch, kernels, D):
    """Of three key heads two, then one."""
    name, chosen = ("order", (True, 2)) if kernels is backward else ("heads_per_l2_group", 2)
    monkeypatch.setattr(kernels, name, lambda *_: chosen)
    q, k, v, grad = inputs = draw(1, 6, 3, 256, D)
    expected, lse, delta = wanted(*inputs, True)
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    kernels.backward(grad, q, k, v, lse.float(), delta.float(), *found, True)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("D", [64, 128])
@KERNELS
def test_a_later_key_that_is_no_number(kernels, D):
    """Gradients of the rows of earlier blocks, which do not see it."""
    seen = slice(0, 256)
    inputs = draw(1, 2, 1, 384, D)
    expected, lse, delta = wanted(*(x[:, :, seen] for x in inputs), True)
    level, mean = torch.full((2, 1, 2, 384), torch.nan)
    level[..., seen], mean[..., seen] = lse, delta
    q, k, v, grad = inputs
    k[:, :, 300] = torch.nan
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    kernels.backward(grad, q, k, v, level, mean, *found, True)
    torch.testing.assert_close(found[0][:, :, seen].double(), expected[0], rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize(("S", "Sk", "D"), [(128, 384, 64), (256, 128, 128), (384, 512, 128)])
def test_other_keys_than_queries(S, Sk, D):
    """Every query sees every key: the gradients over two sets of keys are those over both."""
    q, _, _, grad = draw(1, 4, 2, S, D)
    _, k, v, _ = draw(1, 4, 2, Sk + 128, D)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in wide[1:])
    scores = wide[0] @ keys.mT * D**-0.5
    out = scores.softmax(-1) @ values
    expected = torch.autograd.grad(out, wide, grad.double())
    level, delta = statistics(scores.logsumexp(-1).detach() / math.log(2), (out.detach() * grad).sum(-1))
    total = torch.zeros_like(q)
    for part in (slice(0, Sk), slice(Sk, None)):
        own = [q, k[:, :, part], v[:, :, part]]
        assert backward.takes(S, own[1].shape[2], False, 0)
        found = [torch.full_like(x, torch.nan) for x in own]
        backward.backward(grad, *own, level, delta, *found, False)
        total += found[0]
        for got, want in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(got.double(), want[:, :, part], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(total.double(), expected[0], rtol=1e-4, atol=2e-5)


def test_lengths_that_the_kernel_takes():
    assert backward.takes(200, 200, True, 30)
    assert backward.takes(128, 384, False, 0)
    assert not any(backward.takes(*x) for x in ((128, 384, True, 0), (128, 384, False, 9), (128, 200, False, 0)))
    assert not backward.takes(192, 384, False, 0)
