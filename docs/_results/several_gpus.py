"""Collectives, attention and training over several GPUs, and GPUs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from kernelmark.registry import figures
from kernelmark.registry.analysis.scaling import Scaled, efficiencies, predictions, strong_besides
from kernelmark.registry.store.record import PROVIDER

from .runs import (
    COARSE_SUMS,
    COLLECTIVES,
    CONTEXT_LONG,
    CONTEXT_PARALLEL,
    CONTEXT_TWO,
    DATA_PARALLEL,
    DATA_PARALLEL_ALONE,
    NEIGHBOURS,
    SHARED_STEPS,
    SHARED_STEPS_TWO,
    SIDE_BY_SIDE,
    defined,
    journal,
    origin,
    rows_of,
)
from .tables import markdown, ratio_of, value_of

SMALL = 64 << 10
"""Bytes up to which a sum is small: a goal of its own."""
APART = 0.05
"""Share by which a row may lie apart in two runs of one code before it is named."""
INT8_GOAL = 1.3
"""How many times NCCL's speed in bf16 was asked for of a sum in int8."""


def collectives() -> list[str]:
    """Ours against the best other, and NCCL, by size."""
    parts = ["## Collectives over two and four GPUs"]
    for run in COLLECTIVES:
        parts += [origin(journal(run)), _collectives_of(run)]
    (wrong,) = [x for x in rows_of(COLLECTIVES[1]) if x.operator == "all_reduce_quantized" and x.value() is None]
    (right,) = [x for x in rows_of(COARSE_SUMS) if x.case == wrong.case]
    return [
        *parts,
        _over_windows(),
        _in_eight_bits(),
        "GB/s is `busbw`, of copies the rate of the link. Beside `all_reduce_quantized` stands `all_reduce` in "
        "bf16 of the same size, where the run has it. vLLM's all-reduce and FlashInfer's were not installed, nor "
        "DeepEP. Out of place NCCL's and torch's two-shot copy the array first, which is in their time. Over "
        "windows NCCL's sum stays in the window out of place; in place the mean is copied there and back, which "
        "is in its time. The second run was ended by a limit of time. Between the last two `all_gather` from 32 "
        "MiB on has changed, and again over two GPUs after the second, back to what the last has. "
        f"`{wrong.case}` is {wrong.status} there: {wrong.reason}. A rank's own part of the sum is rounded to "
        "E4M3 too, by a share of the sum, and the bound was of a rank's own values then: over four GPUs sums are "
        f"twice as large. By the bound of both it is right, in {figures.number(value_of(right))} ms "
        f"(`{COARSE_SUMS}`).",
    ]


def _over_windows() -> str:
    """All-reduces of ours against NCCL's over registered windows, and rows sent to experts against all-to-all."""
    rows = [x for x in rows_of(COLLECTIVES[0]) if x.value() is not None]
    times = {(x.operator, x.case, x.implementation): value_of(x) for x in rows}
    small, large, sent = [], [], []
    for x in rows:
        if x.provider != PROVIDER:
            continue
        if (theirs := times.get((x.operator, x.case, "nccl_windows"))) is not None:
            (small if 2 * x.axes["N"] <= SMALL else large).append(theirs / value_of(x))
        if x.operator == "expert_exchange":
            sent.append(times[x.operator, x.case, "torch_distributed"] / value_of(x))
    return (
        "NCCL's all-reduce over registered windows (`nccl_windows`), which it has kernels for that read peers' "
        f"memory, takes {_span(small)} as long as ours over two GPUs up to {figures.size(SMALL)}, and "
        f"{_span(large)} above. Rows sent to experts and back by all-to-all with splits, whose counts go through "
        f"the host, take {_span(sent)} as long as `expert_exchange` of ours."
    )


def _span(ratios: Sequence[float]) -> str:
    return f"{ratio_of(min(ratios))} to {ratio_of(max(ratios))}"


