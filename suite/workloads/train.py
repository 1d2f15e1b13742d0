"""Training: whole optimizer steps of a model on fresh tokens, forward, backward, clipping and update.

All systems of a case share its recipe: the model, the batch, how weights and states are stored, the clipping. They
are held to the same model in fp32: loss and every gradient of the first step and of a random step within the timed
window, and the weights after three steps.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec

from ...registry.store.metric import EXPOSED, HOST_PEAK, SAMPLES_PER_S, Equivalence, Metric, Ratio
from ...registry.store.record import Case, Measurement
from ..catalog import Catalog
from ..definition import grid
from ..measure.rounding import rounded
from ..measure.verify import Incorrect
from ..model import Bound
from ..system import NO_CHANGES, Assembly
from ..workload import Workload
from . import _along as along
from . import _averaged as averaged
from . import _coarse_products as coarse_products
from . import _coarse_states as coarse
from . import _exchanges as exchanges
from . import _expected as answer
from . import _followed as followed
from . import _muon as muon
from . import _pieces as pieces
from . import _yardstick as yardstick
from ._arms import ArmTrainer
from ._coarse_products import NOTHING, Rounding
from ._continued import CONTINUES
from ._hooks import HOOKS, way
from ._parallel import WAYS
from ._peaks import Left, peak_allocated
from ._recipe import HYPERPARAMETERS, STATES, Recipe, recipe
from ._split import DIVIDED
from ._trainer import PartsTrainer
from ._whole import EngineTrainer, WholeTrainer

if TYPE_CHECKING:
    import torch

    from ..measure.session import Session
    from ..measure.telemetry import Watch
    from ._parallel import Parallel
    from ._trainer import Trainer

EPOCH = 157_398_898
"""Tokens of an epoch: the bytes to train on of `suite/corpus/manifest.toml`, which a test compares."""
COMPRESSION = Metric(
    "compression_ratio",
    "1",
    better="higher",
    label="compression ratio",
    about="Bytes of the gradients over the bytes that are sent in their place.",
)
METRICS = (
    Metric(
        "step", "ms", judged=Ratio(), shown="table", about="Time between the edges of optimizer steps in a row."
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        better="higher",
        label="tokens/s",
        shown="table",
        about="Tokens of a step over its time; on several GPUs, of each.",
    ),
    SAMPLES_PER_S,
    Metric(
        "epoch",
        "s",
        about=f"Once through {EPOCH:,} tokens at this speed: as many as the corpus of `kernelmark corpus build` "
        "has bytes to train on. On several GPUs together.",
    ),
    Metric(
        "mfu",
        "1",
        better="higher",
        label="MFU",
        shown="table",
        about="Tokens/s × (6·N + 6·L·S·H·d) / 989.4e12: N the weights that are multiplied, attention causal, "
        "recompute never counted, whatever the dtype of products.",
    ),
    Metric(
        "limit_fraction",
        "1",
        better="higher",
        label="of limit",
        shown="table",
        about="The model's floor over the step's time: products at the measured rate of the dtype that the recipe "
        "allows, plus compulsory bytes at the measured copy rate. Both rates are taken once in a process, right "
        "after the timed steps of its first system, so that all systems of a case have one limit.",
    ),
    Metric(
        "peak_allocated",
        "B",
        across="maximum",
        judged=Ratio(test="median"),
        shown="table",
        about="Most bytes that tensors took at a time, weights and states among them, and graphs' pools.",
    ),
    Metric("peak_reserved", "B", across="maximum", about="Most bytes that the allocator held."),
    HOST_PEAK,
    EXPOSED,
    COMPRESSION,
    Metric(
        "sent",
        "B",
        shown="never",
        about="The all-reduces that a step's communication is taken for, bytes of each: DDP's buckets; of FSDP2, "
        "which gathers a layer's weights twice a pass and scatters gradients once, 1.5 times them for one pass. "
        "`kernelmark predict` reads them.",
    ),
    Metric(
        "activations",
        "B",
        across="maximum",
        shown="table",
        about="Bytes that a forward pass leaves for the backward pass. On a GPU by its allocator; on a CPU "
        "counted over tensors, of PyTorch's own parts run eagerly.",
    ),
    Metric(
        "exposed_states",
        "ms",
        label="exposed states",
        about="What a step takes longer than with the same states left where they are: moves between host and "
        "device that nothing hides, and an update by the host. Only of systems whose states lie on the host.",
    ),
    Metric(
        "host_link",
        "GB/s",
        better="higher",
        label="host link",
        about="Rate of copies to the device and from it at once, in sum, right after the timed steps. Only of "
        "systems whose states lie on the host.",
    ),
    Metric("first_step", "ms", about="From weights to the end of the first step: compiling and tuning are in it."),
    Metric(
        "energy_per_token",
        "J",
        judged=Ratio(),
        about="Mean board power over the timed steps times a token's time.",
    ),
    Metric(
        "loss_error",
        "1",
        across="maximum",
        judged=Equivalence(margin=1e-2, relative=False),
        about="How far the loss of the checked steps is from the model's in fp32, relative.",
    ),
    Metric(
        "loss_apart",
        "1",
        across="maximum",
        about="How far the loss of any of the first `follow` steps on several GPUs is from that of one process of "
        "the same system, on the same tokens, relative.",
    ),
    Metric(
        "gradient_error",
        "1",
        across="maximum",
        judged=Ratio(above=1.0, test="separation", floor=1e-6),
        about="Relative norm of the deviation of a parameter's gradient from fp32, the largest over parameters.",
    ),
    Metric(
        "change_error",
        "1",
        across="maximum",
        about="The same of what three steps change of each parameter.",
    ),
    Metric("loss", "1", better="neither", shown="never", abscissa="loss_step", about="By step, on random tokens."),
    Metric("loss_step", "1", better="neither", shown="never", about="The steps that `loss` is of."),
)


@cache
def catalog() -> Catalog:
    """What models and references are taken from."""
    return Catalog.default()


def read(case: Case) -> Recipe:
    """The case's recipe. Raises `InputError` for what its model does not have."""
    return recipe(case, catalog().models)


