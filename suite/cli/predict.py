"""`kernelmark predict`: steps of a run on more GPUs than it had."""

from __future__ import annotations

from typing import Any

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.record import GPUS
from .formats import Form, emit, formats
from .names import run_argument


@click.command("predict")
@run_argument("run")
@click.option("--gpus", default="4,8", show_default=True, help="GPUs of a host to predict for.")
@click.option("--hosts", default=1, type=click.IntRange(1), show_default=True, help="Hosts of so many GPUs each.")
@click.option("--alpha", type=click.FloatRange(0), help="Between hosts: µs that a message takes.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Between hosts: GB/s of each GPU's link.")
@formats
def command_predict(run: str, gpus: str, hosts: int, alpha: float | None, rate: float | None, form: Form) -> None:
    """Predictions, from a run's steps on one GPU and on several, and its all-reduces on as many.

    A step takes what it computes, and what communication is left when as much is hidden as was before; an
    all-reduce takes a time for each of its steps and for each byte, fitted to those of the run. Each is made from
    the next smaller number of GPUs, and stands beside what the run measured where it did. Steps that send
    gradients in fewer bytes have the link speed below which that is worth it. Exit code 4 if the run lacks what
    that takes.
    """
    from ...registry.analysis import scaling
    from ...registry.analysis.rows import rows
    from ...registry.views import prediction_table

    worlds = _worlds(gpus)
    between = None
    if hosts > 1:
        if alpha is None or rate is None:
            raise InputError("what is between hosts is not measured: give --alpha µs and --rate GB/s.")
        between = scaling.Link(alpha * 1e-3, rate * 1e6)
    elif alpha is not None or rate is not None:
        raise InputError("--alpha and --rate are of what is between hosts: give --hosts too.")
    journal = Home().load(run)
    predicted = scaling.predictions(journal, worlds, hosts, between)
    even = scaling.break_evens(journal)
    if not predicted and not even:
        raise scaling.NothingToPredict(
            "nothing to predict from: it takes a run with `train` on one GPU and on several, by the same "
            "implementation, and `all_reduce` by torch_distributed of two sizes on as many: no more than --gpus, "
            "and fewer where --hosts is 1."
        )
    emit(
        form,
        lambda: prediction_table.page(predicted, even, scaling.links(rows(journal))),
        lambda: {
            "schema_version": 1,
            "predictions": [_plain(x) for x in predicted],
            "break_evens": [_break_even(x) for x in even],
        },
        lambda: map(_plain, predicted),
    )


def _worlds(text: str) -> list[int]:
    """The numbers of `--gpus`."""
    try:
        found = sorted({int(x) for x in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise InputError(f"--gpus is {text!r}; numbers of GPUs, as 4,8.")
    return found


def _plain(x: Any) -> dict[str, Any]:
    """A prediction in plain numbers."""
    return {
        "operator": x.row.operator,
        "case": x.row.case,
        "implementation": x.row.implementation,
        "from_gpus": x.row.axes[GPUS],
        "gpus": x.world,
        "hosts": x.hosts,
        "predicted_ms": x.ms,
        "efficiency": x.efficiency,
        "measured_ms": x.seen_ms,
        "off": x.off,
    }


def _break_even(x: Any) -> dict[str, Any]:
    """The link speed below which fewer bytes pay, in plain numbers; None where they pay at any."""
    return {
        "operator": x.row.operator,
        "case": x.row.case,
        "implementation": x.row.implementation,
        "gpus": x.row.axes[GPUS],
        "compression_ratio": x.ratio,
        "step_ms": x.row.value(),
        "plain_ms": x.plain.value(),
        "rate_gb_s": x.rate,
    }
