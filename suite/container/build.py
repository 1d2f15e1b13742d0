"""Building an image, or finding that the same one is here already.

BuildKit does the building, through the `docker` command: the engine's own interface that the SDK speaks has
only the old builder, without secrets and cache mounts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import suite
from ...registry import figures
from ...registry.errors import InputError
from ..run import fingerprint
from . import prebuilt
from .engine import FULL, Engine
from .errors import BuildFailed, DiskFull, ImageMissing, LaunchError, NoBuilder
from .table import Image

REPOSITORY = "kernelmark"
LABEL = "io.kernelmark."
CONTEXT = ("Dockerfile", "docker/entrypoint", "docker/nvcc", "pyproject.toml", "README.md", "LICENSE")
ROOMS = ("suite", "kernels", "baselines", "registry")
REMOTE = re.compile(
    r"(?:(?:https?|ssh|git)://)?(?:[^@/\s]+@)?(?P<host>[\w-]+(?:\.[\w-]+)+)(?::\d+(?=/))?[:/](?P<path>[^\s]+?)(?:\.git)?/?"
)
OFFLINE = re.compile(
    r"no such host|failed to resolve source metadata|failed to do request|dial tcp|i/o timeout|"
    r"temporary failure|could not resolve|network is unreachable|tls handshake|newconnectionerror|"
    r"could not connect",
    re.IGNORECASE,
)
GONE = re.compile(r"manifest unknown|: not found|pull access denied|authorization failed", re.IGNORECASE)
FAULT = re.compile(r"error|failed|denied|unable|\bE: ", re.IGNORECASE)
REPEATED = re.compile(r"executor failed running|did not complete successfully")
STEP = re.compile(r"#\d+ (\[.*)")
"""BuildKit's line on a step that begins."""


@dataclass(frozen=True)
class Options:
    """How to build where the usual way is closed.

    `stand_in` is an image to use in place of the pinned base, for tests without a registry; it says so in its
    labels. `pip_conf` and `ca_bundle` are files that only the build's own processes see.
    """

    stand_in: str | None = None
    pip_conf: Path | None = None
    ca_bundle: Path | None = None
    network: str | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Built:
    """An image that the engine has: its digest, its size in bytes, and what its labels say it is for."""

    id: str
    name: str
    accelerator: str = "none"
    architectures: tuple[str, ...] = ()
    cuda: str = ""
    minimum_driver: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    size: int = 0

    @classmethod
    def of(cls, image: Any) -> Built:
        """From an image of the SDK. Raises `InputError` for one that is not ours."""
        labels = dict(image.labels or {})
        name = labels.get(f"{LABEL}image")
        if not name:
            raise InputError(f"{image.id} is no image of kernelmark: it has no label {LABEL}image.")
        return cls(
            id=str(image.id),
            name=name,
            accelerator=labels.get(f"{LABEL}accelerator", "none"),
            architectures=tuple(labels.get(f"{LABEL}architectures", "").split()),
            cuda=labels.get(f"{LABEL}cuda", ""),
            minimum_driver=labels.get(f"{LABEL}minimum_driver", ""),
            labels=labels,
            size=image.attrs["Size"],
        )


def checkout() -> Path:
    """The checkout that images are built from: the program's own, else the current directory's."""
    own = Path(suite.__file__).resolve().parents[1]
    for folder in (own, Path.cwd(), *Path.cwd().parents):
        if (folder / "Dockerfile").is_file() and (folder / "docker" / "images.toml").is_file():
            return folder
    raise InputError("images are built from a checkout of kernelmark; go to one, or name an image by its digest.")


def obtain(engine: Engine, folder: Path, image: Image, options: Options, tell: Callable[[str], None]) -> Built:
    """The image as this checkout makes it: the one that is here if nothing it is made of changed, else built."""
    from docker.errors import DockerException, ImageNotFound

    base = image.base_or(options.stand_in)
    tag = f"{REPOSITORY}:{image.name}-{inputs(folder, image, base)[:12]}"
    try:
        if not options.fresh:
            found = Built.of(engine.client.images.get(tag))
            tell(f"image {tag} is here")
            return found
    except ImageNotFound:
        pass
    except DockerException as error:
        raise engine.explain(error, "looking for the image") from None
    tell(f"building {tag} from {base}; the first time this fetches the base and all packages")
    if wheel := prebuilt.found(folder, image):
        tell(f"{wheel} was compiled elsewhere and is taken by its hash")
    start = time.monotonic()
    build(engine, folder, image, base, tag, options, tell)
    built = Built.of(engine.client.images.get(tag))
    tell(f"built in {figures.seconds(time.monotonic() - start)}: {figures.size(built.size)}")
    return built


