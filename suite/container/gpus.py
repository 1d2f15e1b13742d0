"""The engine's GPUs: whether it can hand them to a container, which they are, and whether an image fits them."""

from __future__ import annotations

import contextlib
import io
import re
import secrets
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...registry.errors import InputError
from . import cdi
from .engine import Engine
from .errors import DriverTooOld, LaunchError, NoDriver, NoToolkit

if TYPE_CHECKING:
    from docker.types import DeviceRequest

    from .build import Built

QUERY = ("nvidia-smi", "--query-gpu=index,name,driver_version,compute_cap", "--format=csv,noheader")
PROBE = "kernelmark:probe"
"""An image with nothing in it: what an engine says to a container of it is about the GPU alone."""


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi`."""

    index: int
    name: str
    driver: str
    capability: str


def parse(text: str) -> tuple[Gpu, ...]:
    """The GPUs that `QUERY` printed; lines of anything else (warnings) are passed over."""
    found = []
    for line in text.splitlines():
        parts = [x.strip() for x in line.split(",")]
        if len(parts) == 4 and parts[0].isdigit():
            found.append(Gpu(int(parts[0]), parts[1], parts[2], parts[3]))
    return tuple(found)


def chosen(text: str) -> tuple[int, ...]:
    """`0,1` → (0, 1). Raises `InputError` for anything else."""
    parts = [x.strip() for x in text.split(",")]
    if not all(x.isdigit() for x in parts) or len(set(parts)) != len(parts):
        raise InputError(f"GPUS={text}: numbers as nvidia-smi lists them, with commas between: GPUS=0 or GPUS=0,1")
    return tuple(int(x) for x in parts)


def admit(image: Built, there: Sequence[Gpu], wanted: Sequence[int]) -> None:
    """Raises where a wanted GPU does not exist, is not what the image is for, or has too old a driver."""
    by_index = {x.index: x for x in there}
    known = ", ".join(f"{x.index} ({x.name})" for x in there)
    for index in wanted:
        if index not in by_index:
            raise InputError(f"GPUS: there is no GPU {index}. Known: {known}.")
        gpu = by_index[index]
        if _version(gpu.driver) < _version(image.minimum_driver):
            raise DriverTooOld(gpu.driver, image.minimum_driver, image.cuda)
        if not any(_fits(x, gpu.capability) for x in image.architectures):
            raise InputError(
                f"image {image.name} is for compute capability {', '.join(image.architectures)}, and GPU {index} "
                f"({gpu.name}) has {gpu.capability}. `kernelmark image list` says which image is for which GPU."
            )


def _fits(architecture: str, capability: str) -> bool:
    """Whether code for one capability runs on another: within a major version upwards, `a` only on itself."""
    own, theirs = _version(architecture), _version(capability)
    return theirs == own if architecture.endswith("a") else theirs[0] == own[0] and theirs >= own


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", text))


def request(engine: Engine, wanted: Sequence[int]) -> DeviceRequest:
    """What asks this engine for these GPUs: through NVIDIA's runtime, or through CDI where only that is set up."""
    from docker.types import DeviceRequest

    info = engine.client.info()
    devices = {str(x.get("ID", "")) for x in info.get("DiscoveredDevices") or ()}
    if "nvidia" not in (info.get("Runtimes") or {}) and any(x.startswith("nvidia.com/gpu=") for x in devices):
        return DeviceRequest(driver="cdi", device_ids=[f"nvidia.com/gpu={x}" for x in wanted])
    return DeviceRequest(
        driver="nvidia", device_ids=[str(x) for x in wanted], capabilities=[["gpu", "compute", "utility"]]
    )


def require_toolkit(engine: Engine, wanted: Sequence[int]) -> None:
    """Asks the engine for the GPUs with an empty image, so that it is known before anything large is built."""
    from docker.errors import APIError, NotFound

    client = engine.client
    asked = request(engine, wanted)
    if not client.images.list(PROBE):
        client.api.import_image_from_data(_nothing(), repository=PROBE.partition(":")[0], tag="probe")
    name = f"kernelmark-probe-{secrets.token_hex(4)}"
    try:
        container = client.containers.create(
            PROBE,
            ["/nothing"],
            name=name,
            network_mode="none",
            environment={"NVIDIA_DISABLE_REQUIRE": "1"},  # versions are ours to compare, with a better message
            device_requests=[asked],
        )
        container.start()
    except APIError as error:
        said = str(error.explanation)
        if (reason := refusal(said)) is not None:
            # Only of a refusal: a stale file that the engine had no need of says nothing against a GPU it gave.
            is_ours = asked["Driver"] == "cdi" and engine.address.startswith("unix://")
            because = cdi.problems(wanted) if is_ours else []
            raise (refusal("; ".join([said, *because])) or reason) from None
    finally:
        with contextlib.suppress(NotFound):
            client.containers.get(name).remove(force=True)


def refusal(said: str) -> LaunchError | None:
    """What an engine's refusal of a GPU means; None where the GPU was given and only the program is missing."""
    low = said.lower()
    if "unknown device" in low or "device not found" in low or "invalid device" in low:
        return LaunchError(
            f"the engine does not know that GPU: {said}. Choose with GPUS, as nvidia-smi numbers them."
        )
    if "could not select device driver" in low or "cdi" in low or "unknown or invalid runtime" in low:
        return NoToolkit(said)
    if "nvidia-container-cli" in low or "nvml" in low or "driver not loaded" in low:
        return NoDriver(said)
    if "hook" in low or "nvidia-c" in low:  # the toolkit's programs, gone or broken
        return NoToolkit(said)
    if "/nothing" in low:
        return None
    return LaunchError(f"the Docker engine could not start a container with a GPU: {said}")


def _nothing() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folder = tarfile.TarInfo("dev")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(folder)
    return buffer.getvalue()


def on_host() -> tuple[Gpu, ...]:
    """The GPUs that this machine's own `nvidia-smi` lists; none where there is no such program or no driver."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse(done.stdout) if done.returncode == 0 else ()


def in_image(engine: Engine, image: Built, wanted: Sequence[int]) -> tuple[Gpu, ...]:
    """The GPUs as `nvidia-smi` lists them inside the image, in the engine's own numbers.

    For an engine elsewhere. The toolkit puts the program into the container; there they count from 0.
    """
    from docker.errors import ContainerError, DockerException

    try:
        said = engine.client.containers.run(
            image.id,
            list(QUERY[1:]),
            entrypoint=QUERY[0],
            remove=True,
            network_mode="none",
            environment={"NVIDIA_DISABLE_REQUIRE": "1"},
            device_requests=[request(engine, wanted)],
        )
    except ContainerError as error:
        raise NoDriver(str(error)) from None
    except DockerException as error:
        raise engine.explain(error, "asking for its GPUs") from None
    seen = parse(said.decode(errors="replace"))
    return tuple(Gpu(index, x.name, x.driver, x.capability) for index, x in zip(wanted, seen, strict=False))
