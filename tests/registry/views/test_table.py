"""Tables: nothing is cut, whole columns go in the stated order, and other programs get every digit."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.registry.views.table import (
    Column,
    Table,
    Text,
    cells_of,
    comma_separated,
    html,
    line,
    markdown,
    render,
)


def table() -> Table:
    made = Table(
        (
            Column("case", folds=8),
            Column("library"),
            Column("ms", number=True),
            Column("rate", number=True, drop=2),
            Column("limit", number=True, drop=1),
        ),
        "Times",
    )
    made.add("B4-H32-S4096-D128", "ours", "1.2345", "560.5", "71%", style="bold")
    made.add("B1", "theirs", Text("12,345.678", "red"), "1.00", "100%")
    return made


WHOLE = """\
Times
case               library          ms   rate  limit
────────────────────────────────────────────────────
B4-H32-S4096-D128  ours         1.2345  560.5    71%
B1                 theirs   12,345.678   1.00   100%
"""
AT_40 = """\
Times
case      library         ms  rate limit
────────────────────────────────────────
B4-H32-   ours        1.2345 560.5   71%
S4096-
D128
B1        theirs  12,345.678  1.00  100%
"""
AT_30 = """\
Times
case        library         ms
──────────────────────────────
B4-H32-     ours        1.2345
S4096-D128
B1          theirs  12,345.678
Left out at 30 columns: rate,
  limit. A wider terminal or a
  pipe has them.
"""


@pytest.mark.parametrize(("width", "expected"), [(None, WHOLE), (80, WHOLE), (40, AT_40), (30, AT_30)])
def test_what_is_shown_at_a_width(width: int | None, expected: str) -> None:
    assert render([table()], width) == expected


def test_too_narrow_for_all_lines_are_longer_and_nothing_is_cut() -> None:
    text = render([table()], 20)
    assert "12,345.678" in text
    assert "…" not in text


names = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=40)


@settings(max_examples=40)
@given(st.integers(40, 90), names)
def test_at_any_width_every_character_and_number_is_there(width: int, name: str) -> None:
    made = Table((Column("name", folds=6), Column("n", number=True), Column("m", number=True, drop=1)))
    made.add(name, "1,234.5678", "9.87")
    rows = render([made], width).splitlines()[2:]
    assert all(cells_of(x) <= width for x in rows)
    assert rows[0].split()[-2:] == ["1,234.5678", "9.87"]
    assert "".join([rows[0].split()[0], *rows[1:]]) == name


def test_colours_only_where_they_are_asked_for() -> None:
    assert "\x1b" not in render([table()], 80)
    text = render([table()], 80, colours=True)
    assert "\x1b[1mours   \x1b[0m" in text
    assert re.sub(r"\x1b\[[\d;]*m", "", text).split() == WHOLE.split()


def test_a_line_is_broken_at_blanks_and_goes_on_further_in() -> None:
    block = line(Text("  unsupported", "red"), " ×2  sdpa_flash: no grouped heads")
    assert render([block], 24).splitlines() == ["  unsupported ×2", "    sdpa_flash: no", "    grouped heads"]
    assert render([block]).splitlines() == ["  unsupported ×2  sdpa_flash: no grouped heads"]
    assert render([line("x" * 50)], 20) == "x" * 50 + "\n"


def test_wide_and_unseen_characters_count_as_a_terminal_shows_them() -> None:
    assert [cells_of(x) for x in ("abc", "é", "e\u0301", "漢字", "▁▂", "")] == [3, 1, 1, 4, 2, 0]


def test_control_characters_become_visible_ones() -> None:
    made = Table((Column("a"),))
    made.add("x\x1b[31m\ny")
    assert render([made, line("\x07!")]).splitlines()[2:] == ["x�[31m y", "�!"]


def test_markdown() -> None:
    made = Table((Column("a"), Column("b", number=True)), "T*")
    made.add("x|y", "1")
    assert markdown([line("One."), made]) == "One.\n\n**T\\***\n\n| a | b |\n|---|--:|\n| x\\|y | 1 |\n"


def test_csv_has_every_name_and_no_formula() -> None:
    rows = [{"name": "=1+1", "ms": 0.1234567890123}, {"name": "a,b", "other": None}]
    told = comma_separated(rows)
    assert list(csv.reader(io.StringIO(told))) == [
        ["name", "ms", "other"],
        ["'=1+1", "0.1234567890123", ""],
        ["a,b", "", ""],
    ]


def test_html_shows_names_as_they_are() -> None:
    made = Table((Column("<a>"),))
    made.add("<script>")
    assert html(made).count("&lt;") == 2
    assert "<script>" not in html(made)
