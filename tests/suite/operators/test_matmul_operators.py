"""The operators of matrix products: cost, references, what they say of errors, and PyTorch beside them."""

from __future__ import annotations

import importlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect, deviation, distance
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import fp8_matmul, grouped_fp8_matmul, moe, mx_matmul
from kernelmark.suite.operators.sparse24_matmul import pruned

CPU = torch.device("cpu")
NAMES = ("matmul", "fp8_matmul", "mx_matmul", "sparse24_matmul", "quantized_linear")
SMALL = {"M": 8, "N": 48, "K": 64}
EXPERTS = {"M": 40, "D": 96, "F": 80, "E": 5, "K": 2}


def operator(name):
    return importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR


def variants(name):
    """The small case with each combination of options and dtypes."""
    chosen = operator(name)
    for values in itertools.product(*chosen.options.values()):
        for dtype in chosen.dtypes:
            if name == "mx_matmul" and dtype == "e4m3" and values[0] != "mxfp4":
                continue
            yield chosen.case(SMALL, dtype, "forward", **dict(zip(chosen.options, values, strict=True)))


@pytest.mark.parametrize("name", NAMES)
def test_cost(name):
    """Operations are two a number and step of K, half of them in 2:4; bytes are at least the output's."""
    for case in variants(name):
        pieces = {"swiglu": 2}.get(case.options.get("epilogue"), 1)
        whole = 2 * SMALL["M"] * SMALL["N"] * SMALL["K"] * pieces
        assert case.flops == (whole // 2 if name == "sparse24_matmul" else whole)
        assert case.bytes > 2 * SMALL["M"] * SMALL["N"]
        assert case.tokens == SMALL["M"]
    chosen = operator(name)
    assert 1 <= len([x for grid in chosen.plans["quick"] for x in chosen.expand(grid)]) <= 3
    assert all(x.bytes < 64e6 for grid in chosen.plans["quick_cpu"] for x in chosen.expand(grid))


@pytest.mark.parametrize("skew", [0, 1, 3])
@pytest.mark.parametrize(("M", "E", "K"), [(16, 8, 2), (16, 128, 8), (4096, 128, 8), (1, 32, 4)])
def test_experts_that_tokens_choose_are_about_as_many_as_in_draws(M, E, K, skew):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(40):
        logits = torch.randn(M, E, generator=generator) + skew * torch.randn(E, generator=generator)
        found.append(logits.topk(K, -1).indices.unique().numel())
    assert moe.expected_experts(M, E, K, skew) == pytest.approx(sum(found) / len(found), rel=0.12)
    assert K - 1e-6 <= moe.expected_experts(M, E, K, skew) <= E + 1e-6


@pytest.mark.parametrize("name", ["fp8_matmul", "mx_matmul", "sparse24_matmul", "sparse24_fp8_matmul"])
def test_what_a_model_keeps_is_an_input(name):
    chosen = operator(name)
    for case in variants(name):
        given = Workbench.build(chosen, case, CPU, seed=1).inputs
        assert chosen.weights
        assert set(chosen.weights) <= given.keys() - {"x", "scale_x"}


@pytest.mark.parametrize("name", ["matmul", "mx_matmul", "sparse24_matmul"])
def test_eager_is_right(name):
    chosen = operator(name)
    for case in variants(name):
        bench = Workbench.build(chosen, case, CPU, seed=1)
        for kind, factory in EAGER[name].items():
            if kind != "torch_cusparselt" and (kind, case.dtype) != ("torch_bf16", "e4m3"):
                deviation(
                    bench.comparable(bench.call(factory(case))()), bench.references, chosen.tolerances[case.dtype]
                )


def measured(chosen, case):
    """The operator's own metrics of the exact answer, and its error against that for the unquantized numbers."""
    bench = Workbench.build(chosen, case, CPU, seed=1)
    found = {m.name: f(bench.references, bench.references, bench.inputs) for m, f in chosen.measures.items()}
    return found | {"error_unquantized": distance(bench.references, bench.unquantized())}


@pytest.mark.parametrize("recipe", fp8_matmul.OPERATOR.options["recipe"])
@pytest.mark.parametrize("data", ["normal", "outliers"])
def test_errors_of_fp8(recipe, data):
    """The exact product of quantized numbers is as far from that of the original ones as E4M3's rounding is, and
    so it is with outliers: E4M3 has the exponents for them.
    """
    case = fp8_matmul.OPERATOR.case({"M": 64, "N": 96, "K": 400}, "e4m3", "forward", recipe=recipe, data=data)
    found = measured(fp8_matmul.OPERATOR, case)
    assert 0.02 < found["error_unquantized"] < 0.045
    assert 0 < found["saturated"] < 0.02
    assert found["underflowed"] < 1e-3
    assert found["weight_bytes"] == pytest.approx({"row": 1.01, "group": 1.04}.get(recipe, 1), abs=3e-3)


def test_every_row_has_its_error_against_unquantized_numbers():
    """Beside its own: what was drawn again is what the inputs were quantized from."""
    case = fp8_matmul.OPERATOR.case({"M": 16, "N": 48, "K": 400}, "e4m3", "forward")
    bench = Workbench.build(fp8_matmul.OPERATOR, case, CPU, seed=3)
    trial = Trial(SimpleNamespace(synchronize=lambda: None), bench, "cold", Sampling(), Stages())

    def call():
        wide = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in bench.inputs.items()}
        return fp8_matmul.reference(**wide).bfloat16()

    assert trial.verify(call) < 3e-3
    assert 0.03 < trial.measured["error_unquantized"] < 0.045
    assert trial.measured.keys() == {"error_unquantized", "saturated", "underflowed", "weight_bytes"}


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_layouts_of_fp8_hold_the_same(layout):
    """Numbers and scales; a turned matrix lies the other way."""
    options = {"recipe": "group", "layout": layout}
    case = fp8_matmul.OPERATOR.case({"M": 8, "N": 48, "K": 130}, "e4m3", "forward", **options)
    given = fp8_matmul.inputs(case, CPU, torch.Generator().manual_seed(1))
    plain = fp8_matmul.OPERATOR.case({"M": 8, "N": 48, "K": 130}, "e4m3", "forward", recipe="group")
    same = fp8_matmul.inputs(plain, CPU, torch.Generator().manual_seed(1))
    assert all(torch.equal(given[x].float(), same[x].float()) for x in ("a", "b", "scale_a", "scale_b"))
    assert (given["a"].stride(1) == 1) == (layout != "tn")
    assert (given["b"].stride(1) == 1) == (layout != "nt")


