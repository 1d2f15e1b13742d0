"""The Python interface: what the command line does, for those who script.

    from kernelmark.suite.api import Runner

    def mine(case):                     # a factory, as in baselines/: from a case to a callable
        import torch
        return lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    runner = Runner("rms_norm")
    runner.add("mine", mine, provider="kernelmark")     # ours; without it one more baseline to beat
    records = runner.run(axes={"B": 4, "S": 2048, "D": 4096}, dtype="bf16", replicates=1)
    for row in runner.rows():
        print(row.implementation, row.value(), row.speedup_vs_best_baseline)
    print(runner.summary())             # mine: 1.93x speedup, +93% throughput; mean 1.93x, median …

Implementations that are objects of this process cannot travel to a worker, so a `Runner` measures here, in
one process, by the same stages, timers and correctness gate. Between-process variation is then not seen:
for a number to publish, put the file in a folder of `KERNELMARK_PATH` and use the command line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from ..registry.analysis.rows import DERIVED, Row, rows
from ..registry.analysis.speedups import memory_per_sample, over, samples_per_s, sentence
from ..registry.errors import InputError, unknown
from ..registry.figures import counted
from ..registry.store.journal import Journal
from ..registry.store.record import SCHEMA_VERSION, Cache, Case, Ceiling, DeviceKind, Header, Pass, Record
from ..registry.views.frame import Rows
from . import __version__
from .catalog import Catalog
from .definition import Option
from .implementation import Factory, Implementation
from .measure.device import Device, opened
from .measure.stopping import Sampling
from .memory import MemoryProfiler
from .plan import Cell
from .run import fingerprint, messages, worker
from .run.listener import Listener
from .run.progress import watched
from .run.supervisor import new_run

__all__ = [
    "BaselineConfig",
    "MemoryProfiler",
    "Runner",
    "compare",
    "compare_implementations",
    "run_benchmark",
]

PROVIDER = "script"
"""The provider of implementations that a script adds: a baseline like any other."""


@dataclass
class Runner:
    """Measures one operator, all its implementations that can run here and those that are added.

    `device` is "cuda" or "cpu", by default the best one here; `only` names implementations to keep. How far it is
    is shown in a notebook and on a terminal; `progress` True shows it anywhere, False nowhere.
    """

    operator: str
    device: DeviceKind | None = None
    only: Sequence[str] = ()
    sampling: Sampling = field(default_factory=Sampling)
    progress: bool | None = None
    records: list[Record] = field(default_factory=list, init=False)
    ceilings: list[Ceiling] = field(default_factory=list, init=False)
    _added: dict[str, Implementation] = field(default_factory=dict, init=False)
    _catalog: Catalog = field(default_factory=Catalog.default, init=False)
    _device: Device | None = field(default=None, init=False)

    def add(self, name: str, factory: Factory, provider: str = PROVIDER) -> None:
        """Adds an implementation: `factory(case)` returns what is called with the operator's inputs.

        It is a baseline, whose speedup over the best baseline is at most 1, unless `provider` is "kernelmark".
        Raises `InputError` if the name is taken.
        """
        if name in self._added or any(x.name == name for x in self._catalog.of_operator(self.operator)):
            raise InputError(f"{self.operator} has an implementation named {name!r} already.")
        self._added[name] = Implementation(
            self.operator, name, provider, (), "core", ("cuda", "cpu"), lambda: factory
        )

    def add_baseline(self, baseline: BaselineConfig) -> None:
        """Adds an implementation that a file has. Raises `InputError` as `add` and `BaselineConfig.load` do."""
        self.add(baseline.name, baseline.load())

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

        A case that was measured before gets more replicates. Raises `InputError` for an unknown axis, option,
        dtype, pass, cache, device or name in `only`, and for sizes that are no integers. An implementation that
        fails is a record with a status, not an exception.
        """
        self._refuse(axes, cache, replicates)
        operator = self._catalog.operator(self.operator)
        case = operator.case(axes, dtype, pass_, **(options or {}))
        cells = [Cell(case, x, cache) for x in self._able()]
        mine = {x.identity for x in cells}
        # Two records of one row with one number would be one process, and the first would be lost.
        first = 1 + max((x.replicate for x in self.records if x.identity in mine), default=-1)
        numbers = range(first, first + replicates)
        with watched(self.progress) as listener:
            todo = [(x.identity, replicate) for replicate in numbers for x in cells]
            listener.begin("", todo, 0, operator.metrics)
            device = self._open(listener)
            new = [
                record
                for replicate in numbers
                for record in self._replicate(device, cells, replicate, seed, listener)
            ]
        self.records += new
        return tuple(new)

    def rows(self) -> Rows:
        """Everything measured so far, replicates taken together, with speedups and fractions of the limit.

        A tuple of rows, which a notebook shows as a table; `rows().frame()` is a pandas data frame.
        """
        return Rows(rows(self.journal()))

    def summary(self) -> str:
        """A line an implementation: its speedups over the best baseline of each case, average and extremes."""
        found = self.rows()
        ours = [
            x for name in dict.fromkeys(x.implementation for x in found) if (x := over(found, name)) is not None
        ]
        return "\n".join(
            f"{sentence(x.implementation, x.geometric)}; mean {x.mean:.2f}x, median {x.median:.2f}x, "
            f"min {x.lowest:.2f}x, max {x.highest:.2f}x over {counted(x.cases, 'case')}"
            for x in ours
        )

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

    def _refuse(self, axes: Mapping[str, int], cache: str, replicates: int) -> None:
        """Raises `InputError` for what no type keeps a script from giving."""
        here = [x.name for x in self._catalog.of_operator(self._catalog.operator(self.operator).name)]
        for name in self.only:
            if name not in here and name not in self._added:
                raise unknown(f"implementation of {self.operator}", name, [*here, *self._added])
        fingerprint.device_named(self.device)
        if cache not in get_args(Cache):
            raise unknown("cache", cache, list(get_args(Cache)))
        for axis, size in axes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise InputError(f"{self.operator}: axis {axis} is {size!r}; sizes are integers.")
        if replicates < 1:
            raise InputError(f"replicates is {replicates}; it is at least 1.")

    @property
    def _kind(self) -> DeviceKind:
        return fingerprint.device_named(self.device)

    def _open(self, listener: Listener | None = None) -> Device:
        if self._device is None:
            from .measure import limits

            if listener is not None:
                listener.stage(0, "ceilings", None)
            self._device = opened(self._kind)
            with self._device.using():
                self.ceilings += limits.measure(self._device, 0)
        return self._device

    def _able(self) -> list[Implementation]:
        """What can run here, of what is chosen."""
        here = [*self._catalog.of_operator(self.operator), *self._added.values()]
        chosen = [x for x in here if not self.only or x.name in self.only or x.name in self._added]
        return [x for x in chosen if x.unavailable(self._kind) is None]

    def _replicate(
        self, device: Device, cells: Sequence[Cell], replicate: int, seed: int, listener: Listener
    ) -> list[Record]:
        task = messages.Task(
            device=device.kind,
            seed=seed,
            replicate=replicate,
            cells=tuple(messages.TaskCell(i, x.case, x.implementation.name, x.cache) for i, x in enumerate(cells)),
            sampling=self.sampling,
            ceilings=False,
        )
        records: list[Record] = []

        def keep(message: messages.Message) -> None:
            match message:
                case messages.Stage(name=name, index=index):
                    listener.stage(replicate, name, None if index is None else cells[index])
                case messages.Result(index=index):
                    made = cells[index].record(
                        replicate, index, message.status, message.reason, message.measurement, message.spent_s
                    )
                    records.append(made)
                    listener.end(made)

        worker.work(task, keep, device, {}, _With(self._catalog.roots, (), self._added))
        return records


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


