"""Each way in which a launch can fail, provoked: what is said, and the exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kernelmark.registry.store.home import Home

pytestmark = pytest.mark.image


def said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())


def test_no_nvidia_toolkit(machine):
    if "nvidia" in machine.client.info()["Runtimes"]:
        pytest.skip("this engine has GPUs")
    done = machine.kernelmark("bench", "h100")
    assert done.returncode == 5
    assert "this Docker engine cannot give a container an NVIDIA GPU: could not select device driver" in said(done)
    assert "install the NVIDIA Container Toolkit" in said(done)
    assert "use IMAGE=cpu" in said(done)
    assert "building" not in said(done)  # it is said before minutes of building
    assert machine.left() == []


def test_make_shows_it_too(machine):
    if "nvidia" in machine.client.info()["Runtimes"]:
        pytest.skip("this engine has GPUs")
    house = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        ["make", "--no-print-directory", "bench", "IMAGE=h100"],
        cwd=house,
        env=dict(machine.environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "install the NVIDIA Container Toolkit" in said(done)
    assert "Error 5" in done.stderr
    assert done.returncode == 2  # make's own, whatever a recipe ends with


def test_an_image_by_its_digest_that_is_not_here(machine):
    digest = f"sha256:{'0123' * 16}"
    done = machine.kernelmark("bench", digest)
    assert done.returncode == 5
    assert f"image {digest} is not here and cannot be fetched" in said(done)
    assert "docker save IMAGE | gzip > image.tar.gz there, docker load < image.tar.gz here" in said(done)


def test_a_base_that_no_registry_gives(machine):
    """Port 9 of this machine is no registry: the same as no network, everywhere."""
    done = machine.kernelmark("image", "build", "cpu", KERNELMARK_STAND_IN="127.0.0.1:9/none:1")
    assert done.returncode == 5
    assert "image cpu, or its base 127.0.0.1:9/none:1, is not here and cannot be fetched" in said(done)


def test_an_image_that_is_not_ours(machine):
    from kernelmark.suite.container.gpus import PROBE, _nothing

    machine.client.api.import_image_from_data(_nothing(), repository=PROBE.partition(":")[0], tag="probe")
    done = machine.kernelmark("bench", PROBE)
    assert done.returncode == 2
    assert "is no image of kernelmark" in said(done)


def test_out_of_memory(machine, image, small_plan, tmp_path):
    there = machine.with_home(tmp_path)
    done = there.kernelmark(
        "bench", image.id, "--plan", small_plan, "--implementation", "torch", "--memory", "24m"
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert "the container ran out of memory (limit 24m) and the kernel ended a process in it" in said(done)
    assert "--memory 16g" in said(done)
    assert there.left() == []


def test_killed_from_outside(machine, image, small_plan, tmp_path):
    there = machine.with_home(tmp_path)
    process = there.start(
        "bench", image.id, "--plan", small_plan, "--implementation", "torch", "--replicates", "50", "--no-report"
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[1/"):
            break
    (container,) = there.containers()
    container.kill()
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    (run,) = Home(tmp_path).runs()  # what was finished is here
    assert f"the container was killed from outside. What was finished is in run {run}." in " ".join(rest.split())
    assert there.left() == []


LITTLE = """
import sys
from kernelmark.suite.container import launch
# A disk of the engine's that is nearly full: the volume is one.
launch.volume_options = lambda: {
    "driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": "size=4k,uid=10001,gid=10001,mode=755"}
}
from kernelmark.suite.cli import main
sys.argv[0] = "kernelmark"
main()
"""


def test_the_results_do_not_fit(machine, image, tmp_path):
    there = machine.with_home(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LITTLE, "bench", image.id, "--operator", "gelu", "--implementation", "torch"],
        env=dict(there.environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, done.stdout + done.stderr
    assert f"the disk of the Docker engine ({machine.client.info()['DockerRootDir']}) was full" in said(done)
    assert "`docker builder prune`" in said(done)
    assert there.left() == []


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A disk of that size; unmounted however the test ends."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk to fill")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_the_image_does_not_fit(machine, own_engine, tmp_path):
    """An engine of its own on a disk of 330 MB: the base fits and what is installed on it does not."""
    stand_in = machine.environment.get("KERNELMARK_STAND_IN")
    with tmpfs(tmp_path / "disk", "330m") as disk, own_engine(disk / "data") as (client, address):
        if stand_in:
            for _ in client.images.load(b"".join(machine.client.images.get(stand_in).save(named=True))):
                pass
        done = machine.kernelmark("image", "build", "cpu", DOCKER_HOST=address)
        assert done.returncode == 5, done.stdout + done.stderr
        assert f"the disk of the Docker engine ({disk / 'data'}) was full while building image cpu" in said(done)
        assert "`docker system df`" in said(done)


def test_the_hosts_disk_is_full(machine, image, small_plan, tmp_path):
    """The run's container is kept then, and the next launch takes its rows in."""
    with tmpfs(tmp_path / "home", "64m") as folder:
        there = machine.with_home(folder)
        command = ("bench", image.id, "--plan", small_plan, "--implementation", "torch", "--no-report")
        filler = folder / "filler"
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        filler.write_bytes(bytes(free - 8192))  # folders fit, a journal does not
        done = there.kernelmark(*command)
        assert done.returncode == 5, done.stdout + done.stderr
        assert "cannot be written: No space left on device" in said(done)
        assert len(there.left()) == 2
        filler.unlink()
        done = there.kernelmark(*command)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "which an earlier launch had to leave behind, is taken in" in done.stderr
        assert len(Home(folder).runs()) == 2
        assert there.left() == []


AS_NOBODY = """
import os, sys
import docker, requests  # before rights to read them are gone
from kernelmark.suite import cli
from kernelmark.suite.cli import bench, run, container_options
from kernelmark.suite.container import session
import kernelmark.registry.store.transfer
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.argv[0] = "kernelmark"
cli.main()
"""


def test_no_permission(machine):
    """A real socket that only root may use, asked by somebody else."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, 0o777)
        path = f"{folder}/docker.sock"
        server.bind(path)
        server.listen()
        os.chmod(path, 0o600)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, "bench", "cpu"],
            env={**machine.environment, "DOCKER_HOST": f"unix://{path}", "KERNELMARK_HOME": f"{folder}/home"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 5, done.stderr
    assert f"no permission for the Docker engine at unix://{path}" in said(done)
    assert "usermod -aG docker $USER" in said(done)
