"""What decides comparability, what is only noted, and what never gets out."""

from __future__ import annotations

import getpass
import json
import os
import platform
import random
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.suite.measure import host
from kernelmark.suite.measure.telemetry import Nvml
from kernelmark.suite.run import fingerprint, variables

FACTS = {"threads": 2}

scalars = st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats(allow_nan=False) | st.text()


def test_a_key_stays_what_it_was():
    """Stored journals hold it: a change of how it is made would part them from all later runs."""
    assert (
        fingerprint.key({"gpu": "NVIDIA H200", "driver": "580.95.05", "ecc": True, "mig": None})
        == "c4943f221f9d54d5"
    )


@given(st.dictionaries(st.text(), scalars, max_size=6), st.randoms())
def test_a_key_does_not_hang_on_order(conditions, generator: random.Random):
    names = list(conditions)
    generator.shuffle(names)
    assert fingerprint.key({x: conditions[x] for x in names}) == fingerprint.key(conditions)
    assert len(fingerprint.key(conditions)) == 16


@given(st.dictionaries(st.text(), scalars, min_size=1, max_size=6))
def test_every_condition_counts(conditions):
    name = next(iter(conditions))
    assert fingerprint.key({**conditions, name: "something else altogether"}) != fingerprint.key(conditions)
    assert fingerprint.key({x: y for x, y in conditions.items() if x != name}) != fingerprint.key(conditions)


def test_neighbours_on_the_host_are_a_condition_and_a_run_alone_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(fingerprint.PARALLEL, raising=False)
    alone = fingerprint.conditions("cpu", FACTS)
    assert "parallel" not in alone
    monkeypatch.setenv(fingerprint.PARALLEL, "4")
    beside = fingerprint.conditions("cpu", FACTS)
    assert beside == alone | {"parallel": "4"}
    assert fingerprint.key(beside) != fingerprint.key(alone)


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("CUDA_VISIBLE_DEVICES", True),
        ("TRITON_PRINT_AUTOTUNING", True),
        ("OMP_NUM_THREADS", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("TRITON_CACHE_DIR", False),
        ("CUDA_PATH", False),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("PYTORCH_SECRET", False),
        ("CUDA_API_KEY", False),
        ("OMP_TOKEN", False),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("MLFLOW_TRACKING_URI", False),
        ("HOSTNAME", False),
        ("USER", False),
        ("PATH", False),
        ("MY_CUDA_THING", False),
        ("OMP_PASSPHRASE", False),
        ("CUDA_PW", False),
        ("PYTORCH_CONNSTRING", False),
    ],
)
def test_allowed(name, may, monkeypatch):
    assert variables.allowed(name, "seen") is may
    monkeypatch.setenv(name, "seen")
    assert (f"env/{name}" in fingerprint.environment("cpu")) is may


@pytest.mark.parametrize(
    ("value", "may"),
    [
        ("", True),
        ("0,1", True),
        ("expandable_segments:True,garbage_collection_threshold:0.6", True),
        (":4096:8", True),
        ("spread", True),
        ("{0:4},{4:4}", True),
        ("granularity=fine,compact,1,0", True),
        ("TRITON,ATEN,CUTLASS", True),
        ("512K", True),
        ("/home/somebody/x", False),
        ("https://somebody:pw@example.org", False),
        ("somebody@example.org", False),
        ("AKIAIOSFODNN7EXAMPLE", False),
        ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", False),
        ("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", False),
        ("d41d8cd98f00b204e9800998ecf8427e", False),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", False),
        ("a\nb", False),
        ("x" * 200, False),
    ],
)
def test_a_value_has_the_form_of_a_setting(value, may):
    assert variables.allowed("OMP_PLACES", value) is may


def test_nobody_and_no_place_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_CACHE_PATH", str(Path.home() / "cache"))
    monkeypatch.setenv("PYTORCH_KERNEL_CACHE_PATH", os.getcwd())
    noted = [
        fingerprint.conditions("cpu", FACTS),
        fingerprint.environment("cpu"),
        fingerprint.conditions("cuda", {"gpu": "NVIDIA H200"}),
        fingerprint.environment("cuda"),
    ]
    text = json.dumps(noted)
    private = {socket.gethostname(), getpass.getuser(), str(Path.home()), os.getcwd(), str(Path(__file__).parent)}
    # A user named root may well stand in some version string; as a word of its own it must not.
    words = set(text.replace('"', " ").replace("/", " ").split())
    assert not {x for x in private if "/" in x and x != "/" and x in text}
    assert not private & words


