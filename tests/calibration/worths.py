"""How often worth is right, where the truth is known: delays, gains and nulls that were planted.

    python tests/calibration/worths.py [--runs N] [--seed S]     simulated, by the noise of `noisemodel.py`
    python tests/calibration/worths.py --cpu                     a tiny model's norms behind real delays, here

An exchange is right if its sign is, and its size is within 20 % of what the isolated calls let expect, or the
interval holds that. It is asked of exchanges that should move the step by 2 % and more. Of smaller ones it is
asked that they are called null where nothing was planted. Prints Markdown tables; no decision is made here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
from kernelmark.registry.analysis.worth import Worth, worths
from kernelmark.registry.store.journal import Journal, read
from kernelmark.registry.store.metric import OPERATOR_METRICS, Metric
from kernelmark.registry.store.record import Case, Exchange, Header, Measurement, Record, Request
from kernelmark.suite.measure.stopping import Sampling

HERE = Path(__file__).parent
CALLS, STEP_MS, ALONE_MS = 25, 100.0, 1.0
"""Of the simulated part: a quarter of the step's time is its calls'."""
PROCESSES = 5
SAMPLING = Sampling(min_samples=20, max_samples=40, min_seconds=0.05, max_seconds=2.0, warmup_s=0.3)
"""On a CPU, whose steps are of milliseconds."""
MOVING = 0.02
"""Of the step: what the promise is about."""
CLOSE = 0.20
RECOVERED = 0.05
PLANTED: Mapping[str, float] = {
    "nothing": 0.0,
    "50 µs a call": 0.05,
    "200 µs a call": 0.2,
    "1000 µs a call": 1.0,
    "-80 µs a call": -0.08,
    "-200 µs a call": -0.2,
    "-500 µs a call": -0.5,
}
"""Milliseconds that a call of what is put in takes longer, alone and in the model alike."""
HEAD = (
    "| processes vary | planted | exchanges | should move the step by 2 % | right | sign | within 20 % |"
    " interval holds | recovered within 5 % | called null |"
)


def _noise() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration_noisemodel", HERE / "noisemodel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def journal(step: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]) -> Journal:
    """A run's journal from processes' milliseconds: of the base's and the exchanged system, in both places."""
    program = Case("train", "step", {}, {}, "bf16", "program", "5bec", 1, 1, primary="step")
    part = Case("layer_norm", "part", {}, {}, "bf16", "forward_backward", "5bec", 1, 1)
    exchange = Exchange("put_in", "base", "norm", "train", "step", "layer_norm", "part", "put_in", "base", CALLS)
    records = [
        Record(case, name, "torch", None, i, 0, "cold", "ok", None, Measurement({case.primary: (ms,)}, "events"))
        for case, both in ((program, step), (part, alone))
        for name, values in zip(("base", "put_in"), both, strict=True)
        for i, ms in enumerate(values)
    ]
    metrics = (Metric("step", "ms"), *OPERATOR_METRICS)
    request = Request(exchanges=(exchange,))
    header = Header(2, "r", "", "", None, False, "worth", 0, PROCESSES, "cuda", "k", {}, {}, request, metrics)
    return Journal(header, tuple(records))


def simulated(seed: int, scale: float, planted_ms: float, runs: int) -> Iterator[Worth]:
    """Exchanges of which each is worth what was planted."""
    model = _noise()
    generator = np.random.default_rng(seed)
    step = np.exp(model.rounds(generator, model.draw_cases(generator, runs, scale), 2, PROCESSES))
    alone = np.exp(model.rounds(generator, model.draw_cases(generator, runs, scale), 2, PROCESSES))
    step *= np.array([STEP_MS, STEP_MS + CALLS * planted_ms])[None, :, None]
    alone *= np.array([ALONE_MS, ALONE_MS + planted_ms])[None, :, None]
    for i in range(runs):
        (found,) = worths(journal(step[i].tolist(), alone[i].tolist()))
        yield found


def moving(x: Worth) -> bool:
    """Whether the promise is about it: expected to move the step by 2 % and more."""
    return x.expected_ms is not None and x.base_ms is not None and abs(x.expected_ms) >= MOVING * x.base_ms


def signed(x: Worth) -> bool:
    """Whether it moved the step to the side that was expected."""
    assert x.gained_ms is not None
    assert x.expected_ms is not None
    return (x.gained_ms > 0) == (x.expected_ms > 0)


