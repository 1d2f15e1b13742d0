"""What cells are likely to take: the one estimate of budgets, dry runs and shards. Pure but for `known`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from statistics import median
from typing import TypeAlias

from ..registry.store.home import Home
from ..registry.store.journal import read, read_header
from ..registry.store.record import Case, Key, Record
from .measure.stopping import Sampling
from .plan import Cell

CHECK_S = 0.5
"""Laying inputs out and checking an answer, where nothing is known of a cell."""
GPU_S = 1.5
"""What a row takes more on a GPU, where nothing is known of it: kernels are compiled and tuned. The 391 rows of
run `shapes-h200` took 2 s each to be built and checked.
"""
ENERGY_S = 1.2
"""What the energy of a row's call takes there, where it is measured."""
BYTES_PER_S = 2e9
FLOPS_PER_S = 2e13
"""What making a case's inputs and its reference gets through, roughly: in fp64, by plain calls, on a GPU. On an
H200 the answer for attention of 131,072 tokens, of which a part is checked, took a second.
"""
PROGRAM_ANSWER_FLOPS_PER_S = 5e12
"""The same of a program's: several steps in fp32, layers computed again. On an H200 the answer for a step of 3.2 B
parameters and 16,384 tokens took 56 s.
"""
LONGEST_ANSWER_S = 120.0
"""What is large is checked in part: a program by its first steps or layers, attention by some of its rows."""
PROGRAM_FLOPS_PER_S = 2e14
"""A program runs once at least, however long sampling may take: a training of 1,000 steps is one sample."""
LOOKED_AT = 3
"""Newest runs of the device with any of the operators that are read for what cells took."""

Cost: TypeAlias = Callable[[Iterable[Cell]], float]
"""What cells are likely to take together in one replicate, in seconds. Those of a case share its inputs."""


def estimate(
    sampling: Sampling, records: Collection[Record] = (), device: str | None = None, here: bool = True
) -> Cost:
    """What a cell took before, else what its like did, else the limits of sampling.

    What cannot run on `device` takes nothing; of a device that is not `here`, what is installed is not known.
    Without one, and without records, the estimate rests on the plan alone and is the same on every machine.
    """
    on_gpu = 0.0 if device in (None, "cpu") else GPU_S + (ENERGY_S if sampling.energy != "never" else 0.0)
    by_key: dict[Key, list[float]] = {}
    by_implementation: dict[tuple[str, str], list[float]] = {}
    for record in records:
        seconds = sum(record.spent_s.values())
        if seconds > 0:
            by_key.setdefault(record.identity, []).append(seconds)
            if record.status == "ok":  # what fails at once says nothing of others
                by_implementation.setdefault((record.case.operator, record.implementation), []).append(seconds)

    def cost(cells: Iterable[Cell]) -> float:
        total = 0.0
        guessed: dict[str, Case] = {}
        for cell in cells:
            if device is not None and cell.implementation.unavailable(device, here) is not None:
                continue
            # What follows a clock takes what its own case does, and not what another case's clock said.
            kind = cell.case.operator, cell.implementation.name
            like = None if cell.lasts_s else by_implementation.get(kind)
            seen = by_key.get(cell.identity, like)
            if seen is None:
                guessed[cell.case.full_name] = cell.case
                once = max(_once_s(cell.case), cell.lasts_s)
                seen = [sampling.warmup_s + max(sampling.max_seconds, once) + CHECK_S + on_gpu]
            total += median(seen)
        return total + sum(map(_answer_s, guessed.values()))

    return cost


def _once_s(case: Case) -> float:
    """What running a program once takes; of a call next to nothing."""
    return case.flops / PROGRAM_FLOPS_PER_S if case.pass_ == "program" else 0.0


def _answer_s(case: Case) -> float:
    flops_per_s = PROGRAM_ANSWER_FLOPS_PER_S if case.pass_ == "program" else FLOPS_PER_S
    return min(case.bytes / BYTES_PER_S + case.flops / flops_per_s, LONGEST_ANSWER_S)


def known(home: Home, device: str, operators: Collection[str]) -> list[Record]:
    """The records of the newest runs of a device that are here and asked for any of the operators."""
    out: list[Record] = []
    looked_at = 0
    for path in reversed(home.paths().values()):
        header = read_header(path)
        if header is None or header.device != device:
            continue
        if not {x.operator for x in header.request.cases}.isdisjoint(operators):
            out += read(path).records
            looked_at += 1
        if looked_at == LOOKED_AT:
            break
    return out
