"""The runs of `registry/reference/` that pages tell of, by what they are of, and where each was made."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from kernelmark.registry import figures
from kernelmark.registry.analysis.repeated import said
from kernelmark.registry.analysis.rows import Row, rows
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import Journal, read, read_header
from kernelmark.registry.store.record import Case
from kernelmark.registry.store.shards import join
from kernelmark.registry.views import summary
from kernelmark.suite.catalog import Catalog

HERE = Path(__file__).resolve().parent.parent
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
FP8_7B = "20261130-184535-4fda"
"""Llama 2 7B in 8 bits beside bf16 by graphs, held to what rounding does; as far as 235 s came."""
QUALITY = "20261130-183801-728b"
"""Kernels exchanged in a trained model."""
LONG_ROWS = "20261130-200440-9503"
"""Few long rows, held in clusters of programs; as far as 160 s came."""
GATE_UP = "20261130-200720-ca1a"
"""Gate and up as one product in a step; as far as 140 s came."""
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
WORTH_STORED = "20261201-023341-d5d2"
"""RoPE and attention in a Llama's step, whose calls alone are of what the model stores."""
TRUTHS = ("truth/worth-1", "truth/worth-2")
"""An exchange for PyTorch's own norm with a delay before it, on two hosts."""
COLLECTIVES = ("20261130-220055-0517", "20261129-232536-0d96", "20261129-200344-b173")
"""Over two GPUs as they are now, beside NCCL over windows; over four, as far as it came; and before."""
COARSE_SUMS = "20261130-222316-bdf5"
"""Sums in 8 bits over four GPUs, by the bound of both roundings."""
CONTEXT_TWO = "20261130-215639-f390"
"""Over two GPUs with other masks and key heads, and what scores that are materialized take; as far as it came."""
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
SHARED_STEPS_TWO = "20261130-220141-3a41"
"""The same over two, compressed gradients, and two GPUs' tokens on one; as far as it came."""
ACCUMULATED = "20261129-193611-0eca"
"""Micro-batches and Muon in graphs."""
PRECISION_8B_GRAPHS = "20261129-193511-a701"
"""8 B parameters in 8 bits by graphs."""
SIDE_BY_SIDE = (
    ("standard-4-alone", "20261130-222212-b612"),
    ("standard-4-alone", "20261130-221816-7330"),
    ("parallel-4-alone", "20261129-231930-9a42"),
    ("parallel-alone", "20261123-083626-f895"),
)
"""Plans cut over four GPUs, and one over two: one after the other, and all at once."""
NEIGHBOURS = (
    ("20261130-221556-5960", "20261130-221707-b2d9"),
    ("20261130-221631-c074", "20261130-221743-ecfa"),
)
"""A plan on one of four GPUs, twice with the others idle and in between twice beside others that multiply."""
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
DECODE_MAMBA = "20261201-013637-2ad6"
"""Mamba-2's shape."""
SERVED_ENGINE = "20261201-013855-e4b4"
"""Our engine, and our server with one user, in one run."""
SERVED_STARTS = "20261201-014008-ab7c"
"""Our server under 64 users, started five times."""
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
SERVED_TINY = "20261201-035545-b45d"
"""Plan `serve_tiny`, on a CPU."""
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

COMMITTED_ANEW = {"c7ddef66a577": "c23940f"}
"""Commits of runs that this history has under another name; `registry/reference/README.md` says why."""

RAN_WITH = {
    **dict.fromkeys((RANKS, CONTEXT, DECODING, SERVER), "02f2b29"),
    **dict.fromkeys((*GRAPHED, *DECODE[2:4]), "a143950"),
    DECODE[-1]: "56b624a",
}
"""Runs from files of another commit than their header names; `registry/reference/README.md` says why."""


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


@functools.cache
def record(name: str) -> Any:
    """A record of `registry/reference/` in JSON."""
    return json.loads((JOURNALS / name).read_bytes())


@functools.cache
def _catalog() -> Catalog:
    return Catalog.default()


def defined(made: Journal) -> str:
    """How many of a run's cases are defined today as they were then. Of another definition a run of today has
    another case by the same name, beside which these figures are not compared.
    """
    cases = {x.case.full_name: x.case for x in made.records}.values()
    have = "has" if len(cases) == 1 else "have"
    alive = sum(_defined(x) == x.spec for x in cases)
    return f"{alive} of {figures.counted(len(cases), 'case')} {have} today's definition"


def _defined(case: Case) -> str | None:
    """The hash of the case's definition today; None where nothing of that name takes its sizes and options."""
    try:
        today = _catalog().definition(case.operator)
        return today.case(case.axes, case.dtype, case.pass_, **case.options).spec
    except InputError:
        return None


def origin(made: Journal) -> str:
    """Which run, of what, how many of its cases are today's, and whether it is whole."""
    header = made.header
    commit = summary.commit(header)
    named = f", here `{COMMITTED_ANEW[commit]}`" if commit in COMMITTED_ANEW else ""
    named += f", files of `{RAN_WITH[header.run]}`" if header.run in RAN_WITH else ""
    text = f"Run `{header.run}`: plan `{header.plan}`, {summary.device_name(header)}, commit `{commit}`{named}"
    repeated = f"{said(made, verifications())}. {defined(made)}"
    if any(x.complete for x in made.footers):
        return f"{text}, {figures.counted(header.replicates, 'replicate')}, {repeated}."
    counts = {x: sum(y.replicate == x for y in made.records) for x in range(header.replicates)}
    if not any(x for replicate, x in counts.items() if replicate):
        asked = header.request
        others = ", the others none" if len(counts) > 1 else ""
        # Where the request names no implementations it was those of that day's catalog.
        named = all(x.full_name in asked.only for x in asked.cases)
        planned = f" of {sum(len(asked.only[x.full_name]) for x in asked.cases)}" if named else ""
        incomplete = f"The run is not complete: replicate 1 has {counts[0]}{planned} measurements{others}."
    else:
        last = ", ".join(f"replicate {x + 1} has {counts[x]}" for x in counts if counts[x] < counts[0])
        incomplete = f"The run is not complete: of {counts[0]} measurements, {last}."
    return f"{text}, {figures.counted(header.replicates, 'replicate')}, {repeated}. {incomplete}"
