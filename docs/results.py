"""Writes `docs/results-h200.md`, and CPU_PAGE once there is a run of plan `cpu`, from the journals of
`registry/reference/`; no figure there stands by hand.

    python docs/results.py            prints the pages, and the row that the README explains
    python docs/results.py --write    writes them; tests hold the pages to what this prints

Of plan `memory` the newest whole run there counts; of the others a new run takes the place of an old one in the
constants below.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from _page import placed
from kernelmark.registry import figures
from kernelmark.registry.analysis.repeated import said
from kernelmark.registry.analysis.rows import Row, rows
from kernelmark.registry.analysis.scaling import efficiencies, predictions
from kernelmark.registry.analysis.statistics import geometric_mean
from kernelmark.registry.analysis.worth import Worth, worths
from kernelmark.registry.detection.arms import Arm, arms, differences
from kernelmark.registry.store.journal import Journal, read, read_header
from kernelmark.registry.store.record import PROVIDER, Case, Measurement, Record, Request
from kernelmark.registry.store.shards import join
from kernelmark.registry.views import convergence_table, crossing, summary, worth_table
from kernelmark.registry.views.table import render
from kernelmark.registry.views.tables import half_width, run_table
from kernelmark.suite.catalog import Catalog

HERE = Path(__file__).resolve().parent
PAGE = HERE / "results-h200.md"
CPU_PAGE = HERE / "results-cpu.md"
README = HERE.parent / "README.md"
JOURNALS = HERE.parent / "registry" / "reference"

ATTENTION = "20261122-000725-00c3"
ATTENTION_HOPPER = "20261128-235841-7224"
"""Latent, wide and packed attention after it has kernels for Hopper; six cases lack FlashAttention 4's row."""
ATTENTION_HOPPER_FA4 = "20261129-000502-93d4"
"""These six and two more, beside it and cuDNN."""
FLASHINFER = "20261121-193506-4853"
"""The run of plan `attention` before, with older kernels of ours, which has FlashInfer."""
MEMORY_ROWS = "memory-rows"
"""A part of plan `memory`, measured again."""
STATE_SPACE = "20261121-105936-8d81"
MATMUL = "20261127-122232-f28b"
MATMUL_BLOCKS = "20261124-043304-7d23"
"""Before a producer was one warp."""
MATMUL_FEW = "20261124-150155-da82"
"""Before products of few rows load those alone: six operators."""
LANGUAGES = "20261124-183154-fee7"
TILELANG = "20261127-123247-ebce"
TRAIN = "20261122-193610-d51b"
TECHNIQUES = "20261127-154519-e0c8"
TECHNIQUES_LARGE = "20261127-193504-a011"
"""Plan `memory-techniques`, as much as 2,038 s hold, and what is left of it."""
TECHNIQUES_STATES = "20261127-201438-2038"
"""A row that was lost of the latter."""
TECHNIQUES_OFFLOADED = "20261128-115008-9bf3"
"""Libraries' states on the host, on a host of twice the memory."""
TECHNIQUES_BEFORE = "20261124-185110-eaf7"
"""Small models, on another host."""
PRECISION_PART = "20261127-124228-f3ea"
"""Plan `precision`, as much as 300 s hold."""
PRECISION = "20261128-032023-68ba"
"""The same, whole."""
FP8_GRAPH = "20261128-145008-2cbe"
"""A case of it again, norms and GELU writing 8 bits too."""
FP8_GRAPH_BEFORE = ("20261128-114913-53a1", "20261128-082456-0e0c")
"""The same after attention takes a whole projection, and before."""
PRECISION_8B = "20261127-231424-32a7"
"""Its largest model."""
RANKS = "20261122-224109-fd6e"
CONTEXT = "20261122-224219-d717"
DECODING = "20261122-224448-6d44"
SERVER = "20261122-224626-3644"
CROSSING = "20261121-110018-0b0a"
FEW_ROWS = "20261123-081856-bbe4"
ONNX = "20261123-215820-10ba"
TRAINED = "train-h200"
"""Plan `train` in six shards, each to be gone on with."""
OTHER_SHARDS = (
    "train-bert",
    "train-h200b",
    "20261130-090340-c33b",
    "20261130-093754-1c27",
    "20261130-094710-f0cc",
)
"""Of the same plan, at other commits."""
STEPS = ("train-llama", "train-gpt2", "scaling-gpt2", "precision-gpt2")
GRAPHED = ("train-llama-graph", "train-gpt2-graphs", "precision-1b")
"""Training steps on a host whose cores compiled something else at the same time."""
WORTHS = ("20261130-021233-c7e4", "20261130-023349-3c99")
"""Parts of a Llama's step and of GPT-2's, the latter with exchanges of a part for itself."""
WORTH_SEEN, WORTH_NEAR = 0.02, 0.2
"""From which expected change of a step on worth is held to it, and how closely."""
TRUTHS = ("truth/worth-1", "truth/worth-2")
"""An exchange for PyTorch's own norm with a delay before it, on two hosts."""
COLLECTIVES = ("20261129-232536-0d96", "20261129-200344-b173")
"""As they are now, and before."""
CONTEXT_PARALLEL = (
    "20261129-233307-faaa",
    "20261129-200512-b75a",
    "20261129-194037-95da",
    "20261123-083128-c3eb",
)
"""Over four GPUs now and before, over two, and over two before."""
CONTEXT_LONG = ("20261129-193511-5b25", "20261129-232058-2690")
"""A million tokens on one GPU; one and two million on four."""
DATA_PARALLEL = "20261129-194715-adf6"
DATA_PARALLEL_ALONE = "20261129-193510-43e3"
"""8 B parameters on one GPU of another host."""
SHARED_STEPS = "20261129-233434-844b"
"""A step that GPUs share, and gradients in 8 bits; as far as it came."""
ACCUMULATED = "20261129-193611-0eca"
"""Micro-batches and Muon in graphs."""
PRECISION_8B_GRAPHS = "20261129-193511-a701"
"""8 B parameters in 8 bits by graphs."""
SIDE_BY_SIDE = (("parallel-4-alone", "20261129-231930-9a42"), ("parallel-alone", "20261123-083626-f895"))
"""One plan cut over four GPUs, and one over two: one after the other, and all at once."""
DECODE = (
    "20261123-082300-eb76",
    "20261123-082557-5c53",
    "20261123-193042-b973",
    "20261123-192821-2e60",
    "20261124-044215-0c60",
    "20261124-083036-ec19",
    "20261124-084457-4fcc",
    "20261124-144835-8c68",
)
DECODE_TODAY = "20261129-000100-4681"
"""Six launches a layer up to 16 sequences; as far as it came, without vLLM's rows."""
DECODE_8_BITS = "20261129-040410-d4bb"
"""With weights in 8 bits by six launches too."""
DECODE_PAIRED = "20261129-063358-cea5"
"""After their tiles got bf16 two numbers at a time."""
DECODE_VLLM = "20261128-145349-75c9"
"""Six for one sequence alone, beside vLLM."""
SHAPES = "shapes-h200"
"""Plan `shapes-1` in two shards, as far as ten minutes came."""
GENERATE = "generate-h200"
"""Plan `generate` in two shards, each to be gone on with."""
GENERATE_BEFORE = "20261128-082630-2599"
PASSES = "20261123-082652-b54c"
SERVED = "20261123-082432-ef9b"
SERVED_RATE = "20261124-044417-2c68"
SERVED_BESIDE = "20261130-093749-1d89"
"""The highest rate of vLLM's server and of ours."""
SERVED_CLOSED = "20261130-093546-bf86"
SERVED_FEWER = "20261130-090013-8bd6"
"""That rate by 600 requests a rate, ours."""
SERVED_BEFORE = ("20261130-060501-001d", "20261130-061710-fcbb")
"""vLLM's server and, after it, ours, whose engine was in one process with the protocol."""
LONG = "converge-10k"
"""Arms of 10,000 steps, a shard a seed."""
CONTINUED = "20261130-055716-bbf1"
"""1,000 steps from a checkpoint of 2,000, five seeds."""
CONVERGED = "20261130-021232-7fe5"
"""1,000 steps from random weights, five seeds."""
CONVERGED_BEFORE = ("converge-cut-1", "converge-cut-2")
"""400 steps, with planted arms."""
RESUMED = ("resumed/whole-1", "resumed/whole-2", "resumed/killed")
REWIRED = ("wiring-1", "wiring-2")
"""Comparisons of `detector/`."""
SAME_CODE = ("20261121-013846-d039", "20261121-015122-83b1")

SQUARE = "M8192-N8192-K8192-nt-none-bf16-forward"

TITLE = "# Results on an H200"
INTRODUCTION = """\
This page is written by `python docs/results.py --write` from journals in `registry/reference/`, and a test
holds it to them. [registry/reference/README.md](../registry/reference/README.md) says where each run was
made. To look at one yourself: `kernelmark show registry/reference/RUN.jsonl.gz`, or `kernelmark report
registry/reference/RUN.jsonl.gz --output page.html`.

Each table compares our kernel with the *fastest correct baseline of each case*. A case is one shape, dtype
and pass. A ratio above 1 means that ours is faster. *Faster* and *slower* count the cases whose whole 95 %
interval lies on that side of 1; *undecided* counts the others. The interval rests on the ratios within
replicates, which are fresh processes ([how it is measured](measuring.md))."""

CPU_TITLE = "# Results on a CPU"
CPU_INTRODUCTION = """\
This page is written by `python docs/results.py --write` from one run of `kernelmark run --plan cpu --device
cpu`, and a test holds it to that. [registry/reference/README.md](../registry/reference/README.md) says where
it was made. The libraries are those that somebody with a CPU would choose from: PyTorch (MKL in fp32, oneDNN
in bf16), oneDNN by itself, `torch.compile`, OpenVINO, ONNX Runtime, Intel Neural Compressor. `kernelmark_cpu`
is ours. Figures of one machine say little of another: threads, vectors and memory policy are conditions of
every row."""

COMMITTED_ANEW = {"c7ddef66a577": "c23940f"}
"""Commits of runs that this history has under another name; `registry/reference/README.md` says why."""

RAN_WITH = {
    **dict.fromkeys((RANKS, CONTEXT, DECODING, SERVER), "02f2b29"),
    **dict.fromkeys((*GRAPHED, *DECODE[2:4]), "a143950"),
    DECODE[-1]: "56b624a",
}
"""Runs from files of another commit than their header names; `registry/reference/README.md` says why."""

