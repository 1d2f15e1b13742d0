"""One arm of `converge` under way: steps, validation at declared ones, health, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..measure.telemetry import Watch
from ..measure.verify import Incorrect
from ..model import draw, gains
from ..operator import torch_dtype
from . import _expected as answer
from . import _tasks as tasks
from ._arms import ArmTrainer, low_share
from ._checkpoint import Checkpoint
from ._health import EVERY, Health, Reference
from ._recipe import Recipe
from ._text import Order, Source, validation

if TYPE_CHECKING:
    import torch

    from ..catalog import Catalog
    from ..measure.session import Session

DECLARED = (1000, 5000, 10000)
"""Steps at which arms are compared, beside the last."""
VALIDATIONS = 40
"""In all, about."""
LEAST = 1 << 12
"""Bytes that a short run validates on, or a batch; none validates on more than it trains on between."""
NEAR = 5
"""Steps between two, at least."""
CHECKPOINTS = 8
SAVING = 20.0
"""How many times as long as the last save took a run trains on before the next."""
WARM = 0.02
"""The share of steps over which the rate rises; it then falls as a cosine to a tenth."""
LEAK = 1e-2
"""How much logits may change, relative, by what comes after them: kernels may sum in another order."""
LEAK_8_BITS = 0.25
"""The same of 8 bits: a scale that a whole tensor shares does depend on what comes after. These arms are held to
the model's gradients too.
"""


def rate(step: int, steps: int, most: float) -> float:
    """The learning rate of a step, from 0."""
    warm = max(1, round(WARM * steps))
    return most * min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def validated(steps: int) -> tuple[int, ...]:
    """After how many steps the validation loss is taken."""
    every = max(NEAR, steps // VALIDATIONS)
    return tuple(sorted({*range(0, steps, every), *(x for x in DECLARED if x < steps), steps}))


def initial(r: Recipe, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that training starts from: those of the check, but for the last norm, whose large gain is there
    to make the check see clipping.
    """
    chosen = r.chosen
    weights = dict(chosen.model.weights(chosen.configuration))
    weights["norm"] = gains(chosen.configuration.width)
    yield from draw(weights, seed, torch_dtype(r.dtype), device)


