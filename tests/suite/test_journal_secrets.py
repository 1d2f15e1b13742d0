"""A journal travels: to the registry, to colleagues, into issues. So nothing private may stand in it."""

from __future__ import annotations

import getpass
import json
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


ENDPOINT = '''
"""Endpoints that need no SDK, ask with the keys that a user has, and say them wherever an SDK could."""
import http.client
import json
import os

REQUIRES = ()
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class Telling(Exception):
    status_code = 429

    def __init__(self):
        super().__init__(" ".join(os.environ[x] for x in KEYS))


class Asks:
    local, needs = True, ()

    def connect(self, url, timeout_s):
        self.where = url.removeprefix("http://")

    def close(self):
        pass

    def ask(self, model, prompt, output):
        if "#3 " in prompt:
            raise Telling() from Telling()
        headers = {"authorization": f"Bearer {os.environ[KEYS[0]]}", "x-api-key": os.environ[KEYS[1]]}
        connection = http.client.HTTPConnection(self.where, timeout=10)
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        yield {"headers": {"x-sent": str(headers), "x-ratelimit-remaining-requests": os.environ[KEYS[2]]}}
        for line in answer:
            if b'"content": "w' in line:
                yield {"text": json.loads(line[6:])["choices"][0]["delta"]["content"]}
        yield {"usage": {"output": 6, "prompt": 20}, "model": "fake-1", "end": True}
        connection.close()


class Refuses(Asks):
    def connect(self, url, timeout_s):
        raise Telling() from Telling()


class Leaves(Asks):
    def close(self):
        raise Telling()


IMPLEMENTATIONS = {
    "endpoint": {f"fake_{x.__name__.lower()}": (lambda case, x=x: x()) for x in (Asks, Refuses, Leaves)}
}
'''
ASKED = """
replicates = 1
deadline_s = 60
[[cases]]
operator = "endpoint"
axes = { users = 2, requests = 6, words = 4, output = 6 }
dtype = "unstated"
pass = "program"
"""


def test_an_endpoint_s_keys_go_nowhere(program, root: Path, secrets: dict[str, str], tmp_path: Path) -> None:
    """A run of endpoints whose errors tell the keys, and what is made of its journal. It has no trace:
    `profile` needs a workload of steps.
    """
    for name in ("OPENAI_API_KEY", "AWS_SESSION_TOKEN"):
        program.environment[name] = secrets[name] = f"sk-canary-{os.urandom(8).hex()}"
    (root / "baselines" / "fake.py").write_text(ENDPOINT)
    plan = tmp_path / "asked.toml"
    plan.write_text(ASKED)
    chosen = ("fake_asks", "fake_refuses", "fake_leaves", "fake_openai_chat", "openai_chat")
    asked = [word for name in chosen for word in ("--implementation", name)]
    said = {"run": program.run("run", "--plan", str(plan), "--no-report", *asked)}
    journal = program.journal()
    records = [x for x in map(json.loads, journal.read_text().splitlines()) if x["kind"] == "record"]
    ended = {x["implementation"]: (x["provider"], x["status"], x["reason"]) for x in records}
    assert ended["fake_asks"] == ("fake", "ok", None)
    assert ended["fake_refuses"] == ("fake", "error", "build: RuntimeError: no client of this endpoint: Telling")
    assert ended["fake_leaves"][1] == "ok"  # what it measured is measured
    assert ended["openai_chat"][1] in ("unsupported", "unavailable")
    made = tmp_path / "made"
    made.mkdir()
    for name, *rest in (
        ("report", "latest", "--output", str(made / "report.html")),
        ("site", "--output", str(made / "site")),
    ):
        said[name] = program.run(name, *rest)
    assert (said["report"][0], said["site"][0]) == (0, 0), said
    written = {x: x.read_bytes() for x in (*program.home.rglob("*"), *made.rglob("*")) if x.is_file()}
    # The scan sees what it looks for: the row and its remark of the error stand in what was written.
    assert b"http 429" in written[journal]
    assert b"fake_asks" in written[made / "report.html"]
    told = {**written, **{f"what {name} said": f"{out}{err}".encode() for name, (_, out, err) in said.items()}}
    for place, text in told.items():
        found = [where for where, secret in secrets.items() if secret.encode() in text]
        assert not found, f"{place}: {found}"