def test_results_of_fp8_have_a_dtype():
    given = fp8_matmul.inputs(next(variants("fp8_matmul")), CPU, torch.Generator().manual_seed(1))
    right = torch.zeros(SMALL["M"], SMALL["N"], dtype=torch.bfloat16)
    assert fp8_matmul.results(right, given).eq(0).all()
    for wrong in (right.float(), right.T):
        assert fp8_matmul.results(wrong, given).isnan().all()


@pytest.mark.parametrize(
    ("format", "error", "size"), [("mxfp8", 0.03, 1.03), ("mxfp4", 0.13, 0.53), ("nvfp4", 0.11, 0.56)]
)
def test_errors_of_block_formats(format, error, size):
    case = mx_matmul.OPERATOR.case({"M": 32, "N": 64, "K": 640}, "bf16", "forward", format=format)
    found = measured(mx_matmul.OPERATOR, case)
    assert error * 0.8 < found["error_unquantized"] < error * 1.2
    assert found["weight_bytes"] == pytest.approx(size, abs=0.01)
    assert 0 < found["saturated"] < 0.2
    assert found["underflowed"] < 0.2


def test_errors_of_a_quantized_linear():
    """Of the weight alone: the activation is exact in the reference."""
    chosen = operator("quantized_linear")
    found = measured(chosen, chosen.case({"M": 32, "N": 64, "K": 400}, "bf16", "forward"))
    assert 0.02 < found["error_unquantized"] < 0.03


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_rows_of_no_group_count_for_nothing(layout):
    chosen = grouped_fp8_matmul.OPERATOR
    case = chosen.case({"E": 3, "M": 20, "N": 24, "K": 130}, "e4m3", "forward", layout=layout)
    bench = Workbench.build(chosen, case, CPU, seed=1)
    groups, rows = bench.inputs["groups"], sum(grouped_fp8_matmul.lengths(3, 20))
    assert case.tokens == rows
    assert int((groups >= 0).sum() if layout == "contiguous" else groups.sum()) == rows
    result = bench.references[0].bfloat16()
    spoilt = torch.where(result == 0, torch.nan, result)
    deviation(bench.comparable(spoilt), bench.references, chosen.tolerances["e4m3"])
    assert 0.02 < measured(chosen, case)["error_unquantized"] < 0.045
    with pytest.raises(Incorrect):
        deviation(bench.comparable(result * 1.01), bench.references, chosen.tolerances["e4m3"])


