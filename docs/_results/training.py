"""Training steps, techniques of training, and what a call costs the host."""

from __future__ import annotations

import json

from kernelmark.registry import figures
from kernelmark.registry.store.record import PROVIDER

from .runs import (
    ACCUMULATED,
    FP8_7B,
    GATE_UP,
    GRAPHED,
    JOURNALS,
    OTHER_SHARDS,
    STEPS,
    TECHNIQUES,
    TECHNIQUES_BEFORE,
    TECHNIQUES_LARGE,
    TECHNIQUES_OFFLOADED,
    TECHNIQUES_STATES,
    TRAINED,
    journal,
    origin,
    record,
    rows_of,
)
from .tables import (
    BEST,
    markdown,
    number_column,
    programs,
    ratio_of,
    row_of,
    share_column,
    size_column,
    unmeasured_of,
    value_of,
)

WAYS = {"forward": "forward", "both": "with its gradient", "views": "of views", "new gradients": "new gradients"}
"""How calls of the host's table are made, in words."""


def techniques() -> list[str]:
    """Rows of plan `memory-techniques`: what a step takes, and what it keeps in memory for the backward pass."""
    memory = size_column("kept", "activations"), size_column("peak allocated", "peak_allocated")
    steps = number_column("ms a step"), *memory, BEST
    losses = (
        number_column("bits a byte"),
        number_column("tokens/s", "tokens_per_s"),
        number_column("bytes of bf16 over those of the payload", "compression_ratio"),
    )
    pool = (
        number_column("reserved over allocated"),
        number_column("retries", "retries"),
        number_column("ms of host time", "replay"),
        size_column("reserved", "pool_reserved"),
    )
    tokens = number_column("ms a token"), size_column("peak memory", "generation_memory"), BEST
    moved = (
        *steps[:1],
        number_column("exposed, ms", "exposed_states"),
        number_column("link both ways, GB/s", "host_link"),
        *steps[1:],
    )
    large = [x for x in rows_of(TECHNIQUES) if x.options.get("model") == "llama-3.1-8b"]
    assert all(x.status == "out_of_memory" for x in large)
    (ended,) = (x.implementation for x in rows_of(TECHNIQUES_LARGE) if x.status == "crashed")
    (lost,) = (x.implementation for x in rows_of(TECHNIQUES_LARGE) if x.status == "incorrect")
    assert (lost, "out_of_memory") in {(x.implementation, x.status) for x in rows_of(TECHNIQUES_STATES)}
    return [
        "## Techniques of training",
        f"{origin(journal(TECHNIQUES))} *Kept*: what a pass leaves for the backward pass. The {len(large)} "
        "rows of 8 B parameters have no time in this run: their answer in fp32 had no room on the device. It "
        "has in the run below.",
        programs(TECHNIQUES, steps, "train"),
        "Gradients compressed and decompressed, with what is lost added to the next step's; nothing is sent. One "
        "seed, whose loss falls steeply where it ends: no verdict.",
        programs(TECHNIQUES, losses, "converge"),
        "A pass without gradients, and a token:",
        programs(TECHNIQUES, (number_column("ms a pass"), BEST), "forward"),
        programs(TECHNIQUES, tokens, "generate"),
        "The memory pool, with memory to spare or with 5 % more than the pattern needs:",
        programs(TECHNIQUES, pool, "memory_pool", failed=True),
        "### Eight billion parameters, and masters in fp32",
        f"{origin(journal(TECHNIQUES_LARGE))} 16,384 tokens a step of 8 B parameters, states in bf16, and "
        "32,768 of 3.2 B with masters in fp32. What states on the host cost beside the same step without "
        "moving them is *exposed*; they move during the backward pass where gradients are not clipped "
        f"(`clip0.0`). Where the table says so, the device had no memory for these tokens. `{ended}` was ended "
        "by the system, most likely as the host's 125 GiB do not hold the answer and what it keeps too. The row "
        f"of `{lost}` at 3.2 B was lost to an error of the harness, mended since; run `{TECHNIQUES_STATES}`, on "
        "another H200, has it: out of memory. DeepSpeed's rows are in the run below.",
        programs(TECHNIQUES_LARGE, moved, "train", failed=True),
        "A decoder block's forward pass:",
        programs(TECHNIQUES_LARGE, (number_column("ms a pass"), BEST), "forward"),
        "### Libraries that keep states on the host",
        f"{origin(journal(TECHNIQUES_OFFLOADED))} A host of 252 GiB. {unmeasured_of(TECHNIQUES_OFFLOADED)}",
        programs(TECHNIQUES_OFFLOADED, moved, "train"),
        "## Techniques of training before, on another host",
        origin(journal(TECHNIQUES_BEFORE)),
        programs(TECHNIQUES_BEFORE, steps, "train"),
        programs(TECHNIQUES_BEFORE, (number_column("ms a pass"), BEST), "forward"),
        programs(TECHNIQUES_BEFORE, (number_column("ms a token"), BEST), "generate"),
        programs(TECHNIQUES_BEFORE, pool, "memory_pool"),
    ]


