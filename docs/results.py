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
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from kernelmark.registry import figures
from kernelmark.registry.analysis.repeated import said
from kernelmark.registry.analysis.rows import Row, rows
from kernelmark.registry.store.journal import Journal, read, read_header
from kernelmark.registry.store.record import PROVIDER
from kernelmark.registry.views import crossing, summary
from kernelmark.registry.views.table import render
from kernelmark.registry.views.tables import half_width, run_table

HERE = Path(__file__).resolve().parent
PAGE = HERE / "results-h200.md"
CPU_PAGE = HERE / "results-cpu.md"
README = HERE.parent / "README.md"
MARKS = ("<!-- row -->\n", "<!-- end of row -->\n")
JOURNALS = HERE.parent / "registry" / "reference"

ATTENTION = "20261122-000725-00c3"
FLASHINFER = "20261121-193506-4853"
"""The run of plan `attention` before, with older kernels of ours, which has FlashInfer."""
MEMORY_ROWS = "memory-rows"
"""A part of plan `memory`, measured again."""
STATE_SPACE = "20261121-105936-8d81"
MATMUL = "20261122-193257-4f80"
TRAIN = "20261122-193610-d51b"
TECHNIQUES = "20261122-193737-eb40"
RANKS = "20261122-224109-fd6e"
CONTEXT = "20261122-224219-d717"
DECODING = "20261122-224448-6d44"
SERVER = "20261122-224626-3644"
CROSSING = "20261121-110018-0b0a"
SAME_CODE = ("20261121-013846-d039", "20261121-015122-83b1")

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

RAN_WITH = dict.fromkeys((RANKS, CONTEXT, DECODING, SERVER), "02f2b29")
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
    """A run of `registry/reference/`."""
    return read(JOURNALS / f"{run}.jsonl.gz")


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
        *_every("Matrix products", MATMUL),
        *_every("A training step", TRAIN),
        *_every("Launches and optimizer states in a training step", TECHNIQUES),
        *_every("Ranks", RANKS),
        *_every("Context parallel attention", CONTEXT),
        *_every("Decoding, by time a token", DECODING),
        *_every("A server, by time of a request", SERVER),
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


def placed(document: str, text: str) -> str:
    """The document with `text` between its marks."""
    start, end = MARKS
    head, rest = document.split(start)
    return head + start + text + end + rest.split(end)[1]


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
    return [
        "## What has no time",
        f"{elsewhere} rows more are `unsupported` because their libraries need a GPU.",
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
        "- One GPU of one kind: Hopper is the only architecture on which our kernels were measured.",
    ]
    return ["## What these runs do not show", "\n".join(points)]


if __name__ == "__main__":
    made = {PAGE: page()}
    if CPU:
        made[CPU_PAGE] = cpu_page(CPU)
    if sys.argv[1:] == ["--write"]:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        README.write_text(placed(README.read_text(encoding="utf-8"), row()), encoding="utf-8")
    else:
        print(*made.values(), row(), sep="\n", end="")
