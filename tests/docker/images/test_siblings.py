"""One run over two images with different baselines, with a real engine: rows by both in one journal."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kernelmark.registry.store.journal import read

from .conftest import CACHE, HOUSE

pytestmark = pytest.mark.siblings

PLAN = """
replicates = 2
[sampling]
max_seconds = 0.05
min_seconds = 0.01
max_samples = 20
min_samples = 3
warmup_s = 0.05
[[cases]]
operator = "softmax"
axes = { M = 64, D = 128 }
dtype = "fp32"
implementations = ["torch", "openvino", "onnxruntime", "kernelmark"]
"""


@pytest.fixture
def more_wheels(wheels):
    """What the sibling holds beside the image, in the same index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(CACHE / "wheels")]
    command += [f"--platform={x}_x86_64" for x in ("manylinux_2_28", "manylinux_2_27", "manylinux2014")]
    command += ["-r", "requirements/image-onnx.txt"]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_run_over_two_images_is_one_journal(machine, image, more_wheels, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    mine = machine.with_home(tmp_path / "home")
    done = mine.kernelmark("bench", "cpu", "--with", "onnx", "--plan", str(plan), "--no-report")
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "home" / "journals").glob("*.jsonl")
    journal = read(path)
    told = {(x.implementation, x.status) for x in journal.records}
    assert told >= {(x, "ok") for x in ("torch", "openvino", "onnxruntime")}
    assert ("kernelmark", "unsupported") in told
    noted = {x: y for x, y in journal.header.environment.items() if x.startswith("image/")}
    assert noted["image/core"] == image.id
    assert set(noted) == {"image/core", "image/onnx"}
    assert journal.header.conditions["image_digest"] not in noted.values()
    versions = {x.implementation: x.version for x in journal.records}
    held = mine.kernelmark("image", "sbom", str(noted["image/onnx"]))
    assert held.returncode == 0, held.stderr[-2000:]
    bill = {x["name"]: x for x in json.loads(held.stdout)["components"]}
    for name in ("openvino", "onnxruntime"):
        assert versions[name] == bill[name]["version"]
        assert bill[name]["licenses"]
    running = [x.name for x in machine.client.containers.list(all=True) if x.name.startswith("kernelmark-")]
    assert running == []
