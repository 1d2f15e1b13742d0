"""Matrix products for Hopper: which program computes which steps of which tile, and what comes of it.

Gluon has no interpreter: the kernel is played as a whole (`player.py`), in fp32.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels.matmul import _dispatch as dispatch
from kernelmark.kernels.matmul import _matmul_hopper as hopper
from kernelmark.kernels.matmul import matmul
from kernelmark.kernels.matmul._matmul import HEIGHTS
from kernelmark.kernels.matmul._schedules import Schedule
from kernelmark.suite.operators.rope import reference as rotated

from .player import Device, Tiles, aggregate, nothing, play, reduce


def numbers(x, count):
    """All that lie behind a matrix of scales, which has no gaps."""
    return Aligned(x.as_strided((x.numel(),), (1,)), count)


def tiles(x, says):
    """A matrix or its numbers, by what its tensor map says."""
    if isinstance(says, int):
        return numbers(x, says)
    rows, columns, turned = says
    return Tiles(x.t(), columns, rows) if turned else Tiles(x, rows, columns)


class Aligned(Tiles):
    """Numbers in a row, which are copied from multiples of 16 bytes."""

    def place(self, at):
        assert int(at[0]) % 4 == 0, "an illegal instruction on an H200"
        return super().place(at)


@pytest.fixture
def played(monkeypatch):
    play(
        monkeypatch,
        (hopper,),
        placed=tiles,
        _says_tiles=lambda x, rows, columns, turned=False: (rows, columns, turned),
        _says_all=lambda x, count: count,
        add_out=reduce,
        multiply_add=lambda x, y, z: x * y + z,
        product_layout=nothing,
        plain_shared=nothing,
        thread_barrier=nothing,
    )
    return lambda programs: monkeypatch.setattr(hopper, "multiprocessors", lambda x: programs)


SMALL = Schedule(columns=128, step=32, stages=2)


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(1, 9),
    st.integers(1, 12),
    st.floats(0, 1),
)
def test_work(row_tiles, column_tiles, steps, section, programs, share):
    """Every step of every tile is one program's, a tile's programs are neighbours, and each knows them."""
    device = Device()
    count = row_tiles * column_tiles
    dealt = int(count * share)
    shared = dealt < count
    device.programs = min(programs, (count - dealt) * steps) if shared else programs
    work = aggregate(hopper.Work)(row_tiles, column_tiles, steps, dealt, section)
    seen: dict[int, list[tuple[int, int, int]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "gl", device.gl)
        for program in range(device.programs):
            device.program = program
            at = 0
            while at < work.positions(shared):
                tile, begin, end = (int(x) for x in work.unit(at, shared))
                assert 0 <= begin < end <= steps
                seen.setdefault(tile, []).append((begin, end, device.program))
                at += end - begin
        assert sorted(seen) == list(range(count))
        for tile, parts in seen.items():
            assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
            assert parts[-1][1] == steps
            assert tile >= dealt or len(parts) == 1
            if tile >= dealt:
                first, last = ((tile - dealt) * steps, (tile - dealt + 1) * steps - 1)
                found = list(range(int(work.owner(first)), int(work.owner(last)) + 1))
                assert found == [program for _, _, program in parts]
        places = {tuple(int(x) for x in work.place(tile)) for tile in range(count)}
    assert places == {(i, j) for i in range(row_tiles) for j in range(column_tiles)}


def product(M, N, K, schedule, dealt=None, section=2, bias=False, split=0):
    """What the kernel computes and what it should, for random inputs that lie as the schedule says."""
    generator = torch.Generator().manual_seed(M + N + K)

    def drawn(rows, columns, turned=False):
        x = torch.randn(rows, columns, generator=generator)
        return x.t().contiguous().t() if turned else x

    a = drawn(M, K, schedule.a_turned)
    b = drawn(N * (2 if schedule.gated else 1), K, schedule.b_turned)
    out = torch.full((M, N), torch.nan)
    given, wide_a, wide_b = {}, a.double(), b.double()
    if schedule.scales == "tensor":
        given = {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(3.0)}
        wide_a = wide_a * 1.5
    elif schedule.scales == "row":
        given = {"scale_a": drawn(M, 1), "scale_b": drawn(N, 1)}
        wide_a, wide_b = wide_a * given["scale_a"], wide_b * given["scale_b"]
    elif schedule.promoted:
        heights, across = HEIGHTS[schedule.scales], -(-K // schedule.step)
        for name, rows, height in (("scale_a", M, heights[0]), ("scale_b", N, heights[1])):
            given[name] = drawn(-(-rows // height), across, turned=height == 1)
        each_a, each_b = (
            given[name].repeat_interleave(height, 0)[:rows].repeat_interleave(schedule.step, 1)[:, :K]
            for name, rows, height in (("scale_a", M, heights[0]), ("scale_b", N, heights[1]))
        )
        wide_a, wide_b = wide_a * each_a, wide_b * each_b
    if bias:
        given["bias"] = drawn(N, 1)[:, 0]
    whole = dispatch.tiles(schedule, M, N)
    hopper.multiply(a, b, out, schedule, whole if dealt is None else dealt, section, **given, split=split)
    if schedule.gated:
        gate, up = wide_b.split(N)
        return out, torch.nn.functional.silu(wide_a @ gate.T) * (wide_a @ up.T)
    return out, wide_a @ wide_b.T + (given["bias"].double() if bias else 0)


def same(pair):
    got, want = pair
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True},
        {"groups": 1, "columns": 64},
        {"gated": True},
        {"b_turned": True},
        {"a_turned": True, "b_turned": True},
        {"scales": "tensor"},
        {"scales": "row"},
        {"scales": "block"},
        {"scales": "block", "rows": 128},
        {"scales": "block", "paired": True},
        {"scales": "tile", "rows": 128},
        {"scales": "group"},
        {"scales": "block", "staged": True},
        {"scales": "block", "staged": True, "rows": 128, "buffers": 1},
        {"groups": 3, "bias": True},
        {"scales": "row", "groups": 3},
        {"scales": "tensor", "bias": True},
        {"scales": "row", "bias": True},
        {"scales": "block", "staged": True, "rows": 128, "buffers": 1, "bias": True},
        {"scales": "block", "staged": True, "groups": 3},
        {"scales": "block", "staged": True, "ahead": 2, "stages": 3},
        {"scales": "block", "staged": True, "ahead": 4, "stages": 3, "columns": 32},
        {"scales": "tile", "staged": True, "rows": 128},
        {"scales": "tile", "staged": True, "groups": 1, "ahead": 2, "stages": 3, "columns": 32},
        {"scales": "group", "staged": True, "ahead": 2, "stages": 3, "buffers": 1},
        {"scales": "group", "staged": True, "rows": 128},
    ],
    ids=lambda x: "-".join(f"{key}{value}" for key, value in x.items()) or "plain",
)
@pytest.mark.parametrize("shared", [False, True])
def test_right(played, changes, shared):
    """Of a size that no tile divides: whole tiles alone, then some of them, then none dealt out whole."""
    schedule = Schedule(**{"columns": 128, "step": 32, "stages": 2, "shared": shared, **changes})
    half = dispatch.tiles(schedule, 200, 272) // 2
    for programs, dealt in ((3, half), (5, 0)) if shared else ((3, None),):
        played(programs)
        same(product(200, 272, 112, schedule, dealt, bias=schedule.bias))


@pytest.mark.parametrize(("M", "filled"), [(1, 16), (16, 16), (21, 32), (32, 32)])
@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"scales": "row"}, {"scales": "block", "staged": True}])
@pytest.mark.parametrize("shared", [False, True])
def test_few_rows(played, M, filled, changes, shared):
    """These alone are loaded and written; the others' numbers come into no result. Scales that are staged begin at
    16 bytes.
    """
    M = -(-M // 4) * 4 if "staged" in changes else M
    played(5)
    schedule = Schedule(
        **{"columns": 64, "groups": 1, "step": 32, "stages": 2, "shared": shared, "filled": filled, **changes}
    )
    same(product(M, 272, 112, schedule, 0 if shared else None, bias=schedule.bias))


@pytest.mark.parametrize("changes", [{}, {"groups": 1, "columns": 64}, {"rows": 64, "groups": 3}])
@pytest.mark.parametrize("shared", [False, True])
def test_added_to_what_is_there(played, changes, shared):
    """Each number once, of tiles that several programs compute too."""
    played(5)
    schedule = Schedule(**{"columns": 128, "step": 32, "stages": 2, "shared": shared, "adds": True, **changes})
    a, b, out = torch.randn(200, 112), torch.randn(272, 112), torch.randn(200, 272)
    want = out.double() + a.double() @ b.double().t()
    hopper.multiply(a, b, out, schedule, 0 if shared else dispatch.tiles(schedule, 200, 272), 2)
    same((out, want))


@pytest.mark.parametrize(
    ("head", "columns", "written"), [(128, 128, 64), (128, 256, 64), (64, 64, 32), (64, 128, 32), (256, 256, 64)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_heads_turned(played, head, columns, written, shared):
    """Of sequences of 77 positions: tiles begin within one and have two."""
    played(4)
    M, N, K, S = 3 * 77, 2 * head, 48, 77
    schedule = Schedule(
        columns=columns,
        step=32,
        stages=2,
        written=written,
        head=head,
        shared=shared,
        groups=1 if head == 64 else 2,
    )
    x, weight = torch.randn(M, K), torch.randn(N, K)
    angle = torch.rand(S, head // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    out = torch.full((M, N), torch.nan)
    hopper.multiply(
        x, weight, out, schedule, 0 if shared else dispatch.tiles(schedule, M, N), 2, scale_a=cos, scale_b=sin
    )
    heads = (x.double() @ weight.double().t()).view(3, S, -1, head).transpose(1, 2)
    want = rotated(heads, heads, cos.double(), sin.double(), "half")[0]
    same((out, want.transpose(1, 2).reshape(M, N)))


@pytest.mark.parametrize("K", [8, 32, 33, 64])
def test_few_steps(played, K):
    """Fewer steps than stages, and than programs to share them."""
    played(7)
    same(product(64, 64, K, Schedule(groups=1, columns=64, step=32, stages=3, shared=True), 0))


@pytest.mark.parametrize("split", [2, 3])
@pytest.mark.parametrize("K", [32, 96, 160, 224])
def test_split(played, K, split):
    """Each tile by as many programs, with fewer steps than programs, and with rounds that do not come out even."""
    played(5)
    schedule = Schedule(groups=1, columns=32, step=32, stages=3, scales="block", staged=True, ahead=2, shared=True)
    same(product(64, 80, K, schedule, 0, split=split))


@pytest.mark.parametrize(("columns", "dealt", "split"), [(128, 3, 0), (64, 0, 0), (32, 0, 3), (32, 0, 7)])
def test_whoever_comes_last(played, monkeypatch, columns, dealt, split):
    """Equal bits: of tiles that two programs share and of those that more do, some with a tile before it."""
    played(5)
    schedule = Schedule(groups=1, columns=columns, step=32, stages=2, shared=True)
    first, want = product(200, 272, 256, schedule, dealt, split=split)
    same((first, want))
    orders = (lambda n: reversed(range(n)), lambda n: (*range(1, n, 2), *range(0, n, 2)))
    for order in orders:
        monkeypatch.setattr(Device, "order", staticmethod(order))
        assert torch.equal(product(200, 272, 256, schedule, dealt, split=split)[0], first)


def test_which_scales_are_staged():
    """Of rows those that lie column by column, each step's at 16 bytes; of blocks all."""
    a, b = torch.rand(3, 8).t(), torch.rand(2, 3)
    assert hopper.stageable(a, b, "block")
    assert hopper.stageable(b, b, "tile")
    assert hopper.stageable(a, a, "group")
    assert not hopper.stageable(a.contiguous(), b, "block")
    assert not hopper.stageable(torch.rand(3, 6).t(), b, "block")
    assert not hopper.stageable(a, b, "group")
    assert not hopper.stageable(a, torch.rand(7)[1:].view(2, 3), "block")


