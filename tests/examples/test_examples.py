"""The examples do what their pages say, on a CPU."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmark.registry.store.journal import read
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure import limits
from kernelmark.suite.measure.stopping import Sampling

HERE = Path(__file__).resolve().parents[2]
EXAMPLES = HERE / "examples"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
JOURNAL = HERE / "tests" / "registry" / "store" / "schema_1" / "current.jsonl.gz"


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An environment without the developer's roots and results."""
    for name in [x for x in os.environ if x.startswith("KERNELMARK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", PATH)
    return tmp_path


def test_a_private_kernel_stands_beside_ours(clean, monkeypatch):
    import torch

    monkeypatch.setenv("KERNELMARK_PATH", str(EXAMPLES / "private_kernel"))
    found = {x.name: x for x in Catalog.default().of_operator("softmax")}
    ours, private = found["kernelmark_cpu"], found["private_kernel_cpu"]
    assert (ours.provider, private.provider) == ("kernelmark", "private_kernel")
    assert found["private_kernel"].devices == ("cuda", "rocm")
    case = Catalog.default().operator("softmax").case({"M": 3, "D": 5}, "fp32", "forward")
    x = torch.randn(3, 5)
    torch.testing.assert_close(private.load()(case)(x), x.softmax(-1))


def test_the_private_kernel_of_a_gpu_computes_softmax(clean):
    code = (
        "import os, sys; os.environ['TRITON_INTERPRET'] = '1'; import torch; from pathlib import Path; "
        "from kernelmark.suite.catalog import Root; "
        "softmax = Root(Path(sys.argv[1])).module('kernels', 'softmax').softmax; x = torch.randn(3, 5); "
        "torch.testing.assert_close(softmax(x), x.softmax(-1))"
    )
    subprocess.run([sys.executable, "-c", code, EXAMPLES / "private_kernel"], check=True)


def test_the_plan_is_measured(clean):
    plan = plans.load(str(EXAMPLES / "plan.toml"), Catalog.default(), "cpu")
    assert len(plan.cells(Catalog.default(), "cpu")) == (4 * 1 + 1 * 2) * 2
    # The device's ceilings take seconds, and are not what is looked at.
    code = "import functools; from kernelmark.suite import cli; from kernelmark.suite.run import supervisor; "
    code += "supervisor.Run = functools.partial(supervisor.Run, ceilings=False); cli.main()"
    words = ["run", "--plan", EXAMPLES / "plan.toml", "--journal-only", "--operator", "gelu", "--replicates", "1"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (journal,) = (clean / "home" / "journals").glob("*.jsonl")
    assert {(x.implementation, x.cache, x.status) for x in read(journal).records} == {
        ("torch", "cold", "ok"),
        ("torch", "hot", "ok"),
    }


def test_the_interface(clean, monkeypatch, capsys):
    monkeypatch.setattr(limits, "COPY_BYTES", {"cpu": [1 << 14, 1 << 16]})
    monkeypatch.setattr(limits, "MATMUL_SIZE", {"cpu": 16})
    monkeypatch.setattr(limits, "SAMPLING", Sampling(min_samples=6, max_samples=6, min_seconds=0))
    runpy.run_path(str(EXAMPLES / "interface.py"))
    by_hand, torch, memory = capsys.readouterr().out.splitlines()
    assert by_hand.startswith("by_hand ")
    assert torch.split()[0] == "torch"
    assert " ms, " in by_hand
    assert memory == "peak memory: None"


@pytest.mark.parametrize(("verdict", "said"), [(0, "no kernel got slower"), (1, "got slower"), (3, "too noisy")])
def test_the_gate_ends_with_the_verdict(clean, monkeypatch, verdict, said):
    stand_in = clean / "bin" / "regression_detector"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$@"\nexit {verdict}\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}{os.pathsep}{PATH}")
    gate = [EXAMPLES / "gate.sh", "main", "HEAD", "--operator", "gelu"]
    done = subprocess.run(gate, capture_output=True, text=True, check=False)
    assert done.returncode == verdict
    assert "--baseline main --current HEAD --budget 30m" in done.stdout
    assert "--junit kernelmark.xml --operator gelu" in done.stdout
    assert said in done.stdout


def test_the_gate_passes_a_mistake_on(clean):
    done = subprocess.run([EXAMPLES / "gate.sh"], capture_output=True, text=True, cwd=clean, check=False)
    assert done.returncode != 0
    assert "say what to compare with" in done.stderr


def test_journals_are_read_with_and_without_pandas(capsys, monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("journals", EXAMPLES / "journals.py")
    assert spec is not None
    assert spec.loader is not None
    journals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(journals)
    ok = [x for x in read(JOURNAL).records if x.measurement is not None]
    assert [x["ms"] for x in journals.samples(JOURNAL)] == [
        ms for x in ok for ms in x.measurement.samples["latency"]
    ]
    monkeypatch.setitem(sys.modules, "pandas", None)
    journals.main([JOURNAL])
    without = capsys.readouterr().out.splitlines()
    assert len(without) == len({(x.case.operator, x.case.name, x.implementation) for x in ok})
    monkeypatch.undo()
    pytest.importorskip("pandas", reason="pandas is not installed")
    journals.main([JOURNAL])
    assert len(capsys.readouterr().out.splitlines()) == len(without) + 2
    program = tmp_path / "program.jsonl"  # which has other metrics than a latency
    program.write_bytes(b'{"kind":"record","status":"ok","case":{"operator":"train","name":"x"},"implementation":"a",'
                        b'"replicate":0,"measurement":{"samples":{"step_time":[1.0]}}}\n')  # fmt: skip
    journals.main([program])
    assert capsys.readouterr().out == "nothing in them has a latency\n"
