"""The planner: pure, so literal catalogs and properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import Case
from kernelmark.registry.views.crossing import WIDTH
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.implementation import Implementation
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.plan import Cell, order
from kernelmark.suite.plan_file import Drawn

OWN = Catalog.default()


def cell(case: int, implementation: str, cache: str = "cold") -> Cell:
    asked = Case("double", f"N{case}-fp32-forward", {"N": case}, {}, "fp32", "forward", "5bec", 8, 0)
    return Cell(
        asked, Implementation("double", implementation, "x", (), "core", ("cpu",), lambda: lambda case: max), cache
    )


CELLS = tuple(cell(case, name) for case in range(8) for name in ("kernelmark", "torch", "torch_compile"))

lists_of_cells = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["kernelmark", "torch"]), st.sampled_from(["cold", "hot"])),
    unique=True,
).map(lambda rows: [cell(*row) for row in rows])


@given(lists_of_cells, st.integers(), st.integers(0, 50))
def test_an_order_is_a_permutation_that_keeps_cases_together(cells, seed, replicate):
    walk = order(cells, seed, replicate)
    assert sorted(x.identity for x in walk) == sorted(x.identity for x in cells)
    names = [x.case.name for x in walk]
    groups = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert len(groups) == len(set(groups))


@given(lists_of_cells, st.integers(), st.integers(0, 50))
def test_an_order_comes_from_seed_and_replicate_alone(cells, seed, replicate):
    assert order(cells, seed, replicate) == order(cells, seed, replicate)
    assert order(tuple(cells), seed, replicate) == order(cells, seed, replicate)


@given(st.integers())
def test_replicates_and_seeds_have_orders_of_their_own(seed):
    walks = [tuple(x.identity for x in order(CELLS, seed, replicate)) for replicate in range(5)]
    assert len(set(walks)) == 5
    assert walks[0] != tuple(x.identity for x in order(CELLS, seed + 1, 0))


def test_an_order_stays_what_it_was():
    """A run is resumed by the same order, perhaps by a later version."""
    cells = [cell(case, name) for case in range(4) for name in ("a", "b")]
    walk = [f"{x.case.axes['N']}{x.implementation.name}" for x in order(cells, 1, 2)]
    assert " ".join(walk) == "3a 3b 2a 2b 1a 1b 0b 0a"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["quick", "standard", "full"])
def test_builtin(name, device):
    plan = plans.load(name, OWN, device)
    assert plan.name == name
    assert plan.caches == ("cold",)
    assert plan.replicates == (3 if name == "quick" else 5)
    minute = (name, device) == ("quick", "cpu")
    alone = {name for name, x in OWN.operators.items() if not x.distributed}
    assert {x.operator for x in plan.cases} == (plans.MINUTE.keys() if minute else alone)
    assert {x.world for x in plan.cases} == {1}
    assert len({(x.operator, x.name) for x in plan.cases}) == len(plan.cases)
    if name == "full":
        standard = plans.load("standard", OWN, device).cases
        assert len(standard) < len(plan.cases)
        assert all(x in plan.cases for x in standard)


@pytest.mark.parametrize("name", sorted(x.stem for x in plans.FILES.glob("*.toml")))
def test_a_plans_metrics_have_one_meaning(name):
    """A run's header has one list for all of its cases, of operators and of workloads."""
    assert OWN.metrics(plans.load(name, OWN, "cuda").cases)


def test_crossing_is_of_equal_width_at_the_same_lengths():
    plan = plans.load("crossing", OWN, "cuda")
    assert (plan.name, plan.replicates) == ("crossing", 5)
    lengths = {}
    for case in plan.cases:
        assert (case.axes["B"], case.dtype, case.pass_) == (1, "bf16", "forward")
        assert math.prod(case.axes[x] for x in WIDTH[case.operator]) == 2048
        lengths.setdefault(case.operator, []).append(case.axes["S"])
    assert set(lengths) == set(WIDTH) & set(OWN.operators)
    assert all(x == [1024 * 2**i for i in range(8)] for x in lengths.values())
    assert all(x.options["mask"] == "causal" for x in plan.cases if x.operator == "attention")


