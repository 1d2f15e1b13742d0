"""The plan of published benchmarks is what the table of figures says, and the table knows every peer."""

from __future__ import annotations

import pytest
from kernelmark.registry.analysis.published import published
from kernelmark.registry.store.record import FAKE, PROVIDER, YARDSTICK
from kernelmark.suite import fidelity
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog

OWN = Catalog.default()
KNOWN = published()


def test_the_plan_is_what_the_table_says() -> None:
    assert (plans.FILES / "fidelity.toml").read_text() == fidelity.text(KNOWN, OWN)


def test_each_figure_is_of_a_cell_of_the_plan() -> None:
    plan = plans.load("fidelity", OWN, "cuda")
    cells = {(x.case.operator, x.case.name, x.implementation.name) for x in plan.cells(OWN, "cuda")}
    asked = {(x.operator, x.case, y) for x in KNOWN.figures for y in (x.peer, x.over) if y}
    assert asked <= cells  # a name that is a provider's too asks for all of it
    assert {x[:2] for x in asked} == {x[:2] for x in cells}


def test_every_peer_is_in_the_table() -> None:
    peers = {x.name for x in OWN.implementations if x.provider not in (PROVIDER, YARDSTICK, FAKE)}
    assert peers == KNOWN.peers


@pytest.mark.parametrize(
    ("peer", "operator", "pass_", "work"),
    [
        # What authors count: their throughput times their time, where both are published; else their formula.
        ("sdpa_cudnn", "attention", "forward", 644e12 * 1.708e-3),
        ("sdpa_cudnn", "attention", "backward", 541e12 * 5.083e-3),
        ("sdpa_cudnn", "attention_mla", "forward", 599e12 * 1.148e-3),
        ("flash_mla", "attention_mla_decode", "forward", 2 * 128 * 128 * 2 * 32768 * (576 + 512)),
        ("quack", "rms_norm", "forward", 2 * 32768 * 4096 * 2),
        ("quack", "softmax", "forward", 2 * 32768 * 8192 * 2),
        ("quack", "cross_entropy", "forward", 32768 * 32768 * 2),
        ("torch", "rms_norm", "forward", (8192 * 4096 + 4096 + 8192 * 4096) * 2 + 8192 * 4),
    ],
)
def test_we_count_the_work_that_authors_count(peer: str, operator: str, pass_: str, work: float) -> None:
    figure = next(x for x in KNOWN.figures if (x.peer, x.operator, x.pass_) == (peer, operator, pass_))
    case = fidelity.case(figure, OWN)
    assert (case.flops if figure.unit == "TFLOP/s" else case.bytes) == pytest.approx(work, rel=0.01)
