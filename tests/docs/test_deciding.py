"""The table of `docs/deciding.md` is what its command prints from the journals."""

from __future__ import annotations

import pytest


@pytest.mark.usefixtures("untraced")
def test_the_table_is_what_the_journals_say(program):
    deciding = program("deciding")
    page = deciding.DOCUMENT.read_text(encoding="utf-8")
    assert deciding.placed(page, deciding.BLOCKS) == page, "run `python docs/deciding.py --write`"
