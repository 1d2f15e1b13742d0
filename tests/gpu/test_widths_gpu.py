"""Row operators of plan `widths` at its narrowest rows in bf16, through the real harness on a real GPU: there
Triton's interpreter cuts where a GPU rounds, and `tests/kernels/test_widths.py` has fp32 in the place of bf16.

In worker processes: this one may have chosen Triton's interpreter.
"""

from __future__ import annotations

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run.supervisor import Run
from kernelmark.suite.shapes import ROW_OPERATORS

OWN = Catalog.default()
SAMPLING = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=2, warmup_s=0.05)
NARROW = (1, 2, 23)
CASES = tuple(
    x
    for x in plans.load("widths", OWN, "cuda").cases
    if x.dtype == "bf16" and x.axes[ROW_OPERATORS[x.operator][1]] in NARROW
)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One run of all."""
    patch = pytest.MonkeyPatch()
    patch.delenv("TRITON_INTERPRET", raising=False)
    plan = plans.Plan("narrow", CASES, 1, ("cold",), SAMPLING, 60.0)
    home = Home(tmp_path_factory.mktemp("home"))
    run = Run(plan, plan.cells(OWN, "cuda", ["kernelmark"]), OWN, "cuda", home, seed=1, ceilings=False)
    yield {(x.case.operator, x.case.name): x for x in read(run.execute()).records}
    patch.undo()


@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{x.operator}-{x.name}")
def test_right_at_the_narrowest(records, case):
    found = records[case.operator, case.name]
    assert (found.status, found.reason) == ("ok", None)
