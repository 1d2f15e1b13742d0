"""A measurement, stage by stage: build, verify, warm up, calibrate, sample, summarize."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

from ...registry.store.metric import (
    BACK_TO_BACK,
    CONVERSION,
    EACH,
    ENERGY,
    ERROR,
    ERROR_UNQUANTIZED,
    EXPOSED,
    HELD,
    LATENCY,
    LAUNCH,
    MEMORY,
    POWER,
    RANK_LATENCY,
    SPREAD,
    UTILIZATION,
)
from ...registry.store.record import Cache, Measurement
from ..operator import Tolerance
from . import energy
from .device import Device, TimerUnavailable, wall_ms
from .fresh import Fresh
from .group import largest
from .machine_code import Unknown, fingerprint
from .pristine import Pristine
from .rounding import rounded
from .stopping import Sampling, TimerName, converged, finished, steady
from .telemetry import Watch
from .timers import Timer
from .verify import Incorrect, deviation, distance, flat, poison
from .workbench import Workbench

LAUNCHES = 10
"""Single calls timed by the host's clock, for the launch-inclusive column."""
LAUNCHES_S = 0.05
CONVERSIONS = 20
"""Samples of a layout conversion, which is a column beside the latency and needs no narrow interval."""
CONVERSIONS_S = 0.1
WARMUP_CALLS = 200


