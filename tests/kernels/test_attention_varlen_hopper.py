"""The kernels of packed sequences for Hopper without one, played by PyTorch (`player.py`)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from kernelmark.kernels._common import power_of_2
from kernelmark.kernels.attention import _attention_hopper_backward as dense
from kernelmark.kernels.attention import _attention_varlen_hopper as forward
from kernelmark.kernels.attention import _attention_varlen_hopper_backward as backward
from kernelmark.kernels.attention import _attention_varlen_hopper_backward_deterministic as deterministic
from kernelmark.kernels.attention import attention_varlen as module
from kernelmark.suite.operators.attention_varlen import reference

from .player import Tiles, nothing, number, play, reduce
from .test_attention_hopper import seen


def packed(x, rows):
    return Tiles(x.view(x.shape[0], -1), rows, x.shape[2])


def mapped(x, rows):
    """By a dimension of heads where these have other columns than a tile."""
    return (
        packed(x, rows) if x.shape[2] in (64, 128) else Tiles(x.transpose(0, 1), 1, rows, power_of_2(x.shape[2]))
    )


@pytest.fixture
def _played(monkeypatch):
    play(
        monkeypatch,
        (forward, dense, deterministic, backward),
        keep=("_convert_dq", "_statistics"),
        opaque=lambda x: 0,
        add_out=reduce,
        thread_barrier=nothing,
        packed=packed,
        tiles_of=mapped,
    )


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def leaves(lengths, keys, heads, D):
    """q, k, v, dO."""
    generator = torch.Generator().manual_seed(sum(lengths))
    H, Hkv = heads
    return [
        torch.randn(sum(tokens), n, D, generator=generator)
        for tokens, n in ((lengths, H), (keys, Hkv), (keys, Hkv), (lengths, H))
    ]


def wanted(q, k, v, grad, cu, cu_keys, mask, *options):
    """Output and gradients in fp64."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    longest = [int(x.diff().max()) for x in (cu, cu_keys)]
    expected = reference(*wide, cu, cu_keys, *longest, mask, *options)
    return [expected.detach(), *torch.autograd.grad(expected, wide, grad.double())]


