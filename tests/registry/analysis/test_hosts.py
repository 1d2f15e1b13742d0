"""Hosts held against each other on a control case: literal values, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
from kernelmark.registry.analysis.hosts import agreement
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Request
from msgspec.structs import replace


@pytest.fixture
def shard(literal):
    """A shard of one host: the control by torch in processes of these times, and a case of its own."""

    def make(number, host, times, control="rms_norm/C"):
        case = literal.case(operator="rms_norm", name="C")
        own = literal.case(operator="rms_norm", name=f"S{number}")
        request = Request(cases=(case, own), implementations=("torch",), shard=(number, 3), control=control)
        environment = {} if host is None else {"host": host}
        header = literal.header(request=request, environment=environment)
        records = [literal.record("torch", ms, case=case, replicate=i) for i, ms in enumerate(times)]
        return Journal(header, (*records, literal.record("torch", 77.0, case=own)))

    return make


def kinds(shards) -> dict[str, str]:
    return {x.host: x.kind for x in agreement(shards)}


def test_quiet_hosts_that_are_alike_agree_and_one_that_is_slow_does_not(shard):
    alike = [1.000, 1.001, 0.999, 1.000, 1.000]
    assert kinds([shard(1, "ha", alike), shard(2, "hb", alike)]) == {"ha": "agrees", "hb": "agrees"}
    slow = [x * 1.04 for x in alike]
    found = agreement([shard(1, "ha", alike), shard(2, "hb", alike), shard(3, "hc", slow)])
    assert [(x.host, x.processes) for x in found] == [("ha", 5), ("hb", 5), ("hc", 5)]
    assert found[2].ratio == pytest.approx(1.04)
    assert found[0].ratio == pytest.approx(1 / math.sqrt(1.04))
    assert found[2].kind == "apart"


def test_each_host_has_a_spread_of_its_own(shard):
    quiet, loud = [1.000, 1.001, 0.999], [0.9, 1.0, 1.1]
    found = {x.host: x for x in agreement([shard(1, "ha", quiet), shard(2, "hb", loud)])}
    assert found["ha"].spread < 0.002 < 0.09 < found["hb"].spread
    assert found["ha"].kind == found["hb"].kind == "not known"
    # Welch: variances of 1e-6/3 and about 0.0101/3, so the loud one's two degrees of freedom decide: t = 4.30.
    half = 4.30 * math.sqrt(found["hb"].spread ** 2 / 3)
    assert math.log(found["ha"].high / found["ha"].ratio) == pytest.approx(half, rel=0.01)


def test_shards_of_one_host_count_together(shard):
    found = agreement([shard(1, "ha", [1.0, 1.001]), shard(2, "hb", [1.0]), shard(3, "ha", [1.0])])
    assert [(x.host, x.processes, x.kind) for x in found] == [("ha", 3, "not known"), ("hb", 1, "not known")]
    assert found[1].high == math.inf


def test_a_board_that_a_shard_went_over_to_is_a_host_of_its_own(shard):
    first, second = shard(1, "ha", [1.0, 1.001, 1.2, 1.201]), shard(2, "hb", [1.0, 1.001])
    moved = [replace(x, board="b") if x.replicate > 1 else x for x in first.records]
    found = agreement([dataclasses.replace(first, records=tuple(moved)), second])
    assert [(x.host, x.processes) for x in found] == [("b", 2), ("ha", 2), ("hb", 2)]


@pytest.mark.parametrize("case", ["one host", "no host", "no control"])
def test_where_there_is_nothing_to_hold_against(shard, case):
    hosts = {"one host": ("ha", "ha"), "no host": (None, None), "no control": ("ha", "hb")}[case]
    control = None if case == "no control" else "rms_norm/C"
    assert agreement([shard(i, host, [1.0, 1.0], control) for i, host in enumerate(hosts, 1)]) == ()
