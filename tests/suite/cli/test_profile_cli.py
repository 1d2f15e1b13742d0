"""`kernelmark profile` on rows of a run: an operator's and a model's, on a CPU."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest
from kernelmark.registry.store.journal import encode
from kernelmark.registry.store.record import Header
from kernelmark.registry.views.table import render
from kernelmark.suite import cli
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.cli.profile import LONGEST, _page
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.plan import Plan
from kernelmark.suite.run.profile import Kernel, Light, Profile


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
    """Runs the command line on a home with a run of two cases; gives exit code, output and error output."""
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    catalog = Catalog.default()
    cases = (
        catalog.operator("layer_norm").case({"B": 2, "S": 4, "D": 32}, "fp32", "forward"),
        catalog.definition("train").case({"B": 1, "S": 16}, "fp32", "program", model="llama-tiny", state="plain"),
        catalog.definition("generate").case({"B": 1, "S": 5, "N": 3}, "fp32", "program", model="llama-tiny"),
    )
    plan = Plan("mine", cases, 1, ("cold",), Sampling(), 60.0)
    request = plan.request(plan.cells(catalog, "cpu"))
    header = Header(
        schema_version=2, run="20261122-000000-aaaa", created="2026-11-22T00:00:00Z", harness="0.1.0", commit=None,
        dirty=False, plan="mine", seed=1, replicates=1, device="cpu", key="k", conditions={}, environment={},
        request=request,
    )  # fmt: skip
    path = tmp_path / "home" / "journals" / f"{header.run}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(header))

    def do(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return do


def test_a_row_of_an_operator(call, tmp_path):
    code, out, err = call("profile", "layer_norm/B2-S4-D32-fp32-forward/torch", "--steps", "3", "--ncu")
    assert (code, err) == (0, "")
    assert "aten::native_layer_norm" in out
    assert "a step of" in out
    assert "of the step" in out
    if shutil.which("ncu") is None:
        assert "ncu is not on the PATH" in out
    with gzip.open(tmp_path / "home/profiles/layer_norm-B2-S4-D32-fp32-forward-torch/trace.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_a_step_of_a_model(call):
    code, out, _ = call("profile", "train/B1-S16-llama-tiny-plain-fp32/torch", "--steps", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["steps"] == 2
    kinds = {x["kind"] for x in found["kernels"]}
    assert {"product", "other"} <= kinds
    assert sum(x["share"] for x in found["kernels"]) <= 1.001


def test_decode_steps(call):
    """More of them than tokens have room."""
    code, out, _ = call("profile", "generate/B1-S5-N3-llama-tiny-fp32/torch", "--steps", "4", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["steps"] == 4
    products = [x for x in found["kernels"] if x["kind"] == "product"]
    assert products


def test_what_cannot_be_profiled_is_said(call, tmp_path):
    code, _, err = call("profile", "layer_norm/B2-S4-D32-fp32-forward/torhc")
    assert code == 2
    assert "Did you mean" in err
    code, _, err = call("profile", "kernelmark")
    assert code == 2
    assert "names 3 rows" in err
    assert not (tmp_path / "home/profiles").exists()
    code, _, err = call("profile", "generate/B1-S5-N3-llama-tiny-fp32/transformers_generate")
    assert (code, "cannot be profiled: what is not made of parts" in err, "Error" in err) == (2, True, False)
    assert not list((tmp_path / "home/profiles").iterdir())
    code, _, err = call("profile", "layer_norm/B2-S4-D32-fp32-forward/kernelmark")
    assert code == 2
    assert "needs a cuda device" in err


def test_of_a_run_of_an_operator_that_is_not_here_its_name_is_said(call, tmp_path):
    (journal,) = (tmp_path / "home/journals").iterdir()
    journal.write_text(journal.read_text().replace('"layer_norm"', '"mine"').replace('"train"', '"mine"'))
    code, _, err = call("profile", "mine/B2-S4-D32-fp32-forward/torch")
    assert code == 2
    assert "unknown operator 'mine'" in err


def test_a_long_name_keeps_its_ends():
    """A template's arguments would push the figures off the page."""
    name = f"void at::native::reduce_kernel<{'a' * 300}, float>"
    found = Profile(1, 2.0, 0.0, (Kernel(name, "other", 1.0, 2.0, 1.0), Kernel("short", "ours", 1.0, 0.0, 0.0)))
    text = render(_page("row", found, ()))
    assert "void at::native::reduce_kernel<aaa" in text
    assert " … " in text
    assert "aaa, float>" in text
    assert max(map(len, text.splitlines())) < LONGEST + 60


def test_what_nsight_compute_said_stands_beside_a_kernel():
    found = Profile(1, 2.0, 1.0, (Kernel("norm", "ours", 2.0, 1.0, 0.5), Kernel("gemm", "product", 1.0, 0.0, 0.0)))
    text = render(_page("row", found, (Light("norm", us=4.0, compute=12.4, memory=91.5, waves=1.55),)))
    (norm,) = (x for x in text.splitlines() if x.startswith("norm"))
    assert norm.split()[-5:] == ["12", "%", "92", "%", "1.6"]
    narrow = render(_page("row", found, (Light("norm", compute=12.4, waves=1.55),)), 60)
    assert "Left out at 60 columns: " in narrow
    assert "waves" in narrow.partition("Left out")[2]