def sharing(case: Case) -> int:
    """GPUs that a step of the case's tokens is of; where each has as many of its own, 1."""
    return case.world if case.options["parallel"] in DIVIDED else 1


def assemble(case: Case, assembly: Assembly) -> PartsTrainer:
    """A system's trainer, of parts. Raises NotImplementedError for one that changes more of the recipe than what
    weights and states are stored in.
    """
    system, r = assembly.system, recipe(case, assembly.catalog.models)
    spread = way(str(case.options["parallel"]), case.world, assembly.catalog)
    chunks = {"sequence": case.world, "context": 2 * case.world}.get(str(case.options["parallel"]), 1)
    if r.S % chunks:
        raise NotImplementedError(f"{r.S} tokens cannot be cut into {chunks} equal parts for {case.world} ranks")
    if case.options["parallel"] != "fsdp2" and (names := exchanges.named(system.parts)):
        raise NotImplementedError(f"{system.name} names {' and '.join(names)}, which FSDP2 alone asks for")
    if system.changes == NO_CHANGES:
        return PartsTrainer(r, assembly, spread, case.axes.get("follow", 0))
    if not system.changes.only_stored:
        raise NotImplementedError(f"{system.name} trains by another recipe; `converge` compares such systems")
    if case.world > 1:
        raise NotImplementedError(f"{system.name} trains in one process")
    if system.changes.dtype and r.dtype != "fp32" and r.state != "master32":
        raise NotImplementedError(f"{system.name} has masters in fp32; this case's recipe has none")
    return ArmTrainer(r, assembly)


@dataclass
class Prepared:
    """What all systems of a case share in a process: the answer; of a large model how far rounding alone takes
    three steps from it, and of one of experts routers' gradients (see `_yardstick`); with products in 8 bits what
    these alone do (see `_coarse_products`); and, once they are measured, the rates of its limit in FLOP/s and
    bytes/s.
    """

    expected: answer.Expected
    rounding: float = 0.0
    scattered: float = 0.0
    coarse: Rounding = NOTHING
    rates: tuple[float, float] | None = None


