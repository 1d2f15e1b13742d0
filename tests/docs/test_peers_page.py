"""The table of `docs/peers.md` is what its command writes."""

from __future__ import annotations


def test_the_table_is_what_the_journals_say(program):
    peers = program("peers")
    page = peers.PAGE.read_text(encoding="utf-8")
    assert peers.placed(page, peers.BLOCKS) == page, "run `python docs/peers.py --write`"
