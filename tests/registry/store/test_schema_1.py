"""Journals of schema 1 are read forever: the same figures to the last digit but one.

The expected files hold what `kernelmark show --json` and `kernelmark compare --json` printed at commit e2e3164,
the last one that wrote schema 1.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path

import msgspec
import pytest
from kernelmark.registry.analysis.rows import summarize
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import parse, read
from kernelmark.registry.views.comparison_table import compare

FOLDER = Path(__file__).parent / "schema_1"


PAIRED = {
    (139, "speedup_vs_best_baseline"): 3.3833179449976916,
    (142, "speedup_vs_best_baseline"): 3.3596689841558014,
    (145, "speedup_vs_best_baseline"): 3.035372910278287,
    (148, "speedup_vs_best_baseline"): 3.248700627190803,
    (150, "speedup_vs_best_baseline"): 0.01708705288160137,
    (151, "speedup_vs_best_baseline"): 0.016000803694846494,
    (153, "speedup_vs_eager"): 62.4968607246946,
}
"""Of `state_space`, by row: ratios of rows whose third process was not reached. They were of the medians of all
processes, and are of those that both sides have, as docs/measuring.md says.
"""


def expected(name):
    return json.loads(gzip.decompress((FOLDER / name).read_bytes()))


def agrees(before, now, where=""):
    """Everything that was there is there still."""
    if isinstance(before, dict):
        for name, value in before.items():
            agrees(value, now[name], f"{where}.{name}")
    elif isinstance(before, list):
        assert len(before) == len(now), where
        for place, (value, other) in enumerate(zip(before, now, strict=True)):
            agrees(value, other, f"{where}[{place}]")
    elif isinstance(before, float):
        # NumPy's logarithms differ in the last bit by which vector units a CPU has.
        assert before == now or math.isclose(before, now, rel_tol=4 * sys.float_info.epsilon), where
    else:
        assert before == now, where


@pytest.mark.parametrize("name", ["state_space", "base"])
def test_rows_have_the_figures_that_they_had(name):
    before = expected(f"{name}.show.json.gz")
    before.pop("crossings")  # `kernelmark show` adds them
    for (row, ratio), value in PAIRED.items() if name == "state_space" else ():
        before["rows"][row][ratio] = value
    agrees(before, json.loads(msgspec.json.encode(summarize(read(FOLDER / f"{name}.jsonl.gz")))))


def test_comparisons_have_the_figures_that_they_had():
    found = compare(*(read(FOLDER / f"{x}.jsonl.gz") for x in ("base", "current"))).to_builtins()
    agrees(expected("compare.json.gz"), json.loads(msgspec.json.encode(found)))


def test_what_a_run_was_asked_for_is_typed():
    request = read(FOLDER / "state_space.jsonl.gz").header.request
    assert len(request.cases) == 45
    assert request.deadline_s == 60.0
    assert request.caches == ("cold",)
    assert request.sampling["max_samples"] == 300


def test_a_line_that_schema_1_would_not_have_read_is_named():
    header, record, *_ = gzip.decompress((FOLDER / "base.jsonl.gz").read_bytes()).split(b"\n")
    wrong = record.replace(b'"samples_ms":[', b'"samples_ms":[-1.0,')
    assert wrong != record
    with pytest.raises(InputError, match="journal: line 2: samples_ms holds times"):
        parse(header + b"\n" + wrong + b"\n")
