"""Convergence: a model trained for N steps on bytes of the corpus, each system an arm, each replicate a seed.

Arms of a case share initial weights, order of data and schedule. The loss on the validation text at declared steps
is judged by equivalence; curves, speed and the gradients' health stand beside it. An arm that claims to compute
the model's function is checked first, as `train` checks it; none may see what comes after a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ...registry.store.metric import Equivalence, Metric
from ...registry.store.record import Case, Measurement
from ..measure.rounding import FP32, rounded
from ..measure.verify import Incorrect, Unavailable
from ..model import chosen
from ..system import Assembly
from ..workload import Workload
from . import _expected as answer
from . import _tasks as tasks
from . import _text as text
from . import _weights
from ._arms import ArmTrainer
from ._deterministic import OPTION, held
from ._recipe import HYPERPARAMETERS, Recipe
from ._sparse import OFF
from .train import COMPRESSION, catalog
from .train import METRICS as TRAIN

if TYPE_CHECKING:
    from ..measure.session import Session
    from ._training import Training

MARGIN = 0.0025
"""Of the paired relative difference of validation losses."""
DECLARED = (1000, 5000, 10000)
MET = "the loss is at the case's target before the first step: steps and time to the target say nothing"

METRICS = (
    Metric(
        "bits_per_byte",
        "bit",
        summary="last",
        judged=Equivalence(MARGIN),
        label="bits/byte",
        shown="table",
        about="Of the validation text, after the last step.",
    ),
    *(
        Metric(
            f"bits_per_byte@{step}",
            "bit",
            summary="last",
            judged=Equivalence(MARGIN),
            label=f"bits/byte, {step} steps",
            about=f"Of the validation text, after {step} steps.",
        )
        for step in DECLARED
    ),
    *tasks.TASKS,
    next(x for x in TRAIN if x.name == "tokens_per_s"),
    Metric(
        "steps_to_target", "1", label="steps to target", about="Until the validation loss is the case's target."
    ),
    Metric(
        "seconds_to_target",
        "s",
        label="time to target",
        about="Of training until then, validation and checkpoints apart.",
    ),
    Metric(
        "bits_by_step", "bit", shown="never", abscissa="validated_step", about="Validation bits a byte by step."
    ),
    Metric("validated_step", "1", better="neither", shown="never"),
    Metric(
        "training_loss",
        "1",
        shown="never",
        abscissa="training_step",
        about="Mean over the steps since the point before, in nats a byte.",
    ),
    Metric("training_step", "1", better="neither", shown="never"),
    Metric(
        "gradient_cosine",
        "1",
        better="higher",
        summary="minimum",
        about="Between a layer's gradient and that of the same model in fp32, the least over layers and looks.",
    ),
    Metric(
        "update_ratio",
        "1",
        better="neither",
        summary="maximum",
        about="A layer's update over its weights, by norm, the largest over layers and looks.",
    ),
    Metric("clipped", "1", better="neither", about="Share of steps whose gradients were clipped."),
    Metric("nonfinite", "1", about="Steps whose gradients were not finite."),
    Metric("skipped", "1", about="Steps that fp16 left out because gradients overflowed."),
    COMPRESSION,
    Metric(
        "compression_accuracy",
        "1",
        better="higher",
        label="compression accuracy",
        about="Cosine between the gradient that was to be sent, with what earlier steps left, and what arrives.",
    ),
    Metric(
        "left_out",
        "1",
        better="neither",
        label="tiles left out",
        about="Share of causal tiles of 128 × 128 that attention's blocks leave out, counted after training.",
    ),
    Metric(
        "fp8_share",
        "1",
        better="neither",
        about="Share of product operations in 8 bits, counted in a pass; where that cannot be, of the layers' "
        "linears, and a remark says so. From 0.9 on an arm bears the precision's name.",
    ),
    Metric(
        "fp8_saturation",
        "1",
        summary="maximum",
        about="Largest share of a tensor's elements beyond the largest of its 8 bits.",
    ),
    Metric(
        "fp8_underflow",
        "1",
        summary="maximum",
        about="Largest share of a tensor's elements that become 0 in its 8 bits.",
    ),
    *(
        Metric(f"{name}_by_layer", "1", better="neither", shown="never", about=about)
        for name, about in (
            ("gradient_norm", "Norm of a layer's gradient before clipping; layer -1 is what is in none."),
            ("update_ratio", "A layer's update over its weights, by norm."),
            ("gradient_cosine", "Between a layer's gradient and that in fp32."),
            ("fp8_saturation", "Largest share of elements beyond the largest of 8 bits, of a layer's tensors."),
            ("fp8_underflow", "Largest share of elements that become 0."),
            ("fp8_amax", "Largest magnitude among a layer's inputs, weights and gradients of its linears."),
        )
    ),
    Metric("health_step", "1", better="neither", shown="never", about="The step of each entry by layer."),
    Metric("health_layer", "1", better="neither", shown="never", about="The layer of each entry by layer."),
    Metric(
        "exploded_step",
        "1",
        better="neither",
        shown="never",
        about="Steps of looks at layers that were not finite.",
    ),
    Metric("exploded_layer", "1", better="neither", shown="never", about="The layer of each such look."),
    *(x for x in TRAIN if x.name in ("loss_error", "gradient_error", "change_error")),
)


def read(case: Case) -> Recipe:
    """What all arms of a case share. AdamW keeps masters and moments in fp32."""
    return Recipe(
        chosen=chosen(catalog().models, str(case.options["model"])),
        B=case.axes["B"],
        S=case.axes["S"],
        accumulation=case.axes.get("A", 1),
        dtype=case.dtype,
        products=case.dtype,
        state="plain" if case.dtype == "fp32" else "master32",
        clip=1.0,
    )


def assemble(case: Case, assembly: Assembly) -> ArmTrainer:
    """A system's arm. Raises NotImplementedError for a model of fewer tokens than its text has."""
    vocabulary = read(case).chosen.configuration.vocabulary
    if case.options["data"] == text.ENCODED and vocabulary < 50257:
        raise NotImplementedError(f"a model of {vocabulary} tokens, GPT-2's are 50257")
    return ArmTrainer(read(case), assembly)