def _in_eight_bits() -> str:
    """Sums in 8 bits against NCCL's in bf16, out of place and in place: a copy of the array is in the former."""
    told = []
    for run in COLLECTIVES:
        for x in rows_of(run):
            if x.operator != "all_reduce_quantized" or x.options["scheme"] != "int8" or x.value() is None:
                continue
            nccl = {
                y.options["place"]: value_of(y)
                for y in rows_of(run)
                if (y.operator, y.axes, y.implementation) == ("all_reduce", x.axes, "torch_distributed")
            }
            if nccl:
                out, inside = (nccl[place] / value_of(x) for place in ("out", "in"))
                met = "met" if inside >= INT8_GOAL else "missed in place"
                told.append(
                    f"over {x.axes['gpus']} GPUs (`{run}`) {ratio_of(out)} and {ratio_of(inside)}, which is {met}"
                )
    return (
        f"A sum in int8 was to be {INT8_GOAL} times as fast as NCCL's in bf16. It is held against NCCL of the "
        "same run out of place, where a copy of the array is in NCCL's time, and in place, where none is: "
        f"{'; '.join(told)}."
    )


def _collectives_of(run: str) -> str:
    """The table of one run."""
    lines = []
    for x in rows_of(run):
        if x.provider != PROVIDER or x.value() is None:
            continue
        like = [y for y in rows_of(run) if (y.operator, y.case) == (x.operator, x.case)]
        if x.operator == "all_reduce_quantized":  # beside the same sum in bf16
            like = [
                y
                for y in rows_of(run)
                if (y.operator, y.axes, y.options.get("place")) == ("all_reduce", x.axes, "out")
            ]
        others = [y for y in like if y.provider != PROVIDER and y.value() is not None]
        best = min(others, key=value_of, default=None)
        nccl = next((y for y in others if y.implementation == "torch_distributed"), None)
        ms = value_of(x)
        rate = x.value("busbw") or x.value("link_rate")
        lines.append(
            [
                f"`{x.operator}`",
                str(x.axes["gpus"]),
                str(x.options.get("place") or x.options.get("pattern") or x.options.get("scheme") or ""),
                figures.size(2 * x.axes["N"]) if "N" in x.axes and "M" not in x.axes else x.case.split("-gpus")[0],
                figures.number(ms),
                figures.number(rate),
                f"`{best.implementation}`" if best else "",
                ratio_of(value_of(best) / ms) if best else "",
                ratio_of(value_of(nccl) / ms) if nccl else "",
            ]
        )
    head = ["operator", "GPUs", "", "of bf16", "ms", "GB/s", "best other", "× best other", "× NCCL, NVLS off"]
    return markdown(head, lines)


def context() -> list[str]:
    """Context parallel attention: efficiency, and against each peer."""
    parts = ["## Context parallel attention over two and four GPUs"]
    for run in CONTEXT_PARALLEL:
        parts += [origin(journal(run)), _context_of(run)]
    (one,), four = map(rows_of, CONTEXT_LONG)
    million, longest = sorted(four, key=lambda x: x.axes["S"])
    efficiency = figures.percent(value_of(one) / (4 * value_of(million)), 1)
    return [
        *parts,
        "Causal, 32 heads, 8 key heads, D 128. Efficiency is T₁ / (P·T_P). Over four GPUs T₁ is the slowest one's "
        "of four that each computed the whole at once; over two it is one of them. Above 100 % several did not "
        "run in the same power state as the one: nearly all rows were throttled. *Exposed* is what a call took "
        "longer than one that sends nothing. `×` is the peer's time over ours; torch's is its context parallel "
        "attention by cuDNN.",
        f"Of one sample, as above 512 k: one GPU took {figures.number(value_of(one) / 1e3)} s for "
        f"{one.axes['S']:,} tokens (`{CONTEXT_LONG[0]}`), and four of another host "
        f"{figures.number(value_of(million) / 1e3)} s (`{CONTEXT_LONG[1]}`), which is {efficiency} of four times "
        f"its speed. {longest.axes['S']:,} tokens took {figures.number(value_of(longest) / 1e3)} s and "
        f"{figures.size(_known(longest.value('rank_memory')))} a GPU, inputs and the memory that peers read in "
        "it. Gradients of either were not run.",
        f"Other masks and key heads over two GPUs, and memory. {origin(journal(CONTEXT_TWO))} As far as 170 s "
        "came: gradients, and full masks by ours without a ring, were not reached, and torch's was asked in a way "
        "that it refuses under a full mask, which is mended since.",
        _every_row(CONTEXT_TWO),
    ]


