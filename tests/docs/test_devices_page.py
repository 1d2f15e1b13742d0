"""The tables of compiled kernels and of built images are what their command writes from the records."""

from __future__ import annotations

import pytest


def test_the_tables_are_what_the_records_say(program):
    devices = program("devices")
    for name, blocks in devices.PAGES.items():
        page = (devices.HERE / name).read_text(encoding="utf-8")
        assert devices.placed(page, blocks) == page, "run `python docs/devices.py --write`"


def test_a_page_without_marks_is_refused(program):
    with pytest.raises(SystemExit, match="no marks <!-- built --> and <!-- end of built -->"):
        program("devices").placed("<!-- built -->\n", {"built": str})
