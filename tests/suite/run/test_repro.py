"""From a run's header to the command that repeats it."""

from __future__ import annotations

import shlex
import tomllib
from functools import cache

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.record import SCHEMA_VERSION, Header, Request
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run.repro import repeat, to_toml

CATALOG = Catalog.default()
DIGEST = f"sha256:{'12' * 32}"


def header(plan: plans.Plan, image: str | None = None, **changes: object) -> Header:
    made = Header(
        schema_version=SCHEMA_VERSION,
        run="20260101-000000-0000",
        created="2026-01-01T00:00:00+00:00",
        harness="0.1.0",
        commit="c" * 40,
        dirty=False,
        plan=plan.name,
        seed=77,
        replicates=plan.replicates,
        device="cpu",
        key="k",
        conditions={"device": "cpu", "image_digest": image},
        environment={"image": "cpu"} if image else {},
        request=plan.request(plan.cells(CATALOG, "cpu", ["torch"])),
    )
    return msgspec.structs.replace(made, **changes)


def test_a_built_in_plan_by_its_name(tmp_path):
    found = repeat(header(plans.load("quick", CATALOG, "cpu")), Home(tmp_path), CATALOG)
    assert found.line.startswith("kernelmark run --plan quick --replicates 3 --cache cold --implementation ")
    assert found.line.endswith("--seed 77 --device cpu")
    assert "--operator" not in found.command
    assert (found.commit, found.image, found.plan_file) == ("c" * 40, None, None)
    assert shlex.split(found.line) == list(found.command)


def test_a_narrowed_one_with_its_filters(tmp_path):
    plan = plans.load("quick", CATALOG, "cpu", ["gelu", "rms_norm"]).but(9, "both", "events")
    found = repeat(header(plan), Home(tmp_path), CATALOG)
    assert "--operator gelu --operator rms_norm --timer events --replicates 9 --cache both" in found.line
    assert found.plan_file is None


def test_shards_side_by_side_are_measured_so_again(tmp_path):
    """How many they are is a condition: what was measured alone does not compare."""
    plan = plans.load("quick", CATALOG, "cpu")
    made = header(plan, conditions={"device": "cpu", "parallel": "2"})
    request = msgspec.structs.replace(made.request, control=plan.cases[0].full_name)
    found = repeat(msgspec.structs.replace(made, request=request), Home(tmp_path), CATALOG)
    assert found.line.endswith(f"--device cpu --parallel --gpus 0,1 --control {plan.cases[0].full_name}")
    assert found.warnings == ()
    alone = msgspec.structs.replace(request, shard=(1, 2), seeds={plan.cases[0].full_name: (1,)})
    for conditions, asked in (
        ({"parallel": "2"}, alone),
        ({"parallel": "shared"}, request),
        ({"parallel": "; ls"}, request),
    ):
        changed = msgspec.structs.replace(made, request=asked, conditions=conditions)
        found = repeat(changed, Home(tmp_path), CATALOG)
        assert "--parallel" not in found.command
        assert f"at the same time (parallel = {conditions['parallel']}), which the command" in found.warnings[-1]
        assert any("has some of its cases' seeds only" in x for x in found.warnings) == (asked is alone)


def test_in_an_image_by_its_digest(tmp_path):
    found = repeat(header(plans.load("quick", CATALOG, "cpu"), DIGEST), Home(tmp_path), CATALOG)
    assert found.command[:3] == ("kernelmark", "bench", DIGEST)
    assert "--device" not in found.command
    assert "--gpus" not in found.command
    assert found.image == DIGEST
    assert f"git checkout {'c' * 40} && make image IMAGE=cpu" in found.warnings[0]
    dirty = repeat(header(plans.load("quick", CATALOG, "cpu"), DIGEST, dirty=True), Home(tmp_path), CATALOG)
    assert dirty.warnings[0] == "the run was made with uncommitted changes, which its commit does not have"


def test_in_an_image_on_as_many_gpus_as_its_cases_need(tmp_path):
    text = '[[cases]]\noperator = "all_reduce"\naxes = { N = 64, gpus = [2, 4] }\ndtype = "fp32"\n'
    plan, other = plans.parse(text, "mine", CATALOG), plans.load("quick", CATALOG, "cpu")
    made = header(other, DIGEST, device="cuda", request=plan.request(plan.cells(CATALOG, "cuda")))
    command = repeat(made, Home(tmp_path), CATALOG).command
    assert command[command.index("--gpus") + 1] == "0,1,2,3"


