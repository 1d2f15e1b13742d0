"""The planted faults have the faults they claim, and the honest one has none."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.doctor.examination import PLANTED, SLOWDOWN
from kernelmark.suite.doctor.planted.baselines import faults
from kernelmark.suite.doctor.planted.operators import chain, reread
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench():
    case = chain.OPERATOR.case({"N": 32}, "fp32", "forward")
    return Workbench.build(chain.OPERATOR, case, CPU, 1)


def error(bench, fault) -> float:
    call = bench.call(fault(bench.case))
    return deviation(bench.comparable(call()), bench.references, chain.OPERATOR.tolerances["fp32"])


def test_honest_and_slower_are_right(bench):
    assert error(bench, faults.honest) == error(bench, faults.slower) < 1e-5
    assert faults.EXTRA / faults.LINKS == SLOWDOWN


def test_stale_answers_the_first_question_for_ever(bench):
    call = faults.stale(bench.case)
    first = call(**bench.inputs)
    again = call(x=torch.zeros(32, 32), w=torch.zeros(32, 32))
    assert torch.equal(first, again)
    assert first.data_ptr() != again.data_ptr()


def test_nan_is_one_element(bench):
    assert int(faults.nan(bench.case)(**bench.inputs).isnan().sum()) == 1


def test_hang_does_not_come_back(bench, monkeypatch):
    naps = iter([None, None])
    monkeypatch.setattr(faults.time, "sleep", lambda seconds: next(naps))
    with pytest.raises(StopIteration):
        faults.hang(bench.case)(**bench.inputs)


def test_kill_kills():
    code = f"from {faults.__name__} import kill; kill(None)(None, None)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_hoard_asks_for_too_much(bench):
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        faults.hoard(bench.case)(**bench.inputs)


def test_corrupt_needs_a_gpu(bench):
    with pytest.raises(NotImplementedError, match="only a GPU has a context to corrupt"):
        faults.corrupt(bench.case)(**bench.inputs)


def test_squares():
    case = reread.OPERATOR.case({"M": 4, "N": 8}, "fp32", "forward")
    bench = Workbench.build(reread.OPERATOR, case, CPU, 1)
    result = bench.call(faults.squares(case))()
    assert deviation([result], bench.references, reread.OPERATOR.tolerances["fp32"]) < 1e-6


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plans_fit_their_devices(device):
    """They are a root of their own, and cost next to nothing."""
    catalog = Catalog.of(PLANTED)
    cases = [
        x for operator in catalog.operators.values() for g in operator.plans[device] for x in operator.expand(g)
    ]
    assert sorted(x.operator for x in cases) == ["chain", "reread"]
    assert all(x.bytes <= 32 << 20 for x in cases)
    assert not set(catalog.operators) & set(Catalog.default().operators)
    assert plans.BUILTIN[0] not in catalog.operators["chain"].plans
