"""Arms of training that are half a percent worse, and one that is not: what `converge` says of them, repeatedly.

A small model is trained on the synthetic source, five fresh seeds a repeat. An arm that loses updates is a real
one: it is trained, and nothing of its loss is made up. Which share of updates costs half a percent was searched
for with `--lost`. The code that trains and decides is what ships. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from kernelmark.registry.detection.convergence import SEEDS, at_step
from kernelmark.registry.detection.equivalence import Equivalent
from kernelmark.registry.store.metric import Equivalence
from kernelmark.suite.doctor.training import HALF_A_PERCENT, STEPS
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import converge
from kernelmark.suite.workloads._checkpoint import Checkpoint
from kernelmark.suite.workloads._text import source
from kernelmark.suite.workloads._training import Training

BASE = Changes()
ARMS: Mapping[str, Changes] = {
    "8 bits": Changes(products="e4m3_tensorwise"),
    f"loses {HALF_A_PERCENT} of its updates": Changes(lost=HALF_A_PERCENT),
    f"8 bits, loses {HALF_A_PERCENT}": Changes(products="e4m3_tensorwise", lost=HALF_A_PERCENT),
}
"""Systems by name: what a base is compared with. The first is as good."""
RULE = Equivalence(converge.MARGIN)


@cache
def trained(changes: Changes, seed: int) -> float:
    """Validation bits a byte after the doctor's steps of its small model. The same bits every time."""
    axes, options = {"B": 8, "S": 32, "N": STEPS}, {"model": "gpt2-tiny", "data": "synthetic"}
    case = converge.WORKLOAD.case(axes, "fp32", "program", **options)
    arm = converge.assemble(case, Assembly(System("arm", changes=changes), converge.catalog()))
    session = Session(Cpu(), seed, 0, Sampling(), Stages())
    lr = float(case.options["lr"])
    training = Training(arm, source("synthetic"), STEPS, lr, session, converge.catalog(), Checkpoint(None))
    return training.run().bits[-1][1]


def judged(changes: Changes, repeat: int) -> Equivalent:
    """What is said of an arm beside its base over a repeat's seeds."""
    seeds = range(repeat * SEEDS, (repeat + 1) * SEEDS)
    return at_step({x: trained(BASE, x) for x in seeds}, {x: trained(changes, x) for x in seeds}, RULE)


def lines(arms: Mapping[str, Changes], repeats: int) -> Iterator[str]:
    """Markdown, line by line."""
    yield "| arm | repeats | worse by | least, most of a repeat | equivalent | worse | inconclusive |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name, changes in arms.items():
        found = [judged(changes, x) for x in range(repeats)]
        apart = [x.change for x in found if x.change is not None]
        said = Counter(x.kind for x in found)
        counts = (str(said[x]) for x in ("equivalent", "worse", "inconclusive"))
        yield (
            f"| {name} | {repeats} | {sum(apart) / len(apart):+.2%} | {min(apart):+.2%}, {max(apart):+.2%} | "
            f"{' | '.join(counts)} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="What converge says of arms that are half a percent worse.")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--lost", action="append", default=[], help="search: arms that lose 1/20, 1/30, ...")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.monotonic()
    for line in lines({f"loses {x}": Changes(lost=x) for x in chosen.lost} or ARMS, chosen.repeats):
        print(line, flush=True)
    print(f"\n{SEEDS} seeds a repeat, {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    main()
