"""The findings: their programs run without a GPU, and the Triton that is installed shows what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FINDINGS = sorted(x.stem for x in (DOCS / "findings").glob("[a-z]*.py") if x.stem not in ("run", "sm90"))
ON_A_GPU = ("converted_back", "zeros_are_faster")


def test_the_page_has_them_all():
    page = (DOCS / "findings.md").read_text(encoding="utf-8")
    assert [x for x in FINDINGS if f"(findings/{x}.py)" not in page] == []


def test_what_needs_no_gpu_is_shown():
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, DOCS / "findings" / "run.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    blocks = [x.splitlines() for x in done.stdout.split("== ")[1:]]
    ended = {x[0]: x[-1] for x in blocks}
    assert ended == {x: "-> needs a GPU" if x in ON_A_GPU else "-> shown" for x in FINDINGS}, done.stdout
