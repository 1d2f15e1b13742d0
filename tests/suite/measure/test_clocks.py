"""Locked clocks are believed when they are seen."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kernelmark.suite.measure import clocks

SCRIPT = Path(__file__).resolve().parents[3] / "docker" / "lock-clocks"


@pytest.mark.parametrize(
    ("claim", "seen", "policy"),
    [
        ("1410", [1410, 1410], "locked at 1410 MHz"),
        ("1417", [1410, 1425], "locked at 1417 MHz"),  # the nearest step holds
        ("1410,2619", [1410], "locked at 1410 MHz"),
        ("1410", [1410, 1980], "unlocked"),
        ("1980", [1980, 1755], "unlocked"),  # the power cap took it away
        ("1410", [], "unlocked"),  # nobody could look
        (None, [1410], "unlocked"),
        ("", [1410], "unlocked"),
        ("yes", [1410], "unlocked"),
    ],
)
def test_policy(claim, seen, policy):
    assert clocks.policy(claim, seen) == policy


def test_without_a_claim_nothing_is_looked_at(monkeypatch):
    monkeypatch.delenv("KERNELMARK_CLOCKS", raising=False)
    monkeypatch.setattr(clocks, "under_load", lambda: pytest.fail("looked"))
    assert clocks.checked() == "unlocked"
    monkeypatch.setenv("KERNELMARK_CLOCKS", "1410")
    monkeypatch.setattr(clocks, "under_load", lambda: [1410])
    assert clocks.checked() == "locked at 1410 MHz"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An `nvidia-smi` that notes what it is asked."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "asked"


def lock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_the_hosts_helper(smi):
    done = lock("1410", "1", "2619")
    assert (done.returncode, done.stdout) == (0, "export KERNELMARK_CLOCKS=1410\n")
    assert smi.read_text().splitlines() == [
        "--id=1 --persistence-mode=1",
        "--id=1 --lock-gpu-clocks=1410,1410",
        "--id=1 --lock-memory-clocks=2619,2619",
    ]
    smi.unlink()
    assert lock("--release").returncode == 0
    assert smi.read_text().splitlines() == ["--id=0 --reset-gpu-clocks", "--id=0 --reset-memory-clocks"]


@pytest.mark.parametrize("arguments", [(), ("fast",), ("14.5",)])
def test_its_wrong_usage(smi, arguments):
    done = lock(*arguments)
    assert done.returncode == 2
    assert "sudo docker/lock-clocks MHZ" in done.stderr
    assert not smi.exists()
