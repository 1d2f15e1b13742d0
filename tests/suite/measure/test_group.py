"""Ranks in step: decisions, samples and failures, in processes of a gloo group."""

from __future__ import annotations

import contextlib

import pytest
import torch
from kernelmark.suite.measure.group import ALONE, Failure, largest
from kernelmark.suite.measure.verify import Incorrect

from ...ranks import spread


def test_a_process_alone_decides_by_itself():
    assert ALONE.agreed(3) == 3
    assert ALONE.every("x") == ["x"]
    assert largest(ALONE, [1.0, 2.0]) == ([1.0, 2.0], [(1.0,), (2.0,)])
    with pytest.raises(KeyError), ALONE.together():
        raise KeyError


def _in_step(group):
    tensor = torch.full((2,), float(group.rank), dtype=torch.bfloat16)
    seen = {
        "agreed": group.agreed(group.rank + 5),
        "largest": largest(group, [1.0 + group.rank, 3.0 - group.rank]),
        "gathered": [x.tolist() for x in group.gathered(tensor)],
        "column": [x.tolist() for x in group.gathered(tensor.view(1, 2).t())],
        "random": group.random.random(),
    }
    for name, act in (("one", _one), ("all", _all), ("uneven", _uneven)):
        try:
            with group.together():
                act(group)
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"
    group.barrier()
    return seen


def _one(group):
    if group.rank == 2:
        raise Incorrect("its last chunk is missing")


def _all(group):
    raise NotImplementedError("nowhere")


def _uneven(group):
    largest(group, [1.0] * (1 + (group.rank == 1)))


def test_ranks_decide_together():
    found = spread(3, _in_step)
    first = found[0]
    assert first["agreed"] == 5
    assert first["largest"] == ([3.0, 3.0], [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0)])
    assert first["gathered"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert first["column"] == [[[0.0], [0.0]], [[1.0], [1.0]], [[2.0], [2.0]]]
    assert first["one"] == "Incorrect: rank 2 of 3: its last chunk is missing"
    assert first["all"] == "NotImplementedError: nowhere"
    assert first["uneven"].startswith("Incorrect: ranks took [1, 2] samples")
    assert [x["random"] for x in found] == [first["random"]] * 3
    assert found[2]["one"] == "Incorrect: its last chunk is missing"


class Ended(BaseException):
    """What ends a rank that is stuck, in place of a signal."""


def _out_of_step(group):
    seen = {}
    group.watcher = Counts()
    for name, act in (("value", _value), ("nested", _nested), ("between", _between), ("skipped", _skipped)):
        group._stuck = _ended
        with contextlib.suppress(Ended), group.together():
            try:
                act(group)
            except Ended as end:
                seen[name] = str(end)
                raise
        if name not in seen:
            seen[name] = "at its end"
    with group.together():
        assert group.agreed(group.rank) == 0
    seen["settled"] = group.watcher.count
    return seen


class Counts:
    count = 0

    def failed(self, count, failure):
        assert count > self.count, "whoever watches takes it for settled"

    def settled(self, count):
        self.count = count


def _ended(failure):
    raise Ended(failure.text)


def _value(group):
    if group.rank == 1:
        raise ValueError("no such luck")
    group.every(group.rank)


def _nested(group):
    if group.rank == 1:
        raise ValueError("no such luck")
    with group.together():
        pass


def _between(group):
    with group.together():
        pass
    if group.rank == 1:
        raise ValueError("no such luck")
    with group.together():
        pass


def _skipped(group):
    if group.rank == 0:
        group.every(group.rank)


def test_a_rank_that_leaves_out_what_others_do_ends_them_all():
    """None takes one thing that another says for an answer to something else."""
    first, second = spread(2, _out_of_step)
    told = "ValueError: no such luck"
    assert first == {"value": told, "nested": told, "between": told, "skipped": "the ranks are out of step"} | {
        "settled": first["settled"]
    }
    assert {x: second[x] for x in ("value", "nested", "between", "skipped")} == dict.fromkeys(
        ("value", "nested", "between", "skipped"), "at its end"
    )
    assert first["settled"] == second["settled"] == 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("64 GiB"), MemoryError),
        (Incorrect("64 GiB"), Incorrect),
        (ModuleNotFoundError("64 GiB"), ImportError),
        (ValueError("64 GiB\nand more"), RuntimeError),
    ],
)
def test_a_failure_keeps_its_kind(error, kind):
    seen = Failure.of(error, 1).error(4)
    assert type(seen) is kind
    assert str(seen) == f"rank 1 of 4: {'ValueError: ' if kind is RuntimeError else ''}64 GiB"
