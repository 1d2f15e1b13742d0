"""The page of a CPU: who is the fastest, case by case."""

from __future__ import annotations

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row

from .runs import journal, rows_of
from .tables import by_operator

CPU_TITLE = "# Results on a CPU"
CPU_INTRODUCTION = """\
This page is written by `python docs/results.py --write` from one run of `kernelmark run --plan cpu --device
cpu`, and a test holds it to that. [registry/reference/README.md](../registry/reference/README.md) says where
it was made. The libraries are those that somebody with a CPU would choose from: PyTorch (MKL in fp32, oneDNN
in bf16), oneDNN by itself, `torch.compile`, OpenVINO, ONNX Runtime, Intel Neural Compressor. `kernelmark_cpu`
is ours. Figures of one machine say little of another: threads, vectors and memory policy are conditions of
every row."""


def cpu_page(run: str) -> str:
    """The whole page of a run of the plan `cpu`."""
    held = journal(run).header.conditions
    told = (
        f"{held['cpu']} with {held['vectors']}, {held['threads']} threads on {held['cores']} cores, memory policy "
        f"`{held['memory_policy']}`, huge pages `{held['huge_pages']}`, torch {held['torch']}."
    )
    parts = [CPU_TITLE, CPU_INTRODUCTION, told, *by_operator("Ours beside the fastest of the others", run)]
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
