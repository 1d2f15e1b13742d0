"""`docs/results-h200.md` is what its command writes from the journals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_journals_say():
    done = subprocess.run([sys.executable, DOCS / "results.py"], capture_output=True, text=True, check=True)
    told = "run `python docs/results.py --write`"
    assert done.stdout == (DOCS / "results-h200.md").read_text(encoding="utf-8"), told