def prepare(case: Case, session: Session) -> answer.Expected:
    """The first steps' answer in fp32. Raises NotImplementedError for sequences longer than the model takes,
    `Unavailable` where there is nothing to learn from.
    """
    r = read(case)
    longest = r.chosen.model.longest(r.chosen.configuration)
    if longest is not None and longest < r.S:
        raise NotImplementedError(f"{r.chosen.name} has positions for {longest} tokens, not {r.S}")
    if r.chosen.configuration.vocabulary < 256:
        raise NotImplementedError(f"{r.chosen.name} has {r.chosen.configuration.vocabulary} tokens, bytes are 256")
    text.source(str(case.options["data"]))
    if case.axes["P"]:
        _weights.find(*_before(case))
        if WORKLOAD.spec(case) != case.spec:
            raise Unavailable(_weights.OTHER)
    try:
        return answer.compute(r, catalog(), session.seed, session.device.torch_device)
    finally:
        session.device.release()


def prepared(case: Case, session: Session) -> answer.Expected:
    """`prepare`, bit for bit again where the case asks for that."""
    with held(_deterministic(case), session.device.kind):
        return prepare(case, session)


def _deterministic(case: Case) -> bool:
    return bool(case.options.get(OPTION, False))  # a recorded case may be older than the option


def _before(case: Case) -> tuple[str, str, int]:
    """What names the weights that training goes on from: model, data, steps."""
    return str(case.options["model"]), str(case.options["data"]), case.axes["P"]


