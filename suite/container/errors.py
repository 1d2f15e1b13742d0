"""What can be wrong with an engine, an image or a machine: one message each, with the way out.

All end a command with exit code 5 (the harness could not do its work), but for what the user asked for and
does not exist, which is `InputError` and 2.
"""

from __future__ import annotations

from ...registry.errors import HarnessError

BARE = "Without IMAGE, `make bench` measures on this machine, outside any image."


class LaunchError(HarnessError):
    """Nothing can be measured in an image here, and why."""


class NoDocker(LaunchError):
    """There is no Docker at all."""

    def __init__(self, looked_at: str) -> None:
        super().__init__(
            f"no Docker here: no `docker` command and no engine at {looked_at}. Install one (Debian and Ubuntu: "
            f"apt-get install docker.io; others: docs.docker.com/engine/install), or name an engine elsewhere in "
            f"DOCKER_HOST. {BARE}"
        )


class NoBuilder(LaunchError):
    """No Docker command here can build with BuildKit."""

    def __init__(self) -> None:
        super().__init__(
            "the image has to be built first, and no `docker` command here can do it: it needs BuildKit. Install "
            "the plugin docker-buildx-plugin (Debian: docker-buildx, or docker.io of Debian 12), or bring the "
            "image from a machine that built it: docker save there, docker load here."
        )


class EngineDown(LaunchError):
    """An engine is named or installed and does not answer."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"the Docker engine at {address} does not answer: {reason}. Start it (systemctl start docker; Docker "
            f"Desktop: start the program), or set DOCKER_HOST to the one that runs. {BARE}"
        )


class NoPermission(LaunchError):
    """The engine's socket is not ours to use."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"no permission for the Docker engine at {address}. Join its group (sudo usermod -aG docker $USER, "
            f"then log in again; members of that group can become root), or run a rootless engine and name it in "
            f"DOCKER_HOST. {BARE}"
        )


class NoToolkit(LaunchError):
    """The engine cannot hand NVIDIA GPUs to containers."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"this Docker engine cannot give a container an NVIDIA GPU: {said}. If the machine has one, install "
            f"the NVIDIA Container Toolkit (docs.nvidia.com/datacenter/cloud-native/container-toolkit), then: "
            f"sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker. If it has "
            f"none, use IMAGE=cpu. {BARE}"
        )


class NoDriver(LaunchError):
    """The toolkit is there and the driver does not answer it."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"the NVIDIA driver of the engine's machine does not answer: {said}. Load or install it (`nvidia-smi` "
            f"there must list the GPU), then try again."
        )


class DriverTooOld(LaunchError):
    """The driver cannot run the image's CUDA."""

    def __init__(self, driver: str, minimum: str, cuda: str) -> None:
        super().__init__(
            f"the NVIDIA driver is {driver} and this image's CUDA {cuda} needs {minimum} or newer. Update the "
            f"driver of the engine's machine; the image brings its own CUDA and needs nothing else of the host. "
            f"{BARE}"
        )


class ImageMissing(LaunchError):
    """The image is not here and cannot be made or fetched."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(
            f"{what} is not here and cannot be fetched: {reason}. With a network, `make image IMAGE=NAME` builds "
            f"it; without one, bring it from a machine that has it: docker save IMAGE | gzip > image.tar.gz "
            f"there, docker load < image.tar.gz here."
        )


class BuildFailed(LaunchError):
    """The build ended with an error of its own, which stands above."""

    def __init__(self, image: str, last: str) -> None:
        super().__init__(f"image {image} could not be built: {last}")


class DiskFull(LaunchError):
    """No space where the engine keeps images and volumes."""

    def __init__(self, where: str, doing: str) -> None:
        super().__init__(
            f"the disk of the Docker engine ({where}) was full while {doing}. `docker system df` says what lies "
            f"there; `docker builder prune` and `docker image prune` free what nothing uses. An image of the "
            f"suite takes 2 GB (cpu) to 9 GB (GPU), and about twice that while it is built."
        )


class OutOfMemory(LaunchError):
    """The kernel ended a process of the container for want of memory."""

    def __init__(self, limit: str, kept: str) -> None:
        super().__init__(
            f"the container ran out of memory ({limit}) and the kernel ended a process in it. Give it more "
            f"(--memory 16g), measure less at once (--operator NAME, PLAN=quick), or end what else uses memory "
            f"there.{kept}"
        )
