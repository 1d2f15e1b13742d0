"""The fingerprint of a run's surroundings: what decides comparability, and what is only noted.

Nothing here names a host, a user, a path or an address; environment variables by allow-list only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ...registry.errors import InputError
from ...registry.store.record import BOARDS, DEVICES, HOST, DeviceKind, Scalar
from .. import __version__
from ..catalog import TRITON
from ..measure import clocks, host
from ..measure.telemetry import Nvml
from ..measure.topology import ranks_facts
from . import variables

IMAGE_DIGEST = "KERNELMARK_IMAGE_DIGEST"
"""Set by the launcher of a container: the digest of the image it runs."""
IMAGE_NAME = "KERNELMARK_IMAGE"
"""Set by it too: the image's name in the table of images."""
IMAGES = "KERNELMARK_IMAGES"
"""Set by it where several images measure one run: `environment=digest` of each. The digest above is of all."""
PARALLEL = "KERNELMARK_PARALLEL"
"""Set for shards that share a host: how many run side by side, or `shared` where nobody knows."""
HOST_HASH = "KERNELMARK_HOST"
"""Set on a fleet's hosts: a hash that tells them apart."""
ENGINE = "KERNELMARK_ENGINE"
"""Set on a fleet's hosts: what brought the shard there."""
COMMIT = "KERNELMARK_COMMIT"
"""Set in an image: the commit it was built from, `-dirty` behind it where there were uncommitted changes."""
_FLEET: Mapping[str, str] = {HOST: HOST_HASH, "engine": ENGINE}
"""By name in the environment that a journal notes, the variable that a fleet's task sets."""
UUIDS = "gpu_uuids"
"""Among a worker's facts: the UUIDs of the GPUs that it measures on. No condition, or equal boards could not be
compared, and in no journal."""
KFD = Path("/dev/kfd")
"""AMD's compute driver."""
DRM = Path("/sys/class/drm")
INTEL = "0x8086"
"""Intel's number as a vendor on PCI."""
LIBRARIES = ("torch", "triton", "transformers", "nvidia-cudnn-cu13", "nvidia-cublas", "numpy")


