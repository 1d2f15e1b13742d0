"""`kernelmark run`: a user's mistakes in this process, one whole run in its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import encode, read
from kernelmark.registry.store.record import Header
from kernelmark.suite import cli
from kernelmark.suite.measure.telemetry import Nvml


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs the command line in a home of its own; gives exit code, output and error output."""
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))

    def do(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return do


@pytest.fixture
def _no_gpu(monkeypatch):
    monkeypatch.setattr(Nvml, "open", classmethod(lambda cls, uuid=None: None))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--operator", "rmsnorm"),
            "unknown operator 'rmsnorm'. Did you mean 'rms_norm'? Known: adamw, add_rms_norm,",
        ),
        (("--implementation", "torhc"), "unknown implementation 'torhc'. Did you mean 'torch'? Known: "),
        (
            ("--plan", "nightly"),
            "unknown plan 'nightly'. Known: quick, standard, full, 30s, 5m, 30m, advanced-memory, attention,",
        ),
        (("--plan", "absent.toml"), "no plan file at absent.toml."),
        (("--device", "tpu"), "no device 'tpu' here. Here: cpu. Known: cuda, rocm, xpu, mps, cpu."),
        (("--device", "cuda"), "no device 'cuda' here. Here: cpu. Known: cuda, rocm, xpu, mps, cpu."),
        (("--resume", "20990101"), "no runs in"),
        (("--operator", "gelu", "--implementation", "sdpa"), "plan 'quick' has nothing to measure with these"),
        (("--replicates", "0"), "Invalid value for '--replicates': 0 is not in the range"),
        (
            ("--seed", "9" * 23),
            "Invalid value for '--seed': 99999999999999999999999 is not within -9223372036854775808",
        ),
        (("--dry-run", "--run", "latest"), "'latest' is not a run's name: it stands for the newest run"),
        (("--cache", "warm"), "Invalid value for '--cache': 'warm' is not one of 'cold', 'hot', 'both'."),
        (("--timer", "sundial"), "is not one of 'auto', 'events', 'graph', 'cupti'."),
        (("--speed", "9"), "--speed"),
        (("--axis", "S"), "'S' names no axis and sizes: write S=4096 or S=1024,4096."),
        (("--fail-on", "slow"), "'slow' is not one of"),
        (("--budget", "soon"), "'soon' is no length of time"),
        (("--budget", "0s"), "'0s' is no length of time"),
        (("--resume", "x", "--seed", "1", "--axis", "S=1"), "leave --axis, --seed out."),
        (
            ("--any-board", "--operator", "gelu"),
            "--any-board goes on with a run on another board; it needs --resume",
        ),
        (("--plan", "standard", "--quick"), "--quick is short for --plan quick; give one of --quick and --plan."),
        (("--dry-run", "--run", "../x"), "'../x' is not a run's name"),
        (("--dry-run", "--device", "cuda", "--gpus", "a"), "numbers as nvidia-smi lists them"),
    ],
)
@pytest.mark.usefixtures("_no_gpu")
def test_a_mistake_is_a_message_and_code_2(call, arguments, said):
    code, out, err = call("run", *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


@pytest.mark.usefixtures("_no_gpu")
def test_a_mistake_in_a_plan_file(call, plan_file, root, monkeypatch):
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    path = plan_file([16])
    path.write_text(path.read_text().replace("replicates", "replicats"))
    code, _, err = call("run", "--plan", str(path))
    assert code == 2
    assert f"{path}: not a valid plan: Object contains unknown field `replicats`" in err


@pytest.mark.usefixtures("_no_gpu")
def test_an_unknown_run_to_resume_names_those_that_exist(call, tmp_path):
    header = Header(
        2, "20261121-000000-aaaa", "2026-11-21", "0.1.0", None, False, "quick", 0, 1, "cpu", "k", {}, {}
    )
    path = Home(tmp_path / "home").journal(header.run)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(header))
    code, _, err = call("run", "--resume", "20261122")
    assert code == 2
    assert "unknown run '20261122'" in err
    assert header.run in err
    code, _, err = call("run", "--resume", "latest")
    assert code == 2
    assert "does not say what it measured" in err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_results_that_cannot_be_written(call, tmp_path, monkeypatch, how):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "results")
    arguments = ("--output", folder) if how == "option" else ()
    if how == "environment":
        monkeypatch.setenv("KERNELMARK_HOME", folder)
    code, _, err = call("run", *arguments)
    assert code == 2
    assert f"results cannot be written to {folder}: Not a directory. Choose another folder with --output" in err


def test_an_unknown_command(call):
    code, _, err = call("messure")
    assert code == 2
    assert "No such command 'messure'" in err


