"""The seam to what brings shards to hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...registry.errors import KernelmarkError
from .order import Order


class EngineError(KernelmarkError):
    """The engine is not there, or refuses."""

    exit_code = 5


class Engine(Protocol):
    """Something that starts tasks on hosts, knows which it has, and can end them."""

    def submit(self, shards: Sequence[int]) -> None:
        """Asks for these shards, each once; what the engine starts again by itself is its business."""

    def held(self) -> dict[int, str]:
        """The shards that it still has, waiting or under way, each with a word on how it stands.

        What has ended is delivered by then, or is lost and to be asked for again.
        """

    def said(self, shard: int) -> str:
        """What the last task of a shard said that brought nothing, for a message; "" where nobody knows."""

    def cancel(self) -> None:
        """Ends all of this order's tasks."""


def engine_of(order: Order, folder: Path) -> Engine:
    """The engine of an order, which delivers below `folder`. Raises `EngineError` where it is not there."""
    if order.engine == "ray":
        from .on_ray import Ray

        return Ray(order, folder)
    if order.engine == "slurm":
        from .on_slurm import Slurm

        return Slurm(order, folder)
    raise EngineError(f"run {order.run} is one of {order.engine}, which has no engine to ask")
