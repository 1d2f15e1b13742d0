"""Systems: which there are without a file, what a plan may name, and what is put in for each part."""

from __future__ import annotations

from contextlib import nullcontext
from typing import get_args

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.views.technique_tables import EIGHT_BITS, PRECISIONS
from kernelmark.suite import fused_blocks, worth
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, Changes, Precision, System, builtin

CATALOG = Catalog.default()
LLAMA = chosen(CATALOG.models, "llama-1.2b")

PLAN = """
[[systems]]
name = "{name}"
base = "{base}"
parts = {{ {part} = "{implementation}" }}
execution = "{execution}"

[[cases]]
operator = "train"
axes = {{ B = 4, S = 4096 }}
options = {{ model = "llama-1.2b" }}
pass = "program"
implementations = ["{name}", "torch"]
"""


def parsed(**changes: str) -> plans.Plan:
    fields = {"name": "mine", "base": "torch", "part": "attention", "implementation": "flash_attn_4"}
    return plans.parse(PLAN.format(**(fields | {"execution": "compile"} | changes)), "file", CATALOG)


def table(system: System) -> dict[str, str]:
    return {part.name: x.name for part, x in Assembly(system, CATALOG).table(LLAMA, 4, 4096, "cuda")}


def test_a_provider_gives_its_parts_and_pytorch_the_rest() -> None:
    assert set(table(System("torch")).values()) == {"torch"}
    assert set(table(System("kernelmark", base="kernelmark")).values()) == {"kernelmark"}
    liger = table(System("liger", base="liger"))
    assert liger["rope"] == liger["add_norm"] == liger["loss"] == "liger"
    assert liger["attention"] == "torch"


def test_a_part_is_named_by_itself_or_by_its_operator() -> None:
    by_operator = table(System("x", parts={"rms_norm": "quack", "attention": "sdpa_cudnn"}))
    assert (by_operator["norm"], by_operator["attention"]) == ("quack", "sdpa_cudnn")
    qwen = chosen(CATALOG.models, "qwen3-0.6b")
    one = Assembly(System("x", parts={"query_norm": "quack"}), CATALOG)
    names = {part.name: x.name for part, x in one.table(qwen, 1, 128, "cuda")}
    assert (names["query_norm"], names["key_norm"]) == ("quack", "torch")


def test_products_are_pytorch_s_unless_a_system_names_them() -> None:
    def given(**parts: str) -> dict[str, str]:
        one = Assembly(System("x", base="kernelmark", parts=parts), CATALOG)
        return {x.name: one.implementation(x.name, x.operator, "cuda").name for x in LLAMA.named(4, 4096)}

    assert set(given().values()) == {"torch"}
    assert set(given(linear="kernelmark").values()) == {"torch", "kernelmark"}
    assert [x for x, y in given(linear_1024x2048="kernelmark").items() if y == "kernelmark"] == [
        "linear_1024x2048"
    ]
    for name in ("qkv_rope", "gate_up_swiglu"):
        assert [x for x, y in given(**{name: "kernelmark"}).items() if y == "kernelmark"] == [name]
    assert parsed(part="linear_8192x2048", implementation="kernelmark").systems[0].parts


