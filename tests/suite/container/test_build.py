"""What an image is made of, and why a build failed: without building one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite.container import build, table
from kernelmark.suite.container.engine import Engine
from kernelmark.suite.container.errors import BuildFailed, DiskFull, ImageMissing

HOUSE = Path(__file__).resolve().parents[3]
ENGINE = Engine(SimpleNamespace(info=lambda: {"DockerRootDir": "/var/lib/docker"}), "unix:///x")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """What a build reads of the checkout, in a folder that may be changed."""
    folder = tmp_path_factory.mktemp("house")
    image = table.named(HOUSE, "cpu")
    for path in [*build.files(HOUSE, image), HOUSE / "docker" / "images.toml"]:
        target = folder / path.relative_to(HOUSE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return folder


def test_the_ignore_file_admits_what_the_build_reads():
    admitted = [x[1:] for x in (HOUSE / ".dockerignore").read_text().splitlines() if x.startswith("!")]
    read = {*build.CONTEXT, *build.ROOMS, "requirements/*.txt", "docker/wheels/*.whl"}
    assert read - {"Dockerfile"} == set(admitted)


@pytest.mark.parametrize(
    "file", ["Dockerfile", "docker/entrypoint", "requirements/image-cpu.txt", "suite/plan.py"]
)
def test_every_input_counts(copy, file):
    image = table.named(copy, "cpu")
    before = build.inputs(copy, image, "base")
    assert build.inputs(copy, image, "base") == before
    assert build.inputs(copy, image, "another") != before
    path = copy / file
    text = path.read_bytes()
    path.write_bytes(text + b"\n")
    try:
        assert build.inputs(copy, image, "base") != before
    finally:
        path.write_bytes(text)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://somebody:secret@example.org:8443/group/x.git", "https://example.org/group/x"),
        ("git@example.org:group/x.git", "https://example.org/group/x"),
        ("ssh://git@example.org:22/group/x/", "https://example.org/group/x"),
        ("/srv/somebody/x.git", ""),
        ("file:///srv/a.b/x", ""),
        (None, ""),
    ],
)
def test_the_source_is_the_remotes_address_and_no_more(make_repository, remote, address):
    repository = make_repository("work")
    if remote:
        repository.git("remote", "add", "origin", remote)
    assert build.source(repository.folder) == address


def test_labels_say_what_it_stands_on():
    image = table.named(HOUSE, "h100")
    pinned = build.labels(HOUSE, image, image.pinned_base)
    oci = "org.opencontainers.image."
    assert (pinned[f"{oci}base.name"], pinned[f"{oci}base.digest"]) == (image.base, image.digest)
    assert pinned["io.kernelmark.stand_in"] == ""
    other = build.labels(HOUSE, image, "mine:1")
    assert (other[f"{oci}base.name"], other[f"{oci}base.digest"]) == ("mine:1", "")
    assert other["io.kernelmark.stand_in"] == "mine:1"
    assert build._arguments(HOUSE, image, image.pinned_base)["APT_SNAPSHOT"] == image.apt_snapshot
    assert build._arguments(HOUSE, image, "mine:1")["APT_SNAPSHOT"] == ""
    found = build.Built.of(SimpleNamespace(id="sha256:1", labels=pinned, attrs={"Size": 7}))
    assert (found.name, found.architectures, found.minimum_driver) == ("h100", ("9.0a",), image.minimum_driver)
    assert found.size == 7
    with pytest.raises(InputError, match="sha256:2 is no image of kernelmark"):
        build.Built.of(SimpleNamespace(id="sha256:2", labels=None))


@pytest.mark.parametrize(
    ("last", "kind", "said"),
    [
        (
            '#3 [internal] load metadata for docker.io/x\n#3 ERROR: failed to do request: Head "https://r-1": '
            "dial tcp: lookup registry-1.docker.io: no such host",
            ImageMissing,
            "image cpu, or its base b:1, is not here and cannot be fetched: #3 ERROR: failed to do request",
        ),
        (
            "#3 [internal] load metadata for docker.io/x\n#3 ERROR: docker.io/x@sha256:1: not found",
            ImageMissing,
            "docker.io/x@sha256:1: not found",
        ),
        (
            "#5 E: Failed to fetch http://x/g++.deb  Temporary failure resolving 'deb.debian.org'",
            ImageMissing,
            "what image cpu is made of is not here",
        ),
        (
            "#9 write /opt/x: no space left on device",
            DiskFull,
            r"\(/var/lib/docker\) was full while building image cpu",
        ),
        (
            "#9 ERROR: THESE PACKAGES DO NOT MATCH THE HASHES",
            BuildFailed,
            "THESE PACKAGES DO NOT MATCH THE HASHES",
        ),
        (
            "#5 2.065 E: Package 'python3.12-venv' has no installation candidate\n"
            "executor failed running [/bin/sh -c set -eu; apt-get install]: exit code: 100",
            BuildFailed,
            r"could not be built: #5 2.065 E: Package 'python3.12-venv' has no installation candidate$",
        ),
    ],
)
def test_why_a_build_failed(last, kind, said):
    found = build.failure(ENGINE, "cpu", "b:1", last)
    assert type(found) is kind
    assert found.exit_code == 5
    with pytest.raises(kind, match=said):
        raise found


def test_nvcc_compiles_for_the_images_architectures_alone(tmp_path):
    """`docker/nvcc`, with what torch and packages' build scripts call nvcc with."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    nvcc.chmod(0o755)
    others = ["-gencode", "arch=compute_75,code=sm_75", "-gencode=arch=compute_120,code=sm_120"]
    done = subprocess.run(
        [HOUSE / "docker" / "nvcc", "-c", "a b.cu", *others, "-O3"],
        env={"CUDA_HOME": str(tmp_path), "NVCC_ARCHITECTURES": "90a 100a", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [f"-gencode=arch=compute_{x},code=sm_{x}" for x in ("90a", "100a")]
    assert done.stdout.splitlines() == ["-c", "a b.cu", "-O3", *ours]


def test_a_wrong_hash_is_refused_by_the_lock_itself():
    """`--require-hashes` stands in the Dockerfile for every lock."""
    text = (HOUSE / "Dockerfile").read_text()
    assert "--no-deps --require-hashes --only-binary :all: -r" in text
    assert "curl" not in text
    assert "wget" not in text