@dataclass(frozen=True)
class BaselineConfig:
    """An implementation in a file: `implementation_path` is `FILE.py:FACTORY`, a factory as in baselines/.

    It is `unsupported` where a case names a model that is not among `supported_models`, or where the device has
    less than `hardware_requirements["min_vram_gb"]` of memory (GB of 10⁹ bytes).
    """

    name: str
    implementation_path: str
    supported_models: Sequence[str] = ()
    hardware_requirements: Mapping[str, float] = field(default_factory=dict)

    def load(self) -> Factory:
        """The factory, which refuses what the configuration excludes. Raises `InputError` for a wrong path."""
        path, _, attribute = self.implementation_path.rpartition(":")
        if unknown_ := self.hardware_requirements.keys() - {"min_vram_gb"}:
            raise unknown("hardware requirement", min(unknown_), ["min_vram_gb"])
        if not path or not Path(path).is_file():
            raise InputError(
                f"implementation_path {self.implementation_path!r} is no FILE.py:FACTORY that exists."
            )
        made = getattr(_module(Path(path)), attribute, None)
        if not callable(made):
            raise InputError(f"{path} has no function {attribute!r}.")

        def factory(case: Case) -> Callable[..., Any]:
            model = case.options.get("model")
            if self.supported_models and model is not None and model not in self.supported_models:
                raise NotImplementedError(f"supports {', '.join(self.supported_models)}, and not {model}")
            least, here = self.hardware_requirements.get("min_vram_gb", 0.0), _device_gb()
            if least > here:
                raise NotImplementedError(f"needs a GPU with {least:g} GB, this has {here:.1f} GB")
            implementation: Callable[..., Any] = made(case)
            return implementation

        return factory


