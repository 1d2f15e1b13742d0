"""Attention beside each peer, and from which length on O(S) beats O(S²)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row
from kernelmark.registry.store.record import PROVIDER
from kernelmark.registry.views import crossing

from .runs import ATTENTION, CROSSING, FLASHINFER, defined, journal, origin, rows_of

DENSE: Sequence[tuple[str, str, str]] = (
    (ATTENTION, "flash_attn_4", "FlashAttention 4"),
    (ATTENTION, "vllm_fa3", "FlashAttention 3 (vLLM's)"),
    (FLASHINFER, "flashinfer", "FlashInfer, beside older kernels of ours"),
    (ATTENTION, "sdpa_cudnn", "cuDNN"),
    (ATTENTION, "sdpa_flash", "FlashAttention 2 (PyTorch's)"),
)
"""Run, implementation, and what a reader knows it by."""


def dense_attention() -> list[str]:
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
        f"as query heads. FlashInfer's line is of run `{FLASHINFER}`, where our kernels were older; "
        f"{defined(journal(FLASHINFER))}.\n"
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


def crossing_lengths() -> list[str]:
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
        origin(made) + " The interval is a bootstrap over replicates, with the confidence that so many can give.",
        "\n".join(lines),
    ]