def levels(q, k, cu, cu_keys, mask, window=0, sinks=None, cap=0.0):
    """The log-sum-exp in base 2 (H, T) in fp64, +inf for a row that sees nothing."""
    found = []
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    for a, b in zip(*(x.double().split(n.diff().tolist()) for x, n in ((q, cu), (k, cu_keys))), strict=True):
        scores = a.transpose(0, 1) @ b.permute(1, 2, 0) * q.shape[2] ** -0.5
        if cap:
            scores = cap * (scores / cap).tanh()
        apart = torch.arange(len(a))[:, None] + len(b) - len(a) - torch.arange(len(b))
        if mask == "causal":
            scores = scores.masked_fill(apart < 0, -math.inf)
        if window:
            scores = scores.masked_fill(apart.abs() >= window, -math.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat((scores, sink), -1)
        level = scores.logsumexp(-1) / math.log(2)
        found.append(torch.where(level == -math.inf, math.inf, level))
    return torch.cat(found, 1)


def outputs(q, k, v, cu, cu_keys, causal, *options):
    """(output, log-sum-exp)."""
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    table, rows = module.listed(cu, cu_keys, len(q), forward.unit(q.shape[2]))
    forward.forward(q, k, v, out, lse, table, rows, causal, *options)
    return out, lse


def gradients(kernels, q, k, v, grad, cu, cu_keys, out, lse, causal, *options, longest=1024, **schedule):
    memory = [torch.full((x.numel() + 128,), torch.nan) for x in (q, k, v)]
    found = [whole[:-128].view(x.shape) for whole, x in zip(memory, (q, k, v), strict=True)]
    lists = (
        module.listed(cu, cu_keys, len(q), deterministic.BLOCK),
        module.listed(cu_keys, cu, len(k), deterministic.BLOCK),
    )
    level, delta = module.statistics(grad, out, lse, *lists[0], deterministic.BLOCK)
    kernels.backward(grad, q, k, v, level, delta, *found, *lists, causal, longest, *options, **schedule)
    assert all(whole[-128:].isnan().all() for whole in memory)  # nothing is written behind the last head
    return found


def spoil(tensors, cu, cu_keys):
    """Makes the second sequence all NaN: (q, k, v, dO) to, of each, the rows of the others."""
    others = []
    for x, at in zip(tensors, (cu, cu_keys, cu_keys, cu), strict=True):
        x[at[1] : at[2]] = torch.nan
        keep = torch.ones(len(x), dtype=torch.bool)
        keep[at[1] : at[2]] = False
        others.append(keep)
    return others


def compare(names, found, expected, rows=None, atol=2e-5):
    for i, (name, got, want) in enumerate(zip(names, found, expected, strict=True)):
        keep = slice(None) if rows is None else rows[i]
        torch.testing.assert_close(
            got[keep].double(), want[keep], rtol=1e-4, atol=atol, msg=lambda x, name=name: f"{name}: {x}"
        )


CASES = pytest.mark.parametrize(
    ("lengths", "keys", "heads", "D"),
    [
        # Whole blocks; an odd one; one row; empty; a tail in the second half of a block; in the first.
        ([256, 128, 1, 0, 330, 20], None, (2, 1), 64),
        # Both sides longer, a mask that cuts two blocks of keys, and one that hides all of a block; no queries.
        ([130, 300, 64, 0], [270, 40, 0, 90], (2, 2), 64),
        ([70, 129], [129, 200], (4, 2), 128),
        # More tiles than there are buffers, several times over.
        ([600, 64], None, (1, 1), 128),
    ],
)
MASKS = pytest.mark.parametrize("mask", ["causal", "full"])
KERNELS = pytest.mark.parametrize("kernels", [backward, deterministic], ids=["unordered", "deterministic"])
SPOILT = pytest.mark.parametrize("spoilt", [False, True])
"""Whether a neighbour is all NaN."""


def check(lengths, keys, heads, D, mask, spoilt, *options, atol=2e-5):
    keys = lengths if keys is None else keys
    cu, cu_keys = starts(lengths), starts(keys)
    tensors = leaves(lengths, keys, heads, D)
    expected = [
        reference(*(x.double() for x in tensors[:3]), cu, cu_keys, max(lengths), max(keys), mask, *options),
        levels(*tensors[:2], cu, cu_keys, mask, *options).mT,
    ]
    rows = spoil(tensors, cu, cu_keys) if spoilt else None
    out, lse = outputs(*tensors[:3], cu, cu_keys, mask == "causal", *options)
    compare(["output", "log-sum-exp"], [out, lse.mT], expected, rows and [rows[0]] * 2, atol)


@pytest.mark.usefixtures("_played")
@CASES
@MASKS
@SPOILT
def test_output(lengths, keys, heads, D, mask, spoilt):
    check(lengths, keys, heads, D, mask, spoilt)


@pytest.mark.usefixtures("_played")
@MASKS
@SPOILT
@pytest.mark.parametrize("window", [1, 64, 100, 128, 129, 300])
@pytest.mark.parametrize(
    ("lengths", "keys", "D"),
    [
        ([256, 128, 1, 0, 330], None, 64),
        ([130, 300, 64, 0], [270, 40, 0, 90], 64),  # fewer keys than queries, none, and no queries
        ([70, 129, 600], [500, 300, 600], 128),
    ],
)
def test_windows(lengths, keys, D, window, mask, spoilt):
    """One end of a window in a block of keys, both, none; wider than a sequence."""
    check(lengths, keys, (2, 1), D, mask, spoilt, window)


@pytest.mark.usefixtures("_played")
@MASKS
@SPOILT
@pytest.mark.parametrize(
    ("lengths", "keys", "heads", "D", "window"),
    [
        ([256, 128, 1, 0, 330], None, (2, 1), 80, 0),
        ([130, 300, 64, 0], [270, 40, 0, 90], (4, 2), 40, 0),
        ([70, 129, 600], [500, 300, 600], (2, 2), 96, 100),
    ],
)
def test_heads_of_other_columns(lengths, keys, heads, D, window, mask, spoilt):
    """Tiles end with a head, and a neighbour's columns are neither read nor written."""
    check(lengths, keys, heads, D, mask, spoilt, window)


def test_what_the_forward_pass_takes():
    def takes(D=80, longest=1024, dtype=torch.bfloat16, apart=0):
        x = torch.empty(700, 3, D + apart, dtype=dtype)[..., :D]
        return forward.takes(x, x, x, longest)

    assert takes()
    assert takes(D=40, dtype=torch.float16)
    assert takes(apart=8)
    assert takes(D=64)
    assert not takes(D=64, apart=8)  # heads are not side by side
    assert not takes(apart=4)
    assert not takes(D=84)
    assert not takes(D=32)
    assert not takes(D=136)
    assert not takes(longest=512)
    assert not takes(dtype=torch.float32)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize("sunk", [True, False])
@pytest.mark.parametrize(
    ("lengths", "keys", "D", "window", "cap"),
    [
        ([256, 1, 0, 330], None, 64, 0, 0.0),
        ([130, 300], [270, 40], 64, 0, 3.0),  # rows that see nothing but the sink
        ([70, 129, 600], [500, 300, 600], 128, 200, 1.0),
    ],
)
def test_sinks_and_caps(lengths, keys, D, window, cap, sunk, mask):
    sinks = torch.tensor([0.5, 60.0]) if sunk else None
    check(lengths, keys, (2, 1), D, mask, False, window, sinks, cap, atol=1e-4)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize(
    ("lengths", "keys", "heads"),
    [
        # None, one and, of three, two groups before the sequence, and all rows of a group but one; fewer keys than
        # queries, and more; key heads of two sections, and sections of one key head.
        ([192, 128, 64, 193], None, (4, 2)),
        ([191, 63, 384], [64, 383, 900], (6, 3)),
    ],
)
@pytest.mark.parametrize("D", sorted(forward.DIVISIONS))
def test_tiles(monkeypatch, D, lengths, keys, heads, mask):
    """Of three groups and of two."""
    monkeypatch.setattr(forward, "SECTION", 2 * 128 * 8 * D)  # 256 keys, K and V of 4 bytes
    check(lengths, keys, heads, D, mask, False)


@pytest.mark.usefixtures("_played")
@CASES
@MASKS
@SPOILT
@KERNELS
def test_gradients(kernels, lengths, keys, heads, D, mask, spoilt):
    keys = lengths if keys is None else keys
    cu, cu_keys = starts(lengths), starts(keys)
    tensors = leaves(lengths, keys, heads, D)
    expected = wanted(*tensors, cu, cu_keys, mask)[1:]
    rows = spoil(tensors, cu, cu_keys) if spoilt else None
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu_keys, causal)
    found = gradients(kernels, *tensors, cu, cu_keys, out, lse, causal)
    compare(["dq", "dk", "dv"], found, expected, rows and rows[:3])


