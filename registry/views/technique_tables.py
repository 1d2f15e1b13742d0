"""What techniques of training buy, beside what was asked for: tables in Markdown, of several runs. Pure.

A run that trains to a loss gives the verdicts on quality; the others give time and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import figures
from ..analysis.peers import Speedup
from ..analysis.rows import Row, rows
from ..analysis.speedups import memory_saving, peak
from ..detection.arms import Arm, Point, arms
from ..detection.techniques import ACTIVATIONS, MOVED, Bought, Quality, Setting, bought, qualities, settings
from ..errors import InputError
from ..escape import markdown
from ..store.journal import Journal
from ..store.record import EAGER
from .convergence_table import by_step, difference

NOT_SHOWN = "quality not shown"
PRECISIONS: Mapping[str, str] = {
    "fp32": "fp32",
    "tf32": "fp32, products in TF32",
    "fp16": "fp16, loss scaled",
    "bf16": "bf16",
    "float8_tensorwise": "FP8 a tensor, torchao",
    "float8_tensorwise_e5m2": "FP8 a tensor, gradients E5M2, torchao",
    "float8_rowwise": "FP8 a row, torchao",
    "float8_1x128": "FP8 1×128, torchao",
    "parts_rowwise": "FP8 a row, own kernels",
    "parts_1x128": "FP8 1×128, own kernels",
    "parts_1x128_fused": "FP8 1×128, own kernels, norms and gates fused",
    "te_tensorwise": "FP8 a tensor, Transformer Engine",
    "te_delayed": "FP8 a tensor by those before, Transformer Engine",
    "te_1x128": "FP8 1×128, Transformer Engine",
}
EIGHT_BITS = frozenset(x for x, label in PRECISIONS.items() if label.startswith("FP8"))
EIGHT_BIT_LAYERS = {
    f"transformer_engine_layers_{x.removeprefix('te_')}" for x in PRECISIONS if x.startswith("te_")
}
"""What trains in 8 bits without a system that says so: Transformer Engine's layers, by how they scale."""
RECOMPUTED: Mapping[str, str] = {
    "every_layer": "every layer again",
    "every_second": "every second layer again",
    "by_cost": "again by cost",
    "by_part": "norms and gates again",
    "by_part_wide": "norms, gates and what feeds them again",
}
STATES: Mapping[str, str] = {
    "host_copied": "states on the host, copied",
    "host_streamed": "states on the host, streamed",
    "host_updated": "states and update on the host",
}
OPTIMIZERS: Mapping[str, str] = {
    "torchao_adamw_8bit": "8-bit states, torchao",
    "bitsandbytes_adamw_8bit": "8-bit states, bitsandbytes",
    "twin_adamw_8bit": "8-bit states, emulated",
    "torchao_cpu_offload": "states on the host, torchao",
    "torch_muon": "Muon, torch.optim",
}
FP8_TRAINING = (
    ("125M", ("gpt2-124m", "gpt2-124m-padded"), "45.2", "22.8", "1.98×", "47 %"),
    ("350M", ("gpt2-350m",), "123.1", "63.4", "1.94×", "52 %"),
    ("1.3B", ("gpt3-1.3b",), "487.3", "251.2", "1.94×", "49 %"),
    ("6.7B", ("gpt3-6.7b",), "2100", "1090", "1.93×", "51 %"),
)
"""As asked for: size, our models of it, ms a step in FP16 and FP8, speedup, memory saved. Batch and length are not
stated there."""
STABILITY = {
    1000: ("2.347", "2.351", "+0.17 %"),
    5000: ("1.892", "1.897", "+0.26 %"),
    10000: ("1.634", "1.641", "+0.43 %"),
}
"""As asked for, by training steps: FP16 loss, FP8 loss and the difference; each called stable. Model,
data and batch are not stated there."""
BLOCK = "llama-block"
HEADINGS = (
    "system",
    "technique",
    "ms",
    "× torch",
    "× without",
    "× fp32",
    "× fp16",
    "peak",
    "of without",
    "activations",
    "of without",
    "exposed ms",
    "asked for",
    "quality",
)


def tables(journals: Iterable[Journal]) -> str:
    """All tables that these runs have rows for. Raises `InputError` where there is none."""
    read = tuple(journals)
    known = qualities(read)
    found = [x for journal in read for x in bought(journal, known)]
    parts = [
        _fp8_training(found),
        f"**Numerical stability: asked for, and measured**\n\n{stable}" if (stable := stability(read)) else "",
        *_programs(found),
        _pools(read),
        _compressed(read),
    ]
    text = [x for x in parts if x]
    if not text:
        raise InputError(
            "no row of these runs is of a technique: kernelmark run --plan precision, and --plan "
            "memory-techniques, measure some."
        )
    return "\n".join([*text, *_notes(read)]) + "\n"