def prepare(case: Case, session: Session) -> Prepared:
    """The answer, in fp32. Raises `MemoryError` where what must be resident is larger than the device."""
    r = read(case)
    longest = r.chosen.model.longest(r.chosen.configuration)
    if longest is not None and longest < r.S:
        raise NotImplementedError(f"{r.chosen.name} has positions for {longest} tokens, not {r.S}")
    _fitting(r, session)
    try:
        return Prepared(answer.compute(r, catalog(), session.seed, session.device.torch_device))
    finally:
        session.device.release()


def prepare_muon(case: Case, session: Session) -> Prepared:
    """`prepare` where Muon steps: apart, as the rows of AdamW are known by the text of `prepare`."""
    r = read(case)
    longest = r.chosen.model.longest(r.chosen.configuration)
    if longest is not None and longest < r.S:
        raise NotImplementedError(f"{r.chosen.name} has positions for {longest} tokens, not {r.S}")
    _fitting(r, session)
    try:
        return Prepared(muon.compute(r, catalog(), session.seed, session.device.torch_device))
    finally:
        session.device.release()


def prepare_large(case: Case, session: Session) -> Prepared:
    """`prepare` of a model whose answer nearly fills a device: in pieces, and of one that is too large for it, of
    its first layers.
    """
    r = read(case)
    longest = r.chosen.model.longest(r.chosen.configuration)
    if longest is not None and longest < r.S:
        raise NotImplementedError(f"{r.chosen.name} has positions for {longest} tokens, not {r.S}")
    _fitting(r, session)
    compute, check = (muon.compute, muon.check_weights) if r.hidden else (answer.compute, answer.check_weights)
    held = r.checked if sliced(case) else r
    with session.device.growing():
        try:
            expected = compute(held, pieces.in_pieces(catalog()), session.seed, session.device.torch_device)
        finally:
            session.device.release()
    try:
        return Prepared(expected, yardstick.change(held, catalog(), session, expected, check))
    finally:
        session.device.release()


def prepare_coarse(case: Case, session: Session) -> Prepared:
    """The answer where products may be in 8 bits, and how far rounding to these alone takes a step from it."""
    r = read(case)
    found = (prepare_routed if is_routed(r) else prepare_large if r.large else prepare)(case, session)
    return replace(found, coarse=rounded_alone(case, session, found.expected, coarse_products.rounding))


def prepare_routed(case: Case, session: Session) -> Prepared:
    """The answer of a large model of experts, and how far rounding alone takes routers' gradients from it."""
    found = prepare_large(case, session)
    return replace(found, scattered=rounded_alone(case, session, found.expected, yardstick.gradient))


def rounded_alone(case: Case, session: Session, expected: answer.Expected, how: Callable[..., Any]) -> Any:
    """What a step that is rounded and nothing else says, by `how`: of the layers that systems are checked with."""
    r = read(case)
    with session.device.growing() if r.large else nullcontext():
        try:
            return how(r.checked if sliced(case) else r, catalog(), session, expected)
        finally:
            session.device.release()


def prepare_averaged(case: Case, session: Session) -> Prepared:
    """`prepare` where each rank has sequences of its own: it computes the answer to these."""
    r = read(case)
    longest = r.chosen.model.longest(r.chosen.configuration)
    if longest is not None and longest < r.S:
        raise NotImplementedError(f"{r.chosen.name} has positions for {longest} tokens, not {r.S}")
    _fitting(r, session)
    found = pieces.in_pieces(catalog()) if r.large else catalog()
    with session.device.growing() if r.large else nullcontext():
        try:
            return Prepared(averaged.compute(r, found, session.seed, session.device.torch_device, session.group))
        finally:
            session.device.release()


def is_averaged(case: Case) -> bool:
    """Whether ranks compute the answer together: each has sequences of its own, and AdamW steps all weights."""
    return case.world > 1 and sharing(case) == 1 and not read(case).hidden


