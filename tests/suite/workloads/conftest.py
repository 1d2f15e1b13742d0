"""A tiny case of training on the CPU, its answer computed once, and systems to be checked against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pytest
import torch
from kernelmark.registry.store.record import Measurement
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._trainer import PartsTrainer

SAMPLING = Sampling(min_samples=4, max_samples=4, min_seconds=0, max_seconds=60, warmup_s=0)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products take longer to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return train.catalog()


class Bench:
    """One case in one process."""

    def __init__(
        self, catalog: Catalog, model: str, dtype: str = "fp32", A: int = 1, **options: str | float
    ) -> None:
        self.catalog = catalog
        axes = {"B": 2, "S": 32, "A": A}
        self.case = train.WORKLOAD.case(axes, dtype, "program", model=model, **options)
        self.session = Session(Cpu(), 11, 0, SAMPLING, Stages())

    @cached_property
    def prepared(self) -> train.Prepared:
        """The answer."""
        return train.prepared(self.case, self.session)

    def trainer(self, kind: type[PartsTrainer] = PartsTrainer, system: System | None = None) -> PartsTrainer:
        assembly = Assembly(system or System("torch"), self.catalog)
        return kind(train.read(self.case), assembly)

    def measure(self, trainer: PartsTrainer) -> Measurement:
        return train.measure(self.case, trainer, self.session, self.prepared)


@pytest.fixture(scope="session")
def bench(catalog: Catalog) -> Callable[..., Bench]:
    made: dict[tuple[object, ...], Bench] = {}

    def make(model: str = "llama-tiny", **fields: object) -> Bench:
        key = (model, *sorted(fields.items()))
        if key not in made:
            made[key] = Bench(catalog, model, **fields)  # type: ignore[arg-type]  # as the tests give them
        return made[key]

    return make


class Played:
    """A CUDA graph as a CPU can play it: fixed inputs and outputs, the call made again at each replay."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.out = call, call()

    def replay(self) -> None:
        again = self._call()
        held, made = ((x,) if isinstance(x, torch.Tensor) else x for x in (self.out, again))
        for x, new in zip(held, made, strict=True):
            x.copy_(new)


@pytest.fixture
def played_graphs() -> Callable[..., list[tuple[Played, Any]]]:
    """What takes the place of `captured`."""

    def played(
        device: torch.device, *calls: Callable[[], Any], forget: Callable[[], None] | None = None
    ) -> list[tuple[Played, Any]]:
        for call in calls:
            call()  # as the runs before a capture
        if forget is not None:
            forget()
        graphs = [Played(call) for call in calls]
        return [(x, x.out) for x in graphs]

    return played