FEW_ALLOWED = "2026-11-21T11:20"
"""Before that time no element of an answer was allowed beyond the bound of a single one."""

ROW = ("rms_norm", "B4-S2048-D4096-bf16-backward")
"""The case of plan `memory` that the README shows."""

DENSE: Sequence[tuple[str, str, str]] = (
    (ATTENTION, "flash_attn_4", "FlashAttention 4"),
    (ATTENTION, "vllm_fa3", "FlashAttention 3 (vLLM's)"),
    (FLASHINFER, "flashinfer", "FlashInfer, beside older kernels of ours"),
    (ATTENTION, "sdpa_cudnn", "cuDNN"),
    (ATTENTION, "sdpa_flash", "FlashAttention 2 (PyTorch's)"),
)
"""Run, implementation, and what a reader knows it by."""


@functools.cache
def journal(run: str) -> Journal:
    """A run of `registry/reference/`, or what its shards have so far."""
    shards = sorted(JOURNALS.glob(f"{run}.*-of-*.jsonl.gz"))
    return join([read(x) for x in shards]) if shards else read(JOURNALS / f"{run}.jsonl.gz")


@functools.cache
def rows_of(run: str) -> tuple[Row, ...]:
    """Its rows."""
    return rows(journal(run))


def whole(plan: str) -> str:
    """Of the runs of a plan whose rows have intervals the newest one of most cases: what was measured of a part of
    it, or in a single replicate, takes no table's place. Empty without one.
    """
    found = []
    for path in JOURNALS.glob("*.jsonl.gz"):
        header = read_header(path)
        if header is None or header.plan != plan or header.request.verifies:
            continue
        records = journal(header.run).records
        cases = {(x.case.operator, x.case.name) for x in records}
        if any(x.replicate for x in records):
            found.append((len(cases), header.created, header.run))
    return max(found)[-1] if found else ""


MEMORY = whole("memory")
CPU = whole("cpu")
"""The page of a CPU is written where there is a run of it."""


@functools.cache
def verifications() -> tuple[Journal, ...]:
    """The journals here that verify another."""
    headers = {x: read_header(x) for x in sorted(JOURNALS.glob("*.jsonl.gz"))}
    return tuple(read(x) for x, header in headers.items() if header is not None and header.request.verifies)


def page() -> str:
    """The whole page."""
    parts = [
        TITLE,
        INTRODUCTION,
        *_plan("Memory-bound operators", MEMORY),
        *_plan("Three of them again", MEMORY_ROWS),
        *_plan("Attention", ATTENTION),
        *_dense(),
        *_plan("State-space models and linear attention", STATE_SPACE),
        *_products(),
        *_since(),
        *_fewer(),
        *_every("Products in other kernel languages", LANGUAGES),
        *_every("Products and norms in TileLang", TILELANG),
        *_every("Products of up to 16 rows", FEW_ROWS),
        *_every("ONNX Runtime's CUDA provider", ONNX),
        *_steps(),
        *_every("A training step before, beside other systems", TRAIN),
        *_techniques(),
        *_every("Precisions, as far as they came", PRECISION_PART),
        "The loss of `fp16_scaled` multiplied in fp32 there, which autocast does in fp16: that row is slower than "
        "what users have.",
        *_plan("Calls that models make, as far as they came", SHAPES),
        *_every("Latent attention, heads of 256, packed sequences", ATTENTION_HOPPER),
        *_every("The same beside FlashAttention 4", ATTENTION_HOPPER_FA4),
        *_every("Precisions from 124 M to 8 B", PRECISION),
        f"Refused were {_refused(PRECISION)}: for what three steps change of the last norm's bias, or for a "
        "gradient ([what rounding makes of it](training.md#precisions-on-an-h200)).",
        *_every("GPT-2 124M in 8 bits and in 16, norms and GELU writing 8 bits", FP8_GRAPH),
        *_every("The same before, attention on whole projections", FP8_GRAPH_BEFORE[0]),
        *_every("And before, a bias added by the product", FP8_GRAPH_BEFORE[1]),
        *_every("Precisions of 8 B parameters, as far as they came", PRECISION_8B),
        "All rows in 8 bits were refused for gradients of queries and keys, most likely for what rounding alone "
        "makes of them in so many layers ([the bound](training.md#precision)).",
        *_every("8 B parameters in 8 bits by graphs", PRECISION_8B_GRAPHS),
        "Refused for a gradient of keys likewise, ours in graphs as torchao's.",
        *_worth(),
        *_truth(),
        *_host(),
        *_convergence(),
        *_resumed(),
        *_collectives(),
        *_context(),
        *_data_parallel(),
        *_side_by_side_gpus(),
        *_every("Ranks before, each operator once", RANKS),
        *_every("Context parallel attention before", CONTEXT),
        *_decoding(),
        *_every("Decoding before, by time a token", DECODING),
        *_passes(),
        *_server(),
        *_every("A server before, by time of a request", SERVER),
        *_rewired(),
        *_crossing(),
        *_slower(),
        *_incorrect(),
        *_noise(),
        *_limits(),
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
        f"and {_ratio(ours.speedup_vs_best_baseline)} times as fast as the fastest correct baseline (`vs best`):\n"
        f"the number to look at. This run is {said(made, verifications())}."
    )
    return "\n".join(["```", *lines[start:end], "```", "", told]) + "\n"


def cpu_page(run: str) -> str:
    """The whole page of a run of the plan `cpu`."""
    held = journal(run).header.conditions
    told = (
        f"{held['cpu']} with {held['vectors']}, {held['threads']} threads on {held['cores']} cores, memory policy "
        f"`{held['memory_policy']}`, huge pages `{held['huge_pages']}`, torch {held['torch']}."
    )
    parts = [CPU_TITLE, CPU_INTRODUCTION, told, *_plan("Ours beside the fastest of the others", run)]
    return "\n\n".join([*parts, *_fastest(run), *_side_by_side(run), *_without_a_time(run)]) + "\n"


def _fastest(run: str) -> list[str]:
    """Of how many cases each implementation is the fastest, by the cases' dtype."""
    times = _times(run)
    dtypes = sorted({dtype for _, dtype, _ in times})
    lines = [f"| implementation | {' | '.join(dtypes)} |", "|---|" + "---|" * len(dtypes)]
    for name in sorted({x for row in times.values() for x in row}):
        cells = []
        for dtype in dtypes:
            having = [x for (_, of, _), x in times.items() if of == dtype and name in x]
            first = sum(min(x, key=x.__getitem__) == name for x in having)
            cells.append(f"{first} of {len(having)}" if having else "")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return ["## Who is the fastest, and of how many cases", "\n".join(lines)]


def _side_by_side(run: str) -> list[str]:
    """A table an operator: cases below each other, implementations side by side."""
    times = _times(run)
    timed = [x for x in rows_of(run) if x.value() is not None]
    unsettled = {(x.operator, x.case, x.implementation) for x in timed if x.converged is False}
    told = "A row with \\* did not reach the precision asked for."
    if len(unsettled) == len(timed):
        target = journal(run).header.request.sampling["target"]
        told = f"No row reached the precision asked for: a median to {100 * target:g} % in every process."
        unsettled.clear()
    parts = ["## Every case", f"In ms; the fastest of a case is bold. {told}"]
    for operator in sorted({x for x, _, _ in times}):
        chosen = {case: x for (of, _, case), x in times.items() if of == operator}
        names = sorted({x for row in chosen.values() for x in row})
        lines = [f"| case | {' | '.join(f'`{x}`' for x in names)} |", "|---|" + "---|" * len(names)]
        for case, row in chosen.items():
            cells = []
            for name in names:
                cell = figures.number(row[name]) if name in row else ""
                cell = f"**{cell}**" if name == min(row, key=row.__getitem__) else cell
                cells.append(cell + "\\*" * ((operator, case, name) in unsettled))
            lines.append(f"| {case} | {' | '.join(cells)} |")
        parts += [f"### `{operator}`", "\n".join(lines)]
    return parts


