"""The stages of attention on a Hopper GPU, through the real harness: each right, none in another's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run.supervisor import Run

STAGES = Path(__file__).parents[2] / "docs" / "stages"
SAMPLING = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=2, warmup_s=0.05)


def test_right(monkeypatch, tmp_path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the last stages are kernels for compute capability 9.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("KERNELMARK_PATH", str(STAGES))
    catalog = Catalog.default()
    operator = catalog.operator("attention")
    cases = tuple(
        operator.case({"B": 1, "H": 4, "Hkv": 2, "S": 1536, "D": D}, "bf16", pass_, mask=mask)
        for D in (64, 128)
        for mask in ("causal", "full")
        for pass_ in ("forward", "backward")
    )
    plan = plans.Plan("stages", cases, 1, ("cold",), SAMPLING, 120.0)
    run = Run(
        plan, plan.cells(catalog, "cuda", ["stages"]), catalog, "cuda", Home(tmp_path), seed=1, ceilings=False
    )
    records = read(run.execute()).records
    assert len(records) == 4 * len(cases)
    assert {(x.case.name, x.implementation, x.status, x.reason) for x in records} == {
        (x.case.name, x.implementation, "ok", None) for x in records
    }
