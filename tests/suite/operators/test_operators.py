"""Every operator of the memory-bound family: its plans, its cost, its reference, and PyTorch beside it."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.verify import Incorrect, deviation, flat
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operator import BYTES

CPU = torch.device("cpu")

SMALL = {
    "rms_norm": {"B": 2, "S": 3, "D": 16},
    "layer_norm": {"B": 2, "S": 3, "D": 16},
    "add_rms_norm": {"B": 2, "S": 3, "D": 16},
    "gelu": {"M": 3, "N": 16},
    "swiglu": {"M": 3, "N": 16},
    "geglu": {"M": 3, "N": 16},
    "rope": {"B": 2, "H": 4, "Hkv": 2, "S": 3, "D": 8},
    "cross_entropy": {"M": 3, "V": 17},
    "fp8_quant": {"M": 3, "N": 300},
    "softmax": {"M": 3, "D": 17},
    "mx_quant": {"M": 8, "N": 300},
    "fused_linear_cross_entropy": {"M": 3, "D": 16, "V": 17},
}

FEW_ROWS = [f"B1-S{S}-D{D}-bf16-forward" for S in (1, 64) for D in (65536, 262144)] + [
    f"B1-S64-D{D}-bf16-backward" for D in (65536, 262144)
]

NORM = [
    f"B{B}-S2048-D{D}-bf16-{p}" for B in (4, 32) for D in (4096, 8192) for p in ("forward", "backward")
] + FEW_ROWS

STANDARD = {
    "rms_norm": NORM,
    "layer_norm": NORM,
    "add_rms_norm": NORM,
    "gelu": [f"M{M}-N4096-tanh-bf16-{p}" for M in (4096, 16384) for p in ("forward", "backward")],
    "swiglu": [f"M{M}-N11008-bf16-{p}" for M in (2048, 8192) for p in ("forward", "backward")],
    "geglu": [f"M{M}-N11008-bf16-{p}" for M in (2048, 8192) for p in ("forward", "backward")],
    "rope": [f"B4-H32-Hkv8-S4096-D128-half-bf16-{p}" for p in ("forward", "backward")],
    "cross_entropy": [
        f"M{M}-V{V}-bf16-{p}"
        for M, V in ((4096, 32000), (16384, 32000), (8192, 128256))
        for p in ("forward", "forward_backward")
    ]
    + ["M8192-V128256-regularized-bf16-forward_backward"],
    "softmax": [
        *(
            f"M{M}-D{D}-bf16-{p}"
            for M, D in ((8192, 4096), (2048, 65536), (64, 262144))
            for p in ("forward", "backward")
        ),
        *(f"M{M}-D{D}-bf16-forward" for M, D in ((1, 262144), (65536, 128))),
    ],
    "fp8_quant": [
        f"M{M}-N4096-{granularity}-{format}-bf16-forward"
        for M in (4096, 16384)
        for granularity in ("row", "block")
        for format in ("e4m3", "e5m2")
    ]
    + [f"M16384-N4096-{granularity}-e4m3-bf16-forward" for granularity in ("tile", "column", "both", "tile_both")],
    "mx_quant": [
        f"M{M}-N4096-{format}-bf16-forward" for M in (4096, 16384) for format in ("mxfp8", "mxfp4", "nvfp4")
    ]
    + ["M16384-N4096-mxfp4-fp32-forward"],
    "fused_linear_cross_entropy": [
        f"M{M}-D4096-V{V}-bf16-forward_backward" for M in (8192, 16384) for V in (32000, 128256)
    ]
    + [f"M4096-D4096-V128256-bf16-{p}" for p in ("forward", "forward_backward")],
}

WITH_MATMUL = ("fused_linear_cross_entropy",)

WHOLE = [(name, pass_) for name in SMALL for pass_ in ("forward", "backward", "forward_backward")]


def operator(name):
    return importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR


def cases(name, plan):
    return [case for grid in operator(name).plans[plan] for case in operator(name).expand(grid)]


def variants(name):
    """The smallest case of each option."""
    chosen = [{}]
    for option, values in operator(name).options.items():
        chosen = [{**given, option: value} for given in chosen for value in values]
    return chosen


@pytest.mark.parametrize("name", SMALL)
def test_standard_names(name):
    assert sorted(case.name for case in cases(name, "standard")) == sorted(STANDARD[name])


@pytest.mark.parametrize("name", SMALL)
def test_quick_is_short(name):
    assert len(cases(name, "quick")) in (1, 2)
    for case in cases(name, "quick_cpu"):
        assert case.dtype == "fp32"
        assert case.bytes < 64e6


@pytest.mark.parametrize("name", SMALL)
def test_cost(name):
    """Bytes are at least one read and one write of something, grow with the sizes, and add up."""
    small, large = SMALL[name], {axis: size * 2 for axis, size in SMALL[name].items()}
    chosen = operator(name)
    for pass_ in chosen.passes:
        case = chosen.case(small, "bf16", pass_)
        assert isinstance(case.bytes, int)
        assert case.bytes < chosen.case(large, "bf16", pass_).bytes
        assert case.bytes < chosen.case(small, "fp32", pass_).bytes
        assert (case.flops > 0) == (name in WITH_MATMUL)
        assert case.tokens is not None
        assert case.tokens > 0
        assert case.bytes >= 2 * case.tokens * BYTES["bf16"]


@pytest.mark.parametrize(("name", "pass_"), WHOLE)
def test_eager_is_right(name, pass_):
    """PyTorch's answer on the workbench is the reference's, for every option and dtype; gradients exist."""
    chosen = operator(name)
    if pass_ not in chosen.passes:
        assert not chosen.gradients
        return
    for options in variants(name):
        for dtype in chosen.dtypes:
            case = chosen.case(SMALL[name], dtype, pass_, **options)
            bench = Workbench.build(chosen, case, CPU, seed=1)
            result = bench.comparable(bench.call(EAGER[name]["torch"](case))())
            deviation(result, bench.references, chosen.tolerances[dtype])
            assert not bench.changed()
            expected = len(chosen.gradients) if pass_ != "forward" else 0
            outputs = len(flat(result)) if pass_ != "backward" else len(bench.gradients)
            assert (
                len(bench.references)
                == {
                    "forward": outputs,
                    "backward": expected,
                    "forward_backward": expected + len(bench.gradients),
                }[pass_]
            )


@pytest.mark.parametrize("name", SMALL)
def test_inputs_come_from_the_seed(name):
    chosen = operator(name)
    case = chosen.case(SMALL[name], "fp32", "forward")
    first, again, other = (chosen.inputs(case, CPU, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    key = next(key for key, x in first.items() if isinstance(x, torch.Tensor))
    assert torch.equal(first[key], again[key])
    assert not torch.equal(first[key], other[key])


def test_yardstick_of_fp8_quant():
    chosen = operator("fp8_quant")
    case = chosen.case(SMALL["fp8_quant"], "bf16", "forward")
    inputs = chosen.inputs(case, CPU, torch.Generator().manual_seed(1))
    clone = chosen.yardsticks["clone"](**inputs)
    assert torch.equal(clone, inputs["x"])
    assert clone.data_ptr() != inputs["x"].data_ptr()


def wrong_by_truncation(x, granularity, format):
    q, scale = EAGER["fp8_quant"]["torch"](as_case(granularity, format))(x, granularity, format)
    wide = x / scale
    toward_zero = (q.float().abs() > wide.float().abs()).to(torch.uint8)
    return (q.view(torch.uint8) - toward_zero).view(q.dtype), scale


def wrong_by_scale(x, granularity, format):
    q, scale = EAGER["fp8_quant"]["torch"](as_case(granularity, format))(x, granularity, format)
    return q, scale * 1.1


def wrong_by_dtype(x, granularity, format):
    other = "e5m2" if format == "e4m3" else "e4m3"
    return EAGER["fp8_quant"]["torch"](as_case(granularity, other))(x, granularity, other)


def wrong_by_format_of_scale(x, granularity, format):
    q, scale = EAGER["fp8_quant"]["torch"](as_case(granularity, format))(x, granularity, format)
    return q, torch.cat((scale, scale))


def as_case(granularity, format):
    return operator("fp8_quant").case(
        SMALL["fp8_quant"], "fp32", "forward", granularity=granularity, format=format
    )


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("wrong", [wrong_by_truncation, wrong_by_scale, wrong_by_dtype, wrong_by_format_of_scale])
def test_tolerance_of_fp8_quant_is_tight(wrong, format):
    """Half a step passes, as the test of eager shows, in both formats; a whole one does not."""
    chosen = operator("fp8_quant")
    bench = Workbench.build(chosen, as_case("row", format), CPU, seed=1)
    with pytest.raises(Incorrect):
        deviation(bench.comparable(bench.call(wrong)()), bench.references, chosen.tolerances["fp32"])


def judged(operator, axes, implementation, dtype="bf16", **options):
    """Raises `Incorrect` where the harness refuses an answer."""
    definition = importlib.import_module(f"kernelmark.suite.operators.{operator}").OPERATOR
    case = definition.case(axes, dtype, "forward", **options)
    bench = Workbench.build(definition, case, CPU, 1)
    deviation(bench.comparable(bench.call(implementation(case))()), bench.references, bench.tolerance)


@pytest.mark.parametrize("wrong", ["absent", "outside of the root"])
@pytest.mark.parametrize("operator", ["rms_norm", "add_rms_norm", "layer_norm", "gated_rms_norm"])
def test_a_norms_epsilon_counts(operator, wrong):
    """In bf16 already."""

    def implementation(case):
        right = importlib.import_module(f"kernelmark.suite.operators.{operator}").reference

        def call(eps, **inputs):
            # Of a mean square near to 1: 1 / (1 + eps) is what (1 + a) ** -0.5 gives of a = eps² + 2 eps.
            return right(**inputs, eps=0.0 if wrong == "absent" else eps * (2 + eps))

        return call

    axes = {"B": 1, "S": 8, "D": 256} | ({"G": 2} if operator == "gated_rms_norm" else {})
    with pytest.raises(Incorrect):
        judged(operator, axes, implementation)


def wrong_loss(change):
    """PyTorch's loss of targets that are changed."""

    def implementation(case):
        right = EAGER[case.operator]["torch"](case)
        return lambda target, **inputs: right(target=change(target), **inputs)

    return implementation