def _times(run: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """The latency of each implementation, in ms, by operator, dtype and case."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for x in rows_of(run):
        if (ms := x.value()) is not None:
            found.setdefault((x.operator, x.dtype, x.case), {})[x.implementation] = ms
    return found


def _without_a_time(run: str) -> list[str]:
    """What has no time, and why; what needs a GPU is only counted."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    elsewhere = 0
    for x in rows_of(run):
        reason = (x.reason or "").removeprefix("verify: ").removeprefix("build: ")
        if reason.startswith("needs a"):
            elsewhere += 1
        elif x.status != "ok":
            found.setdefault((x.implementation, x.status, reason), []).append(x)
    lines = ["| implementation | status | operators | cases | reason |", "|---|---|---|---|---|"]
    for (name, status, reason), those in sorted(found.items()):
        operators = ", ".join(f"`{x}`" for x in sorted({x.operator for x in those}))
        lines.append(f"| `{name}` | {status} | {operators} | {len(those)} | {reason} |")
    more = "row more is" if elsewhere == 1 else "rows more are"
    return [
        "## What has no time",
        f"{elsewhere} {more} `unsupported` because their libraries need a GPU.",
        "\n".join(lines),
    ]


def _plan(title: str, run: str) -> list[str]:
    """A heading, where the run was made, and one line an operator."""
    made = journal(run)
    found = summary.standings(rows_of(run))
    lines = [
        "| operator | cases | geometric mean (worst – best) | faster / undecided / slower |",
        "|---|---|---|---|",
    ]
    for x in sorted(found, key=lambda x: x.operator):
        if x.compared:
            span = f"{_ratio(x.versus_best)} ({_ratio(_speedup(x.worst))} – {_ratio(_speedup(x.best))})"
            counts = f"{x.faster} / {x.undecided} / {x.slower}"
            lines.append(f"| `{x.operator}` | {len(x.compared)} | {span} | {counts} |")
    return [f"## {title}", _where(made), "\n".join(lines)]


def _every(title: str, run: str) -> list[str]:
    """Some cases of a plan, each row of them by itself."""
    made = journal(run)
    lines = ["| operator | case | implementation | ms | against the fastest baseline |", "|---|---|---|---|---|"]
    for x in sorted(rows_of(run), key=lambda x: (x.operator, x.case, x.value() or float("inf"))):
        if (ms := x.value()) is None:
            continue
        ratio = _ratio(x.speedup_vs_best_baseline)
        lines.append(f"| `{x.operator}` | {x.case} | `{x.implementation}` | {figures.number(ms)} | {ratio} |")
    return [f"## {title}", f"Some cases of the plan. {_where(made)}", "\n".join(lines)]


Group: TypeAlias = tuple[str, str, Callable[[Row], bool]]
"""A group of products in words, the peer that it is held against ("" for the fastest), and its rows."""


def _plain(row: Row, operator: str, recipe: str = "") -> bool:
    """Whether a row is of a product as it lies, forward and of normal data, by one recipe."""
    given = row.options
    same = given.get("layout", "nt") == "nt" and given.get("epilogue", "none") == "none"
    return (
        row.operator == operator
        and same
        and given.get("data", "normal") == "normal"
        and (not recipe or given.get("recipe") == recipe)
    )


GROUPS: Sequence[Group] = (
    ("bf16, M from 1,024", "torch", lambda x: _plain(x, "matmul") and x.dtype == "bf16" and x.axes["M"] >= 1024),
    ("bf16, M up to 128", "torch", lambda x: _plain(x, "matmul") and x.dtype == "bf16" and x.axes["M"] <= 128),
    (
        "bf16 with a gated epilogue",
        "torch",
        lambda x: x.operator == "matmul" and x.options["epilogue"] == "swiglu",
    ),
    (
        "FP8 in blocks, M from 1,024",
        "vllm_deep_gemm",
        lambda x: _plain(x, "fp8_matmul", "block") and x.axes["M"] >= 1024,
    ),
    (
        "FP8 in blocks, M up to 128",
        "vllm_deep_gemm",
        lambda x: _plain(x, "fp8_matmul", "block") and x.axes["M"] <= 128,
    ),
    ("FP8 in blocks, M from 1,024", "torch", lambda x: _plain(x, "fp8_matmul", "block") and x.axes["M"] >= 1024),
    ("FP8 in blocks, M up to 128", "torch", lambda x: _plain(x, "fp8_matmul", "block") and x.axes["M"] <= 128),
    ("FP8 in blocks", "vllm", lambda x: _plain(x, "fp8_matmul", "block")),
    ("FP8 in blocks", "flashinfer", lambda x: _plain(x, "fp8_matmul", "block")),
    ("FP8 by rows", "torch", lambda x: _plain(x, "fp8_matmul", "row")),
    ("FP8 with scales of tensors", "torch", lambda x: _plain(x, "fp8_matmul", "tensor")),
    ("groups in blocks", "vllm_deep_gemm", lambda x: x.operator == "grouped_fp8_matmul"),
    ("`moe`, 4,096 tokens", "vllm", lambda x: x.operator == "moe" and x.axes["M"] == 4096),
    ("`moe`, 16 tokens", "vllm", lambda x: x.operator == "moe" and x.axes["M"] == 16),
    ("`moe`, gpt-oss's activation", "vllm_triton_kernels", lambda x: x.operator == "moe"),
    ("MXFP4, M up to 64", "torch_bf16", lambda x: _mxfp4(x) and x.axes["M"] <= 64),
    ("MXFP4, M up to 64", "vllm_marlin", lambda x: _mxfp4(x) and x.axes["M"] <= 64),
    ("2:4 in bf16, M up to 64", "torch", lambda x: x.operator == "sparse24_matmul" and x.axes["M"] <= 64),
    (
        "2:4 in bf16, M from 4,096",
        "torch_cusparselt",
        lambda x: x.operator == "sparse24_matmul" and x.axes["M"] >= 4096,
    ),
    ("`quantized_activation`", "", lambda x: x.operator == "quantized_activation"),
    ("`quantized_linear`", "", lambda x: x.operator == "quantized_linear"),
)


def _mxfp4(row: Row) -> bool:
    return row.operator == "mx_matmul" and row.options["format"] == "mxfp4" and row.dtype == "bf16"


NAMED = frozenset(
    {
        (2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
        (2880, 2880), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096), (4096, 8192), (1001, 999),
        (16384, 8192),
    }
)  # fmt: skip
"""(N, K) that plan `matmul` names."""


def _drawn(row: Row) -> bool:
    """Whether a row of plan `matmul` is of a shape that was drawn at random."""
    return row.operator in ("matmul", "fp8_matmul") and (row.axes["N"], row.axes["K"]) not in NAMED


BESIDE = (
    "The peer's time over ours: the geometric mean, the range, and how many cases. Those of the last column were "
    "drawn by one seed, and no table of schedules knows them. Half of the plan ran on each of two GPUs at once. "
    "Two processes give an interval of little worth: of what is close this decides nothing. All rows of ours were "
    "right. In fp32 products are TF32's, whose rate was not measured yet: of fp32's they have a multiple. In bf16 "
    "quack took {quack} ms at 8192 × 8192 × 8192, `torch` {torch}, ours {ours}."
)


def _products() -> list[str]:
    """Products: groups of them against a peer, those drawn at random by themselves, then every case."""
    made, cases = journal(MATMUL), _by_case(MATMUL)

    def ratios(peer: str, chosen: Callable[[Row], bool], drawn: bool) -> list[float]:
        found = []
        for by in cases.values():
            ours = by.get(PROVIDER)
            if ours is None or not chosen(ours) or _drawn(ours) != drawn:
                continue
            name = peer or ours.best_baseline
            if name in by:
                found.append(_value(by[name]) / _value(ours))
        return found

    lines = []
    for group, peer, chosen in GROUPS:
        told = [f"{group} against {f'`{peer}`' if peer else 'the fastest other'}"]
        for drawn in (False, True):
            found = ratios(peer, chosen, drawn)
            mean = geometric_mean(found)
            span = (
                f"{_ratio(mean)} ({_ratio(min(found))} – {_ratio(max(found))}), {len(found)}"
                if found
                else figures.DASH
            )
            told.append(span)
        if any(x != figures.DASH for x in told[1:]):
            lines.append(told)
    every = []
    for (operator, case), by in sorted(cases.items()):
        ours = by.get(PROVIDER)
        if ours is None or _drawn(ours):
            continue
        best = by.get(ours.best_baseline or "")
        rate = ours.flops / _value(ours) / 1e9 if ours.flops else None
        every.append([
            f"`{operator}`", case.removesuffix("-forward"), figures.number(_value(ours)),
            figures.number(rate, 3) if rate else figures.DASH, figures.percent(ours.fraction_of_limit),
            f"`{best.implementation}`" if best else figures.DASH,
            figures.number(best.value()) if best else figures.DASH,
            _ratio(ours.speedup_vs_best_baseline),
        ])  # fmt: skip
    square = {name: figures.number(x.value()) for name, x in cases["matmul", SQUARE].items()}
    return [
        "## Matrix products",
        _where(made),
        BESIDE.format(quack=square["quack"], torch=square["torch"], ours=square[PROVIDER]),
        _table(["products", "the plan's shapes", "random shapes"], lines),
        "Every case but the random ones. *Of the limit*: of what the device's own ceilings of the run allow.",
        _table(
            ["operator", "case", "ours, ms", "TFLOP/s", "of the limit", "fastest other", "its ms", "ratio"], every
        ),
    ]


def _since() -> list[str]:
    """Products with scales of blocks before and since, each beside DeepGEMM of its own run."""

    def against(run: str) -> dict[tuple[str, str], tuple[Row, float]]:
        peer = "vllm_deep_gemm"
        return {
            at: (by[PROVIDER], _value(by[peer]) / _value(by[PROVIDER]))
            for at, by in _by_case(run).items()
            if at[0] in ("fp8_matmul", "grouped_fp8_matmul")
            if peer in by and PROVIDER in by and by[PROVIDER].options["recipe"] == "block"
        }

    before, since = against(MATMUL_BLOCKS), against(MATMUL)
    common = sorted(before.keys() & since.keys())
    kinds: Sequence[tuple[str, Callable[[Row], bool]]] = (
        ("`fp8_matmul`, M from 1,024", lambda x: x.operator == "fp8_matmul" and x.axes["M"] >= 1024),
        ("`fp8_matmul`, M up to 1,000", lambda x: x.operator == "fp8_matmul" and x.axes["M"] < 1024),
        ("`grouped_fp8_matmul`", lambda x: x.operator == "grouped_fp8_matmul"),
    )
    lines = []
    for words, chosen in kinds:
        for drawn, shapes in ((False, "the plan's"), (True, "random")):
            found = [x for x in common if chosen(since[x][0]) and _drawn(since[x][0]) == drawn]
            if found:
                pair = [_mean(side[x][1] for x in found) for side in (before, since)]
                lines.append([words, shapes, str(len(found)), *pair])
    return [
        "### Products in blocks before and since",
        "DeepGEMM's time over ours, each within its own run, as geometric means over the cases that both runs "
        f"have. Before: {_where(journal(MATMUL_BLOCKS))} On another H200 of that kind.",
        _table(["products", "shapes", "cases", "before", "since"], lines),
    ]


def _by_case(run: str) -> dict[tuple[str, str], dict[str, Row]]:
    """The timed rows of a run by operator and case, then by implementation."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for x in rows_of(run):
        if x.value() is not None:
            found.setdefault((x.operator, x.case), {})[x.implementation] = x
    return found


def _mean(ratios: Iterable[float]) -> str:
    return _ratio(geometric_mean(list(ratios)))


ROWS_OF_A = ((1, 3), (4, 16), (17, 32), (33, 150), (151, 1000), (1001, 1 << 20))


def _fewer() -> list[str]:
    """Products before and since few rows are loaded alone: by how many there are, then groups, mixtures and MXFP4
    by E4M3 case by case.
    """
    before, since = _by_case(MATMUL_FEW), _by_case(MATMUL)
    both = sorted(x for x in since if PROVIDER in since[x] and PROVIDER in before.get(x, {}))
    lines = []
    for least, most in ROWS_OF_A:
        here = [x for x in both if x[0] == "fp8_matmul" and least <= since[x][PROVIDER].axes["M"] <= most]
        if here:
            words = f"{least:,} to {most:,}" if most < 1 << 20 else f"from {least:,} on"
            lines.append(
                [
                    words,
                    str(len(here)),
                    _mean(_value(since[x][PROVIDER]) / _value(before[x][PROVIDER]) for x in here),
                ]
            )
    every = []
    for at in both:
        ours = since[at][PROVIDER]
        reencoded = at[0] == "mx_matmul" and ours.dtype == "e4m3"
        if at[0] not in ("grouped_fp8_matmul", "moe") and not reencoded:
            continue
        best = since[at].get(ours.best_baseline or "")
        every.append([
            f"`{at[0]}`", at[1].removesuffix("-forward"), figures.number(_value(before[at][PROVIDER])),
            figures.number(_value(ours)), f"`{best.implementation}`" if best else figures.DASH,
            figures.number(best.value()) if best else figures.DASH,
        ])  # fmt: skip
    return [
        "### Few rows, groups, mixtures and MXFP4 before and since",
        f"Before: {_where(journal(MATMUL_FEW))} On another H200 of that kind. Since: the run above.",
        _table(["`fp8_matmul`, rows of A", "cases", "time since over before"], lines),
        _table(["operator", "case", "ours before, ms", "ours, ms", "fastest other since", "its ms"], every),
    ]


Column: TypeAlias = tuple[str, Callable[[Row], str]]
"""A heading, and what it says of a row."""


def _number(heading: str, metric: str | None = None, digits: int = 4) -> Column:
    """A metric in its unit; the primary one by default."""
    return heading, lambda row: figures.number(row.value(metric), digits)


def _share(heading: str, metric: str) -> Column:
    return heading, lambda row: figures.percent(row.value(metric), 1)


def _size(heading: str, metric: str) -> Column:
    return heading, lambda row: figures.size(row.value(metric))


BEST: Column = ("against the fastest baseline", lambda row: _ratio(row.speedup_vs_best_baseline))


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(x)} |" for x in (head, ["---"] * len(head), *lines))


def _techniques() -> list[str]:
    """Rows of plan `memory-techniques`: what a step takes, and what it keeps in memory for the backward pass."""
    memory = _size("kept", "activations"), _size("peak allocated", "peak_allocated")
    steps = _number("ms a step"), *memory, BEST
    losses = (
        _number("bits a byte"),
        _number("tokens/s", "tokens_per_s"),
        _number("bytes of bf16 over those of the payload", "compression_ratio"),
    )
    pool = (
        _number("reserved over allocated"),
        _number("retries", "retries"),
        _number("ms of host time", "replay"),
        _size("reserved", "pool_reserved"),
    )
    tokens = _number("ms a token"), _size("peak memory", "generation_memory"), BEST
    moved = (
        *steps[:1],
        _number("exposed, ms", "exposed_states"),
        _number("link both ways, GB/s", "host_link"),
        *steps[1:],
    )
    large = [x for x in rows_of(TECHNIQUES) if x.options.get("model") == "llama-3.1-8b"]
    assert all(x.status == "out_of_memory" for x in large)
    (ended,) = (x.implementation for x in rows_of(TECHNIQUES_LARGE) if x.status == "crashed")
    (lost,) = (x.implementation for x in rows_of(TECHNIQUES_LARGE) if x.status == "incorrect")
    assert (lost, "out_of_memory") in {(x.implementation, x.status) for x in rows_of(TECHNIQUES_STATES)}
    return [
        "## Techniques of training",
        f"{_where(journal(TECHNIQUES))} *Kept*: what a pass leaves for the backward pass. The {len(large)} "
        "rows of 8 B parameters have no time in this run: their answer in fp32 had no room on the device. It "
        "has in the run below.",
        _programs(TECHNIQUES, steps, "train"),
        "Gradients compressed and decompressed, with what is lost added to the next step's; nothing is sent. One "
        "seed, whose loss falls steeply where it ends: no verdict.",
        _programs(TECHNIQUES, losses, "converge"),
        "A pass without gradients, and a token:",
        _programs(TECHNIQUES, (_number("ms a pass"), BEST), "forward"),
        _programs(TECHNIQUES, tokens, "generate"),
        "The memory pool, with memory to spare or with 5 % more than the pattern needs:",
        _programs(TECHNIQUES, pool, "memory_pool", failed=True),
        "### Eight billion parameters, and masters in fp32",
        f"{_where(journal(TECHNIQUES_LARGE))} 16,384 tokens a step of 8 B parameters, states in bf16, and "
        "32,768 of 3.2 B with masters in fp32. What states on the host cost beside the same step without "
        "moving them is *exposed*; they move during the backward pass where gradients are not clipped "
        f"(`clip0.0`). Where the table says so, the device had no memory for these tokens. `{ended}` was ended "
        "by the system, most likely as the host's 125 GiB do not hold the answer and what it keeps too. The row "
        f"of `{lost}` at 3.2 B was lost to an error of the harness, mended since; run `{TECHNIQUES_STATES}`, on "
        "another H200, has it: out of memory. DeepSpeed's rows are in the run below.",
        _programs(TECHNIQUES_LARGE, moved, "train", failed=True),
        "A decoder block's forward pass:",
        _programs(TECHNIQUES_LARGE, (_number("ms a pass"), BEST), "forward"),
        "### Libraries that keep states on the host",
        f"{_where(journal(TECHNIQUES_OFFLOADED))} A host of 252 GiB. {_unmeasured(TECHNIQUES_OFFLOADED)}",
        _programs(TECHNIQUES_OFFLOADED, moved, "train"),
        "## Techniques of training before, on another host",
        _where(journal(TECHNIQUES_BEFORE)),
        _programs(TECHNIQUES_BEFORE, steps, "train"),
        _programs(TECHNIQUES_BEFORE, (_number("ms a pass"), BEST), "forward"),
        _programs(TECHNIQUES_BEFORE, (_number("ms a token"), BEST), "generate"),
        _programs(TECHNIQUES_BEFORE, pool, "memory_pool"),
    ]


def _programs(run: str, columns: Sequence[Column], workload: str = "", failed: bool = False) -> str:
    """Every row of a run (of one workload, if it is named) that has a value, its metrics side by side; with
    `failed` also what has none for want of memory, but for a model whose answer had none.
    """
    found = [
        x
        for x in rows_of(run)
        if workload in ("", x.operator)
        and (x.value() is not None or (failed and x.status in ("out_of_memory", "crashed") and not _unanswered(x)))
    ]
    lines = []
    for x in sorted(found, key=lambda x: (list(x.axes.values()), x.case, x.value() or float("inf"))):
        told = [said(x) for _, said in columns]
        if x.value() is None:
            told[0] = x.status.replace("_", " ")
        lines.append([x.case, f"`{x.implementation}`", *told])
    return _table(["case", "implementation", *(heading for heading, _ in columns)], lines)


def _unanswered(row: Row) -> bool:
    return (row.reason or "").startswith("preparing the check")


def _refused(run: str) -> str:
    """How many rows of a run were refused, by case."""
    found = Counter(x.case for x in rows_of(run) if x.status == "incorrect")
    return ", ".join(f"{count} rows of {case}" for case, count in found.items())


def _unmeasured(run: str) -> str:
    """Every row of a run without a value, and why."""
    lost = (x for x in rows_of(run) if x.value() is None and x.status not in ("unavailable", "unsupported"))
    return " ".join(f"`{x.implementation}` of {x.case}: {x.status}, {x.reason}." for x in lost)


def _row(run: str, implementation: str, **axes: int) -> Row:
    """The one row with a value by an implementation at such axes."""
    (found,) = (
        x
        for x in rows_of(run)
        if x.implementation == implementation and x.value() is not None and axes.items() <= x.axes.items()
    )
    return found


def _value(row: Row, metric: str | None = None) -> float:
    value = row.value(metric)
    assert value is not None, (row.case, row.implementation, metric)
    return value


@functools.cache
def record(name: str) -> Any:
    """A record of `registry/reference/` in JSON."""
    return json.loads((JOURNALS / name).read_bytes())


def _steps() -> list[str]:
    """Training steps."""
    columns = (
        _number("ms"),
        _number("tokens/s", "tokens_per_s", 5),
        _share("MFU", "mfu"),
        _share("of the limit", "limit_fraction"),
        _size("peak memory", "peak_allocated"),
        BEST,
    )
    accumulated = "B1-S4096-A4-llama-1.2b-plain-bf16"
    (waited,) = (
        x.measurement.samples["step"]
        for x in journal(TRAINED).records
        if x.measurement is not None and (x.case.name, x.implementation) == (accumulated, PROVIDER)
    )
    low, high = figures.number(min(waited)), figures.number(max(waited))
    parts = [
        "## Training steps",
        "One replicate each, so no intervals: rows that lie within some per cent are not told apart. MFU and "
        "limit are [the model's](models.md).",
        "### Plan `train`, as far as it came",
        f"{_where(journal(TRAINED))} Four of six shards, two at a time on two GPUs of one host. What launches "
        "kernel by kernel waited for the host: by "
        f"`kernelmark` steps of {accumulated} took {low} to {high} ms, "
        "and such rows say more of the host than of kernels. Graphs and larger steps are the device's. "
        "`max_autotune` of Llama 1.2B and of GPT-2 at B 8 was interrupted while it compiled. Masters in "
        "fp32, BERT, experts and Mamba-2, of the other two shards, were not run at this commit.",
        _programs(TRAINED, columns),
        "### BERT, masters in fp32, Mamba-2, experts, more of graphs",
        "Other rows of that plan, at other commits. Of Mamba-2 torch.compile is `error`: its "
        "Inductor fails at a sum over parts. Of Mixtral all five systems are `incorrect`, PyTorch's own too: in "
        "bf16 some tokens go to other experts than in fp32, and the gradient of a router is .30 to .35 of its "
        "norm off, where .3 is allowed.",
        *(x for run in OTHER_SHARDS for x in (_where(journal(run)), _programs(run, columns, failed=True))),
        "### Micro-batches and Muon in graphs",
        _where(journal(ACCUMULATED)),
        _programs(ACCUMULATED, columns),
        "### Some cases, older",
    ]
    for run in STEPS:
        parts += [_where(journal(run)), _programs(run, columns)]
    small, large = (_value(_row("train-gpt2", PROVIDER, B=x)) for x in (8, 64))
    parts.append(
        f"GPT-2 at B 8 is not bound by the device: by ours a step takes {figures.number(small)} ms, and an eighth "
        f"of one at B 64 {figures.number(large / 8)} ms. The rest is the host's, which launches kernel by kernel: "
        "*What a call costs the host*, below. Such rows say as much of the host as of kernels."
    )
    parts += [
        "### In graphs, beside a host at work",
        "Another program compiled in up to ten jobs on the host's sixteen cores, at the lowest priority, so that "
        "what launches kernel by kernel waits: PyTorch's compiled layers of GPT-2 took twice as long as above. "
        "No other compiled system of GPT-2 was reached, torch.compile's own graphs (`reduce_overhead`) without "
        "kernels of ours least of all, so that no ratio of that table is one of kernels. In these runs peak "
        "memory of a graph leaves its pool out; reserved is what the allocator held in all.",
    ]
    for run in GRAPHED:
        parts += [_where(journal(run)), _programs(run, (*columns, _size("reserved", "peak_reserved")))]
    narrow, wide = (
        _value(_row("precision-1b", x)) for x in ("kernelmark_fp8_rowwise", "kernelmark_compile_blocks")
    )
    parts.append(
        f"Eight layers of the 1.3B decoder in FP8 by rows take {figures.ratio(narrow / wide)} the time of bf16, "
        "both by ours: the one eager, the other with compiled layers, on that host."
    )
    return parts


def _worth() -> list[str]:
    """What exchanges of a part are worth."""
    found = [x for run in WORTHS for x in worths(journal(run)) if x.status == "ok"]
    nulls = [x for x in found if x.exchange.implementation == x.exchange.instead]
    moved = [x for x in found if x.expected is not None and abs(x.expected - 1) >= WORTH_SEEN]
    near = [x for x in moved if x.agreement == "as expected" or abs(_gained(x) - 1) <= WORTH_NEAR]
    signs = sum(_gained(x) > 0 for x in moved)
    beyond = ", ".join(
        f"{x.exchange.part} by `{x.exchange.implementation}` {figures.percent(_gained(x))}"
        for x in moved
        if x not in near
    )
    parts = [
        "## What kernels are worth in a step",
        "PyTorch's step in a CUDA graph, one part of it exchanged at a time. *Alone ×* is the call by itself, "
        "*expected ×* what the step would gain if nothing else changed, *measured ×* what it gains, with its "
        f"interval over processes. {len(moved)} exchanges are expected to move a step by "
        f"{figures.percent(WORTH_SEEN)} or more: the sign is right in {signs}, the size within "
        f"{figures.percent(WORTH_NEAR)} or the interval in {len(near)}. The others gain more than is expected of "
        f"their calls ({beyond} of it); the lines below the table say what else went. Of {len(nulls)} exchanges "
        f"of a part for itself the interval holds 1 in {sum(x.null for x in nulls)}.",
    ]
    for run in WORTHS:
        own = worths(journal(run))
        base = next(x.base_ms for x in own if x.base_ms is not None)
        parts += [
            f"{_where(journal(run))} {own[0].exchange.step}, a step of {figures.number(base, 4)} ms.",
            _table(list(worth_table.HEADINGS), [worth_table.cells(x) for x in own if x.status == "ok"]),
            "\n".join(
                f"* {x.exchange.part} by `{x.exchange.implementation}`: {x.differs}" for x in own if x.differs
            ),
        ]
    parts.append(
        "A norm without an addition has no isolated row in the first run: its case and `add_rms_norm`'s have one "
        "name, and the plan kept one of the two; since then it keeps both. Liger's loss waits for the device, "
        "which a graph cannot hold: its row is `error` there and `unsupported` since."
    )
    return parts


def _gained(x: Worth) -> float:
    """What was gained of what was expected; below 0 where the sign is wrong."""
    assert x.gained_ms is not None
    assert x.expected_ms is not None
    return x.gained_ms / x.expected_ms


def _truth() -> list[str]:
    """Delays that were planted, and what worth finds of them."""
    own = {f"planted_{us}us": ms / 1e3 for us, ms in record("truth/delays-h200.json").items()}
    lines = []
    for run in TRUTHS:
        for x in worths(journal(run)):
            if x.status == "ok" and x.base_ms is not None and x.measured is not None:
                lines.append([str(TRUTHS.index(run) + 1), *_recovered(x, own)])
    head = ["host", "put in", "processes", "planted ms", "lost ms", "recovered", "95 %"]
    return [
        "## Is worth right?",
        "In GPT-2 124M's step in a CUDA graph (B 1, S 128) PyTorch's norm is exchanged for the same one behind a "
        "kernel that waits 50, 200 or 1,000 µs, called 25 times. What such a kernel takes was measured by itself "
        "(`truth/delays-h200.json`); *planted* is that times the calls, and what is lost should be as much. "
        "`planted_null` is the same norm without a delay; without a name an exchange is for itself. "
        "`tests/calibration/delays.py` has the program. A single process has no interval: what the first host "
        "shows where nothing was planted is not told from noise. "
        + " ".join(f"{_where(journal(x))}" for x in TRUTHS),
        _table(head, lines),
    ]


def _recovered(x: Worth, own: Mapping[str, float]) -> list[str]:
    """What was planted in a step by an exchange, and what was found."""
    assert x.base_ms is not None
    assert x.measured is not None
    _, _, put = x.exchange.system.rpartition(".")
    planted = own.get(put, 0.0) * x.exchange.calls
    lost = x.base_ms / x.measured - x.base_ms
    several = x.processes > 1 and x.low is not None and x.high is not None
    if not planted:
        interval = f"{x.low:.4f} – {x.high:.4f} of the step" if several else figures.DASH
        name = f"`{put}`" if put == "planted_null" else x.exchange.part
        return [name, str(x.processes), "0", f"{lost:.3f}", figures.DASH, interval]
    found = [x.base_ms / y - x.base_ms for y in (x.high, x.low) if several and y]
    interval = " – ".join(figures.percent(y / planted, 1) for y in found) if several else figures.DASH
    recovered = figures.percent(lost / planted, 1)
    return [f"`{put}`", str(x.processes), f"{planted:.3f}", f"{lost:.3f}", recovered, interval]


def _host() -> list[str]:
    """What a call costs the host."""
    found = record("host/calls-h200.json")
    ways = {
        "forward": "forward",
        "both": "with its gradient",
        "views": "of views",
        "new gradients": "new gradients",
    }
    lines = [
        [
            f"`{x['operator']}`",
            ways.get(x["way"], x["way"]),
            f"{x['ours']:.0f}",
            f"{x['theirs']:.0f}",
            _ratio(x["ratio"]),
        ]
        for x in found["rows"]
    ]
    within = sum(x["ratio"] <= 1.5 for x in found["rows"])
    text = (
        f"`tests/kernels/host_time.py` on the host of an H200, {found['calls']} calls over tensors never seen "
        f"before, in µs a call: ours, PyTorch's own, ours over PyTorch's. {within} of {len(lines)} are at most "
        "1.5 times PyTorch's. Once, on a host with no other work."
    )
    return [
        "## What a call costs the host",
        text,
        _table(["operator", "way", "ours", "PyTorch's", "ratio"], lines),
    ]


def _convergence() -> list[str]:
    """Arms beside their base: from a checkpoint, from random weights, and fewer steps before."""
    return [
        "## Convergence",
        "GPT-2 124M's blocks with bytes, 86 M parameters, steps of 16,384 bytes, five seeds.",
        *_long(),
        *_continued(),
        *_from_random(),
        *_convergence_before(),
    ]


def _long() -> list[str]:
    """Arms of 10,000 steps, of the seeds that are there."""
    made = journal(LONG)
    last = {
        name: {x.replicate: y[-1] for x in made.records if x.implementation == name and (y := _curve(x))}
        for name in ("torch", "kernelmark_graph", "kernelmark_fp8_1x128", "float8_tensorwise")
    }
    base = last.pop("torch")
    off = {
        name: " and ".join(figures.percent(found[x] / base[x] - 1, 2) for x in sorted(found.keys() & base.keys()))
        for name, found in last.items()
    }
    by = _speeds(made)
    return [
        "### 10,000 steps, as far as they came",
        f"{len(base)} seeds of five: fewer than five decide nothing. PyTorch's arm ends at "
        f"{' and '.join(figures.number(base[x], 4) for x in sorted(base))} bits a byte. From the base of their "
        f"seed our kernels in bf16 are {off['kernelmark_graph']}, ours in 8 bits by scales of 128 elements "
        f"{off['kernelmark_fp8_1x128']}, torchao's 8 bits by tensor {off['float8_tensorwise']}. The margin is "
        "0.25 %. After 1,000 steps arms are still per cents from their base, as below.",
        _where(made),
        _arms(LONG),
        "Tokens a second × PyTorch's eager step, on a GPU beside which another worked: ours in a graph "
        f"{figures.ratio(by['kernelmark_graph'])}, ours in 8 bits {figures.ratio(by['kernelmark_fp8_1x128'])}, "
        f"torchao's compiled {figures.ratio(by['float8_tensorwise'])}. Each seed is a shard of the run; one is "
        "begun and two have nothing yet. Sparse attention, the fifth arm that is asked for, was not run.",
    ]


def _continued() -> list[str]:
    """Arms that go on from one checkpoint."""
    made = journal(CONTINUED)
    base = [x.samples["bits_per_byte"][0] for x in _trained(made)]
    found = {x.name: x for x in arms(made)}
    curve = _trained(made)[0].samples["bits_by_step"]
    beyond = {name: found[name].steps for name in ("float8_tensorwise", "lost_20")}
    upper = {name: figures.number(x.high, 4) for name, x in beyond.items() if x is not None and x.high is not None}
    widest = max(abs(y) for y in _interval(found["kernelmark_graph"]))
    by = _speeds(made)
    (own,) = differences(made).values()
    before = {name: figures.percent(x[0.0][1], 3) for name, x in own.items()}
    return [
        "### 1,000 steps from a checkpoint",
        "A training of 2,000 steps goes on for 1,000 (`converge_continued`): behind the plateau that random "
        "weights begin with, seeds of one arm end within "
        f"{figures.percent(max(base) / min(base) - 1, 1)} of one another, and arms in 16 bits beside the base of "
        f"their seed within hundredths of a per cent. **Our kernels in bf16 are as good as PyTorch's**: the "
        f"interval ends {figures.percent(widest, 3)} from no difference, at "
        f"{figures.ratio(by['kernelmark_graph'])} the tokens a second. **So are ours in 8 bits** by scales of 128 "
        f"elements, at {figures.ratio(by['kernelmark_fp8_1x128'])}, and fp16 with a scaled loss. torchao's 8 bits "
        "by tensor and the arm that loses each twentieth update are within the margin of 0.25 % in bits; that "
        "they need no more than 1.05 times the steps is not shown: their intervals reach "
        f"{upper['float8_tensorwise']} and {upper['lost_20']}. **Of what 8 bits cost most is there before the "
        f"first step**: the same weights, read in 8 bits, have {before['kernelmark_fp8_1x128']} more bits with "
        f"ours and {before['float8_tensorwise']} with torchao's. Moments begin anew, so PyTorch's loss rises from "
        f"{figures.number(curve[0], 4)} to {figures.number(max(curve), 4)} bits at first, and ends at "
        f"{figures.number(median(base), 4)}.",
        _where(made),
        _arms(CONTINUED),
        f"Tokens a second × PyTorch's eager step, on a GPU beside which another worked: ours in a graph "
        f"{figures.ratio(by['kernelmark_graph'])}, ours in 8 bits {figures.ratio(by['kernelmark_fp8_1x128'])}, "
        f"fp16 compiled {figures.ratio(by['fp16_scaled'])}, torchao's compiled "
        f"{figures.ratio(by['float8_tensorwise'])}. Six of the plan's twelve arms; the others were not run.",
    ]


def _interval(arm: Arm) -> tuple[float, float]:
    """The 95 % interval of an arm's difference after its last step."""
    found = arm.points[-1].found
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def _speeds(made: Journal) -> dict[str, float]:
    """Tokens a second of each arm over PyTorch's, medians over seeds."""
    speeds: dict[str, list[float]] = {}
    for x in made.records:
        if x.measurement is not None:
            speeds.setdefault(x.implementation, []).append(median(x.measurement.samples["tokens_per_s"]))
    return {name: median(x) / median(speeds["torch"]) for name, x in speeds.items()}


def _from_random() -> list[str]:
    """Arms beside their base, from random weights."""
    made = journal(CONVERGED)
    last = {
        name: {x.replicate: y[-1] for x in made.records if x.implementation == name and (y := _curve(x))}
        for name in ("torch", "kernelmark_graph", "lost_20")
    }
    base, ours = last["torch"], last["kernelmark_graph"]
    seen = [dict(zip(x.samples["validated_step"], x.samples["bits_by_step"], strict=True)) for x in _trained(made)]
    early = {step: " to ".join(f"{f(x[step] for x in seen):.2f}" for f in (min, max)) for step in (125, 250)}
    off = ", ".join(figures.percent(ours[x] / base[x] - 1, 1) for x in sorted(base.keys() & ours.keys()))
    worse = sum(last["lost_20"][x] > base[x] for x in base)
    by = _speeds(made)
    return [
        "### 1,000 steps from random weights decide nothing",
        f"PyTorch's arm has {early[125]} bits a byte after 125 steps "
        f"and still {early[250]} after 250, and when it leaves that plateau depends on the seed and on "
        f"rounding. Its five seeds end at {figures.number(min(base.values()), 4)} to "
        f"{figures.number(max(base.values()), 4)} bits; our arm, whose first steps are right, is {off} "
        f"from the base of its seed. The margin is 0.25 %. The arm that loses each twentieth update is worse in "
        f"{worse} of {len(base)} seeds.",
        _where(made),
        _arms(CONVERGED),
        f"Tokens a second × PyTorch's eager step: ours in a graph {figures.ratio(by['kernelmark_graph'])}, ours "
        f"in 8 bits {figures.ratio(by['kernelmark_fp8_1x128'])}, torchao's compiled "
        f"{figures.ratio(by['float8_tensorwise'])}.",
        "`fp16_scaled` was refused as its loss overflowed in a step that is checked, which a scaler leaves out; "
        "since then a check begins with a scale by which none overflows. `kernelmark_fp8_1x128` was refused by "
        "one seed of five: after three steps the last norm's bias is off by .722 of its change, where .6 is "
        "allowed. Rounding to 8 bits alone takes it .45 and .21 at a quarter of the batch, two seeds, further "
        "than any other parameter (`truth/e4m3-change-86m.txt`).",
    ]


def _trained(made: Journal) -> list[Measurement]:
    """What PyTorch's arm measured, seed by seed."""
    return [x.measurement for x in made.records if x.implementation == "torch" and x.measurement is not None]


def _arms(run: str) -> str:
    """A run's arms as a table."""
    made = journal(run)
    lines = []
    for x in arms(made):
        seeds = sum(y.implementation == x.name and y.status == "ok" for y in made.records)
        for name, *row in convergence_table.rows_of(x):
            first = [f"`{name}`", str(seeds or figures.DASH)] if name else ["", ""]
            lines.append([*first, *(y or figures.DASH for y in row)])
    return _table(["arm", "seeds", *convergence_table.HEADINGS[1:]], lines)


def _convergence_before() -> list[str]:
    """Arms beside their base, after 400 steps."""
    seeds = [
        {
            x.replicate: curve[-1]
            for x in journal(run).records
            if x.implementation == "torch" and (curve := _curve(x))
        }
        for run in CONVERGED_BEFORE
    ]
    twice = [second / seeds[0][x] - 1 for x, second in seeds[1].items() if x in seeds[0]]
    values = sorted({y for run in CONVERGED_BEFORE for x in journal(run).records for y in _curve(x)})
    apart = min(b - a for a, b in itertools.pairwise(values))
    parts = [
        "### 400 steps before, with planted arms",
        "The same model, 400 steps; two GPUs at once, each its own arms beside a base of its own. Fewer than five "
        "seeds decide nothing, so every arm that trained is *inconclusive*. Bits a byte after the last step, "
        "means over the seeds that both have; the planted arms are to be refused, and were, by the check of the "
        f"first steps. A batch's loss is a number in bf16 here, so that bits a byte come in steps of "
        f"{figures.number(apart, 2)}, {figures.percent(apart / values[0], 2)} of the least: differences of that "
        f"size are rounding. The base is the same training on both GPUs, and by seed the two are "
        f"{' and '.join(figures.percent(x, 2) for x in sorted(twice))} apart: so much is noise.",
    ]
    for run in CONVERGED_BEFORE:
        parts += [_where(journal(run)), _arms(run)]
    return parts


def _curve(x: Record) -> tuple[float, ...]:
    """Validation bits a byte by step."""
    return tuple(x.measurement.samples["bits_by_step"]) if x.measurement is not None else ()


CLOCKED = ("tokens_per_s", "seconds_to_target")
"""Of a training that is resumed these may differ."""


def _resumed() -> list[str]:
    """Whether a training that was killed ended with the same numbers."""
    found = [
        {x.implementation: x.measurement for x in journal(run).records if x.measurement is not None}
        for run in RESUMED
    ]
    lines = []
    for name, measured in found[0].items():
        numbers = [{k: v for k, v in x[name].samples.items() if k not in CLOCKED} for x in found]
        bits = (figures.number(measured.samples[x][-1], 7) for x in ("bits_per_byte", "needle_bits"))
        again, resumed = ("same bits" if numbers[0] == x else "differ" for x in numbers[1:])
        lines.append([f"`{name}`", *bits, again, resumed])
    head = ["arm", "bits/byte", "bits of the needle", "run twice", "killed and resumed"]
    return [
        "## A training that is killed",
        "The same model on 64 steps of 16 sequences of 128 bytes: run twice, and once ended by SIGKILL after "
        "its first checkpoint and resumed (`resumed/`). All three are compared number by number, "
        f"{len(numbers[0])} metrics with their curves, clocks apart. The arms have one loss as it is rounded to "
        "bf16; the needle tells them apart. Sequences are short on purpose: with more than one block of keys "
        "the backward pass of attention adds up in an order that changes, on a GPU, unless it is told not to.",
        _table(head, lines),
    ]


def _collectives() -> list[str]:
    """Ours against the best other, and NCCL, by size."""
    parts = ["## Collectives over two and four GPUs"]
    for run in COLLECTIVES:
        parts += [_where(journal(run)), _collectives_of(run)]
    (wrong,) = [x for x in rows_of(COLLECTIVES[0]) if x.operator == "all_reduce_quantized" and x.value() is None]
    return [
        *parts,
        "GB/s is `busbw`, of copies the rate of the link. Beside `all_reduce_quantized` stands `all_reduce` in "
        "bf16 of the same size, where the run has it. vLLM's all-reduce and FlashInfer's were not installed. Out "
        "of place NCCL's and torch's two-shot copy the array first, which is in their time. The first run was "
        "ended by a limit of time. Between the two `all_gather` from 32 MiB on has "
        "changed, and again over two GPUs after the first, back to what the second has. "
        f"`{wrong.case}` is {wrong.status}: {wrong.reason}. A rank's own part of the sum is rounded to E4M3 too, "
        "by a share of the sum, and the bound is of a rank's own values: over four GPUs sums are twice as large.",
    ]


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
        best = min(others, key=_value, default=None)
        nccl = next((y for y in others if y.implementation == "torch_distributed"), None)
        ms = _value(x)
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
                _ratio(_value(best) / ms) if best else "",
                _ratio(_value(nccl) / ms) if nccl else "",
            ]
        )
    head = ["operator", "GPUs", "", "of bf16", "ms", "GB/s", "best other", "× best other", "× NCCL, NVLS off"]
    return _table(head, lines)


