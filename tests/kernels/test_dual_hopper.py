"""Dual products for Hopper: which tiles come of which weight, and what is written of them where.

Gluon has no interpreter: the kernel is played as a whole (`player.py`), in fp32.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.kernels.matmul import _dispatch as dispatch
from kernelmark.kernels.matmul import _dual_hopper as hopper
from kernelmark.kernels.matmul import _matmul_hopper
from kernelmark.kernels.matmul._schedules import DualSchedule

from .player import Tiles, copy_out, nothing, play


class Late(threading.local):
    """Copies out that read their buffers as late as the waits allow: one that is filled too early is wrong."""

    def __init__(self):
        self.waiting = []

    def ask(self, *copy):
        self.waiting.append(copy)

    def wait(self, pendings):
        while len(self.waiting) > pendings:
            copy_out(*self.waiting.pop(0))


@pytest.fixture
def played(monkeypatch):
    late = Late()
    play(
        monkeypatch,
        (_matmul_hopper, hopper),
        _tiles=lambda x, rows, columns: Tiles(x, rows, columns),
        product_layout=nothing,
        copy_out=late.ask,
        tma=SimpleNamespace(store_wait=late.wait),
    )
    # What the module took from the other is what is played there.
    for name in ("Ring", "Work", "product"):
        monkeypatch.setattr(hopper, name, getattr(_matmul_hopper, name))
    return lambda programs: monkeypatch.setattr(hopper, "multiprocessors", lambda x: programs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups": 1},
        {"groups": 1, "columns": 64},
        {"columns": 64},
        {"buffers": 1},
        {"written": 32, "buffers": 4},
        {"columns": 256, "buffers": 4},
    ],
    ids=lambda x: "-".join(f"{key}{value}" for key, value in x.items()) or "plain",
)
@pytest.mark.parametrize("preactivations", [False, True])
@pytest.mark.parametrize(("M", "N", "K"), [(200, 144, 112), (64, 8, 32), (1, 200, 40), (130, 64, 8)])
def test_right(played, changes, preactivations, M, N, K):
    """Of sizes that no tile divides, by programs that have several tiles and by ones that have one."""
    schedule = DualSchedule(
        **{"columns": 128, "step": 32, "stages": 2, "preactivations": preactivations, **changes}
    )
    torch.manual_seed(M + N + K)
    x, gate, up = torch.randn(M, K), torch.randn(N, K), torch.randn(N, K)
    first, second = x.double() @ gate.double().t(), x.double() @ up.double().t()
    want = torch.nn.functional.silu(first) * second
    for programs in (2, 7):
        played(programs)
        outputs = tuple(torch.full((M, N), torch.nan) for _ in range(3))
        hopper.multiply(x, gate, up, outputs, schedule, 2)
        torch.testing.assert_close(outputs[0].double(), want, rtol=2e-5, atol=2e-4)
        for got, wide in zip(outputs[1:], (first, second), strict=True):
            if preactivations:
                torch.testing.assert_close(got.double(), wide, rtol=2e-5, atol=2e-4)
            else:
                assert got.isnan().all()


def test_a_buffer_that_is_filled_too_early_is_wrong(played, monkeypatch):
    """What plays the copies sees it: of waits that always let one more be under way."""
    played(2)
    schedule = DualSchedule(columns=128, step=32, stages=2, preactivations=True)
    x, weight = torch.randn(200, 32), torch.randn(144, 32)
    found = []
    for early in (0, 1):
        late = Late()
        monkeypatch.setattr(hopper, "copy_out", late.ask)
        tma = SimpleNamespace(
            store_wait=lambda pendings, late=late, early=early: late.wait(pendings and pendings + early)
        )
        monkeypatch.setattr(hopper, "tma", tma)
        outputs = tuple(torch.zeros(200, 144) for _ in range(3))
        hopper.multiply(x, weight, weight, outputs, schedule, 2)
        found.append(torch.allclose(outputs[1], x @ weight.t(), atol=1e-4))
    assert found == [True, False]


SIZES = st.integers(1, 40000)


@given(SIZES, SIZES, SIZES, st.sampled_from([1, 78, 132]))
def test_chosen_by_what_its_tiles_take(M, N, K, programs):
    schedule = dispatch.dual(M, N, K, programs)
    assert schedule in dispatch.DUAL
    cost = {x: dispatch.estimate(x, M, N, K, programs) for x in dispatch.DUAL}
    assert cost[schedule] == min(cost.values())


def test_large_products_take_large_tiles():
    assert dispatch.dual(16384, 8192, 2048, 132) == dispatch.DUAL[0]
    assert dispatch.dual(64, 2112, 2048, 132).groups == 1


@pytest.mark.parametrize("schedule", dispatch.DUAL)
def test_candidates_fit(schedule):
    """Tiles in flight and on their way out in 227 KiB, sums in registers, rows of both weights of 128 bytes."""
    stage = (schedule.groups * schedule.rows + schedule.columns) * schedule.step * 2
    written = schedule.buffers * schedule.groups * 64 * schedule.chunk * 2
    assert schedule.stages * (stage + 16) + written + 1024 <= 227 << 10
    assert schedule.rows * schedule.columns // 128 <= 128
    assert schedule.step * 2 == 128
    assert schedule.groups in (1, 2)
    assert schedule.width % 8 == 0
