"""Matrix products: groups of them beside a peer, and before and since a change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row
from kernelmark.registry.analysis.statistics import geometric_mean
from kernelmark.registry.store.record import PROVIDER

from .runs import MATMUL, MATMUL_BLOCKS, MATMUL_FEW, journal, origin
from .tables import by_case, markdown, mean_of, ratio_of, value_of

SQUARE = "M8192-N8192-K8192-nt-none-bf16-forward"
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


def products() -> list[str]:
    """Products: groups of them against a peer, those drawn at random by themselves, then every case."""
    made, cases = journal(MATMUL), by_case(MATMUL)

    def ratios(peer: str, chosen: Callable[[Row], bool], drawn: bool) -> list[float]:
        found = []
        for by in cases.values():
            ours = by.get(PROVIDER)
            if ours is None or not chosen(ours) or _drawn(ours) != drawn:
                continue
            name = peer or ours.best_baseline
            if name in by:
                found.append(value_of(by[name]) / value_of(ours))
        return found

    lines = []
    for group, peer, chosen in GROUPS:
        told = [f"{group} against {f'`{peer}`' if peer else 'the fastest other'}"]
        for drawn in (False, True):
            found = ratios(peer, chosen, drawn)
            mean = geometric_mean(found)
            span = (
                f"{ratio_of(mean)} ({ratio_of(min(found))} – {ratio_of(max(found))}), {len(found)}"
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
        rate = ours.flops / value_of(ours) / 1e9 if ours.flops else None
        every.append([
            f"`{operator}`", case.removesuffix("-forward"), figures.number(value_of(ours)),
            figures.number(rate, 3) if rate else figures.DASH, figures.percent(ours.fraction_of_limit),
            f"`{best.implementation}`" if best else figures.DASH,
            figures.number(best.value()) if best else figures.DASH,
            ratio_of(ours.speedup_vs_best_baseline),
        ])  # fmt: skip
    square = {name: figures.number(x.value()) for name, x in cases["matmul", SQUARE].items()}
    return [
        "## Matrix products",
        origin(made),
        BESIDE.format(quack=square["quack"], torch=square["torch"], ours=square[PROVIDER]),
        markdown(["products", "the plan's shapes", "random shapes"], lines),
        "Every case but the random ones. *Of the limit*: of what the device's own ceilings of the run allow.",
        markdown(
            ["operator", "case", "ours, ms", "TFLOP/s", "of the limit", "fastest other", "its ms", "ratio"], every
        ),
    ]


def products_since() -> list[str]:
    """Products with scales of blocks before and since, each beside DeepGEMM of its own run."""

    def against(run: str) -> dict[tuple[str, str], tuple[Row, float]]:
        peer = "vllm_deep_gemm"
        return {
            at: (by[PROVIDER], value_of(by[peer]) / value_of(by[PROVIDER]))
            for at, by in by_case(run).items()
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
                pair = [mean_of(side[x][1] for x in found) for side in (before, since)]
                lines.append([words, shapes, str(len(found)), *pair])
    return [
        "### Products in blocks before and since",
        "DeepGEMM's time over ours, each within its own run, as geometric means over the cases that both runs "
        f"have. Before: {origin(journal(MATMUL_BLOCKS))} On another H200 of that kind.",
        markdown(["products", "shapes", "cases", "before", "since"], lines),
    ]


ROWS_OF_A = ((1, 3), (4, 16), (17, 32), (33, 150), (151, 1000), (1001, 1 << 20))


def products_of_few_rows() -> list[str]:
    """Products before and since few rows are loaded alone: by how many there are, then groups, mixtures and MXFP4
    by E4M3 case by case.
    """
    before, since = by_case(MATMUL_FEW), by_case(MATMUL)
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
                    mean_of(value_of(since[x][PROVIDER]) / value_of(before[x][PROVIDER]) for x in here),
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
            f"`{at[0]}`", at[1].removesuffix("-forward"), figures.number(value_of(before[at][PROVIDER])),
            figures.number(value_of(ours)), f"`{best.implementation}`" if best else figures.DASH,
            figures.number(best.value()) if best else figures.DASH,
        ])  # fmt: skip
    return [
        "### Few rows, groups, mixtures and MXFP4 before and since",
        f"Before: {origin(journal(MATMUL_FEW))} On another H200 of that kind. Since: the run above.",
        markdown(["`fp8_matmul`, rows of A", "cases", "time since over before"], lines),
        markdown(["operator", "case", "ours before, ms", "ours, ms", "fastest other since", "its ms"], every),
    ]
