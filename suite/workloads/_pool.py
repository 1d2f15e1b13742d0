"""Patterns of allocation, and their replay by PyTorch's allocator in a process of its own.

The allocator's settings are read once, before CUDA is used: each is a process. A pattern is a list of events,
(number, bytes) to allocate and (number, 0) to free, in the sizes that a decoder has; nothing is computed.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

Event: TypeAlias = tuple[int, int]

PATTERNS = ("varying", "checkpointing", "generation")
SHORTEST = 128
"""Tokens of the shortest sequence."""
ELEMENT = 2
"""Bytes of bf16."""
SEQUENCES = 8
"""That are generated at a time."""
ROUNDED = 512
"""Bytes that PyTorch's allocator rounds up to."""
TIGHT = 1.05
"""Of what a pattern has allocated at its peak: the memory that there is."""
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where the settings are read from; the second until PyTorch 2.9."""


class _Numbers:
    """Events with a number for each allocation."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._next = 0

    def take(self, size: int) -> int:
        """An allocation; its number."""
        number, self._next = self._next, self._next + 1
        self.events.append((number, size))
        return number

    def give(self, number: int) -> None:
        """It is freed."""
        self.events.append((number, 0))


def events(pattern: str, S: int, D: int, L: int, N: int, seed: int) -> list[Event]:
    """A pattern for a decoder of L layers and width D: N training steps on sequences of 128 to S tokens, or N
    tokens of eight sequences that are generated. All is freed in the end.
    """
    chance = random.Random(f"{pattern}/{seed}")
    found = _Numbers()
    if pattern == "generation":
        _generation(found, chance, S, D, L, N)
    else:
        for _ in range(N):
            tokens = round(math.exp(chance.uniform(math.log(SHORTEST), math.log(S))))
            _step(found, tokens * D * ELEMENT, L, pattern == "checkpointing")
    return found.events


def _step(found: _Numbers, width: int, L: int, checkpointing: bool) -> None:
    """One training step; `width` is the bytes of one activation of the model's width."""

    def forward() -> list[int]:
        """A layer: norm, q with k and v, attention, its projection, norm, the feed-forward's wide two, the sum."""
        return [found.take(x * width) for x in (1, 3, 1, 1, 1, 4, 4, 1)]

    def backward(kept: Sequence[int]) -> None:
        """Gradients of the results in turn, two at a time, each freeing what it was of."""
        last = found.take(width)
        for place, number in enumerate(reversed(kept)):
            grad = found.take((4 if place in (1, 2) else 3 if place == 6 else 1) * width)
            found.give(last)
            found.give(number)
            last = grad
        found.give(last)

    layers: list[list[int]] = []
    for _ in range(L):
        made = forward()
        if checkpointing:  # all but what the next layer begins with
            for number in made[:-1]:
                found.give(number)
            made = made[-1:]
        layers.append(made)
    for made in reversed(layers):
        if checkpointing:
            backward(forward())
            found.give(made[0])
        else:
            backward(made)


def _generation(found: _Numbers, chance: random.Random, S: int, D: int, L: int, N: int) -> None:
    """A cache a layer and sequence, made anew one token longer at each token, as `torch.cat` makes it. A sequence
    ends by chance or with S tokens, and another begins.
    """

    def prompt() -> tuple[int, list[int]]:
        tokens = chance.randint(min(SHORTEST, S), max(SHORTEST, S // 2))
        return tokens, [found.take(2 * tokens * D * ELEMENT) for _ in range(L)]

    running = [prompt() for _ in range(SEQUENCES)]
    for _ in range(N):
        for place, (tokens, caches) in enumerate(running):
            if tokens >= S or chance.random() < 0.02:
                for number in caches:
                    found.give(number)
                running[place] = prompt()
                continue
            longer = []
            for number in caches:
                longer.append(found.take(2 * (tokens + 1) * D * ELEMENT))
                found.give(number)
            running[place] = (tokens + 1, longer)
    for _, caches in running:
        for number in caches:
            found.give(number)


def peak(pattern: Sequence[Event]) -> int:
    """Most bytes that are allocated at a time, rounded as the allocator rounds them."""
    sizes: dict[int, int] = {}
    now = most = 0
    for number, size in pattern:
        if size:
            sizes[number] = -(-size // ROUNDED) * ROUNDED
            now += sizes[number]
            most = max(most, now)
        else:
            now -= sizes.pop(number)
    return most


def replayed(asked: dict[str, Any], settings: str) -> dict[str, Any]:
    """What a process with these settings found. Raises `MemoryError` where memory ran out, `RuntimeError` where it
    ended otherwise. It has the worker's deadline, and ends with it.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **dict.fromkeys(VARIABLES, settings)}
    if not settings:
        environment = {name: x for name, x in environment.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"the process that allocates ended: {said}") from None
    if "out_of_memory" in found:
        raise MemoryError(found["out_of_memory"])
    return found


def overlapping(taken: Iterator[tuple[int, int, int]] | Sequence[tuple[int, int, int]]) -> bool:
    """Whether two allocations have memory in common: (number, address, bytes), 0 bytes to free."""
    places: list[int] = []
    ends: dict[int, int] = {}
    where: dict[int, int] = {}
    for number, address, size in taken:
        if not size:
            freed = where.pop(number)
            places.pop(bisect.bisect_left(places, freed))
            del ends[freed]
            continue
        at = bisect.bisect_right(places, address)
        if at and ends[places[at - 1]] > address:
            return True
        if at < len(places) and places[at] < address + size:
            return True
        places.insert(at, address)
        ends[address], where[number] = address + size, address
    return False


def main() -> None:
    """Replays what standard input asks for, and prints what was seen."""
    import torch

    asked = json.loads(sys.stdin.read())
    device = torch.device("cuda", asked["device"])
    torch.cuda.set_device(device)
    pattern = [tuple(x) for x in asked["events"]]
    if asked["limit"]:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, asked["limit"] / total), device)
    torch.empty(1, device=device)
    try:
        found = _replay(pattern, asked["times"], device)
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": str(error).splitlines()[0]}
    print(json.dumps(found))


def _replay(pattern: Sequence[Any], times: int, device: Any) -> dict[str, Any]:
    import torch

    milliseconds = []
    seen: list[tuple[int, int, int]] = []
    for turn in range(times + 1):
        held: dict[int, Any] = {}
        begin = time.perf_counter_ns()
        for number, size in pattern:
            if size:
                held[number] = torch.empty(size, dtype=torch.uint8, device=device)
                if turn == 0:  # checked, not timed
                    seen.append((number, held[number].data_ptr(), size))
            else:
                del held[number]
                if turn == 0:
                    seen.append((number, 0, 0))
        torch.cuda.synchronize()
        if turn:
            milliseconds.append((time.perf_counter_ns() - begin) / 1e6)
    stats = torch.cuda.memory_stats(device)
    return {
        "milliseconds": milliseconds,
        "overlapping": overlapping(seen),
        "reserved": stats["reserved_bytes.all.peak"],
        "allocated": stats["allocated_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }


if __name__ == "__main__":
    main()