@pytest.mark.parametrize("name", ["memory", "attention", "matmul", "state_space"])
def test_plans_beside_peers(name):
    """Each case is ours and a peer's, of another library than torch somewhere in its operator."""
    cells = plans.load(name, OWN, "cuda").cells(OWN, "cuda")
    providers: dict[str, set[str]] = {}
    for x in cells:
        providers.setdefault(f"{x.case.operator}/{x.case.name}", set()).add(x.implementation.provider)
    assert all("kernelmark" in x and len(x) > 1 for x in providers.values())


def test_plans_of_inference_have_every_system_and_the_corners_of_their_axes():
    """Also where a library is not installed: then its rows say how it would be."""
    found = {}
    for name in ("generate", "serve"):
        for x in plans.load(name, OWN, "cuda").cells(OWN, "cuda"):
            found.setdefault(x.case.operator, {}).setdefault(x.implementation.name, []).append(x.case)
    generates, serves = found["generate"], found["serve"]
    assert {
        "kernelmark", "kernelmark_graph", "torch", "torch_graph", "transformers_generate",
        "transformers_generate_batch", "transformers_generate_compiled", "vllm_engine",
    } <= set(generates)  # fmt: skip
    assert {"kernelmark_graph", "torch_graph", "transformers_serve", "vllm_serve", "server_at_url"} <= set(serves)
    for name in ("kernelmark_graph", "vllm_engine"):
        sizes = {(x.axes["B"], x.axes["S"]) for x in generates[name]}
        assert {(1, 128), (256, 128), (1, 131072), (64, 4096)} <= sizes
        assert {(b, s) for b in (1, 8) for s in (1024, 8192)} <= sizes
    assert any(x.options["model"].startswith("mamba") for x in generates["kernelmark_graph"])
    assert {x.options["load"] for x in serves["kernelmark_graph"]} == {"poisson", "gamma", "closed", "search"}
    assert {x.options["lengths"] for x in serves["kernelmark_graph"]} == {"fixed", "lognormal", "shared", "turns"}
    assert "search" in {x.options["load"] for x in serves["vllm_serve"]}


def test_plans_beside_peers_cover_the_operators():
    """And no operator is in two of them."""
    covered = [
        {x.operator for x in plans.load(name, OWN, "cuda").cases}
        for name in ("memory", "attention", "matmul", "state_space")
    ]
    distributed = {name for name, x in OWN.operators.items() if x.distributed}
    covered.append(distributed & {x.operator for x in plans.load("distributed", OWN, "cuda").cases})
    covered.append({"int8_linear"})  # which CPUs alone are measured at
    assert "int8_linear" in {x.operator for x in plans.load("cpu", OWN, "cpu").cases}
    assert set.union(*covered) == set(OWN.operators)
    assert sum(map(len, covered)) == len(OWN.operators)


SLOW = """
ON_REQUEST = ("tuned",)
IMPLEMENTATIONS = {"double": {"tuned": lambda case: lambda x: x + x}}
"""


def test_what_is_measured_on_request_is_in_no_case_that_does_not_name_it(root: Path, tmp_path: Path):
    (root / "baselines" / "long.py").write_text(SLOW)
    mine = Catalog.of(root)
    table = "[[cases]]\noperator = 'double'\naxes = { N = %d }\ndtype = 'fp32'\n%s\n"
    path = tmp_path / "mine.toml"
    path.write_text(
        table % (1, "") + table % (2, "without = ['many']") + table % (3, "implementations = ['tuned', 'plain']")
    )
    plan = plans.load(str(path), mine, "cpu")
    cells = plan.cells(mine, "cpu")
    assert [x.case.axes["N"] for x in cells if x.implementation.name == "tuned"] == [3]
    asked = plan.cells(mine, "cpu", ["tuned"])
    assert {x.case.axes["N"] for x in asked} == {1, 3}  # `without` says whom the second is for
    # Asked for again by the names of what was measured, it is in the same cases.
    request = plan.request(cells)
    again = replace(plan, only=request.only).cells(mine, "cpu", request.implementations)
    assert {x.identity for x in again} == {x.identity for x in cells}


