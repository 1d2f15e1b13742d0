"""`kernelmark checkpoint`: trains a small model, for workloads that need weights that have learned something."""

from __future__ import annotations

import click

from ...registry.errors import unknown
from ...registry.figures import counted
from ..run.fingerprint import device_named
from .names import models
from .values import Seed


@click.command("checkpoint")
@click.argument("model", shell_complete=models)
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True, help="Optimizer steps.")
@click.option("--data", default="corpus", show_default=True, help="corpus, or synthetic, which needs nothing.")
@click.option("--batch", type=click.IntRange(1), default=16, show_default=True, help="Sequences a step.")
@click.option("--sequence", type=click.IntRange(4), default=256, show_default=True, help="Bytes a sequence.")
@click.option("--device", help="cuda, rocm, xpu, mps or cpu; default: the best one here.")
@click.option("--seed", type=Seed(), default=0, show_default=True, help="Of weights and order of data.")
def command_checkpoint(
    model: str, steps: int, data: str, batch: int, sequence: int, device: str | None, seed: int
) -> None:
    """Train a MODEL on bytes and keep its weights: gpt2-1m-bytes takes minutes on a CPU.

    They lie in $KERNELMARK_CHECKPOINTS, by default in the folder `checkpoints` of the results' home.
    """
    from ..catalog import Catalog
    from ..checkpoints import make
    from ..run.progress import Tally

    options = Catalog.default().definition("converge").options
    for name, given in (("model", model), ("data", data)):
        if given not in options[name]:
            raise unknown(name, given, [str(x) for x in options[name]])
    with Tally("training") as tally:
        path, bits = make(model, data, steps, batch, sequence, device_named(device), seed, tally.show)
    click.echo(f"{path}: {bits:.4f} bits a byte after {counted(steps, 'step')}")
