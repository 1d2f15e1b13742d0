"""Times every schedule of `kernels/matmul/_dispatch.py` on a Hopper GPU, and makes its table of what was fastest.

    python tests/kernels/tune_matmul.py time JOURNAL [--seconds 120] [--kind fp8_block ...]
    python tests/kernels/tune_matmul.py table JOURNAL

`time` appends a line (JSON) for each schedule of each shape, and one for cuBLAS where it has the product. Shapes
are those of plan `matmul`, then random ones, which tell the rule for sizes off the table from the table. Inputs
are random, as what they are changes a GPU's clock; each call comes after a flush of L2, as in the suite's rows.
`table` prints the lines of `TUNED`: a shape is in it where the fastest schedule beats the rule's by MARGIN.
That needs no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernelmark.kernels.matmul import _dispatch as dispatch
from kernelmark.kernels.matmul._matmul_hopper import multiply

Shape = tuple[int, int, int]

WEIGHTS = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (2880, 2880))
"""(N, K) of plan `matmul`."""
ROWS = (64, 128, 1024, 4096)
SQUARE = (8192, 8192, 8192)
GATED = dispatch.GATED
KINDS = tuple(dispatch.SOURCES)
RANDOM = 12
"""Shapes that no plan names, for each kind."""
FLUSH = 256 << 20
"""Bytes that are written between two calls: no cache holds an operand then."""
ROUNDS = 15
MARGIN = 0.02
"""What the table's schedule must be faster by than the rule's: less is noise."""


def shapes(seed: int = 1) -> list[Shape]:
    """The plan's, then random ones: any M, N and K in multiples of 16, which is what can be loaded."""
    planned = [SQUARE, *((m, n, k) for n, k in WEIGHTS for m in ROWS)]
    draw = random.Random(seed)
    drawn = [
        (
            round(2 ** draw.uniform(5, 13)),
            16 * round(2 ** draw.uniform(6, 10)),
            16 * round(2 ** draw.uniform(5, 9.5)),
        )
        for _ in range(RANDOM)
    ]
    return planned + drawn


def variants(kind: str, M: int) -> Iterator[tuple[int, bool, int]]:
    """Which of the candidates, whether tiles are shared out by steps, rows of tiles that are neighbours."""
    some = dispatch.candidates("16" if kind == GATED else kind, kind == GATED)
    for nth in range(len(some)):
        for shared in (False, True):
            for section in (8, 16) if M > 1024 else (8,):
                yield nth, shared, section


