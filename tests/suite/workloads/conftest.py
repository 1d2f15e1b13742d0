"""A tiny case of training on the CPU, its answer computed once, and systems to be checked against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

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
