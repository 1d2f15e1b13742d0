"""The libraries' files: listing needs none of them, an absent one is said with its remedy, locks hold them all."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmark.suite.catalog import Catalog, _devices

ROOT = Path(__file__).resolve().parents[2]
PEERS = (
    "cut_cross_entropy",
    "cutile",
    "deepspeed",
    "fla",
    "flash_attn",
    "flash_attn_4",
    "flashinfer",
    "flex_attention",
    "helion",
    "liger",
    "mamba_ssm",
    "causal_conv1d",
    "quack",
    "tilelang",
    "torchao",
    "transformer_engine",
    "vllm",
    "xformers",
)


def baseline(name):
    return importlib.import_module(f"kernelmark.baselines.{name}")


def locked(name):
    """Versions by normalized distribution of a lock and of what is built on top of it."""
    text = "".join(
        x.read_text() for x in (ROOT / "requirements").glob(f"{name}*.txt") if x.stem in (name, f"{name}-source")
    )
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", distribution).lower(): version for distribution, version in found}


def test_listing_imports_no_library():
    code = (
        "import json, sys\n"
        "from kernelmark.suite.catalog import Catalog\n"
        "names = sorted({x.provider for x in Catalog.default().implementations})\n"
        "print(json.dumps([names, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, modules = json.loads(done.stdout)
    assert set(PEERS) <= set(names)
    loaded = {x.partition(".")[0] for x in modules}
    assert not loaded & {
        *PEERS, "torch", "triton", "liger_kernel", "cutlass", "transformer_engine_torch", "tvm_ffi"
    }  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_an_absent_library_is_said_with_its_remedy(name, monkeypatch, tmp_path):
    module = baseline(name)
    environment = getattr(module, "ENVIRONMENT", "core")
    monkeypatch.setenv("KERNELMARK_ENVIRONMENTS", str(tmp_path))
    mine = [x for x in Catalog.default().implementations if x.provider == name and not x.assembled]
    assert {(x.operator, x.name) for x in mine} == {
        (operator, kind) for operator, kinds in module.IMPLEMENTATIONS.items() for kind in kinds
    }
    for x in mine:
        assert x.environment == environment
        assert x.unavailable("cpu") == ("unsupported", "needs a cuda device, this is cpu")
        if environment != "core":
            remedy = f"environment {environment!r} is not installed: make environment NAME={environment}"
            assert x.unavailable("cuda") == ("unavailable", remedy)
        elif x.version is None:
            remedy = f"{module.REQUIRES[0]} is not installed: pip install {module.REQUIRES[0]}"
            assert x.unavailable("cuda") == ("unavailable", remedy)


@pytest.mark.parametrize(
    ("name", "said"),
    [("deep_gemm", "is not installed: build it from github.com"), ("bitsandbytes", "would not do")],
)
def test_what_pip_cannot_help_is_not_told_to_pip(name, said):
    mine = [x for x in Catalog.default().implementations if x.provider == name]
    assert mine
    for x in mine:
        if x.version is None:
            status, reason = x.unavailable("cuda")
            assert (status, said in reason, "pip install" in reason) == ("unavailable", True, False)


@pytest.mark.parametrize("name", PEERS)
def test_its_lock_holds_what_it_requires(name):
    module = baseline(name)
    environment = getattr(module, "ENVIRONMENT", "core")
    found = locked("cuda" if environment == "core" else environment)
    assert [x for x in module.REQUIRES if x not in found] == []
    assert _devices(module.DEVICES, name, ROOT) == ("cuda",)


def test_the_makefile_knows_each_environment():
    named = {getattr(baseline(x), "ENVIRONMENT", "core") for x in PEERS} - {"core"}
    (line,) = re.findall(r"^ENVIRONMENTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named <= set(line.split())


@pytest.mark.parametrize("name", sorted({getattr(baseline(x), "ENVIRONMENT", "core") for x in PEERS} - {"core"}))
def test_one_torch_and_triton_everywhere(name):
    ours, theirs = locked("cuda"), locked(name)
    assert {x: theirs[x] for x in ("torch", "triton")} == {x: ours[x] for x in ("torch", "triton")}
    assert theirs.keys() >= {"msgspec", "numpy", "nvidia-ml-py", "setuptools"}  # what a worker needs
