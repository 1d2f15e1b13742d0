"""Shards side by side on the GPUs of this host, one each: `kernelmark run --parallel`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..run.fingerprint import PARALLEL
from .order import FILE, Order


class ThisHost:
    """A process a shard. Order and deliveries are below `folder`; `order.options` are the GPUs' numbers.

    On a CPU these are only places to be told apart by, and all shards share its cores.
    """

    def __init__(self, order: Order, folder: Path) -> None:
        self.order = order
        self.folder = folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def submit(self, shards: Sequence[int]) -> None:
        for shard in shards:
            environment = {
                **os.environ,
                PARALLEL: str(self.order.shards),
                # Numbers as nvidia-smi gives them, which is what the user and NVML count by.
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": self.order.options[shard - 1],
            }
            where = [str(self.folder / FILE), "--shard", str(shard), "--into", str(self.folder / "deliveries")]
            self._running[shard] = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.task", *where, "--tied"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def held(self) -> dict[int, str]:
        return {x: "running" for x, process in self._running.items() if process.poll() is None}

    def cancel(self) -> None:
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.close()  # which a task takes for our end
        for process in self._running.values():
            process.wait()
