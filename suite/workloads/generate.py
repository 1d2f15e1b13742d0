"""Generating tokens: prompts are read (prefill), then one token of each sequence a step (decode).

All systems of a case get the same weights and prompts and decode greedily. Before they are timed, their logits
after the prompt and after each of some given tokens are held to the same model in fp32; the tokens that they chose
in the first, the last and a random generation of the timed window are held to it too.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ...registry.store.metric import HOST_PEAK, Metric, Ratio
from ...registry.store.record import Case, Measurement
from ..measure.rounding import rounded
from ..operator import BYTES
from ..system import Assembly
from . import _inference as inference
from ._generate import PartsGenerates
from ._peaks import Left, peak_allocated
from ._random import generator
from ._recipe import PEAK_BF16
from ._serving import engine
from .forward import Inference, catalog, read

if TYPE_CHECKING:
    import torch

    from ..measure.session import Session
    from ._generate import Generates

METRICS = (
    Metric(
        "token",
        "ms",
        judged=Ratio(),
        label="time a token",
        shown="table",
        about="A decode step: one more token of every sequence.",
    ),
    Metric(
        "first_token",
        "ms",
        judged=Ratio(),
        label="first token",
        shown="table",
        about="From prompts to their first new tokens.",
    ),
    Metric("generation", "ms", shown="table", about="From prompts to all new tokens on the host."),
    Metric(
        "generated_per_s",
        "tokens/s",
        better="higher",
        label="generated tokens/s",
        shown="table",
        about="New tokens of all sequences over the time of their generation, prompts included.",
    ),
    Metric(
        "decoded_per_s",
        "tokens/s",
        better="higher",
        label="decoded tokens/s",
        about="Sequences over the time of a decode step.",
    ),
    Metric(
        "read_per_s", "tokens/s", better="higher", label="prompt tokens/s", about="Prompt tokens over first token."
    ),
    Metric(
        "prompt_mfu",
        "1",
        better="higher",
        label="MFU of prompts",
        shown="table",
        about="Operations of reading the prompts over first token, of 989.4e12 a second: 2·N + 2·L·S·H·d a token, "
        "the output projection for the last token of each prompt alone.",
    ),
    Metric(
        "byte_fraction",
        "1",
        better="higher",
        label="of byte bound",
        shown="table",
        about="What a decode step must move (the weights that are multiplied, the cache read, one token of it "
        "written) at the rate of reading, over the median step. The rate is taken once in a process, right after "
        "the timed steps of its first system, so that all systems of a case have one bound.",
    ),
    Metric(
        "generation_memory",
        "B",
        across="maximum",
        judged=Ratio(test="median"),
        label="peak memory",
        shown="table",
        about="Most bytes that tensors took at a time, weights and cache among them, and graphs' pools.",
    ),
    Metric("weight_bytes", "B", better="neither", label="weights", about="Bytes of the weights."),
    Metric(
        "cache_bytes", "B", across="maximum", label="cache", about="Bytes held for the caches of all sequences."
    ),
    HOST_PEAK,
    Metric(
        "first_generation", "ms", about="The first generation, with what is compiled, tuned and captured in it."
    ),
    Metric(
        "generation_error",
        "1",
        across="maximum",
        judged=Ratio(above=1.0, test="separation", floor=1e-6),
        label="logits error",
        about="Relative norm of the deviation of logits from the model's in fp32 after given tokens.",
    ),
    Metric(
        "layer_missing",
        "1",
        across="maximum",
        label="layer missing",
        about="Of products in E4M3: the largest share of a layer that the logits after given tokens look as if "
        "they lacked it, which is 1 where a layer is skipped.",
    ),
)

GIVEN = 8
"""Tokens that are given, after each of which logits are compared."""

SEQUENCES = 4
"""Sequences of a batch that are compared, the first and the last among them."""

FEW = 1 << 9
"""Tokens of the prompts at the most, where these are more than one, that layers are skipped for."""

COMPARED = 1 << 14
"""Tokens of their prompts at the most, where these are more than one: the model in fp32 takes seconds for them."""


def _longest(case: Case) -> int:
    return case.axes["S"] + case.axes["N"]


def flops(case: Case) -> int:
    """Of one decode step at the end of the answer."""
    chosen, B = read(case), case.axes["B"]
    each = 2 * chosen.model.multiplied(chosen.configuration)
    return B * (each + 4 * _longest(case) * chosen.model.attention(chosen.configuration))


def prompt_flops(case: Case) -> int:
    """Of reading the prompts: the output projection is of their last tokens alone."""
    chosen, B, S = read(case), case.axes["B"], case.axes["S"]
    c, model = chosen.configuration, chosen.model
    head = int(c.width * c.vocabulary)
    each = 2 * (model.multiplied(c) - head) + 2 * S * model.attention(c)
    return B * (S * each + 2 * head)


def compared(B: int, S: int, seed: int) -> list[int]:
    """The sequences whose answers are held to the model in fp32, in order: first, last, and random ones."""
    most = max(1, min(SEQUENCES, COMPARED // S))
    if most >= B:
        return list(range(B))
    if most == 1:
        return [B - 1]
    return sorted({0, B - 1, *random.Random(f"{seed}/rows").sample(range(1, B - 1), most - 2)})


def bytes_(case: Case) -> int:
    """Of one decode step in the middle of the answer: the weights that are multiplied, those inside layers in what
    products may have, and the cache.
    """
    chosen = read(case)
    whole = engine.step_bytes(chosen, case.dtype, [_middle(case)] * case.axes["B"])
    if case.options["products"] == "dtype":
        return whole
    c = chosen.configuration
    return whole - (chosen.model.multiplied(c) - int(c.width * c.vocabulary)) * (BYTES[case.dtype] - 1)


def _middle(case: Case) -> int:
    return case.axes["S"] + case.axes["N"] // 2


@dataclass
class Expected:
    """`prompts` (B, S) of the first and of the random generation; `given` (B, GIVEN) after the first, and the
    logits (len(rows), GIVEN + 1, V) of some of its sequences. Where products may be in E4M3, what skipping each
    of some `layers` would `change` in those of the first `len(change[0])` of them.
    """

    prompts: tuple[torch.Tensor, torch.Tensor]
    given: torch.Tensor
    rows: list[int]
    logits: torch.Tensor
    layers: list[int]
    change: torch.Tensor | None
    read_rate: float | None = None
    """Bytes/s of reading, once a system was measured: one for all systems of a case."""


def prepare(case: Case, session: Session) -> Expected:
    """The answer after given tokens, in fp32."""
    import torch

    chosen, S = read(case), case.axes["S"]
    if chosen.model.name not in engine.FAMILIES:
        raise NotImplementedError(f"{chosen.model.name} does not generate")
    longest = chosen.model.longest(chosen.configuration)
    if longest is not None and longest < max(_longest(case), S + GIVEN):
        raise NotImplementedError(f"{chosen.name} has positions for {longest} tokens, not {_longest(case)}")
    device, seed = session.device, session.seed
    chance = generator(seed, device.torch_device)

    def draw(tokens: int) -> torch.Tensor:
        shape = (case.axes["B"], tokens)
        return torch.randint(
            0, chosen.configuration.vocabulary, shape, generator=chance, device=device.torch_device
        )

    first, other, given = draw(S), draw(S), draw(min(GIVEN, case.axes["N"] - 1))
    rows = compared(case.axes["B"], S, seed)
    whole = torch.cat((first, given), 1)[rows]
    at = range(S - 1, S + given.shape[1])
    try:
        logits = inference.answer(chosen, case.dtype, seed, whole, at, catalog()).cpu()
        layers: list[int] = []
        change = None
        if case.options["products"] == "e4m3":
            few = whole[: max(1, FEW // S)]
            layers = inference.skippable(chosen.configuration.layers, few.numel(), seed)
            change = inference.without(chosen, case.dtype, seed, few, at, catalog(), layers)
    finally:
        device.release()
    return Expected((first, other), given, rows, logits, layers, change)


def measure(case: Case, system: Generates, session: Session, expected: Expected) -> Measurement:
    """One system: checked, warmed up, and timed over whole generations."""
    run = Run(case, system, session, expected)
    with session.stage("verify"):
        run.verify()
    with session.stage("warm up"):
        run.warm_up()
    with session.stage("sample"):
        run.sample()
    with session.stage("verify"):
        run.check_tokens("a random generation of the timed window", run.prompt(run.checked), run.kept)
    with session.stage("summarize"):
        return run.summarize()


class Run:
    """One system of a case under way."""

    def __init__(self, case: Case, system: Generates, session: Session, expected: Expected) -> None:
        self.case, self.system, self.session, self.expected = case, system, session, expected
        self.cuda = session.device.kind == "cuda"
        self.left = Left.now(self.cuda)
        self.eight_bits = getattr(system, "products", "dtype") == "e4m3"
        self.N = case.axes["N"]
        self.chance = random.Random(f"{session.seed}/checked")
        self.least = self.chance.randrange(3)
        self.checked = 0
        self.first: list[float] = []
        self.steps: list[float] = []
        self.whole: list[float] = []
        self.error = 0.0
        self.missing: float | None = None
        self.first_ms = self.peak = 0.0
        self.kept: Any = None
        self.last: Any = None
        self.told: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Texts, and the logits of the model in fp32 that were computed for them, on the host."""

    def prompt(self, generation: int) -> torch.Tensor:
        """Each generation's prompts: the two that are known, in turns."""
        return self.expected.prompts[generation % 2]

    def generate(self, prompt: torch.Tensor) -> tuple[torch.Tensor, list[float], float]:
        """Tokens, milliseconds to each of them, and to all on the host."""
        from ._window import Clock

        clock = Clock(self.cuda)
        self.session.device.synchronize()
        begin = time.perf_counter_ns()
        clock.edge()
        tokens = self.system.generate(prompt, self.N, clock.edge)
        tokens.tolist()  # where the user has them
        took = (time.perf_counter_ns() - begin) / 1e6
        return tokens, clock.take(), took

    def verify(self) -> None:
        """The model, its logits after given tokens, and what it chooses."""
        case, expected, device = self.case, self.expected, self.session.device.torch_device
        chosen = read(case)
        weights = inference.initial(chosen, case.dtype, self.session.seed, device)
        self.system.load(chosen, case.axes["B"], case.axes["S"], self.N, case.dtype, weights)
        got = self.system.forced(expected.prompts[0], expected.given)[expected.rows]
        wanted, what = expected.logits.to(got.device), "after given tokens"
        if self.eight_bits:
            self.error = inference.deviation_in_8_bits(what, got, wanted)
            assert expected.change is not None
            few = expected.change.shape[1]
            self.missing = inference.missing(what, got[:few], wanted[:few], expected.change, expected.layers)
        else:
            self.error = inference.deviation(what, got, wanted, case.dtype)
        tokens, _, self.first_ms = self.generate(expected.prompts[0])
        self.check_tokens("the first generation", expected.prompts[0], tokens)

    def check_tokens(self, what: str, prompt: torch.Tensor, tokens: torch.Tensor) -> None:
        """Holds what some sequences chose to the model in fp32, given what they had chosen before."""
        import torch

        rows, S = self.expected.rows, self.case.axes["S"]
        own = tokens.to(prompt.device)[rows]
        steps = inference.positions(self.N, self.session.seed)
        logits = self._wanted(torch.cat((prompt[rows], own), 1), [S - 1 + x for x in steps])
        if self.eight_bits:
            inference.chosen_well_in_8_bits(what, own[:, steps], logits)
        else:
            inference.chosen_well(what, own[:, steps], logits, self.case.dtype)

    def _wanted(self, texts: torch.Tensor, at: list[int]) -> torch.Tensor:
        """The logits of the model in fp32. Where a later generation has the prompts of the first, and chose the
        same, they are those of the same text, which take ten seconds of a large model.
        """
        import torch

        on_host = texts.cpu()
        for known, logits in self.told:
            if torch.equal(known, on_host):
                return logits.to(texts.device)
        case = self.case
        found = inference.answer(read(case), case.dtype, self.session.seed, texts, at, catalog())
        self.told.append((on_host, found.cpu()))  # beside a system's memory its peak is measured
        return found

    def warm_up(self) -> None:
        """Generations until the time is up, one at the least: the first has captured and tuned."""
        begin = time.monotonic()
        while True:
            self.generate(self.expected.prompts[1])
            if time.monotonic() - begin >= self.session.sampling.warmup_s:
                return

    def sample(self) -> None:
        """Generations until enough steps are known well enough, up to three at the least."""
        from ..measure.stopping import finished
        from ..measure.telemetry import Watch

        sampling = self.session.sampling
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
        self.watch = Watch(self.session.device.nvml)
        self.watch.read()
        begin = time.monotonic()
        while len(self.whole) <= self.least or not finished(self.steps, time.monotonic() - begin, sampling):
            number = len(self.whole)
            tokens, edges, took = self.generate(self.prompt(number))
            # How many there will be is not known: each takes the place of the one that is kept with the chance
            # by which any of all so far is as likely as another. A system may go wrong late.
            if self.chance.randrange(number + 1) == 0:
                self.kept, self.checked = tokens, number
            if number % 2 == 0:
                self.last = tokens
            self.first.append(edges[0])
            self.steps += edges[1:]
            self.whole.append(took)
            self.watch.read(len(self.steps) - len(edges) + 1, len(self.steps))
        if self.cuda:  # before the model in fp32 lies beside the system's
            self.peak = float(peak_allocated(self.left))

    def summarize(self) -> Measurement:
        """What is recorded, once the last generation is held to the model too: a system may go wrong late."""
        from ..measure.stopping import converged
        from ._rates import read_rate

        # Of the first prompts, whose text was read already where the same was chosen.
        self.check_tokens("the last generation of the timed window", self.prompt(0), self.last)
        case, B = self.case, self.case.axes["B"]
        chosen = read(case)
        weights = chosen.model.parameters(chosen.configuration) * BYTES[case.dtype]
        found: dict[str, tuple[float, ...]] = {
            "token": rounded(self.steps),
            "first_token": rounded(self.first),
            "generation": rounded(self.whole),
            "generated_per_s": rounded([B * self.N / (x * 1e-3) for x in self.whole]),
            "decoded_per_s": rounded([B / (x * 1e-3) for x in self.steps]),
            "read_per_s": rounded([B * case.axes["S"] / (x * 1e-3) for x in self.first]),
            "weight_bytes": (float(getattr(self.system, "weight_bytes", weights)),),
            HOST_PEAK.name: (float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),),
            "first_generation": rounded([self.first_ms]),
            "generation_error": rounded([self.error]),
        }
        if self.missing is not None:
            found["layer_missing"] = rounded([self.missing])
        if (cache := self.system.cache_bytes) is not None:
            found["cache_bytes"] = (float(cache),)
        if self.cuda:
            found["generation_memory"] = (self.peak,)
            work = prompt_flops(case) / PEAK_BF16
            found["prompt_mfu"] = rounded([work / (x * 1e-3) for x in self.first])
        if self.expected.read_rate is None:
            self.expected.read_rate = read_rate(self.session.device)
        if (rate := self.expected.read_rate) is not None:
            found["byte_fraction"] = rounded([case.bytes / rate / (median(self.steps) * 1e-3)])
        return Measurement(
            samples=found,
            timer="events" if self.cuda else "monotonic",
            converged=converged(self.steps, self.session.sampling),
            telemetry=self.watch.telemetry(),
            throttled=tuple(self.watch.throttled),
            remarks=(*getattr(self.system, "remarks", ()), *self.left.remarks),
        )


