"""What was lost, wrong or noisy, and what these runs do not show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row
from kernelmark.registry.store.record import PROVIDER
from kernelmark.registry.views import summary

from .runs import ATTENTION, MEMORY, PASSES, REWIRED, SAME_CODE, STATE_SPACE, defined, journal, record, rows_of
from .tables import markdown, ratio_of

FEW_ALLOWED = "2026-11-21T11:20"
"""Before that time no element of an answer was allowed beyond the bound of a single one."""


def rewired() -> list[str]:
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
        markdown(
            ["comparison", "operator", "case", "before, ms", "after, ms", "change", "95 %", "verdict"], lines
        ),
    ]


def slower() -> list[str]:
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
            f"| `{x.operator}` | {x.case} | {x.best_baseline} | {ratio_of(x.speedup_vs_best_baseline)} "
            f"| {ratio_of(x.speedup_ci_low)} – {ratio_of(x.speedup_ci_high)} |"
        )
    return [
        "## Where ours is slower",
        "Every case of three runs whose whole 95 % interval lies below 1: "
        + "; ".join(f"of `{x}` {defined(journal(x))}" for x in (MEMORY, ATTENTION, STATE_SPACE))
        + ". [Some were measured again](#rows-that-lost-before-and-after).",
        "\n".join(lines),
    ]


def incorrect() -> list[str]:
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


def noise() -> list[str]:
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
        f"Runs `{SAME_CODE[0]}` and `{SAME_CODE[1]}` measured one commit twice, one after the other; of the first "
        f"{defined(journal(SAME_CODE[0]))}.\n"
        f"Of {len(apart)} rows the median one differs by {at(apart, 50)}, the 90th percentile by {at(apart, 90)}, "
        f"the 99th by {at(apart, 99)}, the largest by {at(apart, 100)}.\nBetween the processes of one run the "
        f"coefficient of variation is {at(within, 50)} in the median row, "
        f"{at(within, 90)} at the 90th percentile.\n"
        "A difference smaller than these is not one.",
    ]


def not_shown() -> list[str]:
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