@pytest.mark.parametrize("activation", ["swiglu", "clamped"])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_eager_experts_are_right(dtype, activation):
    chosen = operator("moe")
    case = chosen.case(EXPERTS, dtype, "forward", skew=1, activation=activation)
    bench = Workbench.build(chosen, case, CPU, seed=1)
    call = bench.call(EAGER["moe"]["torch"](case))
    deviation(bench.comparable(call()), bench.references, chosen.tolerances[dtype])
    assert 0.5 < case.flops / (2 * 40 * 2 * 3 * 96 * 80) < 1.1


def test_an_activation_is_another_case_and_swiglu_the_one_that_was():
    found = [moe.OPERATOR.case(EXPERTS, x, "forward") for x in ("bf16", "e4m3")]
    assert [x.spec for x in found] == ["49d86148f4c1", "f1c9f6b32655"]
    clamped = moe.OPERATOR.case(EXPERTS, "bf16", "forward", activation="clamped")
    assert (clamped.spec != found[0].spec, "clamped" in clamped.name, "swiglu" in found[0].name) == (
        True,
        True,
        False,
    )


def test_the_clamped_product_is_its_formula():
    gate = torch.tensor([-9.0, 0.5, 9.0]).double()
    up = torch.tensor([8.0, -9.0, 0.5]).double()
    want = [
        -9 / (1 + math.exp(1.702 * 9)) * 8,
        0.5 / (1 + math.exp(-0.851)) * -6,
        7 / (1 + math.exp(-11.914)) * 1.5,
    ]
    assert moe.product_of(gate, up, 7.0).tolist() == pytest.approx(want)


def test_shares_are_of_experts_in_8_bits():
    found = [measured(moe.OPERATOR, moe.OPERATOR.case(EXPERTS | {"M": 4}, x, "forward")) for x in ("e4m3", "bf16")]
    assert 1 / 128**2 <= found[0]["saturated"] < 0.01
    assert 0 <= found[0]["underflowed"] < 0.01
    assert found[1]["saturated"] is found[1]["underflowed"] is None


def test_skew_is_seen():
    chosen = operator("moe")

    def of(skew):
        case = chosen.case(EXPERTS | {"E": 16}, "bf16", "forward", skew=skew)
        return measured(chosen, case)["imbalance"]

    assert 1 < of(0) < of(3)


def test_experts_as_good_may_be_chosen():
    """Where logits are nearly equal any choice is right, with the answer of that choice; elsewhere it is wrong."""
    generator = torch.Generator().manual_seed(1)
    case = moe.OPERATOR.case(EXPERTS, "bf16", "forward")
    given = moe.inputs(case, CPU, generator)
    given["router"][1] = given["router"][0]
    wide = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    logits = wide["x"] @ wide["router"].T
    exact = moe.reference(**wide)
    chosen = logits.topk(2, -1).indices
    only = ((chosen == 0) ^ (chosen == 1)).any(-1)  # these tokens have one of the equals
    assert only.any()
    other = torch.where(only[:, None] & (chosen < 2), 1 - chosen, chosen)
    answer = moe.by_experts(wide["x"], logits, other, wide)
    assert not torch.allclose(answer, exact, rtol=1e-2)
    found = moe.results((answer.bfloat16(), other.int()), given)
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    worst = logits.argsort(-1)[:, :2]
    assert moe.results((exact.bfloat16(), worst.int()), given).isnan().all()
    assert moe.results((exact.bfloat16(), chosen[:, :1].expand(-1, 2).int()), given).isnan().all()


def test_codes_are_rounded_to_nearest_even():
    """Of E2M1, between every two of its numbers, beyond the largest, and with signs."""
    numbers = [0.0, 0.25, 0.3, 0.5, 0.75, 1.0, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 7.0, -0.75]
    wanted = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, -1.0]
    weight = torch.tensor([numbers + [0.0] * 16]).float()
    q, scales, _ = mx_matmul.quantized(weight, "mxfp4")
    assert scales.tolist() == [[127]]
    assert mx_matmul.dequantized(q, scales, "mxfp4", None, torch.float32)[0, :16].tolist() == wanted


def test_pruning_keeps_the_largest():
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0]])
    dense, values, positions = pruned(weight)
    assert dense.tolist() == [[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert values.tolist() == [[-3.0, 2.0, 0.0, 0.0]]
    assert positions.tolist() == [[(1 | 2 << 2) | (0 | 1 << 2) << 4]]