def key(conditions: Mapping[str, Scalar]) -> str:
    """The comparability key: a hash of canonical JSON."""
    text = json.dumps(conditions, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def conditions(device: str, torch_facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """What two runs must share to be compared. `torch_facts` is what a worker said of torch and the device.

    It has the last word: a worker may run in another environment than ours.
    """
    shared: dict[str, Scalar] = {
        "device": device,
        "harness": __version__,
        "image_digest": os.environ.get(IMAGE_DIGEST),
        "torch": _version("torch"),
        "triton": _version("triton") if device in TRITON else None,
        **({"clock_policy": clocks.UNLOCKED} if device != "cpu" else {}),  # unless a worker saw otherwise
        # Neighbours share power and memory bandwidth; a run alone keeps the key that it always had.
        **({"parallel": beside} if (beside := os.environ.get(PARALLEL)) else {}),
        **{name: value for name, value in torch_facts.items() if name != UUIDS},
    }
    return shared | {"cuda": lambda: _gpu(torch_facts), "cpu": _cpu}.get(device, dict)()


def environment(
    device: str, own: Mapping[str, Scalar] | None = None, torch_facts: Mapping[str, Scalar] | None = None
) -> dict[str, Scalar]:
    """What is noted beside the key. `own` is what a worker said of its Python, where that is another than ours;
    `torch_facts` as for `conditions`.
    """
    noted: dict[str, Scalar] = {
        **(python_facts() if own is None else own),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    noted |= {name: value for name, variable in _FLEET.items() if (value := os.environ.get(variable))}
    noted |= {f"env/{name}": value for name, value in sorted(os.environ.items()) if variables.allowed(name, value)}
    if device == "cpu":
        return {**noted, "cpu_governor": cpu_governor()}
    if device != "cuda":
        return noted
    return noted | _gpu_noted(torch_facts or {}) | boards(torch_facts or {})


def boards(torch_facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """What tells the GPUs of a worker from others of their kind, without naming them; nothing of a CPU."""
    uuids = torch_facts.get(UUIDS)
    return {BOARDS: hashlib.sha256(str(uuids).encode()).hexdigest()[:12]} if uuids else {}


def python_facts() -> dict[str, Scalar]:
    """Of the Python that this runs in: its version, the image it is in, and the libraries that it has."""
    image = {"image": name} if (name := os.environ.get(IMAGE_NAME)) else {}
    for one in os.environ.get(IMAGES, "").split():
        environment, _, digest = one.partition("=")
        image[f"image/{environment}"] = digest
    libraries = {f"lib/{name}": version for name in LIBRARIES if (version := _version(name))}
    return {"python": platform.python_version(), **image, **libraries}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str | None:
    """The processor's name, as Linux gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def cpu_governor() -> str | None:
    """The frequency governor of the first core; None where the kernel does not say (virtual machines)."""
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return None


def _cpu() -> dict[str, Scalar]:
    return {"cpu": cpu_model(), "cpu_count": os.cpu_count(), "clock_policy": cpu_governor() or "unknown"}


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _board(torch_facts: Mapping[str, Scalar]) -> Nvml | None:
    """The GPU that a worker measures on, the first of several; NVML's first where none is named or known by that
    name, as a part of a GPU (MIG) is not.
    """
    uuids = torch_facts.get(UUIDS)
    named = Nvml.open(str(uuids).split(",")[0]) if uuids else None
    return named or Nvml.open()


def _gpu(torch_facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The conditions that NVML knows; None where it does not answer."""
    nvml = _board(torch_facts)
    if nvml is None:
        return {}
    ecc, mig, limit = nvml.get("EccMode"), nvml.get("MigMode"), nvml.get("EnforcedPowerLimit")
    return {
        "driver": _text(nvml.system("DriverVersion")),
        "vbios": _text(nvml.get("VbiosVersion")),
        "power_limit_w": limit / 1e3 if limit is not None else None,
        "ecc": bool(ecc[0]) if ecc else None,
        "mig": bool(mig[0]) if mig else None,
    }


def _gpu_noted(torch_facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    nvml = _board(torch_facts)
    if nvml is None:
        return {}
    memory = nvml.get("MemoryInfo")
    return {
        "gpu/max_sm_mhz": nvml.get("MaxClockInfo", nvml.library.NVML_CLOCK_SM),
        "gpu/max_memory_mhz": nvml.get("MaxClockInfo", nvml.library.NVML_CLOCK_MEM),
        "gpu/memory_bus_bits": nvml.get("MemoryBusWidth"),
        "gpu/memory_bytes": memory.total if memory else None,
        "gpu/memory_used_at_start_bytes": memory.used if memory else None,
        "gpu/persistence": bool(nvml.get("PersistenceMode")),
        "gpu/pcie_generation": nvml.get("CurrPcieLinkGeneration"),
        "gpu/pcie_width": nvml.get("CurrPcieLinkWidth"),
        "gpu/temperature_c": nvml.get("Temperature", nvml.library.NVML_TEMPERATURE_GPU),
        "gpu/processes": len(nvml.get("ComputeRunningProcesses") or ()),
        "gpu/gsp_firmware": _text(nvml.get("GspFirmwareVersion")),
    }


def torch_facts(device: str, world: int = 1) -> dict[str, Scalar]:
    """What only torch knows, and where it runs; called in a worker, where torch is loaded anyway.

    `world` is how many GPUs the run's largest case takes; above 1, what is between them counts.
    """
    between = ranks_facts(device, world) if world > 1 else {}
    return _own_facts(device, world) | between | variables.conditions(os.environ)


def _own_facts(device: str, world: int) -> dict[str, Scalar]:
    import torch

    own: dict[str, Scalar] = {"python": platform.python_version()}
    if image := os.environ.get(IMAGE_DIGEST):  # a worker may be in an image though its supervisor is not
        own["image_digest"] = image
    if device == "cpu":
        return {**own, "torch": _version("torch"), "threads": torch.get_num_threads(), **host.facts()}
    if device in ("xpu", "mps"):
        return {**own, "torch": _version("torch"), **_accelerator_facts(device)}
    first = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(first)
    boards = range(first, min(first + world, torch.cuda.device_count()))
    return {
        **own,
        UUIDS: ",".join(str(torch.cuda.get_device_properties(x).uuid) for x in boards),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_sm_count": properties.multi_processor_count,
        **(_rocm_facts(properties) if device == "rocm" else _cuda_facts()),
    }


def _cuda_facts() -> dict[str, Scalar]:
    import torch

    return {
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        "cublas": _cublas(torch.version.cuda),
        "cupti": _version("cupti-python"),
        "cpu": cpu_model(),  # what launches: the host's share of a short kernel's time
        "clock_policy": clocks.checked(),
    }


def _rocm_facts(properties: Any) -> dict[str, Scalar]:
    """What an AMD GPU has in place of a compute capability, which means other things there, and of CUDA."""
    import torch

    try:
        driver = Path("/sys/module/amdgpu/version").read_text().strip()
    except OSError:  # a driver that is part of the kernel has no version of its own
        driver = None
    architecture = str(getattr(properties, "gcnArchName", ""))
    return {"gpu_capability": architecture.partition(":")[0], "hip": torch.version.hip, "driver": driver}


def _accelerator_facts(device: str) -> dict[str, Scalar]:
    """Of Intel's and Apple's GPUs what torch says; an Apple GPU goes by its processor's name."""
    import torch

    if device == "mps":
        return {"gpu": cpu_model(), "driver": platform.mac_ver()[0]}
    properties = torch.xpu.get_device_properties()
    return {
        "gpu": str(properties.name),
        "gpu_sm_count": getattr(properties, "max_compute_units", None),
        "driver": str(getattr(properties, "driver_version", "")) or None,
    }


def _cudnn() -> str | None:
    """cuDNN's version as torch loads it, from its number: 91501 is 9.15.1, and 8907 was 8.9.7."""
    import torch

    try:
        number = torch.backends.cudnn.version()
    except RuntimeError:  # one that does not fit this torch: what needs it will say so
        return None
    if number is None:
        return None
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _cublas(cuda: str | None) -> str | None:
    """The version of cuBLAS as the library that torch has loaded gives it, which may be an image's own and no
    package's. None where it does not answer.
    """
    if cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{cuda.partition('.')[0]}")
        numbers = [ctypes.c_int() for _ in range(3)]  # major, minor, patch level of libraryPropertyType
        failed = [library.cublasGetProperty(which, ctypes.byref(x)) for which, x in enumerate(numbers)]
    except (OSError, AttributeError):
        return None
    return None if any(failed) else ".".join(str(x.value) for x in numbers)


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers, without loading torch."""
    return Nvml.open() is not None


def gpus_here() -> int:
    """How many GPUs a run may use here: those that `CUDA_VISIBLE_DEVICES` lists, else all that NVML knows."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([x for x in listed.split(",") if x.strip()])
    nvml = Nvml.open()
    return 0 if nvml is None else int(nvml.library.nvmlDeviceGetCount())


def device_named(name: str | None, elsewhere: bool = False) -> DeviceKind:
    """The device asked for, or the best one here. Raises `InputError` for one that is not there; with
    `elsewhere`, for one that is not known.
    """
    here = devices_here()
    if name is None:
        return here[0]
    for device in DEVICES if elsewhere else here:
        if name == device:
            return device
    raise InputError(f"no device {name!r} here. Here: {', '.join(here)}. Known: {', '.join(DEVICES)}.")


def devices_here() -> list[DeviceKind]:
    """The devices of this machine that the torch installed here is built for, the best first; loads no torch.

    Apple's GPU comes last: it lacks fp64 and much of what the operators call, so that it is measured on by name.
    """
    built = (_version("torch") or "").partition("+")[2]
    found: list[DeviceKind] = ["cuda"] if has_gpu() else []
    if built.startswith("rocm") and KFD.exists():
        found.append("rocm")
    if built.startswith("xpu") and INTEL in {_read(x / "device" / "vendor") for x in DRM.glob("renderD*")}:
        found.append("xpu")
    found.append("cpu")
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        found.append("mps")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def commit(folder: Path) -> tuple[str | None, bool]:
    """The commit of the checkout that holds `folder`, and whether it has uncommitted changes."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    if not head:
        given = os.environ.get(COMMIT, "")
        return given.removesuffix("-dirty") or None, given.endswith("-dirty")
    return head, bool(git("status", "--porcelain", "--untracked-files=no"))
