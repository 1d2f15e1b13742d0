"""Makes small checkpoints: a model trained by PyTorch's own system, for whoever needs trained weights."""

from __future__ import annotations

from pathlib import Path

from ..registry.errors import InputError
from ..registry.progress import Tell, untold
from ..registry.store.record import DeviceKind
from .catalog import Catalog
from .measure.device import opened
from .measure.session import Session
from .measure.stages import Stages
from .measure.stopping import Sampling
from .measure.verify import Incorrect, Unavailable
from .system import Assembly, System


def make(
    model: str,
    data: str,
    steps: int,
    batch: int,
    sequence: int,
    device: DeviceKind,
    seed: int,
    tell: Tell = untold,
) -> tuple[Path, float]:
    """Trains and writes; gives the file and the validation text's bits a byte."""
    from .workloads import _weights, converge
    from .workloads._checkpoint import Checkpoint
    from .workloads._text import source
    from .workloads._training import Training

    class Told(Training):
        def _step(self, step: int, look: bool) -> None:
            tell(f"step {step} of {steps}", step / steps)
            super()._step(step, look)

    dtype = "fp32" if device == "cpu" else "bf16"
    axes = {"B": batch, "S": sequence, "N": steps}
    case = converge.WORKLOAD.case(axes, dtype, "program", model=model, data=data)
    chosen = converge.read(case).chosen
    if (longest := chosen.model.longest(chosen.configuration)) is not None and longest < sequence:
        raise InputError(f"{model} has positions for {longest} tokens, not {sequence}.")
    catalog = Catalog.default()
    try:
        trainer = converge.assemble(case, Assembly(System("torch"), catalog))
    except NotImplementedError as error:
        raise InputError(f"{model} cannot learn from {data}: {error}.") from None
    place = opened(device)
    session = Session(place, seed, 0, Sampling(), Stages())
    try:
        text = source(data)
    except Unavailable as error:
        raise InputError(str(error)) from None
    rate = float(case.options["lr"])
    with place.using():
        try:
            done = Told(trainer, text, steps, rate, session, catalog, Checkpoint(None)).run()
        except Unavailable as error:  # a batch that is larger than the text
            raise InputError(f"{error}.") from None
        except Incorrect as error:  # a model that is no decoder, or a rate that it does not bear
            raise InputError(f"{model} does not learn from {data} so: {error}.") from None
        target = _weights.save(case, seed, trainer.weights())
    return target, done.bits[-1][1]
