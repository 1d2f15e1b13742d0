"""Transformers' own code on our inputs, where it is installed."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernelmark.baselines import transformers as baseline
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench

SMALL = {
    "attention": {"B": 2, "H": 4, "Hkv": 2, "S": 24, "D": 16},
    "attention_window": {"B": 2, "H": 4, "Hkv": 2, "S": 24, "D": 16, "W": 9},
    "gelu": {"M": 3, "N": 16},
    "rms_norm": {"B": 2, "S": 3, "D": 16},
    "rope": {"B": 2, "H": 4, "Hkv": 2, "S": 3, "D": 8},
}
STATE_SPACE = {"gated_rms_norm", "selective_scan", "selective_state_update", "ssd"}
"""In test_state_space_baselines.py."""
PROGRAMS = {"forward", "generate", "serve", "train"}
"""Of workloads, not of operators: in tests/suite/workloads."""
ENTRIES = [
    (name, kind)
    for name, kinds in baseline.IMPLEMENTATIONS.items()
    if name not in STATE_SPACE | PROGRAMS
    for kind in kinds
]


def build(name, pass_, **options):
    operator = importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR
    return operator, operator.case(SMALL[name], "fp32", pass_, **options)


@pytest.mark.parametrize("pass_", ["forward", "forward_backward"])
@pytest.mark.parametrize(("name", "kind"), ENTRIES)
def test_right(name, kind, pass_):
    pytest.importorskip("transformers", reason="transformers is not installed")
    operator, case = build(name, pass_)
    bench = Workbench.build(operator, case, torch.device("cpu"), seed=1)
    result = bench.call(baseline.IMPLEMENTATIONS[name][kind](case))()
    deviation(bench.comparable(result), bench.references, operator.tolerances["fp32"])


@pytest.mark.parametrize("name", ["attention", "attention_window"])
@pytest.mark.parametrize("kind", list(baseline.IMPLEMENTATIONS["attention"]))
def test_full_attention(name, kind):
    pytest.importorskip("transformers", reason="transformers is not installed")
    operator, case = build(name, "forward", mask="full")
    bench = Workbench.build(operator, case, torch.device("cpu"), seed=1)
    result = bench.call(baseline.IMPLEMENTATIONS[name][kind](case))()
    deviation(bench.comparable(result), bench.references, operator.tolerances["fp32"])


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("gelu", "transformers_gelu_new", {"approximate": "none"}),
        ("rope", "transformers", {"layout": "interleaved"}),
    ],
)
def test_what_it_lacks(name, kind, options):
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(NotImplementedError):
        baseline.IMPLEMENTATIONS[name][kind](build(name, "forward", **options)[1])