def present(engine: Engine, reference: str) -> Built:
    """The image of a digest or a reference, fetched if a registry has it. Raises `ImageMissing`."""
    from docker.errors import DockerException, ImageNotFound

    try:
        return Built.of(engine.client.images.get(reference))
    except ImageNotFound:
        pass
    except DockerException as error:
        raise engine.explain(error, "looking for the image") from None
    if reference.startswith("sha256:"):
        raise ImageMissing(f"image {reference}", "an image's own digest names it in no registry")
    try:
        return Built.of(engine.client.images.pull(reference))
    except DockerException as error:
        text = str(getattr(error, "explanation", None) or error)
        if FULL.search(text):
            raise DiskFull(engine.storage, f"fetching {reference}") from None
        raise ImageMissing(f"image {reference}", text) from None


def files(folder: Path, image: Image) -> list[Path]:
    """What the build reads of the checkout, sorted; `.dockerignore` admits the same."""
    rooms = (
        path
        for room in ROOMS
        for path in (folder / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "reference" not in path.relative_to(folder).parts
    )
    wheel = prebuilt.found(folder, image)
    given = (*CONTEXT, *image.every_lock, *((wheel.path,) if wheel else ()))
    return sorted([*(folder / x for x in given), *rooms])


def inputs(folder: Path, image: Image, base: str) -> str:
    """A hash of everything that the image is made of."""
    digest = hashlib.sha256()
    for part in (base, *_arguments(folder, image, base).values(), *labels(folder, image, base).values()):
        digest.update(f"{part}\0".encode())
    for path in files(folder, image):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o111}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def lock_hash(folder: Path, image: Image) -> str:
    """A hash of the image's locks, in order, those of what is compiled and of the compiler among them."""
    digest = hashlib.sha256()
    for lock in image.every_lock:
        digest.update(hashlib.sha256((folder / lock).read_bytes()).digest())
    return f"sha256:{digest.hexdigest()}"


def revision(folder: Path) -> str:
    """The commit, with `-dirty` behind it where there are uncommitted changes; empty outside git."""
    commit, dirty = fingerprint.commit(folder)
    return f"{commit}-dirty" if commit and dirty else commit or ""


def source(folder: Path) -> str:
    """The address of the remote `origin`, without whatever stands before its host; empty for a folder or none.

    A registry of images shows it as a link, so that `git@host:path` becomes `https://host/path`.
    """
    done = subprocess.run(
        ["git", "-C", str(folder), "remote", "get-url", "origin"], capture_output=True, text=True, check=False
    )
    address = REMOTE.fullmatch(done.stdout.strip())
    return f"https://{address['host']}/{address['path']}" if address else ""


def labels(folder: Path, image: Image, base: str) -> dict[str, str]:
    """OCI's labels, and what the launcher needs to run the image without its table."""
    oci = "org.opencontainers.image."
    is_pinned = base == f"{image.base}@{image.digest}"
    wheel = prebuilt.found(folder, image)
    return {
        f"{oci}title": f"kernelmark {image.name}",
        f"{oci}description": image.summary,
        f"{oci}source": source(folder),
        f"{oci}revision": revision(folder),
        f"{oci}version": suite.__version__,
        f"{oci}licenses": "Apache-2.0",
        f"{oci}base.name": image.base if is_pinned else base,
        f"{oci}base.digest": image.digest if is_pinned else "",
        f"{LABEL}image": image.name,
        f"{LABEL}stand_in": "" if is_pinned else base,
        f"{LABEL}verified_at": image.verified_at if is_pinned else "",
        f"{LABEL}environment": image.environment,
        f"{LABEL}locks": lock_hash(folder, image),
        f"{LABEL}compiled": f"elsewhere: {wheel}" if wheel else "here" if image.sources else "",
        f"{LABEL}accelerator": image.accelerator,
        f"{LABEL}architectures": " ".join(image.architectures),
        f"{LABEL}cuda": image.cuda,
        f"{LABEL}minimum_driver": image.minimum_driver,
    }


def remark(built: Built) -> str:
    """What must be said whenever an image is used: that it stands on a stand-in, or on a digest that was not seen
    in its registry. Empty where its base is verified.
    """
    said = built.labels
    if stand_in := said.get(f"{LABEL}stand_in"):
        return f"image {built.name} stands on a stand-in, {stand_in}: for trying the launcher, not for results"
    if said.get(f"{LABEL}verified_at"):
        return ""
    base = said.get("org.opencontainers.image.base.name", "its base")
    return f"image {built.name}: the digest of {base} has not been seen in its registry; `make pin` looks"


