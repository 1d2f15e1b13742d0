"""`docs/results-h200.md` and the README's row are what their command writes from the journals."""

from __future__ import annotations

TOLD = "run `python docs/results.py --write`"


def test_the_page_is_what_the_journals_say(program):
    results = program("results")
    assert results.page() == results.PAGE.read_text(encoding="utf-8"), TOLD


def test_the_readmes_row_is_one_of_them(program):
    results = program("results")
    readme = results.README.read_text(encoding="utf-8")
    assert results.placed(readme, results.row()) == readme, TOLD
