"""Whether peers are as fast here as their authors say: a line for each published figure, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import figures
from ..analysis.published import GPUS, TOLERANCE, Figure, Published, Repeat, repeats
from ..analysis.releases import Releases
from ..analysis.repeated import said
from ..escape import markdown
from ..store.journal import Journal
from ..store.record import baseline

HEADINGS = ("peer", "case", "published", "on", "measured", "speed", "verdict", "version", "source")


def table(
    journals: Iterable[Journal], known: Published, released: Releases, verifications: Sequence[Journal] = ()
) -> str:
    """Every figure with what these runs have on it, then the peers of which none was found."""
    runs = {x.header.run: x for x in journals}
    found = repeats(runs.values(), known.figures)
    lines = [_told(released), "", _line(*HEADINGS), "|---|---|---:|---|---:|---:|---|---|---|"]
    lines += [_row(x, released) for x in found]
    lines += ["", "No published figure:", ""]
    lines += [f"- {', '.join(f'`{y}`' for y in x.peers)}: {markdown(x.why)}." for x in known.none]
    if others := _others(runs.values(), known):
        lines.append(f"- {', '.join(markdown(x) for x in others)}: not looked up.")
    rests_on = dict.fromkeys(x.run for x in found if x.run is not None)
    lines += ["", *(f"Run {markdown(x)}: {markdown(said(runs[x], verifications))}." for x in rests_on)]
    return "\n".join(lines).rstrip() + "\n"


def _told(released: Releases) -> str:
    alike = ", ".join(f"{x} ({bandwidth / 1e3:g} TB/s)" for x, (_, bandwidth) in GPUS.items())
    return (
        f"A peer agrees that is within {figures.percent(TOLERANCE)} of what was published of it. "
        f"GPUs that multiply at the same rate are compared: {alike}, SXM modules all. "
        "What computing bounds is compared as it is, what memory bounds as a share of the data sheet's bandwidth: "
        "a speed of 1 is the published one on the run's GPU. "
        f"Newest releases are those of {released.asked}."
    )


def _row(x: Repeat, released: Releases) -> str:
    figure = x.figure
    return _line(
        markdown(figure.peer + (f", by {figure.by}" if figure.by else "")),
        markdown(f"{figure.operator} {figure.case}"),
        _valued(figure.value, figure),
        figure.gpu,
        _valued(x.measured, figure),
        figures.DASH if x.speed is None else f"{x.speed:.2f}",
        markdown(verdict(x)),
        figures.DASH if x.row is None else markdown(released.told(figure.peer, x.row.version, x.created)),
        f"[{figure.date}]({figure.source}), {markdown(figure.where)}",
    )


def verdict(x: Repeat) -> str:
    """Agreed, or by how much not and why; or why nothing can be said."""
    if x.row is None:
        return "not run"
    if x.measured is None:
        if x.row.status != "ok":
            why = x.figure.wrong if x.row.status == "incorrect" else ""
            return f"no time: {x.row.status.replace('_', ' ')}: {x.row.reason}" + (f"; {why}" if why else "")
        return f"no time of {x.figure.over}" if x.figure.over else "no time"
    if x.speed is None:
        return (
            f"not compared: {x.gpu} is of another kind" if x.gpu else "not compared: the run does not say its GPU"
        )
    if x.agrees:
        return "agreed"
    why = (x.figure.less if x.speed < 1 else x.figure.more) or "no reason is recorded"
    return f"not agreed: {figures.signed(x.speed - 1)}; {why}"


def _valued(value: float | None, figure: Figure) -> str:
    if value is None:
        return figures.DASH
    if figure.over:
        return f"{figures.number(value, 3)}× {markdown(figure.over)}"
    return f"{figures.number(value)} {figure.unit}"


def _others(journals: Iterable[Journal], known: Published) -> list[str]:
    """Baselines of these runs that the table does not know: those of a private root. A system that a plan puts
    together has no authors.
    """
    met = set()
    for x in journals:
        systems = {y["name"] for y in x.header.request.systems}
        met |= {y.implementation for y in x.records if baseline(y.provider, y.implementation)} - systems
    return sorted(met - known.peers)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
