"""FlexAttention on our inputs: its CPU path has the forward pass."""

from __future__ import annotations

import pytest
import torch
from kernelmark.baselines import flex_attention
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.attention import OPERATOR
from kernelmark.suite.operators.attention_sparse import OPERATOR as SPARSE
from kernelmark.suite.operators.attention_varlen import OPERATOR as VARLEN
from kernelmark.suite.operators.attention_window import OPERATOR as WINDOW


# torch's own, where its compiler is loaded.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_right_answer_twice(mask, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case = OPERATOR.case({"B": 2, "H": 4, "Hkv": 2, "S": 48, "D": 16}, "fp32", "forward", mask=mask)
    bench = Workbench.build(OPERATOR, case, torch.device("cpu"), seed=1)
    call = bench.call(flex_attention.attention(case))
    for contents in (bench.decoys, bench.values):
        bench.lay(contents)
        result = call()
    deviation(bench.comparable(result), bench.references, OPERATOR.tolerances["fp32"])
    torch._dynamo.reset()


# torch's own, where its compiler is loaded.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_window_right_answer_twice(mask, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    axes = {"B": 2, "H": 4, "Hkv": 2, "S": 300, "D": 16, "W": 70}
    case = WINDOW.case(axes, "fp32", "forward", mask=mask)
    bench = Workbench.build(WINDOW, case, torch.device("cpu"), seed=1)
    call = bench.call(flex_attention.IMPLEMENTATIONS["attention_window"]["flex_attention"](case))
    for contents in (bench.decoys, bench.values):
        bench.lay(contents)
        result = call()
    deviation(bench.comparable(result), bench.references, WINDOW.tolerances["fp32"])
    torch._dynamo.reset()


# torch's own, where its compiler is loaded.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("pattern", ["static", "learned"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_sparse_right_answer_twice(pattern, mask, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    axes = {"B": 2, "H": 4, "Hkv": 2, "S": 512, "D": 16}
    case = SPARSE.case(axes, "fp32", "forward", mask=mask, pattern=pattern, sparsity=50)
    bench = Workbench.build(SPARSE, case, torch.device("cpu"), seed=1)
    call = bench.call(flex_attention.attention_sparse(case))
    for contents in (bench.decoys, bench.values):
        bench.lay(contents)
        result = call()
    deviation(bench.comparable(result), bench.references, SPARSE.tolerances["fp32"])
    torch._dynamo.reset()


# torch's own, where its compiler is loaded.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_varlen_right_answer_twice(mask, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    axes = {"B": 3, "H": 4, "Hkv": 2, "S": 48, "D": 16}
    case = VARLEN.case(axes, "fp32", "forward", mask=mask, lengths="uniform")
    bench = Workbench.build(VARLEN, case, torch.device("cpu"), seed=1)
    call = bench.call(flex_attention.attention_varlen(case))
    for contents in (bench.decoys, bench.values):
        bench.lay(contents)
        result = call()
    deviation(bench.comparable(result), bench.references, VARLEN.tolerances["fp32"])
    torch._dynamo.reset()