def check_gradients(lengths, keys, heads, D, mask, spoilt=False, window=0, sinks=None, cap=0.0, **more):
    """Of the unordered kernel."""
    keys = lengths if keys is None else keys
    cu, cu_keys = starts(lengths), starts(keys)
    tensors = leaves(lengths, keys, heads, D)
    expected = wanted(*tensors, cu, cu_keys, mask, window, sinks, cap)[1:]
    rows = spoil(tensors, cu, cu_keys) if spoilt else None
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu_keys, causal, window, sinks, cap)
    found = gradients(backward, *tensors, cu, cu_keys, out, lse, causal, window, cap, **more)
    compare(["dq", "dk", "dv"], found, expected, rows and rows[:3], 2e-4 if cap else 2e-5)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize(
    ("window", "spoilt"),
    [
        (1, False),
        (100, False),
        (128, True),
        *(pytest.param(*x, marks=pytest.mark.minutes) for x in ((64, True), (129, False), (300, True))),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "keys", "D"),
    [
        ([130, 128, 1, 0, 270], None, 64),
        ([130, 200, 64, 0], [270, 40, 0, 90], 64),  # fewer keys than queries, none, and no queries
        ([70, 129, 30], [500, 300, 600], 128),  # blocks of keys that no query sees any more
    ],
)
def test_gradients_under_windows(lengths, keys, D, window, mask, spoilt):
    """One end of a window in a block of keys or in a tile of queries, both, none; wider than a sequence."""
    check_gradients(lengths, keys, (2, 1), D, mask, spoilt, window)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize("spoilt", [pytest.param(False, marks=pytest.mark.minutes), True])
