"""The program that NVIDIA's toolkit runs before a container starts, with a real engine: there, gone, broken.

An engine offers GPUs once it finds a program of this name as it starts; whether that works shows with the first
container. It is a script here, which says what the real one would say, and there is no GPU.
"""

from __future__ import annotations

import os

import pytest
from kernelmark.suite.container import gpus
from kernelmark.suite.container.engine import Engine
from kernelmark.suite.container.errors import NoDriver, NoToolkit

from ..engines import OwnEngine, missing

pytestmark = pytest.mark.image
NO_DRIVER = "nvidia-container-cli: initialization error: nvml error: driver not loaded"


def test_the_hook_of_the_toolkit(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        missing("only root can start an engine with a hook of its own")
    hook = tmp_path / "bin" / "nvidia-container-runtime-hook"
    hook.parent.mkdir()

    def is_(text: str) -> None:
        hook.write_text(text)
        hook.chmod(0o755)

    is_("#!/bin/sh\nexit 0\n")
    monkeypatch.setenv("PATH", f"{hook.parent}:{os.environ['PATH']}")
    with OwnEngine(tmp_path / "engine") as (client, address):
        engine = Engine(client, address)
        gpus.require_toolkit(engine, [0])
        is_(f"#!/bin/sh\necho '{NO_DRIVER}' >&2\nexit 1\n")
        with pytest.raises(NoDriver, match="driver not loaded"):
            gpus.require_toolkit(engine, [0])
        is_("#!/bin/sh\nkill -9 $$\n")
        with pytest.raises(NoToolkit, match="error running hook"):
            gpus.require_toolkit(engine, [0])
        is_("#!/no/such/interpreter\n")
        with pytest.raises(NoToolkit, match=r"hook.*nvidia-container-runtime-hook"):
            gpus.require_toolkit(engine, [0])
        hook.unlink()
        with pytest.raises(NoToolkit, match="install the NVIDIA Container Toolkit"):
            gpus.require_toolkit(engine, [0])
        assert client.containers.list(all=True) == []
