"""Times every schedule of `kernels/matmul/_dispatch.py` on a Hopper GPU, and makes its table of what was fastest.

    python tests/kernels/tune_matmul.py time JOURNAL [--seconds 120] [--kind fp8_block ...]
    python tests/kernels/tune_matmul.py table JOURNAL

`time` appends a line (JSON) for each schedule of each shape, and one for cuBLAS where it has the product. Shapes
are those of plan `matmul`, then random ones, which tell the rule for sizes off the table from the table. Inputs
are random, as what they are changes a GPU's clock; each call comes after a flush of L2, as in the suite's rows.
Before that each schedule is compiled, run and checked in a process of its own:
what is wrong, or does not end within PATIENCE, is said and left out. All ends with the seconds given.

`table` prints the lines of `TUNED`: a shape is in it where the fastest schedule beats the rule's by MARGIN. A
schedule that is not among the candidates is printed as it is. That needs no GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import queue
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from kernelmark.kernels.matmul import _dispatch as dispatch
from kernelmark.kernels.matmul._matmul_hopper import Schedule, multiply

Shape = tuple[int, int, int]
Variant = tuple[int, int, int]
"""Which of `schedules`, how tiles are shared out by steps (`dispatch.shared`), the section."""

WEIGHTS = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048), (2880, 2880))
"""(N, K) of plan `matmul`."""
ROWS = (64, 128, 1024, 4096)
SQUARE = (8192, 8192, 8192)
GATED = dispatch.GATED
KINDS = (dispatch.PROMOTED, dispatch.GROUPED, dispatch.FAST, dispatch.SIXTEEN, GATED)
RANDOM = 24
"""Shapes that no plan names, for each kind; half of them have few columns."""
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
            4 * round(2 ** draw.uniform(3, 11)),
            16 * round(2 ** draw.uniform(*((6, 10) if nth % 2 else (4, 7)))),
            16 * round(2 ** draw.uniform(5, 10)),
        )
        for nth in range(RANDOM)
    ]
    return planned + drawn


SPLITS = (2, 3, 4, 8)
"""Programs that compute a tile of few rows, where there are not more tiles than programs."""
PATIENCE = 30.0
"""Seconds within which a schedule is compiled, run and checked, or is taken to hang."""
CHECKED = ((640, 640, 1024), (200, 272, 1040))
"""Shapes that each schedule is checked at: of an even and an odd number of steps."""


_BLOCK = Schedule(step=128, scales="block", staged=True)
BESIDES: dict[str, tuple[Schedule, ...]] = {
    dispatch.SIXTEEN: (
        Schedule(columns=64, stages=8),
        Schedule(columns=32, stages=10),
        Schedule(groups=1, columns=16, stages=20),
    ),
    dispatch.FAST: (
        Schedule(columns=64, step=128, stages=8),
        Schedule(columns=32, step=128, stages=10),
        Schedule(groups=1, columns=16, step=128, stages=20),
    ),
    dispatch.PROMOTED: (
        *dispatch.unstaged(dispatch.PROMOTED),
        replace(_BLOCK, columns=128, stages=6, buffers=1),
        replace(_BLOCK, columns=128, stages=6, ahead=4, buffers=1),
        replace(_BLOCK, columns=64, stages=8, ahead=4),
        replace(_BLOCK, columns=32, stages=8, ahead=4),
        replace(_BLOCK, groups=1, columns=16, stages=20, ahead=4),
    ),
    dispatch.GROUPED: dispatch.unstaged(dispatch.GROUPED),
}
"""What is timed beside the candidates: for scales that cannot be staged, and tiles that are none yet."""


def schedules(kind: str) -> tuple[Schedule, ...]:
    """All that are timed of a kind, the candidates first."""
    gated = kind == GATED
    return (*dispatch.candidates(dispatch.SIXTEEN if gated else kind, gated), *BESIDES.get(kind, ()))


def description(schedule: Schedule) -> dict[str, Any]:
    """What of a schedule is not as `Schedule` has it by itself; the kind says its scales."""
    usual = asdict(Schedule())
    return {k: v for k, v in asdict(schedule).items() if v != usual[k] and k not in ("scales", "shared")}


def stageable(M: int) -> bool:
    """Whether scales of so many rows can be staged."""
    return M % 4 == 0


def variants(kind: str, shape: Shape, programs: int) -> Iterator[Variant]:
    """What changes the product of a shape."""
    M, N, K = shape
    for nth, schedule in enumerate(schedules(kind)):
        if schedule.groups * schedule.rows >= 2 * max(M, 64) or schedule.width < 64 < N * M // 4096 // 8:
            continue  # rows that there are not, or far too many tiles
        count = dispatch.tiles(schedule, M, N)
        if count > 100 * programs or (schedule.staged and not stageable(M)):
            continue
        most = min(-(-K // schedule.step) // 4, 2 * programs // count)
        apart = dispatch.dealt(count, programs) < count and count % programs
        for shares in (0, *([1] if apart else []), *(x for x in SPLITS if x <= most and M <= 1024)):
            for section in (8, 16) if M > 1024 else (8,):
                yield nth, shares, section


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
    # Scales of one step of K lie together, as the suite has them.
    scales = (torch.rand(x[::-1], device="cuda") + 0.5 for x in sizes[kind])
    return [a, b, out, *(x.t() if x.dim() else x for x in scales)]


def truth(kind: str, given: list[Any]) -> torch.Tensor:
    """The product in fp32, of what `operands` made."""
    a, b, _, scale_a, scale_b = given
    a, b = a.float(), b.float()
    if kind == GATED:
        gate, up = (a @ b.t()).chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    if kind in ("fp8_block", "fp8_group"):
        scale_a, scale_b = (x.repeat_interleave(128, 1)[:, : a.shape[1]] for x in (scale_a, scale_b))
        if kind == "fp8_block":
            scale_b = scale_b.repeat_interleave(128, 0)[: len(b)]
    return (a if scale_a is None else a * scale_a) @ (b if scale_b is None else b * scale_b).t()


def call(kind: str, shape: Shape, variant: Variant, programs: int) -> Callable[[list[Any]], None]:
    """The product by one schedule."""
    M, N, _ = shape
    nth, shares, section = variant
    schedule = schedules(kind)[nth]
    if kind == "fp8":
        schedule = replace(schedule, scales="tensor")
    x = dispatch.shared(schedule, shares, section, M, N, programs)
    return lambda given: multiply(*given[:3], x.schedule, x.dealt, x.section, *given[3:], split=x.split)


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


def checked(kind: str, nth: int, shares: int, said: Any) -> None:
    """Compiles a schedule, runs and checks it; what it makes stays in Triton's cache. Says what is wrong or ""."""
    torch.backends.cuda.matmul.allow_tf32 = False
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    torch.manual_seed(0)
    wrong = ""
    for shape in CHECKED:
        given = operands(kind, shape)
        want = truth(kind, given)
        for shared in (2, 1) if shares else (0,):
            for _ in range(3):
                given[2].fill_(float("nan"))
                call(kind, shape, (nth, shared, 8), programs)(given)
                off = ((given[2].float() - want).norm() / want.norm()).item()
                if not off < 0.01:
                    wrong = wrong or f"off by {off:.4f} at {shape}"
    said.put(wrong)


