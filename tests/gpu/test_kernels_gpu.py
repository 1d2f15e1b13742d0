"""Each of our kernels, at a standard shape, through the real harness: right answers on a real GPU.

In worker processes: this one may have chosen Triton's interpreter, for the tests of the kernels on a CPU.
"""

from __future__ import annotations

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run.supervisor import Run

SAMPLING = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=2, warmup_s=0.05)
OWN = Catalog.default()
NO_KERNEL = {"int8_linear"}
"""Operators of which we have a kernel for CPUs alone."""
FORWARD_ONLY = {"gated_delta_rule": "build: the gated delta rule has a forward pass only here"}
"""What is said of gradients that our kernels do not have."""
SINGLE = [x for x in OWN.operators if not OWN.operator(x).distributed and x not in NO_KERNEL]
"""Operators of one GPU that our kernels have."""


def smallest(operator: str) -> list:
    """Of each pass of the standard plan the case that moves the fewest bytes."""
    cases = plans.load("standard", OWN, "cuda", [operator]).cases
    passes = sorted({x.pass_ for x in cases})
    return [min((x for x in cases if x.pass_ == pass_), key=lambda x: x.bytes) for pass_ in passes]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One run of all operators."""
    patch = pytest.MonkeyPatch()
    patch.delenv("TRITON_INTERPRET", raising=False)
    cases = tuple(case for operator in (*SINGLE, *NO_KERNEL) for case in smallest(operator))
    plan = plans.Plan("smallest", cases, 1, ("cold",), SAMPLING, 120.0)
    home = Home(tmp_path_factory.mktemp("home"))
    run = Run(plan, plan.cells(OWN, "cuda", ["kernelmark"]), OWN, "cuda", home, seed=1, ceilings=False)
    yield read(run.execute()).records
    patch.undo()


@pytest.mark.parametrize("operator", SINGLE)
def test_right_at_a_standard_shape(records, operator):
    mine = [x for x in records if x.case.operator == operator]
    assert mine

    def wanted(record):
        lacking = FORWARD_ONLY.get(operator) if record.case.pass_ != "forward" else None
        return record.case.name, "unsupported" if lacking else "ok", lacking

    assert {(x.case.name, x.status, x.reason) for x in mine} == {wanted(x) for x in mine}


@pytest.mark.parametrize("operator", sorted(NO_KERNEL))
def test_what_has_no_kernel_is_no_row(records, operator):
    assert not [x for x in records if x.case.operator == operator]
