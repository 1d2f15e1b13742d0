"""Which conditions two runs differ in."""

from __future__ import annotations

from types import SimpleNamespace

from kernelmark.registry.detection.pairing import differing, differing_in

HERE = SimpleNamespace(conditions={"python": "3.12", "python_flags": "-O", "image_digest": "a", "torch": "2"})
THERE = SimpleNamespace(conditions={"python": "3.11", "torch": "2"})


def test_conditions_that_may_differ_are_left_out_by_their_whole_name():
    assert differing(HERE, THERE, ("image_digest", "python")) == ("python_flags: -O / not recorded",)


def test_conditions_asked_for_by_name_are_told_where_they_differ():
    assert differing_in(("torch", "python"), HERE, THERE) == ("python: 3.12 / 3.11",)
