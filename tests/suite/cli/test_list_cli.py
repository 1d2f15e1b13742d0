"""`kernelmark list`: for people and for machines."""

from __future__ import annotations

import csv
import io
import json

import pytest
from kernelmark.suite import cli
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.telemetry import Nvml


@pytest.fixture
def call(capsys, monkeypatch):
    """Runs `kernelmark list`; gives exit code, output and error output."""
    monkeypatch.setenv("COLUMNS", "200")

    def do(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, ["list", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return do


def test_the_table_names_what_is_here_and_why_the_rest_is_not(call, root, monkeypatch):
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    code, out, _ = call("--device", "cpu")
    assert code == 0
    assert "Operators and implementations, on cpu" in out
    text = " ".join(out.split())
    assert "needs a cuda device, this is cpu: kernelmark, " in text
    assert "no-such-distribution is not installed: pip install no-such-distribution: absent" in text
    for name in ("rms_norm", "attention", "double"):
        assert f"\n{name} " in out
    assert len(out.splitlines()) < len(Catalog.default().operators) + 20  # a line an operator, a line a reason


def test_all_about_one_operator(call):
    code, out, _ = call("attention", "--device", "cpu")
    assert code == 0
    for said in (
        "mask: causal, full",
        "S sequence",
        "standard 64",
        "needs a cuda device, this is cpu",
        "sdpa_math",
    ):
        assert said in out
    assert "rms_norm" not in out
    code, _, err = call("atention")
    assert code == 2
    assert "Did you mean 'attention'?" in err


@pytest.mark.parametrize(
    ("arguments", "fields", "some"),
    [
        (("--plans",), ["plan", "cases", "operators", "replicates", "cache", "budget"], {"plan": "attention"}),
        (("gelu", "--cases"), ["operator", "plan", "case"], {"operator": "gelu", "plan": "quick_cpu"}),
        (
            ("--providers",),
            ["provider", "version", "environment", "operators", "implementations", "available", "reason"],
            {"provider": "liger"},
        ),
        (
            ("--models",),
            ["model", "configuration", "layers", "width", "vocabulary"],
            {"model": "bert", "configuration": "bert-base", "width": "768"},
        ),
    ],
)
def test_what_else_there_is(call, arguments, fields, some):
    code, out, _ = call(*arguments, "--device", "cpu")
    assert code == 0
    assert all(x in out.splitlines()[1] for x in fields)
    rows = list(csv.DictReader(io.StringIO(call(*arguments, "--csv", "--device", "cpu")[1])))
    assert list(rows[0]) == fields
    assert any(some.items() <= x.items() for x in rows)
    assert len(json.loads(call(*arguments, "--json", "--device", "cpu")[1])) == len(rows)
    assert call(*arguments, "--markdown", "--device", "cpu")[1].count("\n| ") == len(rows) + 1


def test_json_lists_every_case_and_implementation(call):
    code, out, _ = call("--json", "--device", "cpu")
    found = json.loads(out)
    assert (code, found["device"]) == (0, "cpu")
    norm = next(x for x in found["operators"] if x["name"] == "rms_norm")
    assert norm["axes"] == {"B": "batch", "S": "sequence", "D": "model dimension"}
    assert norm["passes"] == ["forward", "backward", "forward_backward"]
    assert "B4-S2048-D4096-bf16-forward" in norm["cases"]["standard"]
    by_name = {x["name"]: x for x in norm["implementations"]}
    assert (by_name["torch"]["available"], by_name["torch"]["status"], by_name["torch"]["reason"]) == (
        True,
        "ok",
        None,
    )
    assert by_name["kernelmark"]["status"] == "unsupported"
    assert not by_name["kernelmark"]["available"]


@pytest.mark.parametrize(("gpu", "device"), [(object(), "cuda"), (None, "cpu")])
def test_the_device_is_the_best_one_here(call, monkeypatch, gpu, device):
    monkeypatch.setattr(Nvml, "open", classmethod(lambda cls, uuid=None: gpu))
    assert json.loads(call("--json")[1])["device"] == device


def test_mistakes(call, monkeypatch, tmp_path):
    code, _, err = call("--device", "tpu")
    assert code == 2
    assert "'tpu' is not one of 'cuda', " in err
    monkeypatch.setenv("KERNELMARK_PATH", str(tmp_path / "absent"))
    code, out, err = call()
    assert (code, out) == (2, "")
    assert "which is not a folder" in err
