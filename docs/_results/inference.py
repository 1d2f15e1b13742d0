"""Decoding, one pass without gradients, a server."""

from __future__ import annotations

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row

from .runs import (
    DECODE,
    DECODE_8_BITS,
    DECODE_PAIRED,
    DECODE_TODAY,
    DECODE_VLLM,
    GENERATE,
    GENERATE_BEFORE,
    PASSES,
    SERVED,
    SERVED_BEFORE,
    SERVED_BESIDE,
    SERVED_CLOSED,
    SERVED_FEWER,
    SERVED_RATE,
    journal,
    origin,
    rows_of,
)
from .tables import BEST, Column, number_column, programs, row_of, share_column, size_column, value_of

PASS = (
    number_column("ms"),
    number_column("samples/s", "samples_per_s"),
    share_column("MFU", "pass_mfu"),
    size_column("peak memory", "pass_memory"),
    BEST,
)
"""Columns of a pass without gradients."""


def decoding() -> list[str]:
    """Generation."""
    columns = (
        number_column("ms a token"),
        share_column("of the byte bound", "byte_fraction"),
        number_column("first token, ms", "first_token"),
        share_column("MFU of prompts", "prompt_mfu"),
        number_column("decoded tokens/s", "decoded_per_s"),
        size_column("peak memory", "generation_memory"),
        BEST,
    )
    parts = [
        "## Decoding",
        "Llama 3.1 8B's shape in bf16, random weights, 64 tokens after prompts of S. The byte bound is weights "
        "without the input embedding, and the cache, at the rate of reading that the run measured. MFU is of "
        "989.4 TFLOP/s.",
        f"{origin(journal(DECODE_TODAY))} As far as it came: vLLM's rows were not reached.",
        programs(DECODE_TODAY, columns),
        "### With weights in 8 bits, a scale a row",
        origin(journal(DECODE_8_BITS)),
        programs(DECODE_8_BITS, columns),
        "After tiles for matrix units get bf16 from 8 bits two numbers at a time: "
        f"{origin(journal(DECODE_PAIRED))}",
        programs(DECODE_PAIRED, columns),
        "### Before, several sequences by more launches, beside vLLM",
        f"{origin(journal(DECODE_VLLM))} With products in 8 bits (`e4m3`) too, by a scale a row or for 128 "
        f"elements. vLLM's engine there: {_lacking(DECODE_VLLM, 'vllm_engine')}.",
        programs(DECODE_VLLM, columns),
        "### Before, one sequence by more launches",
    ]
    for run in DECODE:
        parts += [origin(journal(run)), programs(run, columns)]
    return [
        *parts,
        "### Plan `generate`, as far as it came",
        f"{origin(journal(GENERATE))} Of Llama 3.2 1B too, and with products in 8 bits (`e4m3`) by a scale a row "
        f"or for 128 elements. vLLM's engine there: {_lacking(GENERATE, 'vllm_engine')}.",
        programs(GENERATE, columns, "generate"),
        f"Without a time for want of memory: {_out_of_memory(GENERATE)}. For Mamba-2 that is a fault of ours: the "
        "engine wanted pages for states that have none. It is mended (f109a435); such rows were not run again.",
        "A pass without gradients:",
        programs(GENERATE, PASS, "forward"),
        origin(journal(GENERATE_BEFORE)),
        programs(GENERATE_BEFORE, columns),
    ]


def forward_passes() -> list[str]:
    return ["## One pass without gradients", origin(journal(PASSES)), programs(PASSES, PASS)]


def server() -> list[str]:
    """Our server, and what HTTP adds to the engine."""
    columns = (
        number_column("request, ms", "request"),
        number_column("first token, ms", "ttft"),
        number_column("p99", "ttft_p99"),
        number_column("ms a token", "tpot"),
        number_column("p99", "tpot_p99"),
        number_column("goodput, requests/s", "goodput"),
        number_column("tokens/s", "output_per_s"),
    )
    one = row_of(SERVED, "kernelmark_graph", users=1)
    token = value_of(row_of(DECODE[0], "kernelmark_graph", B=1, S=1024))
    served = value_of(one, "tpot")
    made = journal(SERVED)
    planned, there = len(made.header.request.cases), len({x.case.name for x in made.records})
    return [
        "## A server",
        *_beside_vllm(columns),
        "### Before",
        f"{origin(made)} Of its {planned} loads {there} were measured; Poisson at 64 requests a second was not. "
        "The clients' event loop was late by more than 1 ms at the 99th percentile (`client_bound`).",
        programs(SERVED, columns),
        f"With one user a token takes {figures.number(served)} ms over HTTP and {figures.number(token)} ms by "
        f"the engine alone at the same batch and prompt (*Decoding*): {figures.number(served - token, 3)} ms "
        "more.",
        f"{origin(journal(SERVED_RATE))} vLLM's server did not start: the machine had vLLM without its attention "
        "extension.",
        programs(SERVED_RATE, columns),
    ]