def _context() -> list[str]:
    """Context parallel attention: efficiency, and against each peer."""
    parts = ["## Context parallel attention over two and four GPUs"]
    for run in CONTEXT_PARALLEL:
        parts += [_where(journal(run)), _context_of(run)]
    (one,), four = map(rows_of, CONTEXT_LONG)
    million, longest = sorted(four, key=lambda x: x.axes["S"])
    efficiency = figures.percent(_value(one) / (4 * _value(million)), 1)
    return [
        *parts,
        "Causal, 32 heads, 8 key heads, D 128. Efficiency is T₁ / (P·T_P). Over four GPUs T₁ is the slowest one's "
        "of four that each computed the whole at once; over two it is one of them. Above 100 % several did not "
        "run in the same power state as the one: nearly all rows were throttled. *Exposed* is what a call took "
        "longer than one that sends nothing. `×` is the peer's time over ours; torch's is its context parallel "
        "attention by cuDNN.",
        f"Of one sample, as above 512 k: one GPU took {figures.number(_value(one) / 1e3)} s for "
        f"{one.axes['S']:,} tokens (`{CONTEXT_LONG[0]}`), and four of another host "
        f"{figures.number(_value(million) / 1e3)} s (`{CONTEXT_LONG[1]}`), which is {efficiency} of four times "
        f"its speed. {longest.axes['S']:,} tokens took {figures.number(_value(longest) / 1e3)} s and "
        f"{figures.size(_known(longest.value('rank_memory')))} a GPU, inputs and the memory that peers read in "
        "it. Gradients of either were not run.",
    ]


