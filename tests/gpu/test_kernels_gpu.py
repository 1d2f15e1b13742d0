"""Each of our kernels, at a standard shape, through the real harness: right answers on a real GPU.

In worker processes: this one may have chosen Triton's interpreter, for the tests of the kernels on a CPU.
"""

from __future__ import annotations

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.registry.store.record import PROVIDER
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run.supervisor import Run

SAMPLING = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=2, warmup_s=0.05)
OWN = Catalog.default()
SINGLE = [
    x
    for x in OWN.operators
    if not OWN.operator(x).distributed
    and any(y.provider == PROVIDER and "cuda" in y.devices for y in OWN.of_operator(x))
]
"""Operators of one GPU that our kernels have."""
FORWARD_ONLY = {"gated_delta_rule"}
"""Those whose gradients they do not have."""


def smallest(operator: str) -> list:
    """Of each pass of the standard plan the case that moves the fewest bytes."""
    cases = plans.load("standard", OWN, "cuda", [operator]).cases
    passes = sorted({x.pass_ for x in cases} - ({"backward"} if operator in FORWARD_ONLY else set()))
    return [min((x for x in cases if x.pass_ == pass_), key=lambda x: x.bytes) for pass_ in passes]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One run of all operators."""
    patch = pytest.MonkeyPatch()
    patch.delenv("TRITON_INTERPRET", raising=False)
    cases = tuple(case for operator in SINGLE for case in smallest(operator))
    plan = plans.Plan("smallest", cases, 1, ("cold",), SAMPLING, 120.0)
    home = Home(tmp_path_factory.mktemp("home"))
    run = Run(plan, plan.cells(OWN, "cuda", ["kernelmark"]), OWN, "cuda", home, seed=1, ceilings=False)
    yield read(run.execute()).records
    patch.undo()


@pytest.mark.parametrize("operator", SINGLE)
def test_right_at_a_standard_shape(records, operator):
    mine = [x for x in records if x.case.operator == operator]
    assert mine
    assert {(x.case.name, x.status, x.reason) for x in mine} == {(x.case.name, "ok", None) for x in mine}
