"""`kernelmark new`: what it writes is found, passes its own test and the linter, and is measured."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmark.registry.store.journal import read
from kernelmark.suite import cli
from kernelmark.suite.catalog import Catalog

HERE = Path(__file__).resolve().parents[2]
PLAN = "replicates = 1\n[sampling]\nmin_samples = 5\nmax_samples = 10\n"
RUFF = Path(sys.executable).with_name("ruff")


@pytest.fixture
def new(capsys, tmp_path, monkeypatch):
    """Runs `kernelmark new …` in a folder of its own; gives exit code, output and error output."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")

    def do(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, ["new", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return do


def passes(folder: Path, *files: str, path: Path | None = None, written: tuple[str, ...] = (".",)) -> None:
    """Files pass the linter as it is set up here, and pytest in a process of its own."""
    given = ["--config", str(HERE / "pyproject.toml"), "--no-cache", *written]
    for words in (["format", "--check"], ["check"]):
        done = subprocess.run([RUFF, *words, *given], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TRITON_INTERPRET": "0"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *files]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def differentiable(folder: Path) -> None:
    """Makes the operator that was written so, and only of two dtypes, as the page says."""
    page = (HERE / "docs" / "adding-an-operator.md").read_text(encoding="utf-8")
    kernel = page.partition("### Backward")[2].partition("```python\n")[2].partition("```\n")[0]
    (folder / "kernels" / "swish.py").write_text(kernel)
    declared = folder / "operators" / "swish.py"
    text = declared.read_text(encoding="utf-8").replace(
        '    axes={"M"', '    dtypes=("bf16", "fp32"),\n    axes={"M"'
    )
    text = text.replace("    # gradients=", '    gradients=("x",),\n    # gradients=')
    declared.write_text(text.replace('grid("forward", ', 'grid("forward", "backward", '))
    operator = Catalog.of(folder).operator("swish")
    (forward, backward) = operator.expand(operator.plans["quick"][0])
    assert (forward.bytes, backward.bytes) == (2 * 4096 * 4096 * 2, 3 * 4096 * 4096 * 2)


def test_a_private_operator_and_a_baseline_of_it(new, program, tmp_path):
    code, out, err = new("operator", "swish")
    assert (code, err) == (0, "")
    assert f"export KERNELMARK_PATH={tmp_path / 'mine'}" in out
    (blank := tmp_path / "a blank").mkdir()
    assert f"export KERNELMARK_PATH='{blank}'" in new("operator", "swish", "--folder", str(blank))[1]
    shutil.copytree(tmp_path / "mine", tmp_path / "backward")
    differentiable(tmp_path / "backward")
    passes(tmp_path / "mine", "tests/test_swish.py", str(tmp_path / "backward" / "tests" / "test_swish.py"))
    program.environment["KERNELMARK_PATH"] = str(tmp_path / "mine")
    program.environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than all the rest
    plan = PLAN + '[[cases]]\noperator = "swish"\naxes = { M = 8, N = 64 }\ndtype = "fp32"\n'
    (tmp_path / "tiny.toml").write_text(plan)
    code, _, err = program.run("run", "--plan", str(tmp_path / "tiny.toml"))
    assert code == 0, err
    ended = {x.implementation: x.status for x in read(program.journal()).records}
    assert ended == {"kernelmark": "unsupported", "kernelmark_cpu": "ok", "torch": "ok"}


def test_a_baseline_is_measured_at_once_or_says_what_is_missing(new, program, tmp_path):
    assert new("baseline", "mine")[0] == new("baseline", "theirs", "--operator", "softmax")[0] == 0
    passes(tmp_path / "mine", "--version")
    program.environment["KERNELMARK_PATH"] = str(tmp_path / "mine")
    (tmp_path / "tiny.toml").write_text(
        PLAN
        + '[[cases]]\noperator = "rms_norm"\naxes = { B = 1, S = 2, D = 64 }\ndtype = "fp32"\n'
        + 'implementations = ["mine"]\n[[cases]]\noperator = "softmax"\naxes = { M = 2, D = 64 }\ndtype = "fp32"\n'
        + 'implementations = ["theirs"]\n'
    )
    code, _, err = program.run("run", "--plan", str(tmp_path / "tiny.toml"))
    assert code == 0, err
    ended = {x.implementation: (x.status, x.reason) for x in read(program.journal()).records}
    assert ended == {
        "mine": ("ok", None),
        "theirs": ("unsupported", "verify: baselines/theirs.py does not call its library yet"),
    }


def test_an_operator_in_a_checkout(tmp_path):
    """In a copy of this one, whose own program writes into it."""
    checkout = tmp_path / "checkout"
    names = tmp_path / "path" / "kernelmark"
    names.mkdir(parents=True)
    for room in ("suite", "kernels", "baselines", "registry"):
        ignored = shutil.ignore_patterns("__pycache__", "reference")
        shutil.copytree(HERE / room, checkout / room, ignore=ignored)
        (names / room).symlink_to(checkout / room)
    (checkout / "tests" / "kernels").mkdir(parents=True)
    for name in ("conftest.py", "quick_interpreter.py"):
        shutil.copy(HERE / "tests" / "kernels" / name, checkout / "tests" / "kernels")

    def new(*words: str) -> subprocess.CompletedProcess[str]:
        code = "from kernelmark.suite.cli import main; main()"
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(names.parent)}
        command = [sys.executable, "-c", code, "new", "operator", *words]
        return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)

    assert "--family says which folder of kernels/ it goes to. Known: activation, attention" in new("trial").stderr
    wrong = new("trial", "--family", "norms")
    assert (wrong.returncode, "Did you mean 'norm'?" in wrong.stderr) == (2, True)
    done = new("trial", "--family", "norm")
    assert (done.returncode, done.stderr) == (0, "")
    written = (
        "suite/operators/trial.py",
        "kernels/norm/trial.py",
        "kernels/cpu/trial.py",
        "tests/kernels/test_trial.py",
    )
    assert done.stdout.splitlines()[:4] == [f"written   {x}" for x in written]
    passes(checkout, "tests/kernels/test_trial.py", path=names.parent, written=written)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("operator", "My-Op"), "'My-Op' cannot name a file and a function"),
        (("operator", "class"), "'class' cannot name a file and a function"),
        (("operator", "softmax"), "'softmax' exists already. Names taken: adamw, "),
        (("operator", "swish", "--family", "norm"), "--family is for the program's own kernels"),
        (("baseline", "liger"), "'liger' exists already."),
        (("baseline", "_x"), "'_x' cannot name a file and a function"),
        (("baseline", "mine", "--operator", "softmx"), "unknown operator 'softmx'. Did you mean 'softmax'?"),
        (("operator", "swish", "--folder", "absent"), "Directory 'absent' does not exist"),
        (("operatr", "x"), "No such command 'operatr'"),
    ],
)
def test_wrong_names(new, words, said, tmp_path):
    code, out, err = new(*words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert list((tmp_path / "mine").iterdir()) == []


def test_nothing_is_overwritten(new, tmp_path):
    there = tmp_path / "mine" / "kernels" / "cpu" / "swish.py"
    there.parent.mkdir(parents=True)
    there.write_text("mine")
    code, _, err = new("operator", "swish")
    assert (code, "kernels/cpu/swish.py exists already; nothing was written" in err) == (2, True)
    assert list((tmp_path / "mine").rglob("*.py")) == [there]


def test_another_checkout_is_refused(new, tmp_path):
    (tmp_path / "mine" / "suite" / "operators").mkdir(parents=True)
    code, _, err = new("operator", "swish")
    assert (code, "is a checkout of kernelmark, but the one that runs is installed from" in err) == (2, True)