def _context_of(run: str) -> str:
    """The table of one run."""
    times = {
        (x.axes["S"], x.axes["gpus"], x.pass_, x.implementation): _value(x)
        for x in rows_of(run)
        if x.axes.get("gpus") and x.value() is not None
    }
    peers = ("context_parallel_allgather", "context_parallel_alltoall", "ulysses")
    lines = []
    for x in efficiencies(rows_of(run)):
        if x.row.implementation != PROVIDER:
            continue
        at = x.row.axes["S"], x.world, x.row.pass_
        versus = [_ratio(times[(*at, y)] / x.value if (*at, y) in times else None) for y in peers]
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
    return _table(head, [x[-1] for x in sorted(lines)])


def _data_parallel() -> list[str]:
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
            figures.number(_value(x)),
            figures.number(x.value("exposed_communication"), 3),
            figures.number(x.value("compression_ratio"), 3),
            figures.size(_known(x.value("peak_allocated"))),
        ]
        for x in rows_of(SHARED_STEPS)
    ]
    return [
        "## Training over two and four GPUs",
        f"{_where(journal(DATA_PARALLEL))} Weak scaling, against the best correct system of one GPU; of 8 B that "
        f"is one of another host (`{DATA_PARALLEL_ALONE}`). *Exposed* is the step's time less that of one that "
        "sends nothing.",
        _table(head, [x[-1] for x in sorted(lines)]),
        "What `kernelmark predict` makes of the steps of one and two GPUs and of all-reduces over two, beside "
        "what four took:",
        _table(["from", "predicted for four, ms", "measured, ms", "off"], predicted),
        f"A step that four GPUs share (its tokens are all of theirs), and DDP with gradients in 8 bits: "
        f"{_where(journal(SHARED_STEPS))} As far as the machine was there.",
        _table(["case", "implementation", "ms", "exposed ms", "times smaller", "peak memory"], shared),
    ]


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _side_by_side_gpus() -> list[str]:
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
    ratios = {x: _value(both[x]) / _value(alone[x]) for x in alone if x in both}
    lines = [
        [
            f"`{x[0]}`",
            x[1],
            f"`{x[2]}`",
            figures.number(_value(alone[x])),
            figures.number(_value(both[x])),
            figures.change(r),
        ]
        for x, r in sorted(ratios.items())
    ]
    most = max(ratios.values(), key=lambda x: abs(x - 1))
    count = len(journal(at_once).footers)
    walls = [[x.wall_s for x in journal(run).footers] for run in (one_by_one, at_once)]
    measuring = sum(x.spent_s[y] for x in journal(at_once).footers for y in ("sample", "ceilings")) / sum(walls[1])
    return [
        f"A plan cut in {count}, each part on a GPU of its own: one after the other (`{one_by_one}`) in "
        f"{figures.number(sum(walls[0]), 3)} s, and at once (`{at_once}`) in "
        f"{figures.number(max(walls[1]), 3)} s, which is {figures.percent(max(walls[1]) / sum(walls[0]))}; the "
        "longest part alone took "
        f"{figures.number(max(walls[0]), 3)} s. Of {len(lines)} rows none changed by more than "
        f"{figures.percent(abs(most - 1), 1)}. At once, samples and ceilings were {figures.percent(measuring)} of "
        "the time, so neighbours were seldom at work together: a power limit that these GPUs share might not "
        "show. One replicate each.",
        _table(["operator", "case", "implementation", "alone, ms", "at once, ms", "change"], lines),
    ]