def training_steps() -> list[str]:
    """Training steps."""
    columns = (
        number_column("ms"),
        number_column("tokens/s", "tokens_per_s", 5),
        share_column("MFU", "mfu"),
        share_column("of the limit", "limit_fraction"),
        size_column("peak memory", "peak_allocated"),
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
        f"{origin(journal(TRAINED))} Four of six shards, two at a time on two GPUs of one host. What launches "
        "kernel by kernel waited for the host: by "
        f"`kernelmark` steps of {accumulated} took {low} to {high} ms, "
        "and such rows say more of the host than of kernels. Graphs and larger steps are the device's. "
        "`max_autotune` of Llama 1.2B and of GPT-2 at B 8 was interrupted while it compiled. Masters in "
        "fp32, BERT, experts and Mamba-2, of the other two shards, were not run at this commit.",
        programs(TRAINED, columns),
        "### BERT, masters in fp32, Mamba-2, experts, more of graphs",
        "Other rows of that plan, at other commits. Of Mamba-2 torch.compile is `error`: its "
        "Inductor fails at a sum over parts. Of Mixtral all five systems are `incorrect`, PyTorch's own too: in "
        "bf16 some tokens go to other experts than in fp32, and the gradient of a router is .30 to .35 of its "
        "norm off, where .3 is allowed. Since then a quarter more is allowed than PyTorch's own are off; these "
        "rows have not run again.",
        *(x for run in OTHER_SHARDS for x in (origin(journal(run)), programs(run, columns, failed=True))),
        "### Micro-batches and Muon in graphs",
        origin(journal(ACCUMULATED)),
        programs(ACCUMULATED, columns),
        "### Some cases, older",
    ]
    for run in STEPS:
        parts += [origin(journal(run)), programs(run, columns)]
    small, large = (value_of(row_of("train-gpt2", PROVIDER, B=x)) for x in (8, 64))
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
        parts += [origin(journal(run)), programs(run, (*columns, size_column("reserved", "peak_reserved")))]
    narrow, wide = (
        value_of(row_of("precision-1b", x)) for x in ("kernelmark_fp8_rowwise", "kernelmark_compile_blocks")
    )
    parts.append(
        f"Eight layers of the 1.3B decoder in FP8 by rows take {figures.ratio(narrow / wide)} the time of bf16, "
        "both by ours: the one eager, the other with compiled layers, on that host."
    )
    return parts


def eight_bits() -> list[str]:
    """A model of 7 B parameters in 8 bits, held to what rounding does to it."""
    columns = (
        number_column("ms"),
        number_column("tokens/s", "tokens_per_s", 5),
        share_column("of the limit", "limit_fraction"),
        size_column("peak memory", "peak_allocated"),
    )
    coarse, fine = (value_of(row_of(FP8_7B, f"kernelmark{x}_graph")) for x in ("_fp8_rowwise", ""))
    (told,) = (
        x.measurement.remarks
        for x in journal(FP8_7B).records
        if x.implementation == "kernelmark_fp8_rowwise_graph" and x.measurement is not None
    )
    return [
        "## 7 B parameters in 8 bits, held to what rounding does",
        "16,384 tokens of Llama 2 7B, states in bf16, products in 8 bits with a scale a row: "
        f"{figures.number(coarse)} ms, where ours in bf16 takes {figures.number(fine)}. That is "
        f"**{figures.ratio(fine / coarse)}**, of 1.45 × that was asked for, both in a CUDA graph, one replicate: "
        "a per cent more or less is not told apart. The row is right by the bound that PyTorch's own parts with "
        f"rounded products set ([which](training.md#precision)), and says: *{'; '.join(told)}*. torchao's rows "
        "were not reached in the time that there was, nor 8 B parameters.",
        origin(journal(FP8_7B)),
        programs(FP8_7B, columns),
    ]


def gate_and_up() -> list[str]:
    """A step with gate and up as one product of ours."""
    columns = (
        number_column("ms"),
        number_column("tokens/s", "tokens_per_s", 5),
        share_column("of the limit", "limit_fraction"),
        size_column("peak memory", "peak_allocated"),
        BEST,
    )
    one, two = (value_of(row_of(GATE_UP, f"kernelmark{x}_graph")) for x in ("_gate_up_swiglu", ""))
    return [
        "## Gate and up as one product in a step",
        f"{origin(journal(GATE_UP))} A step of Llama 1.2B with `gate_up_swiglu` beside the same step without: "
        f"{figures.percent(two / one - 1, 1)} more tokens a second, which one process does not tell from none. "
        "Llama 3.1 8B was not reached.",
        programs(GATE_UP, columns),
    ]


def host_calls() -> list[str]:
    """What a call costs the host."""
    found = record("host/calls-h200.json")
    lines = [
        [
            f"`{x['operator']}`",
            WAYS.get(x["way"], x["way"]),
            f"{x['ours']:.0f}",
            f"{x['theirs']:.0f}",
            ratio_of(x["ratio"]),
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
        markdown(["operator", "way", "ours", "PyTorch's", "ratio"], lines),
        *_in_c(),
    ]


def _in_c() -> list[str]:
    """The same since calls that come again are launched in C, and before, on one host."""
    text = (JOURNALS / "host" / "calls-in-c-h200.txt").read_text().splitlines()
    found = [x for line in text if line.startswith("{") and "way" in (x := json.loads(line))]
    lines = [
        [
            f"`{x['operator']}`",
            WAYS.get(x["way"], x["way"]),
            *(f"{x[name]:.0f}" for name in ("old", "new", "theirs")),
            *(ratio_of(x[name]) for name in ("old_ratio", "ratio")),
        ]
        for x in found
    ]
    within = [sum(x[name] <= 1.5 for x in found) for name in ("ratio", "old_ratio")]
    return [
        "### Since calls that come again are launched in C",
        f"On another host, before and since in one process: {within[0]} of {len(found)} are at most 1.5 times "
        f"PyTorch's, {within[1]} before (`registry/reference/host/calls-in-c-h200.txt`).",
        markdown(["operator", "way", "before", "since", "PyTorch's", "ratio before", "since"], lines),
    ]