def test_a_worker_of_another_python_says_what_it_has():
    ours, theirs = (
        fingerprint.environment("cpu"),
        fingerprint.environment("cpu", {"python": "3.99", "lib/torch": "9"}),
    )
    assert ours["python"] == platform.python_version()
    assert ours["lib/numpy"]
    assert (theirs["python"], theirs["lib/torch"]) == ("3.99", "9")
    assert "lib/numpy" not in theirs  # it may not have it
    assert theirs["cpu_count"] == ours["cpu_count"]


def test_conditions_of_a_cpu(monkeypatch):
    found = fingerprint.conditions("cpu", FACTS)
    assert found["device"] == "cpu"
    assert found["threads"] == 2
    assert found["triton"] is None
    assert found["image_digest"] is None
    assert found["cpu_count"] == os.cpu_count()
    assert found["torch"]
    assert found == fingerprint.conditions("cpu", FACTS)
    monkeypatch.setenv(fingerprint.IMAGE_DIGEST, "sha256:1234")
    assert fingerprint.conditions("cpu", FACTS)["image_digest"] == "sha256:1234"
    monkeypatch.setattr(fingerprint.variables, "conditions", lambda environment: {})
    facts = fingerprint.torch_facts("cpu")
    assert facts.keys() == {"torch", "threads", "python", "image_digest", *host.facts()}
    assert facts["python"] == platform.python_version()
    monkeypatch.delenv(fingerprint.IMAGE_DIGEST)  # a worker may be in an image whose supervisor is in none
    assert fingerprint.conditions("cpu", facts)["image_digest"] == "sha256:1234"
    assert fingerprint.torch_facts("cpu").keys() == {"torch", "threads", "python", *host.facts()}


