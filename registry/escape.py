"""Names and reasons of others, made harmless for where they are shown: a terminal, Markdown, HTML.

A journal may come from anywhere, and a name in it may hold escape sequences, a library's markup or tags. HTML
goes through `html.escape` or Jinja's own escaping; a terminal and Markdown go through here.

rich is imported only when a console is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u200e\u200f\u2028-\u202e\u2066-\u2069"  # what reorders text or breaks lines unseen
    "\ud800-\udfff]"  # halves of characters, which no output can encode
)
LONGEST = 400
"""Characters of a name or reason that are shown."""


def plain(text: object, limit: int = LONGEST) -> str:
    """One line without anything that a terminal obeys, cut to `limit` characters."""
    cut = str(text)[: limit + 1]
    flat = CONTROL.sub("�", cut.replace("\n", " ").replace("\t", " "))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def lines(text: object, limit: int = 10 * LONGEST) -> str:
    """As `plain`, over several lines."""
    cut = str(text)[: limit + 1]
    flat = CONTROL.sub("�", cut)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def markdown(text: object, limit: int = LONGEST) -> str:
    """Text that cannot break out of a Markdown table's cell, link, mention or become a tag."""
    flat = " ".join(plain(text, limit).split())
    return re.sub(r"([\\|`*_<>\[\]@#~$])", r"\\\1", flat.replace("&", "&amp;")).replace(r"\<", "&lt;")


def code(text: object, limit: int = LONGEST) -> str:
    """Text for between two backticks."""
    return re.sub("[`<>]", "'", " ".join(plain(text, limit).split()))


def console(width: int | None = None, file: IO[str] | None = None) -> Console:
    """The terminal: strings are shown as they are, never read as markup, and control characters are not sent."""
    from rich.console import Console
    from rich.segment import Segment

    class Harmless(Console):
        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            clean = (x if x.control else Segment(CONTROL.sub("�", x.text), x.style) for x in buffer)
            return super()._render_buffer(clean)

    return Harmless(width=width, file=file, markup=False, emoji=False)
