"""The tables of `docs/serving.md` are what its command writes from the records."""

from __future__ import annotations


def test_the_tables_are_what_the_records_say(program):
    serving = program("serving")
    page = serving.PAGE.read_text(encoding="utf-8")
    assert serving.placed(page, serving.BLOCKS) == page, "run `python docs/serving.py --write`"


def test_every_request_of_the_record_is_accounted_for(program):
    found = program("serving").record("faults")
    assert all(sum(x["ended"].values()) == x["asked"] for x in found["faults"])
    assert abs(found["queueing"]["found_ms"] / found["queueing"]["server_ms"] - 1) <= 0.02