@dataclass
class Stages:
    """Names the stage under way, tells it to `listen`, and adds up the seconds of each."""

    listen: Callable[[str], None] = lambda name: None
    clock: Callable[[], float] = time.monotonic
    spent_s: dict[str, float] = field(default_factory=dict)
    current: str = ""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Everything inside belongs to this stage."""
        self.current = name
        self.listen(name)
        begin = self.clock()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + self.clock() - begin


@dataclass
class Trial:
    """One implementation on a workbench: the method, a stage a method."""

    device: Device
    bench: Workbench
    cache: Cache
    sampling: Sampling
    stages: Stages
    gated: bool = True
    """False for a yardstick, which computes something else and has no answer to check."""
    tuned: bool = False
    """Whether to record what the autotuners of the implementation's module chose."""
    pinned: Mapping[str, str] = field(default_factory=dict)
    """Configurations that autotuners of that module are held to, by name."""
    measured: dict[str, float] = field(default_factory=dict, init=False)
    """What the operator's own metrics say of the answer."""
    with_energy: bool = False
    """Whether the energy of a call is measured, where the device has a counter of it."""
    with_code: bool = False
    """Whether the machine code that a call launches is recorded, on GPUs."""
    pristine: Pristine | None = None
    """What the process was before any implementation was loaded."""
    remarks: tuple[str, ...] = field(default=(), init=False)
    """What the implementation had changed in the process that was put back, and what dtype its answer has."""
    untold: tuple[str, ...] = field(default=(), init=False)
    """Metrics that only the implementation knows and does not say, each with the reason."""
    by_rank: list[tuple[float, ...]] = field(default_factory=list, init=False)
    """Every rank's time of each sample."""
    shared: int = field(default=0, init=False)
    """Bytes of this rank's memory that others can read or write, as far as the implementation says."""

    def run(self, implementation: Callable[[], Callable[..., Any]]) -> Measurement:
        """The whole measurement. Raises `Incorrect` and whatever the implementation raises."""
        if self.pristine is not None:
            self.pristine.begin()
        with contextlib.ExitStack() as held:  # what building pins stays so until the last call
            held.callback(self._settle)
            with self._stage("build"):
                loaded = implementation()
                namespace = vars(sys.modules[loaded.__module__]) if self.pinned else {}
                held.enter_context(pinned(namespace, self.pinned))
                call = self.bench.call(loaded)
                self._untouched()
            measured = self._built(loaded, call)
            self._forget(loaded)
            return measured

    def _forget(self, loaded: Callable[..., Any]) -> None:
        """Has an implementation give up memory that it shares with its peers, which the next one may need: once
        all are here, and no device computes on it any more.
        """
        if (forget := getattr(loaded, "forget", None)) is not None:
            self.device.synchronize()
            with self.bench.group.together():
                """All ranks are here."""
            forget()

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """A stage that all ranks begin and end together."""
        with self.stages.stage(name), self.bench.group.together():
            yield

    def _built(self, loaded: Callable[..., Any], call: Callable[[], Any]) -> Measurement:
        """The stages after building."""
        stage = self._stage
        with stage("verify"), self.bench.known():
            error = self.verify(call) if self.gated else None
            self.ask(loaded)
        with stage("warm up"):
            self.warm_up(call)
        with stage("calibrate"):
            self._untouched()
            fresh = Fresh(self.bench) if self.gated else None
            timer = self.calibrate(call, fresh)
        with stage("sample"):
            samples, watch = self.sample(timer, call, fresh)
            self._untouched()
            self._settle()
            launches = wall_ms(self.device, call, LAUNCHES, LAUNCHES_S)
            conversion = self.conversion(timer, self.bench.conversion(loaded))
            exposed = self.exposed(timer, loaded, samples)
            joules = self.joules(call, median(samples))
            code = self.code(call)
        with stage("verify"):
            if self.gated:
                with self.bench.known():
                    self.verify_again(call)
            if fresh is not None:
                fresh.check(call, self.bench.tolerance)
            self._untouched()
        with stage("summarize"):
            tuning = autotuned(vars(sys.modules[loaded.__module__])) if self.tuned else {}
            self.shared = self.bench.shared(loaded)
            if exposed is not None:
                self.measured[EXPOSED.name] = exposed
            return self.summarize(call, timer, samples, watch, launches, conversion, error, tuning, joules, code)

    def verify(self, call: Callable[[], Any]) -> float:
        """Runs on other inputs first, spoils that result, and compares the one on the true inputs."""
        import torch

        bench = self.bench
        bench.lay_doubled()
        result = call()
        self.device.synchronize()
        for x in flat(result):
            if (layout := getattr(x, "layout", None)) not in (None, torch.strided):
                raise Incorrect(f"its output is {layout} and no plain tensor")
        inputs = {x.untyped_storage().data_ptr() for x in (*bench.varied, *bench.still, *bench.gradients)}
        poison([x for x in flat(result) if x.untyped_storage().data_ptr() not in inputs])
        del result
        bench.lay(bench.values)
        outputs = bench.comparable(call())
        self.device.synchronize()
        if bench.changed(outputs):
            raise Incorrect("it changed its inputs")
        error = deviation(outputs, bench.references, bench.tolerance)
        self.remarks = (*self.remarks, *bench.other_dtypes(outputs))
        if (unquantized := bench.unquantized()) is not None:
            self.measured[ERROR_UNQUANTIZED.name] = distance(outputs, unquantized)
        for metric, measure in bench.operator.measures.items():
            if (value := measure(outputs, bench.references, bench.inputs)) is not None:
                self.measured[metric.name] = value
        return error

    def ask(self, loaded: Callable[..., Any]) -> None:
        """What the implementation alone knows of a call, or why it does not say."""
        for metric in self.bench.operator.told if self.gated else ():
            value, reason = self.bench.told(loaded, metric.name)
            if value is not None:
                self.measured[metric.name] = value
            else:
                self.untold = (*self.untold, f"no {metric.name}: {reason}")

    def verify_again(self, call: Callable[[], Any]) -> None:
        """After timing: other inputs must still give another answer, the true ones the right one."""
        bench = self.bench
        tolerance = bench.tolerance
        with bench.group.together():
            bench.hold_finite()
        bench.lay_doubled()
        with bench.group.together():
            if self._matches(lambda: bench.comparable(call()), tolerance) and not self._one_answer(tolerance):
                raise Incorrect("stale output: other inputs gave the same answer")
        bench.lay(bench.values)
        outputs = bench.comparable(call())
        if bench.changed(outputs):  # as one may that has seen its first calls go by
            raise Incorrect("it changed its inputs")
        deviation(outputs, bench.references, tolerance)

    def _matches(self, answer: Callable[[], Sequence[Any]], tolerance: Tolerance) -> bool:
        try:
            deviation(answer(), self.bench.references, tolerance)
        except Incorrect:
            return False
        return True

    def _one_answer(self, tolerance: Tolerance) -> bool:
        """Whether these other inputs have the same right answer: an empty one, or a softmax of one column. Of
        cases that are shared among ranks only the empty one is known: their right answer takes all ranks.
        """
        bench = self.bench
        if not all(x.numel() for x in bench.references):
            return True
        return bench.operator.sharding is None and self._matches(bench.reference, tolerance)

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Calls until their host time is steady, or the limit of the warm-up is reached."""
        times: list[float] = []
        begin = time.monotonic()
        while self.bench.group.agreed(
            not steady(times) and len(times) < WARMUP_CALLS and time.monotonic() - begin < self.sampling.warmup_s
        ):
            times += wall_ms(self.device, call, 1)

    def _settle(self) -> None:
        """Puts the process back before the answers are checked, and for whoever comes next."""
        if self.pristine is not None:
            self.remarks = tuple(dict.fromkeys((*self.remarks, *self.pristine.settle())))

    def _untouched(self) -> None:
        """Raises `Incorrect` where the implementation replaced what others rely on, clock and check too."""
        if self.pristine is not None and (found := self.pristine.tampered()):
            raise Incorrect(f"it replaced {found}")

    def calibrate(self, call: Callable[[], Any], fresh: Fresh | None = None) -> Timer:
        """The case's timer, tried once. Where it cannot time this call, in any rank, events do, and the record
        says so.
        """
        timer: Timer | None = None
        with contextlib.suppress(TimerUnavailable):
            timer = self.device.timer(self.bench.case, self.cache, call, self.sampling.timer)
        everywhere = all(self.bench.group.every(timer is not None))
        if timer is None or not everywhere:
            timer = self.device.fallback(self.cache)
        timer.sample(call, fresh)
        return timer

    def sample(
        self, timer: Timer, call: Callable[[], Any], fresh: Fresh | None = None
    ) -> tuple[list[float], Watch]:
        """Samples until the stopping rule says enough. Of several ranks each sample is the slowest one's."""
        group = self.bench.group
        if fresh is not None:
            fresh.start(self.sampling.min_samples)
        watch = Watch(self.device.nvml, own=group.every(os.getpid()))
        watch.read()
        samples: list[float] = []
        begin = time.monotonic()
        while not group.agreed(finished(samples, time.monotonic() - begin, self.sampling)):
            first = len(samples)
            slowest, by_rank = largest(group, timer.sample(call, fresh))
            samples += slowest
            self.by_rank += by_rank
            watch.read(first, len(samples))
        if fresh is not None and fresh.due:
            fresh.hurry()
            timer.sample(call, fresh)
        return samples, watch

    def conversion(self, timer: Timer, convert: Callable[[], Any] | None) -> float | None:
        """Median time of a layout conversion alone, in milliseconds, by a timer of the kind that timed the call.

        None without one, or where that timer cannot time it: another's number would not stand beside the latency.
        """
        if convert is None:
            return None
        try:
            own = self.device.timer(self.bench.case, self.cache, convert, cast(TimerName, timer.name))
        except TimerUnavailable:
            return None
        own.sample(convert)
        samples: list[float] = []
        begin = time.monotonic()
        while not samples or (len(samples) < CONVERSIONS and time.monotonic() - begin < CONVERSIONS_S):
            samples += own.sample(convert)
        # A graph's time has its flushes' taken off: of a conversion that launches nothing, noise about 0 is left.
        return max(0.0, median(samples))

    def exposed(self, timer: Timer, loaded: Callable[..., Any], samples: Sequence[float]) -> float | None:
        """How much longer a call took than the same without communication, in milliseconds, by a timer of the same
        kind, of the slowest rank either way. None where the implementation cannot leave it out.
        """
        group, local = self.bench.group, getattr(loaded, "local", None)
        if local is None or group.size == 1:
            return None
        still = self.bench.call(local())
        still()  # the first may bring what the others compute on
        own: Timer | None = None
        with contextlib.suppress(TimerUnavailable):
            own = self.device.timer(self.bench.case, self.cache, still, cast(TimerName, timer.name))
        everywhere = all(group.every(own is not None))
        if own is None or not everywhere:
            return None
        own.sample(still)
        alone: list[float] = []
        begin = time.monotonic()
        while not group.agreed(finished(alone, time.monotonic() - begin, self.sampling)):
            alone += largest(group, own.sample(still))[0]
        return max(0.0, median(samples) - median(alone))

    def _everyones(self, remarks: tuple[str, ...]) -> tuple[str, ...]:
        """All ranks' remarks, each once; what not all say with the rank that says it."""
        said = self.bench.group.every(remarks)
        return tuple(
            dict.fromkeys(
                text if all(text in x for x in said) else f"rank {rank} of {len(said)}: {text}"
                for rank, own in enumerate(said)
                for text in own
            )
        )

    def joules(self, call: Callable[[], Any], latency_ms: float) -> list[energy.Energy]:
        """The energy of a call as each rank's board counts it; nothing where it is not asked for, or not there."""
        group, nvml = self.bench.group, self.device.nvml
        if not self.with_energy or not all(group.every(nvml is not None)) or nvml is None:
            return []
        load = self.device.load(call, latency_ms)
        return group.every(energy.measured(nvml, load, group.agreed))

    def code(self, call: Callable[[], Any]) -> str | None:
        """What a call runs on the device, by `machine_code`; None where it is not asked for or unknown."""
        if not self.with_code or self.device.torch_device.type != "cuda" or self.bench.group.size > 1:
            return None
        import torch

        with contextlib.suppress(Unknown, torch.OutOfMemoryError):  # launches' memory is held until all are seen
            return fingerprint(call)
        return None

    def summarize(
        self,
        call: Callable[[], Any],
        timer: Timer,
        samples: list[float],
        watch: Watch,
        launches: list[float],
        conversion: float | None,
        error: float | None,
        tuning: dict[str, str],
        joules: Sequence[energy.Energy] = (),
        code: str | None = None,
    ) -> Measurement:
        """What is recorded: of several ranks the largest, energy of all, the device's state of rank 0."""
        group, operator = self.bench.group, self.bench.operator
        memory = self.device.peak_memory(call)
        held = None
        # What a backward pass needs was made before the call, out of the sight of its peak.
        if memory is not None and operator.distributed and self.bench.case.pass_ != "backward":
            held = memory + self.bench.held() + self.shared
        single = {
            CONVERSION.name: conversion,
            MEMORY.name: memory,
            HELD.name: held,
            ERROR.name: error,
            **self.measured,
        }
        largest_ = {name: [x for x in group.every(value) if x is not None] for name, value in single.items()}
        found = {LATENCY.name: rounded(samples), LAUNCH.name: rounded(largest(group, launches)[0])}
        found |= {name: rounded([max(values)]) for name, values in largest_.items() if values}
        found |= {name: rounded([value]) for name, value in watch.metrics().items()}
        unknown = next((x.reason for x in joules if x.reason), None)
        if joules and unknown is None:
            # Rank 0 says when it is enough: others' boards may have made a window more.
            found[ENERGY.name] = rounded(map(sum, zip(*(x.joules for x in joules), strict=False)))
            found[BACK_TO_BACK.name] = rounded([max(x.call_ms for x in joules if x.call_ms is not None)])
            if (watts := joules[0].watts) is not None:
                found[POWER.name] = rounded([watts])
        if joules and (busy := joules[0].utilization) is not None:
            found[UTILIZATION.name] = rounded([busy])
        found |= {
            metric.name: rounded(rate(self.bench.case, x) for x in samples)
            for metric, rate in operator.rates.items()
        }
        if operator.distributed or group.size > 1:
            found[RANK_LATENCY.name] = rounded(x for ranks in self.by_rank for x in ranks)
            found[SPREAD.name] = rounded(1 - min(ranks) / max(ranks) for ranks in self.by_rank)
        if group.size > 1 and not operator.distributed:
            found[EACH.name] = rounded(map(median, zip(*self.by_rank, strict=True)))
        return Measurement(
            samples={name: values for name, values in found.items() if values},
            timer=timer.name,
            batch=timer.batch,
            converged=converged(samples, self.sampling),
            telemetry=watch.telemetry(),
            throttled=tuple(watch.throttled),
            tuning=tuning,
            remarks=(
                *self._everyones(self.remarks),
                *self.untold,
                *watch.company(),
                *([f"no energy: {unknown}"] if unknown else []),
            ),
            code=code,
        )


def autotuned(namespace: Mapping[str, Any]) -> dict[str, str]:
    """Names of Triton autotuners that ran, each with the configuration that won last."""
    return {
        name: str(best)
        for name, value in namespace.items()
        if (best := getattr(value, "best_config", None)) is not None
    }


@contextlib.contextmanager
def pinned(namespace: Mapping[str, Any], choice: Mapping[str, str]) -> Iterator[None]:
    """Leaves each named Triton autotuner only the configuration that reads so, which it then takes untested.

    Raises `NotImplementedError` where there is no such autotuner, or none of its configurations reads so.
    """
    with contextlib.ExitStack() as stack:
        for name, wanted in choice.items():
            tuner: Any = namespace.get(name)
            found = [x for x in getattr(tuner, "configs", ()) if str(x) == wanted]
            if not found:
                raise NotImplementedError(f"{name} cannot be held to the configuration {wanted}: it has none such")
            stack.callback(setattr, tuner, "configs", tuner.configs)
            tuner.configs = found[:1]
        yield