def _arguments(folder: Path, image: Image, base: str) -> dict[str, str]:
    is_pinned = base == f"{image.base}@{image.digest}"
    if wheel := prebuilt.found(folder, image):
        compiled = {"SOURCES": image.wheel, "SOURCES_LOCK": image.wheel, "WHEEL": wheel.path.as_posix()}
    elif image.sources:
        compiled = {"SOURCES": image.sources, "SOURCES_LOCK": image.sources, "COMPILER_LOCK": image.compiler}
    else:
        compiled = {}
    return {
        "BASE": base,
        "PYTHON": image.python,
        "APT_PACKAGES": " ".join(image.apt),
        "APT_SNAPSHOT": image.apt_snapshot if is_pinned else "",  # a stand-in is of no date
        "LOCKS": " ".join(image.locks),
        **({"OWN_LOCK": image.own_lock} if image.own_lock else {}),
        **compiled,
        "ARCHITECTURES": ";".join(image.architectures) if image.accelerator == "nvidia" else "",
        "COMMIT": revision(folder),
        "SOURCE_DATE_EPOCH": _epoch(folder),
    }


def _epoch(folder: Path) -> str:
    """The commit's time: the only time that belongs to an image's contents."""
    done = subprocess.run(
        ["git", "-C", str(folder), "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "0"


def build(
    engine: Engine, folder: Path, image: Image, base: str, tag: str, options: Options, tell: Callable[[str], None]
) -> None:
    """Runs the build and shows its lines. Raises what `errors` has for how it can fail."""
    command = [*_builder(), "--progress=plain", "--platform", image.platform, "--tag", tag]
    if options.fresh:
        command.append("--no-cache")
    if options.network:
        command += ["--network", options.network]
    for name, value in _arguments(folder, image, base).items():
        command += ["--build-arg", f"{name}={value}"]
    for name, value in labels(folder, image, base).items():
        command += ["--label", f"{name}={value}"]
    for secret, path in (("pip_conf", options.pip_conf), ("ca_bundle", options.ca_bundle)):
        if path is not None:
            if not path.is_file():
                raise InputError(f"no file at {path}")
            command += ["--secret", f"id={secret},src={path}"]
    last: deque[str] = deque(maxlen=40)
    for line in _run([*command, str(folder)], {"DOCKER_BUILDKIT": "1", "DOCKER_HOST": engine.address}):
        last.append(line)
        if step := STEP.match(line):
            tell(f"  {step[1]}"[:100])
    if last and last[-1] == "":
        return
    for line in last:
        tell(f"  {line}"[:300])
    raise failure(engine, image.name, base, "\n".join(last))


def failure(engine: Engine, name: str, base: str, said: str) -> LaunchError:
    """Why a build failed, from its last lines."""
    errors = [x.strip() for x in said.splitlines() if FAULT.search(x)]
    # BuildKit's own last word repeats the step, which is long.
    last = ([x for x in errors if not REPEATED.search(x)] or errors or ["it said nothing"])[-1]
    if FULL.search(said):
        return DiskFull(engine.storage, f"building image {name}")
    if "load metadata for" in said and (OFFLINE.search(said) or GONE.search(said)):
        return ImageMissing(f"image {name}, or its base {base},", last)
    if OFFLINE.search(said):
        return ImageMissing(f"what image {name} is made of", next(x for x in errors if OFFLINE.search(x)))
    return BuildFailed(name, last)


def _run(command: list[str], extra: Mapping[str, str]) -> Iterator[str]:
    """Lines of a command; an empty last one means that it succeeded. Ended with its reader, as on Ctrl-C."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **extra},
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip():
                    yield line.rstrip()
        except BaseException:
            process.terminate()
            raise
        if process.wait() == 0:
            yield ""


def _builder() -> list[str]:
    """A `docker` command that builds with BuildKit: with the plugin buildx, or old enough to have it inside."""
    seen = set()
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        docker = shutil.which("docker", path=folder)
        if docker is None or docker in seen:
            continue
        seen.add(docker)
        if subprocess.run([docker, "buildx", "version"], capture_output=True, check=False).returncode == 0:
            return [docker, "buildx", "build", "--load"]
        version = subprocess.run([docker, "--version"], capture_output=True, text=True, check=False).stdout
        if (major := re.search(r"version (\d+)", version)) and 19 <= int(major[1]) < 23:
            return [docker, "build"]
    raise NoBuilder