def test_builtin_of_one_operator():
    assert {x.operator for x in plans.load("standard", OWN, "cuda", ["gelu", "rope"]).cases} == {"gelu", "rope"}


def test_quick_on_a_cpu_takes_about_a_minute():
    """Cells that run there: a second each on two quiet cores, three replicates and their starts."""
    cells = plans.load("quick", OWN, "cpu").cells(OWN, "cpu")
    assert sum(x.implementation.unavailable("cpu") is None for x in cells) <= 14
    for name in ("ssd", "train"):  # every other operator has cases there too, asked for by name
        assert {x.operator for x in plans.load("quick", OWN, "cpu", [name]).cases} == {name}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plans_of_a_time_state_it(device):
    found = {x: plans.load(x, OWN, device) for x in plans.TIMED}
    assert {x: y.budget_s for x, y in found.items()} == {"30s": 30.0, "5m": 300.0, "30m": 1800.0}
    assert [x.replicates for x in found.values()] == [2, 3, 5]  # one process has no interval
    wide = (
        plans.load("standard", OWN, "cuda")
        if device == "cuda"
        else plans.load("quick", OWN, "cpu", list(OWN.definitions))
    )
    assert found["30m"].cases == found["5m"].cases == wide.cases
    assert found["30s"].cases == plans.load("quick", OWN, device).cases


def test_quick_on_a_cpu_leaves_out_nobodys_own_operator(root):
    mine = plans.load("quick", Catalog((*OWN.roots, *Catalog.of(root).roots)), "cpu")
    assert {x.operator for x in mine.cases} == plans.MINUTE.keys() | {"double"}


def test_quick_on_a_cpu_has_cases_of_its_own():
    on = {x: plans.load("quick", OWN, x, ["gelu"]).cases for x in ("cpu", "cuda")}
    assert {x.dtype for x in on["cpu"]} == {"fp32"}
    assert not any(x in on["cuda"] for x in on["cpu"])


def test_nothing_of_an_operator_in_a_plan(root: Path):
    with pytest.raises(InputError, match="plan 'standard' has no cases of double on cpu"):
        plans.load("standard", Catalog.of(root), "cpu", ["double"])
    with pytest.raises(InputError, match=r"plan 'standard' has no cases on cpu\."):
        plans.load("standard", Catalog.of(root), "cpu")


PLANS = (
    "quick, standard, full, 30s, 5m, 30m, advanced-memory, attention, converge, converge_continued, "
    "converge_long, converge_rates, converge_resume, converge_short, converge_sparse, converge_tiny, cpu, "
    "crossing, distributed, distributed-attention-4, distributed-compression-4, distributed-links-4, "
    "distributed-long-4, distributed-train-4, distributed_long, distributed_tiny, endpoint, fidelity, "
    "generate, inference_short, languages, matmul, memory, memory-techniques, precision, quality, "
    "quality_parts, quality_tiny, requested, scaling, serve, serve_tiny, shapes, shapes-1, shapes-2, "
    "state_space, train, train_tiny, widths, widths-1, widths-2, worth"
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("nightly",),
            f"unknown plan 'nightly'. Known: {PLANS}, a .toml file.",
        ),
        (
            ("qick",),
            f"unknown plan 'qick'. Did you mean 'quick'? Known: {PLANS}, a .toml file.",
        ),
        (("absent.toml",), "no plan file at absent.toml."),
        (
            ("quick", ["rms_nrm"]),
            "unknown operator 'rms_nrm'. Did you mean 'rms_norm'? Known: adamw, add_rms_norm, ",
        ),
    ],
)
def test_unknown(arguments, said):
    name, operators = (*arguments, ())[:2]
    with pytest.raises(InputError) as error:
        plans.load(name, OWN, "cpu", operators)
    assert str(error.value).startswith(said)


