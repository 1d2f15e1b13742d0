"""Hostile names in what people read: the terminal, Markdown, HTML."""

from __future__ import annotations

import io
import re

import pytest
from kernelmark.registry import escape
from kernelmark.registry.errors import unknown
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.views import comparison_page, comparison_table, table, tables

HOSTILE = [
    "[/red]",
    "[bold]x[/bold]",
    "[link=https://example.org]x",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\u202egnirts",
    "a\nb\tc",
    "<script>alert(1)</script>",
    "|`*_~@#$&amp;",
    ":smile:",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_in_every_table(name, literal):
    case = literal.case(operator=name, name=name, dtype=name, axes={name: 3}, options={name: name})
    rows = [literal.record(name, 1.0, case=case, version=name), literal.record("torch", 2.0, case=case)]
    rows.append(literal.record("lost", case=case, status="error", reason=name))
    first: Journal = Journal(literal.header(plan=name, conditions={name: name}), tuple(rows))
    second = Journal(literal.header(conditions={name: "other"}, key="other"), tuple(rows))
    for page in (
        tables.run_table(first),
        comparison_page.comparison_page(comparison_table.compare(first, first)),
        comparison_page.comparison_page(comparison_table.compare(first, second)),
    ):
        text = table.render(page, 200)
        assert not escape.CONTROL.search(text)
        if name in ("[/red]", "[bold]x[/bold]", ":smile:"):
            assert name in text  # shown as it is


@pytest.mark.parametrize("name", HOSTILE)
def test_one_line_without_control(name):
    assert not escape.CONTROL.search(escape.plain(name))
    assert "\n" not in escape.plain(name)
    assert "\n" in escape.lines("a\nb")


@pytest.mark.parametrize("name", HOSTILE)
def test_markdown_holds_no_tag_link_or_cell(name):
    text = escape.markdown(name)
    assert not re.search(r"(?<!\\)[|`*_<>\[\]@#~$\n]", text)
    assert not re.search(r"[`<>\n]", escape.code(name))


def test_a_name_of_megabytes_is_cut():
    long = "x" * 5_000_000
    assert len(escape.plain(long)) == len(escape.markdown(long)) == escape.LONGEST
    assert len(escape.lines(long)) == 10 * escape.LONGEST
    assert len(str(unknown("operator", long, ["a", long]))) < 400


def test_a_console_in_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    escape.console(80, file).print("± · → é")
    file.flush()
    assert raw.getvalue() == b"? ? ? ?\n"