def test_help_names_every_command(call):
    code, out, _ = call("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    assert cli.cli.list_commands(None) == list(cli.COMMANDS)
    for name in cli.COMMANDS:
        code, out, _ = call(name, "--help")
        assert code == 0
        assert f" {name} [OPTIONS]" in out.splitlines()[0]


def test_a_harness_that_fails_is_code_5(call, root, plan_file, monkeypatch):
    from kernelmark.suite.run import supervisor

    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    monkeypatch.setattr(
        supervisor.Run, "python", staticmethod(lambda environment: Path("/bin/false")), raising=False
    )
    broken = supervisor.Run.__init__

    def init(self, *arguments, **named):
        broken(self, *arguments, **named, python=lambda environment: Path("/bin/false"))

    monkeypatch.setattr(supervisor.Run, "__init__", init)
    code, _, err = call("run", "--plan", str(plan_file([16])), "--device", "cpu", "--implementation", "plain")
    assert code == 5
    assert "the worker could not start: its process ended with exit code 1" in err
    assert "Traceback" not in err


def test_as_a_module():
    command = [sys.executable, "-m", "kernelmark.suite", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kernelmark, version ")


def test_a_reader_that_goes_away_is_no_failure():
    code = "from kernelmark.suite.cli import main; main()"
    command = f'"{sys.executable}" -c "{code}" list --json | head -c 10'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_whole_run(root, plan_file, tmp_path):
    """As a user runs it: measured, with ceilings; the table; the report; the registry where MLflow is."""
    plan = plan_file([1 << 12], replicates=2)
    environment = {
        **{x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"},
        "KERNELMARK_PATH": str(root),
        "PYTHONSAFEPATH": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    arguments = [
        "run",
        "--plan",
        str(plan),
        "--device",
        "cpu",
        "--seed",
        "7",
        "--output",
        "results",
        "--cache",
        "both",
    ]
    arguments += [x for name in ("plain", "wrong", "copy", "absent") for x in ("--implementation", name)]
    arguments += ["--note", "a look", "--fail-on", "incorrect", "--fail-on", "crashed", "--budget", "30m"]
    done = subprocess.run(
        [sys.executable, "-c", "from kernelmark.suite.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "--fail-on: 2 rows incorrect" in done.stderr
    lines = done.stdout.splitlines()
    home = Home(tmp_path / "results")
    (run,) = home.runs()
    assert lines[0] == f"run {run}: 12 measurements"  # `absent` is none to come
    assert any(
        x.startswith("  double N4096-fp32-forward wrong: incorrect: verify: output: relative") for x in lines
    )
    # Each row once, when it is first measured, and not a line for each measurement.
    assert sum(x.startswith("[") and " ms" in x for x in lines) == 4
    told = dict(x.split(maxsplit=1) for x in lines if x.startswith(("run ", "journal ", "report ", "registry ")))
    assert told["run"] == run
    assert told["journal"] == f"results/journals/{run}.jsonl"
    journal = read(tmp_path / told["journal"])
    assert {(x.implementation, x.cache, x.replicate) for x in journal.records if x.status == "ok"} == {
        (name, cache, replicate) for name in ("plain", "copy") for cache in ("cold", "hot") for replicate in (0, 1)
    }
    assert journal.header.request.note == "a look"
    assert (journal.header.seed, journal.header.plan, journal.header.device) == (7, "tiny", "cpu")
    assert {x.replicate for x in journal.ceilings} == {0, 1}
    assert {x.what for x in journal.ceilings} == {"copy", "read", "write", "matmul"}
    assert "plain" in done.stdout
    assert "no-such-distribution" in done.stdout
    if find_spec("jinja2"):
        page = (tmp_path / told["report"]).read_text()
        assert run in page
    else:
        assert "not written" in told["report"]
    if find_spec("mlflow"):
        assert "rows recorded" in told["registry"]
        assert home.database.exists()
    else:
        assert "MLflow is not installed here" in told["registry"]


def test_flags_of_the_configuration_file(call, root, plan_file, monkeypatch, tmp_path):
    config = tmp_path / "config.toml"
    monkeypatch.setenv("KERNELMARK_CONFIG", str(config))
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    config.write_text('[defaults.run]\ndry-run = true\nquick = true\ndevice = "cpu"\n')
    code, out, _ = call("run", "--plan", str(plan_file([16])))
    assert code == 0
    assert "plan tiny:" in out  # what is said on the command line comes first
    assert "Nothing was measured." in out
    config.write_text('[defaults.run]\nplan = "standard"\ndry-run = true\ndevice = "cpu"\n')
    assert "plan quick:" in call("run", "--quick", "--operator", "softmax")[1]
    config.write_text("[defaults.run]\nreplicates = 0\n")
    assert f"{config} says so in [defaults.run]." in call("run", "--dry-run")[2]
    assert "says so" not in call("run", "--dry-run", "--replicates", "-1")[2]


@pytest.mark.parametrize(
    ("arguments", "closed"),
    [("--version", ">&-"), ("runs", ">&-"), ("runs", "<&- >&- 2>&-"), ("show x", "2>&-"), ("list", ">&- 2>&-")],
)
def test_streams_that_are_closed(arguments, closed, tmp_path):
    code = "from kernelmark.suite.cli import main; main()"
    command = f'"{sys.executable}" -c "{code}" {arguments} {closed}'
    environment = {**os.environ, "KERNELMARK_HOME": str(tmp_path / "home")}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (2 if "show" in arguments else 0, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "pipe", "code"),
    [("--version", "|", 0), ("show x", "2>&1 |", 2), ("completion bash", "|", 0), ("list --json", "|", 0)],
)
def test_a_reader_that_went_away_changes_no_exit_code(arguments, pipe, code, unbuffered, tmp_path):
    program = "from kernelmark.suite.cli import main; main()"
    command = (
        f'(sleep 0.5; exec "{sys.executable}" -c "{program}" {arguments}) {pipe} true; exit "${{PIPESTATUS[0]}}"'
    )
    environment = {**os.environ, "KERNELMARK_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (code, "")


def test_what_would_be_measured(call, root, plan_file, monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    arguments = (
        "run",
        "--plan",
        str(plan_file([16, 32, 1 << 20], 2)),
        "--device",
        "cpu",
        "--cache",
        "cold",
        "--dry-run",
    )
    arguments += ("--implementation", "plain", "--implementation", "copy")
    code, out, _ = call(*arguments)
    assert code == 0
    assert [x.split() for x in out.splitlines() if x.startswith("double")] == [
        ["double", f"N{size}-fp32-forward", "copy,", "plain"] for size in (16, 32, 1 << 20)
    ]
    assert "plan tiny: 6 rows, 2 replicates; likely" in out
    code, marked, _ = call(*arguments, "--implementation", "absent")
    assert marked.splitlines()[-1].startswith("plan tiny: 9 rows (3 marked * cannot run here), 2 replicates")
    assert ["double", "N16-fp32-forward", "copy,", "absent*,", "plain"] in map(str.split, marked.splitlines())
    assert not (tmp_path / "home").exists()
    code, out, _ = call(*arguments, "--axis", "N=8,64", "--budget", "1s")
    assert code == 0
    kept, left_out = out.split("Left out")
    assert "N8-fp32-forward" in kept
    assert "N64-fp32-forward" in left_out
    assert "1 case" not in out
    code, _, err = call(*arguments, "--axis", "M=8")
    assert code == 2
    assert "no operator of plan 'tiny' can be measured at M=8" in err


def test_what_would_be_measured_on_a_device_of_another_machine(call, tmp_path):
    asked = ("run", "--operator", "softmax", "--device", "rocm")
    code, out, _ = call(*asked, "--dry-run")
    assert code == 0
    marked = next(x for x in out.splitlines() if x.startswith("softmax"))
    assert "kernelmark," in marked  # what it needs is for that machine to say
    assert "kernelmark_cpu*" not in marked
    assert "There is no device 'rocm' here: what its machine has installed is not known." in out
    assert not (tmp_path / "home").exists()
    code, _, err = call(*asked)
    assert code == 2
    assert "no device 'rocm' here. Here: cpu." in err
    assert call("run", "--device", "abacus", "--dry-run")[0] == 2


def test_json_of_a_device(call):
    code, out, _ = call("list", "--json", "--device", "cuda")
    assert code == 0
    assert json.loads(out)["device"] == "cuda"


def test_a_fault_of_ours_is_code_5_and_one_line(call, monkeypatch, tmp_path):
    def fails(*arguments):
        raise ZeroDivisionError("division by zero\nand more")

    monkeypatch.setattr("kernelmark.suite.cli.list.Catalog.default", fails)
    code, out, err = call("list")
    assert (code, out) == (5, "")
    (log,) = (tmp_path / "home" / "logs").glob("fault-*.log")
    said = "kernelmark: a fault of kernelmark's own: ZeroDivisionError: division by zero."
    assert err == f"{said} The traceback is in {log}\n"
    assert "in fails\n" in log.read_text()


def test_a_missing_extra_is_named(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("kernelmark.suite.cli.list.Catalog.default", lambda: __import__("jinja2"))
    code, _, err = call("list")
    assert code == 2
    assert err == "kernelmark: jinja2 is not installed: pip install 'kernelmark[registry]'\n"


@pytest.mark.usefixtures("_no_gpu")
def test_a_plan_of_which_nothing_can_run_says_why(call, root, plan_file, monkeypatch):
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    code, _, err = call("run", "--plan", str(plan_file([16, 32])), "--implementation", "absent")
    assert code == 2
    assert err == (
        "kernelmark: nothing of this plan can run here:\n"
        "  no-such-distribution is not installed: pip install no-such-distribution (2 rows)\n"
    )