def measure(case: Case, system: ArmTrainer, session: Session, expected: answer.Expected) -> Measurement:
    """One arm: checked where it claims to be the same function, trained, validated."""
    from ._checkpoint import Checkpoint
    from ._training import Training, verify

    errors: dict[str, float] = {}
    with session.stage("verify"):
        if system.changes.same_function:
            errors = verify(system, read(case), session, expected)
    del expected
    checkpoint = Checkpoint.of(
        session.scratch,
        case.operator,
        case.name,
        case.spec,
        session.seed,
        msgspec.to_builtins(system.assembly.system),
    )
    steps, lr = case.axes["N"], float(case.options["lr"])
    source = text.source(str(case.options["data"]))
    before = _weights.load(*_before(case)) if case.axes["P"] else None
    training = Training(system, source, steps, lr, session, catalog(), checkpoint, before)
    try:
        with session.stage("sample"):
            training.run()
        with session.stage("summarize"):
            found = _measurement(training, errors, float(case.options["target"]), session)
    except Incorrect:  # it would end so again
        checkpoint.remove()
        raise
    checkpoint.remove()
    return found


def measured(case: Case, system: ArmTrainer, session: Session, expected: answer.Expected) -> Measurement:
    """One arm, by what its text is of; with what the board said beside its steps."""
    how = measured_tokens if case.options["data"] == text.ENCODED else measure
    with held(_deterministic(case), session.device.kind):
        found = how(case, system, session, expected)
    watched = getattr(system, "board", None)
    telemetry = None if watched is None else watched.telemetry()
    # Here, as nothing of what is computed depends on it.
    met = (MET,) if found.samples.get("steps_to_target") == (0,) else ()
    return msgspec.structs.replace(found, telemetry=telemetry, remarks=(*found.remarks, *met))


def measured_tokens(case: Case, system: ArmTrainer, session: Session, expected: answer.Expected) -> Measurement:
    """`measure` of a text of tokens. Of them the loss is taken, of bytes it is told: bits of the validation text
    over its bytes. What is planted for `needle_bits` are eight tokens.
    """
    share = text.source(text.ENCODED).share
    target = float(case.options["target"]) / share
    found = measure(
        msgspec.structs.replace(case, options={**case.options, "target": target}), system, session, expected
    )
    bits = (*(x for x in found.samples if x.startswith("bits_")), "last_quarter_bits", "copying_bits")
    told = {x: rounded([share * y for y in found.samples[x]], FP32) for x in bits}
    return msgspec.structs.replace(found, samples={**found.samples, **told})


def _measurement(training: Training, errors: dict[str, float], target: float, session: Session) -> Measurement:
    from ...registry.analysis.curves import at, reached

    done, trainer = training.progress, training.trainer
    curve = [(float(step), bits) for step, bits in done.bits]
    found: dict[str, Any] = {
        "bits_per_byte": [curve[-1][1]],
        "bits_by_step": [bits for _, bits in curve],
        "validated_step": [step for step, _ in curve],
        "training_loss": [loss for _, loss in done.losses],
        "training_step": [float(step) for step, _ in done.losses],
        "clipped": [int(trainer.counts["clipped"]) / training.steps],
        "nonfinite": [float(trainer.counts["nonfinite"])],
        **{name: [value] for name, value in errors.items()},
    }
    asked = tasks.asked(training.text(tasks.BATCHES), training.session.seed)
    found |= {name: [tasks.bits(trainer.logits, batches)] for name, batches in asked.items()}
    remarks: list[str] = []
    if (share := trainer.left_out(training.text(1)[0][0])) is not None:
        found["left_out"] = [share]
        if (wrong := _misnamed(share, trainer)) is not None:
            remarks.append(wrong)
    for step in DECLARED:
        if step < training.steps:
            found[f"bits_per_byte@{step}"] = [at(curve, step)]
    if done.rates:
        found["tokens_per_s"] = done.rates
    if (step_there := reached(curve, target)) is not None:
        found["steps_to_target"] = [step_there]
        found["seconds_to_target"] = [done.seconds * step_there / training.steps]
    if trainer.scaled:
        found["skipped"] = [float(trainer.counts["skipped"])]
    if trainer.ratio is not None:
        found["compression_ratio"] = [trainer.ratio]
        found["compression_accuracy"] = [float(x) for x in trainer.sent]
    if (share := training.share()) is not None:
        found["fp8_share"] = [share]
        if done.health.at and done.health.low is None:
            remarks.append("fp8_share follows from the model's sizes: no product in 8 bits could be counted")
    found |= done.health.samples(training.compared, trainer.probe is not None)
    return Measurement(
        samples={name: rounded(values, FP32) for name, values in found.items()},
        timer="own clock" if session.device.kind == "cpu" else "own clock, device synchronized",
        remarks=tuple(remarks),
    )