@pytest.mark.parametrize(
    ("lengths", "keys", "heads", "D", "window"),
    [
        ([256, 128, 1, 0, 330], None, (2, 1), 80, 0),
        ([130, 300, 64, 0], [270, 40, 0, 90], (4, 2), 40, 0),
        ([70, 129, 30], [129, 300, 600], (2, 2), 96, 100),
        ([1, 65, 0], None, (3, 3), 120, 0),
        ([200, 77], None, (2, 1), 72, 33),
    ],
)
def test_gradients_of_heads_of_other_columns(lengths, keys, heads, D, window, mask, spoilt):
    """A neighbour's columns are neither read nor written."""
    check_gradients(lengths, keys, heads, D, mask, spoilt, window)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize("sunk", [True, False])
@pytest.mark.parametrize(
    ("lengths", "keys", "D", "window", "cap"),
    [
        ([256, 1, 0, 330], None, 64, 0, 0.0),
        ([130, 300], [270, 40], 64, 0, 3.0),  # rows that see nothing but the sink
        ([70, 129, 30], [500, 300, 60], 128, 200, 1.0),
        ([90, 200], None, 112, 0, 2.0),
    ],
)
def test_gradients_with_sinks_and_caps(lengths, keys, D, window, cap, sunk, mask):
    sinks = torch.tensor([0.5, 6.0]) if sunk else None
    check_gradients(lengths, keys, (2, 1), D, mask, False, window, sinks, cap)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize("kernels", ["backward", "deterministic"])