@pytest.mark.parametrize("scale", [torch.rand(3, 6).t(), torch.rand(5, 3), torch.rand(1, 4), torch.rand(7, 1)])
def test_scales_are_copied_to_where_they_can_be_staged(scale):
    laid = hopper.staged_copy(scale)
    assert torch.equal(laid, scale)
    assert hopper.stageable(laid, torch.rand(2, 4), "block")


def test_wide_tiles(played):
    played(2)
    same(product(128, 256, 64, Schedule(step=32, stages=3)))


@pytest.mark.parametrize(("M", "N", "K"), [(5, 11, 13), (1, 1, 1), (16, 24, 1001), (3, 24, 32)])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_that_begin_anywhere_are_copied_to_where_hopper_loads_them(monkeypatch, M, N, K, gated):
    taken = []

    def multiply(a, b, out, schedule, dealt, section, bias=None, split=0):
        assert all(map(hopper.mapped, (a, b, out)))
        assert (schedule.a_turned, schedule.b_turned) == (hopper.turned(a), hopper.turned(b))
        taken.append((a, b, out))
        y = a.double() @ b.double().t()
        gate, up = y.chunk(2, 1) if gated else (None, None)
        out.copy_(torch.nn.functional.silu(gate) * up if gated else y if bias is None else y + bias)

    monkeypatch.setattr(hopper, "multiply", multiply)
    monkeypatch.setattr(matmul, "capability", lambda device: (9, 0))
    monkeypatch.setattr(matmul, "multiprocessors", lambda x: 132)
    a = torch.randn(M, K).bfloat16()
    b = torch.randn(K, N * 2 if gated else N).bfloat16()
    bias = None if gated else torch.randn(N).bfloat16()
    for weight in (b, b.t().contiguous().t()):
        got = matmul._launch(a, weight, bias, gated)
        assert got.is_contiguous()
        y = a.double() @ b.double()
        gate, up = y.chunk(2, 1) if gated else (y, y)
        want = torch.nn.functional.silu(gate) * up if gated else y + bias
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    if (N % 8, K % 8) == (0, 0):
        assert taken[0][0].data_ptr() == a.data_ptr(), "what can be mapped is not copied"
