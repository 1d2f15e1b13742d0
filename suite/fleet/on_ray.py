"""Shards as tasks of a Ray cluster. Ray starts `task.py` as a process and brings back what it delivered.

A task's resources are always of one host. They are held by a placement group, whose state says whether a shard
waits or runs, which Ray's tasks do not tell. GPUs are logical to Ray: other processes on one are not its business.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...registry.errors import InputError, last_line
from .engine import EngineError
from .order import FILE, Order

EXCLUSIVE = "host_exclusive"
"""The resource that hosts declare one of, so that a shard can have its host to itself."""
RETRIES = 3
"""How often Ray starts a task again by itself whose host died."""


def deliver(order: bytes, shard: int) -> dict[str, bytes]:
    """What Ray runs on a host: a task in a process of its own, tied to this one's life."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    names = {x["NodeID"]: x.get("NodeName") or x["NodeManagerHostname"] for x in ray.nodes()}
    with tempfile.TemporaryDirectory(prefix="kernelmark-") as folder:
        path = Path(folder, FILE)
        path.write_bytes(order)
        words = [str(path), "--shard", str(shard), "--into", f"{folder}/out", "--node", names.get(own, own)]
        with subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.task", *words, "--tied"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        ) as process:
            assert process.stderr is not None
            said = process.stderr.read()[-2000:]
            code = process.wait()
        if code:
            raise RuntimeError(f"the task ended with exit code {code}: {said.decode(errors='replace')}")
        (out,) = Path(folder, "out").iterdir()
        return {"name": out.name.encode(), **{x.name: x.read_bytes() for x in out.iterdir()}}


def bundle(order: Order) -> dict[str, float]:
    """What a shard needs of one host."""
    needs = {"CPU": 1.0}
    if order.gpus:
        needs["GPU"] = float(order.gpus)
    if order.exclusive:
        needs[EXCLUSIVE] = 1.0
    for word in order.options:
        name, _, amount = word.partition("=")
        try:
            needs[name] = float(amount)
        except ValueError:
            raise InputError(
                f"--option {word!r}: for Ray, a resource and how much of it: accelerator_type:H200=0.001"
            ) from None
    return needs


class Ray:
    """The tasks of one driver: they end with it, and whoever drives next asks for what is missing."""

    def __init__(self, order: Order, folder: Path) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise EngineError("Ray is not installed here: pip install 'kernelmark[fleet]'") from None
        self.order, self.folder, self._needs = order, folder, bundle(order)
        self._ray: Any = ray
        self._tasks: dict[Any, tuple[int, Any]] = {}
        self._said: dict[int, str] = {}
        try:
            if not ray.is_initialized():
                ray.init(address=order.address or "auto", log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"no Ray cluster answers: {error}. Start one (`ray start --head`) and name it with --address."
            ) from None
        self._fits()

    def _fits(self) -> None:
        """Raises `EngineError` for what no host of the cluster has: Ray itself would wait for it for ever."""
        hosts = [x["Resources"] for x in self._ray.nodes() if x["Alive"]]
        if any(all(host.get(name, 0) >= much for name, much in self._needs.items()) for host in hosts):
            return
        wanted = ", ".join(f"{much:g} {name}" for name, much in self._needs.items())
        hint = (
            f" A host declares that it can be had alone: ray start --resources '{{\"{EXCLUSIVE}\": 1}}'; "
            "--shared does without."
            if not any(EXCLUSIVE in x for x in hosts) and self.order.exclusive
            else ""
        )
        raise EngineError(f"none of the cluster's {len(hosts)} hosts has what a shard needs: {wanted}.{hint}")

    def submit(self, shards: Sequence[int]) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        text = msgspec.json.encode(self.order)
        for shard in shards:
            group = placement_group([self._needs], strategy="STRICT_PACK")
            task = self._ray.remote(deliver).options(
                num_cpus=self._needs["CPU"],
                num_gpus=self._needs.get("GPU", 0),
                max_retries=RETRIES,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
                name=f"kernelmark {self.order.run} {shard}/{self.order.shards}",
            )
            self._tasks[task.remote(text, shard)] = (shard, group)

    def held(self) -> dict[int, str]:
        if self._tasks:
            ended, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
            for task in ended:
                self._end(task)
        return {shard: self._standing(group) for shard, group in self._tasks.values()}

    def _standing(self, group: Any) -> str:
        state = self._ray.util.placement_group_table(group).get("state", "")
        return "running" if state == "CREATED" else "waiting for a host"

    def _end(self, task: Any) -> None:
        """Lays down what a task brought; one that failed brought nothing and is asked for again."""
        shard, group = self._tasks.pop(task)
        try:
            brought = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            brought, self._said[shard] = None, last_line(str(error))
        self._ray.util.remove_placement_group(group)
        if brought is not None:
            name = brought.pop("name").decode()
            hidden = self.folder / "deliveries" / f".{name}"
            hidden.mkdir(parents=True)
            for file, data in brought.items():
                (hidden / file).write_bytes(data)
            hidden.rename(hidden.with_name(name))

    def said(self, shard: int) -> str:
        return self._said.get(shard, "")

    def cancel(self) -> None:
        for task, (_, group) in self._tasks.items():
            self._ray.cancel(task, force=True)
            self._ray.util.remove_placement_group(group)
        self._tasks.clear()
