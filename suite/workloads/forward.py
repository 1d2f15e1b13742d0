"""One pass of a model without gradients: how long one waits for it, how many samples go through a second.

All systems of a case get the same weights and tokens, and are held to the logits of the same model in fp32, before
they are timed, at a random pass within the timed window, and at the last ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

from ...registry.store.metric import SAMPLES_PER_S, Metric, Ratio
from ...registry.store.record import Case, Measurement
from ..catalog import Catalog
from ..measure.rounding import rounded
from ..model import Chosen
from ..operator import BYTES
from ..system import Assembly
from ..workload import Workload
from . import _inference as inference
from ._expected import random_step
from ._forward import PartsPasses
from ._peaks import Left, peak_allocated
from ._random import generator
from ._recipe import PEAK_BF16

if TYPE_CHECKING:
    import torch

    from ..measure.session import Session
    from ._forward import Passes

METRICS = (
    Metric(
        "pass",
        "ms",
        judged=Ratio(),
        shown="table",
        about="Wall time of a single pass on an idle device, launches and waiting for it included.",
    ),
    SAMPLES_PER_S,
    Metric(
        "pass_mfu",
        "1",
        better="higher",
        label="MFU",
        shown="table",
        about="Operations of a queued pass over its time, of 989.4e12 a second: 2·N + 2·L·S·H·d a token, "
        "attention causal where the model's is.",
    ),
    Metric(
        "pass_memory",
        "B",
        across="maximum",
        judged=Ratio(test="median"),
        label="peak memory",
        shown="table",
        about="Most bytes that tensors took at a time, weights among them, and the pools of CUDA graphs.",
    ),
    Metric("memory_per_sample", "B", across="maximum", about="Peak memory less the weights, over the batch."),
    Metric("first_pass", "ms", about="The first pass, with what is compiled and tuned at it."),
    Metric(
        "logits_error",
        "1",
        across="maximum",
        judged=Ratio(above=1.0, test="separation", floor=1e-6),
        about="Relative norm of the deviation of logits from the model's in fp32, the largest of checked passes.",
    ),
)


@cache
def catalog() -> Catalog:
    """What models and references are taken from."""
    return Catalog.default()


def read(case: Case) -> Chosen:
    """The case's model or slice."""
    return inference.read(case, catalog())


def flops(case: Case) -> int:
    """Of the products of one pass: a third of a training step's."""
    chosen, S = read(case), case.axes["S"]
    return chosen.model.training_flops(chosen.configuration, S, case.axes["B"] * S) // 3


def bytes_(case: Case) -> int:
    """Weights that are multiplied, read once; tokens and logits."""
    chosen, rows = read(case), case.axes["B"] * case.axes["S"]
    logits = rows * int(chosen.configuration.vocabulary)
    return (chosen.model.multiplied(chosen.configuration) + logits) * BYTES[case.dtype] + 8 * rows


@dataclass(frozen=True)
class Expected:
    """Tokens (B, S) of the first and of the random pass, and logits (B, len(at), V) of both at some positions."""

    at: list[int]
    tokens: tuple[torch.Tensor, torch.Tensor]
    logits: tuple[torch.Tensor, torch.Tensor]


def prepare(case: Case, session: Session) -> Expected:
    """The answers, in fp32."""
    chosen, S = read(case), case.axes["S"]
    longest = chosen.model.longest(chosen.configuration)
    if longest is not None and longest < S:
        raise NotImplementedError(f"{chosen.name} has positions for {longest} tokens, not {S}")
    at = inference.positions(S, session.seed)
    first, other = (_tokens(case, session, number) for number in (0, 1))
    device = session.device
    try:
        wanted = [
            inference.answer(chosen, case.dtype, session.seed, x, at, catalog()).cpu() for x in (first, other)
        ]
    finally:
        device.release()
    return Expected(at, (first, other), (wanted[0], wanted[1]))


def _tokens(case: Case, session: Session, number: int) -> torch.Tensor:
    import torch

    device = session.device.torch_device
    chance = generator(session.seed, device, number)
    shape = (case.axes["B"], case.axes["S"])
    return torch.randint(0, read(case).configuration.vocabulary, shape, generator=chance, device=device)


def measure(case: Case, system: Passes, session: Session, expected: Expected) -> Measurement:
    """One system: checked, warmed up, timed pass by pass, then with passes queued."""
    run = Run(case, system, session, expected)
    with session.stage("verify"):
        run.verify()
    with session.stage("warm up"):
        run.warm_up()
    with session.stage("sample"):
        return run.sample()