def _every_row(run: str) -> str:
    """Times and memory of all rows, those without a time by their status."""
    lines = [
        [
            f"`{x.operator}`",
            x.case,
            f"`{x.implementation}`",
            figures.number(value_of(x)) if x.value() is not None else x.status,
            figures.size(_known(x.value("memory"))) if x.value("memory") is not None else "–",
            figures.number(x.value("exposed_communication"), 3),
        ]
        for x in sorted(rows_of(run), key=lambda x: (x.operator, x.case, x.implementation))
    ]
    return markdown(["operator", "case", "implementation", "ms", "memory of the call", "exposed, ms"], lines)


def _context_of(run: str) -> str:
    """The table of one run."""
    times = {
        (x.axes["S"], x.axes["gpus"], x.pass_, x.implementation): value_of(x)
        for x in rows_of(run)
        if x.axes.get("gpus") and x.value() is not None
    }
    peers = ("context_parallel_allgather", "context_parallel_alltoall", "ulysses")
    lines = []
    for x in efficiencies(rows_of(run)):
        if x.row.implementation != PROVIDER:
            continue
        at = x.row.axes["S"], x.world, x.row.pass_
        versus = [ratio_of(times[(*at, y)] / x.value if (*at, y) in times else None) for y in peers]
        passes = x.row.pass_.replace("_", " and ")
        exposed = figures.number(x.row.value("exposed_communication"), 3)
        one, several = figures.number(x.alone), figures.number(x.value)
        told = [
            f"{at[0]:,}",
            passes,
            str(x.world),
            one,
            several,
            figures.percent(x.efficiency, 1),
            exposed,
            *versus,
        ]
        lines.append((x.row.pass_, *at, told))
    head = [
        "S",
        "pass",
        "GPUs",
        "one GPU, ms",
        "several, ms",
        "efficiency",
        "exposed, ms",
        "× torch, allgather",
        "× torch, alltoall",
        "× Ulysses",
    ]
    return markdown(head, [x[-1] for x in sorted(lines)])


def data_parallel() -> list[str]:
    """Steps over several GPUs, each with its own tokens."""
    lines = []
    for x in efficiencies((*rows_of(DATA_PARALLEL), *rows_of(DATA_PARALLEL_ALONE))):
        own = x.row.value("exposed_communication")
        told = [
            x.row.case,
            f"`{x.row.implementation}`",
            str(x.world),
            figures.number(x.alone),
            figures.number(x.value),
            figures.percent(x.efficiency, 1),
            figures.number(own, 3),
            figures.number(x.row.value("tokens_per_s"), 5),
        ]
        lines.append((str(x.row.options["model"]), str(x.row.options["parallel"]), x.world, x.value, told))
    head = [
        "case",
        "implementation",
        "GPUs",
        "one GPU, ms",
        "several, ms",
        "efficiency",
        "exposed ms",
        "tokens/s a GPU",
    ]
    predicted = [
        [
            x.row.case,
            figures.number(x.ms),
            figures.number(x.seen_ms),
            figures.change(x.off + 1),
        ]
        for x in predictions(journal(DATA_PARALLEL), (4,))
        if x.off is not None
    ]
    return [
        "## Training over two and four GPUs",
        f"{origin(journal(DATA_PARALLEL))} Weak scaling, against the best correct system of one GPU; of 8 B that "
        f"is one of another host (`{DATA_PARALLEL_ALONE}`). *Exposed* is the step's time less that of one that "
        "sends nothing.",
        markdown(head, [x[-1] for x in sorted(lines)]),
        "What `kernelmark predict` makes of the steps of one and two GPUs and of all-reduces over two, beside "
        "what four took:",
        markdown(["from", "predicted for four, ms", "measured, ms", "off"], predicted),
        f"A step that four GPUs share (its tokens are all of theirs), and DDP with gradients in 8 bits: "
        f"{origin(journal(SHARED_STEPS))} As far as the machine was there.",
        _shared(SHARED_STEPS),
        "The same over two, compressed gradients of bf16 and of fp32 weights, and two GPUs' tokens on one: "
        f"{origin(journal(SHARED_STEPS_TWO))} As far as it came. Losses of fifty steps were followed at the "
        "recipe's own rate then, under which they run away, and right systems with them; since then the rate "
        "rises from nothing (`suite/workloads/_followed.py`), which no GPU has run.",
        _shared(SHARED_STEPS_TWO),
        "What these are worth against one GPU: *weak* with the tokens of one on each, *strong* with the same "
        "tokens.",
        _scaled(SHARED_STEPS_TWO),
    ]


