"""A tiny model through the whole floor: plan, worker, journal; killed half-way and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.store.journal import read

PLAN = """
replicates = 1

[sampling]
min_samples = 3
max_samples = 3
min_seconds = 0
warmup_s = 0

[[systems]]
name = "by_formula"
parts = { rms_norm = "torch", optimizer = "torch" }

[[cases]]
operator = "train"
axes = { B = 1, S = 16 }
options = { model = ["llama-tiny", "gpt2-tiny"], slice = "first1" }
dtype = "fp32"
pass = "program"
implementations = ["torch", "by_formula"]
"""


def kernelmark(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    # The device's ceilings take seconds in every process and are not what this looks at.
    code = (
        "import functools; from kernelmark.suite import cli; from kernelmark.suite.run import supervisor; "
        "supervisor.Run = functools.partial(supervisor.Run, ceilings=False); cli.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, "run", *arguments, "--no-report", "--journal-only"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def test_killed_and_resumed(tmp_path: Path) -> None:
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN)
    home = tmp_path / "home"
    first = kernelmark("--plan", str(plan), "--device", "cpu", "--output", str(home))
    until = time.monotonic() + 200
    while time.monotonic() < until and first.poll() is None:
        found = list(home.glob("journals/*.jsonl"))
        if found and found[0].read_text().count('"kind":"record"') >= 1:
            break
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (path,) = home.glob("journals/*.jsonl")
    before = read(path)
    assert before.records
    if len(before.records) < 4:  # else it was quicker than the signal
        again = kernelmark("--resume", path.stem, "--output", str(home))
        output, _ = again.communicate(timeout=250)
        assert again.returncode == 0, output
    journal = read(path)
    assert journal.records[: len(before.records)] == before.records
    assert len(journal.records) == 4
    assert journal.header.request.systems[0]["name"] == "by_formula"
    found = {(x.case.partition("-")[0] + x.options["model"], x.implementation): x for x in rows(journal)}
    assert {name for _, name in found} == {"torch", "by_formula"}
    for row in found.values():
        assert row.status == "ok", row.reason
        assert row.primary == "step"
        assert row.value("tokens_per_s") > 0
        assert row.value("gradient_error") < 1e-3