GOOD = """
replicates = 2
cache = ["cold", "hot"]
deadline_s = 7

[sampling]
max_seconds = 0.5
timer = "graph"

[[cases]]
operator = "rms_norm"
axes = { B = [1, 2], S = 8, D = [16, 32] }
dtype = ["bf16", "fp32"]
pass = ["forward", "backward"]

[[cases]]
operator = "gelu"
axes = { M = 4, N = 8 }
options = { approximate = ["tanh", "none"] }

[[cases]]
operator = "gelu"
axes = { M = 4, N = 8 }
"""


def test_a_plan_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    plan = plans.load(str(path), OWN, "cpu")
    assert (plan.name, plan.replicates, plan.caches, plan.deadline_s) == ("mine", 2, ("cold", "hot"), 7)
    assert plan.sampling == Sampling(max_seconds=0.5, timer="graph")
    names = [x.name for x in plan.cases]
    assert len(names) == len(set(names)) == 16 + 2
    assert names[0] == "B1-S8-D16-bf16-forward"
    assert names[-2:] == ["M4-N8-tanh-bf16-forward", "M4-N8-none-bf16-forward"]
    assert {x.operator for x in plans.load(str(path), OWN, "cpu", ["gelu"]).cases} == {"gelu"}


def case(line: str) -> Callable[[], str]:
    return f'[[cases]]\noperator = "rms_norm"\naxes = {{ B = 1, S = 2, D = 4 }}\n{line}\n'


