"""FlexAttention on our inputs: its CPU path has the forward pass."""

from __future__ import annotations

import pytest
import torch
from kernelmark.baselines import flex_attention
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.attention import OPERATOR
from kernelmark.suite.operators.attention_sparse import OPERATOR as SPARSE
from kernelmark.suite.operators.attention_sparse import right_blocks
from kernelmark.suite.operators.attention_varlen import OPERATOR as VARLEN
from kernelmark.suite.operators.attention_window import OPERATOR as WINDOW

# torch's own, where its compiler is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# One compilation an operator stands in `make test`; each takes seconds.
FULL = pytest.param("full", marks=pytest.mark.minutes)
HEADS = {"B": 2, "H": 4, "Hkv": 2, "D": 16}


@pytest.fixture
def right_twice(tmp_path, monkeypatch):
    """A check that a baseline answers a case, after it answered another of the same shapes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def check(operator, case):
        bench = Workbench.build(operator, case, torch.device("cpu"), seed=1)
        call = bench.call(flex_attention.IMPLEMENTATIONS[operator.name]["flex_attention"](case))
        for contents in (bench.decoys, bench.values):
            bench.lay(contents)
            result = call()
        deviation(bench.comparable(result), bench.references, operator.tolerances["fp32"])

    yield check
    torch._dynamo.reset()


@pytest.mark.parametrize("mask", ["causal", FULL])
def test_right_answer_twice(mask, right_twice):
    right_twice(OPERATOR, OPERATOR.case({**HEADS, "S": 48}, "fp32", "forward", mask=mask))


@pytest.mark.parametrize("mask", ["causal", FULL])
def test_window_right_answer_twice(mask, right_twice):
    right_twice(WINDOW, WINDOW.case({**HEADS, "S": 300, "W": 70}, "fp32", "forward", mask=mask))


@pytest.mark.parametrize("pattern", ["learned", pytest.param("static", marks=pytest.mark.minutes)])
@pytest.mark.parametrize("mask", ["causal", FULL])
def test_sparse_right_answer_twice(pattern, mask, right_twice):
    case = SPARSE.case({**HEADS, "S": 512}, "fp32", "forward", mask=mask, pattern=pattern, sparsity=50)
    right_twice(SPARSE, case)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("pattern", ["threshold", "static"])
def test_sparse_says_what_its_block_mask_leaves_out(mask, pattern):
    case = SPARSE.case({**HEADS, "S": 1000}, "fp32", "forward", mask=mask, pattern=pattern, sparsity=75)
    bench = Workbench.build(SPARSE, case, torch.device("cpu"), seed=1)
    call = flex_attention.IMPLEMENTATIONS["attention_sparse"]["flex_attention"](case)
    kept = right_blocks(bench.inputs)
    dense = (36 if mask == "causal" else 64) * kept[..., 0, 0].numel()
    assert call.tiles_left_out(**bench.inputs) == pytest.approx(1 - int(kept.sum()) / dense)


@pytest.mark.parametrize("mask", ["causal", FULL])
def test_varlen_right_answer_twice(mask, right_twice):
    right_twice(VARLEN, VARLEN.case({**HEADS, "B": 3, "S": 48}, "fp32", "forward", mask=mask, lengths="uniform"))
