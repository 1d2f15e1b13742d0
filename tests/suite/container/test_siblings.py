"""One run over images of a set: which they are, what stands in for their environments, and what they are said to
hold."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.record import Header, Request
from kernelmark.suite import environments
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.container import build, contents, siblings, table
from kernelmark.suite.container.build import LABEL, Built
from kernelmark.suite.container.session import Session
from kernelmark.suite.run import fingerprint, repro

HOUSE = Path(__file__).resolve().parents[3]
ENGINE: Any = SimpleNamespace()


def session(name: str, digest: str, **labels: str) -> Session:
    return Session(ENGINE, Built(f"sha256:{digest * 64}", name, labels=labels), (), Home(Path("/nowhere")))


def test_a_set_is_an_image_and_its_siblings():
    assert siblings.names(HOUSE, "cpu", ["onnx"]) == {"core": "cpu", "onnx": "cpu-onnx"}
    assert set(siblings.names(HOUSE, "h100", ["all"])) >= {"core", "vllm", "mamba", "flash_attn", "xformers"}
    with pytest.raises(InputError, match="unknown sibling of image cpu 'onx'. Did you mean 'onnx'"):
        siblings.names(HOUSE, "cpu", ["onx"])
    with pytest.raises(InputError, match="image t4 has no siblings"):
        siblings.names(HOUSE, "t4", ["vllm"])


def test_the_digest_of_a_set_is_of_all_its_images():
    one, other = session("cpu", "a"), session("cpu-onnx", "b")
    whole = siblings.digest({"core": one, "onnx": other})
    assert whole.startswith("sha256:")
    assert whole == siblings.digest({"onnx": other, "core": one})
    assert len({whole, siblings.digest({"core": one}), siblings.digest({"core": other, "onnx": one})}) == 3


def test_an_images_environment_takes_the_place_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path):
    python = tmp_path / "relay"
    python.write_text("")
    held = [{"name": "torch", "version": "9.9"}, {"name": "Open_Vino", "version": "1\nName: click"}]
    siblings.lay(tmp_path / ".venv-core", python, held)
    siblings.lay(tmp_path / ".venv-onnx", python, [{"name": "openvino", "version": "7"}])
    ours = environments.interpreter("core"), environments.version("core", "click")
    monkeypatch.setenv(siblings.ENVIRONMENTS, str(tmp_path))
    assert environments.version("core", "torch") == "9.9"
    assert environments.version("core", "click") is None  # neither ours nor by a version that says more
    assert environments.version("onnx", "openvino") == "7"
    assert environments.interpreter("core") == tmp_path / ".venv-core" / "bin" / "python" != ours[0]
    assert environments.interpreter("vllm") is None
    monkeypatch.delenv(siblings.ENVIRONMENTS)
    assert (environments.interpreter("core"), environments.version("core", "click")) == ours


def test_containers_of_a_set_see_kernels_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path):
    seen = []

    @contextlib.contextmanager
    def opened(session, folders, marks):
        seen.append(folders)
        yield tmp_path / "python"

    monkeypatch.setattr(siblings, "opened", opened)
    monkeypatch.setattr(siblings, "contents", lambda session: {"python": []})
    with siblings.held("cpu", {"core": replace(session("cpu", "a"), roots=(tmp_path,))}):
        assert seen == [(tmp_path,)]


def test_what_a_run_over_a_set_notes_and_how_it_is_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv(fingerprint.IMAGE_NAME, "cpu")
    monkeypatch.setenv(fingerprint.IMAGES, "core=sha256:aa onnx=sha256:bb")
    noted = fingerprint.python_facts()
    assert {x: y for x, y in noted.items() if x.startswith("image")} == {
        "image": "cpu",
        "image/core": "sha256:aa",
        "image/onnx": "sha256:bb",
    }
    catalog = Catalog.default()
    case = catalog.operator("gelu").case({"M": 1, "N": 8}, "fp32", "forward")
    header = Header(
        2, "r", "now", "0", None, False, "x", 1, 1, "cpu", "k", {"image_digest": f"sha256:{'c' * 64}"}, noted
    )
    header = msgspec.structs.replace(header, request=Request(cases=(case,), caches=("cold",), deadline_s=1.0))
    line = repro.repeat(header, Home(tmp_path), catalog).line
    assert line.startswith("kernelmark bench cpu --with onnx --plan ")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            {"stand_in": "debian"},
            "image cpu stands on a stand-in, debian: for trying the launcher, not for results",
        ),
        ({}, "image cpu: the digest of its base has not been seen in its registry; `make pin` looks"),
        ({"verified_at": "2026-11-22"}, ""),
    ],
)
def test_what_a_digest_is_worth_is_said_at_every_use(labels, said):
    built = session("cpu", "a", **{f"{LABEL}{x}": y for x, y in labels.items()}).image
    assert build.remark(built) == said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('sibling = "cpu"', 'sibling = "cpus"', r"\[cpu-onnx\]: there is no image 'cpus' to be a sibling of"),
        (
            'environment = "onnx"\naccelerator = "none"',
            'environment = "onnx"\naccelerator = "amd"',
            "not as cpu: accel",
        ),
    ],
)
def test_a_sibling_that_is_none(tmp_path, old, new, said):
    (tmp_path / "docker").mkdir()
    text = (HOUSE / "docker" / "images.toml").read_text()
    (tmp_path / "docker" / "images.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=said):
        table.load(tmp_path)


def test_what_is_compiled_is_made_of_two_more_locks():
    image = table.named(HOUSE, "h100-mamba")
    wanted = {"requirements/mamba.txt", "requirements/mamba-source.txt", "requirements/nvcc.txt"}
    assert set(image.every_lock) == wanted
    assert wanted | {"docker/nvcc"} <= {str(x.relative_to(HOUSE)) for x in build.files(HOUSE, image)}
    assert msgspec.structs.replace(image, compiler="").problems(HOUSE) == [
        "h100-mamba: sources need a compiler, and only they do"
    ]


def test_an_image_for_gpus_is_looked_into_without_one():
    """Neither its runtime nor its limits, which a machine without GPUs need not grant."""
    asked: dict[str, Any] = {}

    def run(image: str, command: list[str], **settings: Any) -> str:
        asked.update(settings)
        return '{"python": [], "system": [], "distribution": "ubuntu"}'

    engine: Any = SimpleNamespace(client=SimpleNamespace(containers=SimpleNamespace(run=run)))
    held = Built("sha256:a", "h100", "nvidia")
    assert contents.contents(Session(engine, held, (), Home(Path("/nowhere"))))["distribution"] == "ubuntu"
    assert asked["device_requests"] is None
    assert [x["Name"] for x in asked["ulimits"]] == ["core"]
    assert asked["environment"]["KERNELMARK_IMAGE"] == "h100"


def test_a_bill_of_materials_names_packages_and_licences():
    held = {
        "distribution": "debian",
        "python": [{"name": "Click_Plus", "version": "8.1+cpu", "license": "BSD-3-Clause"}],
        "system": [{"name": "g++", "version": "4:12", "architecture": "amd64", "license": ""}],
    }
    found = contents.bill(session("cpu", "a", title="kernelmark cpu", empty=""), held)
    assert json.loads(json.dumps(found))["bomFormat"] == "CycloneDX"
    assert found["metadata"]["component"]["properties"] == [
        {"name": "io.kernelmark.size", "value": "0"},
        {"name": "title", "value": "kernelmark cpu"},
    ]
    python, system = found["components"]
    assert python == {
        "type": "library",
        "name": "Click_Plus",
        "version": "8.1+cpu",
        "purl": "pkg:pypi/click-plus@8.1%2Bcpu",
        "licenses": [{"license": {"name": "BSD-3-Clause"}}],
    }
    assert (system["purl"], "licenses" in system) == ("pkg:deb/debian/g%2B%2B@4:12?arch=amd64", False)


def test_what_is_asked_of_an_image_runs_here():
    """The program is Python's standard library alone: this environment answers it too."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", contents.ASK], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert {"click", "msgspec"} <= {x["name"].lower() for x in found["python"]}
    assert all(x["license"] for x in found["python"] if x["name"].lower() in ("click", "numpy"))