def test_tables_that_name_implementations():
    """A case is for what any of its tables names, a provider being all of its implementations."""
    text = (
        case("pass = 'backward'").replace("rms_norm", "attention").replace("{ B = 1, S = 2, D = 4 }", AXES)
        + "implementations = ['sdpa', 'torch']\nwithout = ['sdpa_math']\n"
        + case("pass = ['forward', 'backward']")
        .replace("rms_norm", "attention")
        .replace("{ B = 1, S = 2, D = 4 }", AXES)
        + "implementations = ['kernelmark']\n"
        + case("without = ['torch']")
    )
    plan = plans.parse(text, "narrow", OWN)
    cells = plan.cells(OWN, "cuda")
    of = {
        pass_: {x.implementation.name for x in cells if x.case.pass_ == pass_} for pass_ in ("forward", "backward")
    }
    assert of["backward"] == {"kernelmark", "torch", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"}
    forward = {
        x.implementation.name for x in cells if x.case.operator == "attention" and x.case.pass_ == "forward"
    }
    assert forward == {"kernelmark"}
    norms = {x.implementation.name for x in cells if x.case.operator == "rms_norm"}
    assert {"kernelmark", "liger"} < norms
    assert "torch" not in norms
    assert {x.implementation.name for x in plan.cells(OWN, "cuda", ["torch"])} == {"torch"}


def test_a_table_that_names_none_is_for_all():
    plan = plans.parse(case("implementations = ['torch']") + case(""), "both", OWN)
    assert plan.only == {}


AXES = "{ B = 1, H = 1, Hkv = 1, S = 64, D = 64 }"
WRONG = {
    case("implementations = ['trch']"): "unknown implementation 'trch'. Did you mean 'torch'",
    case("without = ['ligr']"): "unknown implementation 'ligr'. Did you mean 'liger'",
    case("implementations = ['sdpa']"): "rms_norm has no implementation that this table names; it has ",
    "replicats = 3\n" + case(""): "unknown field `replicats`",
    case("dtpye = 'bf16'"): "unknown field `dtpye` - at `$.cases[0]`",
    case("dtype = 'fp64'"): "unknown dtype of rms_norm 'fp64'. Did you mean 'fp16'? Known: bf16, fp16, fp32.",
    case("dtype = 3"): "Expected `str | array`, got `int` - at `$.cases[0].dtype`",
    case("pass = 'inference'"): "Invalid enum value 'inference'",
    case("options = { causal = true }"): "unknown option of rms_norm 'causal'. Known: none.",
    case("").replace("S = 2, ", ""): "rms_norm: axes S are missing; it has B, S, D.",
    case("").replace("S = 2", "T = 2"): "unknown axis of rms_norm 'T'. Known: B, S, D.",
    case("").replace("S = 2", "S = -2"): "rms_norm: axis S is -2; sizes are not negative.",
    case("implementations = ['torch']").replace("rms_norm", "rmsnorm"): "unknown operator 'rmsnorm'. Did you mean",
    case("options = { model = 'llama-tiny' }\npass = 'program'")
    .replace("rms_norm", "generate")
    .replace("B = 1, S = 2, D = 4", "B = 1, S = 2, N = 1"): "generate: axis N is 1; it is at least 2.",
    case("options = { model = 'llama-tiny' }\npass = 'program'")
    .replace("rms_norm", "forward")
    .replace("B = 1, S = 2, D = 4", "B = 0, S = 2"): "forward: axis B is 0; it is at least 1.",
    case("").replace("rms_norm", "rmsnorm"): "unknown operator 'rmsnorm'. Did you mean 'rms_norm'?",
    case("").replace("rms_norm", "fp8_quant").replace("B = 1, S = 2, D = 4", "M = 1, N = 2")
    + "options = { format = 'e4m4' }\n": "unknown format of fp8_quant 'e4m4'. Did you mean 'e4m3'? Known: ",
    case("pass = 'backward'")
    .replace("rms_norm", "fp8_quant")
    .replace("B = 1, S = 2, D = 4", "M = 1, N = 2"): "unknown pass of fp8_quant 'backward'. Known: forward.",
    "replicates = 0\n" + case(""): "replicates is 0; at least 1, at most 100000.",
    "replicates = 200000\n" + case(""): "replicates is 200000; at least 1, at most 100000.",
    "deadline_s = inf\n" + case(""): "deadline_s is inf; above 0, at most 10000000.",
    "deadline_s = 1e8\n" + case(""): "deadline_s is 1e+08; above 0, at most 10000000.",
    case("dtype = []"): "dtype is an empty list, which leaves no case; list a value or more - at `$.cases[0]`",
    case("pass = []"): "pass is an empty list",
    case("").replace("S = 2", "S = []"): "axis S is an empty list",
    case("").replace(
        "S = 2", f"S = {10**40}"
    ): "rms_norm: an axis S: 1000000000000000000000000000000000000000 is not",
    "deadline_s = 0\n" + case(""): "deadline_s is 0; above 0, at most 10000000.",
    "cache = 'warm'\n" + case(""): "Invalid enum value 'warm' - at `$.cache`. Known: cold, hot.",
    "cache = []\n" + case(""): "cache is empty; cold, hot or both.",
    "cases = []": "a plan needs at least one [[cases]] or [[worth]] table.",
    "": "a plan needs at least one [[cases]] or [[worth]] table.",
    case(
        "dtypes = 'bf16'"
    ): "unknown field `dtypes` - at `$.cases[0]`. Did you mean `dtype`? [[cases]] takes operator, axes, random, "
    "options, dtype, pass, implementations, without, models, calls.",
    "replicats = 3\n"
    + case(""): "unknown field `replicats`. Did you mean `replicates`? A plan takes cases, worth, "
    "systems, peers, program, replicates, cache, deadline_s, budget_s, sampling.",
    "[[cases]]\naxes = { B = 1 }\n": "missing required field `operator` - at `$.cases[0]`. [[cases]] takes ",
    "[sampling]\nsamples = 5\n" + case(""): "unknown field `samples` - at `$.sampling`. ",
    case("pass = 'back'"): "Invalid enum value 'back' - at `$.cases[0].pass`. Known: forward, backward, ",
    "[[cases]\n": "not a valid plan: ",
    "[[systems]]\nname = 'a'\nbase = 'torhc'\n" + case(""): "unknown provider 'torhc'. Did you mean 'torch'?",
    "[[systems]]\nname = 'a'\n[[systems]]\nname = 'a'\n" + case(""): "two [[systems]] are named 'a'; name one",
    "[[systems]]\nname = 'a'\nchanges = { optimiser = 'x' }\n"
    + case(""): "Did you mean `optimizer`? Changes takes model, dtype, ",
    "[[systems]]\nname = 'a'\nchanges = { dtype = 'fp61' }\n"
    + case(""): "at `$.systems[0].changes.dtype`. Known: fp16, bf16, fp32, tf32.",
    "[[worth]]\nmodel = 'gpt2-tiny'\naxes = { B = 1, S = 16 }\nbases = []\n": "bases is an empty list,",
    "[[worth]]\nmodel = 'gpt2-tiny'\naxes = { B = 1, S = 16 }\nbases = ['torch']\ndtype = 'fp32'\n"
    "implementations = ['libger']\n": "unknown implementation 'libger'. Did you mean 'liger'? Known: ",
    "[sampling]\nmin_samples = 5\nmax_samples = 4\n"
    + case(""): "min_samples must be at least 1 and at most max_samples",
    "[sampling]\nmin_seconds = 5\nmax_seconds = 4\n" + case(""): "min_seconds must not be negative and at most",
    "[sampling]\ntarget = 0\n" + case(""): "target must be above 0",
    "[sampling]\ntarget = nan\n" + case(""): "target must be above 0",
    "[sampling]\nwarmup_s = inf\n" + case(""): "warmup_s must not be negative, and a length of time",
    "[sampling]\nwarmup_s = nan\n" + case(""): "warmup_s must not be negative, and a length of time",
    "[sampling]\nmax_seconds = inf\n" + case(""): "max_seconds must be a length of time",
    case(f"random = {{ count = 1, seed = 1, axes = {{ D = [1, {10**400}] }} }}"): "axis D is [1, 1000",
    case("")
    .replace("S = 2", f"S = {list(range(200))}")
    .replace("B = 1", f"B = {list(range(101))}"): "its [[cases]] make 20,200 cases; at most 20,000. List fewer",
}


@pytest.mark.parametrize(("text", "said"), WRONG.items())
def test_a_wrong_plan_file(text, said, tmp_path: Path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        plans.load(str(path), OWN, "cpu")
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)


def test_a_plan_file_of_windows(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + case("").replace("\n", "\r\n").encode())
    assert plans.load(str(path), OWN, "cpu").cases


def test_a_cache_state_that_is_listed_twice_is_one():
    assert plans.parse("cache = ['hot', 'cold', 'hot']\n" + case(""), "mine", OWN).caches == ("hot", "cold")


def test_a_plan_file_that_is_no_text(tmp_path: Path):
    path = tmp_path / "wrong.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        plans.load(str(path), OWN, "cpu")
    with pytest.raises(InputError, match="cannot be read"):
        plans.load(str(tmp_path), OWN, "cpu")


def test_but():
    plan = plans.load("quick", OWN, "cuda")
    assert plan.but(None, None, None) == plan
    assert plan.but(7, None, None).replicates == 7
    assert plan.but(None, "hot", None).caches == ("hot",)
    assert plan.but(None, "cold", None).caches == ("cold",)
    assert plan.but(None, "both", None).caches == ("cold", "hot")
    assert plan.but(None, None, "events").sampling.timer == "events"
    assert plan.but(None, None, "events").sampling.max_samples == plan.sampling.max_samples


def names(cells) -> set[str]:
    return {x.implementation.name for x in cells}


def test_cells_of_a_gpu_leave_its_stand_ins_out():
    plan = plans.load("quick", OWN, "cuda", ["fp8_quant"])
    assert "kernelmark" in names(plan.cells(OWN, "cuda"))
    assert "kernelmark_cpu" not in names(plan.cells(OWN, "cuda"))
    assert {"kernelmark", "kernelmark_cpu", "torch", "clone"} <= names(plan.cells(OWN, "cpu"))


def test_cells_are_narrowed_by_name_or_provider():
    plan = plans.load("quick", OWN, "cuda", ["attention"])
    assert names(plan.cells(OWN, "cuda", ["sdpa_math", "torch"])) == {"sdpa_math", "torch"}
    sdpa = {"sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"}
    assert names(plan.cells(OWN, "cuda", ["sdpa"])) == sdpa
    assert len(plan.but(None, "both", None).cells(OWN, "cuda", ["sdpa"])) == 2 * 4 * len(plan.cases)


def test_cells_of_what_is_unknown_or_has_nothing_to_do():
    plan = plans.load("quick", OWN, "cuda", ["rms_norm"])
    with pytest.raises(
        InputError, match="unknown implementation 'trch'. Did you mean 'torch'.*Known: .*kernelmark"
    ) as unknown:
        plan.cells(OWN, "cuda", ["torch", "trch"])
    nothing = "plan 'quick' has nothing to measure with these filters: on cuda its operators have .*liger"
    with pytest.raises(InputError, match=nothing) as left:
        plan.cells(OWN, "cuda", ["sdpa_math"])
    assert "sdpa" not in f"{unknown.value} {left.value}"  # another operator's


def test_a_plan_without_cases_of_an_operator_names_those_with_some():
    with pytest.raises(
        InputError, match="plan 'quick' has no cases of serve on cpu. Plans that have some: .*serve_tiny"
    ):
        plans.load("quick", OWN, "cpu", ["serve"])


def test_systems_that_a_table_names_and_the_device_does_not_run(tmp_path: Path):
    """They are told: by a run, and where nothing else is left."""
    path = tmp_path / "mine.toml"
    text = case("options = { model = 'llama-tiny' }\npass = 'program'\ndtype = 'fp32'\nimplementations = NAMES")
    text = text.replace("rms_norm", "forward").replace("B = 1, S = 2, D = 4", "B = 1, S = 2")
    path.write_text(text.replace("NAMES", "['torch', 'torch_graph', 'torch_compile']"))
    reason = "needs a cuda device, this is cpu"
    plan = plans.load(str(path), OWN, "cpu")
    assert names(plan.cells(OWN, "cpu")) == {"torch"}
    assert {x: set(y) for x, y in plan.left_out(OWN, "cpu").items()} == {reason: {"torch_graph", "torch_compile"}}
    assert plan.left_out(OWN, "cuda") == {}
    assert plan.left_out(OWN, "cpu", ["torch", "torch_graph"]) == {reason: ("torch_graph",)}
    path.write_text(text.replace("NAMES", "['torch_graph']"))
    with pytest.raises(InputError, match=f"nothing to measure.* torch_graph: {reason}"):
        plans.load(str(path), OWN, "cpu").cells(OWN, "cpu")


def test_a_plan_at_other_sizes_dtypes_and_passes():
    catalog = Catalog.default()
    quick = plans.load("quick", catalog, "cuda", ["gelu", "rms_norm", "adamw"])
    found = quick.at({"S": [64, 128]}, ["fp16"], ["backward"], catalog)
    assert {x.operator for x in found.cases} == {"rms_norm"}  # the others have no axis S
    assert {(x.axes["S"], x.dtype, x.pass_) for x in found.cases} == {
        (64, "fp16", "backward"),
        (128, "fp16", "backward"),
    }
    assert len({x.name for x in found.cases}) == len(found.cases)
    assert quick.at({}, [], [], catalog) is quick
    with pytest.raises(InputError, match=r"plan 'quick' can be measured at Q=3, fp16; kernelmark list"):
        quick.at({"Q": [3]}, ["fp16"], [], catalog)
    one = plans.load("quick", catalog, "cuda", ["gelu"])
    with pytest.raises(InputError, match=r"; gelu has axes M, N; dtypes bf16, .*; passes forward, backward"):
        one.at({"Q": [3]}, [], [], catalog)
    text = '[[cases]]\noperator = "rms_norm"\naxes = {B = 1, S = 8, D = 64}\nimplementations = ["torch"]\n'
    narrowed = plans.parse(text, "mine", catalog).at({"S": [16]}, [], [], catalog)
    assert narrowed.only == {"rms_norm/B1-S16-D64-bf16-forward": ("torch",)}


def test_a_plan_s_cases_of_some_numbers_of_gpus():
    """They are not put on others: an array is cut for as many, and a step says by what way they share it."""
    catalog = Catalog.default()
    cut = plans.load("distributed-train-4", catalog, "cuda")
    four = cut.at({"gpus": [4]}, [], [], catalog)
    assert 0 < len(four.cases) < len(cut.cases)
    assert {x.world for x in four.cases} == {4}
    assert four.only == {x.full_name: cut.only[x.full_name] for x in four.cases}
    assert {x.world for x in cut.at({"gpus": [1, 2]}, [], [], catalog).cases} == {1, 2}
    both = cut.at({"gpus": [4], "S": [1024]}, [], [], catalog)
    assert {(x.operator, x.world, x.axes["S"]) for x in both.cases} == {("train", 4, 1024)}
    with pytest.raises(InputError, match=r"has no case of 3, 8 GPUs; it has cases of 1, 2, 4\."):
        cut.at({"gpus": [3, 8]}, [], [], catalog)


def test_a_plan_may_state_its_time():
    text = '[[cases]]\noperator = "rms_norm"\naxes = {B = 1, S = 8, D = 64}\n'
    assert plans.parse(f"budget_s = 300\n{text}", "mine", Catalog.default()).budget_s == 300
    assert plans.parse(text, "mine", Catalog.default()).budget_s is None
    with pytest.raises(InputError, match="budget_s is 0; above 0"):
        plans.parse(f"budget_s = 0\n{text}", "mine", Catalog.default())


def test_sizes_drawn_by_a_seed():
    """The same for every operator and at any time: rows of two runs are of the same shapes."""
    drawn = Drawn(3, 24, {"M": [1, 8192], "K": [256, 16384, 16]})
    assert drawn.sizes() == [{"M": 613, "K": 8400}, {"M": 5, "K": 16256}, {"M": 5, "K": 4160}]
    table = '[[cases]]\noperator = "rms_norm"\naxes = { B = 1, S = 8 }\n'
    plan = plans.parse(table + "random = { count = 9, seed = 1, axes = { D = [64, 4096, 8] } }", "p", OWN)
    sizes = [x.axes["D"] for x in plan.cases]
    assert len(sizes) > 5
    assert all(size % 8 == 0 and 64 <= size <= 4096 for size in sizes)


@pytest.mark.parametrize(
    ("random", "said"),
    [
        ("count = 0, seed = 1, axes = { D = [1, 2] }", "count is 0; 1 to 1000"),
        ("count = 2, seed = 1, axes = { D = [4, 2] }", r"axis D is \[4, 2\]; \[smallest, largest\]"),
        ("count = 2, seed = 1, axes = { D = [8, 64, 16] }", r"axis D is \[8, 64, 16\]"),
        ("count = 2, seed = 1, axes = { X = [1, 2] }", "axis of rms_norm"),
        ("count = 2, axes = { D = [1, 2] }", "missing required field `seed`"),
    ],
)
def test_sizes_that_cannot_be_drawn(random, said):
    text = f'[[cases]]\noperator = "rms_norm"\naxes = {{ B = 1, S = 8 }}\nrandom = {{ {random} }}'
    with pytest.raises(InputError, match=said):
        plans.parse(text, "p", OWN)
