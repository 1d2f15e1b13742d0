"""Writes `docs/results-h200.md`, and CPU_PAGE once there is a run of plan `cpu`, from the journals of
`registry/reference/`; no figure there stands by hand.

    python docs/results.py            prints the pages, and the row that the README explains
    python docs/results.py --write    writes them; tests hold the pages to what this prints

Of plan `memory` the newest whole run there counts; of the others a new run takes the place of an old one in the
constants of `_results/runs.py`.
"""

from __future__ import annotations

import dataclasses
import sys

from _page import placed
from _results.again import lost
from _results.attention import crossing_lengths, dense_attention
from _results.convergence import convergence, exchanged, resumed
from _results.cpu import cpu_page
from _results.inference import decoding, forward_passes, server, tiny
from _results.limits import incorrect, noise, not_shown, rewired, slower
from _results.products import products, products_of_few_rows, products_since
from _results.runs import (
    ATTENTION,
    ATTENTION_HOPPER,
    ATTENTION_HOPPER_FA4,
    CONTEXT,
    CPU,
    DECODING,
    FEW_ROWS,
    FP8_GRAPH,
    FP8_GRAPH_BEFORE,
    HERE,
    LANGUAGES,
    LONG_ROWS,
    MEMORY,
    MEMORY_ROWS,
    ONNX,
    PRECISION,
    PRECISION_8B,
    PRECISION_8B_GRAPHS,
    PRECISION_PART,
    RANKS,
    SERVER,
    SHAPES,
    STATE_SPACE,
    TILELANG,
    TRAIN,
    defined,
    journal,
    verifications,
)
from _results.several_gpus import collectives, context, data_parallel, side_by_side_gpus
from _results.tables import by_operator, by_row, ratio_of, refused_of
from _results.training import eight_bits, gate_and_up, host_calls, techniques, training_steps
from _results.worths import truth_of_worth, worth_of_parts
from kernelmark.registry import figures
from kernelmark.registry.analysis.repeated import said
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.store.record import PROVIDER
from kernelmark.registry.views.table import render
from kernelmark.registry.views.tables import half_width, run_table

PAGE = HERE / "results-h200.md"
CPU_PAGE = HERE / "results-cpu.md"
README = HERE.parent / "README.md"
TITLE = "# Results on an H200"
INTRODUCTION = """\
This page is written by `python docs/results.py --write` from journals in `registry/reference/`, and a test
holds it to them. [registry/reference/README.md](../registry/reference/README.md) says where each run was
made. To look at one yourself: `kernelmark show registry/reference/RUN.jsonl.gz`, or `kernelmark report
registry/reference/RUN.jsonl.gz --output page.html`.

Each table compares our kernel with the *fastest correct baseline of each case*. A case is one shape, dtype
and pass. A ratio above 1 means that ours is faster. *Faster* and *slower* count the cases whose whole 95 %
interval lies on that side of 1; *undecided* counts the others. The interval rests on the ratios within
replicates, which are fresh processes ([how it is measured](measuring.md)).

A case's *definition* is what it computes and how its answer is checked. Where it changed since a run, a case
of that name is another one today: the figures stand for what was measured then, and no run of today is
compared with them. Below each heading stands how many of the run's cases have today's definition."""
ROW = ("rms_norm", "B4-S2048-D4096-bf16-backward")
"""The case of plan `memory` that the README shows."""