def apart(work: tuple[str, int, int], until: float) -> str:
    """What is wrong with a schedule, "" if nothing, by a process of its own, which is ended if it hangs."""
    context = multiprocessing.get_context("forkserver")
    said = context.SimpleQueue()
    process = context.Process(target=checked, args=(*work, said), daemon=True)
    process.start()
    process.join(max(min(PATIENCE, until - time.perf_counter()), 0.1))
    if process.is_alive():
        process.kill()
        process.join()
        return "did not end"
    return f"ended with {process.exitcode}" if said.empty() else str(said.get())


def all_checked(kinds: list[str], until: float) -> dict[tuple[str, int, int], str]:
    """What is wrong with each schedule of each kind, whole and with tiles that are shared out."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "kernelmark.kernels.matmul._dispatch"]
    )
    waiting: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
    for kind in kinds:
        for nth in range(len(schedules(kind))):
            for shares in (0, 1):
                waiting.put((kind, nth, shares))
    found = {}

    def work() -> None:
        while not waiting.empty():
            try:
                each = waiting.get_nowait()
            except queue.Empty:
                return
            found[each] = apart(each, until)

    threads = [threading.Thread(target=work) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def timed(kind: str, shape: Shape, programs: int, good: set[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """A line for each schedule of one product."""
    first = operands(kind, shape)
    sets = [first, operands(kind, shape)]
    said = dict(zip(("kind", "M", "N", "K"), (kind, *shape), strict=True))
    some = schedules(kind)
    runs: dict[Any, Callable[[list[Any]], Any]] = {
        x: call(kind, shape, x, programs)
        for x in variants(kind, shape, programs)
        if (kind, x[0], min(x[1], 1)) in good
    }
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
            nth, shares, section = name
            yield {
                **said,
                "schedule": description(some[nth]),
                "shared": shares,
                "section": section,
                "us": us,
                "off": round(off[name], 6),
            }


def write(journal: Path, line: dict[str, Any]) -> None:
    """Appends a line."""
    with journal.open("a") as file:
        print(json.dumps(line), file=file, flush=True)


def all_timed(
    journal: Path,
    work: list[tuple[str, Shape]],
    start: int,
    until: float,
    good: set[tuple[str, int, int]],
    at: Any,
) -> None:
    """Times products from one on, until the time is over; says which it is at."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    for nth in range(start, len(work)):
        at.value = nth
        if time.perf_counter() > until:
            print("not all shapes: the time was over", file=sys.stderr, flush=True)
            return
        for line in timed(*work[nth], programs, good):
            write(journal, line)
    print(f"all shapes, {until - time.perf_counter():.0f} s are left", file=sys.stderr, flush=True)