def _beside_vllm(columns: tuple[Column, ...]) -> list[str]:
    """Our server and vLLM's on GPUs of one kind."""
    columns = (*columns, number_column("highest rate within SLO, requests/s", "slo_rate"))
    before, theirs, apart = SERVED_BEFORE, SERVED_BESIDE, SERVED_CLOSED
    rates = {x.implementation: value_of(x, "slo_rate") for x in rows_of(theirs)}
    rate, vllm = rates["kernelmark_graph"], rates["vllm_serve"]
    then = [value_of(_loaded(run, "closed", 1), "tpot") for run in before]
    many = [value_of(_loaded(run, "closed", 64), "output_per_s") for run in before]
    one, now = (
        value_of(_loaded(apart, "closed", 1), "tpot"),
        value_of(_loaded(apart, "closed", 64), "output_per_s"),
    )
    few = value_of(_loaded(SERVED_FEWER, "search"), "slo_rate")
    return [
        "Llama 3.1 8B's shape, prompts of 1,024 tokens, answers of 128. **The highest rate that meets 2,000 ms to "
        f"the first token and 100 ms a token is {figures.number(rate)} requests a second, vLLM's "
        f"{figures.number(vllm)}: {figures.ratio(rate / vllm)}, where 0.9 was asked for.** That is not vLLM as it "
        f"is installed: {_lacking(theirs, 'vllm_serve')}. What it would follow with all of it was not measured. "
        "Both were searched in one run, on one GPU; at the next rate up every request met the limits, but more "
        f"came than left. With one user a token takes {figures.number(one)} ms, with 64 there are "
        f"{figures.number(now)} tokens a second; by vLLM, trimmed likewise, {figures.number(then[0])} and "
        f"{figures.number(many[0])}, in a run before, on another H200 "
        f"({figures.ratio(then[0] / one)} and {figures.ratio(now / many[0])}).",
        "A search by 600 requests a rate is a rough one: by chance alone the backlog of some ends in growth, and "
        f"ours ended at {figures.number(few)} so. By a model of this server, a queue in front of passes that take "
        "as long as they do, which follows 32 requests a second, 29 are called saturated in 33 of 100 loads of "
        "600 requests, in 18 of 1,000, in 9 of 1,800 (`registry/reference/tuning/saturation-chance.txt`).",
        origin(journal(theirs)),
        programs(theirs, columns),
        origin(journal(apart)),
        programs(apart, columns),
        origin(journal(SERVED_FEWER)),
        programs(SERVED_FEWER, columns),
        "### Before the engine had a process of its own",
        f"With one user ours took {figures.number(then[1])} ms a token, with 64 it gave {figures.number(many[1])} "
        "tokens a second. It read prompts one by one, and streams' texts were written by the process that "
        "launches kernels. vLLM's server and, after it on the same GPU, ours:",
        *(x for run in before for x in (origin(journal(run)), programs(run, columns))),
    ]


def _out_of_memory(run: str) -> str:
    """Rows that had too little memory, by case and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for x in rows_of(run):
        if x.status == "out_of_memory":
            found.setdefault((x.case, x.reason or ""), []).append(f"`{x.implementation}`")
    return "; ".join(f"{case} by {', '.join(names)} ({reason})" for (case, reason), names in found.items())


def _lacking(run: str, implementation: str) -> str:
    """What a library lacked where it was measured, as its rows say it."""
    said = [
        remark
        for x in journal(run).records
        if x.implementation == implementation and x.measurement is not None
        for remark in x.measurement.remarks
        if remark.startswith(("trimmed", "without"))
    ]
    assert said, run
    return "; ".join(f"`{x}`" for x in dict.fromkeys(said))


def _loaded(run: str, load: str, users: int = 0) -> Row:
    """The row of one load."""
    (found,) = (x for x in rows_of(run) if x.options["load"] == load and x.axes["users"] == users)
    return found