def _misnamed(share: float, trainer: ArmTrainer) -> str | None:
    """What is wrong with the name of an arm that leaves out that share of tiles; None where it bears it."""
    named = trainer.changes.left_out
    if named is None or abs(share - named) <= OFF:
        return None
    return (
        f"{trainer.changes.attention} leaves out {share:.1%} of the tiles at S = {trainer.recipe.S}, more than "
        f"{OFF:.0%} off {named:.0%}: no name for it"
    )


@dataclass(frozen=True, kw_only=True)
class Converge(Workload):
    """The workload. A case's hash covers its model, its data and how they are learned from."""

    def computes(self, case: Case) -> tuple[object, ...]:
        """How arms are trained and judged, by whose module, from which numbers."""
        found = read(case).chosen
        model = found.model
        own = (model.module, model.weights, repr(found.configuration))
        before = (_weights.digest(*_before(case)),) if case.axes.get("P") else ()
        # Of bytes what it was before there were tokens.
        how = (measured_tokens,) if case.options["data"] == text.ENCODED else ()
        # A switch for algorithms that give the same bits each time changes nothing of what is computed.
        first = prepare if self.prepare is prepared else self.prepare
        return (first, measure, *self.definition, case.dtype, *own, _data(case), *before, *how)


def _data(case: Case) -> str:
    """What names the text."""
    if case.options["data"] == text.ENCODED:
        from ..corpus import encoding
        from ..corpus.manifest import load

        return f"{load().digest} {encoding.ENCODER}"
    if case.options["data"] == "corpus":
        from ..corpus.manifest import load

        return load().digest
    return repr(text.SYNTHETIC)


WORKLOAD = Converge(
    name="converge",
    summary="Training to a loss: is another precision, kernel, optimizer or attention as good, seed by seed?",
    axes={
        "B": "sequences a micro-batch",
        "S": "bytes a sequence, or tokens",
        "N": "steps",
        "A": "micro-batches a step",
        "P": "steps that a checkpoint was trained for before; 0: from random weights",
    },
    least={"B": 1, "S": tasks.SHORTEST, "N": 1, "A": 1},
    options={
        "model": tuple(x for model in catalog().models.values() for x in model.configurations),
        "data": (*text.DATA, text.ENCODED),
        "lr": (1e-3, 2.5e-4, 5e-4, 2e-3, 4e-3, 1.25e-4),
        "target": (2.0, 1.0, 1.2, 1.5, 3.0, 4.0),
        OPTION: (False, True),
    },
    later={"A": 1, "P": 0, OPTION: False},
    seeded=True,
    dtypes=("bf16", "fp32"),
    bytes=lambda case: read(case).bytes * case.axes["N"],
    flops=lambda case: read(case).flops * case.axes["N"],
    tokens=lambda case: read(case).tokens * case.axes["N"],
    measured=METRICS,
    prepare=prepared,
    measure=measured,
    assemble=assemble,
    definition=(text.synthetic, text.validation, tasks.asked, tasks.bits, tuple(HYPERPARAMETERS.items())),
    # Rows of a table came to be looked up by a part of the model, which computes the same.
    continues={
        "3608939f5511": "d9726d4d05e8",
        "665a43cd3103": "74959d16543e",
        "2e362e4ed12c": "c1374b2e3843",
        "178f11525013": "20a2dadbfa62",
        "fc66796788aa": "aa99527ecd9f",
    },
    plans={},
)