PASS = (
    _number("ms"),
    _number("samples/s", "samples_per_s"),
    _share("MFU", "pass_mfu"),
    _size("peak memory", "pass_memory"),
    BEST,
)
"""Columns of a pass without gradients."""


def _decoding() -> list[str]:
    """Generation."""
    columns = (
        _number("ms a token"),
        _share("of the byte bound", "byte_fraction"),
        _number("first token, ms", "first_token"),
        _share("MFU of prompts", "prompt_mfu"),
        _number("decoded tokens/s", "decoded_per_s"),
        _size("peak memory", "generation_memory"),
        BEST,
    )
    parts = [
        "## Decoding",
        "Llama 3.1 8B's shape in bf16, random weights, 64 tokens after prompts of S. The byte bound is weights "
        "without the input embedding, and the cache, at the rate of reading that the run measured. MFU is of "
        "989.4 TFLOP/s.",
        f"{_where(journal(DECODE_TODAY))} As far as it came: vLLM's rows were not reached.",
        _programs(DECODE_TODAY, columns),
        "### With weights in 8 bits, a scale a row",
        _where(journal(DECODE_8_BITS)),
        _programs(DECODE_8_BITS, columns),
        "After tiles for matrix units get bf16 from 8 bits two numbers at a time: "
        f"{_where(journal(DECODE_PAIRED))}",
        _programs(DECODE_PAIRED, columns),
        "### Before, several sequences by more launches, beside vLLM",
        f"{_where(journal(DECODE_VLLM))} With products in 8 bits (`e4m3`) too, by a scale a row or for 128 "
        "elements.",
        _programs(DECODE_VLLM, columns),
        "### Before, one sequence by more launches",
    ]
    for run in DECODE:
        parts += [_where(journal(run)), _programs(run, columns)]
    return [
        *parts,
        "### Plan `generate`, as far as it came",
        f"{_where(journal(GENERATE))} Of Llama 3.2 1B too, and with products in 8 bits (`e4m3`) by a scale a row "
        "or for 128 elements.",
        _programs(GENERATE, columns, "generate"),
        "A pass without gradients:",
        _programs(GENERATE, PASS, "forward"),
        _where(journal(GENERATE_BEFORE)),
        _programs(GENERATE_BEFORE, columns),
    ]


