"""Quality: a trained model's perplexity, and what exchanging any part of it by another implementation costs.

All systems get the same weights and text. Their logits are held to those of the same weights in fp32: divergence,
agreement of the most likely byte, change of bits a byte. Small tasks are made of the text itself (`_tasks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...registry.store.metric import Equivalence, Metric, Ratio
from ...registry.store.record import Case, Measurement
from ..measure.rounding import FP32, rounded
from ..measure.verify import Unavailable
from ..system import Assembly
from . import _expected as answer
from . import _tasks as tasks
from . import _text as text
from . import _weights, converge
from ._agreement import LIMITS, exchanged, of_goal
from ._arms import ArmTrainer
from ._lm_eval import MADE
from .train import catalog

if TYPE_CHECKING:
    from ..measure.session import Session

TASKS = ("corpus", *MADE, "lambada_openai", "hellaswag", "piqa", "arc_easy")
"""Of the corpus itself; by lm-eval, made of the corpus; or lm-eval's own, which need its data."""
EXAMPLES = 200
"""Of a task by lm-eval."""
TIE = 5e-2
"""Logits that are as near as that are equal: of bf16, which of two near 10 is the larger is rounding's."""

METRICS = (
    Metric(
        "quality_bits",
        "bit",
        summary="last",
        judged=Equivalence(0.0025),
        label="bits/byte",
        shown="table",
        about="Perplexity of the validation text as bits a byte: its logarithm to the base 2.",
    ),
    Metric(
        "quality_change",
        "1",
        better="neither",
        label="change of bits",
        shown="table",
        about="Of bits a byte against the same weights in fp32, relative.",
    ),
    Metric(
        "quality_of_goal",
        "1",
        label="change over goal",
        shown="table",
        about="Change of bits a byte of an exchange in bf16 over the goal, 1e-4: at most 1 where it is met.",
    ),
    Metric(
        "kl",
        "1",
        across="maximum",
        judged=Ratio(above=1.0, test="separation", floor=1e-7),
        label="KL",
        shown="table",
        about="Divergence of the distribution from that in fp32, nats a byte.",
    ),
    Metric(
        "top1_agreement",
        "1",
        better="higher",
        label="top-1 agreement",
        shown="table",
        about="Share of positions with the same most likely byte as in fp32, those left out where two are equal.",
    ),
    Metric("ties", "1", better="neither", about="Share of positions left out there."),
    *tasks.TASKS,
    Metric(
        "task_accuracy",
        "1",
        better="higher",
        label="accuracy",
        about="Of a task by lm-eval: of the examples, how many it gets right.",
    ),
)


@dataclass(frozen=True)
class Prepared:
    """The weights, the SHA-256 of their file, batches (tokens, targets) of (B, S) by what they are, and logits of
    the text in fp32.
    """

    weights: dict[str, Any]
    digest: str
    batches: dict[str, list[tuple[Any, Any]]]
    logits: list[Any]


def assemble(case: Case, assembly: Assembly) -> ArmTrainer:
    """A system of parts, of which only the forward pass is used."""
    return ArmTrainer(converge.read(case), assembly)


def prepare(case: Case, session: Session) -> Prepared:
    """Text, tasks, weights and the logits of the model in fp32. Raises `Unavailable` where text or weights are not
    here, or other weights than when the case was planned.
    """
    import torch

    r, device = converge.read(case), session.device.torch_device
    longest = r.chosen.model.longest(r.chosen.configuration)
    if longest is not None and longest < r.S:
        raise NotImplementedError(f"{r.chosen.name} has positions for {longest} tokens, not {r.S}")
    source = text.source(str(case.options["data"]))
    weights = {name: x.to(device) for name, x in _weights.load(*_trained(case)).items()}
    if WORKLOAD.spec(case) != case.spec:
        raise Unavailable(_weights.OTHER)
    found = list(text.validation(source, r.B, r.S, device))[: tasks.BATCHES]
    batches = {"text": found, **tasks.asked(found, session.seed)}
    module = answer.reference_module(
        r.chosen, r.S, catalog(), device, {"loss": lambda x, weight, target: x @ weight.mT}
    )
    with torch.no_grad():
        for name, x in module.named_parameters():
            x.copy_(weights[name])
        logits = [module(x, y).view(*x.shape, -1) for x, y in found]
    return Prepared(weights, _weights.digest(*_trained(case)), batches, logits)


def _trained(case: Case) -> tuple[str, str, int]:
    """What names the weights: model, data, steps."""
    return str(case.options["model"]), str(case.options["data"]), case.axes["N"]