def run_benchmark(
    benchmark_type: str,
    config: Mapping[str, Any],
    trials: int | None = None,
    runner: Runner | None = None,
) -> tuple[Row, ...]:
    """Measures one configuration of an operator, by all that can run here, and returns its rows.

    `config` holds the operator's axes and options by name, and `dtype` and `pass`; `trials` is the number of
    samples in place of the stopping rule, 6 if it is less. Raises `InputError` for anything that the operator does
    not know.
    """
    runner = runner or Runner(benchmark_type)
    operator = Catalog.default().operator(benchmark_type)
    if trials is not None:
        least = max(MIN_TRIALS, trials)
        runner.sampling = Sampling(min_samples=least, max_samples=least, min_seconds=0, max_seconds=TRIALS_S)
    rest = dict(config)
    dtype, pass_ = rest.pop("dtype", operator.dtypes[0]), rest.pop("pass", "forward")
    options = {name: rest.pop(name) for name in list(rest) if name in operator.options}
    before = len(runner.records)
    runner.run(rest, dtype, pass_, options)
    new = {x.identity for x in runner.records[before:]}
    return tuple(x for x in runner.rows() if x.identity in new)


def compare_implementations(
    benchmark_type: str,
    implementations: Sequence[str],
    config: Mapping[str, Any],
    metrics: Sequence[str] = ("latency", "memory", "throughput"),
    trials: int | None = None,
) -> dict[str, dict[str, float | None]]:
    """By implementation its metrics, `None` where one was not measured, and `speedup` over the best baseline.

    Metrics are named as `kernelmark show --json` lists them; beside those there are `samples_per_s` and
    `memory_per_sample`.
    """
    catalog = Catalog.default()
    known = [x.name for x in catalog.of_operator(catalog.operator(benchmark_type).name)]
    for name in implementations:
        if name not in known:
            raise unknown("implementation", name, known)
    runner = Runner(benchmark_type, only=tuple(implementations))
    more = {"samples_per_s": samples_per_s, "memory_per_sample": memory_per_sample}
    names = {x.name for x in (*runner.journal().header.metrics, *DERIVED)} | more.keys()
    for metric in metrics:
        if metric not in names:
            raise unknown("metric", metric, sorted(names))
    found = run_benchmark(benchmark_type, config, trials, runner)
    return {
        x.implementation: {name: more[name](x) if name in more else x.value(name) for name in metrics}
        | {"speedup": x.speedup_vs_best_baseline}
        for x in found
    }


MIN_TRIALS = 6
"""Fewer samples have no interval of their median."""
TRIALS_S = 600.0


def _module(path: Path) -> ModuleType:
    """Imports a file by its place, under a name that shadows nobody's."""
    name = f"kernelmark_baseline_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # somebody's file may raise anything
        del sys.modules[name]
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _device_gb() -> float:
    import torch

    if not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) / 1e9