class Run:
    """One system of a case under way."""

    def __init__(self, case: Case, system: Passes, session: Session, expected: Expected) -> None:
        self.case = case
        self.system = system
        self.session = session
        self.expected = expected
        self.cuda = session.device.kind == "cuda"
        self.left = Left.now(self.cuda)
        self.tokens = expected.tokens[0].clone()
        self.which = 0
        self.error = 0.0
        self.first_ms = 0.0

    def timed(self) -> float:
        """Milliseconds of one pass, from an idle device to an idle device."""
        self.session.device.synchronize()
        begin = time.perf_counter_ns()
        self.found = self.system(self.tokens)
        self.session.device.synchronize()
        return (time.perf_counter_ns() - begin) / 1e6

    def check(self, which: int, what: str) -> float:
        """A timed pass on known tokens, its logits held to the answer; gives its milliseconds."""
        self.tokens.copy_(self.expected.tokens[which])
        self.which = which
        took = self.timed()
        self.hold(what)
        return took

    def hold(self, what: str) -> None:
        """Holds the logits of the pass before to the answer."""
        wanted = self.expected.logits[self.which].to(self.found.device)
        off = inference.deviation(what, self.found[:, self.expected.at], wanted, self.case.dtype)
        self.error = max(self.error, off)

    def verify(self) -> None:
        """The model, and its first pass."""
        case, device = self.case, self.session.device.torch_device
        chosen = read(case)
        weights = inference.initial(chosen, case.dtype, self.session.seed, device)
        self.system.load(chosen, case.axes["B"], case.axes["S"], case.dtype, weights)
        self.first_ms = self.check(0, "the first pass")

    def warm_up(self) -> None:
        """Passes until their times are steady, or the time is up."""
        from ..measure.stopping import steady

        times: list[float] = []
        begin = time.monotonic()
        while len(times) < 3 or (not steady(times) and time.monotonic() - begin < self.session.sampling.warmup_s):
            times.append(self.timed())

    def sample(self) -> Measurement:
        """Single passes, a random one of them checked; then as many queued ones."""
        from ..measure.stopping import converged, finished
        from ..measure.telemetry import Watch

        sampling, device = self.session.sampling, self.session.device
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
        watch = Watch(device.nvml)
        watch.read()
        checked = random_step(self.session.seed, sampling.min_samples)
        samples: list[float] = []
        begin = time.monotonic()
        while not finished(samples, time.monotonic() - begin, sampling):
            if len(samples) == checked:
                samples.append(self.check(1, "a random pass of the timed window"))
            else:
                samples.append(self.timed())
            watch.read(len(samples) - 1, len(samples))
        self.hold("the last pass of the timed window")  # a system may go wrong late
        queued = self.queued(max(3, min(sampling.min_samples, len(samples))))
        self.hold("the last of the queued passes")
        found = {
            "pass": rounded(samples),
            "samples_per_s": rounded([self.case.axes["B"] / (x * 1e-3) for x in queued]),
            "first_pass": rounded([self.first_ms]),
            "logits_error": rounded([self.error]),
            **self.memory(),
        }
        if self.cuda:
            work = flops(self.case) / PEAK_BF16
            found["pass_mfu"] = rounded([work / (median(queued) * 1e-3)])
        return Measurement(
            samples=found,
            timer="monotonic",
            converged=converged(samples, sampling),
            telemetry=watch.telemetry(),
            throttled=tuple(watch.throttled),
            remarks=self.left.remarks,
        )

    def queued(self, count: int) -> list[float]:
        """Milliseconds of each of so many passes in a row, which wait for nothing but each other."""
        from ._window import Clock

        clock = Clock(self.cuda)
        clock.edge()
        for _ in range(count):
            self.found = self.system(self.tokens)
            clock.edge()
        return clock.take()

    def memory(self) -> dict[str, tuple[float, ...]]:
        """Peak memory of the device; a CPU's allocator keeps no account."""
        if not self.cuda:
            return {}
        peak = peak_allocated(self.left)
        chosen = read(self.case)
        weights = chosen.model.parameters(chosen.configuration) * BYTES[self.case.dtype]
        return {
            "pass_memory": (float(peak),),
            "memory_per_sample": (float(max(0, peak - weights) // self.case.axes["B"]),),
        }


def step(case: Case, system: Passes, session: Session) -> Callable[[], Any]:
    """Passes of one system, unchecked."""
    device = session.device.torch_device
    weights = inference.initial(read(case), case.dtype, session.seed, device)
    system.load(read(case), case.axes["B"], case.axes["S"], case.dtype, weights)
    tokens = _tokens(case, session, 0)
    return lambda: system(tokens)


def assemble(case: Case, assembly: Assembly) -> PartsPasses:
    """A system's program, of parts."""
    return PartsPasses(assembly)


@dataclass(frozen=True, kw_only=True)
class Inference(Workload):
    """A workload on one model. What a case computes is what its own model does."""

    def computes(self, case: Case) -> tuple[object, ...]:
        """How answers are made and checked, by whose module, from which numbers."""
        chosen = read(case)
        return (*super().computes(case), chosen.model.module, chosen.model.weights, repr(chosen.configuration))


WORKLOAD = Inference(
    name="forward",
    summary="One pass of a model without gradients: latency, samples a second, memory",
    axes={"B": "sequences", "S": "tokens a sequence"},
    least={"B": 1, "S": 1},
    options={
        "model": tuple(x for model in catalog().models.values() for x in model.configurations),
        "slice": inference.SLICES,
    },
    later={"slice": "whole"},
    dtypes=("bf16", "fp16", "fp32"),
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    measured=METRICS,
    prepare=prepare,
    measure=measure,
    assemble=assemble,
    step=step,
    definition=(inference.answer, inference.deviation, tuple(inference.LOGITS.items())),
    # Rows of a table came to be looked up by a part of the model, which computes the same.
    continues={
        "49152ee24409": "2333bce191f6",
        "d6d7111be317": "4435ec1ff8e0",
        "1a374df1d6b8": "0e62341f3f49",
        "7a0ff814ed49": "00d726ea1f4f",
        "a0c4b2747091": "1ab5f214b3b4",
        "31002d7eb25a": "15d490098109",
        "b3dfb4011964": "31b04277f225",
    },
    plans={},
)