def operands(kind: str, shape: Shape) -> list[Any]:
    """a, b, out and both scales of a product, on the GPU."""
    M, N, K = shape
    rows = 2 * N if kind == GATED else N
    a, b = (torch.randn(x, K, device="cuda", dtype=torch.bfloat16) for x in (M, rows))
    out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    if kind in ("16", GATED):
        return [a, b, out, None, None]
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    steps = -(-K // 128)
    sizes = {
        "fp8": ((), ()),
        "fp8_block": ((M, steps), (-(-N // 128), steps)),
        "fp8_group": ((M, steps), (N, steps)),
    }
    return [a, b, out, *(torch.rand(x, device="cuda") + 0.5 for x in sizes[kind])]


def call(kind: str, shape: Shape, variant: tuple[int, bool, int]) -> Callable[[list[Any]], None] | None:
    """The product by one schedule; None where sharing out does not change it."""
    M, N, _ = shape
    nth, shared, section = variant
    schedule = dispatch.candidates("16" if kind == GATED else kind, kind == GATED)[nth]
    if kind == "fp8":
        schedule = replace(schedule, scales="tensor")
    count = dispatch.tiles(schedule, M, N)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    whole = dispatch.dealt(count, programs) if shared else count
    if shared and (whole == count or count % programs == 0):
        return None
    chosen = dispatch.choice(schedule, whole, count, section)
    return lambda x: multiply(x[0], x[1], x[2], chosen.schedule, chosen.dealt, chosen.section, x[3], x[4])


def cublas(kind: str) -> Callable[[list[Any]], Any] | None:
    """PyTorch's product of that kind, to a tensor of its own."""
    if kind == "16":
        return lambda x: torch.mm(x[0], x[1].t())
    if kind == "fp8":
        return lambda x: torch._scaled_mm(x[0], x[1].t(), x[3], x[4], out_dtype=torch.bfloat16)
    return None


def microseconds(runs: dict[Any, Callable[[list[Any]], Any]], sets: list[list[Any]]) -> dict[Any, float]:
    """The median time of a call, each after a flush of L2, as the suite times it. All take turns by chance: a GPU
    that has just worked hard is slower, so that whoever always came first would seem faster. The flush is longer
    than a launch, so that the host is never waited for.
    """
    flushed = torch.empty(FLUSH, dtype=torch.int8, device="cuda")
    taken: dict[Any, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
    draw = random.Random(len(runs))
    for number in range(ROUNDS + 1):
        for name in draw.sample(list(runs), len(runs)):
            flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            runs[name](sets[number % len(sets)])
            end.record()
            if number:  # the first warms up
                taken[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: round(statistics.median(a.elapsed_time(b) for a, b in x) * 1e3, 3) for name, x in taken.items()}


def compiled(work: tuple[str, int, bool]) -> None:
    """Compiles one schedule, in a process of its own; what it makes stays in Triton's cache."""
    kind, nth, shared = work
    shape = (640, 512 + 128, 1024)
    run = call(kind, shape, (nth, shared, 8))
    if run is not None:
        run(operands(kind, shape))
        torch.cuda.synchronize()


def timed(kind: str, shape: Shape) -> Iterator[dict[str, Any]]:
    """A line for each schedule of one product."""
    first = operands(kind, shape)
    sets = [first, operands(kind, shape)]
    said = dict(zip(("kind", "M", "N", "K"), (kind, *shape), strict=True))
    calls = {variant: call(kind, shape, variant) for variant in variants(kind, shape[0])}
    runs: dict[Any, Callable[[list[Any]], Any]] = {name: run for name, run in calls.items() if run is not None}
    known: torch.Tensor | None = None
    off = {}
    for variant, run in runs.items():
        first[2].fill_(float("nan"))
        run(first)
        if known is None:
            known = first[2].float()
        off[variant] = ((first[2].float() - known).norm() / known.norm()).item()
    if (other := cublas(kind)) is not None:
        runs["cublas"] = other
    for name, us in microseconds(runs, sets).items():
        if name == "cublas":
            yield {**said, "by": name, "us": us}
        else:
            nth, shared, section = name
            yield {**said, "nth": nth, "shared": shared, "section": section, "us": us, "off": round(off[name], 6)}


def measure(journal: Path, limit_s: float, kinds: list[str]) -> None:
    """Times shapes until the limit: the plan's of all kinds before the random ones."""
    until = time.perf_counter() + limit_s
    work = [
        (kind, nth, shared)
        for kind in kinds
        for nth in range(len(dispatch.candidates("16" if kind == GATED else kind, kind == GATED)))
        for shared in (False, True)
    ]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(8, context) as pool:
        list(pool.map(compiled, work))
    with journal.open("a") as file:
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), file=file)
        for shape in shapes():
            for kind in kinds:
                if time.perf_counter() > until:
                    print("not all shapes: the time was over", file=sys.stderr)
                    return
                for line in timed(kind, shape):
                    print(json.dumps(line), file=file, flush=True)


def ruled(kind: str, shape: Shape, programs: int) -> tuple[int, bool, int]:
    """What `choose` takes off the table."""
    some = dispatch.candidates("16" if kind == GATED else kind, kind == GATED)
    best = min(range(len(some)), key=lambda i: dispatch.estimate(some[i], *shape, programs))
    return best, False, dispatch.SECTION


def table(journal: Path, programs: int = 132) -> None:
    """Prints the lines of `TUNED`, and by kind how far the rule is from the fastest, the plan's and others."""
    times: dict[tuple[str, Shape], dict[tuple[int, bool, int], float]] = defaultdict(dict)
    for text in journal.read_text().splitlines():
        line = json.loads(text)
        if "nth" in line and line["off"] < 0.01:
            at = line["kind"], (line["M"], line["N"], line["K"])
            times[at][line["nth"], line["shared"], line["section"]] = line["us"]
    lost: dict[tuple[str, bool], list[float]] = defaultdict(list)
    planned = set(shapes()[:-RANDOM])
    for (kind, shape), found in sorted(times.items()):
        best = min(found, key=lambda x: found[x])
        nth, shared, section = ruled(kind, shape, programs)
        rule = found.get((nth, shared, section), found[nth, shared, 8])
        lost[kind, shape in planned].append(rule / found[best])
        if shape in planned and rule / found[best] > 1 + MARGIN:
            key = (kind, dispatch.height(shape[0]), *shape[1:])
            print(f"    {key!r}: {best!r},".replace("'", '"'))
    for (kind, plan), ratios in sorted(lost.items()):
        print(
            f"# {kind}, {'the plan' if plan else 'random'}: {len(ratios)} shapes, the rule's time over the least: "
            f"{statistics.geometric_mean(ratios):.3f}, at most {max(ratios):.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("time", "table"))
    parser.add_argument("journal", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kind", action="append", choices=KINDS)
    asked = parser.parse_args()
    if asked.what == "table":
        table(asked.journal)
    else:
        measure(asked.journal, asked.seconds, asked.kind or [*KINDS])
