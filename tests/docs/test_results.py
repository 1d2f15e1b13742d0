"""`docs/results-h200.md` and the README's row are what their command writes from the journals."""

from __future__ import annotations

import re
import tomllib

import pytest
from kernelmark.registry.store.journal import Journal, read_header
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from msgspec.structs import replace

TOLD = "run `python docs/results.py --write`"


@pytest.mark.usefixtures("untraced")
def test_the_page_is_what_the_journals_say(program):
    results = program("results")
    assert results.page() == results.PAGE.read_text(encoding="utf-8"), TOLD


def test_the_newest_whole_run_of_a_plan_counts(part):
    runs = part("runs")
    assert runs.whole("standard") == runs.SAME_CODE[1]  # not one of a single replicate after it
    assert runs.MEMORY != runs.MEMORY_ROWS


def test_plans_that_are_not_built_in_lie_beside_their_journals(part):
    """Each is the plan of a run here, with the run's cases."""
    runs = part("runs")
    headers = [read_header(x) for x in runs.JOURNALS.rglob("*.jsonl.gz")]
    asked = {x.plan: {y.operator for y in x.request.cases} for x in headers if x is not None}
    plans = sorted((runs.JOURNALS / "plans").glob("*.toml"))
    assert plans
    for path in plans:
        assert asked[path.stem] == {x["operator"] for x in tomllib.loads(path.read_text())["cases"]}, path.name


@pytest.mark.usefixtures("untraced")
def test_the_table_of_stability_that_was_asked_for_is_on_the_page_beside_ours(program, part):
    table = part("convergence")._asked_for()[-1]
    rows = [x.split(" | ") for x in table.splitlines()[2:]]
    assert {x[0].lstrip("| ") for x in rows} == {"1,000", "5,000", "10,000"}
    assert {tuple(x[1:4]) for x in rows if "10,000" in x[0]} == {("1.634", "1.641", "+0.43 %")}
    assert any(x[4] == "kernelmark\\_fp8\\_1x128" for x in rows)
    assert table in program("results").PAGE.read_text(encoding="utf-8")


def test_a_killed_training_is_the_one_that_ran_through(part):
    *_, table = part("convergence").resumed()
    assert table.count("same bits | same bits") == 3


def test_a_run_that_ended_in_its_first_replicate_says_how_far_it_came(part):
    runs = part("runs")
    told = runs.origin(runs.journal("train-llama"))
    assert told.endswith("replicate 1 has 5 of 6 measurements, the others none.")


def test_cases_of_another_definition_are_counted_apart(part):
    runs = part("runs")
    alive = runs._catalog().operator("softmax").case({"M": 4, "D": 8}, "bf16", "forward")
    gone = replace(alive, name="before", spec="5bec")
    nobodys = replace(alive, name="nobody's", operator="no_such_operator")
    header = Header(1, "run", "", "0.1.0", None, False, "p", 0, 1, "cpu", "k", {}, {})
    made = [
        Record(x, "torch", "torch", None, 0, 0, "cold", "unsupported", "no", None) for x in (alive, gone, nobodys)
    ]
    assert runs.defined(Journal(header, tuple(made))) == "1 of 3 cases have today's definition"
    assert runs.defined(Journal(header, tuple(made[:1]))) == "1 of 1 case has today's definition"


def test_seeds_of_an_arm_are_those_that_the_base_has(part):
    convergence = part("convergence")
    (line,) = (x for x in convergence._arms(convergence.LONG).splitlines() if "kernelmark_fp8_1x128" in x)
    seeds = {
        name: {x.replicate for x in convergence.journal(convergence.LONG).records if x.implementation == name}
        for name in ("torch", "kernelmark_fp8_1x128")
    }
    assert line.split(" | ")[1] == str(len(set.intersection(*seeds.values()))) == "5"


def test_the_page_of_a_cpu_is_what_its_newest_run_says(program):
    """No page without a run."""
    results = program("results")
    there = [results.CPU_PAGE.read_text(encoding="utf-8")] if results.CPU_PAGE.exists() else []
    assert [results.cpu_page(x) for x in [results.CPU] if x] == there, TOLD


def test_implementations_side_by_side_on_a_cpu(part, monkeypatch):
    runs, cpu = part("runs"), part("cpu")
    times = {("fp32", "ours"): 2.0, ("fp32", "torch"): 1.0, ("bf16", "torch"): 3.0}
    made = [
        Record(
            case(x), name, name, None, 0, 0, "cold", "ok", None, Measurement({"latency": (ms,) * 3}, "monotonic")
        )
        for (x, name), ms in times.items()
    ]
    for name, reason in (("onnxruntime", "verify: no kernel"), ("flashinfer", "needs a cuda device, this is cpu")):
        made.append(Record(case("bf16"), name, name, None, 0, 0, "cold", "unsupported", reason, None))
    header = Header(1, "run", "", "0.1.0", None, False, "cpu", 0, 1, "cpu", "k", {}, {})
    for module in (runs, cpu):
        monkeypatch.setattr(module, "journal", lambda run: Journal(header, tuple(made)))
    runs.rows_of.cache_clear()
    text = "\n".join([*cpu._fastest("r"), *cpu._side_by_side("r"), *cpu._without_a_time("r")])
    runs.rows_of.cache_clear()
    for line in (
        "| `ours` |  | 0 of 1 |",
        "| `torch` | 1 of 1 | 1 of 1 |",
        "| softmax-fp32 | 2.000 | **1.000** |",
        "| softmax-bf16 |  | **3.000** |",
        "1 row more is `unsupported` because their libraries need a GPU.",
        "| `onnxruntime` | unsupported | `softmax` | 1 | no kernel |",
    ):
        assert line in text.splitlines()


