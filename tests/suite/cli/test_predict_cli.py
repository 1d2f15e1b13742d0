"""`kernelmark predict`: through the real command line, with its exit codes."""

from __future__ import annotations

import json

import pytest
from kernelmark.registry.store.journal import encode
from kernelmark.suite import cli

from ...steps import BUCKETS, COMPUTE, journal, stepped, truth


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Calls the command on a run of these steps: exit code, output, error output."""
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))

    def call(steps, *arguments):
        made = journal(*steps)
        path = tmp_path / "run.jsonl"
        path.write_bytes(b"".join(encode(x) for x in (made.header, *made.records)))
        with pytest.raises(SystemExit) as end:
            cli.run_command(cli.cli, ["predict", str(path), *arguments])
        return (end.value.code, *capsys.readouterr())

    return call


STEPS = (stepped(1, COMPUTE), stepped(2, truth(2)))


def test_a_prediction_is_called_one(call):
    code, out, _ = call(STEPS, "--gpus", "4")
    assert code == 0
    assert "PREDICTION, not measured" in out
    (found,) = json.loads(call(STEPS, "--gpus", "4", "--json")[1])["predictions"]
    assert (found["from_gpus"], found["gpus"], found["measured_ms"]) == (2, 4, None)
    assert found["predicted_ms"] == pytest.approx(truth(4), rel=1e-3)
    network = call(STEPS, "--gpus", "2", "--hosts", "8", "--alpha", "20", "--rate", "40", "--json")[1]
    (far,) = json.loads(network)["predictions"]
    assert (far["gpus"], far["hosts"]) == (2, 8)
    assert far["predicted_ms"] > found["predicted_ms"]


def test_fewer_bytes_are_in_the_json_too(call):
    half = stepped(2, truth(2) - 1, "ddp_int8", tuple(x / 2 for x in BUCKETS), 2.0)
    (found,) = json.loads(call((*STEPS, half), "--gpus", "4", "--json")[1])["break_evens"]
    assert (found["gpus"], found["compression_ratio"]) == (2, 2.0)
    assert found["plain_ms"] - found["step_ms"] == pytest.approx(1)
    assert found["rate_gb_s"] > 0


@pytest.mark.parametrize(
    ("steps", "arguments", "code", "said"),
    [
        (STEPS[1:], (), 4, "it takes a run with `train` on one GPU and on several"),
        (STEPS, ("--gpus", "many"), 2, "--gpus is 'many'; numbers of GPUs, as 4,8."),
        (STEPS, ("--hosts", "2"), 2, "give --alpha µs and --rate GB/s"),
        (STEPS, ("--rate", "40"), 2, "give --hosts too"),
    ],
)
def test_mistakes(steps, arguments, code, said, call):
    found, out, err = call(steps, *arguments)
    assert (found, out) == (code, "")
    assert said in " ".join(err.split())
