"""Writes the table of `docs/peers.md` from journals of `registry/reference/` and what was published.

python docs/peers.py            prints the page
python docs/peers.py --write    writes it; a test holds the page to what this prints
"""

from __future__ import annotations

import sys
from pathlib import Path

from _page import placed
from kernelmark.registry.analysis.published import published
from kernelmark.registry.analysis.releases import releases
from kernelmark.registry.store.journal import read
from kernelmark.registry.views import fidelity

HERE = Path(__file__).resolve().parent
PAGE = HERE / "peers.md"
JOURNALS = HERE.parent / "registry" / "reference"
RUNS = ("20261121-105936-48c0", "20261127-122232-f28b", "20261123-215820-10ba", "20261130-094504-85db")
"""Those that have a row of a case that somebody published a figure of."""


def table() -> str:
    """What was published beside what these runs measured."""
    journals = [read(JOURNALS / f"{x}.jsonl.gz") for x in RUNS]
    return fidelity.table(journals, published(), releases())


BLOCKS = {"fidelity": table}


def main(arguments: list[str]) -> None:
    """Prints the page, or writes it."""
    text = placed(PAGE.read_text(encoding="utf-8"), BLOCKS)
    if "--write" in arguments:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
