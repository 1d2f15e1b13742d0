"""Servers: the newest row of each load on each device, what they say together, and how latencies are spread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .. import figures
from ..store.record import GPUS, Key
from ..views.looks import Series, palette
from ..views.serving import OPERATOR, Picture, Pictures, Probes, Spread, pictures
from .drawing import NARROW
from .facts import Fact, Run
from .timeline import Measured

LENGTHS = {"requests": "requests", "input": "tokens in", "output": "out"}
LOADS = ("rate", "users", "requests")
"""Axes that say how a server is loaded; what is served is in the others."""
QUARTER = 310
"""Pixels of a distribution's width, of which each load has four."""


def loaded(axes: Mapping[str, int], options: Mapping[str, object]) -> str:
    """What a load is: requests by a schedule, a search for the highest rate of them, or users who wait for their
    answers.
    """
    users, rate = axes.get("users", 0), axes.get("rate", 0) / 1000
    if users:
        return figures.counted(users, "user")
    if options.get("load") == "search":
        return f"search from {rate:g} requests/s"
    return f"{rate:g} requests/s, {options.get('load')}"


def served_as(axes: Mapping[str, int], options: Mapping[str, object]) -> str:
    """The same of how many requests, and of what lengths."""
    rest = [f"{axes[name]:,} {told}" for name, told in LENGTHS.items() if axes.get(name)]
    return ", ".join((loaded(axes, options), *rest))


def asked(objective: str) -> str:
    """What an objective asks: `2000-100` has the limits of first token and time a token in ms."""
    # ASCII alone: "²" is a digit that `int` does not take.
    known = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", objective)
    if known is None:
        return ""
    first, each = map(int, known.groups())
    return f"first token within {first:,} ms, a token within {each:,} ms"


@dataclass(frozen=True)
class Load:
    """A server's row: the newest of its load on its device."""

    run: Run
    fact: Fact

    def value(self, metric: str) -> float | None:
        """A metric's value."""
        number = self.fact.metrics.get(metric)
        return number[0] if number else None

    @property
    def told(self) -> str:
        """What the load is, in words."""
        return loaded(self.fact.axes, self.fact.options)

    @property
    def objective(self) -> str:
        """What its objective asks, in words; empty where it has none."""
        return asked(str(self.fact.options.get("slo", "none")))

    @property
    def of_user(self) -> float | None:
        """Tokens/s that one user sees, 1/TPOT."""
        each = self.value("tpot")
        return 1000 / each if each else None

    @property
    def of_gpu(self) -> float | None:
        """Output tokens/s a GPU."""
        every = self.value("output_per_s")
        return None if every is None else every / max(1, self.fact.axes.get(GPUS, 1))


@dataclass(frozen=True)
class Served:
    """What is served on a device, by all servers under all loads."""

    device: str
    what: str
    loads: tuple[Load, ...]
    pictures: Pictures
    looks: Mapping[str, Series]

    @property
    def spreads(self) -> dict[str, list[Picture]]:
        """Distributions by what the load is."""
        told = {x.fact.case: x.told for x in self.loads}
        out: dict[str, list[Picture]] = {}
        for x in self.pictures.spreads:
            out.setdefault(told[x.of], []).append(x)
        return out

    @property
    def objectives(self) -> dict[str, str]:
        """What each objective of its loads asks."""
        return {str(x.fact.options["slo"]): x.objective for x in self.loads if x.objective}

    @property
    def rates(self) -> int:
        """How many rates of requests there are: a curve takes two."""
        return len({x.fact.axes["rate"] for x in self.loads if x.fact.axes.get("rate")})


def served(
    measured: Iterable[Measured],
    spreads: Mapping[str, Sequence[Spread]],
    probes: Mapping[str, Sequence[Probes]] = MappingProxyType({}),
) -> tuple[Served, ...]:
    """GPUs before processors, and of a device what was asked by most loads first; from all facts in order, oldest
    first, and by each run's name its distributions and what searches tried.
    """
    newest: dict[tuple[str, Key], Load] = {}
    for run, fact in measured:
        if fact.operator == OPERATOR and run.arm is None and fact.number is not None:
            newest[run.device, fact.identity] = Load(run, fact)
    groups: dict[tuple[str, str], list[Load]] = {}
    for load in newest.values():
        groups.setdefault((load.run.device, _what(load.fact)), []).append(load)
    return tuple(
        _served(device, what, sorted(found, key=_place), spreads, probes)
        for (device, what), found in sorted(groups.items(), key=_first)
    )


def _first(group: tuple[tuple[str, str], Sequence[Load]]) -> tuple[bool, str, int, str]:
    (device, what), found = group
    return found[0].run.kind == "cpu", device, -len(found), what


def _served(
    device: str,
    what: str,
    loads: Sequence[Load],
    spreads: Mapping[str, Sequence[Spread]],
    probes: Mapping[str, Sequence[Probes]],
) -> Served:
    places = {x.fact.identity: x for x in loads}

    def link(key: Key) -> str:
        return places[key].run.row(places[key].fact.place)

    rows = [x.fact.row(every=True) for x in loads]
    looks = palette(rows)
    mine = (y for x in loads for y in spreads.get(x.run.name, ()) if y.key == x.fact.identity)
    tried = [y for x in loads for y in probes.get(x.run.name, ()) if y.key == x.fact.identity]
    drawn = pictures(rows, mine, looks, link, NARROW, lambda key: places[key].run.name, tried, QUARTER)
    return Served(device, what, tuple(loads), drawn, looks)


def _what(fact: Fact) -> str:
    """What is served: model, lengths, interface, and on how many GPUs."""
    options = [str(y) for x, y in fact.options.items() if x not in ("load", "slo")]
    axes = [f"{x} {y:,}" for x, y in fact.axes.items() if x not in LOADS]
    return " · ".join((*options, *axes, fact.dtype))


def _place(load: Load) -> tuple[bool, int, int, bool, str]:
    axes = load.fact.axes
    return (
        not axes.get("users"),
        axes.get("users", 0),
        axes.get("rate", 0),
        not load.fact.ours,
        load.fact.implementation,
    )
