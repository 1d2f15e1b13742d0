"""Rows that lost in earlier runs, and what they take since."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row
from kernelmark.registry.store.journal import Journal, read_header
from kernelmark.registry.store.record import PROVIDER
from kernelmark.registry.views import summary

from .runs import ATTENTION, FLASHINFER, JOURNALS, MEMORY, STATE_SPACE, journal, rows_of
from .tables import markdown, ratio_of

LONG_ROW = 65536
"""Columns from which a row is a long one."""
SMALL = 1 << 18
"""Elements up to which a tensor is a tiny one."""

Chosen = Callable[[Row], bool]


def _of(operator: str, chosen: Chosen = lambda _: True) -> Chosen:
    return lambda row: row.operator == operator and chosen(row)


LOST: Sequence[tuple[str, str, Chosen]] = (
    ("softmax of long rows", MEMORY, _of("softmax", lambda x: x.axes["D"] >= LONG_ROW)),
    ("tiny GELU", MEMORY, _of("gelu", lambda x: x.axes["M"] * x.axes["N"] <= SMALL)),
    (
        "add_rms_norm backward of 64 long rows",
        MEMORY,
        _of("add_rms_norm", lambda x: x.pass_ == "backward" and x.axes["D"] >= LONG_ROW),
    ),
    ("selective_state_update", STATE_SPACE, _of("selective_state_update", lambda x: _slower(x))),
    (
        "decoding of mixed lengths",
        ATTENTION,
        _of("attention_decode", lambda x: x.options["lengths"] == "mixed"),
    ),
    ("selective_scan's limit", STATE_SPACE, _of("selective_scan", lambda x: x.pass_ == "forward")),
    ("causal_conv1d backward", STATE_SPACE, _of("causal_conv1d", lambda x: x.pass_ == "backward")),
    (
        "8-bit attention, full",
        FLASHINFER,
        _of("attention_fp8", lambda x: x.options["mask"] == "full" and _slower(x)),
    ),
)
"""What was to be made faster, the run in which it lost, and its rows there."""


def _slower(row: Row) -> bool:
    return row.speedup_vs_best_baseline is not None and row.speedup_vs_best_baseline < 1


def lost() -> list[str]:
    """A table: each such row as it was, and in the newest later run that has its case."""
    lines = []
    for what, run, chosen in LOST:
        rows = [x for x in rows_of(run) if x.provider == PROVIDER and chosen(x) and x.value() is not None]
        assert rows, what
        for x in rows:
            again = _since(run, x)
            after = _told(*again, mark=_spec(run, x) != _spec(*again)) if again else ["not run again", *[""] * 3]
            lines.append([what, x.case, *_told(run, x), *after])
            what = ""
    columns = ["run, commit", "ms", "of limit", "× the fastest beside it"]
    return [
        "## Rows that lost, before and after",
        "What was to be made faster, in the run in which it lost and in the newest one since that has the same "
        "case, with a peer beside it where one has. Each is held against the fastest baseline of its own run, by "
        "name: one that is not named again may not have run. `selective_scan` and `causal_conv1d` lost to "
        "nobody; of them more of the limit was asked for. \\*: the case has another definition there. What bounds "
        "a case was counted otherwise in some runs.",
        markdown(["", "case", *(f"before: {x}" for x in columns), *(f"after: {x}" for x in columns)], lines),
    ]


def _told(run: str, row: Row, mark: bool = False) -> list[str]:
    commit = summary.commit(journal(run).header)
    other = "\\*" if mark else ""
    against = (
        f"{ratio_of(row.speedup_vs_best_baseline)} `{row.best_baseline}`"
        if row.best_baseline
        else "none beside it"
    )
    return [
        f"`{run}`{other}, `{commit[:8]}`",
        figures.number(row.value()),
        figures.percent(row.fraction_of_limit),
        against,
    ]


def _since(run: str, row: Row) -> tuple[str, Row] | None:
    """The newest later run with ours in that case, and the row: of those with a peer, if there are any."""
    created = journal(run).header.created
    found = [
        (x.best_baseline is not None, journal(name).header.created, name, x)
        for name in _later(created, f"{row.operator}/{row.case}")
        for x in rows_of(name)
        if (x.operator, x.case, x.implementation, x.cache)
        == (row.operator, row.case, row.implementation, row.cache)
        and x.value() is not None
    ]
    newest = max(found, key=lambda x: x[:3], default=None)
    return None if newest is None else newest[2:]


def _later(created: str, case: str) -> Iterator[str]:
    """Runs on a GPU since then that were asked for a case."""
    for name, at, cases in _asked():
        if at > created and case in cases:
            yield name


@functools.cache
def _asked() -> tuple[tuple[str, str, frozenset[str]], ...]:
    """Each run on a GPU, when it was made, and the cases that it was asked for."""
    found: dict[str, tuple[str, set[str]]] = {}
    for path in sorted(JOURNALS.glob("*.jsonl.gz")):
        header = read_header(path)
        if header is not None and header.device == "cuda":
            name = path.name.partition(".")[0]
            cases = found.setdefault(name, (header.created, set()))[1]
            cases |= {x.full_name for x in header.request.cases}
    return tuple((name, created, frozenset(cases)) for name, (created, cases) in found.items())


def _spec(run: str, row: Row) -> str:
    made: Journal = journal(run)
    return next(x.case.spec for x in made.records if (x.case.operator, x.case.name) == (row.operator, row.case))