@dataclass
class Progress:
    """What has been measured so far; with the trainer's state it is all that a checkpoint holds."""

    step: int = 0
    bits: list[tuple[int, float]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean training loss in nats since the one before)."""
    rates: list[float] = field(default_factory=list)
    """Tokens/s between validations."""
    seconds: float = 0.0
    health: Health = field(default_factory=Health)

    def state(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        """From such."""
        seen = state["health"]
        health = Health([tuple(x) for x in seen["at"]], seen["values"], seen["low"])
        pairs = {x: [tuple(y) for y in state[x]] for x in ("bits", "losses")}
        return cls(**{**state, **pairs, "health": health})


class Training:
    """One arm, from its first step, or from where it was killed, to its last."""

    def __init__(
        self,
        trainer: ArmTrainer,
        source: Source,
        steps: int,
        most: float,
        session: Session,
        catalog: Catalog,
        checkpoint: Checkpoint,
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`before` are weights to go on from; without them training begins from random ones."""
        self.trainer = trainer
        self.recipe = trainer.recipe
        batch = trainer.recipe.B * trainer.recipe.S
        share = max(LEAST, steps * trainer.recipe.tokens // VALIDATIONS)
        self.source = dataclasses.replace(source, validated=max(batch, min(source.validated, share)))
        self.steps = steps
        self.most = most
        self.session = session
        self.device = session.device.torch_device
        self.checkpoint = checkpoint
        self.before = before
        r = self.recipe
        self.order = Order(source.train, session.seed, r.accumulation, r.B, r.S, self.device)
        # Of another model the gradient in fp32 is no measure of this one's.
        self.compared = trainer.changes.same_function
        self.reference = Reference(r, catalog, self.device) if self.compared else None
        self.progress = Progress()
        self._losses: list[Any] = []
        self._began = 0.0
        self._timed = 0
        self._saved = (-math.inf, 0.0)
        """When the last save was, and how long it took."""

    def run(self) -> Progress:
        """All steps that are left."""
        self.trainer.load(self._first())
        kept = self.checkpoint.load(self.device)
        if kept is not None:
            self.progress = Progress.of(kept["progress"])
            self.trainer.restore(kept["trainer"])
            self._losses = list(kept["losses"])
        else:
            self.no_leak()
            self._validate()
        looks = set(range(0, self.steps, min(EVERY, max(1, self.steps // 4))))
        points = set(validated(self.steps))
        saves = {round(x * self.steps / CHECKPOINTS) for x in range(1, CHECKPOINTS)}
        self._begin()
        self.trainer.board = Watch(self.session.device.nvml)
        with self.trainer.board.beside():
            for step in range(self.progress.step, self.steps):
                self._step(step, step in looks)
                self.progress.step = step + 1
                if step + 1 in points:
                    self._validate()
                if step + 1 in saves:
                    self._save()
        self.no_leak()
        return self.progress

    def _first(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that training starts from. Of another architecture those before are not."""
        if self.before is None:
            yield from initial(self.recipe, self.session.seed, self.device)
            return
        if self.trainer.changes.model:
            raise NotImplementedError("another model has other weights than the checkpoint")
        for name, x in self.before.items():
            yield name, x.to(self.device, torch_dtype(self.recipe.dtype))

    def text(self, batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The first batches of the validation text."""
        r = self.recipe
        return list(islice(validation(self.source, r.B, r.S, self.device), batches))

    def _step(self, step: int, look: bool) -> None:
        lost = self.trainer.changes.losing
        # A step at a rate of 0: moments see its gradient, weights do not move.
        made = not lost or (step + 1) % lost
        self.trainer.hyperparameters["lr"] = rate(step, self.steps, self.most) if made else 0.0
        batch = self.order.draw(step)
        if look:
            self._pause()
            self._losses.append(self.progress.health.look(self.trainer, batch, step, self.reference))
            self._begin()
            return
        self._losses.append(self.trainer.step(*batch))
        self._timed += 1

    def _begin(self) -> None:
        self.session.device.synchronize()
        self._began = time.perf_counter()

    def _pause(self) -> None:
        """Ends a stretch of steps in a row; their time counts."""
        self.session.device.synchronize()
        took = time.perf_counter() - self._began
        if self._timed:
            self.progress.seconds += took
            self.progress.rates.append(self._timed * self.recipe.tokens / took)
        self._timed = 0

    def _validate(self) -> None:
        """The losses so far and the validation text's. Raises `Incorrect` where one is not finite."""
        self._pause()
        step = self.progress.step
        if self._losses:
            mean = sum(float(x) for x in self._losses) / len(self._losses)
            self._losses = []
            if not math.isfinite(mean):
                raise Incorrect(
                    f"diverged: the training loss is not finite by step {step} of {self.steps}"
                    f"{self.progress.health.exploded()}"
                )
            self.progress.losses.append((step, mean))
        r = self.recipe
        # Of logits in fp32: a loss of the model's own dtype has steps in bf16 that are a quarter of the margin.
        bits = tasks.bits(self.trainer.logits, validation(self.source, r.B, r.S, self.device))
        if not math.isfinite(bits):
            raise Incorrect(f"diverged: the validation loss is not finite after step {step} of {self.steps}")
        self.progress.bits.append((step, bits))
        self._begin()

    def _save(self) -> None:
        before, took = self._saved
        if time.perf_counter() - before < SAVING * took:
            return
        self._pause()
        began = time.perf_counter()
        # Losses since the last validation belong to the next mean.
        pending = [float(x) for x in self._losses]
        self.checkpoint.save(
            {"trainer": self.trainer.state(), "progress": self.progress.state(), "losses": pending}
        )
        self._saved = (time.perf_counter(), time.perf_counter() - began)
        self._begin()

    def no_leak(self) -> None:
        """Raises `Incorrect` where logits depend on what comes after them. From the middle on other tokens follow,
        at a boundary of blocks.
        """
        import torch

        r = self.recipe
        tokens = self.order.draw(-1)[0][0]
        half = r.S // 2
        other = tokens.clone()
        other[:, half:] = (tokens[:, half:].flip(-1) ^ 1) % r.chosen.configuration.vocabulary
        one, two = (self.trainer.logits(x)[:, :half] for x in (tokens, other))
        norm = torch.linalg.vector_norm
        off = float(norm((one - two)[:, -1]) / norm(one[:, -1]))
        if not off <= (LEAK if self.trainer.probe is None else LEAK_8_BITS):
            raise Incorrect(f"position {half - 1} sees what comes after it: its logits change by {off:.2g}")

    def share(self) -> float | None:
        """Of product operations in 8 bits, counted where they can be; None for an arm that claims none."""
        if self.trainer.probe is None:
            return None
        low = self.progress.health.low
        return low_share(self.recipe) if low is None else low


def verify(trainer: ArmTrainer, given: Recipe, session: Session, expected: answer.Expected) -> dict[str, float]:
    """Loss, gradients and three updates of an arm that computes the model's function, as `train` checks them."""
    from .train import Prepared, Program

    recipe = dataclasses.replace(given, products=trainer.recipe.products)
    program = Program(recipe, trainer, session, Prepared(expected))
    program.verify()
    return program.errors