def test_a_gradient_in_sinks(monkeypatch, kernels, mask):
    """As the call makes it, of statistics in slots: those of no block, and rows of no sequence, count nothing."""
    modules = module.Hopper(forward, backward, deterministic)
    monkeypatch.setattr(module, "_hopper", lambda device: modules)
    monkeypatch.setattr(module, "_kernels", lambda *_: getattr(modules, kernels))
    empty = torch.Tensor.new_empty

    def spoilt(self, *shape, **more):
        found = empty(self, *shape, **more)
        return found.fill_(math.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", spoilt)
    lengths = [70, 0, 130, 1]
    cu = starts(lengths) + 40
    q, k, v, grad = (
        torch.cat((torch.full_like(x[:40], 3), x, x[:9])) for x in leaves(lengths, lengths, (2, 1), 64)
    )
    sinks = torch.tensor([0.5, 2.0])
    inside = slice(40, -9)
    wide = [x[inside].double().requires_grad_() for x in (q, k, v)] + [sinks.double().requires_grad_()]
    want = reference(*wide[:3], cu - 40, cu - 40, 130, 130, mask, 0, wide[3])
    expected = torch.autograd.grad(want, wide, grad[inside].double())
    out, lse = outputs(q, k, v, cu, cu, mask == "causal", 0, sinks)
    given = grad, q, k, v, cu, cu, out, lse, 130, 130, mask == "causal", 0, sinks, 0.0
    *found, of_sinks = module._launch_backward(*given)
    compare(["dq", "dk", "dv", "sinks"], [*(x[inside] for x in found), of_sinks], expected)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize(
    ("D", "schedule"), [(64, (128, 2, False)), (40, (128, 2, True)), (64, (64, 4, True)), (96, (64, 3, False))]
)
def test_windows_in_other_schedules(D, schedule, mask):
    check_gradients([70, 129, 200], [129, 200, 63], (2, 1), D, mask, window=90, schedule=dense.Schedule(*schedule))


@pytest.mark.usefixtures("_played")
@MASKS
def test_heads_that_are_apart(mask):
    """Queries are part of a projection, in which everything else is NaN: what fills up a tile is a head's own."""
    lengths = [70, 130, 1]
    cu = starts(lengths)
    q, k, v, grad = leaves(lengths, lengths, (2, 1), 72)
    expected = wanted(q, k, v, grad, cu, cu, mask)
    whole = torch.full((len(q), 2, 3, 72), torch.nan)
    whole[:, :, 1] = q
    causal = mask == "causal"
    out, lse = outputs(whole[:, :, 1], k, v, cu, cu, causal)
    found = gradients(backward, whole[:, :, 1], k, v, grad, cu, cu, out, lse, causal)
    compare(["output", "dq", "dk", "dv"], [out, *found], expected)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize("window", [100, 150])
def test_weights_of_hidden_keys_that_overflow_under_a_window(window, mask):
    """Those beyond the end of a sequence, which a window after the last query would show."""
    lengths, keys = [200, 90], [129, 63]
    cu, cu_keys = starts(lengths), starts(keys)
    q, k, v, grad = leaves(lengths, keys, (1, 1), 64)
    tensors = [q.abs() + 3.5, -k.abs() - 3.5, v, grad]
    expected = wanted(*tensors, cu, cu_keys, mask, window)[1:]
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu_keys, causal, window)
    assert lse.min() < -128
    found = gradients(backward, *tensors, cu, cu_keys, out, lse, causal, window)
    compare(["dq", "dk", "dv"], found, expected, atol=1e-3)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize("D", [64, 80])