def page() -> str:
    """The whole page."""
    parts = [
        TITLE,
        INTRODUCTION,
        *by_operator("Memory-bound operators", MEMORY),
        *by_operator("Three of them again", MEMORY_ROWS),
        *by_operator("Attention", ATTENTION),
        *dense_attention(),
        *by_operator("State-space models and linear attention", STATE_SPACE),
        *products(),
        *products_since(),
        *products_of_few_rows(),
        *by_row("Products in other kernel languages", LANGUAGES),
        *by_row("Products and norms in TileLang", TILELANG),
        *by_row("Few long rows, held in clusters of programs", LONG_ROWS),
        "One process of three, so no intervals. quack, the fastest here before, could not be loaded. Since then "
        "gradients of few long gated rows take fewer rows a program, and few long rows of RMS norm other warps, "
        "as `registry/reference/tuning/rows-clusters-h200.txt.gz` has them faster.",
        *by_row("Products of up to 16 rows", FEW_ROWS),
        *by_row("ONNX Runtime's CUDA provider", ONNX),
        *training_steps(),
        *by_row("A training step before, beside other systems", TRAIN),
        *techniques(),
        *by_row("Precisions, as far as they came", PRECISION_PART),
        "The loss of `fp16_scaled` multiplied in fp32 there, which autocast does in fp16: that row is slower than "
        "what users have.",
        *by_operator("Calls that models make, as far as they came", SHAPES),
        *by_row("Latent attention, heads of 256, packed sequences", ATTENTION_HOPPER),
        *by_row("The same beside FlashAttention 4", ATTENTION_HOPPER_FA4),
        *by_row("Precisions from 124 M to 8 B", PRECISION),
        f"Refused were {refused_of(PRECISION)}: for what three steps change of the last norm's bias, or for a "
        "gradient ([what rounding makes of it](training.md#precisions-on-an-h200)).",
        *by_row("GPT-2 124M in 8 bits and in 16, norms and GELU writing 8 bits", FP8_GRAPH),
        *by_row("The same before, attention on whole projections", FP8_GRAPH_BEFORE[0]),
        *by_row("And before, a bias added by the product", FP8_GRAPH_BEFORE[1]),
        *by_row("Precisions of 8 B parameters, as far as they came", PRECISION_8B),
        "All rows in 8 bits were refused for gradients of queries and keys, most likely for what rounding alone "
        "makes of them in so many layers ([the bound](training.md#precision)).",
        *by_row("8 B parameters in 8 bits by graphs", PRECISION_8B_GRAPHS),
        "Refused for a gradient of keys likewise, ours in graphs as torchao's.",
        *eight_bits(),
        *gate_and_up(),
        *worth_of_parts(),
        *truth_of_worth(),
        *host_calls(),
        *convergence(),
        *exchanged(),
        *resumed(),
        *collectives(),
        *context(),
        *data_parallel(),
        *side_by_side_gpus(),
        *by_row("Ranks before, each operator once", RANKS),
        *by_row("Context parallel attention before", CONTEXT),
        *decoding(),
        *by_row("Decoding before, by time a token", DECODING),
        *forward_passes(),
        *server(),
        *by_row("A server before, by time of a request", SERVER),
        *rewired(),
        *crossing_lengths(),
        *slower(),
        *lost(),
        *incorrect(),
        *noise(),
        *not_shown(),
    ]
    return "\n\n".join(parts) + "\n"


def row() -> str:
    """One case as `kernelmark show` prints it, without what was not measured, and what to read in it."""
    made = journal(MEMORY)
    records = tuple(x for x in made.records if (x.case.operator, x.case.name) == ROW and x.measurement)
    one = dataclasses.replace(made, records=records)
    lines = render(run_table(one), 100).splitlines()
    start = next(i for i, x in enumerate(lines) if x.startswith(f"{ROW[0]} · "))
    end = next(i for i, x in enumerate(lines) if i > start and not x)
    ours = next(x for x in rows(one) if x.provider == PROVIDER)
    told = (
        f"Our kernel takes {figures.number(ours.value())} ms, ± {half_width(ours)} (95 % interval over fresh "
        f"processes). That is {figures.percent(ours.fraction_of_limit)} of what\nthis device could do (`limit`), "
        f"and {ratio_of(ours.speedup_vs_best_baseline)} times as fast as the fastest correct baseline "
        f"(`vs best`):\nthe number to look at. This run is {said(made, verifications())}. "
        f"{defined(made)}\n([which means](docs/results-h200.md))."
    )
    return "\n".join(["```", *lines[start:end], "```", "", told]) + "\n"


BLOCKS = {"row": row, "serve_tiny": tiny}
"""Of the README."""


if __name__ == "__main__":
    made = {PAGE: page()}
    if CPU:
        made[CPU_PAGE] = cpu_page(CPU)
    if sys.argv[1:] == ["--write"]:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        README.write_text(placed(README.read_text(encoding="utf-8"), BLOCKS), encoding="utf-8")
    else:
        print(*made.values(), row(), sep="\n", end="")
