"""Ranks that are killed in every stage, again and again: what is left of it, and whether the run goes on.

    python tests/rank_faults.py [--device cpu] [--ranks 3] [--times 50]

A repeat is one run over so many ranks: in each stage one of them is killed once, by turns of repeats the last, the
first and one in the middle, and an honest implementation has its place between them. Right is: the case whose rank
was killed ends, by that rank's name, within its deadline; the honest one has its time; no process and no shared
memory is left. Run by `make rank-faults`: a repeat starts seven worlds of processes that load torch. Ends with
exit code 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.plan import Plan
from kernelmark.suite.run.listener import Silent
from kernelmark.suite.run.process import _children, _shared_memory
from kernelmark.suite.run.supervisor import Run

ROOT = Path(__file__).parent / "suite" / "ranks_root"
STAGES = ("build", "verify", "warm_up", "sample", "gather", "verify_again")
DEADLINE_S = 60.0
# By events: in a graph's replay no implementation is called, and none could end its rank there.
FEW = Sampling(
    min_samples=6, max_samples=6, min_seconds=0, max_seconds=30, warmup_s=0.05, timer="events", energy="never"
)


@dataclass
class Ends(Silent):
    """How long each cell took since the one before ended."""

    since: float = field(default_factory=time.monotonic)
    took_s: dict[str, float] = field(default_factory=dict)

    def end(self, record: Any) -> None:
        now = time.monotonic()
        self.took_s[record.implementation] = now - self.since
        self.since = now


VICTIMS = ("last", "first", "middle")


def repeat(
    device: Any, world: int, home: Path, seed: int = 1, which: str = "last"
) -> tuple[dict[str, float], list[str]]:
    """One run: the seconds that each cell took, its processes' start in it, and what went wrong."""
    before = _children(), _shared_memory()
    catalog = Catalog.of(ROOT)
    operator = catalog.operator("total")
    # Inputs are gathered once a case, for whoever comes first: that stage has a case of its own.
    whole, gathered = (operator.case({"N": n, "gpus": world}, "fp32", "forward") for n in (64, 96))
    names = {whole.full_name: ["plain", *(f"{which}_killed_in_{x}" for x in STAGES if x != "gather")]}
    names[gathered.full_name] = [f"{which}_killed_in_gather"]
    plan = Plan(
        "rank faults", (whole, gathered), 1, ("hot",), FEW, DEADLINE_S,
        only={name: tuple(x) for name, x in names.items()},
    )  # fmt: skip
    ends = Ends()
    run = Run(
        plan, plan.cells(catalog, device), catalog, device, Home(home), seed, roots=(str(ROOT),), ceilings=False,
        gpus=tuple(range(world)) if device != "cpu" else (), listener=ends,
    )  # fmt: skip
    records = read(run.execute()).records
    wrong = [said for x in records if (said := _wrong(x, world, which))]
    if len(records) != len(STAGES) + 1:
        wrong.append(f"{len(records)} cells ended, not {len(STAGES) + 1}")
    wrong += [f"{name} took {x:.0f} s" for name, x in ends.took_s.items() if x > DEADLINE_S]
    processes, files = _children() - before[0], _shared_memory() - before[1]
    if processes:
        wrong.append(f"processes are left: {sorted(processes)}")
    if files:
        wrong.append(f"shared memory is left: {sorted(x.name for x in files)}")
    return ends.took_s, wrong


def _wrong(record: Any, world: int, which: str) -> str | None:
    """What a cell's end lacks."""
    said = f"{record.implementation}: {record.status}: {record.reason}"
    if record.implementation == "plain":
        return None if record.status == "ok" else said
    rank = {"first": 0, "middle": world // 2, "last": world - 1}[which]
    killed = f": rank {rank} of {world}: its process was ended by SIGKILL"
    return None if record.status == "crashed" and str(record.reason).endswith(killed) else said


def main() -> int:
    """Repeats, and a line for each."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--ranks", type=int, default=3, help="how many, or GPUs (default 3)")
    arguments.add_argument("--times", type=int, default=50, help="repeats (default 50)")
    asked = arguments.parse_args()
    failed, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.times):
            which = VICTIMS[number % min(len(VICTIMS), asked.ranks)]
            took, wrong = repeat(asked.device, asked.ranks, Path(folder) / str(number), number, which)
            failed += bool(wrong)
            seconds, longest = sum(took.values()), max(took.values())
            said = "; ".join(wrong) or "all as it should be"
            print(
                f"[{number + 1}/{asked.times}] {which}: {seconds:.1f} s, longest cell {longest:.1f} s: {said}",
                flush=True,
            )
    print(f"{asked.times - failed} of {asked.times} repeats right, {time.monotonic() - begin:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