def _passes() -> list[str]:
    return ["## One pass without gradients", _where(journal(PASSES)), _programs(PASSES, PASS)]


def _server() -> list[str]:
    """Our server, and what HTTP adds to the engine."""
    columns = (
        _number("request, ms"),
        _number("first token, ms", "ttft"),
        _number("p99", "ttft_p99"),
        _number("ms a token", "tpot"),
        _number("p99", "tpot_p99"),
        _number("goodput, requests/s", "goodput"),
        _number("tokens/s", "output_per_s"),
    )
    one = _row(SERVED, "kernelmark_graph", users=1)
    token = _value(_row(DECODE[0], "kernelmark_graph", B=1, S=1024))
    served = _value(one, "tpot")
    made = journal(SERVED)
    planned, there = len(made.header.request.cases), len({x.case.name for x in made.records})
    return [
        "## A server",
        *_beside_vllm(columns),
        "### Before",
        f"{_where(made)} Of its {planned} loads {there} were measured; Poisson at 64 requests a second was not. "
        "The clients' event loop was late by more than 1 ms at the 99th percentile (`client_bound`).",
        _programs(SERVED, columns),
        f"With one user a token takes {figures.number(served)} ms over HTTP and {figures.number(token)} ms by "
        f"the engine alone at the same batch and prompt (*Decoding*): {figures.number(served - token, 3)} ms "
        "more.",
        f"{_where(journal(SERVED_RATE))} vLLM's server did not start: the machine had vLLM without its attention "
        "extension.",
        _programs(SERVED_RATE, columns),
    ]


def _beside_vllm(columns: tuple[Column, ...]) -> list[str]:
    """Our server and vLLM's on GPUs of one kind."""
    columns = (*columns, _number("highest rate within SLO, requests/s", "slo_rate"))
    before, theirs, apart = SERVED_BEFORE, SERVED_BESIDE, SERVED_CLOSED
    rates = {x.implementation: _value(x, "slo_rate") for x in rows_of(theirs)}
    rate, vllm = rates["kernelmark_graph"], rates["vllm_serve"]
    then = [_value(_loaded(run, "closed", 1), "tpot") for run in before]
    many = [_value(_loaded(run, "closed", 64), "output_per_s") for run in before]
    one, now = _value(_loaded(apart, "closed", 1), "tpot"), _value(_loaded(apart, "closed", 64), "output_per_s")
    few = _value(_loaded(SERVED_FEWER, "search"), "slo_rate")
    return [
        "Llama 3.1 8B's shape, prompts of 1,024 tokens, answers of 128. **The highest rate that meets 2,000 ms to "
        f"the first token and 100 ms a token is {figures.number(rate)} requests a second, vLLM's "
        f"{figures.number(vllm)}: {figures.ratio(rate / vllm)}, where 0.9 was asked for.** Both were searched in "
        "one run, on one GPU; at the next rate up every request met the limits, but more came than left. With one "
        f"user a token takes {figures.number(one)} ms, with 64 there are {figures.number(now)} tokens a second; "
        f"by vLLM {figures.number(then[0])} and {figures.number(many[0])}, in a run before, on another H200 "
        f"({figures.ratio(then[0] / one)} and {figures.ratio(now / many[0])}).",
        "A search by 600 requests a rate is a rough one: by chance alone the backlog of some ends in growth, and "
        f"ours ended at {figures.number(few)} so. By a model of this server, a queue in front of passes that take "
        "as long as they do, which follows 32 requests a second, 29 are called saturated in 33 of 100 loads of "
        "600 requests, in 18 of 1,000, in 9 of 1,800 (`registry/reference/tuning/saturation-chance.txt`).",
        _where(journal(theirs)),
        _programs(theirs, columns),
        _where(journal(apart)),
        _programs(apart, columns),
        _where(journal(SERVED_FEWER)),
        _programs(SERVED_FEWER, columns),
        "### Before the engine had a process of its own",
        f"With one user ours took {figures.number(then[1])} ms a token, with 64 it gave {figures.number(many[1])} "
        "tokens a second. It read prompts one by one, and streams' texts were written by the process that "
        "launches kernels. vLLM's server and, after it on the same GPU, ours:",
        *(x for run in before for x in (_where(journal(run)), _programs(run, columns))),
    ]


def _loaded(run: str, load: str, users: int = 0) -> Row:
    """The row of one load."""
    (found,) = (x for x in rows_of(run) if x.options["load"] == load and x.axes["users"] == users)
    return found


