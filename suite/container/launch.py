"""One container that measures: created with next to no rights, watched, and gone when it is done.

What it wrote lies in a volume, which works with an engine anywhere and whoever its user is; it is taken out
of the container before that is removed, however the run ended. If even that fails (the host's disk is full),
container and volume stay, and the next launch takes them in.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import secrets
import shutil
import signal
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .build import LABEL, Built
from .engine import FULL, Engine
from .errors import DiskFull, LaunchError, OutOfMemory
from .gpus import request

if TYPE_CHECKING:
    from docker.models.containers import Container

USER = "10001:10001"
RESULTS = "/results"
LEFT = re.compile(r"(journals/(shards/)?[^/]+\.jsonl|logs/[^/]+\.log)")
"""What is taken of that folder."""
PASSED = (
    "KERNELMARK_CLOCKS",
    "OMP_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",  # without it nothing is deterministic on CUDA
    "TERM",
    "COLUMNS",
    *("KERNELMARK_PARALLEL", "KERNELMARK_HOST", "KERNELMARK_ENGINE"),  # of a fleet's task
)
"""Environment variables handed on, where they are set."""
PATIENCE_S = 30
"""How long a run may take to write its last line after Ctrl-C."""
INTERRUPTED = 130
KILLED = 137

Take = Callable[[Path], None]


@dataclass(frozen=True)
class Limits:
    """What the container may use of the machine; None leaves it to the engine."""

    memory: str | None = None
    shared_memory: str = "1g"


@dataclass(frozen=True)
class Job:
    """What runs: a command line of `kernelmark`, on these GPUs, with these files put into the result folder.

    A quiet one shows none of its output; the last of it is in `Ended` either way.
    """

    arguments: Sequence[str]
    gpus: Sequence[int] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    limits: Limits = Limits()
    quiet: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How it ended: `kernelmark`'s exit code, whether the kernel ended a process for want of memory, the last
    of the output, and what the engine has to say where it could not even start."""

    code: int
    out_of_memory: bool = False
    said: str = ""
    error: str = ""


def run(engine: Engine, image: Built, job: Job, take: Take, owner: str) -> Ended:
    """Runs to the end, output streamed; `take` is given a folder with what the run wrote.

    `owner` marks container and volume as this home's. Raises `LaunchError`; Ctrl-C and SIGTERM end the run
    as Ctrl-C would outside (code 130), and what was finished is taken all the same.
    """
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    name = f"kernelmark-{image.name}-{secrets.token_hex(4)}"
    holds_results = False
    try:
        with _signals():
            said = ""
            try:
                container = _create(engine, image, job, name, owner)
                if job.files:
                    container.put_archive(RESULTS, _tar(job.files))
                holds_results = True
                said = _stream(container, job.quiet)
            except KeyboardInterrupt:
                _stop(engine, name)
            with _undisturbed():
                ended = _ended(engine, name, said)
                collect(engine, name, take)
                holds_results = False
        return ended
    except (DockerException, RequestException) as error:
        raise engine.explain(error, "running the container") from None
    finally:
        with _undisturbed():
            if not holds_results:
                remove(engine, name)


def leftovers(engine: Engine, take: Take, owner: str) -> int:
    """Takes in what earlier launches of this home had to leave behind; how many there were."""
    from docker.errors import DockerException

    try:
        ended = engine.client.containers.list(
            all=True, filters={"label": f"{LABEL}owner={owner}", "status": ["exited", "dead"]}
        )
        found = [x for x in ended if not _alive(x.labels.get(f"{LABEL}launcher", ""))]
        for container in found:
            collect(engine, str(container.name), take)
            remove(engine, str(container.name))
    except DockerException as error:
        raise engine.explain(error, "taking in an earlier run") from None
    return len(found)


def _alive(pid: str) -> bool:
    """Whether a launcher still runs, which then takes its own results in."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def _create(engine: Engine, image: Built, job: Job, name: str, owner: str) -> Container:
    from docker.types import Mount

    marks = {f"{LABEL}owner": owner, f"{LABEL}launcher": str(os.getpid())}
    engine.client.volumes.create(name, labels=marks, **volume_options())
    return engine.client.containers.create(
        image.id,
        list(job.arguments),
        name=name,
        labels=marks,
        user=USER,
        mounts=[Mount(RESULTS, name, type="volume")],
        mem_limit=job.limits.memory,
        memswap_limit=job.limits.memory,
        tty=sys.stdout.isatty(),
        **confined(engine, image, job.gpus, job.limits.shared_memory, job.variables),
    )


def confined(
    engine: Engine, image: Built, gpus: Sequence[int], shared_memory: str, marks: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What every container that measures is made with: next to no rights, and what says which image it is.

    `marks` are variables beside: they may say instead which set of images it is one of.
    """
    from docker.types import Ulimit

    nvidia = image.accelerator == "nvidia"
    return {
        "read_only": True,
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "init": True,  # ends with the processes that a crashed worker leaves behind
        "pids_limit": 4096,
        "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # exec: compiled kernels are loaded from there
        "shm_size": shared_memory,
        # Pinned host memory needs memlock; a core dump of a process with a GPU's memory would fill the disk.
        "ulimits": [Ulimit(name="core", soft=0, hard=0)]
        + ([Ulimit(name="memlock", soft=-1, hard=-1)] if nvidia else []),
        "device_requests": [request(engine, gpus)] if nvidia else None,
        **(amd(Path("/dev")) if image.accelerator == "amd" else {}),
        "environment": {
            **{x: os.environ[x] for x in PASSED if x in os.environ},
            "KERNELMARK_IMAGE_DIGEST": image.id,
            "KERNELMARK_IMAGE": image.name,
            **(marks or {}),
        },
    }


