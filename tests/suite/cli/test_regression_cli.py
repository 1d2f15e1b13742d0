"""`regression_detector`: two real commits of a small repository, and runs that are stored."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import msgspec
import pytest
from kernelmark.registry.detection.decision import Progress
from kernelmark.registry.detection.verdict import Verdict
from kernelmark.registry.errors import InputError
from kernelmark.registry.importers.formats import take_in
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import encode, read
from kernelmark.registry.store.record import Case, Footer, Header, Key, Measurement, Record, Request
from kernelmark.suite.cli import regression, run_command
from kernelmark.suite.cli.values import Duration, Share
from kernelmark.suite.compare import question
from kernelmark.suite.compare.question import Answer, Question

PROGRAM = "from kernelmark.suite.cli.regression import main; main()"


class Detector:
    """The command on the repository `sleeper`, with a home of its own."""

    def __init__(self, folder: Path, home: Path, plan: Path) -> None:
        self.folder, self.home, self.plan = folder, home, plan
        # No tracing of 100 processes that other tests trace too: it takes a third of their time.
        left_out = "TRITON_INTERPRET", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in left_out},
            "KERNELMARK_PATH": str(folder),
            "KERNELMARK_HOME": str(home),
            "TMPDIR": str(home.parent / "temporary"),
            "PYTHONSAFEPATH": "1",
        }
        (home.parent / "temporary").mkdir()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--plan", str(self.plan), *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=240)
        assert self.left_over() == []
        return process.returncode, out, err

    def left_over(self) -> list[str]:
        """Copies of commits that should be gone, and git's records of them."""
        listed = subprocess.run(["git", "worktree", "list"], cwd=self.folder, capture_output=True, text=True)
        copies = (self.home.parent / "temporary").glob("kernelmark-*")
        return [*listed.stdout.splitlines()[1:], *map(str, copies)]


@pytest.fixture
def detector(sleeper, tmp_path, plan_file):
    return Detector(sleeper.folder, tmp_path / "home", plan_file([16]))


def test_a_slower_commit_fails_the_build(detector, sleeper, tmp_path):
    """On the CPU, with real workers: 6 pairs, and 10 fresh ones for what they flagged."""
    files = tmp_path / "comment.md", tmp_path / "junit.xml"
    code, out, err = detector.run(
        "--baseline", "HEAD~1", "--budget", "150s", "--json", "--markdown", str(files[0]), "--junit", str(files[1])
    )
    report = json.loads(out)
    (verdict,) = report["verdicts"]
    assert (code, verdict["kind"]) == (1, "regression"), err
    assert verdict["stage"] >= 2
    assert verdict["pairs"] >= 5, "as many as the budget allows where the machine is noisy"
    assert 0.15 < verdict["change"] < 0.45
    assert "stage 2, pair 5 of " in err
    assert "budget: a pair of all rows takes" in err
    assert files[0].read_text().startswith("### kernelmark: Regression found")
    assert ElementTree.parse(files[1]).getroot().get("failures") == "1"
    headers = [read(x).header for x in sorted((detector.home / "journals").iterdir())]
    commits = sleeper.git("rev-parse", "HEAD~1", "HEAD").split()
    assert {x.commit for x in headers} == set(commits)
    assert not any(x.dirty for x in headers)
    # What was measured is stored: asked again without measuring, it is known to be too little.
    code, out, _ = detector.run("--baseline", "HEAD~1", "--mode", "stored", "--json")
    assert code == 3
    assert "unchanged runs on record" in json.loads(out)["verdicts"][0]["reason"]


def test_equal_commits_do_not(detector):
    """Their kernels are the same code, so one pair is enough."""
    code, out, err = detector.run(
        "--baseline", "HEAD~2", "--current", "HEAD~1", "--statistics", "all", "--mode", "ab"
    )
    assert code == 0, out + err
    assert "No regression: 1 no change" in out
    assert "the same code" in " ".join(out.split())
    assert "stage 1, pair 1 of 1" in err
    assert "(welch p)" in out


