"""Products of groups of rows for Hopper: which tiles there are, and what comes of them.

Lists of tiles are made in Triton's interpreter; the product, which is Gluon's, is played as a whole (`player.py`),
in fp32.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels import _hopper
from kernelmark.kernels.matmul import _grouped_hopper as hopper
from kernelmark.kernels.matmul import _grouped_tiles as grouped_tiles
from kernelmark.kernels.matmul import _matmul_hopper as dense
from kernelmark.kernels.matmul._schedules import GroupedSchedule
from kernelmark.suite.operators.moe import product_of

from .player import Device, Pointer, Tiles, aggregate, nothing, number, play
from .test_matmul_hopper import numbers as listed_numbers

COUNTS = st.lists(st.one_of(st.just(0), st.integers(1, 300)), min_size=1, max_size=9)
"""Rows of groups, of which some are empty."""


def listed(tiles):
    """[(group, first row)] of a list."""
    total = int(tiles.total)
    assert total <= tiles.most
    return list(zip(tiles.groups[:total].tolist(), tiles.rows[:total].tolist(), strict=True))


def numbers(counts):
    return torch.tensor(counts, dtype=torch.int32)


@settings(max_examples=40)
@given(COUNTS, st.sampled_from([64, 128]), st.integers(0, 70))
def test_masked_tiles(counts, height, more):
    """Each row that counts is in one tile, which begins with one that does."""
    tiles = grouped_tiles.masked(numbers(counts), height, max(1, max(counts) + more))
    want = [(e, row) for e, count in enumerate(counts) for row in range(0, count, height)]
    assert listed(tiles) == want


def test_more_rows_than_a_group_has_room_for_have_no_tile():
    """What lies behind the list stays as it was."""
    tiles = grouped_tiles.masked(numbers([1000, 3, 200]), 64, 100)
    assert listed(tiles) == [(0, 0), (0, 64), (1, 0), (2, 0), (2, 64)]


@settings(max_examples=40)
@given(COUNTS, st.sampled_from([64, 128]))
def test_compact_tiles(counts, height):
    """Groups follow each other, each from the beginning of a tile."""
    tiles, starts = grouped_tiles.compact(numbers(counts), height, sum(counts))
    groups = [e for e, count in enumerate(counts) for _ in range(0, count, height)]
    assert listed(tiles) == [(e, nth * height) for nth, e in enumerate(groups)]
    for e, (count, start) in enumerate(zip(counts, starts.tolist(), strict=True)):
        assert count == 0 or start == groups.index(e) * height


@settings(max_examples=40)
@given(COUNTS, st.sampled_from([64, 128]), st.integers(0, 3), st.integers(0, 127))
def test_contiguous_tiles(counts, height, none, odd):
    """Rows of no group, between groups and behind them, have no tile where a whole one has none else."""
    rows, want = [], []
    for e, count in enumerate(counts):
        begin = len(rows)
        rows += [e] * count + [-1] * (-count % 128 + 128 * (none if e == 0 else 0))
        want += [(e, begin + row) for row in range(0, count, height)]
    rows += [-1] * odd
    if rows:
        assert listed(grouped_tiles.contiguous(numbers(rows), height)) == want


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9), st.integers(1, 12))
def test_every_tile_is_one_programs(row_tiles, column_tiles, section, programs):
    """Also where there are none."""
    device, seen = Device(), []
    memory = torch.arange(max(row_tiles, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "gl", device.gl)
        patch.setattr(hopper, "sectioned", sectioned(device))
        lists = (Pointer(x) for x in (memory, memory * 64))
        work = aggregate(hopper.Tiles)(*lists, number(row_tiles), column_tiles, 3, section)
        for program in range(programs):
            for tile in range(program, int(work.count()) + programs, programs):
                found = tuple(int(x) for x in work.find(number(tile), GroupedSchedule(columns=128)))
                if tile < int(work.count()):
                    seen.append(found)
    assert sorted(seen) == [(i, i * 64, j * 128) for i in range(row_tiles) for j in range(column_tiles)]


def sectioned(device):
    def call(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_hopper, "gl", device.gl)
            return _hopper.sectioned.fn(*arguments)

    return call


def flat(x, rows, columns):
    return Tiles(x.reshape(-1, x.shape[-1]), rows, columns)


@pytest.fixture
def played(monkeypatch):
    play(
        monkeypatch,
        (dense, hopper),
        _tiles=flat,
        _numbers=listed_numbers,
        multiply_add=lambda x, y, z: x * y + z,
        product_layout=nothing,
        plain_shared=nothing,
        thread_barrier=nothing,
        out_layout=nothing,
    )
    # What one module took from the other is what is played there.
    for name in (
        "Scales", "StagedScales", "clamped", "fetch", "product", "scaled_product", "staged_product", "stages",
        "write", "_numbers",
    ):  # fmt: skip
        monkeypatch.setattr(hopper, name, getattr(dense, name))
    return lambda programs: monkeypatch.setattr(hopper, "multiprocessors", lambda x: programs)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def blocks(scale, rows, columns, height):
    return scale.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(32, -1)[..., :columns]


def given_for(schedule, a, E, N, K):
    """(scales, A in fp64 with them, B in fp64 with them) of an A and a drawn B."""
    b = drawn(E, N * (2 if schedule.gated else 1), K)
    wide_a, wide_b = a.double(), b.double()
    steps = -(-K // 32)
    if schedule.scales == "row":
        scales = {"scale_a": drawn(*a.shape[:-1], 1), "scale_b": drawn(E, N, 1)}
        return b, scales, wide_a * scales["scale_a"], wide_b * scales["scale_b"]
    if schedule.scales == "block":
        down = -(-N // 128)
        scales = {
            "scale_a": drawn(*a.shape[:-1], steps),
            "scale_b": drawn(E, down * (2 if schedule.gated else 1), steps),
        }
        if schedule.staged:
            scales["scale_a"] = dense.staged_copy(scales["scale_a"])
        halves = zip(wide_b.split(N, 1), scales["scale_b"].split(down, 1), strict=True)
        wide_b = torch.cat([half * blocks(scale, N, K, 128) for half, scale in halves], 1)
        return b, scales, wide_a * blocks(scales["scale_a"], a.shape[-2], K, 1), wide_b
    return b, {}, wide_a, wide_b


def answer(wide_a, wide_b, schedule):
    y = wide_a @ wide_b.T
    if schedule.gated:
        gate, up = y.chunk(2, -1)
        return product_of(gate, up, schedule.limit)
    return y


CHANGES = [
    {},
    {"gated": True},
    {"groups": 1},
    {"scales": "row"},
    {"scales": "block"},
    {"scales": "block", "paired": True},
    {"scales": "block", "gated": True},
    {"scales": "block", "gated": True, "quantized": True},
    {"scales": "block", "staged": True},
    {"scales": "block", "staged": True, "paired": True, "buffers": 1},
    {"scales": "block", "staged": True, "gated": True},
    {"scales": "block", "staged": True, "gated": True, "quantized": True, "groups": 1},
    {"gated": True, "limit": 5.0},
    {"scales": "block", "gated": True, "quantized": True, "limit": 5.0},
    {"groups": 1, "filled": 16},
    {"groups": 1, "filled": 32, "gated": True},
    {"groups": 1, "filled": 32, "scales": "block", "staged": True, "ahead": 2},
    {"groups": 1, "filled": 16, "scales": "block", "gated": True, "quantized": True},
]


@pytest.mark.parametrize(
    ("changes", "masked"),
    # Only groups that follow each other are quantized, or clamped.
    [(x, masked) for x in CHANGES for masked in (False, True) if not (masked and {"quantized", "limit"} & {*x})],
    ids=lambda x: "-".join(map(str, x)) or "plain" if isinstance(x, dict) else "masked" if x else "compact",
)
def test_right(played, changes, masked):
    """Groups of no rows, of few, and of more than a tile; rows, columns and K that no tile divides."""
    counts, N, K = [70, 0, 130, 5], 200, 112
    schedule = GroupedSchedule(**{"columns": 128, "step": 32, "stages": 2, "masked": masked, **changes})
    height, E = schedule.height, len(counts)
    played(3)
    if masked:
        a = drawn(E, 140, K)
        tiles = grouped_tiles.masked(numbers(counts), height, 140)
        groups = [(a[e, :count], (e, slice(0, count))) for e, count in enumerate(counts)]
    else:
        tiles, starts = grouped_tiles.compact(numbers(counts), height, sum(counts))
        a = drawn(tiles.most * height, K)
        groups = [((slice(s, s + n)),) * 2 for s, n in zip(starts.tolist(), counts, strict=True)]
        groups = [(a[where], (where,)) for where, _ in groups]
    b, scales, wide_a, wide_b = given_for(schedule, a, E, N, K)
    out = torch.full((*a.shape[:-1], N), torch.nan)
    out_scale = torch.full((-(-N // 128), a.shape[:-1].numel()), torch.nan).t() if schedule.quantized else None
    hopper.multiply(a, b, out, tiles, schedule, 2, **scales, out_scale=out_scale)
    for e, (_, where) in enumerate(groups):
        want = answer(wide_a[where], wide_b[e], schedule)
        got = out[where].double()
        if out_scale is not None:
            given_scale = out_scale[where].double().repeat_interleave(128, 1)[:, :N]
            got = got * given_scale
        torch.testing.assert_close(got, want, rtol=2e-5, atol=3e-4)
    if masked:
        for e, count in enumerate(counts):  # rows beyond the last tile are nobody's
            assert out[e, -(-count // height) * height :].isnan().all()


def test_no_rows_at_all(played):
    played(2)
    tiles = grouped_tiles.masked(numbers([0, 0]), 128, 128)
    out = torch.full((2, 128, 128), torch.nan)
    schedule = GroupedSchedule(columns=128, step=32, stages=2, masked=True)
    hopper.multiply(drawn(2, 128, 64), drawn(2, 128, 64), out, tiles, schedule, 2)
    assert out.isnan().all()