def is_coarse(r: Recipe) -> bool:
    """Whether products may be in 8 bits, and AdamW steps all weights."""
    return r.products == "e4m3" and not r.hidden


def is_routed(r: Recipe) -> bool:
    """Whether a large model has experts, to which its routers send tokens."""
    return r.large and any(x.share < 1 for x in r.chosen.model.weights(r.chosen.configuration).values() if x.share)


def sliced(case: Case) -> bool:
    """Whether systems of a case are checked with its model's first layers alone: in one process."""
    r = read(case)
    return case.world == 1 and r.checked is not r


def prepared(case: Case, session: Session) -> Prepared:
    """The answer by the case's optimizer, of what of its model is checked."""
    r = read(case)
    if is_averaged(case):
        return prepare_averaged(case, session)
    if is_coarse(r):
        return prepare_coarse(case, session)
    if is_routed(r):
        return prepare_routed(case, session)
    if r.large:
        return prepare_large(case, session)
    return (prepare_muon if r.hidden else prepare)(case, session)


def _fitting(r: Recipe, session: Session) -> None:
    if session.device.kind != "cuda":
        return
    import torch

    total = torch.cuda.get_device_properties(session.device.torch_device).total_memory
    if r.resident > total:
        raise MemoryError(
            f"weights, gradients and states alone take {r.resident} bytes; the device has {total}. "
            f"Train a slice of fewer layers, or on several GPUs."
        )


def measure(case: Case, system: Trainer, session: Session, prepared: Prepared) -> Measurement:
    """One system: checked, warmed up, and timed over whole steps, one of which is checked again."""
    r = read(case)
    run = Program(r, system, session, prepared)
    with session.stage("verify"):
        run.verify()
    with session.stage("warm up"):
        run.window.warm_up(session.sampling.warmup_s)
    with session.stage("sample"):
        samples, watch = run.sample()
    with session.stage("summarize"):
        return run.summarize(samples, watch)


def step(case: Case, system: Trainer, session: Session) -> Callable[[], Any]:
    """Steps of one system on fresh tokens, unchecked."""
    from ._window import Window

    r, device = read(case), session.device
    system = stepping(r, system)
    system.load(answer.initial(r, session.seed, device.torch_device))
    batches = answer.Batches(r, session.seed, device.torch_device)
    return Window(system, batches.draw, device.kind == "cuda").step


def stepping(r: Recipe, system: Any) -> Trainer:
    """A system's trainer: itself, an engine's, or the usual step of a model of its own class."""
    if hasattr(system, "step"):
        trainer: Trainer = system
        return trainer
    return EngineTrainer(r, system) if hasattr(system, "start") else WholeTrainer(r, system)


def in_8_bits(trainer: Trainer, r: Recipe) -> bool:
    """Whether a system of the recipe multiplies so."""
    return bool(getattr(trainer, "products", r.products) == "e4m3")