def test_another_plan_as_a_file(tmp_path):
    text = '[[cases]]\noperator = "gelu"\naxes = { M = [3, 5], N = 64 }\ndtype = "fp32"\n'
    plan = plans.parse(text, "mine", CATALOG)
    found = repeat(header(plan), Home(tmp_path), CATALOG)
    assert found.plan_file == tmp_path / "plans" / "20260101-000000-0000" / "mine.toml"
    assert str(found.plan_file) in found.command
    assert found.plan_text is not None
    assert plans.parse(found.plan_text, "mine", CATALOG) == plan


@cache
def _loaded(name, device):
    return plans.load(name, CATALOG, device, ["gelu", "attention"])


@given(
    st.sampled_from(["quick", "standard", "full"]),
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 50),
    st.sampled_from(["cold", "hot", "both"]),
    st.floats(0.001, 100),
)
def test_a_plan_file_says_all_that_a_plan_does(name, device, replicates, caches, seconds):
    loaded = _loaded(name, device).but(replicates, caches, None)
    plan = plans.Plan(
        loaded.name,
        loaded.cases,
        loaded.replicates,
        loaded.caches,
        Sampling(max_seconds=seconds, min_seconds=seconds / 2),
        seconds,
    )
    assert plans.parse(to_toml(plan, CATALOG), name, CATALOG) == plan


EVERYTHING = """
[program]
step_ms = 2.5
[peers]
gelu = ["torch"]
[[systems]]
name = "mine"
parts = { norm = "kernelmark" }
recompute = "every_layer"
[[systems]]
name = "learner"
changes = { products = "e4m3_rowwise" }
[[cases]]
operator = "gelu"
axes = { M = 3, N = 64 }
implementations = ["torch", "torch_compile"]
without = ["torch_compile_max_autotune"]
models = ["gpt2"]
calls = 12.5
[[cases]]
operator = "train"
axes = { B = 1, S = 16 }
options = { model = "gpt2-tiny" }
dtype = "fp32"
pass = "program"
implementations = ["torch", "mine"]
"""


def test_a_plan_file_has_systems_and_whom_a_case_is_for():
    plan = plans.parse(EVERYTHING, "mine", CATALOG)
    assert "torch_compile_max_autotune" not in plan.chosen(plan.cases[0])
    assert plans.parse(to_toml(plan, CATALOG), "mine", CATALOG) == plan


def test_what_cannot_be_repeated(tmp_path):
    plan = plans.load("quick", CATALOG, "cpu")
    with pytest.raises(InputError, match="one side of a comparison of commits"):
        repeat(
            header(plan, request=msgspec.structs.replace(header(plan).request, partner="x")),
            Home(tmp_path),
            CATALOG,
        )
    with pytest.raises(InputError, match="does not say what it measured"):
        repeat(header(plan, request=Request()), Home(tmp_path), CATALOG)


@pytest.mark.parametrize("plan_name", ["/elsewhere/pyproject", "../../x", "-x", "a\nb", ""])
def test_a_plan_is_written_inside_the_home_whatever_its_name(tmp_path, plan_name):
    text = '[[cases]]\noperator = "gelu"\naxes = { M = 3, N = 64 }\ndtype = "fp32"\n'
    found = repeat(header(plans.parse(text, plan_name, CATALOG)), Home(tmp_path), CATALOG)
    assert found.plan_file == tmp_path / "plans" / "20260101-000000-0000" / "plan.toml"


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "../../x"},
        {"run": "/elsewhere/x"},
        {"commit": "main; rm -rf ."},
        {"commit": "--orphan"},
        {"conditions": {"image_digest": "--entrypoint=x"}},
    ],
)
def test_what_is_no_name_becomes_no_path_and_no_command(tmp_path, changes):
    text = '[[cases]]\noperator = "gelu"\naxes = { M = 3, N = 64 }\ndtype = "fp32"\n'
    with pytest.raises(InputError):
        repeat(header(plans.parse(text, "mine", CATALOG), **changes), Home(tmp_path), CATALOG)


def test_an_images_name_is_no_command(tmp_path):
    made = header(plans.load("quick", CATALOG, "cpu"), DIGEST, environment={"image": "x; rm -rf ."})
    assert "make image IMAGE=NAME;" in repeat(made, Home(tmp_path), CATALOG).warnings[0]


@given(st.dictionaries(st.text(), st.integers() | st.booleans() | st.text(), min_size=1))
def test_no_name_or_value_leaves_its_place_in_toml(values):
    from kernelmark.suite.run import repro

    text = f"table = {repro._table(values)}\n"
    assert tomllib.loads(text) == {"table": values}
