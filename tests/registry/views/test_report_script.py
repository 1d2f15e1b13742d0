"""The report's script, in a real browser: what it says against a baseline, sorting, searching."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernelmark.registry.views.report import render

pytest.importorskip("jinja2", reason="Jinja2 is not installed")

DRIVER = Path(__file__).with_name("report_driver.js")
TIMES = {
    ("rms_norm", "S1"): (1.0, 2.0, 1.5),
    ("rms_norm", "S2"): (1.0, 0.5, 0.8),
    ("rms_norm", "S10"): (1.0, 1.0, 4.0),
    ("softmax", "S1"): (2.0, 5.0, None),
}
"""Of ours, torch and liger, in ms."""


@pytest.fixture
def seen(literal: Any, browse: Callable[..., str], tmp_path: Path) -> Any:
    """What the driver saw on the report of a run of these times."""
    lines = []
    for (operator, size), times in TIMES.items():
        case = literal.case(operator=operator, name=size, axes={"S": int(size[1:])})
        for replicate, noise in enumerate((1.0, 1.001, 1.002)):
            for place, (name, ms) in enumerate(zip(("kernelmark", "torch", "liger"), times, strict=True)):
                # At S10 ours and torch's are equal but for noise: nothing is decided there.
                jitter = 1 + (noise - 1) * (place - 1) * (10 if size == "S10" else 1)
                fields = {"case": case, "replicate": replicate}
                lines.append(
                    literal.record(name, status="unsupported", reason="not here", **fields)
                    if ms is None
                    else literal.record(name, ms * jitter, **fields)
                )
    page = render([literal.journal(*lines, literal.footer(), replicates=3)])
    driver = DRIVER.read_text()
    # The page's own policy stays, with one script more.
    allowed = base64.b64encode(hashlib.sha256(driver.encode()).digest()).decode()
    page, count = re.subn("(script-src '[^']*')", rf"\1 'sha256-{allowed}'", page)
    assert count == 1
    path = tmp_path / "report.html"
    path.write_text(page.replace("</body>", f"<script>{driver}</script></body>"))
    left = re.search(r'<pre id="seen">(.*?)</pre>', browse(path.as_uri(), "--dump-dom"), re.S)
    assert left is not None, "the page's script, or the driver, ended with an error"
    return json.loads(html.unescape(left[1]))


def test_baselines_sorting_and_searching(seen: Any) -> None:
    assert seen["tools"]
    assert seen["options"] == ["", "liger", "torch"]
    assert seen["first"] == [
        ["rms_norm", "mean bold 0.91×", "bounds [0.90, 0.92]", "faster 1", "undecided 1", "slower 1", "best 1.50×",
         "worst 0.50×"],
        ["softmax", "mean bold 2.50×", "bounds [2.50, 2.51]", "faster 1", "undecided 0", "slower 0", "best 2.50×",
         "worst 2.50×"],
        ["rms_norm S1", "rival liger", "ratio bold 1.50×", "bounds [1.50, 1.51]", "category good"],
        ["rms_norm S2", "rival torch", "ratio bold 0.50×", "bounds [0.50, 0.50]", "category slower"],
        ["rms_norm S10", "rival torch", "ratio 1.01×", "bounds [0.99, 1.04]", "category undecided"],
        ["softmax S1", "rival torch", "ratio bold 2.50×", "bounds [2.50, 2.51]", "category excellent"],
    ]  # fmt: skip
    assert seen["again"] == seen["first"], "the script computes as the page was made"
    assert seen["torch"][0][1:6] == ["mean 1.00×", "bounds [0.99, 1.01]", "faster 1", "undecided 1", "slower 1"]
    assert seen["torch"][2][1:3] == ["rival torch", "ratio bold 2.00×"]
    assert seen["torch"][3:] == seen["first"][3:]
    assert seen["liger"][0][1:6] == [
        "mean bold 1.70×",
        "bounds [1.67, 1.73]",
        "faster 2",
        "undecided 0",
        "slower 1",
    ]
    assert seen["liger"][1][1:3] == ["mean –", "bounds –"]
    assert seen["liger"][5][1:] == ["rival liger", "ratio –", "bounds ", "category not measured"]

    # Sorting: numbers as numbers, also within names; equal ones stay as they were.
    assert seen["ascending"] == ["rms_norm S2", "rms_norm S10", "rms_norm S1", "softmax S1"]
    assert seen["descending"] == seen["ascending"][::-1]
    assert seen["by_name"] == ["softmax S1", "rms_norm S1", "rms_norm S2", "rms_norm S10"]

    # Searching: all words, in whatever is folded; and back to how it was.
    assert seen["words"] == {"said": "1 row", "rows": ["softmax S1 liger"], "cases": 0, "open": 3}
    assert seen["nobody"] == {"said": "0 rows", "rows": [], "cases": 0, "open": 2}
    assert seen["cleared"] == seen["nothing"] == {"said": "", "rows": [], "cases": 4, "open": 2}

    # Links to sections: without a scrollbar, faded only where more follow.
    assert seen["links"] == {"fit": False, "narrow": True, "end": False, "scrollbar": 0}