def test_the_end_of_the_budget_is_inconclusive(detector):
    code, out, err = detector.run("--baseline", "HEAD~1", "--budget", "1s")
    assert code == 3
    assert "0 of 0 pairs usable" in " ".join(out.split())
    assert "the budget ended after 0 of 6 pairs" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_ended_leaves_nothing(detector, processes, number):
    process = detector.start("--baseline", "HEAD~1")
    workers = processes.wait_for(
        lambda: (
            detector.left_over() and list((detector.home / "logs").glob("*")) and processes.children(process.pid)
        ),
        "a worker",
    )
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert detector.left_over() == []
    processes.wait_for(lambda: not any(processes.alive(x) for x in workers), "the end of the workers", 5)


# From here on nothing is measured: the command in this process, on journals that are written here.

CASE = Case("double", "N16-fp32-forward", {"N": 16}, {}, "fp32", "forward", "5bec", 128, 0)


@pytest.fixture
def call(sleeper, tmp_path, monkeypatch, capsys):
    """Calls the command in the repository: exit code, output, error output."""
    monkeypatch.chdir(sleeper.folder)
    monkeypatch.setenv("KERNELMARK_PATH", str(sleeper.folder))
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            run_command(regression.command, list(arguments))
        return (end.value.code, *capsys.readouterr())

    return call


@pytest.mark.parametrize(("asked", "kept"), [((), 0), (("--attribute",), 40), (("--attribute", "--bisect"), 40)])
def test_a_part_of_the_budget_is_kept_for_explaining(call, monkeypatch, asked, kept):
    seen = []
    monkeypatch.setattr(Question, "answer", lambda self, *_: seen.append(self) or Answer(Progress(())))
    call("--baseline", "HEAD~1", "--budget", "100s", *asked)
    assert seen[0].until - seen[0].decided_by == pytest.approx(kept)


def test_metrics_of_the_operators_asked_for_may_fail(call, monkeypatch):
    monkeypatch.setattr(Question, "answer", lambda *_: Answer(Progress(())))
    asked = "--baseline", "HEAD~1", "--fail-on", "error_unquantized", "--operator"
    assert call(*asked, "moe")[0] == 4  # nothing was compared
    code, _, err = call(*asked, "double")
    assert (code, "unknown verdict to fail on 'error_unquantized'" in err) == (2, True)


def test_metrics_of_the_runs_named_may_fail(call, store, tmp_path):
    runs = [store("HEAD~2"), store("HEAD~1")]
    asked = "--baseline", f"run:{runs[0]}", "--current", f"run:{runs[1]}", "--fail-on", "bytes_per_token"
    assert call(*asked)[0] == 2
    path = Home(tmp_path / "home").journal(runs[1])
    header, *lines = path.read_bytes().splitlines(keepends=True)
    given = json.loads(header)
    given["metrics"].append({"name": "bytes_per_token", "unit": "B", "judged": {"by": "ratio"}})
    path.write_bytes(json.dumps(given).encode() + b"\n" + b"".join(lines))
    assert call(*asked)[0] == 0


