"""`docs/results-h200.md` and the README's row are what their command writes from the journals."""

from __future__ import annotations

import re

TOLD = "run `python docs/results.py --write`"


def test_the_page_is_what_the_journals_say(program):
    results = program("results")
    assert results.page() == results.PAGE.read_text(encoding="utf-8"), TOLD


def test_the_newest_whole_run_of_a_plan_counts(program):
    results = program("results")
    assert results.whole("standard") == results.SAME_CODE[1]  # not one of a single replicate after it
    assert results.MEMORY != results.MEMORY_ROWS


def test_the_readmes_row_is_one_of_them(program):
    results = program("results")
    readme = results.README.read_text(encoding="utf-8")
    assert results.placed(readme, results.row()) == readme, TOLD


def test_the_readme_begins_with_what_a_newcomer_needs(program):
    readme = program("results").README.read_text(encoding="utf-8")
    screen = "\n".join(readme.splitlines()[:42])
    places = [
        screen.index(x) for x in ("Is this GPU kernel faster", "](docs/report.png)", "make bench", "vs best")
    ]
    assert places == sorted(places)
    assert "the number to look at" in screen


def test_no_measured_figure_stands_in_the_readme_by_hand(program):
    results = program("results")
    rest = results.placed(results.README.read_text(encoding="utf-8"), "")
    found = re.findall(r"\d[\d,.]*\s?(?:×|ms\b|GB/s|TFLOP/s|%)", rest)
    assert set(found) <= {"95 %"}  # the level of every interval
