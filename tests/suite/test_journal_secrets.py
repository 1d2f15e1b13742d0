"""A journal travels: to the registry, to colleagues, into issues. So nothing private may stand in it."""

from __future__ import annotations

import getpass
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

# Names that the fingerprint's prefixes would let through, names of services, and names nobody thought of.
NAMES = (
    "ANTHROPIC_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "CI_JOB_TOKEN",
    "CUDA_API_KEY",
    "DATABASE_URL",
    "GITHUB_TOKEN",
    "GIT_ASKPASS",
    "HF_TOKEN",
    "HOSTNAME",
    "KERNELMARK_REGISTRY_ADMIN_PASSWORD",
    "LOGNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "NVIDIA_LICENSE_TOKEN",
    "OMP_SECRET",
    "PGPASSWORD",
    "PIP_INDEX_URL",
    "PYTORCH_PASSWORD",
    "SSH_AUTH_SOCK",
    "SUDO_USER",
    "TRITON_AUTH",
    "TRITON_CREDENTIALS",
    "TRITON_PRIVATE_KEY",
    "USER",
    "no_proxy",
)
ALLOWED = "OMP_PROC_BIND"


@pytest.fixture
def secrets(program, tmp_path: Path, make_repository) -> dict[str, str]:
    """Puts secrets wherever a run might look; returns them by where they are."""
    planted = {name: f"canary-{i:02}-{os.urandom(8).hex()}" for i, name in enumerate(NAMES)}
    program.environment.update(planted)
    program.environment[ALLOWED] = "spread"
    # A remote with credentials, and an author, in the repository that the run is started from.
    repository = make_repository("work")
    planted["git remote"], planted["git author"] = "canary-remote", "canary-author"
    repository.git("remote", "add", "origin", f"https://somebody:{planted['git remote']}@example.org/x.git")
    repository.git("config", "user.name", planted["git author"])
    planted["URI"] = "canary-uri-password"
    program.environment["MLFLOW_TRACKING_URI"] = f"http://somebody:{planted['URI']}@127.0.0.1:9"
    planted["home"] = "canary-home"
    home = tmp_path / planted["home"]
    (home / ".mlflow").mkdir(parents=True)
    (home / ".mlflow" / "credentials").write_text("[mlflow]\nmlflow_tracking_password = canary-file\n")
    planted["credentials file"] = "canary-file"
    program.environment["HOME"] = str(home)
    return planted


def test_a_run_writes_down_nothing_private(program, secrets: dict[str, str], plan_file, tmp_path: Path) -> None:
    code, out, err = program.run("run", "--plan", str(plan_file([16], deadline_s=5)), "--no-report")
    assert code == 0, err
    journal = program.journal().read_text()
    # The scan looks at a journal that did record the environment, and would see what it looks for.
    assert f'"env/{ALLOWED}":"spread"' in journal
    written = {x: x.read_text(errors="replace") for x in program.home.rglob("*") if x.is_file()}
    assert program.journal() in written
    for place, text in {**written, "stdout": out, "stderr": err}.items():
        found = [where for where, secret in secrets.items() if secret in text]
        assert not found, f"{place}: {found}"
    assert not re.search(r"canary", journal)
    # Nor the user, the machine or a folder of it.
    for folder in (tmp_path, Path.home(), Path.cwd()):
        assert str(folder) == "/" or f"{folder}/" not in journal
        assert str(folder) == "/" or f'{folder}"' not in journal
    # As words: a user named root may well be part of another one.
    words = set(re.split(r"[^A-Za-z0-9_.-]+", journal))
    assert not words & {getpass.getuser(), socket.gethostname(), socket.getfqdn()}
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    assert not words & set(addresses)
