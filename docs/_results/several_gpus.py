"""Collectives, attention and training over several GPUs, and GPUs side by side."""

from __future__ import annotations

from kernelmark.registry import figures
from kernelmark.registry.analysis.scaling import efficiencies, predictions
from kernelmark.registry.store.record import PROVIDER

from .runs import (
    COLLECTIVES,
    CONTEXT_LONG,
    CONTEXT_PARALLEL,
    DATA_PARALLEL,
    DATA_PARALLEL_ALONE,
    SHARED_STEPS,
    SIDE_BY_SIDE,
    defined,
    journal,
    origin,
    rows_of,
)
from .tables import markdown, ratio_of, value_of

INT8_GOAL = 1.3
"""How many times NCCL's speed in bf16 was asked for of a sum in int8."""


def collectives() -> list[str]:
    """Ours against the best other, and NCCL, by size."""
    parts = ["## Collectives over two and four GPUs"]
    for run in COLLECTIVES:
        parts += [origin(journal(run)), _collectives_of(run)]
    (wrong,) = [x for x in rows_of(COLLECTIVES[0]) if x.operator == "all_reduce_quantized" and x.value() is None]
    return [
        *parts,
        _in_eight_bits(),
        "GB/s is `busbw`, of copies the rate of the link. Beside `all_reduce_quantized` stands `all_reduce` in "
        "bf16 of the same size, where the run has it. vLLM's all-reduce and FlashInfer's were not installed. Out "
        "of place NCCL's and torch's two-shot copy the array first, which is in their time. The first run was "
        "ended by a limit of time. Between the two `all_gather` from 32 MiB on has "
        "changed, and again over two GPUs after the first, back to what the second has. "
        f"`{wrong.case}` is {wrong.status}: {wrong.reason}. A rank's own part of the sum is rounded to E4M3 too, "
        "by a share of the sum, and the bound was of a rank's own values then: over four GPUs sums are twice as "
        "large.",
    ]


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
    ]


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
    shared = [
        [
            x.case,
            f"`{x.implementation}`",
            figures.number(value_of(x)),
            figures.number(x.value("exposed_communication"), 3),
            figures.number(x.value("compression_ratio"), 3),
            figures.size(_known(x.value("peak_allocated"))),
        ]
        for x in rows_of(SHARED_STEPS)
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
        markdown(["case", "implementation", "ms", "exposed ms", "times smaller", "peak memory"], shared),
    ]


def _known(value: float | None) -> float:
    assert value is not None
    return value


def side_by_side_gpus() -> list[str]:
    """What neighbours cost: rows of one plan, alone and beside other GPUs'."""
    parts = ["## GPUs side by side"]
    for runs in SIDE_BY_SIDE:
        parts += _side_by_side_of(*runs)
    return parts


def _side_by_side_of(one_by_one: str, at_once: str) -> list[str]:
    """Of one plan: its shards one after the other, and all at once."""
    alone, both = (
        {(x.operator, x.case, x.implementation): x for x in rows_of(run)} for run in (one_by_one, at_once)
    )
    ratios = {x: value_of(both[x]) / value_of(alone[x]) for x in alone if x in both}
    lines = [
        [
            f"`{x[0]}`",
            x[1],
            f"`{x[2]}`",
            figures.number(value_of(alone[x])),
            figures.number(value_of(both[x])),
            figures.change(r),
        ]
        for x, r in sorted(ratios.items())
    ]
    most = max(ratios.values(), key=lambda x: abs(x - 1))
    count = len(journal(at_once).footers)
    walls = [[x.wall_s for x in journal(run).footers] for run in (one_by_one, at_once)]
    measuring = sum(x.spent_s[y] for x in journal(at_once).footers for y in ("sample", "ceilings")) / sum(walls[1])
    return [
        f"A plan was cut in {count}, each part on a GPU of its own; {defined(journal(at_once))}. One after the "
        f"other (`{one_by_one}`) the parts ended in "
        f"{figures.number(sum(walls[0]), 3)} s, and at once (`{at_once}`) in "
        f"{figures.number(max(walls[1]), 3)} s, which is {figures.percent(max(walls[1]) / sum(walls[0]))}; the "
        "longest part alone took "
        f"{figures.number(max(walls[0]), 3)} s. Of {len(lines)} rows none changed by more than "
        f"{figures.percent(abs(most - 1), 1)}. At once, samples and ceilings were {figures.percent(measuring)} of "
        "the time, so neighbours were seldom at work together: a power limit that these GPUs share might not "
        "show. One replicate each.",
        markdown(["operator", "case", "implementation", "alone, ms", "at once, ms", "change"], lines),
    ]
