"""What `kernelmark bench` asks of `kernelmark run` in the container. No container runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kernelmark.registry.store.journal import encode
from kernelmark.registry.store.record import Header
from kernelmark.suite.cli import cli, run_command
from kernelmark.suite.container.launch import Ended
from kernelmark.suite.container.session import Taken


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The words of the command in the container."""
    words: list[str] = []

    def measure(job):
        words.extend(job.arguments)
        return Ended(1), []

    session = SimpleNamespace(
        image=SimpleNamespace(name="cpu", id="sha256:0"),
        gpus=(),
        earlier=Taken,
        arguments=lambda: ["--device", "cpu"],
        measure=measure,
    )
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kernelmark.suite.container.session.prepare", lambda *given: session)
    return words


def test_what_a_run_takes_an_image_takes(asked):
    given = "--plan standard --operator gelu --implementation torch --axis M=16,32 --axis N=64 --dtype fp32"
    given += " --pass backward --replicates 2 --cache hot --timer events --budget 5m --fail-on incorrect"
    with pytest.raises(SystemExit) as ended:
        run_command(cli, ["bench", "cpu", *given.split(), "--note", "-x y"])
    assert ended.value.code == 1  # the exit code is that of the run
    assert asked == [
        *["run", "--journal-only", "--plan", "standard", "--operator", "gelu", "--implementation", "torch"],
        *["--axis", "M=16,32", "--axis", "N=64", "--dtype", "fp32", "--pass", "backward", "--replicates", "2"],
        *["--cache", "hot", "--timer", "events", "--budget", "300s", "--note", "-x y", "--fail-on", "incorrect"],
        *["--device", "cpu"],
    ]


def test_a_run_that_goes_on_takes_nothing_that_was_asked_before(asked, capsys):
    for words in (["--dtype", "fp32"], ["--budget", "5m"], ["--seed", "0"]):
        with pytest.raises(SystemExit) as ended:
            run_command(cli, ["bench", "cpu", "--resume", "x", *words])
        assert ended.value.code == 2
        assert f"goes on with what its run was asked; leave {words[0]} out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run_command(cli, ["bench", "cpu", "--any-board"])
    assert ended.value.code == 2
    assert not asked


def test_a_run_goes_on_in_an_image_on_any_board(asked, tmp_path):
    header = Header(
        2, "20261121-000000-aaaa", "2026-11-21", "0.1.0", None, False, "quick", 0, 1, "cpu", "k", {}, {}
    )
    path = tmp_path / "home" / "journals" / f"{header.run}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(header))
    with pytest.raises(SystemExit):
        run_command(cli, ["bench", "cpu", "--resume", header.run, "--any-board"])
    assert asked == ["run", "--journal-only", "--resume", header.run, "--any-board"]
