"""What a machine's CDI specifications say, as NVIDIA's toolkit writes them, and what of it does not hold."""

from __future__ import annotations

import json

import pytest
from docker.errors import APIError
from kernelmark.suite.container import cdi, gpus
from kernelmark.suite.container.engine import Engine
from kernelmark.suite.container.errors import NoToolkit

SPECIFICATION = """
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: {root}/nvidia0
      major: 195
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      hostPath: {root}/nvidia0
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  deviceNodes:
  - path: {root}/nvidiactl
  hooks:
  - hookName: createContainer
    path: {root}/nvidia-cdi-hook
    args: [nvidia-cdi-hook, update-ldcache]
  mounts:
  - hostPath: {root}/libcuda.so.580.95.05
    containerPath: /usr/lib/libcuda.so.580.95.05
    options: [ro, bind]
"""


@pytest.fixture
def machine(tmp_path):
    """A folder of specifications, and beside it all that its one names."""
    for name in ("nvidia0", "nvidiactl", "libcuda.so.580.95.05"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia-cdi-hook").touch(mode=0o755)
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "nvidia.yaml").write_text(SPECIFICATION.format(root=tmp_path))
    return tmp_path


def said(machine, *wanted: int) -> list[str]:
    return cdi.problems(wanted or (0,), [machine / "cdi", machine / "run"])


def test_what_holds_is_no_problem(machine):
    assert said(machine) == []
    whole = cdi.read(machine / "cdi" / "nvidia.yaml")
    assert [x.name for x in whole.devices] == ["0", "all"]
    assert [x.path for x in whole.container_edits.hooks] == [f"{machine}/nvidia-cdi-hook"]


def test_a_machine_without_specifications_has_nothing_to_say(tmp_path):
    assert cdi.problems([0], [tmp_path, tmp_path / "none"]) == []


@pytest.mark.parametrize(
    ("gone", "kind"),
    [
        ("nvidia0", "the device"),
        ("nvidiactl", "the device"),
        ("libcuda.so.580.95.05", "the driver's file"),  # the driver was updated
        ("nvidia-cdi-hook", "the hook"),
    ],
)
def test_what_is_named_and_not_there(machine, gone, kind):
    (machine / gone).unlink()
    (problem,) = said(machine)
    assert problem.startswith(f"{machine}/cdi/nvidia.yaml names {kind} {machine}/{gone}, which is not there; ")
    assert "nvidia-ctk cdi generate" in problem


def test_a_hook_that_cannot_be_run(machine):
    (machine / "nvidia-cdi-hook").chmod(0o644)
    (problem,) = said(machine)
    assert f"the hook {machine}/nvidia-cdi-hook, which is no program that may be run" in problem


def test_a_gpu_that_no_file_has(machine):
    assert said(machine, 0, 3) == ["no CDI specification has nvidia.com/gpu=3; there are 0, all"]


@pytest.mark.parametrize(
    "text", ["kind: [", "kind: nvidia.com/gpu", "- 1", "", "kind: nvidia.com/gpu\ndevices: 3"]
)
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_that_is_none(machine, text, suffix):
    (machine / "cdi" / f"broken.{suffix}").write_text(text)
    (problem,) = said(machine)
    assert problem.startswith(f"{machine}/cdi/broken.{suffix} is no CDI specification that can be read: ")


def test_json_and_other_kinds(machine):
    (machine / "run").mkdir()
    network = {"cdiVersion": "0.6.0", "kind": "vendor.com/net", "devices": [{"name": "1"}]}
    (machine / "run" / "net.json").write_text(json.dumps(network))
    (machine / "run" / "notes.txt").write_text("not a specification")
    assert said(machine) == []
    second = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": "1", "containerEdits": {}}]}
    (machine / "run" / "nvidia.json").write_text(json.dumps(second))
    assert said(machine, 0, 1) == []


def test_what_a_later_folder_has_of_a_device_counts(machine):
    """As engines read them: a stale file of the first folder is none of their business."""
    (machine / "run").mkdir()
    kept = machine / "cdi" / "nvidia.yaml"
    (machine / "run" / "nvidia.yaml").write_text(kept.read_text())
    kept.write_text(kept.read_text().replace("libcuda.so.580.95.05", "libcuda.so.535.54.03"))
    assert said(machine) == []
    (machine / "run" / "nvidia.yaml").unlink()
    assert "libcuda.so.535.54.03, which is not there" in said(machine)[0]


class Refusing:
    """An engine's client, which offers a GPU through CDI and answers its container with an error."""

    def __init__(self, explanation: str) -> None:
        self.images = self.containers = self
        self.explanation = explanation

    def info(self) -> dict[str, object]:
        return {"Runtimes": {"runc": {}}, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}

    def list(self, name: str) -> list[str]:
        return [name]

    def create(self, *arguments: object, **options: object) -> None:
        raise APIError("refused", explanation=self.explanation)

    def get(self, name: str) -> Refusing:
        return self

    def remove(self, force: bool) -> None: ...


@pytest.mark.parametrize(("address", "told"), [("unix:///x", True), ("tcp://elsewhere:2376", False)])
def test_an_engine_that_refuses_is_explained_by_the_specification(machine, monkeypatch, address, told):
    """Only of an engine on this machine: another's files are not here."""
    (machine / "libcuda.so.580.95.05").unlink()
    monkeypatch.setattr(cdi, "FOLDERS", (machine / "cdi",))

    client = Refusing("CDI device injection failed: failed to stat CDI host device")
    with pytest.raises(NoToolkit, match="CDI device injection failed") as caught:
        gpus.require_toolkit(Engine(client, address), [0])
    assert ("libcuda.so.580.95.05, which is not there" in str(caught.value)) == told


def test_a_gpu_that_was_given_is_not_refused_for_a_file(machine, monkeypatch):
    """The container got as far as its program, which is missing on purpose; what a file says does not matter."""
    (machine / "libcuda.so.580.95.05").unlink()
    monkeypatch.setattr(cdi, "FOLDERS", (machine / "cdi",))
    client = Refusing('exec: "/nothing": stat /nothing: no such file or directory: unknown')
    gpus.require_toolkit(Engine(client, "unix:///x"), [0])