def step(case: Case, system: Generates, session: Session) -> Callable[[], Any]:
    """Decode steps of one system, unchecked. Raises NotImplementedError where it has none of its own."""
    import torch

    if not isinstance(system, PartsGenerates):
        raise NotImplementedError("what is not made of parts generates whole answers: it has no decode step")
    chosen, B, S, N = read(case), *(case.axes[x] for x in ("B", "S", "N"))
    device = session.device.torch_device
    system.load(chosen, B, S, N, case.dtype, inference.initial(chosen, case.dtype, session.seed, device))
    chance = generator(session.seed, device)
    return system.steps(torch.randint(0, chosen.configuration.vocabulary, (B, S), generator=chance, device=device))


def assemble(case: Case, assembly: Assembly) -> PartsGenerates:
    """Our engine on a system's parts."""
    return PartsGenerates(assembly, int(case.options["page"]), str(case.options["products"]))


WORKLOAD = Inference(
    name="generate",
    summary="Prompts read and tokens generated by a model: first token, time a token, memory",
    axes={"B": "sequences", "S": "tokens of a prompt", "N": "new tokens a sequence, at least 2"},
    least={"B": 1, "S": 1, "N": 2},
    options={
        "model": tuple(x for model in catalog().models.values() for x in model.configurations),
        "slice": inference.SLICES,
        "page": (64, 16, 32, 128, 256),
        "products": inference.PRODUCTS,
    },
    later={"slice": "whole", "page": 64, "products": "dtype"},
    dtypes=("bf16", "fp16", "fp32"),
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"],
    measured=METRICS,
    prepare=prepare,
    measure=measure,
    assemble=assemble,
    step=step,
    definition=(
        inference.answer,
        inference.deviation,
        inference.chosen_well,
        tuple(inference.LOGITS.items()),
        tuple(inference.GAPS.items()),
    ),
    # Rows of a table came to be looked up by a part of the model, which computes the same.
    continues={
        "dd2db59050c0": "c4aa8312d826",
        "8d63a651510f": "e0af420a251f",
        "84598fc7964d": "0d7876462a28",
        "0ed71f65d071": "c56b82173572",
    },
    plans={},
)