@pytest.fixture
def store(sleeper, tmp_path):
    """Stores a run of a revision that takes so many ms."""
    numbers = iter(range(1000))
    generator = random.Random(0)

    def store(
        revision: str, ms: float = 20.0, operator: tuple[str, ...] = ("double",), processes: int = 5,
        machine: float = 1.0, provider: str = "kernelmark", plan: str = "quick",
        **conditions
    ) -> str:  # fmt: skip
        number = next(numbers)
        commit = sleeper.git("rev-parse", revision)
        cases = [msgspec.structs.replace(CASE, operator=x) for x in operator]
        header = Header(
            schema_version=2, run=f"20261101-{number:06d}-aaaa", created=f"2026-11-01T00:00:00.{number:06d}+00:00",
            harness="0.1.0", commit=commit, dirty=False, plan=plan, seed=number, replicates=processes,
            device="cpu", key=str(conditions), conditions={"device": "cpu"} | conditions, environment={},
            request=Request(cases=tuple(cases)),
        )  # fmt: skip
        moved = 20.0 * machine / ms  # other libraries' code is the same in all commits
        ms *= math.exp(generator.gauss(0, 0.002))
        times = [ms * math.exp(generator.gauss(0, 0.002)) for _ in range(processes)]
        lines = [
            Record(
                case,
                name,
                by,
                "1",
                i,
                0,
                "cold",
                "ok",
                None,
                Measurement({"latency": (x,) * 6}, "monotonic"),
            )
            for case in cases
            for name, by, slow in ((f"{provider}_cpu", provider, 1.0), ("torch", "torch", moved))
            for i, x in enumerate(slow * x for x in times)
        ]
        path = Home(tmp_path / "home").journal(header.run)
        path.parent.mkdir(parents=True, exist_ok=True)
        footer = Footer("2026-11-01T00:00:01+00:00", 1.0, True, {})
        path.write_bytes(b"".join(encode(x) for x in (header, *lines, footer)))
        return header.run

    return store


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--baseline", "mian"], "unknown revision 'mian'. Did you mean 'main'? Known: main, HEAD, worktree"),
        (["--baseline", "HEAD", "--current", "HEAD~9"], "unknown revision 'HEAD~9'"),
        (["--baseline", "HEAD", "--fail-on", "everything"], "unknown verdict to fail on 'everything'"),
        (["--baseline", "HEAD", "--fail-above", "2%", "--warn-above", "3%"], "thresholds must rise"),
        (["--baseline", "HEAD", "--against", "best:3"], "give --baseline REV or --against best:N, and not both"),
        (["--against", "worst:3"], "it takes best:N (the fastest of the last N commits"),
        (["--against", "tag:v*"], "no tag like v* is before HEAD"),
        (["--baseline", "HEAD", "--fail-above", "much"], "'much' is no share"),
        (["--baseline", "HEAD", "--budget", "soon"], "'soon' is no length of time"),
        (["--baseline", "HEAD", "--mode", "ab", "--operator", "duoble"], "Did you mean 'double'?"),
        (["--baseline", "HEAD", "--mode", "ab", "--device", "abacus"], "no device 'abacus' here"),
        (["--baseline", "HEAD", "--mode", "ab", "--plan", "nowhere.toml"], "no plan file at nowhere.toml"),
        (["--baseline", "HEAD", "--mode", "ab", "--implementation", "cuda_magic"], "unknown implementation"),
        ([], "give --baseline REV or --against best:N"),
    ],
)
def test_wrong_usage_says_what_exists(call, arguments, said):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


