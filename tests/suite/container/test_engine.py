"""Finding the engine: real sockets that are not there, not listened to, or nobody's."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from kernelmark.suite import cli
from kernelmark.suite.container import engine
from kernelmark.suite.container.errors import EngineDown, NoBuilder, NoDocker


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A user without any Docker: no variable, no context, no command, no socket."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "KERNELMARK_STAND_IN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    (tmp_path / "bin").mkdir()
    real = engine.candidates
    # A machine with an engine of its own can be tested too.
    monkeypatch.setattr(engine, "candidates", lambda: [x.replace("/var/run/", f"{tmp_path}/var/") for x in real()])
    return tmp_path


def command(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.run_command(cli.cli, [*arguments])
    return int(ended.value.code or 0), " ".join(capsys.readouterr().err.split())


def test_no_docker(nowhere, capsys):
    with pytest.raises(NoDocker):
        engine.find()
    code, said = command(capsys, "bench", "cpu")
    assert code == 5
    assert f"no Docker here: no `docker` command and no engine at unix://{nowhere}/var/docker.sock" in said
    assert "apt-get install docker.io" in said
    assert "Without IMAGE, `make bench` measures on this machine" in said


def test_installed_and_not_started(nowhere, capsys):
    docker = nowhere / "bin" / "docker"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    code, said = command(capsys, "bench", "cpu")
    assert code == 5
    assert "does not answer: there is no such socket. Start it (systemctl start docker" in said


def test_a_socket_that_nobody_listens_to(nowhere, capsys, monkeypatch):
    path = nowhere / "docker.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    code, said = command(capsys, "bench", "cpu")
    assert code == 5
    assert f"the Docker engine at unix://{path} does not answer: Connection refused" in said


def test_an_address_that_nobody_listens_to(nowhere, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(EngineDown, match="the Docker engine at tcp://127.0.0.1:9 does not answer"):
        engine.find()


def test_a_context_comes_before_the_usual_places(nowhere, monkeypatch):
    import hashlib

    folder = nowhere / ".docker"
    meta = folder / "contexts" / "meta" / hashlib.sha256(b"mine").hexdigest()
    meta.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"currentContext": "mine"}))
    described = {"Name": "mine", "Metadata": {}, "Endpoints": {"docker": {"Host": "unix:///mine.sock"}}}
    (meta / "meta.json").write_text(json.dumps(described))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    assert engine.candidates()[0] == "unix:///mine.sock"
    monkeypatch.setenv("DOCKER_HOST", "tcp://other:2376")
    assert engine.candidates() == ["tcp://other:2376"]


def test_no_command_that_builds(nowhere, monkeypatch):
    from kernelmark.suite.container import build

    with pytest.raises(NoBuilder, match="it needs BuildKit. Install the plugin docker-buildx-plugin"):
        build._builder()
    docker = Path(nowhere) / "bin" / "docker"
    docker.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Docker version 28.2.2, build 1" || exit 1\n')
    docker.chmod(0o755)
    with pytest.raises(NoBuilder):
        build._builder()
    docker.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Docker version 20.10.24, build 1" || exit 1\n')
    assert build._builder() == [str(docker), "build"]
    docker.write_text("#!/bin/sh\nexit 0\n")
    assert build._builder() == [str(docker), "buildx", "build", "--load"]