def technique(x: Setting) -> str:
    """What a system does, in words; empty for PyTorch's own."""
    told = [
        PRECISIONS.get(x.change("dtype"), ""),
        PRECISIONS.get(x.precision, ""),
        OPTIMIZERS.get(x.change("optimizer"), ""),
        RECOMPUTED.get(x.recompute, ""),
        f"activation memory budget {x.recompute.removeprefix('budget_')} %" if "budget" in x.recompute else "",
        STATES.get(x.states, ""),
        {"eager": "", "graph": "CUDA graph by hand"}.get(x.execution, f"torch.compile, {x.execution}"),
    ]
    return ", ".join(y for y in told if y)


def asked(x: Bought) -> str:
    """The figure that was asked for of a technique."""
    s = x.setting
    if s.precision != "case":
        return "1.9× of fp16, −47 to −52 % memory"
    if s.change("dtype"):
        return {"fp16": "1.4× of fp32", "bf16": "no figure"}.get(s.change("dtype"), "")
    if s.states in MOVED or s.change("optimizer") == "torchao_cpu_offload":
        return "20× (0.7 ms, not 14.1 ms)"
    if s.recompute != "none":
        return "−60 % peak, +20 % time"
    if s.execution in ("graph", "reduce_overhead"):
        return "2.8×, −35 % memory"
    if x.row.options.get("model") == BLOCK and x.row.implementation != EAGER:
        return "3.59×"
    return "4.2×" if s.execution == "compile" else ""


def told(x: Bought) -> str:
    """What is known of a row's quality."""
    if x.setting.same_numbers:
        return "the same numbers"
    return _verdict(x.quality)


def _verdict(x: Quality | None) -> str:
    if x is None:
        return NOT_SHOWN
    return f"{by_step(x.arm)} ({markdown(x.case)}, run {markdown(x.run)})"


def _programs(found: Sequence[Bought]) -> list[str]:
    """A table a case in which there is a technique."""
    cases: dict[tuple[str, str], list[Bought]] = {}
    for x in found:
        cases.setdefault((x.row.operator, x.row.case), []).append(x)
    return [
        _markdown(f"{operator} {case}", HEADINGS, [_program(x) for x in members])
        for (operator, case), members in cases.items()
        if any(technique(x.setting) for x in members)
    ]


def _program(x: Bought) -> tuple[str, ...]:
    row = x.row
    first = (markdown(row.implementation), markdown(technique(x.setting)) or figures.DASH)
    if row.value() is None:
        return (*first, _why(row), *[figures.DASH] * (len(HEADINGS) - 5), asked(x) or figures.DASH, figures.DASH)
    return (
        *first,
        figures.number(row.value()),
        _speedup(x.native),
        _speedup(x.ratio),
        _speedup(x.over.get("fp32")),
        _speedup(x.over.get("fp16")),
        figures.size(peak(row)),
        figures.change(x.memory),
        figures.size(row.value(ACTIVATIONS)),
        figures.change(x.activations),
        figures.number(row.value("exposed_states")),
        asked(x) or figures.DASH,
        told(x),
    )


def _speedup(x: Speedup | None) -> str:
    if x is None:
        return figures.DASH
    return figures.ratio(x.value) + figures.bounds(x.low, x.high)


@dataclass(frozen=True)
class _Eight:
    """The fastest FP8 row of a case, and its fp16 one."""

    narrow: Bought
    wide: Row


def _fp8_training(found: Sequence[Bought]) -> str:
    """The table of training in FP8 by size of model, ours beside the one that was asked for."""
    lines = []
    for size, models, *theirs in FP8_TRAINING:
        eight = _eight([x for x in found if x.row.operator == "train" and x.row.options.get("model") in models])
        if eight is not None:
            lines.append((size, *theirs, *_ours(eight)))
    if not lines:
        return ""
    headings = ("model", "fp16 ms", "FP8 ms", "speedup", "memory saved")
    ours = ("our fp16 ms", "our FP8 ms", "speedup", "memory saved", "by", "case", "quality")
    return _markdown("FP8 training: asked for, and measured", (*headings, *ours), lines)


def stability(journals: Sequence[Journal]) -> str:
    """The table of stability in 8 bits and in fp16 by training steps, ours beside the one that was asked for;
    empty where no arm of these runs is of either.
    """
    lines = [
        (f"{point.step:,}", *STABILITY[point.step], *_stable(arm, point))
        for journal in journals
        for arm, point in _points(journal)
    ]
    headings = ("steps", "FP16 loss", "FP8 loss", "difference", "our arm", "base", "case")
    ours = ("base, bits a byte", "arm, bits a byte", "difference", "95 %", "verdict at the step", "of all steps")
    return _table((*headings, *ours), lines) if lines else ""


def _points(journal: Journal) -> list[tuple[Arm, Point]]:
    """What arms of 8 bits and of fp16 reach at the steps that were asked for."""
    named = settings(journal.header)
    found = [
        (arm, point)
        for arm in arms(journal)
        for point in arm.points
        if point.step in STABILITY
        and (arm.share is not None or named.get(arm.name, Setting(EAGER)).change("dtype") == "fp16")
    ]
    return sorted(found, key=lambda x: x[1].step)