def _scaled(run: str) -> str:
    """Weak and strong scaling of a run's steps."""
    found: list[Scaled] = [*efficiencies(rows_of(run)), *strong_besides(rows_of(run))]
    lines = [
        [x.row.case, x.kind, figures.number(x.alone), figures.number(x.value), figures.percent(x.efficiency, 1)]
        for x in sorted(found, key=lambda x: (x.row.case, x.kind))
        if x.row.operator == "train"
    ]
    return markdown(["case", "scaling", "one GPU, ms", "several, ms", "efficiency"], lines)


def _shared(run: str) -> str:
    """Steps that GPUs share, or that send gradients in fewer bytes."""
    lines = [
        [
            x.case,
            f"`{x.implementation}`",
            figures.number(value_of(x)) if x.value() is not None else f"{x.status}: {x.reason}",
            figures.number(x.value("exposed_communication"), 3),
            figures.number(x.value("compression_ratio"), 3),
            figures.size(_known(x.value("peak_allocated"))) if x.value("peak_allocated") is not None else "–",
        ]
        for x in rows_of(run)
        if x.operator == "train"
    ]
    return markdown(["case", "implementation", "ms", "exposed ms", "times smaller", "peak memory"], lines)


def _known(value: float | None) -> float:
    assert value is not None
    return value


def side_by_side_gpus() -> list[str]:
    """What neighbours cost: rows of one plan, alone and beside other GPUs'."""
    parts = ["## GPUs side by side"]
    parts += _beside_neighbours()
    for runs in SIDE_BY_SIDE:
        parts += _side_by_side_of(*runs)
    return [*parts[:2], _asked_and_found(), *parts[2:]]


def _asked_and_found() -> str:
    """What was asked of a plan in four shards, and what was found; how far its two runs at once lie apart."""
    (alone, one), (_, other) = SIDE_BY_SIDE[:2]
    walls = _walls(alone)
    shares = sorted(max(_walls(x)) / sum(walls) for x in (one, other))
    longest = max(walls) / sum(walls)
    cases = len({(x.operator, x.case) for x in rows_of(alone)})
    first, second = map(_times, (one, other))
    apart = [(abs(first[x] / second[x] - 1), x) for x in first if x in second]
    many = [f"`{x[0]}` by `{x[2]}`" for share, x in sorted(apart, reverse=True) if share > APART]
    return (
        "A plan of the kind of `standard` in four shards at once was to take a third of their time one after the "
        f"other, with the same figures. Of {cases} cases drawn from `standard` it took "
        f"{figures.percent(shares[0])} and {figures.percent(shares[1])}: missed, where the longest shard alone is "
        f"{figures.percent(longest)}. "
        "Of the two runs at once, of one code on the same GPUs, rows lie apart by "
        f"{figures.percent(median(x for x, _ in apart), 1)} in the middle, and by more than "
        f"{figures.percent(APART)} {' and '.join(many)}: what these change by below is theirs and no neighbour's. "
        "With one replicate each no row has an interval, and `compare --across parallel` decides none."
    )