def watched(journal: Path, work: list[tuple[str, Shape]], until: float, good: set[tuple[str, int, int]]) -> None:
    """Times all in a process of its own, and goes on behind a product that hangs or fails by another."""
    context = multiprocessing.get_context("forkserver")
    at = context.Value("i", 0)
    start = 0
    while start < len(work) and time.perf_counter() < until:
        process = context.Process(target=all_timed, args=(journal, work, start, until, good, at), daemon=True)
        process.start()
        last, since = start, time.perf_counter()
        while process.is_alive():
            process.join(0.2)
            if at.value != last:
                last, since = at.value, time.perf_counter()
            elif time.perf_counter() - since > PATIENCE or time.perf_counter() > until + 5:
                process.kill()
        if process.exitcode == 0:
            return
        kind, shape = work[max(at.value, start)]
        why = f"ended with {process.exitcode}"
        write(journal, {**dict(zip(("kind", "M", "N", "K"), (kind, *shape), strict=True)), "why": why})
        print(kind, shape, why, file=sys.stderr, flush=True)
        start = max(at.value, start) + 1


def measure(journal: Path, limit_s: float, kinds: list[str]) -> None:
    """Checks all, then times shapes until the limit: the plan's of all kinds before the random ones."""
    until = time.perf_counter() + limit_s
    found = all_checked(kinds, until)
    write(journal, {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
    for (kind, nth, shares), wrong in sorted(found.items()):
        if wrong:
            which = description(schedules(kind)[nth])
            write(journal, {"kind": kind, "left_out": which, "shared": shares, "why": wrong})
            print("left out:", kind, which, shares, wrong, file=sys.stderr, flush=True)
    print(f"checked, {until - time.perf_counter():.0f} s are left", file=sys.stderr, flush=True)
    planned = set(shapes()[:-RANDOM])
    # The plan's first; of those the kinds one after the other, as they were asked for.
    work = sorted(((k, x) for k in kinds for x in shapes()), key=lambda pair: pair[1] not in planned)
    watched(journal, work, until, {x for x, wrong in found.items() if not wrong})


def ruled(kind: str, shape: Shape, programs: int) -> Schedule:
    """What `choose` takes off the table."""
    some = dispatch.candidates(dispatch.SIXTEEN if kind == GATED else kind, kind == GATED)
    if some[0].staged and not stageable(shape[0]):
        some = dispatch.unstaged(kind)
    return min(some, key=lambda x: dispatch.estimate(x, *shape, programs))


def read(journal: Path) -> dict[tuple[str, Shape], dict[tuple[str, int, int], float]]:
    """By kind and shape, the time of each schedule (its description as JSON, shares, section)."""
    times: dict[tuple[str, Shape], dict[tuple[str, int, int], float]] = defaultdict(dict)
    opened = gzip.open if journal.suffix == ".gz" else open
    with opened(journal, "rt") as file:
        for line in map(json.loads, file):
            if "schedule" in line and line["off"] < 0.01:
                at = line["kind"], (line["M"], line["N"], line["K"])
                name = json.dumps(line["schedule"], sort_keys=True), int(line["shared"]), line["section"]
                times[at][name] = line["us"]
    return times


def table(journal: Path, programs: int = 132) -> None:
    """Prints the lines of `TUNED`, and by kind how far the rule is from the fastest, the plan's and others, and in
    how many of the shapes of the plan each schedule was the fastest or nearly.
    """
    lost: dict[tuple[str, bool], list[float]] = defaultdict(list)
    near: dict[tuple[str, str], int] = defaultdict(int)
    planned = set(shapes()[:-RANDOM])
    for (kind, shape), found in sorted(read(journal).items()):
        best = min(found, key=lambda x: found[x])
        rule_name = json.dumps(description(ruled(kind, shape, programs)), sort_keys=True)
        rule = found.get((rule_name, 0, dispatch.SECTION), found.get((rule_name, 0, 8)))
        for name in {x[0] for x in found if shape in planned and found[x] < found[best] * (1 + MARGIN)}:
            near[kind, name] += 1
        if rule is not None:
            lost[kind, shape in planned].append(rule / found[best])
        if shape in planned and (rule is None or rule / found[best] > 1 + MARGIN):
            some = dispatch.candidates(dispatch.SIXTEEN if kind == GATED else kind, kind == GATED)
            names = [json.dumps(description(x), sort_keys=True) for x in some]
            own = min((x for x in found if x[0] in names), key=lambda x: found[x], default=best)
            if found[own] < found[best] * (1 + MARGIN):
                best = own
            nth: Any = names.index(best[0]) if best[0] in names else best[0]
            key = (kind, dispatch.height(shape[0]), *shape[1:])
            print(f"    {key!r}: ({nth}, {best[1]}, {best[2]}),".replace("'", '"'))
    for (kind, name), count in sorted(near.items()):
        print(f"# {kind}, the fastest or nearly at {count} of the plan's shapes: {name}")
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
