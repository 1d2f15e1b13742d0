"""The administrator's commands and the compose file, as far as no engine is needed."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

HOUSE = Path(__file__).resolve().parents[3]
COMPOSE = HOUSE / "docker" / "compose.yaml"
PARTS = HOUSE / "docker" / "registry"


@pytest.fixture
def compose() -> dict[str, Any]:
    """The compose file."""
    return dict(yaml.safe_load(COMPOSE.read_text()))


def test_the_secrets_are_made_once_and_only_their_owner_gets_at_them(admin: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "registry"
    with pytest.raises(admin.UsageError, match="write admin password to .*: there is no default"):
        admin.made(folder, {})
    with pytest.raises(admin.UsageError, match="12 characters"):
        admin.made(folder, {"KERNELMARK_REGISTRY_ADMIN_PASSWORD": "short"})
    admin.made(folder, {"KERNELMARK_REGISTRY_ADMIN_PASSWORD": "long enough for it"})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made = {x.name: x.read_text().strip() for x in folder.iterdir()}
    assert made.keys() == {"admin_password", "database_password", "session_key"}
    assert made["admin_password"] == "long enough for it"
    assert len(set(made.values())) == 3
    assert min(map(len, made.values())) >= 18
    admin.made(folder, {"KERNELMARK_REGISTRY_ADMIN_PASSWORD": "another that comes too late"})
    assert {x.name: x.read_text().strip() for x in folder.iterdir()} == made
    with pytest.raises(admin.UsageError, match="aws credentials"):
        admin.made(folder, {"KERNELMARK_REGISTRY_S3": "s3://bucket/prefix"})


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "python admin.py up"),
        (["nonsense"], 2, "python admin.py up"),
        (["restore"], 2, "python admin.py up"),
        (["restore", ""], 2, "python admin.py up"),
        (["restore", "no-such-file.tar"], 2, "no backup of a registry"),
        (["user", "ada; rm -rf"], 2, "no user's name"),
        (["up"], 2, "there is no default"),
    ],
)
def test_wrong_usage(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PARTS / "admin.py"), *arguments],
        env={**os.environ, "KERNELMARK_REGISTRY_SECRETS": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == code
    assert message in done.stderr


def test_without_an_engine_the_message_says_so(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "KERNELMARK_REGISTRY_SECRETS": str(tmp_path),
        "KERNELMARK_REGISTRY_ADMIN_PASSWORD": "long enough for it",
    }
    command = [sys.executable, str(PARTS / "admin.py"), "up"]
    bare = environment | {"PATH": str(tmp_path)}
    done = subprocess.run(command, env=bare, capture_output=True, text=True)
    assert (done.returncode, "Docker is not installed" in done.stderr) == (2, True), done.stderr
    if shutil.which("docker"):
        nobody = environment | {"DOCKER_HOST": f"unix://{tmp_path}/no.sock"}
        done = subprocess.run(command, env=nobody, capture_output=True, text=True)
        assert (done.returncode, "engine does not answer" in done.stderr) == (2, True), done.stderr


def test_nobody_answers_where_an_account_is_to_be_made(admin: ModuleType) -> None:
    with pytest.raises(admin.FailedError, match="does not answer"):
        admin.account("http://127.0.0.1:9", "password", "ada")


def test_images_are_named_by_digest(compose: dict[str, Any]) -> None:
    bases = re.findall(r"^ARG BASE=(.*)$", (PARTS / "Dockerfile").read_text(), re.MULTILINE)
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.11-[\w.-]+@sha256:[0-9a-f]{64}", bases[0])
    # Ours is built: one of that name that a stranger published is not fetched.
    server = compose["services"]["server"]
    assert (server["image"], server["pull_policy"]) == ("kernelmark/registry", "never")
    database = compose["services"]["database"]["image"]
    assert re.fullmatch(r"\$\{KERNELMARK_REGISTRY_POSTGRES:-postgres:17@sha256:[0-9a-f]{64}\}", database)


def test_the_stack_is_shut_to_the_outside(compose: dict[str, Any]) -> None:
    server, database = compose["services"]["server"], compose["services"]["database"]
    assert [x.split(":5000")[0] for x in server["ports"]] == [
        "${KERNELMARK_REGISTRY_BIND:-127.0.0.1}:${KERNELMARK_REGISTRY_PORT:-5000}"
    ]
    assert "ports" not in database
    assert database["networks"] == ["inside"]
    assert compose["networks"]["inside"]["internal"] is True
    assert server["read_only"] is True
    for service in (server, database):
        assert "privileged" not in service
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] == "unless-stopped"
        # Passwords travel as files: an environment can be read by `docker inspect`.
        passwords = [x for x in service["environment"] if "PASSWORD" in x or "KEY" in x]
        assert passwords in ([], ["POSTGRES_PASSWORD_FILE"])
    assert all("file" in x for x in compose["secrets"].values())


def test_the_server_gets_no_setting_that_it_does_not_know(
    compose: dict[str, Any], server_module: ModuleType
) -> None:
    # Each variable of the compose file changes what the server makes of it.
    names = [x for x in compose["services"]["server"]["environment"] if x.startswith("KERNELMARK_REGISTRY_")]
    assert len(names) == 3
    plain = server_module.Settings.of({})
    for name in names:
        assert server_module.Settings.of({name: "7"}) != plain, name
    assert plain.listen == "127.0.0.1"
    assert plain.hosts == ("localhost", "127.0.0.1")


def test_the_servers_command_line(server_module: ModuleType) -> None:
    settings = server_module.Settings.of({"KERNELMARK_REGISTRY_HOSTS": "registry.example.org, other:8443 ,"})
    command = server_module.command(settings)
    options = dict(itertools.pairwise(command[4:]))
    assert options["--app-name"] == "basic-auth"
    assert options["--backend-store-uri"] == "postgresql+psycopg2://"
    assert options["--uvicorn-opts"] == "--timeout-worker-healthcheck=60"
    assert options["--allowed-hosts"].split(",") == [
        "127.0.0.1:5000",
        "registry.example.org",
        "other:8443",
        "registry.example.org:*",
    ]
    assert "*" not in options["--cors-allowed-origins"].split(",")
    assert "https://registry.example.org:*" in options["--cors-allowed-origins"].split(",")


def test_the_lock_names_what_is_installed_by_hash() -> None:
    lines = (PARTS / "requirements.txt").read_text().splitlines()
    packages = [x.split("==")[0] for x in lines if re.match(r"[a-z]", x)]
    assert {"mlflow", "psycopg2-binary", "boto3", "flask-wtf"} <= set(packages)
    blocks = "\n".join(lines).split("\n    --hash=")
    assert len(blocks) > 2 * len(packages)
    wanted = re.search(r"^mlflow\[auth\]==(\S+)$", (PARTS / "requirements.in").read_text(), re.MULTILINE)
    assert wanted is not None
    # The suite's client and the server are of one version.
    assert f'"mlflow=={wanted[1]}"' in (HOUSE / "pyproject.toml").read_text()


@pytest.mark.parametrize("s3", [False, True])
def test_compose_takes_the_files(s3: bool, tmp_path: Path) -> None:
    if shutil.which("docker-compose"):
        program = ["docker-compose"]
    elif (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        program = ["docker", "compose"]
    else:
        pytest.skip("Docker Compose is not installed")
    files = ["--file", str(COMPOSE), *(["--file", str(COMPOSE.with_name("compose.s3.yaml"))] if s3 else [])]
    environment = os.environ | {"KERNELMARK_REGISTRY_SECRETS": str(tmp_path)}
    if s3:
        environment["KERNELMARK_REGISTRY_S3"] = "s3://bucket/prefix"
    done = subprocess.run([*program, *files, "config"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = yaml.safe_load(done.stdout)["services"]["server"]
    assert (server["environment"].get("KERNELMARK_REGISTRY_ARTIFACTS") == "s3://bucket/prefix") is s3
    del environment["KERNELMARK_REGISTRY_SECRETS"]
    done = subprocess.run([*program, *files, "config"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "make registry" in done.stderr