def test_keys_of_minus_infinity_under_a_window(D, mask):
    """They weigh nothing, at a window's edge and beside rows that fill a tile up: dK and dV are numbers."""
    lengths = [70, 130, 100]
    cu = starts(lengths)
    q, k, v, grad = leaves(lengths, lengths, (2, 1), D)
    weightless = [30, 69, 70 + 64, 200 + 30]
    k[weightless, :, 3] = -math.inf
    q = q.abs()
    _, _, *expected = wanted(q, k, v, grad, cu, cu, mask, 50)
    causal = mask == "causal"
    out, lse = outputs(q, k, v, cu, cu, causal, 50)
    _, *found = gradients(backward, q, k, v, grad, cu, cu, out, lse, causal, 50)
    compare(["dk", "dv"], found, expected)
    assert not any(x[weightless].any() for x in found)


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 64, 65, 100, 127, 128, 192, 193, 300, 700])
@pytest.mark.parametrize(("length", "keys"), [(640, 640), (333, 333), (70, 500), (500, 70), (130, 1000)])
def test_walk_under_a_window(length, keys, tile, causal, window):
    """Tiles of queries are walked if they see any of a block of keys, and masked unless they see all of it."""
    own = torch.arange(length) + keys - length
    for block in range(-(-keys // 128)):
        first, count, tiles = (
            int(x) for x in backward._span(number(block), number(length), number(keys), causal, 64, tile, window)
        )
        of_keys = torch.arange(block * 128, min((block + 1) * 128, keys))
        assert tiles == -(-length // tile)
        assert first + count <= tiles
        for j, places in enumerate(own.split(tile)):
            mask = seen(places, of_keys, causal, window)
            assert (first <= j < first + count) == bool(mask.any())
            ahead = number(int(places[0]) - block * 128)
            if first <= j < first + count and len(mask) == tile and len(of_keys) == 128:
                assert bool(backward._cut(ahead, causal, 64, tile, window)) != bool(mask.all())


@pytest.mark.usefixtures("_played")
@KERNELS
def test_gradients_in_sections_of_heads(monkeypatch, kernels):
    """Of three key heads two, then one."""
    monkeypatch.setattr(kernels, "heads_per_l2_group", lambda *_: 2)
    cu, cu_keys = starts([200, 0, 150]), starts([130, 40, 260])
    tensors = leaves([200, 0, 150], [130, 40, 260], (6, 3), 64)
    out, lse = outputs(*tensors[:3], cu, cu_keys, True)
    found = gradients(kernels, *tensors, cu, cu_keys, out, lse, True)
    compare(["dq", "dk", "dv"], found, wanted(*tensors, cu, cu_keys, "causal")[1:], None)


@pytest.mark.usefixtures("_played")
@MASKS
@KERNELS
def test_scores_so_low_that_weights_of_hidden_keys_overflow(kernels, mask):
    """2^(0 - level), of a key beyond the end of a sequence, is inf, and inf · 0 is NaN."""
    lengths, keys = [200, 90], [129, 63]
    cu, cu_keys = starts(lengths), starts(keys)
    q, k, v, grad = leaves(lengths, keys, (1, 1), 64)
    tensors = [q.abs() + 3.5, -k.abs() - 3.5, v, grad]
    expected = wanted(*tensors, cu, cu_keys, mask)[1:]
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu_keys, causal)
    assert lse.min() < -128
    found = gradients(kernels, *tensors, cu, cu_keys, out, lse, causal)
    compare(["dq", "dk", "dv"], found, expected, atol=1e-3)


@pytest.mark.usefixtures("_played")
@MASKS
@KERNELS
@pytest.mark.parametrize("D", [64, 128])
def test_keys_of_minus_infinity(kernels, D, mask):
    """They weigh nothing, in whole tiles of queries and in the last of a sequence, where the next one begins and
    rows that fill it up may not be zeros: 0 · -inf is NaN. Their sequences' dQ is NaN by them, no other's.

    Queries are part of a packed projection, in which everything else is NaN.
    """
    lengths, keys = [70, 130, 192, 100], [129, 130, 200, 63]
    cu, cu_keys = starts(lengths), starts(keys)
    q, k, v, grad = leaves(lengths, keys, (2, 1), D)
    weightless = [100, 128, 259 + 64, 259 + 199, 459 + 30]
    k[weightless, :, 3] = -math.inf
    packed = torch.full((len(q), 5, D), torch.nan)
    packed[:, 1:3] = q.abs()
    tensors = [packed[:, 1:3], k, v, grad]
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu_keys, causal)
    dq, dk, dv = gradients(kernels, *tensors, cu, cu_keys, out, lse, causal)
    want, wanted_dq, *others = wanted(*tensors, cu, cu_keys, mask)
    compare(["output", "dk", "dv"], [out, dk, dv], [want, *others])
    compare(["dq"], [dq], [wanted_dq], [slice(cu[1], cu[2])])
    assert not dk[weightless].any()
    assert not dv[weightless].any()


@pytest.mark.usefixtures("_played")
@MASKS
@KERNELS
def test_a_head_that_is_no_number_has_no_effect_on_another(kernels, mask):
    lengths, keys = [70, 130], [129, 63]
    cu, cu_keys = starts(lengths), starts(keys)
    tensors = leaves(lengths, keys, (2, 2), 64)
    expected = wanted(*tensors, cu, cu_keys, mask)
    tensors[0][:, 0] = math.nan
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu_keys, causal)
    found = [out, *gradients(kernels, *tensors, cu, cu_keys, out, lse, causal)]
    compare(["output", "dq", "dk", "dv"], found, expected, [(slice(None), 1)] * 4)


