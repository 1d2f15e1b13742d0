"""Tables and lines as every command prints them: to a terminal, into a pipe, as Markdown, CSV or HTML.

A page is a sequence of blocks: lines of text, and tables. Where its width is not known (a pipe, a file) nothing
is shortened or broken. In a terminal a table that is too wide first folds its columns of text over several lines,
then drops whole columns: those of the highest `drop` first, and a line below the page names them. No cell is ever
cut.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as html_escape
from itertools import groupby, zip_longest
from typing import Any, NamedTuple, TypeAlias

from .. import escape

LEAST = 20
"""Columns of a terminal below which nothing can be laid out."""
_CODES = {
    "bold": 1,
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
}
_BREAKS = re.compile(r"[^\s/-]*(?:[/-]+|\s+|$)")
"""Words, each with what follows it: text is broken at blanks, and names also after - and /."""


class Text(NamedTuple):
    """A piece of text in one style: `bold`, `dim` and colours, divided by blanks."""

    text: str
    style: str = ""


class Line(NamedTuple):
    """A line of text, in pieces."""

    parts: tuple[Text, ...]


def line(*parts: str | Text, style: str = "") -> Line:
    """A line of these pieces; `style` is that of the ones that have none."""
    return Line(tuple(x if isinstance(x, Text) else Text(x, style) for x in parts))


class Column(NamedTuple):
    """A column of a table.

    A `number` is set to the right. A column that `folds` may be broken over several lines, down to so many
    characters. `drop` is above 0 for what a narrow terminal can do without: the highest goes first.
    """

    heading: str
    number: bool = False
    folds: int = 0
    drop: int = 0


Cells: TypeAlias = tuple[Text, ...]


@dataclass
class Table:
    """Rows of text below headings."""

    columns: Sequence[Column]
    title: str = ""
    rows: list[Cells] = field(default_factory=list)

    def add(self, *cells: str | Text, style: str = "") -> None:
        """Adds a row; cells that are left out at its end are empty, `style` is that of the ones without."""
        made = [x if isinstance(x, Text) else Text(x) for x in cells]
        made += [Text("")] * (len(self.columns) - len(made))
        self.rows.append(tuple(Text(_flat(x.text), f"{style} {x.style}".strip()) for x in made))


Block: TypeAlias = Line | Table
Page: TypeAlias = Sequence[Block]


def show(page: Page) -> None:
    """Prints a page on standard output: at a terminal's width and with its colours, whole into anything else."""
    if not sys.stdout.isatty():
        sys.stdout.write(render(page))
        return
    colours = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    sys.stdout.write(render(page, max(LEAST, shutil.get_terminal_size().columns), colours))


def render(page: Page, width: int | None = None, colours: bool = False) -> str:
    """A page as text; without a `width` nothing is folded or dropped."""
    dropped: dict[str, None] = {}
    lines = [found for block in page for found in _block(block, width, dropped)]
    if dropped:
        told = f"Left out at {width} columns: {', '.join(dropped)}. A wider terminal or a pipe has them."
        lines += _wrapped(line(told, style="dim"), width)
    return "".join(_painted(x, colours) + "\n" for x in lines)


def _block(block: Block, width: int | None, dropped: dict[str, None]) -> Iterator[Sequence[Text]]:
    if isinstance(block, Line):
        yield from _wrapped(block, width)
        return
    table, gone = _fitting(block, width)
    dropped.update(dict.fromkeys(x.heading for x in gone))
    if block.title:
        yield from _wrapped(line(block.title, style="bold"), width)
    widths, gap = _widths(table, width)
    yield _joined([Text(x.heading, "dim") for x in table.columns], table.columns, widths, gap)
    yield [Text("─" * (sum(widths) + gap * (len(widths) - 1)), "dim")]
    for cells in table.rows:
        folded = [
            _broken(x.text, wide) if column.folds else [x.text]
            for x, column, wide in zip(cells, table.columns, widths, strict=True)
        ]
        for parts in zip_longest(*folded, fillvalue=""):
            found = [Text(text, x.style) for text, x in zip(parts, cells, strict=True)]
            yield _joined(found, table.columns, widths, gap)


def _fitting(table: Table, width: int | None) -> tuple[Table, list[Column]]:
    """The table without the columns that a terminal of this width has no room for, and those, in order."""
    gone: list[Column] = []
    while width is not None and _least(table) > width:
        chosen = max(table.columns, key=lambda x: x.drop)
        if not chosen.drop:
            break
        place = [*table.columns].index(chosen)
        gone.append(chosen)
        table = Table(_without(table.columns, place), table.title, [tuple(_without(x, place)) for x in table.rows])
    return table, gone


def _without(found: Sequence[Any], place: int) -> list[Any]:
    return [*found[:place], *found[place + 1 :]]


def _least(table: Table) -> int:
    """The width that a table needs at least."""
    needed = [min(x, y.folds) if y.folds else x for x, y in zip(_natural(table), table.columns, strict=True)]
    return sum(needed) + len(needed) - 1


def _natural(table: Table) -> list[int]:
    """What each column takes if nothing is broken."""
    columns = [(Text(x.heading), *cells) for x, *cells in zip(table.columns, *table.rows, strict=True)]
    return [max(cells_of(x.text) for x in column) for column in columns]


