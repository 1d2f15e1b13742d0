"""Decoding, one pass without gradients, a server."""

from __future__ import annotations

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row

from .runs import (
    DECODE,
    DECODE_8_BITS,
    DECODE_MAMBA,
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
    SERVED_ENGINE,
    SERVED_FEWER,
    SERVED_RATE,
    SERVED_STARTS,
    SERVED_TINY,
    journal,
    origin,
    rows_of,
)
from .tables import BEST, Column, markdown, number_column, programs, row_of, share_column, size_column, value_of

PASS = (
    number_column("ms"),
    number_column("samples/s", "samples_per_s"),
    share_column("MFU", "pass_mfu"),
    size_column("peak memory", "pass_memory"),
    BEST,
)
"""Columns of a pass without gradients."""
ASKED = ((1, 1024, 0.85), (1, 8192, 0.85), (8, 1024, 0.85), (8, 8192, 0.85), (64, 4096, 0.8))
"""By sequences and tokens of their prompts, the share of the byte bound that was asked of decoding in bf16."""
VLLM_ASKED = 1.1
"""How many times vLLM's rate was asked for beside that, in one run."""
PREFILL, MFU_ASKED = 8192, 0.6
"""Tokens of a prompt, and the MFU that was asked of reading it."""
HTTP_ASKED = 0.2
"""ms a token that HTTP may add."""


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
        *_asked(),
        f"{origin(journal(DECODE_TODAY))} As far as it came: vLLM's rows were not reached.",
        programs(DECODE_TODAY, columns),
        "### With weights in 8 bits, a scale a row",
        origin(journal(DECODE_8_BITS)),
        programs(DECODE_8_BITS, columns),
        "After tiles for matrix units get bf16 from 8 bits two numbers at a time: "
        f"{origin(journal(DECODE_PAIRED))}",
        programs(DECODE_PAIRED, columns),
        "### Mamba-2",
        f"{origin(journal(DECODE_MAMBA))} Its byte bound has states in the place of a cache, read and written.",
        programs(DECODE_MAMBA, columns),
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
        "engine wanted pages for states that have none. It is mended (*Mamba-2*, above).",
        "A pass without gradients:",
        programs(GENERATE, PASS, "forward"),
        _refused_by_fault(),
        origin(journal(GENERATE_BEFORE)),
        programs(GENERATE_BEFORE, columns),
    ]


def _asked() -> list[str]:
    """What was asked of decoding, and whether each run in bf16 met it."""
    runs = (DECODE_VLLM, DECODE_TODAY, DECODE_8_BITS)
    lines, missed = [], []
    for B, S, share in ASKED:
        found = {run: _generated(run, "kernelmark_graph", B, S) for run in runs}
        shares = {run: value_of(x, "byte_fraction") for run, x in found.items() if x is not None}
        newest = list(shares.values())[-1]
        vllm = _generated(DECODE_VLLM, "vllm_engine", B, S)
        ours = found[DECODE_VLLM]
        assert vllm is not None
        assert ours is not None
        times = value_of(vllm) / value_of(ours)
        if newest < share or times < VLLM_ASKED:
            bound = f"{figures.percent(newest, 1)} of the byte bound for {figures.percent(share)}"
            rate = f"{times:.3f} times vLLM's rate for {VLLM_ASKED:g}"
            told = [bound] * (newest < share) + [rate] * (times < VLLM_ASKED)
            missed.append(f"{B} × {S:,} ({', '.join(told)})")
        lines.append(
            [
                f"{B} × {S:,}",
                figures.percent(share),
                *(figures.percent(shares.get(run), 1) for run in runs),
                "met" if newest >= share else "**missed**",
                f"{times:.3f}",
                "met" if times >= VLLM_ASKED else "**missed**",
            ]
        )
    head = ["sequences × tokens", "asked for", *(f"`{run[-4:]}`" for run in runs), "by the last"]
    mine, theirs = (_prompt_mfu(DECODE_VLLM, x) for x in ("kernelmark_graph", "vllm_engine"))
    return [
        "### What was asked for",
        f"Of the byte bound in bf16, by our engine in a graph; and {VLLM_ASKED:g} times vLLM's rate in one run, "
        f"`{DECODE_VLLM[-4:]}`, whose vLLM is trimmed (*beside vLLM*, below). One start each; the other two runs "
        "are without vLLM.",
        markdown([*head, "of vLLM's rate", "of 1.1"], lines),
        f"Missed: {'; '.join(missed)}.",
        f"Reading a prompt of {PREFILL:,} tokens: {figures.percent(mine, 1)} MFU, where "
        f"{figures.percent(MFU_ASKED)} was asked for, and vLLM's {figures.percent(theirs, 1)} in that run: "
        f"{'met' if mine >= max(MFU_ASKED, theirs) else '**missed**'}.",
    ]


def _generated(run: str, implementation: str, B: int, S: int) -> Row | None:
    """The row of decoding Llama 3.1 8B's shape in bf16, products too, at such sizes; None where a run has none."""
    found = [
        x
        for x in rows_of(run)
        if (x.operator, x.implementation, x.dtype) == ("generate", implementation, "bf16")
        and (x.options["model"], x.options["products"]) == ("llama-3.1-8b", "dtype")
        and (x.axes["B"], x.axes["S"]) == (B, S)
        and x.value() is not None
    ]
    return found[0] if found else None