def _stable(arm: Arm, point: Point) -> tuple[str, ...]:
    e = point.found
    interval = figures.DASH if e.low is None or e.high is None else f"{e.low:+.2%} to {e.high:+.2%}"
    return (
        markdown(arm.name),
        markdown(arm.base),
        markdown(arm.case),
        f"{point.base:.4f}",
        f"{point.arm:.4f}",
        difference(point),
        interval,
        e.kind if arm.named else f"{e.kind}; {figures.percent(arm.share)} in 8 bits, no name for it",
        arm.overall,
    )


def _eight(members: Sequence[Bought]) -> _Eight | None:
    narrow = [x for x in members if x.setting.precision != "case" and "fp16" in x.over]
    if not narrow:
        return None
    best = max(narrow, key=lambda x: x.over["fp16"].value)
    wide = next(x for x in members if x.row.case == best.row.case and x.setting.change("dtype") == "fp16")
    return _Eight(best, wide.row)


def _ours(x: _Eight) -> tuple[str, ...]:
    row = x.narrow.row
    return (
        figures.number(x.wide.value()),
        figures.number(row.value()),
        _speedup(x.narrow.over["fp16"]),
        figures.percent(memory_saving(row, x.wide)),
        markdown(row.implementation),
        markdown(row.case),
        told(x.narrow),
    )


def _pools(journals: Sequence[Journal]) -> str:
    """Settings of the memory pool, and which of them is to be taken for each pattern."""
    lines: list[tuple[str, ...]] = []
    for journal in journals:
        cases: dict[str, list[Row]] = {}
        for x in rows(journal):
            if x.operator == "memory_pool":
                cases.setdefault(x.case, []).append(x)
        for case, members in cases.items():
            best = min((x for x in members if x.value() is not None), key=_pool_order, default=None)
            lines += [_pool(case, x, x is best) for x in members]
    headings = ("pattern", "setting", "reserved / allocated", "retries", "ms", "reserved", "advice")
    return _markdown("Memory pool; asked for: variable performance, to be tuned", headings, lines) if lines else ""


def _why(row: Row) -> str:
    """How a row ended that has no value, in one sentence: an allocator's go on for lines."""
    return f"{row.status.replace('_', ' ')}: {markdown((row.reason or '').split('. ')[0])}"


def _pool_order(x: Row) -> tuple[float, float, float]:
    """No retries before little memory before little time."""
    return (x.value("retries") or 0.0, round(x.value() or 0.0, 2), x.value("replay") or 0.0)


def _pool(case: str, x: Row, best: bool) -> tuple[str, ...]:
    first = (markdown(case), markdown(x.implementation))
    if x.value() is None:
        return (*first, _why(x), *[figures.DASH] * 4)
    return (
        *first,
        figures.number(x.value()),
        figures.number(x.value("retries")),
        figures.number(x.value("replay")),
        figures.size(x.value("pool_reserved")),
        "take this" if best else "",
    )


def _compressed(journals: Sequence[Journal]) -> str:
    """Compressed gradients: ratio, accuracy, and what they do to the loss."""
    lines = []
    for journal in journals:
        by_name = {(x.case, x.implementation): x for x in rows(journal)}
        for arm in arms(journal):
            row = by_name.get((arm.case, arm.name))
            if row is not None and "compression_ratio" in row.metrics:
                lines.append(_compression(arm, row))
    headings = ("case", "system", "ratio", "accuracy", "asked for", "loss", "verdict")
    return _markdown("Gradient compression", headings, lines) if lines else ""


def _compression(arm: Arm, row: Row) -> tuple[str, ...]:
    last = arm.points[-1] if arm.points else None
    return (
        markdown(arm.case),
        markdown(arm.name),
        figures.ratio(row.value("compression_ratio")),
        figures.percent(row.value("compression_accuracy"), 1),
        "1.0×, 94 %",
        f"{difference(last)} after {last.step:,} steps" if last else figures.DASH,
        by_step(arm),
    )


def _markdown(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return f"**{title}**\n\n{_table(headings, lines)}"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    made = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    return "\n".join([*made, *(f"| {' | '.join(x)} |" for x in lines), ""])


def _notes(journals: Sequence[Journal]) -> list[str]:
    """What the tables rest on."""
    names = ", ".join(markdown(x.header.run) for x in journals)
    return [
        f"Runs: {names}. In brackets: 95 % intervals over processes. × without: the same parts in the same "
        "execution without the technique; of an execution, the eager ones.",
        "Quality: the verdict of `converge` on the same parts, execution, precision, changes and storage, on the "
        "model named. The same numbers: bit by bit, which tests show on a CPU.",
        "A CUDA graph keeps a pool of its own: memory that falls by 35 % is not to be had from it.",
    ]