def measure(case: Case, system: ArmTrainer, session: Session, prepared: Prepared) -> Measurement:
    """One system: its logits held to those in fp32, its perplexity, the small tasks."""
    from ..measure.verify import Incorrect

    if system.execution != "eager":
        raise NotImplementedError("parts are exchanged; how the rest is executed is what `train` compares")
    system.load(prepared.weights.items())
    task = str(case.options["task"])
    with session.stage("verify"):
        found = _against(system.logits, prepared)
        if system.changes.same_function:
            precision = system.products
            wrong = exchanged(found["kl"], found["top1_agreement"], found["quality_change"], precision)
            if wrong is not None:
                raise Incorrect(wrong)
            if (goal := of_goal(found["quality_change"], precision)) is not None:
                found["quality_of_goal"] = goal
    with session.stage("sample"):
        for x in tasks.TASKS:
            found[x.name] = tasks.bits(system.logits, prepared.batches[x.name])
        if task != "corpus":
            found["task_accuracy"] = _by_lm_eval(task, case, system, session)
    samples = {name: rounded([x], FP32) for name, x in found.items()}
    remarks = (f"weights of SHA-256 {prepared.digest[:16]}",)
    return Measurement(samples=samples, timer="none: nothing is timed", remarks=remarks)


def _by_lm_eval(task: str, case: Case, system: ArmTrainer, session: Session) -> float:
    from ._lm_eval import accuracy, examples, language_model, made

    r = system.recipe
    try:
        model = language_model(system.logits, r.B, r.S, session.device.torch_device)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise Unavailable(f"task {task}: lm_eval is not installed: pip install 'kernelmark[quality]'") from None
    if task not in MADE:
        return accuracy(task, model, EXAMPLES)
    docs = examples(task, text.source(str(case.options["data"])).validation, r.S, EXAMPLES)
    return accuracy(made(task, docs), model, EXAMPLES)


def _against(logits: Callable[[Any], Any], prepared: Prepared) -> dict[str, float]:
    """What an arm's logits say of the text beside those in fp32. Raises `Incorrect` where they are not finite."""
    import torch

    from ..measure.verify import Incorrect

    sums = dict.fromkeys(("own", "wide", "kl", "agreed", "apart"), 0.0)
    count = 0
    for (tokens, targets), wide in zip(prepared.batches["text"], prepared.logits, strict=True):
        own = logits(tokens)
        if not bool(torch.isfinite(own).all()):
            raise Incorrect("logits are not finite")
        likely, sure = own.double().log_softmax(-1), wide.double().log_softmax(-1)
        sums["own"] -= float(likely.gather(-1, targets[..., None]).sum())
        sums["wide"] -= float(sure.gather(-1, targets[..., None]).double().sum())
        sums["kl"] += float((sure.exp() * (sure - likely)).double().sum())
        two = wide.topk(2, -1).values
        apart = (two[..., 0] - two[..., 1]) > TIE
        sums["agreed"] += float(((own.argmax(-1) == wide.argmax(-1)) & apart).sum())
        sums["apart"] += float(apart.sum())
        count += targets.numel()
    return {
        "quality_bits": sums["own"] / count / text.BITS,
        "quality_change": sums["own"] / sums["wide"] - 1,
        "kl": max(0.0, sums["kl"] / count),
        "top1_agreement": sums["agreed"] / sums["apart"] if sums["apart"] else 1.0,
        "ties": 1 - sums["apart"] / count,
    }


@dataclass(frozen=True, kw_only=True)
class Quality(converge.Converge):
    """The workload. A case's hash covers what weights are learned from, as of `converge`, and the weights' own."""

    def computes(self, case: Case) -> tuple[object, ...]:
        """How exchanges are judged, in which weights: rows of others are of another case."""
        return (*super().computes(case), _weights.digest(*_trained(case)))


WORKLOAD = Quality(
    name="quality",
    summary="A trained model's perplexity, and what exchanging a kernel costs it",
    axes={"B": "sequences a batch", "S": "bytes a sequence", "N": "steps that the weights were trained for"},
    least={"B": 1, "S": tasks.SHORTEST, "N": 1},
    options={
        "model": tuple(x for model in catalog().models.values() for x in model.configurations),
        "data": text.DATA,
        "task": TASKS,
    },
    later={"task": "corpus"},
    dtypes=("bf16", "fp32"),
    bytes=lambda case: 0,
    flops=lambda case: 0,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    measured=METRICS,
    prepare=prepare,
    measure=measure,
    assemble=assemble,
    definition=(text.synthetic, text.validation, answer.reference_module, tuple(LIMITS.items())),
    # Rows of a table came to be looked up by a part of the model, which computes the same.
    continues={
        "a9a9f170e1c8": "2830b5a80e03",
        "b601be62c9ef": "5ae032233049",
        "3c5bb8384e56": "abd054f8dbfd",
    },
    plans={},
)
