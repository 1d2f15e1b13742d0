"""What the defences against dishonest kernels cost an honest row.

    python tests/calibration/defences.py --device cuda --output FILE [--rounds 21]

Samples honest rows as a run does (`Trial.sample`, by the timer of the case, with a cold cache), in turns and in
random order: with none of the defences, with inputs exchanged before each timed call alone, with answers copied
after it alone, and with both, which is what a run does. A row's cost is the median over the rounds of the latency
with both over that without, with the interval of that median; at most 5 % is asked for. The checks of what a
kernel may have replaced or switched lie outside of all timing; what they take is told in seconds a row.

Then the same rows are measured by a run, two processes, and its footer tells how the wall time was spent.
`overhead` is what was spent outside of all stages: the harness's own. At most 20 % is asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kernelmark.registry.analysis.statistics import median_interval
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.registry.store.record import Case
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.device import Device, opened
from kernelmark.suite.measure.fresh import Block, Fresh
from kernelmark.suite.measure.pristine import Pristine
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.plan import Plan
from kernelmark.suite.run.supervisor import Run

COST = 0.05
OVERHEAD = 0.2
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "cuda": [
        ("softmax", {"M": 128, "D": 1024}, "bf16", "forward", "torch"),
        ("rms_norm", {"B": 1, "S": 512, "D": 2048}, "bf16", "forward", "torch"),
        ("matmul", {"M": 16, "N": 4096, "K": 7168}, "bf16", "forward", "torch"),
        ("softmax", {"M": 8192, "D": 4096}, "bf16", "forward", "torch"),
        ("rms_norm", {"B": 4, "S": 4096, "D": 4096}, "bf16", "backward", "torch"),
        ("matmul", {"M": 4096, "N": 4096, "K": 4096}, "bf16", "forward", "torch"),
        ("attention", {"B": 2, "H": 32, "Hkv": 8, "S": 4096, "D": 128}, "bf16", "forward", "sdpa_flash"),
    ],
    "cpu": [
        ("softmax", {"M": 16, "D": 1024}, "fp32", "forward", "torch"),
        ("softmax", {"M": 1024, "D": 4096}, "fp32", "forward", "torch"),
        ("rms_norm", {"B": 1, "S": 512, "D": 2048}, "fp32", "forward", "torch"),
        ("rms_norm", {"B": 1, "S": 512, "D": 4096}, "fp32", "backward", "torch"),
        ("matmul", {"M": 512, "N": 1024, "K": 1024}, "fp32", "forward", "torch"),
    ],
}


class Inputs(Fresh):
    """Exchanges inputs, and keeps no answer."""

    def after(self, result: object, calls: int = 1) -> None:
        """Nothing is copied."""


class Answers(Fresh):
    """Keeps answers, and leaves the inputs alone."""

    def _exchange(self, block: Block) -> None:
        """Nothing is laid."""


def row(device: Device, case: Case, implementation: str, rounds: int, seed: int) -> dict[str, Any]:
    """What each defence adds to the latency of one row, and what the checks beside it take."""
    catalog = Catalog.default()
    load = next(x for x in catalog.of_operator(case.operator) if x.name == implementation).load
    bench = Workbench.build(catalog.operator(case.operator), case, device.torch_device, seed)
    sampling = Sampling(min_samples=10, min_seconds=0.02, max_seconds=0.1)
    trial = Trial(device, bench, "cold", sampling, Stages())
    began = time.monotonic()
    pristine = Pristine()
    remembered_s = time.monotonic() - began
    call = bench.call(load()(case))
    trial.verify(call)
    trial.warm_up(call)
    ways = {"none": None, "inputs": Inputs(bench), "answers": Answers(bench), "both": Fresh(bench)}
    timer = trial.calibrate(call)
    generator = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in generator.sample(list(ways), len(ways)):
            bench.lay(bench.values)
            fresh = ways[name]
            if fresh is not None:
                ways[name] = fresh = type(fresh)(bench)  # as at the start of a row
            found[name].append(median(trial.sample(timer, call, fresh)[0]))
    began = time.monotonic()
    pristine.begin()
    for _ in range(4):  # as often as for a row
        pristine.tampered()
    for _ in range(2):
        pristine.settle()
    checked_s = time.monotonic() - began
    costs = {name: cost(found[name], found["none"]) for name in ways if name != "none"}
    return {
        "row": f"{case.operator} {case.name} {implementation}",
        "timer": timer.name,
        "latency_ms": median(found["none"]),
        "medians_ms": found,
        "costs": costs,
        "remembered_s": remembered_s,
        "checked_s": checked_s,
    }


def cost(with_: Sequence[float], without: Sequence[float]) -> dict[str, Any]:
    """By how much the first are longer, round by round: the median, and its 95 % interval where there is one."""
    ratios = [one / other - 1 for one, other in zip(with_, without, strict=True)]
    return {"median": median(ratios), "interval": median_interval(ratios)}


def said(cost: dict[str, Any]) -> str:
    """A cost in percent, with its interval."""
    bounds = ", ".join(f"{100 * x:+.2f}" for x in cost["interval"] or ())
    return f"{100 * cost['median']:+.2f} % [{bounds}]"


def spent(cases: Sequence[Case], only: dict[str, str], device: Device, seed: int) -> dict[str, float]:
    """Seconds by stage of a run of these cases, each by one implementation, in two processes; and `wall`."""
    catalog = Catalog.default()
    plan = Plan("defences", tuple(cases), 2, ("cold",), Sampling(), 120.0)
    names = sorted(set(only.values()))
    cells = [x for x in plan.cells(catalog, device.kind, names) if only[x.case.full_name] == x.implementation.name]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(plan, tuple(cells), catalog, device.kind, Home(Path(folder)), seed=seed)
        journal = read(run.execute())
    bad = [f"{x.case.full_name}: {x.status}, {x.reason}" for x in journal.records if x.status != "ok"]
    if bad:
        sys.exit("\n".join(bad))
    (footer,) = journal.footers
    return {**footer.spent_s, "wall": footer.wall_s}


def main() -> None:
    """Prints a line a row and one of the run, and writes all as JSON.

    Exit code 1: a row's whole interval lies above what is asked for, or the overhead does. 3: an interval reaches
    beyond it, so that this machine is too noisy to say.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(ROWS), default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    import torch

    catalog = Catalog.default()
    device = opened(arguments.device)
    chosen = [(catalog.operator(x[0]).case(*x[1:4]), x[4]) for x in ROWS[arguments.device]]
    rows = []
    with device.using():
        for case, implementation in chosen:
            rows.append(row(device, case, implementation, arguments.rounds, 1))
            told = ", ".join(f"{name} {said(x)}" for name, x in rows[-1]["costs"].items())
            print(f"{rows[-1]['row']}: {rows[-1]['latency_ms']:.4g} ms by {rows[-1]['timer']}; {told}", flush=True)
            device.release()
    seconds = spent([x for x, _ in chosen], {x.full_name: y for x, y in chosen}, device, 1)
    share = seconds["overhead"] / seconds["wall"]
    print(f"a run of these rows: {seconds['wall']:.1f} s, of which {100 * share:.1f} % in no stage")
    worst = max(x["costs"]["both"]["median"] for x in rows)
    bounds = [x["costs"]["both"]["interval"] or (-1.0, 1.0) for x in rows]
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    found = {"device": name, "torch": torch.__version__, "worst": worst, "overhead": share, "spent_s": seconds}
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    if share > OVERHEAD or any(low > COST for low, _ in bounds):
        sys.exit(1)
    sys.exit(3 if any(high > COST for _, high in bounds) else 0)


if __name__ == "__main__":
    main()
