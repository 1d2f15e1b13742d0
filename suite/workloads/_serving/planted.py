"""A backend without a model: answers that take known times and have known faults, to hold clients and scores to.

It serves so many requests at a time, first come first served, and notes when each came, began and ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from .messages import Planted
from .protocol import Refused, Wanted


class Cut(Exception):
    """The connection is to be cut."""


@dataclass
class Service:
    """What became of one request, ns of the monotonic clock."""

    number: str
    came: int
    began: int = 0
    ended: int = 0


@dataclass
class PlantedBackend:
    """Serves by a plan of times and faults."""

    plan: Planted
    services: list[Service] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.plan.concurrency)

    async def open(self, wanted: Wanted, number: str) -> PlantedTokens:
        """Takes a request; waits until it is its turn. Raises `Refused` where that is planted."""
        faults = self.plan.faults
        fault = faults[len(self.services) % len(faults)] if faults else ""
        service = Service(number, time.monotonic_ns())
        self.services.append(service)
        if fault in ("429", "500"):
            service.began = service.ended = time.monotonic_ns()
            raise Refused(int(fault), "planted")
        await self._places.acquire()
        service.began = time.monotonic_ns()
        return PlantedTokens(self.plan, wanted, fault, service, self._places)

    async def stop(self) -> None:
        """Nothing runs on."""


@dataclass
class PlantedTokens:
    """The tokens of one request: its own prompt's, over and over."""

    plan: Planted
    wanted: Wanted
    fault: str
    service: Service
    places: asyncio.Semaphore
    made: int = 0

    @property
    def counted(self) -> bool:
        """Whether the answer says how many tokens it has."""
        return self.fault != "no usage"

    async def next(self) -> tuple[list[int], str | None]:
        """The next tokens after their time."""
        size = min(4 if self.fault == "merged" else 1, self.wanted.output - self.made)
        wait = self.plan.token_ms * size if self.made else self.plan.first_ms
        half = self.wanted.output // 2
        if self.fault in ("stall", "cut") and self.made <= half < self.made + size:
            if self.fault == "cut":
                raise Cut
            wait += self.plan.stall_ms
        if self.fault == "hang" and self.made:
            await asyncio.Event().wait()
        if wait:
            await asyncio.sleep(wait / 1e3)
        prompt = self.wanted.prompt
        tokens = [prompt[(self.made + i) % len(prompt)] for i in range(size)]
        self.made += size
        return tokens, "length" if self.made == self.wanted.output else None

    def close(self) -> None:
        """The next request's turn."""
        if not self.service.ended:
            self.service.ended = time.monotonic_ns()
            self.places.release()
