"""Arrivals and lengths from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median, stdev

import pytest
from kernelmark.suite.workloads._serving import load

LOAD = load.Load("poisson", 20.0, 0, 400, 32, 8, "fixed", 1000)


@pytest.mark.parametrize(("kind", "variation"), [("poisson", 1.0), ("gamma", 2.0), ("constant", 0.0)])
def test_open_arrivals_come_at_their_rate(kind: str, variation: float) -> None:
    times = load.arrivals(kind, 20.0, 8000, random.Random(3))
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(variation, abs=0.12)


def test_the_same_seed_is_the_same_load() -> None:
    assert LOAD.draw(5) == LOAD.draw(5)
    assert LOAD.draw(5) != LOAD.draw(6)


def test_lengths() -> None:
    fixed = LOAD.draw(1)
    assert {(len(x.prompt), x.output) for x in fixed} == {(32, 8)}
    assert len({x.prompt[0] for x in fixed}) == 400  # no prefix cache has luck
    drawn = replace(LOAD, lengths="lognormal", requests=2000).draw(1)
    sizes = [len(x.prompt) for x in drawn]
    assert median(sizes) == pytest.approx(32, rel=0.1)
    assert min(sizes) >= 4
    assert max(sizes) == 128 == replace(LOAD, lengths="lognormal", output=0).longest
    assert stdev(sizes) > 15


def test_shared_prefixes_and_turns() -> None:
    shared = replace(LOAD, lengths="shared").draw(1)
    assert len({x.prompt[:16] for x in shared}) == 1
    assert len({x.prompt for x in shared}) == 400
    turns = replace(LOAD, kind="closed", users=3, rate=0.0, requests=30, lengths="turns")
    mine = [x.prompt for x in turns.draw(1) if x.user == 1]
    assert [len(x) for x in mine[:5]] == [32, 72, 112, 152, 32]
    assert mine[1][:32] == mine[0]
    assert max(len(x.prompt) + x.output for x in turns.draw(1)) == turns.longest


def test_users_stay_in_one_process() -> None:
    asked = replace(LOAD, kind="closed", users=5, rate=0.0, requests=20).draw(1)
    parts = load.split(asked, 2, closed=True)
    assert sorted(x.number for part in parts for x in part) == list(range(20))
    assert not {x.user for x in parts[0]} & {x.user for x in parts[1]}