def _widths(table: Table, width: int | None) -> tuple[list[int], int]:
    """Each column's width, and that of the gap between them."""
    natural = _natural(table)
    for gap in (2, 1):
        if width is None or sum(natural) + gap * (len(natural) - 1) <= width:
            return natural, gap
    assert width is not None
    found = [min(x, y.folds) if y.folds else x for x, y in zip(natural, table.columns, strict=True)]
    left = width - sum(found) - len(found) + 1
    while left > 0:  # one by one to the column that is broken most
        place = max(range(len(found)), key=lambda i: natural[i] / found[i])
        if found[place] >= natural[place]:
            break
        found[place] += 1
        left -= 1
    return found, 1


def _joined(cells: Sequence[Text], columns: Sequence[Column], widths: Sequence[int], gap: int) -> list[Text]:
    out: list[Text] = []
    for place, (cell, column, width) in enumerate(zip(cells, columns, widths, strict=True)):
        blanks = " " * (width - cells_of(cell.text))
        padded = blanks + cell.text if column.number else cell.text + blanks
        out += [Text(" " * gap)] * bool(place) + [Text(padded, cell.style)]
    return out


def _broken(text: str, width: int) -> list[str]:
    """A cell's text on lines of at most this width; a word that is longer is broken anywhere."""
    lines, current = [], ""
    for word in _BREAKS.findall(text):
        if cells_of((current + word).rstrip()) > width and current:
            lines.append(current.rstrip())
            current = ""
        while cells_of(word.rstrip()) > width:
            cut = next(i for i in range(len(word), 0, -1) if cells_of(word[:i]) <= width or i == 1)
            lines.append(word[:cut])
            word = word[cut:]
        current += word
    return [*lines, current.rstrip()] if current.strip() or not lines else lines


def _wrapped(block: Line, width: int | None) -> list[Sequence[Text]]:
    """A line of text on lines of at most this width, those that follow further in."""
    parts = [Text(_flat(x.text), x.style) for x in block.parts]
    text = "".join(x.text for x in parts)
    if width is None or cells_of(text) <= width:
        return [parts]
    styles = [x.style for x in parts for _ in x.text]
    indent = len(text) - len(text.lstrip()) + 2
    out: list[Sequence[Text]] = []
    place = 0
    for found in _broken_text(text, width, indent):
        begin = text.index(found, place)
        place = begin + len(found)
        pieces = groupby(zip(styles[begin:place], found, strict=True), key=lambda x: x[0])
        told = [Text("".join(x for _, x in piece), style) for style, piece in pieces]
        out.append([Text(" " * (indent if out else 0)), *told])
    return out


def _broken_text(text: str, width: int, indent: int) -> list[str]:
    """The text of a line on lines, broken at blanks alone; all but the first have less room by `indent`."""
    lines: list[str] = []
    current = ""
    for word in re.findall(r"\s*\S+", text):
        room = width - (indent if lines else 0)
        if current and cells_of(current + word) > room:
            lines.append(current)
            word = word.lstrip()
            current = ""
        current += word
    return [*lines, current]


def _painted(parts: Sequence[Text], colours: bool) -> str:
    if not colours:
        return "".join(x.text for x in parts).rstrip()
    out = []
    for text, style in parts:
        codes = ";".join(str(_CODES[x]) for x in dict.fromkeys(style.split()))
        out.append(f"\x1b[{codes}m{text}\x1b[0m" if codes and text.strip() else text)
    return "".join(out).rstrip()


def _flat(text: str) -> str:
    """On one line, without anything that a terminal obeys."""
    return escape.CONTROL.sub("�", text.replace("\n", " ").replace("\t", " "))


def cells_of(text: str) -> int:
    """How many places of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if _unseen(x) else 2 if unicodedata.east_asian_width(x) in "WF" else 1 for x in text)


def _unseen(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me", "Cf")


# --- for other programs ---------------------------------------------------------------------------------


def markdown(page: Page) -> str:
    """A page as Markdown: its tables as tables, its lines as paragraphs."""
    out: list[str] = []
    for block in page:
        if isinstance(block, Line):
            text = escape.markdown("".join(x.text for x in block.parts).strip(), 10 * escape.LONGEST)
            out += [text, ""] if text else []
            continue
        if block.title:
            out += [f"**{escape.markdown(block.title)}**", ""]
        out.append(_markdown_row(x.heading for x in block.columns))
        out.append("|" + "|".join("--:" if x.number else "---" for x in block.columns) + "|")
        out += [_markdown_row(x.text for x in cells) for cells in block.rows]
        out.append("")
    return "\n".join(out).rstrip("\n") + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escape.markdown, cells)) + " |"


def html(table: Table) -> str:
    """A table as HTML, for a notebook."""
    head = "".join(f"<th>{html_escape(x.heading)}</th>" for x in table.columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align: {'right' if column.number else 'left'}'>{html_escape(x.text)}</td>"
            for x, column in zip(cells, table.columns, strict=True)
        )
        + "</tr>"
        for cells in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def comma_separated(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV with a heading: every name that any of them has, in the order met. What is unknown is empty."""
    import csv

    found = list(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(x for row in found for x in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in found)
    return out.getvalue()


def _plain(value: Any) -> Any:
    """A value of a cell. A spreadsheet takes text that begins so for a formula, and runs it."""
    if isinstance(value, str):
        text = _flat(value)
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
    return "" if value is None else value