def _prompt_mfu(run: str, implementation: str) -> float:
    row = _generated(run, implementation, 1, PREFILL)
    assert row is not None
    return value_of(row, "prompt_mfu")


def _refused_by_fault() -> str:
    """Rows of passes without gradients that were refused for want of a backward pass."""
    found = [x for x in rows_of(GENERATE) if x.operator == "forward" and "no backward pass" in (x.reason or "")]
    names = " and ".join(sorted({f"`{x.implementation}`" for x in found}))
    cases = ", ".join(dict.fromkeys(x.case for x in found))
    return (
        f"Rows of {names} are `unsupported` there for want of a backward pass ({cases}). That is a fault of ours: "
        "a pass without gradients asks for none, but every part was loaded as in training. It is mended; such "
        "rows were not run again, and whether they are refused for another reason is not known. Nor could any "
        "other library without a backward pass take part in `forward`, `generate` or `serve`, FlashInfer's "
        "attention in plan `generate` among them."
    )


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
        *_alone(columns),
        "### Before",
        f"{origin(made)} Of its {planned} loads {there} were measured; Poisson at 64 requests a second was not. "
        "The clients' event loop was late by more than 1 ms at the 99th percentile (`client_bound`).",
        programs(SERVED, columns),
        f"With one user a token takes {figures.number(served)} ms over HTTP and {figures.number(token)} ms by "
        f"the engine alone at the same batch and prompt (*Decoding*): {figures.number(served - token, 3)} ms "
        f"more. That is of 23 November's code, whose engine was in one process with the protocol.",
        f"{origin(journal(SERVED_RATE))} Its one row with a time is `client_bound`. vLLM's server did not start: "
        "the machine had vLLM without its attention extension.",
        programs(SERVED_RATE, columns),
    ]


def _alone(columns: tuple[Column, ...]) -> list[str]:
    """Our server with its engine in a process of its own: what HTTP adds, and starts as the unit."""
    engine = value_of(row_of(SERVED_ENGINE, "kernelmark_graph", B=1, S=1024))
    served = value_of(row_of(SERVED_ENGINE, "kernelmark_graph", users=1), "tpot")
    (many,) = rows_of(SERVED_STARTS)
    rate = many.get("output_per_s")
    assert rate is not None
    low, high = rate.interval
    return [
        "### What HTTP adds, and five starts",
        f"In one run a token takes {figures.number(engine)} ms by the engine alone and {figures.number(served)} "
        f"ms over HTTP with one user: {figures.number(served - engine, 2)} ms more, where {HTTP_ASKED:g} was "
        f"asked for. Under 64 users there are {figures.number(rate.value)} tokens a second "
        f"({figures.number(low)} to {figures.number(high)} over {rate.processes} starts of the server).",
        origin(journal(SERVED_ENGINE)),
        programs(SERVED_ENGINE, columns, "serve"),
        origin(journal(SERVED_STARTS)),
        programs(SERVED_STARTS, columns),
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
        f"{figures.number(now)} tokens a second. Of loads by users there is no ratio to vLLM that holds: its rows "
        f"are of a run before, on another H200 and another commit, and {_bound(*before)}, so that they may say "
        f"what the clients took. vLLM's, trimmed likewise, are {figures.number(then[0])} ms and "
        f"{figures.number(many[0])} tokens a second; ours after it on that GPU, likewise `client_bound`, "
        f"{figures.number(then[1])} ms and {figures.number(many[1])} "
        f"({figures.ratio(many[1] / many[0])} of its rate).",
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
        f"launches kernels. vLLM's server and, after it on the same GPU, ours; {_bound(*before)}:",
        *(x for run in before for x in (origin(journal(run)), programs(run, columns))),
    ]


def _out_of_memory(run: str) -> str:
    """Rows that had too little memory, by case and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for x in rows_of(run):
        if x.status == "out_of_memory":
            found.setdefault((x.case, x.reason or ""), []).append(f"`{x.implementation}`")
    return "; ".join(f"{case} by {', '.join(names)} ({reason})" for (case, reason), names in found.items())


def tiny() -> str:
    """The rows of plan `serve_tiny` on a CPU, as the README shows them."""
    columns = (
        number_column("judged by, ms"),
        number_column("first token, ms", "first_token"),
        number_column("TTFT, ms", "ttft"),
        number_column("TPOT, ms", "tpot"),
        number_column("samples/s", "samples_per_s"),
        number_column("output tokens/s", "output_per_s"),
    )
    loads = [x for x in journal(SERVED_TINY).records if x.case.operator == "serve" and x.measurement is not None]
    late = sum(any(y.startswith("client_bound") for y in x.measurement.remarks) for x in loads if x.measurement)
    told = (
        "`judged by` is a pass, a token (`generate`), or a request from its schedule to its end (`serve`); first "
        "token is of prompts that are read as one batch, TTFT and TPOT of requests."
    )
    if late:
        told += f" Of {len(loads)} loads {late} had clients that were late themselves (`client_bound`)."
    return f"{origin(journal(SERVED_TINY))}\n\n{programs(SERVED_TINY, columns)}\n\n{told}\n"


def _bound(*runs: str) -> str:
    """How many rows of these runs were measured by clients that were late themselves."""
    timed = [x.measurement for run in runs for x in journal(run).records if x.measurement is not None]
    late = sum(any(y.startswith("client_bound") for y in x.remarks) for x in timed)
    return f"{'all' if late == len(timed) else f'{late} of'} {len(timed)} rows of both are `client_bound`"


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
