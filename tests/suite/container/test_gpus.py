"""GPUs of an engine: what is read of them, what is admitted, and what an engine's refusal means.

No GPU is here: the texts are those of `nvidia-smi` and of the NVIDIA Container Toolkit as they print them, and
`nvidia-smi` is a script on the path where the whole command line is asked.
"""

from __future__ import annotations

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite import cli
from kernelmark.suite.container import gpus
from kernelmark.suite.container.build import Built
from kernelmark.suite.container.engine import Engine
from kernelmark.suite.container.errors import DriverTooOld, LaunchError, NoDriver, NoToolkit
from kernelmark.suite.container.launch import amd

TWO = "0, NVIDIA H200, 580.95.05, 9.0\n1, NVIDIA A100-SXM4-80GB, 580.95.05, 8.0\n"
H100 = Built("sha256:1", "h100", "nvidia", ("9.0a",), "13.0", "580.65.06")


def test_parse():
    assert gpus.parse("Warning: persistence\n" + TWO) == (
        gpus.Gpu(0, "NVIDIA H200", "580.95.05", "9.0"),
        gpus.Gpu(1, "NVIDIA A100-SXM4-80GB", "580.95.05", "8.0"),
    )


def test_chosen():
    assert gpus.chosen("0") == (0,)
    assert gpus.chosen("1, 0") == (1, 0)
    for wrong in ("all", "0,0", "", "0;1", "-1"):
        with pytest.raises(InputError, match="numbers as nvidia-smi lists them"):
            gpus.chosen(wrong)


def test_admit():
    there = gpus.parse(TWO)
    gpus.admit(H100, there, [0])
    with pytest.raises(InputError, match=r"there is no GPU 2. Known: 0 \(NVIDIA H200\), 1 \(NVIDIA A100"):
        gpus.admit(H100, there, [0, 2])
    with pytest.raises(InputError, match=r"image h100 is for compute capability 9.0a, and GPU 1 .* has 8.0"):
        gpus.admit(H100, there, [0, 1])
    old = gpus.parse(TWO.replace("580.95.05", "580.65.05"))
    with pytest.raises(
        DriverTooOld, match=r"driver is 580.65.05 and this image's CUDA 13.0 needs 580.65.06"
    ) as caught:
        gpus.admit(H100, old, [0])
    assert caught.value.exit_code == 5
    gpus.admit(H100, gpus.parse(TWO.replace("580.95.05", "1000.1")), [0])  # numbers, not letters


@pytest.mark.parametrize(
    ("architecture", "capability", "fits"),
    [
        ("9.0a", "9.0", True),
        ("9.0a", "10.0", False),
        ("8.0", "8.6", True),
        ("8.9", "8.6", False),
        ("8.0", "9.0", False),
    ],
)
def test_fits(architecture, capability, fits):
    image = Built("sha256:1", "x", "nvidia", (architecture,), "13.0", "1.0")
    there = (gpus.Gpu(0, "GPU", "580.1", capability),)
    if fits:
        gpus.admit(image, there, [0])
    else:
        with pytest.raises(InputError):
            gpus.admit(image, there, [0])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('could not select device driver "nvidia" with capabilities: [[gpu]]', NoToolkit),
        ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0", NoToolkit),
        (
            "failed to create task: OCI runtime create failed: nvidia-container-cli: initialization error: "
            "nvml error: driver not loaded: unknown",
            NoDriver,
        ),
        (
            "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: cannot open",
            NoDriver,
        ),
        ("nvidia-container-cli: device error: 7: unknown device: unknown", LaunchError),
        (
            "error running hook #0: fork/exec /usr/bin/nvidia-container-runtime-hook: no such file or directory",
            NoToolkit,
        ),
        ("error running hook #0: error running hook: signal: killed, stdout: , stderr:: unknown", NoToolkit),
        ('exec: "nvidia-container-runtime": executable file not found in $PATH', NoToolkit),
        ('exec: "/nothing": stat /nothing: no such file or directory: unknown', None),
    ],
)
def test_refusal(text, kind):
    found = gpus.refusal(text)
    assert type(found) is (kind or type(None))
    if found is not None:
        assert text in str(found)


@pytest.mark.parametrize(
    ("info", "driver", "devices"),
    [
        ({"Runtimes": {"runc": {}, "nvidia": {}}}, "nvidia", ["0", "1"]),
        ({"Runtimes": {"runc": {}}}, "nvidia", ["0", "1"]),
        (
            {"Runtimes": {"runc": {}}, "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]},
            "cdi",
            ["nvidia.com/gpu=0", "nvidia.com/gpu=1"],
        ),
    ],
)
def test_request(info, driver, devices):
    engine = Engine(type("Client", (), {"info": lambda self: info})(), "unix:///x")
    asked = gpus.request(engine, [0, 1])
    assert (asked["Driver"], asked["DeviceIDs"]) == (driver, devices)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A machine whose `nvidia-smi` prints what it is told, and whose engine hands out GPUs."""

    def says(text: str) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
        script.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KERNELMARK_STAND_IN", "")
    monkeypatch.setattr("kernelmark.suite.container.session.find", lambda: Engine(None, "unix:///x"))
    monkeypatch.setattr(gpus, "require_toolkit", lambda engine, wanted: None)
    return says


@pytest.mark.parametrize(
    ("smi", "arguments", "code", "said"),
    [
        (
            TWO.replace("580", "535"),
            (),
            5,
            "the NVIDIA driver is 535.95.05 and this image's CUDA 13.0 needs 580.65.06",
        ),
        (TWO, ("--gpus", "3"), 2, "there is no GPU 3. Known: 0 (NVIDIA H200), 1 (NVIDIA A100-SXM4-80GB)."),
        (TWO, ("--gpus", "1"), 2, "image h100 is for compute capability 9.0a, and GPU 1 (NVIDIA A100-SXM4-80GB)"),
        (TWO, ("--gpus", "first"), 2, "GPUS=first: numbers as nvidia-smi lists them"),
    ],
)
def test_the_command_says_so_before_it_builds(host, capsys, smi, arguments, code, said):
    host(smi)
    with pytest.raises(SystemExit) as ended:
        cli.run_command(cli.cli, ["bench", "h100", *arguments])
    assert ended.value.code == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_amds_gpus_are_files_and_their_groups(tmp_path):
    with pytest.raises(LaunchError, match="no AMD GPU that computes: there is no /dev/kfd"):
        amd(tmp_path)
    (tmp_path / "dri").mkdir()
    for name in ("kfd", "dri/renderD129", "dri/renderD128", "dri/card0"):
        (tmp_path / name).touch()
    found = amd(tmp_path)
    assert [x.rpartition("/")[2] for x in found["devices"]] == ["kfd:rw", "renderD128:rw", "renderD129:rw"]
    assert found["group_add"] == [str((tmp_path / "kfd").stat().st_gid)]


@pytest.mark.parametrize("stand_in", [[], ["--stand-in", "debian:12"]])
def test_an_image_that_cannot_be_built_says_what_it_lacks(capsys, stand_in):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(cli.cli, ["bench", "rocm", *stand_in])
    assert ended.value.code == 2
    assert "torch's ROCm wheels have no lock" in " ".join(capsys.readouterr().err.split())