@pytest.mark.usefixtures("_played")
@MASKS
@KERNELS
def test_rows_that_see_only_keys_of_minus_infinity(kernels, mask):
    """They give zeros and have no part in the gradients of keys and values."""
    lengths = [100, 70, 130]
    cu = starts(lengths)
    q, k, v, grad = leaves(lengths, lengths, (1, 1), 64)
    q = q.abs()
    hidden = range(100, 150) if mask == "causal" else range(100, 170)
    k[hidden, :, 3] = -math.inf
    causal = mask == "causal"
    out, lse = outputs(q, k, v, cu, cu, causal)
    assert not out[hidden].any()
    assert bool((lse[:, hidden] == math.inf).all())
    _, dk, dv = gradients(kernels, q, k, v, grad, cu, cu, out, lse, causal)
    assert not dk[hidden].any()
    assert not dv[hidden].any()
    # As if there were neither such rows nor such keys.
    lengths = [100, 70 - len(hidden), 130]
    rest = [torch.cat((x[:100], x[100 + len(hidden) :])) for x in (q, k, v, grad)]
    expected = wanted(*rest, starts(lengths), starts(lengths), mask)[2:]
    compare(["dk", "dv"], [torch.cat((x[:100], x[100 + len(hidden) :])) for x in (dk, dv)], expected)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize(
    ("D", "schedule"), [(64, (128, 2, False)), (64, (128, 2, True)), (64, (64, 4, True)), (128, (64, 3, False))]
)
def test_other_schedules(D, schedule, mask):
    cu, cu_keys = starts([70, 129, 200]), starts([129, 200, 63])
    tensors = leaves([70, 129, 200], [129, 200, 63], (2, 1), D)
    expected = wanted(*tensors, cu, cu_keys, mask)[1:]
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu_keys, causal)
    found = gradients(backward, *tensors, cu, cu_keys, out, lse, causal, schedule=dense.Schedule(*schedule))
    compare(["dq", "dk", "dv"], found, expected)


@pytest.mark.usefixtures("_played")
@MASKS
@pytest.mark.parametrize("length", [200, 256])
def test_equal_lengths_take_the_schedule_of_the_dense_kernel(monkeypatch, length, mask):
    given = []
    choose = backward.scheduled
    monkeypatch.setattr(backward, "scheduled", lambda *x: given.append(x) or choose(*x))
    cu = starts([length] * 3)
    tensors = leaves([length] * 3, [length] * 3, (2, 1), 64)
    causal = mask == "causal"
    out, lse = outputs(*tensors[:3], cu, cu, causal)
    found = gradients(backward, *tensors, cu, cu, out, lse, causal, longest=length)
    compare(["dq", "dk", "dv"], found, wanted(*tensors, cu, cu, mask)[1:])
    assert given == [(64, causal, 3 * length, 3, length, True)]
    assert choose(*given[0]) == dense.SCHEDULES[64, causal]


def test_a_schedule_is_the_dense_kernels_over_lengths_of_nine_tenths_of_the_longest():
    assert backward.scheduled(64, True, 9000, 10, 1000) == dense.SCHEDULES[64, True]
    assert backward.scheduled(64, True, 8999, 10, 1000) == dense.Schedule(64, 4) != dense.SCHEDULES[64, True]
    for other in ((64, False), (128, True), (128, False)):
        assert backward.scheduled(*other, 8999, 10, 1000) == dense.SCHEDULES[other]


def test_windows_and_caps_take_tiles_of_64_queries():
    """Of 64 columns, where those of 128 spill registers."""
    for causal in (True, False):
        assert backward.scheduled(64, causal, 9000, 10, 1000, False) == dense.Schedule(64, 4)
        assert backward.scheduled(128, causal, 9000, 10, 1000, False) == dense.SCHEDULES[128, causal]
