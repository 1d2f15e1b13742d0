"""Does `converge` catch arms that are planted bad, and let a good one pass? Small, through the real harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from ...registry.detection.arms import Arm, arms
from ...registry.progress import Tell, untold
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import DeviceKind
from ..catalog import Catalog
from ..measure.stopping import Sampling
from ..plan import Plan
from ..run.progress import Shared
from ..run.supervisor import Run
from ..system import Changes, System
from .examination import Check

Verdict: TypeAlias = Literal["caught", "missed", "unsure"]
SEEDS = 5
STEPS = 60
DEADLINE_S = 300.0
HALF_A_PERCENT = "1/27"
"""The share of its updates that an arm loses to be about half a percent worse in bits a byte: two here. Found on a
CPU by `tests/calibration/arms.py --lost`.
"""
GOOD = ("planted_again", "planted_eight_bits")
"""The base once more, and one that rounds as it should: whoever calls these worse calls everything worse."""

PLANTED: Mapping[str, tuple[str, Changes]] = {
    "planted_again": ("the same arm again passes", Changes()),
    "planted_eight_bits": ("8 bits with their scales pass", Changes(products="e4m3_tensorwise")),
    "planted_topk": ("a gradient of which little is sent", Changes(gradients="topk")),
    "planted_scale": ("a scale that is stuck at 1", Changes(products="e4m3_tensorwise", fault="scale_stuck")),
    "planted_bias": ("a dropped bias correction", Changes(fault="no_bias_correction")),
    "planted_mask": ("a mask that is off by one", Changes(fault="mask_off_by_one")),
    "planted_half_a_percent": ("updates that are lost, half a percent of the loss", Changes(lost=HALF_A_PERCENT)),
    "planted_momentum": ("momentum in 8 bits without a scale", Changes(fault="unscaled_momentum")),
}
"""Systems by name: what is planted."""


def planted_arms(device: DeviceKind, home: Home, tell: Tell = untold) -> Iterator[Check]:
    """Trains the planted arms beside an honest one, five seeds each, and says of each whether it was caught."""
    systems = tuple(System(name, changes=changes) for name, (_, changes) in PLANTED.items())
    catalog = Catalog.default().with_systems(systems)
    options = {"model": "gpt2-tiny", "data": "synthetic"}
    axes = {"B": 8, "S": 32, "N": STEPS}
    dtype = "fp32" if device == "cpu" else "bf16"
    case = catalog.definition("converge").case(axes, dtype, "program", **options)
    only = {f"converge/{case.name}": ("torch", *PLANTED)}
    plan = Plan("doctor-training", (case,), SEEDS, ("cold",), Sampling(), DEADLINE_S, only, systems)
    cells = plan.cells(catalog, device)
    listener = Shared(tell, SEEDS * len(cells))
    tell("loading torch", 0.0)
    run = Run(plan, cells, catalog, device, home, seed=0, ceilings=False, listener=listener)
    yield from judge(read(run.execute()))


def judge(journal: Journal) -> Iterator[Check]:
    """What a journal of planted arms shows."""
    found = {x.name: x for x in arms(journal)}
    for name, (what, _) in PLANTED.items():
        arm = found.get(name)
        if arm is None:
            yield Check(what, "missed", "no row")
        else:
            yield _honest(what, arm) if name in GOOD else _bad(what, arm)


def _said(arm: Arm) -> str:
    if arm.overall == "failed":
        return f"{arm.status}: {arm.reason}"
    return f"{arm.overall}: {arm.points[-1].found.reason}"


def _honest(what: str, arm: Arm) -> Check:
    verdicts: Mapping[str, Verdict] = {"equivalent": "caught", "better": "caught", "inconclusive": "unsure"}
    return Check(what, verdicts.get(arm.overall, "missed"), _said(arm))


def _bad(what: str, arm: Arm) -> Check:
    if arm.status == "incorrect" or arm.overall == "worse":
        return Check(what, "caught", _said(arm))
    return Check(what, "unsure" if arm.overall == "inconclusive" else "missed", _said(arm))