def case(dtype: str) -> Case:
    return Case("softmax", f"softmax-{dtype}", {"M": 2}, {}, dtype, "forward", "5bec", 100, 100)


def test_the_readmes_row_is_one_of_them(program):
    results = program("results")
    readme = results.README.read_text(encoding="utf-8")
    assert results.placed(readme, results.BLOCKS) == readme, TOLD


def test_the_readme_begins_with_what_a_newcomer_needs(program):
    readme = program("results").README.read_text(encoding="utf-8")
    screen = "\n".join(readme.splitlines()[:42])
    places = [
        screen.index(x)
        for x in ("Is this GPU kernel faster", "](docs/pictures/report.png)", "make bench", "vs best")
    ]
    assert places == sorted(places)
    assert "the number to look at" in screen


def test_no_measured_figure_stands_in_the_readme_by_hand(program):
    results = program("results")
    rest = results.placed(results.README.read_text(encoding="utf-8"), {"row": str})
    found = re.findall(r"\d[\d,.]*\s?(?:×|ms\b|GB/s|TFLOP/s|%)", rest)
    assert set(found) <= {"95 %"}  # the level of every interval


def test_rows_that_lost_stand_beside_their_newest_run_or_say_that_there_is_none(part):
    again = part("again")
    *_, table = again.lost()
    for what, *_ in again.LOST:
        assert f"| {what} | " in table
    (gelu,) = (x for x in table.splitlines() if x.startswith("| tiny GELU"))
    assert "0.003424" in gelu
    assert "`20261122-215820-3f7c`\\*, `4cd7ee73` | 0.001698" in gelu
    (decoding,) = (x for x in table.splitlines() if x.startswith("| decoding of mixed lengths"))
    assert decoding.endswith("| not run again |  |  |  |")


def test_a_sum_in_8_bits_is_held_against_nccl_in_place_too(part):
    said = part("several_gpus")._in_eight_bits()
    assert "1.39 and 1.22, which is missed in place" in said
    assert "1.62 and 1.47, which is met" in said


def test_what_vllm_lacked_stands_beside_its_figure(part):
    inference = part("inference")
    said = "\n".join(inference.server())
    assert "`trimmed: 8 of vllm's 16 shared libraries are missing or cut: " in said
    assert "`without flashinfer, which is not installed: PyTorch's sampler chooses the tokens`" in said
    assert "mamba2-1.3b-bf16 by `kernelmark`" in inference._out_of_memory(inference.GENERATE)


def test_goals_of_decoding_that_were_missed_are_named(part):
    """Beside its figures: of five shapes three are below the byte bound that was asked for."""
    text = "\n".join(part("inference").decoding())
    table, _, told = text.partition("### What was asked for")[2].partition("\nMissed: ")
    assert table.count("**missed**") == 4
    for shape in ("1 × 1,024 (84.8 % of the byte", "8 × 1,024 (82.5 %", "64 × 4,096 (1.044 times vLLM"):
        assert shape in told.partition("\n")[0]
    assert "8 × 8,192" not in told.partition("\n")[0]


def test_no_ratio_is_taken_of_clients_that_were_late(part):
    """Neither in the headline nor above the tables, where rows are `client_bound`."""
    inference, runs = part("inference"), part("runs")
    headline = next(x for x in inference.server() if x.startswith("Llama 3.1 8B's shape"))
    assert "all 7 rows of both are `client_bound`" in headline
    vllm = inference.value_of(inference._loaded(runs.SERVED_BEFORE[0], "closed", 1), "tpot")
    ours = inference.value_of(inference._loaded(runs.SERVED_CLOSED, "closed", 1), "tpot")
    assert f"{vllm / ours:.2f}×" not in headline
    (above,) = (x for x in inference.server() if x.startswith("With one user ours took"))
    assert above.endswith("all 7 rows of both are `client_bound`:")
    assert inference._bound(runs.SERVED_CLOSED, runs.SERVED_BESIDE).startswith("0 of 4 rows")


def test_rows_refused_by_our_fault_are_said_to_be(part):
    told = part("inference")._refused_by_fault()
    assert told.startswith("Rows of `vllm` are `unsupported` there for want of a backward pass (B1-S512-bert-base")
    assert "a fault of ours" in told