class Program:
    """One system of a case under way."""

    def __init__(self, r: Recipe, trainer: Trainer, session: Session, prepared: Prepared) -> None:
        from ._window import Window  # here, as all that measures: listing loads none of it

        trainer = stepping(r, trainer)
        self.recipe = r
        self.trainer = trainer
        self.session = session
        self.prepared = prepared
        self.expected = prepared.expected
        bounds = r.chosen.model.bounds
        # The answer's gradients are rounded to the case's dtype: no system can be nearer to them than that.
        own = [bounds[getattr(trainer, "products", r.products)], bounds[r.dtype]]
        self.spread: Parallel | None = getattr(trainer, "parallel", None)
        sent = "as they are" if self.spread is None else self.spread.gradients
        self.bound = max((*own, bounds["bf16"]) if sent == "rounded" else own, key=lambda x: x.gradient)
        if sent == "approximated":
            self.bound = replace(self.bound, gradient=inf, change=inf)  # measured, and held to the loss alone
        self.cuda = session.device.kind == "cuda"
        self.left = Left.now(self.cuda)
        self.group = session.group
        divided = self.spread is not None and self.spread.divided
        self.share = 1 / self.group.size if divided else 1.0
        """A rank's share of a step of the recipe."""
        several = 1 if divided else self.group.size
        whole = replace(r, accumulation=r.accumulation * several)
        self.batches = answer.Batches(whole, session.seed, session.device.torch_device)
        self.window = Window(trainer, self._draw, self.cuda, self.group)
        self.errors = {"loss_error": 0.0, "gradient_error": 0.0, "change_error": 0.0}
        self.sliced = self.group.size == 1 and r.checked is not r
        """Whether it is checked with the model's first layers alone."""
        if self.sliced and not hasattr(trainer, "of"):
            raise NotImplementedError(
                "the model is too large to be checked whole, and this program takes no slice"
            )
        self.first_ms = 0.0
        self.peaks = (0, 0)
        self.activations: int | None = None

    def _draw(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's tokens and targets of the step's."""
        tokens, targets = self.batches.draw(step)
        if self.spread is None:
            return tokens, targets
        return self.spread.share(tokens), self.spread.share(targets)

    def load(self) -> None:
        """The weights at the start, and an optimizer that has done nothing."""
        self.trainer.load(self._initial())

    def _initial(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights at the start."""
        return answer.initial(self.recipe, self.session.seed, self.session.device.torch_device)

    def verify(self) -> None:
        """The first steps, and what they made of the weights."""
        if self.sliced:
            self._check_slice()
        begin = time.perf_counter()
        if isinstance(self.trainer, ArmTrainer) and self.trainer.scaled:
            self._settle(self.trainer, begin)
        self.load()
        for step in range(answer.STEPS):
            loss = self.window.step()
            self._stepped(begin)
            if step == 0:
                if not self.sliced:
                    self._checked("the first step", self.trainer, float(loss), self.expected.first)
                elif not _finite(float(loss)):
                    raise Incorrect("the first step: the loss is not finite")
        if not self.sliced:
            self._check_weights(self.trainer, self.recipe)
        self._follow()
        if (kept := getattr(self.trainer, "activations", None)) is not None:
            tokens, targets = self._draw(0)
            self.activations = kept(tokens[0], targets[0])

    def _stepped(self, begin: float) -> None:
        """Waits for a step, and keeps how long the first of all took, with what is compiled and tuned in it."""
        self.session.device.synchronize()
        self.first_ms = self.first_ms or (time.perf_counter() - begin) * 1e3

    def _settle(self, trainer: ArmTrainer, begin: float) -> None:
        """Lowers the first scale of a loss in fp16 until no step that is checked overflows: one that does is left
        out, as users' programs leave it out, and there would be nothing to check.
        """
        while trainer.first_scale > 1:
            skipped = 0
            for numbers in ((answer.RANDOM,), range(answer.STEPS)):
                self.load()
                for number in numbers:
                    trainer.step(*self._draw(number))
                    self._stepped(begin)
                skipped += int(trainer.counts["skipped"])
            if not skipped:
                return
            trainer.first_scale /= 2

    def _follow(self) -> None:
        """Holds the loss of the first steps against that of one process, the first rank's, on the same tokens."""
        steps = getattr(self.trainer, "followed", 0)
        if not steps or self.group.size == 1:
            return
        trainer: PartsTrainer = self.trainer  # type: ignore[assignment]  # what is followed is of parts
        own = followed.losses(trainer, self._initial(), self._draw, steps)
        found = list(map(fmean, zip(*self.group.every(own), strict=True)))
        worst, where = 0.0, 0
        with self.group.together():
            if self.group.rank == 0:
                alone = PartsTrainer(self.batches.recipe, trainer.assembly)
                wanted = followed.losses(alone, self._initial(), self.batches.draw, steps)
                off = [abs(x - y) / abs(y) for x, y in zip(found, wanted, strict=True)]
                worst, where = max((x, i) for i, x in enumerate(off))
                if not worst <= self.bound.loss:
                    raise Incorrect(
                        f"step {where + 1} of {steps}: the loss is {found[where]:.6g}, that of one process "
                        f"{wanted[where]:.6g}"
                    )
        self.errors["loss_apart"] = self.group.agreed(worst)

    def _check_slice(self) -> None:
        """The system with the model's first layers alone: a random step, the first ones, and what these made of
        the weights. Not within the timed window, but before it and after it.
        """
        r, device = self.recipe.checked, self.session.device
        trainer = self.trainer.of(r)  # type: ignore[attr-defined]  # looked for as `sliced` was decided
        batches = answer.Batches(r, self.session.seed, device.torch_device)
        whole, where = self.recipe.chosen.configuration.layers, f"with {r.chosen.configuration.layers}"
        for number in (answer.RANDOM, *range(answer.STEPS)):
            if number <= 0:
                trainer.load(answer.initial(r, self.session.seed, device.torch_device))
            loss = float(trainer.step(*batches.draw(number)))
            if number == answer.RANDOM:
                self._checked(f"a random step {where} of {whole} layers", trainer, loss, self.expected.random)
            elif number == 0:
                self._checked(f"the first step {where} of {whole} layers", trainer, loss, self.expected.first)
        self._check_weights(trainer, r)
        del trainer
        device.release()

    def _check_weights(self, trainer: Trainer, r: Recipe) -> None:
        check: Callable[..., float] = answer.check_weights
        if r.hidden:
            check = muon.check_weights
        elif self.bound.change < inf:
            if in_8_bits(trainer, r):
                check = partial(coarse_products.check_weights, rounds=self.prepared.coarse)
            elif r.state == "master32" and not r.large:
                # What is allowed for a rounding in each step hides an update without a correction of biases.
                check = partial(answer.check_weights, roundings=1)
        if getattr(trainer, "coarse_states", False):
            check = coarse.check_weights
        found = check(trainer, r, self.expected, self.session.seed, self._bound_of_weights(trainer))
        self.errors["change_error"] = max(self.errors["change_error"], found)
        if check is not coarse.check_weights and self.bound.change < inf and along.holds(trainer, r):
            along.check(trainer, r, self.expected, self.session.seed)

    def _bound_of_weights(self, trainer: Trainer) -> Bound:
        """What three steps may be off by: PyTorch's own parts say what rounding to the case's dtype alone does."""
        return yardstick.allowed(self.bound, self.prepared.rounding) if self._plain(trainer) else self.bound

    def _plain(self, trainer: Trainer) -> bool:
        """Whether it multiplies in the case's dtype, as PyTorch's own parts do."""
        return bool(getattr(trainer, "products", self.recipe.products) == self.recipe.dtype)

    def _checked(self, what: str, trainer: Trainer, loss: float, expected: answer.Step) -> None:
        loss = fmean(self.group.every(loss))
        if in_8_bits(trainer, self.recipe):
            found = coarse_products.check_step(what, trainer, loss, expected, self.bound, self.prepared.coarse)
        elif self.prepared.scattered and self._plain(trainer):
            found = yardstick.check_step(what, trainer, loss, expected, self.bound, self.prepared.scattered)
        else:
            found = answer.check_step(what, trainer, loss, expected, self.bound)
        self.errors["gradient_error"] = max(self.errors["gradient_error"], found)
        off = abs(loss - expected.loss) / abs(expected.loss)
        self.errors["loss_error"] = max(self.errors["loss_error"], off)

    def sample(self) -> tuple[list[float], Watch]:
        """Timed steps; a random one is on known weights and tokens, and is checked when it is over."""
        from ..measure.telemetry import Watch

        sampling = self.session.sampling
        watch = Watch(self.session.device.nvml, own=self.group.every(os.getpid()))
        self._forget_peaks()

        def check(step: Any) -> float:
            self._keep_peaks()
            self.load()
            self.session.device.synchronize()
            self._forget_peaks()
            milliseconds, loss = step()
            self._keep_peaks()
            self._checked("a random step of the timed window", self.trainer, float(loss), self.expected.random)
            if self.bound.change < inf:
                along.check_update(self.trainer, self.recipe, self.expected.random, self.session.seed)
            self._forget_peaks()
            return float(milliseconds)

        # Of a slice no step of the window can be checked: none has the number of the one after the last.
        least, most = sampling.min_samples, sampling.max_samples
        checked = most if self.sliced else answer.random_step(self.session.seed, least)
        samples = self.window.sample(sampling, watch, checked, check)
        self._keep_peaks()
        if self.sliced:
            self._check_slice()
        return samples, watch

    def _forget_peaks(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def _keep_peaks(self) -> None:
        if self.cuda:
            import torch

            shared = 0 if self.spread is None else self.spread.shared()
            now = (peak_allocated(self.left) + shared, torch.cuda.max_memory_reserved())
            self.peaks = (max(self.peaks[0], now[0]), max(self.peaks[1], now[1]))

    def summarize(self, samples: list[float], watch: Watch) -> Measurement:
        """What is recorded."""
        from ..measure.stopping import converged
        from ._rates import link_rate, rates

        r = self.recipe
        found: dict[str, tuple[float, ...]] = {
            "step": rounded(samples),
            "tokens_per_s": rounded([self.share * r.tokens / (x * 1e-3) for x in samples]),
            "samples_per_s": rounded([self.share * r.tokens / r.S / (x * 1e-3) for x in samples]),
            "epoch": rounded([EPOCH / (self.share * r.tokens * self.group.size) * median(samples) * 1e-3]),
            "first_step": rounded([self.first_ms]),
            HOST_PEAK.name: (float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),),
        }
        if self.cuda:
            found["mfu"] = rounded([self.share * r.mfu(x) for x in samples])
            peaks = zip(*self.group.every(self.peaks), strict=True)
            found["peak_allocated"], found["peak_reserved"] = ((float(max(x)),) for x in peaks)
        shared = self.prepared
        if shared.rates is None:
            shared.rates = rates(self.session.device, r.products)
        if shared.rates is not None:
            found["limit_fraction"] = rounded([self.share * r.limit_ms(*shared.rates) / median(samples)])
        if (alone := self.window.alone()) is not None:
            found[EXPOSED.name] = rounded([max(0.0, median(samples) - median(alone))])
        if self.spread is not None and (sent := self.spread.sent(r.accumulation)):
            found["sent"] = sent
            if (ratio := self.spread.ratio) is not None:
                found[COMPRESSION.name] = rounded([ratio])
        if self.activations is not None:
            found["activations"] = (float(self.activations),)
        if (unmoved := self.window.unmoved()) is not None:
            found["exposed_states"] = rounded([max(0.0, median(samples) - median(unmoved))])
            if (link := link_rate(self.session.device)) is not None:
                found["host_link"] = rounded([link / 1e9])
        if (power := watch.power()) is not None:
            found["energy_per_token"] = rounded([power * median(samples) * 1e-3 / (self.share * r.tokens)])
        found |= {name: rounded([value]) for name, value in self.errors.items()}
        losses = [float(x) for x in self.window.losses]
        if all(map(_finite, losses)):  # after hundreds of steps on random tokens a loss may be anything
            found["loss"] = rounded(losses)
            found["loss_step"] = tuple(float(i) for i in range(len(losses)))
        self._give_up()
        return Measurement(
            samples=found,
            timer="events" if self.cuda else "monotonic",
            converged=converged(samples, self.session.sampling),
            telemetry=watch.telemetry(),
            throttled=tuple(watch.throttled),
            remarks=self._remarks(),
        )

    def _give_up(self) -> None:
        """Memory that peers can read, which the next system may need: once no rank computes on it any more."""
        if self.spread is None or not self.spread.shared():
            return
        self.session.device.synchronize()
        with self.group.together():
            """All ranks are here."""
        self.spread.forget()

    def _remarks(self) -> tuple[str, ...]:
        told = []
        if self.sliced:
            layers = self.recipe.checked.chosen.configuration.layers
            whole = self.recipe.chosen.configuration.layers
            told.append(f"checked with {layers} of its {whole} layers")
        by = "PyTorch's own are"
        alone = {"gradient_error": self.prepared.scattered, "change_error": self.prepared.rounding}
        if in_8_bits(self.trainer, self.recipe):
            by, found = "those of a step that is rounded and nothing else are", self.prepared.coarse
            alone = {"gradient_error": found.gradients.worst, "change_error": found.changes.worst}
        for name, what, bound in (
            ("gradient_error", "gradients", self.bound.gradient),
            ("change_error", "three steps", self.bound.change),
        ):
            if self.errors[name] > bound:
                told.append(
                    f"{what} are off by more than {bound:g}, as {by} by {alone[name]:.3g}: up to "
                    f"{yardstick.ROOM:g} times that is allowed"
                )
        return (*told, *self.left.remarks)


def _finite(x: float) -> bool:
    return abs(x) < float("inf")


@dataclass(frozen=True, kw_only=True)
class Train(Workload):
    """The workload. What a case computes is what its own model does; another model's file does not change it.

    On several GPUs `B` and `A` are each rank's own, so that with more GPUs a step is of more tokens, but where
    the ranks share them: then a step is what it is on one.
    """

    def whole(self, case: Case) -> Case:
        """All ranks' micro-batches in a row."""
        if case.options["parallel"] in DIVIDED:
            return case
        return msgspec.structs.replace(case, axes={**case.axes, "A": case.axes["A"] * case.world})

    def computes(self, case: Case) -> tuple[object, ...]:
        """How answers are made and checked, by whose module, from which numbers."""
        r = read(case)
        chosen, model = r.chosen, r.chosen.model
        own = (model.module, model.weights, repr(chosen.configuration), repr(sorted(model.bounds.items())))
        if is_averaged(case):
            parts: tuple[object, ...] = (pieces.loss, pieces.update) if r.large else ()
            how: tuple[object, ...] = (prepare_averaged, averaged.compute, self.measure, *parts, *self.definition)
        elif r.large:
            parts = (pieces.loss, pieces.update, yardstick.change, yardstick.allowed, yardstick.ROOM)
            how = (prepare_large, self.measure, muon.compute, muon.check_weights, *parts, *self.definition)
        elif r.hidden:
            how = (prepare_muon, self.measure, muon.compute, muon.check_weights, *self.definition)
        else:
            how = (prepare, self.measure, *self.definition)
        if is_coarse(r):
            how += coarse_products.DEFINITION
        if not is_averaged(case):
            how += (prepare_routed, yardstick.gradient, yardstick.check_step) if is_routed(r) else ()
            how += (prepare_coarse,) if is_coarse(r) else ()
        if case.axes.get("follow"):
            how += (followed.losses,)
        return (*how, case.dtype, *own)


WORKLOAD = Train(
    name="train",
    summary="Whole optimizer steps of a model: forward, backward, clipping and AdamW or Muon, on fresh tokens",
    axes={
        "B": "sequences a micro-batch",
        "S": "tokens a sequence",
        "A": "micro-batches a step",
        "follow": "steps over which several GPUs' loss is held against one process's",
    },
    least={"B": 1, "S": 1, "A": 1},
    options={
        "model": tuple(x for model in catalog().models.values() for x in model.configurations),
        "slice": ("whole", "first1", "first2", "first4", "first8"),
        "state": tuple(STATES),
        "products": ("dtype", "e4m3"),
        "clip": (1.0, 0.0),
        "parallel": (*WAYS, *HOOKS, *DIVIDED),
    },
    later={"A": 1, "follow": 0, "slice": "whole", "products": "dtype", "clip": 1.0, "parallel": "single"},
    asked_for=("follow",),
    several=True,
    dtypes=("bf16", "fp32"),
    bytes=lambda case: read(case).bytes // sharing(case),
    flops=lambda case: read(case).flops // sharing(case),
    tokens=lambda case: read(case).tokens // sharing(case),
    measured=METRICS,
    prepare=prepared,
    measure=measure,
    assemble=assemble,
    step=step,
    definition=(answer.compute, answer.check_step, answer.check_weights, tuple(HYPERPARAMETERS.items())),
    continues=CONTINUES,
    plans={
        "quick_cpu": (
            grid("program", options={"model": "llama-tiny", "state": "plain"}, dtypes="fp32", B=2, S=64),
        ),
    },
)