@pytest.mark.parametrize(
    ("name", "value", "condition"),
    [
        ("TRITON_DEFAULT_FP_FUSION", "0", "0"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "1", "1"),
        ("TORCHINDUCTOR_USE_FAST_MATH", "1", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments:True"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":4096:8"),
        ("CUDA_LAUNCH_BLOCKING", "1", "1"),
        ("NCCL_ALGO", "Ring", "Ring"),
        ("OMP_NUM_THREADS", "4", "4"),
        # It changes code, and its value may not be told.
        ("TRITON_PTXAS_PATH", "/home/somebody/ptxas", variables.UNTOLD),
        ("NCCL_SOCKET_IFNAME", "somebody@example.org", variables.UNTOLD),
        # It changes no code, or is nobody's setting.
        ("TRITON_CACHE_DIR", "/tmp/x", None),
        ("TORCHINDUCTOR_CACHE_DIR", "/tmp/x", None),
        ("CUDA_VISIBLE_DEVICES", "3", None),
        ("TRITON_PRINT_AUTOTUNING", "1", None),
        ("OMP_PASSPHRASE", "x", None),
        ("CUDA_PW", "1", None),
        ("PYTORCH_CONNSTRING", "x", None),
        ("HOME", "x", None),
    ],
)
def test_variables_that_change_code_are_conditions(name, value, condition):
    assert variables.conditions({name: value}) == ({} if condition is None else {f"env/{name}": condition})


def test_a_variable_changes_the_key(monkeypatch):
    for name in (x for x in os.environ if f"env/{x}" in variables.conditions(os.environ)):
        monkeypatch.delenv(name)
    before = fingerprint.conditions("cpu", fingerprint.torch_facts("cpu"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert fingerprint.conditions("cpu", fingerprint.torch_facts("cpu")) == before
    monkeypatch.setenv("TRITON_DISABLE_PTXAS_OPT", "1")
    after = fingerprint.conditions("cpu", fingerprint.torch_facts("cpu"))
    assert after == {**before, "env/TRITON_DISABLE_PTXAS_OPT": "1"}
    assert fingerprint.key(after) != fingerprint.key(before)


@pytest.fixture
def gpu(nvml, monkeypatch):
    """A GPU that answers; the answers can be changed."""
    here = nvml()
    answers = {
        "VbiosVersion": "96.00.AF.00.01",
        "EnforcedPowerLimit": 700_000,
        "EccMode": [1, 1],
        "MigMode": [0, 0],
        "MemoryInfo": SimpleNamespace(total=150_000_000_000, used=600_000_000, free=149_400_000_000),
        "MaxClockInfo": 1980,
        "PersistenceMode": 1,
        "CurrPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16,
        "ComputeRunningProcesses": [],
        "GspFirmwareVersion": b"580.95.05",
    }
    for name in answers:
        setattr(here.library, f"nvmlDeviceGet{name}", lambda handle, *rest, name=name: answers[name])
    monkeypatch.setattr(Nvml, "open", classmethod(lambda cls, uuid=None: here))
    return answers


def test_conditions_of_a_gpu(gpu, monkeypatch):
    found = fingerprint.conditions("cuda", {"gpu": "NVIDIA H200"})
    assert {x: found[x] for x in ("gpu", "driver", "vbios", "power_limit_w", "ecc", "mig", "clock_policy")} == {
        "gpu": "NVIDIA H200",
        "driver": "580.95.05",
        "vbios": "96.00.AF.00.01",
        "power_limit_w": 700,
        "ecc": True,
        "mig": False,
        "clock_policy": "unlocked",
    }
    before = fingerprint.key(found)
    for name, value in (("EnforcedPowerLimit", 500_000), ("EccMode", [0, 0]), ("VbiosVersion", "97")):
        monkeypatch.setitem(gpu, name, value)
        assert fingerprint.key(fingerprint.conditions("cuda", {"gpu": "NVIDIA H200"})) != before
    # Only a worker that saw the clocks under load can say that they are locked.
    monkeypatch.setenv("KERNELMARK_CLOCKS", "1980")
    assert fingerprint.conditions("cuda", {})["clock_policy"] == "unlocked"
    seen = fingerprint.conditions("cuda", {"clock_policy": "locked at 1980 MHz"})
    assert seen["clock_policy"] == "locked at 1980 MHz"
    assert fingerprint.has_gpu()


def test_the_gpu_that_is_measured_on_is_the_one_that_counts(gpu, nvml, monkeypatch):
    first = Nvml.open()
    third = nvml()
    third.library.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 350_000
    third.library.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=80, used=1)
    by_uuid = {None: first, "aaaa-3": third}
    monkeypatch.setattr(Nvml, "open", classmethod(lambda cls, uuid=None: by_uuid.get(uuid)))
    facts = {"gpu": "NVIDIA H200", fingerprint.UUIDS: "aaaa-3,aaaa-4"}
    found, noted = fingerprint.conditions("cuda", facts), fingerprint.environment("cuda", None, facts)
    assert found["power_limit_w"] == 350
    assert noted["gpu/memory_bytes"] == 80
    assert "aaaa" not in json.dumps([found, noted])
    # Equal boards are comparable; that they are two is only noted.
    by_uuid["aaaa-5"] = third
    other = {**facts, fingerprint.UUIDS: "aaaa-5,aaaa-4"}
    assert fingerprint.conditions("cuda", other) == found
    assert fingerprint.environment("cuda", None, other)[fingerprint.BOARDS] != noted[fingerprint.BOARDS]
    # A part of a GPU has a UUID that NVML knows under another name.
    assert fingerprint.conditions("cuda", {**facts, fingerprint.UUIDS: "bbbb"})["power_limit_w"] == 700


class Cublas:
    """What `cublasGetProperty` answers: 13.1.5."""

    def cublasGetProperty(self, which, out):
        out._obj.value = (13, 1, 5)[which]
        return 0


def test_libraries_that_do_not_answer_are_unknown(monkeypatch):
    import torch

    def fails():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", fails)
    assert fingerprint._cudnn() is None
    assert fingerprint._cublas("99.9") is None
    assert fingerprint._cublas(None) is None


def test_a_worker_names_its_gpus(monkeypatch):
    import torch

    def properties(index):
        return SimpleNamespace(uuid=f"aaaa-{index}", name="H", major=9, minor=0, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(fingerprint.clocks, "checked", lambda: "unlocked")
    monkeypatch.setattr(fingerprint, "ranks_facts", lambda device, world: {})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    monkeypatch.setattr(fingerprint.ctypes, "CDLL", lambda name: {"libcublas.so.13": Cublas()}[name])
    versions = {"cupti-python": "13.0.1", "torch": "2.13", "triton": "3.7"}
    monkeypatch.setattr(fingerprint, "_version", versions.get)
    facts = fingerprint.torch_facts("cuda")
    assert facts[fingerprint.UUIDS] == "aaaa-0"
    told = {x: facts[x] for x in ("cuda", "cudnn", "cublas", "cupti", "python", "cpu")}
    assert told == {
        "cuda": "13.0",
        "cudnn": "9.15.1",
        "cublas": "13.1.5",
        "cupti": "13.0.1",
        "python": platform.python_version(),
        "cpu": fingerprint.cpu_model(),
    }
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    assert fingerprint.torch_facts("cuda")["cudnn"] == "8.9.7"
    assert fingerprint.torch_facts("cuda", 2)[fingerprint.UUIDS] == "aaaa-0,aaaa-1"
    assert fingerprint.torch_facts("cuda", 4)[fingerprint.UUIDS] == "aaaa-0,aaaa-1,aaaa-2"


def test_noted_of_a_gpu(gpu):
    found = fingerprint.environment("cuda")
    assert found["gpu/memory_bytes"] == 150_000_000_000
    assert found["gpu/gsp_firmware"] == "580.95.05"
    assert found["gpu/persistence"] is True
    assert found["gpu/processes"] == 0
    assert "cpu_governor" not in found
    json.dumps(found)


def test_a_gpu_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(Nvml, "open", classmethod(lambda cls, uuid=None: None))
    assert "driver" not in fingerprint.conditions("cuda", {})
    assert not [x for x in fingerprint.environment("cuda") if x.startswith("gpu/")]
    assert not fingerprint.has_gpu()


def test_a_board_that_lacks_fields(nvml, monkeypatch):
    monkeypatch.setattr(Nvml, "open", classmethod(lambda cls, uuid=None: nvml(temperature=None)))
    found = fingerprint.conditions("cuda", {})
    assert (found["ecc"], found["mig"], found["power_limit_w"], found["vbios"]) == (None, None, None, None)
    assert fingerprint.environment("cuda")["gpu/memory_bytes"] is None


def test_a_host_that_says_little(monkeypatch):
    def fails(self: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", fails)
    monkeypatch.setattr(fingerprint.platform, "processor", lambda: "")
    assert fingerprint.cpu_governor() is None
    assert fingerprint.cpu_model() is None


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git repository with one commit."""
    for name in [x for x in os.environ if x.startswith("GIT_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "checkout"
    (folder / "suite").mkdir(parents=True)
    (folder / "suite" / "file").write_text("one")
    for arguments in (
        ("init", "--quiet"),
        ("add", "."),
        ("-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "--no-gpg-sign", "-m", "one"),
    ):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)
    return folder


def test_commit(checkout, tmp_path, monkeypatch):
    head, dirty = fingerprint.commit(checkout / "suite")
    assert len(head) == 40
    assert not dirty
    (checkout / "suite" / "new").write_text("untracked files are no change of what is measured")
    assert fingerprint.commit(checkout / "suite") == (head, False)
    (checkout / "suite" / "file").write_text("two")
    assert fingerprint.commit(checkout / "suite") == (head, True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    outside = tmp_path / "outside"
    outside.mkdir()
    assert fingerprint.commit(outside) == (None, False)
    monkeypatch.setenv("KERNELMARK_COMMIT", "abc")  # an image holds no checkout
    assert fingerprint.commit(outside) == ("abc", False)
    monkeypatch.setenv("PATH", "")
    assert fingerprint.commit(checkout) == ("abc", False)