def test_outside_a_checkout(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("--baseline", "main")
    assert code == 2
    assert "is not in a git checkout" in err


def test_nothing_stored_is_not_green(call, store):
    code, _, err = call("--baseline", "HEAD~1", "--mode", "stored")
    assert code == 4
    assert "no run of HEAD @ " in err
    store("HEAD")
    code, _, err = call("--baseline", "HEAD~1", "--mode", "stored")
    assert code == 4
    assert "no run of HEAD~1 @ " in err
    store("HEAD~1", processes=2)
    code, _, err = call("--baseline", "HEAD~1", "--mode", "stored")
    assert code == 4, "two processes are no run"


def test_runs_of_the_quick_plan_are_pooled(call, store):
    """`make bench` on two commits: three processes each are too few, and two such runs decide like one of six."""
    store("HEAD~1", processes=3)
    store("HEAD", 22.0, processes=3)
    stored = ("--baseline", "HEAD~1", "--mode", "stored")
    code, out, _ = call(*stored, "--json")
    report = json.loads(out)
    assert code == 3
    assert "3 of 3 processes usable, at least 5 needed" in report["verdicts"][0]["reason"]
    (told,) = report["remarks"]
    assert told == (
        "What is inconclusive is settled by measuring both: "
        "regression_detector --baseline 'HEAD~1' --current HEAD --mode ab --plan quick"
    )
    narrowed = ("--device", "cpu", "--shard", "1/1", "--fail-above", "20%", "--warn-above", "12.5%")
    _, out, _ = call(*stored, *narrowed, "--plan", "quick", "--json")
    (told,) = json.loads(out)["remarks"]
    asked, again = (
        regression.command.make_context("regression_detector", list(x)).params
        for x in ((*stored, *narrowed, "--plan", "quick"), shlex.split(told.partition(": ")[2])[1:])
    )
    assert again == asked | {"mode": "ab"}
    for _ in range(11):
        store("HEAD~1", processes=3)
    second = store("HEAD", 22.0, processes=3)
    code, out, err = call(*stored, "--json")
    report = json.loads(out)
    assert (code, report["verdicts"][0]["kind"], report["remarks"]) == (1, "regression", [])
    assert second in err


@pytest.mark.parametrize(
    ("plan", "said"),
    [("mine", "with plan 'mine' as a file: "), ("5m", "with plan '5m' as a file without its limit: ")],
)
def test_no_command_is_told_that_cannot_be_given(call, store, plan, said):
    """A file's plan is unknown by its name, and a comparison refuses one with a budget of its own."""
    for revision in ("HEAD~1", "HEAD"):
        store(revision, plan=plan)
    _, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json")
    (told,) = json.loads(out)["remarks"]
    assert f"measuring both, {said}regression_detector" in told
    assert told.endswith("--plan FILE.toml")


def test_a_row_of_unchanged_code_shows_that_the_machine_changed(call, store):
    """A suite of one operator: PyTorch's row beside ours is slower by as much."""
    for _ in range(12):
        store("HEAD~1")
    store("HEAD", 22.0, machine=1.1)
    code, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json")
    assert code == 4
    assert "the machine changed: the median of 1 row of unchanged code moved" in out


@pytest.fixture
def five_slower(sleeper, store):
    """Five commits, each slower by 2.5 %, each with a stored run; the commit before them is the tag v1."""
    sleeper.git("tag", "v1")
    for i in range(5):
        sleeper.commit(kernels__cpu__note=f"N = {i}\n")
    for i in range(6):
        for _ in range(12 if i == 0 else 1):
            store(f"HEAD~{5 - i}", 20.0 * 1.025**i)


@pytest.mark.parametrize("against", ["best:20", "tag", "tag:v*"])
def test_small_slowdowns_do_not_add_up_unseen(call, five_slower, against):
    code, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json")
    assert code == 3, "one step alone is below the limit, and has too few runs"
    code, out, err = call("--against", against, "--mode", "stored", "--json")
    (verdict,) = json.loads(out)["verdicts"]
    assert (code, verdict["kind"]) == (1, "regression"), err
    assert verdict["change"] == pytest.approx(1.025**5 - 1, abs=0.01)


def test_without_stored_runs_the_oldest_stands_for_the_best(call):
    code, _, err = call("--against", "best:2", "--mode", "stored")
    assert code == 4
    assert "no run of the last 2 commits is stored: the oldest of them stands for the best" in err


def test_the_best_may_be_of_a_private_kernel(call, sleeper, store):
    """A kernel of an operator that another root has too bears its root's name for a provider."""
    store("HEAD~1", provider=sleeper.folder.name)
    _, _, err = call("--against", "best:2", "--mode", "stored")
    assert f"the best of the last 2 commits: {sleeper.git('rev-parse', 'HEAD~1')[:10]}" in err
    assert "no run of the last" not in err
    _, _, err = call("--against", "best:2", "--mode", "stored", "--device", "cuda")
    assert "no run of the last 2 commits is stored" in err


def test_limits_follow_each_other():
    from kernelmark.suite.cli.regression import _limits

    low = _limits(0.02, None)
    assert (low.fail_above, low.warn_above, low.tolerated) == (0.02, 0.02, 0.01)
    low = _limits(0.015, 0.01)
    assert (low.fail_above, low.warn_above, low.tolerated) == (0.015, 0.01, 0.005)


def test_different_environments_are_not_compared(call, store):
    for _ in range(12):
        store("HEAD~1", driver="580")
    store("HEAD", driver="590")
    code, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json")
    (verdict,) = json.loads(out)["verdicts"]
    assert (code, verdict["kind"]) == (4, "not comparable")
    assert verdict["differing"] == ["driver: 580 / 590"]


@pytest.mark.parametrize(
    ("ms", "code", "kind"), [(22.0, 1, "regression"), (20.0, 0, "no change"), (16.0, 0, "improvement")]
)
def test_enough_stored_runs_decide(call, store, ms, code, kind):
    # HEAD~2 has the same kernels as HEAD~1, so its runs stand for it; those of another condition do not.
    for revision in ("HEAD~2", "HEAD~1") * 6:
        store(revision)
    store("HEAD", 30.0, driver="other")
    store("HEAD", ms)
    got, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json")
    (verdict,) = json.loads(out)["verdicts"]
    assert (got, verdict["kind"], verdict["implementation"]) == (code, kind, "kernelmark_cpu")
    assert verdict["mode"] == "stored"


def test_thresholds_and_what_fails(call, store):
    for _ in range(12):
        store("HEAD~1")
    store("HEAD", 22.0)
    stored = ("--baseline", "HEAD~1", "--mode", "stored")
    assert call(*stored)[0] == 1
    assert call(*stored, "--fail-above", "20%")[0] == 0
    assert call(*stored, "--fail-above", "20%", "--warn-above", "15%", "--fail-on", "below the limit")[0] == 1
    assert call(*stored, "--fail-above", "0.2", "--fail-on", "warning")[0] == 1
    assert call(*stored, "--fail-on", "none")[0] == 0


def test_auto_rests_on_what_is_stored_if_that_decides(call, store, monkeypatch):
    monkeypatch.setattr(Question, "_measured", lambda *arguments: pytest.fail("it measured"))
    monkeypatch.setattr(Question, "_settled", lambda *arguments: pytest.fail("it measured"))
    for _ in range(12):
        store("HEAD~1")
    store("HEAD")
    code, out, _ = call("--baseline", "HEAD~1")
    assert code == 0
    assert "1 no change" in out


def test_auto_where_nothing_can_be_measured(call, store, monkeypatch):
    monkeypatch.setattr(question, "find_spec", lambda name: None)
    code, _, err = call("--baseline", "HEAD~1")
    assert code == 4
    assert "and this machine cannot measure: torch is not installed" in err
    store("HEAD~1")
    store("HEAD")
    code, out, _ = call("--baseline", "HEAD~1")
    assert code == 3
    assert "Inconclusive" in out


def test_a_row_that_only_one_run_was_asked_for_is_not_missing(call, store):
    for _ in range(12):
        store("HEAD~1")
    store("HEAD", operator=("gelu",))
    code, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json")
    assert (code, json.loads(out)["verdicts"]) == (4, [])


def test_a_dirty_tree_is_never_head(call, store, sleeper):
    store("HEAD~1")
    store("HEAD")
    sleeper.write(kernels__cpu__double="changed = True\n")
    code, _, err = call("--baseline", "HEAD~1", "--current", "worktree", "--mode", "stored")
    assert code == 4
    assert "uncommitted changes cannot be told apart" in err
    code, _, err = call("--baseline", "HEAD~1", "--mode", "stored")
    assert code == 3
    assert "uncommitted changes, which HEAD does not have" in err


def test_a_commit_without_the_kernel_is_missing(call, sleeper, plan_file):
    (sleeper.folder / "kernels/cpu/double.py").unlink()
    sleeper.commit()
    code, _, err = call("--baseline", "HEAD~1", "--mode", "ab", "--plan", str(plan_file([16])))
    assert code == 4
    assert "only HEAD~1 @ " in err
    assert len(sleeper.git("worktree", "list").splitlines()) == 1


def test_values():
    assert [Share()(x) for x in ("5%", "0.05", "0%")] == [0.05, 0.05, 0]
    assert [Duration()(x) for x in ("90", "600s", "10m", "1.5h")] == [90, 600, 600, 5400]


@pytest.fixture
def fresh(monkeypatch):
    """In place of an A/B: no change in the row, under the conditions of a key."""
    asked = []

    def interleaved(self, home, index, plan, only):
        key = Key("double", CASE.name, "kernelmark_cpu", "cold")
        asked.append(only)
        verdict = Verdict(key, "no change", "as measured anew")
        return SimpleNamespace(
            header=SimpleNamespace(key=fresh.key), progress=Progress((verdict,)), records=((), ()), runs=[]
        )

    fresh = SimpleNamespace(key="{}", asked=asked)
    monkeypatch.setattr(Question, "_interleaved", interleaved)
    return fresh


def test_what_stored_runs_call_slower_is_measured_anew(call, store, fresh):
    for _ in range(12):
        store("HEAD~1")
    store("HEAD", 22.0)
    code, out, err = call("--baseline", "HEAD~1")
    assert (code, [list(x) for x in fresh.asked]) == (0, [[Key("double", CASE.name, "kernelmark_cpu", "cold")]])
    assert "the stored runs leave 1 row to an A/B" in err
    assert "as measured anew" in out
    # Another machine's A/B is no answer to this one's question.
    fresh.key = "another machine"
    code, _, err = call("--baseline", "HEAD~1")
    assert code == 1
    assert "the stored runs' verdicts stand" in err


def test_when_stored_runs_do_not_do(call, store, fresh):
    store("HEAD~1", driver="580")
    store("HEAD", driver="590")
    code, _, err = call("--baseline", "HEAD~1")
    assert (code, fresh.asked) == (0, [None])
    assert "the stored runs differ in driver: 580 / 590: measuring both" in err
    store("HEAD~1", driver="590")
    code, _, err = call("--baseline", "HEAD~1")
    assert (code, fresh.asked) == (0, [None, None])
    assert "1 stored runs of unchanged code, 10 are needed: measuring both" in err


def test_files_that_cannot_be_written(call, fresh):
    code, _, err = call("--baseline", "HEAD~1", "--markdown", "/no/such/folder/comment.md")
    assert code == 2
    assert "cannot be written" in err


def test_a_narrowed_run_does_not_hide_the_others(call, store):
    for _ in range(12):
        store("HEAD~1", operator=("double", "gelu"))
    store("HEAD", 22.0, operator=("double", "gelu"))
    store("HEAD", 20.0, operator=("gelu",))
    code, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json")
    assert (code, len(json.loads(out)["verdicts"])) == (1, 2)
    code, out, _ = call("--baseline", "HEAD~1", "--mode", "stored", "--json", "--operator", "gelu")
    assert (code, len(json.loads(out)["verdicts"])) == (1, 1)


def test_where_the_stored_runs_lack_what_is_asked_for(call, store, fresh):
    for _ in range(12):
        store("HEAD~1", operator=("gelu",))
    store("HEAD", operator=("gelu",))
    code, _, err = call("--baseline", "HEAD~1", "--operator", "double")
    assert (code, fresh.asked) == (0, [None])
    assert "no row in common that was asked for: measuring both" in err


def foreign(tmp_path, name, factor, processes, commit=None):
    """A run of so many processes that pytest-benchmark might have measured."""
    document = json.loads(
        (Path(__file__).parents[2] / "registry/importers/examples/pytest_benchmark.json").read_text()
    )
    generator = random.Random(name)
    paths = []
    for number in range(processes):
        document["benchmarks"][0]["stats"]["data"] = [factor * 1e-6 * math.exp(generator.gauss(0, 0.001))] * 6
        paths.append(tmp_path / f"{name}-{number}.json")
        paths[-1].write_text(json.dumps({**document, "benchmarks": document["benchmarks"][:1]}))
    return take_in("pytest-benchmark", paths, Home(tmp_path / "home"), commit)[0]


def test_one_process_of_another_tool_is_inconclusive_and_says_so(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no checkout is needed for runs that are named
    runs = [foreign(tmp_path, name, factor, 1) for name, factor in (("a", 1), ("b", 2))]
    code, out, _ = call("--baseline", f"run:{runs[0]}", "--current", f"run:{runs[1]}", "--json")
    (verdict,) = json.loads(out)["verdicts"]
    assert (code, verdict["kind"]) == (3, "inconclusive")
    assert "1 of 1 processes usable, at least 5 needed" in verdict["reason"]
    assert "iterations are not independent" in verdict["notes"][-1]


def test_statistics_of_runs_that_are_named(call, tmp_path):
    """They need no more than samples: one process a side is enough, where nothing is decided."""
    asked = [foreign(tmp_path, name, factor, 1) for name, factor in (("a", 1), ("b", 2))]
    named = "--baseline", f"run:{asked[0]}", "--current", f"run:{asked[1]}"
    code, out, _ = call(*named, "--statistics", "all")
    assert code == 3
    assert "(mann whitney p)" in out
    assert "0.0022" in out  # 2 of the 924 ways to choose 6 of 12
    code, out, _ = call(*named, "--statistics", "all", "--json")
    found = json.loads(out)
    assert found["verdicts"][0]["statistics"]["mann_whitney_p"] == pytest.approx(2 / 924)
    assert "welch_t" in found["statistics_do_not_decide"]


def test_enough_runs_of_another_tool_are_decided_like_ours(call, tmp_path):
    base = [foreign(tmp_path, f"base{i}", 1.0, 5) for i in range(12)]
    slow, same = foreign(tmp_path, "slow", 1.2, 5, "f" * 40), foreign(tmp_path, "same", 1.0, 5, "e" * 40)
    code, out, _ = call("--baseline", f"run:{base[0]}", "--current", f"run:{slow}", "--json")
    (verdict,) = json.loads(out)["verdicts"]
    assert (code, verdict["kind"], verdict["mode"]) == (1, "regression", "stored")
    assert call("--baseline", f"run:{base[0]}", "--current", f"run:{same}")[0] == 0
    code, _, err = call("--baseline", f"run:{base[0]}", "--current", "HEAD")
    assert code == 2
    assert "run:NAME is for both sides" in err


def test_environments_that_cannot_measure(call, tmp_path, monkeypatch):
    code, _, err = call("--baseline", "HEAD", "--base-environment", str(tmp_path / "nowhere"))
    assert code == 2
    assert "is no Python that runs" in err
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    code, _, err = call("--baseline", "HEAD", "--current-environment", str(bare))
    assert code == 2
    assert "cannot measure: ModuleNotFoundError" in err
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")
    code, _, err = call("--baseline", "HEAD", "--base-environment", "image:sha256:0")
    assert code == 5
    assert "does not answer: there is no such socket" in err
    for option in ("--attribute", "--bisect"):
        code, _, err = call("--baseline", "HEAD", "--mode", "stored", option)
        assert code == 2
        assert "--mode stored never does" in err


def test_what_has_an_environment_of_its_own_is_not_exchanged():
    from kernelmark.suite.environments import ours

    cell = SimpleNamespace(implementation=SimpleNamespace(name="vllm_fa3", environment="vllm"))
    tree = SimpleNamespace(cells=[cell])
    Question._refuse_apart(SimpleNamespace(environments=(ours, ours)), tree)
    with pytest.raises(InputError, match="vllm_fa3: run in environments of their own"):
        Question._refuse_apart(SimpleNamespace(environments=(ours, lambda folders: None)), tree)


@pytest.mark.minutes
def test_the_environments_part_is_told_from_the_codes(detector, sleeper, tmp_path):
    """One commit of equal code, in two environments that differ in how long the kernel sleeps."""
    kernel = (sleeper.folder / "kernels/cpu/double.py").read_text()
    more = "SECONDS + float(__import__('os').environ.get('SLEEP_MORE', 0))"
    sleeper.commit(kernels__cpu__double=kernel.replace("(SECONDS)", f"({more})"))
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nSLEEP_MORE=0.02 exec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    page = tmp_path / "verdict.html"
    code, out, err = detector.run(
        "--baseline", "HEAD", "--current-environment", str(slow), "--attribute", "--json", "--html", str(page)
    )  # fmt: skip
    assert code == 1, err
    (verdict,) = json.loads(out)["verdicts"]
    found = verdict["attribution"]
    assert found["causes"] == ["environment"]
    assert [(x["cause"], x["share"]) for x in found["parts"]] == [("environment", 1.0)]
    assert found["low"] > 0.2
    assert "Where it comes from" in page.read_text()
    assert found["reason"] == "environment: nothing else differs"