def amd(devices: Path) -> dict[str, Any]:
    """What gives a container AMD's GPUs: the files of the compute driver and of the render nodes, and the groups
    that may open them. Raises `LaunchError` where there is no such driver. Not run on a GPU yet.
    """
    if not (devices / "kfd").exists():
        raise LaunchError(
            "this machine has no AMD GPU that computes: there is no /dev/kfd. Load the driver amdgpu."
        )
    files = [devices / "kfd", *sorted((devices / "dri").glob("renderD*"))]
    return {
        "devices": [f"{x}:{x}:rw" for x in files],
        "group_add": sorted({str(x.stat().st_gid) for x in files}),
    }


def volume_options() -> dict[str, Any]:
    """How the result volume is made: the engine's own way, on its own disk."""
    return {}


def _stream(container: Container, quiet: bool) -> str:
    """Starts it and passes its output on; the last of it."""
    output = container.attach(stdout=True, stderr=True, stream=True, logs=False)
    container.start()
    tail = b""
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a chunk may end within a letter
    for chunk in output:
        tail = (tail + chunk)[-4000:]
        if not quiet:
            sys.stdout.write(text.decode(chunk))
            sys.stdout.flush()
    return tail.decode(errors="replace")


def _stop(engine: Engine, name: str) -> None:
    """Passes Ctrl-C on; a second one, or patience at its end, kills."""
    from docker.errors import APIError, DockerException, NotFound
    from requests.exceptions import RequestException

    try:
        container = engine.client.containers.get(name)
        container.kill("SIGINT")
        with contextlib.suppress(KeyboardInterrupt):
            container.wait(timeout=PATIENCE_S)
            return
        container.kill()
    except RequestException:  # patience is at its end
        with contextlib.suppress(DockerException):
            container.kill()
    except (NotFound, APIError):  # not created, not started, or ended by itself
        pass


def _ended(engine: Engine, name: str, said: str) -> Ended:
    from docker.errors import NotFound

    try:
        container = engine.client.containers.get(name)
    except NotFound:  # Ctrl-C came before it was made
        return Ended(INTERRUPTED)
    if container.status == "created":
        return Ended(INTERRUPTED)
    container.wait(timeout=PATIENCE_S)
    container.reload()
    state = container.attrs["State"]
    return Ended(int(state["ExitCode"]), bool(state.get("OOMKilled")), said, str(state.get("Error") or ""))


def judge(engine: Engine, ended: Ended, limits: Limits, kept: str) -> None:
    """Raises for an end that is the machine's doing and not the run's; `kept` says what was saved."""
    if ended.error:
        raise LaunchError(f"the container could not run: {ended.error}")
    if ended.code in (0, INTERRUPTED):
        return
    if ended.out_of_memory:
        raise OutOfMemory(f"limit {limits.memory}" if limits.memory else "no limit of ours", kept)
    if FULL.search(ended.said):
        raise DiskFull(engine.storage, f"the run wrote its results.{kept}")
    if ended.code == KILLED:
        raise LaunchError(f"the container was killed from outside.{kept}")


def collect(engine: Engine, name: str, take: Take) -> None:
    """Gives `take` a folder with the journals and logs of a container, if it has any."""
    import tempfile

    from docker.errors import NotFound

    with tempfile.TemporaryDirectory(prefix="kernelmark-") as folder:
        try:
            container = engine.client.containers.get(name)
        except NotFound:
            return
        for part in ("journals", "logs"):
            try:
                chunks, _ = container.get_archive(f"{RESULTS}/{part}")
            except NotFound:
                continue
            unpack(b"".join(chunks), Path(folder))
        take(Path(folder))


def unpack(data: bytes, folder: Path) -> None:
    """Lays the journals and logs of an archive into a folder, and nothing else.

    What ran there may have left links, pipes or devices, which are no results and must keep none from being taken.
    By hand: Python 3.11 has the filter that refuses them, and with them all the rest, since its fourth patch.
    """
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            source = archive.extractfile(member) if member.isfile() and LEFT.fullmatch(member.name) else None
            if source is not None:
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with source, open(path, "wb") as file:
                    shutil.copyfileobj(source, file)


def remove(engine: Engine, name: str) -> None:
    """Container and volume go; neither need exist."""
    from docker.errors import DockerException

    with contextlib.suppress(DockerException):
        engine.client.containers.get(name).remove(force=True)
    with contextlib.suppress(DockerException):
        engine.client.volumes.get(name).remove(force=True)


def _tar(files: Mapping[str, bytes]) -> bytes:
    """Files and their folders, owned by the container's user."""
    uid, gid = (int(x) for x in USER.split(":"))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folders = sorted({str(x) for name in files for x in Path(name).parents if str(x) != "."})
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o755, uid, gid
            archive.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o644, uid, gid
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP (a closed terminal) end a launch as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {x: signal.signal(x, signal.default_int_handler) for x in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While results are taken out and things removed, Ctrl-C waits: both are a matter of seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {x: signal.signal(x, signal.SIG_IGN) for x in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