@pytest.mark.parametrize("change", [lambda x: x.roll(1), torch.zeros_like, lambda x: (x + 1) % 500])
@pytest.mark.parametrize("operator", ["cross_entropy", "fused_linear_cross_entropy"])
def test_a_loss_of_other_targets_is_wrong(operator, change):
    """In bf16, forward alone, and of so many rows that their mean would hide it."""
    axes = {"M": 2048, "V": 500} | ({"D": 32} if operator == "fused_linear_cross_entropy" else {})
    with pytest.raises(Incorrect):
        judged(operator, axes, wrong_loss(change))
    judged(operator, axes, wrong_loss(lambda x: x))


@pytest.mark.parametrize("wrong", ["no smoothing", "smoothed by half", "ignored rows count"])
def test_a_wrong_regularized_loss_is_caught(wrong):
    def implementation(case):
        right = EAGER["cross_entropy"]["torch"](case)

        def call(logits, target, label_smoothing, z_loss):
            given = {"no smoothing": 0.0, "smoothed by half": label_smoothing / 2}.get(wrong, label_smoothing)
            if wrong == "ignored rows count":
                target = target.clamp(min=0)
            return right(logits=logits, target=target, label_smoothing=given, z_loss=z_loss)

        return call

    with pytest.raises(Incorrect):
        judged("cross_entropy", {"M": 1024, "V": 500}, implementation, regularized=True)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize(
    ("operator", "axes"),
    [
        ("attention_decode", {"Sq": 1, "H": 4, "Hkv": 2, "S": 16383, "D": 16}),
        ("attention_mla_decode", {"Sq": 1, "H": 4, "S": 16383, "C": 16, "R": 8}),
    ],
)
def test_a_cache_read_to_another_length_is_wrong(operator, axes, shift):
    """One key too few, or too many, of thousands, in bf16."""

    def implementation(case):
        right = EAGER[operator]["torch"](case)
        return lambda lengths, **inputs: right(lengths=lengths + shift, **inputs)

    with pytest.raises(Incorrect):
        judged(operator, axes | {"B": 2}, implementation, lengths="mixed")


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_rotation_of_one_place_turns(layout):
    """As a step that decodes has it."""
    axes = {"B": 2, "H": 2, "Hkv": 1, "S": 1, "D": 8}
    with pytest.raises(Incorrect):
        judged("rope", axes, lambda case: lambda q, k, **rest: (q.clone(), k.clone()), layout=layout)


def test_a_gated_product_that_clamps_nothing_is_wrong():
    axes = {"M": 32, "D": 128, "F": 128, "E": 4, "K": 2}

    def implementation(case):
        right = EAGER["moe"]["torch"](case)
        return lambda limit, **inputs: right(limit=1e9, **inputs)

    with pytest.raises(Incorrect):
        judged("moe", axes, implementation, activation="clamped")
    judged("moe", axes, EAGER["moe"]["torch"], activation="clamped")
