"""The Python interface: what the command line does, for those who script.

    from kernelmark.suite.api import Runner

    def mine(case):                     # a factory, as in baselines/: from a case to a callable
        import torch
        return lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    runner = Runner("rms_norm")
    runner.add("mine", mine)
    records = runner.run(axes={"B": 4, "S": 2048, "D": 4096}, dtype="bf16", replicates=1)
    for row in runner.rows():
        print(row.implementation, row.value(), row.speedup_vs_best_baseline)

Implementations that are objects of this process cannot travel to a worker, so a `Runner` measures here, in
one process, by the same stages, timers and correctness gate. Between-process variation is then not seen:
for a number to publish, put the file in a folder of `KERNELMARK_PATH` and use the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..registry.analysis.rows import rows
from ..registry.errors import InputError
from ..registry.store.journal import Journal
from ..registry.store.record import SCHEMA_VERSION, Cache, Case, Ceiling, Header, Pass, Record
from ..registry.views.frame import Rows
from . import __version__
from .catalog import Catalog, Factory, Implementation
from .definition import Option
from .measure.device import Cpu, Cuda, Device
from .measure.stopping import Sampling
from .memory import MemoryProfiler
from .plan import Cell
from .run import fingerprint, worker
from .run.supervisor import new_run

__all__ = ["MemoryProfiler", "Runner", "compare"]

PROVIDER = "script"
"""The provider of implementations that a script adds: a baseline like any other."""


@dataclass
class Runner:
    """Measures one operator, all its implementations that can run here and those that are added.

    `device` is "cuda" or "cpu", by default the best one here; `only` names implementations to keep.
    """

    operator: str
    device: Literal["cuda", "cpu"] | None = None
    only: Sequence[str] = ()
    sampling: Sampling = field(default_factory=Sampling)
    records: list[Record] = field(default_factory=list, init=False)
    ceilings: list[Ceiling] = field(default_factory=list, init=False)
    _added: dict[str, Implementation] = field(default_factory=dict, init=False)
    _catalog: Catalog = field(default_factory=Catalog.default, init=False)
    _device: Device | None = field(default=None, init=False)

    def add(self, name: str, factory: Factory, provider: str = PROVIDER) -> None:
        """Adds an implementation: `factory(case)` returns what is called with the operator's inputs.

        Raises `InputError` if the name is taken.
        """
        if name in self._added or any(x.name == name for x in self._catalog.of_operator(self.operator)):
            raise InputError(f"{self.operator} has an implementation named {name!r} already.")
        self._added[name] = Implementation(
            self.operator, name, provider, (), "core", ("cuda", "cpu"), lambda: factory
        )

    def run(
        self,
        axes: Mapping[str, int],
        dtype: str = "bf16",
        pass_: Pass = "forward",
        options: Mapping[str, Option] | None = None,
        cache: Cache = "cold",
        replicates: int = 1,
        seed: int = 0,
    ) -> tuple[Record, ...]:
        """Measures one case and returns its records; they also add up for `rows()`.

        Raises `InputError` for an unknown axis, option, dtype or pass. An implementation that fails is a
        record with a status, not an exception.
        """
        case = self._catalog.operator(self.operator).case(axes, dtype, pass_, **(options or {}))
        device = self._open()
        new = [
            record
            for replicate in range(replicates)
            for record in self._replicate(device, case, cache, replicate, seed)
        ]
        self.records += new
        return tuple(new)

    def rows(self) -> Rows:
        """Everything measured so far, replicates taken together, with speedups and fractions of the limit.

        A tuple of rows, which a notebook shows as a table; `rows().frame()` is a pandas data frame.
        """
        return Rows(rows(self.journal()))

    def journal(self) -> Journal:
        """Everything measured so far as a journal, for `kernelmark.registry`."""
        device = self._open()
        conditions = fingerprint.conditions(device.kind, fingerprint.torch_facts(device.kind))
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=new_run(),
            created="",
            harness=__version__,
            commit=None,
            dirty=False,
            plan="script",
            seed=0,
            replicates=1 + max((x.replicate for x in self.records), default=0),
            device=device.kind,
            key=fingerprint.key(conditions),
            conditions=conditions,
            environment={},
            metrics=self._catalog.operator(self.operator).metrics,
        )
        return Journal(header, tuple(self.records), tuple(self.ceilings))

    def _open(self) -> Device:
        if self._device is None:
            from .measure import limits

            kind = self.device or ("cuda" if fingerprint.has_gpu() else "cpu")
            self._device = Cuda.open() if kind == "cuda" else Cpu.open()
            with self._device.using():
                self.ceilings += limits.measure(self._device, 0)
        return self._device

    def _replicate(self, device: Device, case: Case, cache: Cache, replicate: int, seed: int) -> list[Record]:
        here = [*self._catalog.of_operator(self.operator), *self._added.values()]
        chosen = [x for x in here if not self.only or x.name in self.only or x.name in self._added]
        able = [x for x in chosen if x.unavailable(device.kind) is None]
        task = worker.Task(
            device=device.kind,
            seed=seed,
            replicate=replicate,
            cells=tuple(worker.TaskCell(i, case, x.name, cache) for i, x in enumerate(able)),
            sampling=self.sampling,
            ceilings=False,
        )
        results: list[worker.Result] = []

        def keep(message: worker.Message) -> None:
            if isinstance(message, worker.Result):
                results.append(message)

        worker.work(task, keep, device, {}, _With(self._catalog.roots, (), self._added))
        return [
            Cell(case, able[x.index], cache).record(
                replicate, x.index, x.status, x.reason, x.measurement, x.spent_s
            )
            for x in results
        ]


@dataclass(frozen=True)
class _With(Catalog):
    """A catalog and the implementations that a script added."""

    added: Mapping[str, Implementation] = field(default_factory=dict)

    def of_operator(self, operator: str) -> tuple[Implementation, ...]:
        return (*super().of_operator(operator), *(x for x in self.added.values() if x.operator == operator))


def compare(
    operator: str,
    implementations: Mapping[str, Factory],
    axes: Mapping[str, int],
    dtype: str = "bf16",
    **how: Any,
) -> tuple[Record, ...]:
    """Measures the given implementations and the catalog's own on one configuration.

    `how` goes to `Runner.run`: `pass_`, `options`, `cache`, `replicates`, `seed`.
    """
    runner = Runner(operator)
    for name, factory in implementations.items():
        runner.add(name, factory)
    return runner.run(axes, dtype, **how)
