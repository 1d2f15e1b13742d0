"""Shards side by side on the GPUs of this host, one each: `kernelmark run --parallel`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from ...registry.store.home import Home
from ..run.fingerprint import PARALLEL
from .order import FILE, Order, folder_of


class ThisHost:
    """A process a shard, which measures in `home` itself, so that it goes on where it was interrupted.

    `places` are the GPUs' numbers, one a shard; with `any_board` a shard goes on on another board too.

    On a CPU places are only there to tell shards apart by, and all share its cores.
    """

    def __init__(self, order: Order, home: Home, places: Sequence[int], any_board: bool = False) -> None:
        self.order = order
        self.folder = folder_of(home, order.run)
        self._home = home.folder
        self._places = places
        self._over = ["--any-board"] if any_board else []
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def submit(self, shards: Sequence[int]) -> None:
        for shard in shards:
            environment = {
                **os.environ,
                PARALLEL: str(self.order.shards),
                "PYTHONSAFEPATH": "1",  # no module of the folder that the user is in
                # Numbers as nvidia-smi gives them, which is what the user and NVML count by.
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": str(self._places[shard - 1]),
            }
            where = [str(self.folder / FILE), "--shard", str(shard), "--into", str(self.folder / "deliveries")]
            home = ["--home", str(self._home.resolve()), *self._over]
            self._running[shard] = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.task", *where, "--tied", *home],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def held(self) -> dict[int, str]:
        return {x: "running" for x, process in self._running.items() if process.poll() is None}

    def said(self, shard: int) -> str:
        return ""  # its errors went where ours go

    def cancel(self) -> None:
        for process in self._running.values():
            assert process.stdin is not None
            process.stdin.close()  # which a task takes for our end
        for process in self._running.values():
            process.wait()