def test_products_of_one_shape_are_exchanged() -> None:
    import torch

    one = Assembly(System("x", parts={"linear_24x16": "torch"}), CATALOG)
    linear = one.linear("bf16", "cpu")
    x, weight = torch.randn(3, 5, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    for w in (weight, weight[:8]):
        assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
    with pytest.raises(NotImplementedError, match="linear is of bf16, fp16, this case of fp32"):
        one.linear("fp32", "cpu")(x.float(), weight.float())


@pytest.mark.parametrize("name", ["qkv_rope", "gate_up_swiglu"])
def test_parts_that_stand_for_several_are_there_where_a_system_names_them(name: str) -> None:
    def parts(dtype: str, **named: str) -> dict[str, object]:
        tiny = chosen(CATALOG.models, "llama-tiny")
        return dict(Assembly(System("x", parts=named), CATALOG).parts(tiny, 1, 8, dtype, "cpu"))

    assert parts("bf16", **{name: "torch"}).keys() - parts("bf16").keys() == {name}
    with pytest.raises(NotImplementedError, match=f"{name} is of bf16, fp16, this case of fp32"):
        parts("fp32", **{name: "torch"})


@pytest.mark.parametrize("name", ["qkv_rope", "gate_up_swiglu"])
@pytest.mark.parametrize(
    "how",
    [
        {"precision": "parts_rowwise"},
        {"changes": Changes(products="e4m3_rowwise")},
        {"changes": Changes(weights="2:4")},
    ],
    ids=["8 bits", "emulated", "2:4"],
)
def test_they_are_not_for_systems_whose_layers_multiply_otherwise(name: str, how: dict) -> None:
    """Their products would be of the case's dtype, and the row called one of 8 bits."""
    assembly = Assembly(System("x", parts={name: "torch"}, **how), CATALOG)
    with pytest.raises(NotImplementedError, match=f"{name} multiplies by itself"):
        assembly.parts(chosen(CATALOG.models, "llama-tiny"), 1, 8, "bf16", "cpu")


@pytest.mark.parametrize(
    ("model", "there"),
    [
        ("llama-tiny", {"qkv_rope", "gate_up_swiglu"}),
        ("qwen3-0.6b", {"gate_up_swiglu"}),  # a norm between projection and rotation
        ("mixtral-tiny", {"qkv_rope"}),  # a gate for each expert
    ],
)
def test_which_models_have_them(model: str, there: set[str]) -> None:
    named = chosen(CATALOG.models, model).named(1, 8)
    assert {x.operator for x in named} - {"linear"} == there


def test_the_optimizer_that_users_take() -> None:
    assert Assembly(System("torch"), CATALOG).implementation("optimizer", "adamw", "cuda").name == "torch_fused"


def test_an_unknown_implementation_or_operator() -> None:
    with pytest.raises(InputError, match="implementation of attention 'flash'"):
        Assembly(System("x", parts={"attention": "flash"}), CATALOG).implementation(
            "attention", "attention", "cuda"
        )
    with pytest.raises(NotImplementedError, match="no implementation of attention_fp8 by deepspeed or PyTorch"):
        Assembly(System("x", base="deepspeed"), Catalog.of()).implementation("a", "attention_fp8", "cuda")


def test_what_needs_no_file() -> None:
    names = [x.name for x in builtin(["kernelmark", "torch", "torch_compile", "yardstick", "liger"])]
    assert names[:3] == ["kernelmark", "torch", "liger"]
    assert "kernelmark_compile" in names
    assert len(set(names)) == len(names)
    assert {"torch", "torch_compile", "kernelmark", "liger"} <= {x.name for x in CATALOG.of_operator("train")}
    assert [x.name for x in builtin(["liger"])] == ["liger"]


def test_a_plan_names_a_system() -> None:
    plan = parsed()
    (mine,) = [x for x in CATALOG.with_systems(plan.systems).of_operator("train") if x.name == "mine"]
    assert mine.provider == "torch"
    assert mine.requires == ("torch", "flash-attn-4", "nvidia-cutlass-dsl")
    assert mine.devices == ("cuda",)
    cells = plan.cells(CATALOG, "cuda")
    assert {x.implementation.name for x in cells} == {"mine", "torch"}  # not all that PyTorch provides
    again = plan.request(cells)
    assert again.systems == (
        {
            "name": "mine",
            "base": "torch",
            "parts": {"attention": "flash_attn_4"},
            "execution": "compile",
            "precision": "case",
            "recompute": "none",
            "states": "device",
            "changes": {},
        },
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": "torhc"}, "unknown provider 'torhc'. Did you mean 'torch'"),
        ({"part": "attentoin"}, "unknown part 'attentoin'"),
        ({"implementation": "flash"}, "unknown implementation of attention 'flash'"),
        ({"execution": "fast"}, "not a valid plan"),
        ({"name": "torch"}, "two implementations named 'torch'"),
        ({"name": "torch"}, "^there would be two .*of torch, which needs no table.*name yours otherwise"),
        ({"name": "Mine!"}, "not a valid plan"),
    ],
)
def test_what_a_plan_may_not_name(changes: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parsed(**changes)


def test_the_model_of_an_arm_is_known_before_anything_runs() -> None:
    with pytest.raises(InputError, match=r"unknown model 'llama-tniy'. Did you mean 'llama-tiny'"):
        CATALOG.with_systems([System("x", changes=Changes(model="llama-tniy"))]).of_operator("converge")


def test_parts_of_two_environments_are_no_system() -> None:
    systems = [System("x", base="transformer_engine", parts={"attention": "xformers"})]
    with pytest.raises(InputError, match="environments that cannot be one"):
        CATALOG.with_systems(systems).of_operator("train")


def step(model: str = "llama-1.2b"):
    return CATALOG.definition("train").case({"B": 4, "S": 4096}, "bf16", "program", model=model, state="plain")


def test_a_plan_on_worth_exchanges_one_part_at_a_time() -> None:
    base = worth.base_named("torch_compile_blocks", CATALOG)
    plan = plans.of_worth(step(), base, CATALOG, "cpu", parts=["attention", "optimizer"], nulls=True)
    assert {x.part for x in plan.exchanges} == {"attention", "optimizer"}
    by_system = {x.system: x for x in plan.exchanges}
    flash = by_system["torch_compile_blocks+attention.sdpa_flash"]
    # Alone, PyTorch's own part of a compiled model is its compiled one.
    assert (flash.implementation, flash.instead, flash.calls) == ("sdpa_flash", "torch_compile", 16)
    null = by_system["torch_compile_blocks+attention.torch"]
    assert null.implementation == null.instead
    for system in plan.systems:
        assert len(system.parts) == 1
        assert system.execution == "blocks"
    operators = [x.operator for x in plan.cases]
    assert operators == ["train", "attention", "adamw"]
    assert plan.only[f"train/{step().name}"][0] == "torch_compile_blocks"


@pytest.mark.parametrize(("state", "stored"), [("muon", "plain"), ("muon_master32", "master32")])
def test_beside_muon_the_optimizer_is_adamw_of_all_but_matrices_of_layers(state: str, stored: str) -> None:
    of = CATALOG.workloads["train"].case(
        {"B": 2, "S": 64}, "fp32", "program", model="llama-tiny", slice="first1", state=state
    )
    plan = plans.of_worth(of, worth.base_named("torch", CATALOG), CATALOG, "cpu", parts=["optimizer"])
    [case] = [x for x in plan.cases if x.operator == "adamw"]
    # The table, the output projection and three norms: a layer has seven matrices beside.
    assert (case.axes, case.options["state"]) == ({"T": 5, "D": 64}, stored)


def test_what_cannot_run_here_has_its_row_of_worth() -> None:
    """Of another device, of an environment that is not installed, of one that the base's excludes."""
    asked = ["vllm", "transformer_engine", "kernelmark"]
    plan = plans.of_worth(step(), worth.base_named("torch", CATALOG), CATALOG, "cpu", ["rms_norm"], asked)
    (case,) = [x for x in plan.cases if x.operator == "train"]
    cells = {x.implementation.name: x for x in plan.cells(CATALOG, "cpu") if x.case == case}
    assert cells.keys() == {"torch", *(x.system for x in plan.exchanges)}
    assert {x.rpartition(".")[2] for x in cells} >= set(asked)
    for name in cells.keys() - {"torch", "torch+norm.kernelmark_cpu"}:
        assert cells[name].implementation.unavailable("cpu") == (
            "unsupported",
            "needs a cuda device, this is cpu",
        ), name
    vllm = cells["torch+norm.vllm"].implementation
    assert vllm.environment == "vllm"
    status, reason = vllm.unavailable("cuda")
    assert (status, "make environment NAME=vllm" in reason) == ("unavailable", True)
    engine = worth.base_named("transformer_engine", CATALOG)
    plan = plans.of_worth(step(), engine, CATALOG, "cpu", ["rms_norm"], asked)
    refused = {x.implementation: x.refused for x in plan.exchanges}
    assert "'vllm' and 'transformer_engine', its base's, cannot be one" in refused["vllm"]
    assert not refused["kernelmark"]
    assert "vllm" not in {x.name.rpartition(".")[2] for x in plan.systems}
    plan.cells(CATALOG, "cuda")  # systems that are refused are none: the others can be made


def test_in_a_graph_parts_are_not_compiled() -> None:
    base = worth.base_named("torch_graph", CATALOG)
    plan = plans.of_worth(step(), base, CATALOG, "cpu", parts=["attention"], implementations=["sdpa_flash"])
    assert [x.instead for x in plan.exchanges] == ["torch"]
    assert "attention" in {x.operator for x in plan.cases}


WORTH = """
[[worth]]
model = "llama-tiny"
axes = {{ B = 2, S = 64 }}
dtype = "fp32"
bases = ["torch", "torch_aot_eager"]
parts = ["norm"]
nulls = true
{more}
"""


def test_a_plan_file_asks_what_parts_are_worth() -> None:
    plan = plans.parse(WORTH.format(more=""), "mine", CATALOG, "cpu")
    (own,) = [x for x in plan.cases if x.operator == "train"]
    assert plan.only[own.full_name][:2] == ("torch", "torch+norm.torch")
    assert "torch_aot_eager+norm.torch" in plan.only[own.full_name]
    assert {x.base for x in plan.exchanges} == {"torch", "torch_aot_eager"}
    assert {x.name for x in plan.systems} == {x.system for x in plan.exchanges}
    assert plan.request(()).exchanges == plan.exchanges


def test_what_a_case_is_for_stands_beside_what_its_parts_are_worth() -> None:
    case = """
[[cases]]
operator = "train"
axes = { B = 2, S = 64 }
options = { model = "llama-tiny" }
dtype = "fp32"
pass = "program"
"""
    plan = plans.parse(WORTH.format(more=case + 'implementations = ["torch_compile"]'), "mine", CATALOG, "cpu")
    (own,) = [x for x in plan.cases if x.operator == "train"]
    assert {"torch_compile", "torch", "torch+norm.torch"} <= set(plan.only[own.full_name])
    plan = plans.parse(WORTH.format(more=case), "mine", CATALOG, "cpu")  # for all, and so for those too
    assert own.full_name not in plan.only


def test_each_part_has_its_case_alone() -> None:
    """Cases of two operators may have one name, as `rms_norm`'s and `add_rms_norm`'s of a Llama have."""
    plan = plans.load("worth", CATALOG, "cuda")
    cases = {(x.operator, x.name) for x in plan.cases}
    assert {(x.operator, x.case) for x in plan.exchanges} <= cases
    assert ("rms_norm", "B4-S4096-D2048-bf16-forward_backward") in cases


@pytest.mark.parametrize(
    ("model", "parts", "stored"),
    [("llama-1.2b", ["attention", "rope"], "bshd"), ("gpt2-124m", ["attention"], "packed")],
)
def test_a_call_alone_is_of_what_the_model_stores(model: str, parts: list[str], stored: str) -> None:
    base = worth.base_named("torch", CATALOG)
    plan = plans.of_worth(step(model), base, CATALOG, "cpu", parts=parts)
    alone = {x.operator: x.options.get("storage") for x in plan.cases if x.operator != "train"}
    assert alone == dict.fromkeys(parts, stored)


def test_a_plan_without_the_step_has_no_exchange() -> None:
    assert plans.load("worth", CATALOG, "cuda").exchanges
    assert not plans.load("worth", CATALOG, "cuda", ["attention"]).exchanges


def test_what_cannot_be_exchanged() -> None:
    base = worth.base_named("torch", CATALOG)
    with pytest.raises(InputError, match="none of the parts gelu"):
        plans.of_worth(step(), base, CATALOG, "cpu", parts=["gelu"])
    with pytest.raises(InputError, match="nothing to exchange"):
        plans.of_worth(step(), base, CATALOG, "cpu", implementations=["no_such"])
    with pytest.raises(InputError, match="unknown system 'torhc'"):
        worth.base_named("torhc", CATALOG)


def test_the_parameters_of_cases_models() -> None:
    plan = plans.load("scaling", CATALOG, "cuda")
    found = {x.options["model"]: plans.parameters([x], CATALOG)[x.full_name] for x in plan.cases}
    assert found["gpt2-124m"] == 124_439_808
    assert found["llama-2-7b"] == 6_738_415_616
    assert found["llama-3.1-70b"] < 12e9  # of a slice, its layers
    assert plans.parameters([CATALOG.operator("softmax").case({"M": 4, "D": 8}, "bf16", "forward")], CATALOG) == {}


def test_the_layers_of_the_models_that_cases_are_slices_of() -> None:
    plan = plans.load("scaling", CATALOG, "cuda")
    found = plans.layers(plan.cases, CATALOG)
    slices = {x.full_name: x.options["model"] for x in plan.cases if x.options["slice"] != "whole"}
    assert {slices[name]: count for name, count in found.items()} == {"qwen3-32b": 64, "llama-3.1-70b": 80}
    assert found.keys() == slices.keys()


def test_each_goal_and_each_architecture_has_its_case() -> None:
    train, precision = (plans.load(x, CATALOG, "cuda") for x in ("train", "precision"))
    of = {name: x for x in CATALOG.models.values() for name in x.configurations}
    assert {of[x.options["model"]].name for x in train.cases} == set(CATALOG.models)
    fp8 = {(x.options["model"], x.axes["S"]): x for x in precision.cases if x.options["state"] == "plain"}
    assert fp8.keys() == {("llama-2-7b", 2048), ("llama-3.1-8b", 8192), ("gpt2-124m-padded", 1024)}
    execution = {x.name: x.execution for x in precision.systems}
    for case in precision.cases:  # ours compiled, as torchao's are
        chosen = [x for x in precision.chosen(case) if x in execution]
        theirs, ours = ({execution[x] for x in chosen if x.startswith(y)} for y in ("float8_", "kernelmark_fp8_"))
        whole = case.options["model"] == "gpt2-124m-padded"
        assert theirs == {"eager", "compile" if whole else "blocks"}
        assert {"blocks", *theirs} <= ours
    ways = {"torch_compile_max_autotune", "torch_compile_reduce_overhead", "torch_aot_eager", "torch_cudagraphs"}
    assert sum(ways < set(train.chosen(x)) for x in train.cases) == 2


def test_a_system_is_held_by_the_roots_of_its_parts() -> None:
    """So that commits of a root are compared on it."""
    own = {str(CATALOG.roots[0].folder)}
    systems = {x.name: x for x in CATALOG.of_operator("train") if x.assembled}
    assert all(x.root is None and x.held_by(own) for x in systems.values())
    assert not systems["kernelmark"].held_by({"/elsewhere"})


def test_kernels_of_a_commit_before_they_were_fused_are_taken_as_they_are(tmp_path):
    """Another commit's kernels are measured by this harness: what it fuses of ours may not be there."""
    kernels = tmp_path / "kernels"
    for folder, name, text in (
        ("attention", "attention", "def attention(q, k, v, mask='causal'): ...\n"),
        ("quantization", "fp8_quant", "def fp8_quant(x, granularity='row', format='e4m3'): ...\n"),
        ("matmul", "matmul", "def matmul(a, b, bias=None, gated=False): ...\n"),
        ("matmul", "fp8_matmul", "def fp8_matmul(a, b, scale_a, scale_b, recipe='block'): ...\n"),
        ("norm", "layer_norm", "def layer_norm(x, weight, bias, eps=1e-5): ...\n"),
    ):
        (kernels / folder).mkdir(parents=True, exist_ok=True)
        for path in (kernels, kernels / folder):
            (path / "__init__.py").touch()
        (kernels / folder / f"{name}.py").write_text(text)
    catalog = Catalog.default()
    old = catalog.with_code({str(catalog.roots[0].folder): str(tmp_path)})
    for each, there in ((catalog, True), (old, False)):
        assembly = Assembly(System("x", base="kernelmark", precision="parts_1x128"), each)
        attention = each.own_file("kernels", "attention").attention
        assert hasattr(fused_blocks.packed(each, attention), "packed") == there
        quantize, _ = assembly.eight_bits("bf16", "cuda")
        assert {hasattr(quantize, x) for x in fused_blocks.QUANTIZED} == {there}
        assert assembly._takes("bias", "fp8_matmul", "cuda") == there
        assert assembly._takes("layout", "fp8_quant", "cuda") == there
        assert (fused_blocks.few_rows(each) is not None) == there
        norm = each.own_file("kernels", "layer_norm").layer_norm
        assert hasattr(fused_blocks.added(each, norm), "added") == there
        for fused in (fused_blocks.layer_normed, fused_blocks.fed):
            with pytest.raises(NotImplementedError, match="do not write 8 bits") if not there else nullcontext():
                fused(each, None, None)


def test_every_precision_has_its_words():
    """Tables name it, and know which are of 8 bits."""
    of_products = set(get_args(Precision)) - {"case"}
    assert of_products <= PRECISIONS.keys()
    assert of_products == EIGHT_BITS