def close(x: Worth) -> bool:
    """Whether it moved the step about as much as was expected."""
    assert x.gained_ms is not None
    assert x.expected_ms is not None
    return abs(x.gained_ms - x.expected_ms) <= CLOSE * abs(x.expected_ms)


def right(x: Worth) -> bool:
    """What is promised of an exchange that moves the step."""
    return signed(x) and (close(x) or x.agreement == "as expected")


def row(noise: str, planted: str, planted_ms: float, found: Sequence[Worth]) -> str:
    """A line of the table. `planted_ms` is of a step."""
    asked = [x for x in found if moving(x)]

    def share(hits: int, of: int) -> str:
        return f"{hits / of:.1%}" if of else "–"

    recovered = sum(abs((x.gained_ms or 0.0) + planted_ms) <= RECOVERED * abs(planted_ms) for x in found)
    cells = (
        noise,
        planted,
        f"{len(found):,}",
        f"{len(asked):,}",
        share(sum(map(right, asked)), len(asked)),
        share(sum(map(signed, asked)), len(asked)),
        share(sum(map(close, asked)), len(asked)),
        share(sum(x.agreement == "as expected" for x in asked), len(asked)),
        share(recovered, len(found)) if planted_ms else "–",
        share(sum(x.null for x in found), len(found)),
    )
    return f"| {' | '.join(cells)} |"


def table(runs: int, seed: int) -> str:
    """Of what was simulated."""
    lines = [HEAD, "|---|---|" + "--:|" * 8]
    for scale in (0.3, 1.0, 3.0):
        for i, (name, ms) in enumerate(PLANTED.items()):
            found = list(simulated(seed + i, scale, ms, runs))
            lines.append(row(f"x{scale:g}", name, CALLS * ms, found))
    return "\n".join(lines)


def on_this_cpu(replicates: int, model: str = "gpt2-tiny", sequence: int = 32) -> list[Worth]:
    """The exchanges of a tiny model's norms for themselves behind delays, measured by the command's own code."""
    os.environ["KERNELMARK_PATH"] = str(HERE / "delayed_root")
    os.environ["OMP_NUM_THREADS"] = "1"  # tiny products wait for each other's threads longer than they compute
    from kernelmark.registry.store.home import Home
    from kernelmark.suite import worth
    from kernelmark.suite.catalog import Catalog
    from kernelmark.suite.plan import of_worth
    from kernelmark.suite.run.supervisor import Run

    catalog = Catalog.default()
    options = {"model": model, "state": "plain", "slice": "whole"}
    step = catalog.definition("train").case({"B": 2, "S": sequence}, "fp32", "program", **options)
    plan = of_worth(step, worth.base_named("torch", catalog), catalog, "cpu", ["norm"], ["planted"], True)
    plan = replace(plan, replicates=replicates, sampling=SAMPLING)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            plan=plan,
            cells=plan.cells(catalog, "cpu"),
            catalog=catalog,
            device="cpu",
            home=Home(Path(folder)),
            seed=secrets.randbits(32),
            ceilings=False,
        )
        return list(worths(read(run.execute())))


def measured(found: Sequence[Worth]) -> str:
    """Of what was measured on a CPU."""
    lines = [
        "| put in | calls | expected ms | gained ms | measured × | 95 % | should move by 2 % | right | null |",
        "|---|--:|--:|--:|--:|--:|---|---|---|",
    ]
    for x in found:
        if x.status != "ok" or None in (x.expected_ms, x.gained_ms, x.measured):
            lines.append(f"| {x.exchange.implementation} | {x.exchange.calls} | {x.status} |||||||")
            continue
        said = "yes" if moving(x) else "no"
        good = ("yes" if right(x) else "no") if moving(x) else "–"
        lines.append(
            f"| {x.exchange.implementation} | {x.exchange.calls} | {x.expected_ms:.3f} | {x.gained_ms:.3f} | "
            f"{x.measured:.4f} | {x.low:.4f}–{x.high:.4f} | {said} | {good} | {'yes' if x.null else 'no'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--replicates", type=int, default=5)
    given = parser.parse_args()
    print(measured(on_this_cpu(given.replicates)) if given.cpu else table(given.runs, given.seed))