def _rewired() -> list[str]:
    """Kernels whose machine code changed by how they are wired, old against new."""
    lines = []
    for folder in REWIRED:
        for x in record(f"detector/{folder}/verdicts.json")["verdicts"]:
            told = [folder, f"`{x['operator']}`", x["case"]]
            if x["change"] is None:
                lines.append([*told, *[figures.DASH] * 4, x["kind"]])
                continue
            change = [figures.change(1 + x[y]) for y in ("change", "low", "high")]
            times = [figures.number(x[f"{y}_value"]) for y in ("base", "current")]
            lines.append([*told, *times, change[0], f"{change[1]} to {change[2]}", x["kind"]])
    found = [x for y in REWIRED for x in record(f"detector/{y}/verdicts.json")["verdicts"]]
    timed = [x for x in found if x["change"] is not None]
    slower = [x for x in timed if x["low"] > 0]
    faster = [x for x in timed if x["high"] < 0]
    most = max(x["change"] for x in slower)
    return [
        "## Kernels before and after they were wired anew",
        "`regression_detector` between a commit before kernels shared their parts and two after it "
        "(`registry/reference/detector/`), rows whose machine code differs. The three that are missing in "
        "`wiring-1` did not compile there; `wiring-2` has them, and two products of few rows, which have a "
        f"kernel of their own since then. Of {len(timed)} rows with a time the whole interval of {len(faster)} "
        f"is below 0, which is faster; of {len(slower)} it is above, by {figures.percent(most, 1)} in the "
        "middle, and its verdict is no change. The budgets ended before what was flagged was confirmed on "
        "fresh pairs, so that the verdict of a flagged row is *inconclusive*.",
        _table(["comparison", "operator", "case", "before, ms", "after, ms", "change", "95 %", "verdict"], lines),
    ]


def _planned(case: Case, asked: Request) -> int:
    """Implementations that a run has of a case; where it names none, those that are the operator's today."""
    if case.full_name in asked.only:
        return len(asked.only[case.full_name])
    return len({x.name for x in _catalog().of_operator(case.operator)}.intersection(asked.implementations))


@functools.cache
def _catalog() -> Catalog:
    return Catalog.default()


def _where(made: Journal) -> str:
    """One sentence: which run, of what, and whether it is whole."""
    header = made.header
    commit = summary.commit(header)
    named = f", here `{COMMITTED_ANEW[commit]}`" if commit in COMMITTED_ANEW else ""
    named += f", files of `{RAN_WITH[header.run]}`" if header.run in RAN_WITH else ""
    text = f"Run `{header.run}`: plan `{header.plan}`, {summary.device_name(header)}, commit `{commit}`{named}"
    repeated = said(made, verifications())
    if any(x.complete for x in made.footers):
        return f"{text}, {header.replicates} replicates, {repeated}."
    counts = {x: sum(y.replicate == x for y in made.records) for x in range(header.replicates)}
    if not any(x for replicate, x in counts.items() if replicate):
        asked = header.request
        planned = sum(_planned(x, asked) for x in asked.cases)
        others = ", the others none" if len(counts) > 1 else ""
        incomplete = f"The run is not complete: replicate 1 has {counts[0]} of {planned} measurements{others}."
    else:
        last = ", ".join(f"replicate {x + 1} has {counts[x]}" for x in counts if counts[x] < counts[0])
        incomplete = f"The run is not complete: of {counts[0]} measurements, {last}."
    return f"{text}, {header.replicates} replicates, {repeated}. {incomplete}"


def _speedup(row: Row | None) -> float | None:
    return row.speedup_vs_best_baseline if row else None


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else figures.DASH


def _dense() -> list[str]:
    """Dense attention against each peer: medians and ranges of the ratios of latencies."""
    columns = [(pass_, D) for pass_ in ("forward", "backward") for D in (128, 64)]
    lines = [
        "| ours against | " + " | ".join(f"{pass_}, D = {D}" for pass_, D in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    counts = set()
    for run, name, told in DENSE:
        found = rows_of(run)
        cells = []
        for pass_, D in columns:
            ratios = list(_against(found, name, _dense_case(pass_, D)))
            if ratios:
                counts.add(len(ratios))
                cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})")
            else:
                cells.append(figures.DASH)
        lines.append(f"| {told} | {' | '.join(cells)} |")
    text = (
        "Dense attention against each peer: the peer's time over ours, as the median (and range) over "
        f"{' or '.join(map(str, sorted(counts)))} cases, S = 2,048 to 16,384, causal and full,\nas many key heads "
        f"as query heads. FlashInfer's line is of run `{FLASHINFER}`, where our kernels were older.\n"
        "[attention.md](attention.md) describes the kernels."
    )
    return [text, "\n".join(lines)]


def _dense_case(pass_: str, D: int) -> Callable[[Row], bool]:
    def chosen(row: Row) -> bool:
        return (
            (row.operator, row.pass_, row.axes.get("D")) == ("attention", pass_, D)
            and 2048 <= row.axes["S"] <= 16384
            and row.axes["H"] == row.axes["Hkv"]
        )

    return chosen


def _against(found: Iterable[Row], name: str, chosen: Callable[[Row], bool]) -> Iterable[float]:
    """The peer's latency over ours, for the chosen cases that both have."""
    times: dict[str, dict[str, float]] = {}
    for row in found:
        if chosen(row) and (ms := row.value()) is not None and row.implementation in (PROVIDER, name):
            times.setdefault(row.case, {})[row.implementation] = ms
    return [x[name] / x[PROVIDER] for x in times.values() if len(x) == 2]


def _crossing() -> list[str]:
    """From which length on operators of O(S) are ahead of attention."""
    made = journal(CROSSING)
    lines = []
    for contest in crossing.contests(made, rows_of(CROSSING)):
        for other in contest.linear:
            found = contest.crossing(other, "time")
            if found is not None:
                told = crossing.tell(found, f"`{other.operator}`", "attention", "time")
                lines.append(
                    f"- {other.operator} ({other.implementation}) against attention "
                    f"({contest.quadratic.implementation}), width {contest.width}, {contest.common}: {told}."
                )
    return [
        "## From which length on O(S) beats O(S²)",
        _where(made) + " The interval is a bootstrap over replicates, with the confidence that so many can give.",
        "\n".join(lines),
    ]


def _slower() -> list[str]:
    """Every row of ours whose whole interval lies below 1."""
    lines = ["| operator | case | fastest baseline | ratio | 95 % interval |", "|---|---|---|---|---|"]
    found = [
        x
        for run in (MEMORY, ATTENTION, STATE_SPACE)
        for x in rows_of(run)
        if x.provider == PROVIDER and x.speedup_ci_high is not None and x.speedup_ci_high < 1
    ]
    for x in sorted(found, key=lambda x: (x.operator, x.speedup_vs_best_baseline or 0)):
        lines.append(
            f"| `{x.operator}` | {x.case} | {x.best_baseline} | {_ratio(x.speedup_vs_best_baseline)} "
            f"| {_ratio(x.speedup_ci_low)} – {_ratio(x.speedup_ci_high)} |"
        )
    return [
        "## Where ours is slower",
        "Every case of the three plans whose whole 95 % interval lies below 1.",
        "\n".join(lines),
    ]


def _incorrect() -> list[str]:
    """Rows with a wrong answer, and which of them today's check would look at again."""
    lines = [
        "| run | operator | implementation | cases | reason (of the first) |",
        "|---|---|---|---|---|",
    ]
    found: dict[tuple[str, str, str], list[Row]] = {}
    for run in (MEMORY, ATTENTION, STATE_SPACE):
        for x in rows_of(run):
            if x.status == "incorrect":
                found.setdefault((run, x.operator, x.implementation), []).append(x)
    for (run, operator, name), wrong in sorted(found.items()):
        reason = (wrong[0].reason or "").removeprefix("verify: ")
        lines.append(f"| `{run}` | `{operator}` | `{name}` | {len(wrong)} | {reason} |")
    text = "Such rows have no time, and are no baseline to any other."
    older = [run for run in (MEMORY, ATTENTION, STATE_SPACE) if journal(run).header.created < FEW_ALLOWED]
    few = sum(
        "elements beyond tolerance" in (x.reason or "")
        for (run, *_), wrong in found.items()
        for x in wrong
        if run in older
    )
    if few:
        text += (
            f"\n{few} of those of {' and '.join(f'`{x}`' for x in older)} had elements beyond the bound of a\n"
            "single one. Until then none was allowed; now a few are ([how it is measured](measuring.md)).\n"
            "The same code may pass today, and the fastest baseline of such a case may be another one.\n"
            "These cases have not been measured again."
        )
    return ["## What had a wrong answer", text, "\n".join(lines)]


def _noise() -> list[str]:
    """What the same code differs by between two runs, and between processes of one."""
    first, second = (rows_of(x) for x in SAME_CODE)
    times = {x.identity: ms for x in first if (ms := x.value())}
    again = {x.identity: ms for x in second if (ms := x.value())}
    apart = sorted(abs(again[x] / times[x] - 1) for x in again.keys() & times.keys())
    within = sorted(y.cv_between for x in first if (y := x.get()) is not None and y.cv_between is not None)

    def at(values: Sequence[float], percentile: float) -> str:
        return f"{float(np.percentile(values, percentile)) * 100:.2f} %"

    return [
        "## How large noise is",
        f"Runs `{SAME_CODE[0]}` and `{SAME_CODE[1]}` measured one commit twice, one after the other.\n"
        f"Of {len(apart)} rows the median one differs by {at(apart, 50)}, the 90th percentile by {at(apart, 90)}, "
        f"the 99th by {at(apart, 99)}, the largest by {at(apart, 100)}.\nBetween the processes of one run the "
        f"coefficient of variation is {at(within, 50)} in the median row, "
        f"{at(within, 90)} at the 90th percentile.\n"
        "A difference smaller than these is not one.",
    ]


def _limits() -> list[str]:
    """What these runs do not show."""
    throttled = {x: sum(bool(y.throttled) for y in rows_of(x)) for x in (MEMORY, ATTENTION, STATE_SPACE)}
    told = ", ".join(f"{count} in `{run}`" for run, count in throttled.items())
    missing: dict[str, set[str]] = {}
    for run in (MEMORY, ATTENTION, STATE_SPACE):
        for x in rows_of(run):
            if x.status == "unavailable":
                missing.setdefault(x.implementation, set()).add(x.operator)
    names = ", ".join(f"`{name}` ({', '.join(sorted(x))})" for name, x in sorted(missing.items()))
    points = [
        "- Clocks were not locked. Rows for which the device was throttled during most of their samples: "
        f"{told}.\n  Such rows say so.",
        "- Three replicates make wide intervals for noisy rows. Rows with a single replicate have no interval.",
        f"- Not installed there, and so `unavailable`: {names}.",
        f"- Runs of commit `{summary.commit(journal(PASSES).header)}` have one process a row where nothing else "
        "is said, and most ran while the host's other GPU had other work.",
        "- One GPU of one kind: Hopper is the only architecture on which our kernels were measured.",
    ]
    return ["## What these runs do not show", "\n".join(points)]


BLOCKS = {"row": row}
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