def _walls(run: str) -> list[float]:
    """Seconds that each of a run's shards took."""
    return [x.wall_s for x in journal(run).footers]


def _times(run: str) -> dict[tuple[str, str, str], float]:
    """Of each row its time, where it has one."""
    return {(x.operator, x.case, x.implementation): value_of(x) for x in rows_of(run) if x.value() is not None}


def _beside_neighbours() -> list[str]:
    """Rows of one GPU, its neighbours idle or busy all the time."""
    alone, beside = (
        [{(x.operator, x.case): value_of(x) for x in rows_of(y)} for y in runs] for runs in NEIGHBOURS
    )
    lines, most = [], 0.0
    for x in sorted(alone[0]):
        before, then = fmean(y[x] for y in alone), fmean(y[x] for y in beside)
        most = max(most, abs(then / before - 1))
        told = [figures.number(y[x]) for y in (*alone, *beside)]
        lines.append([f"`{x[0]}`", x[1], *told, figures.change(then / before)])
    return [
        f"Power: one GPU of four measured with the others idle (`{NEIGHBOURS[0][0]}`, `{NEIGHBOURS[0][1]}`) and "
        f"beside three that multiplied bf16 matrices all the time (`{NEIGHBOURS[1][0]}`, `{NEIGHBOURS[1][1]}`; "
        "what they drew was read once, five seconds after they began: `tuning/neighbours-h200.txt`), in turns. "
        f"{origin(journal(NEIGHBOURS[0][0]))} The most that a row of ours changed by is "
        f"{figures.percent(most, 2)}.",
        markdown(
            ["operator", "case", "alone, ms", "again", "beside three, ms", "again", "change of the mean"], lines
        ),
    ]


def _side_by_side_of(one_by_one: str, at_once: str) -> list[str]:
    """Of one plan: its shards one after the other, and all at once."""
    alone, both = map(_times, (one_by_one, at_once))
    ratios = {x: both[x] / alone[x] for x in alone if x in both}
    lines = [
        [
            f"`{x[0]}`",
            x[1],
            f"`{x[2]}`",
            figures.number(alone[x]),
            figures.number(both[x]),
            figures.change(r),
        ]
        for x, r in sorted(ratios.items())
    ]
    apart = sorted((abs(r - 1), x) for x, r in ratios.items())
    half, nine = (figures.percent(apart[int(share * (len(apart) - 1))][0], 1) for share in (0.5, 0.9))
    most, (operator, _, implementation) = apart[-1]
    count = len(journal(at_once).footers)
    walls = [*map(_walls, (one_by_one, at_once))]
    sampled = [sum(x.spent_s["sample"] for x in journal(run).footers) for run in (one_by_one, at_once)]
    measuring = sum(x.spent_s[y] for x in journal(at_once).footers for y in ("sample", "ceilings")) / sum(walls[1])
    return [
        f"A plan was cut in {count}, each part on a GPU of its own; {defined(journal(at_once))}. One after the "
        f"other (`{one_by_one}`) the parts ended in "
        f"{figures.number(sum(walls[0]), 3)} s, and at once (`{at_once}`) in "
        f"{figures.number(max(walls[1]), 3)} s, which is {figures.percent(max(walls[1]) / sum(walls[0]))}; the "
        "longest part alone took "
        f"{figures.number(max(walls[0]), 3)} s. Of {len(lines)} rows half changed by at most {half}, nine in ten "
        f"by at most {nine}, and `{operator}` by `{implementation}` by {figures.percent(most, 1)}, the most. "
        f"Samples took {figures.number(sampled[0], 3)} s one after the other and {figures.number(sampled[1], 3)} "
        f"at once, where they and ceilings were {figures.percent(measuring)} of the time. One replicate each.",
        markdown(["operator", "case", "implementation", "alone, ms", "at once, ms", "change"], lines),
    ]
