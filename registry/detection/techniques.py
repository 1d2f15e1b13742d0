"""What each technique of training buys: time and memory beside the same system without it. Pure.

A technique is what a system says beside its parts: a precision, what is computed again, where optimizer states
lie, how it is executed. Whether it is as good is the verdict of a run of `converge` on the same configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..analysis.peers import Speedup, values_by_replicate
from ..analysis.rows import Row, rows, speedup
from ..store.journal import Journal
from ..store.metric import PEAKS
from ..store.record import EAGER, Header, Key, Record
from .arms import PRIMARY, Arm, Overall, arms

PROGRAMS = ("train", "forward", "generate")
"""Workloads whose rows show a technique's time."""
ACTIVATIONS = "activations"
EXECUTIONS: Mapping[str, str] = {
    "compile": "compile",
    "compile_blocks": "blocks",
    "compile_reduce_overhead": "reduce_overhead",
    "compile_max_autotune": "max_autotune",
    "aot_eager": "aot_eager",
    "cudagraphs": "cudagraphs",
    "graph": "graph",
}
"""The execution of a system that no plan names, by what follows its provider's name."""
MOVED = ("host_copied", "host_streamed")
"""States that lie on the host and are updated on the device, by the same numbers."""


class Setting(msgspec.Struct, frozen=True):
    """How a system trains, as its plan has it; fields that name nothing are empty."""

    base: str
    execution: str = "eager"
    parts: tuple[tuple[str, str], ...] = ()
    precision: str = "case"
    recompute: str = "none"
    states: str = "device"
    changes: tuple[tuple[str, str], ...] = ()

    def change(self, what: str) -> str:
        """What it changes of the recipe; empty where nothing."""
        return dict(self.changes).get(what, "")

    @property
    def plain(self) -> Setting:
        """The same parts in the same execution, without any technique."""
        return Setting(self.base, self.execution, self.parts)

    @property
    def same_numbers(self) -> bool:
        """Whether its technique changes no number of the eager system that it is applied to."""
        moved = self.recompute != "none" or self.states in MOVED
        alone = self.precision == "case" and not self.changes and self.states != "host_updated"
        # By part the norm of a fused addition is made again by the plain norm: of other libraries, another kernel.
        own = not self.recompute.startswith("by_part") or (self.base == EAGER and not self.parts)
        return moved and alone and own and self.execution == "eager"


class Quality(msgspec.Struct, frozen=True):
    """What a run of `converge` says of a configuration."""

    verdict: Overall
    case: str
    step: int | None
    run: str
    arm: Arm
    """Whose verdict it is: it has one for each step too."""


class Bought(msgspec.Struct, frozen=True):
    """A row of a program, beside PyTorch's own and beside the same system without its technique."""

    row: Row
    setting: Setting
    native: Speedup | None = None
    """Over the system `torch` of the case."""
    alike: Row | None = None
    """The same parts in the same execution without the technique; for an execution alone, the eager ones."""
    ratio: Speedup | None = None
    """Over that."""
    memory: float | None = None
    """Peak memory over that one's."""
    activations: float | None = None
    over: Mapping[str, Speedup] = {}
    """Over the case's fp32 and fp16 systems, by these names, for precisions."""
    quality: Quality | None = None


LAYERS = "transformer_engine_layers"
"""Other parts than those of its provider's systems."""
WHOLE: Mapping[str, Setting] = {
    "deepspeed_engine": Setting("deepspeed"),
    "deepspeed_offload": Setting("deepspeed", states="host_updated"),
    "transformer_engine_layers": Setting(LAYERS),
    "transformer_engine_layers_tensorwise": Setting(LAYERS, precision="te_tensorwise"),
    "transformer_engine_layers_delayed": Setting(LAYERS, precision="te_delayed"),
    "transformer_engine_layers_1x128": Setting(LAYERS, precision="te_1x128"),
}
"""Whole programs of which one is another with a technique, by name."""


def settings(header: Header) -> Mapping[str, Setting]:
    """The systems that a run's plan names."""
    found = {}
    for x in header.request.systems:
        plain = {name: str(y) for name, y in x.items() if isinstance(y, str)}
        pairs = {
            name: tuple(sorted(y.items())) if isinstance(y := x.get(name), dict) else ()
            for name in ("parts", "changes")
        }
        found[plain.get("name", "")] = Setting(
            base=plain.get("base", EAGER),
            execution=plain.get("execution", "eager"),
            precision=plain.get("precision", "case"),
            recompute=plain.get("recompute", "none"),
            states=plain.get("states", "device"),
            **pairs,
        )
    return found


def setting(name: str, provider: str, named: Mapping[str, Setting]) -> Setting:
    """A system's, by its plan or, without one, by its name."""
    return (
        named.get(name)
        or WHOLE.get(name)
        or Setting(provider, EXECUTIONS.get(name.removeprefix(f"{provider}_"), "eager"))
    )


def configuration(x: Setting, case: Record | Row) -> str:
    """A hash of all that decides what is learned but model and data: parts, execution, precision, changes, and how
    weights and states are stored. What changes no number does not count.
    """
    of = case.case if isinstance(case, Record) else case
    # `converge` has no such options: it keeps masters beside 16 bits, and clips at 1.
    state = of.options.get("state", "plain" if of.dtype == "fp32" else "master32")
    stored = (of.dtype, state, of.options.get("clip", 1.0))
    states = "device" if x.states in MOVED else x.states
    told = (x.base, x.execution, x.parts, x.precision, states, x.changes, stored)
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def qualities(journals: Iterable[Journal]) -> Mapping[str, Quality]:
    """By configuration, what these runs say of it; of several verdicts that after the most steps."""
    found: dict[str, Quality] = {}
    for journal in journals:
        named = settings(journal.header)
        by_name: dict[tuple[str, str], Record] = {}
        for x in journal.records:
            if x.case.primary == PRIMARY:
                by_name.setdefault((x.case.name, x.implementation), x)
        for arm in arms(journal):
            record = by_name[arm.case, arm.name]
            key = configuration(setting(arm.name, record.provider, named), record)
            step = arm.points[-1].step if arm.points else None
            known = found.get(key)
            if known is None or (step or 0) > (known.step or 0):
                model = str(record.case.options.get("model", arm.case))
                found[key] = Quality(arm.overall, model, step, journal.header.run, arm)
    return found


def bought(journal: Journal, known: Mapping[str, Quality]) -> tuple[Bought, ...]:
    """Every row of a program in a run, in the order of cases."""
    found = [x for x in rows(journal) if x.operator in PROGRAMS]
    named = settings(journal.header)
    values = values_by_replicate(journal, [x for x in found if x.value() is not None])
    cases: dict[tuple[str, str], list[Row]] = {}
    for x in found:
        cases.setdefault((x.operator, x.case), []).append(x)
    return tuple(y for members in cases.values() for y in _case(members, named, values, known))


def _case(
    members: Sequence[Row],
    named: Mapping[str, Setting],
    values: Mapping[Key, Mapping[int, float]],
    known: Mapping[str, Quality],
) -> list[Bought]:
    by_setting: dict[Setting, Row] = {}
    own: dict[Key, Setting] = {}
    for row in members:
        x = own[row.identity] = setting(row.implementation, row.provider, named)
        by_setting.setdefault(x, row)
    bases = {name: _precision(members, own, name) for name in ("fp32", "fp16")}

    def over(base: Row | None, row: Row) -> Speedup | None:
        if base is None or base.identity == row.identity:
            return None
        one, other = values.get(base.identity, {}), values.get(row.identity, {})
        value, low, high = speedup(one, other)
        return None if value is None else Speedup(value, low, high)

    out = []
    for row in members:
        x = own[row.identity]
        without = x.plain if x.plain != x else Setting(x.base, "eager", x.parts)
        alike = by_setting.get(without)
        alike = None if alike is None or alike.identity == row.identity else alike
        peak = next((name for name in PEAKS if name in row.metrics), "")
        precise = x.precision != "case" or x.change("dtype") or any(bases.values())
        out.append(
            Bought(
                row=row,
                setting=x,
                native=over(by_setting.get(Setting(EAGER)), row),
                alike=alike,
                ratio=over(alike, row),
                memory=_over(row, alike, peak),
                activations=_over(row, alike, ACTIVATIONS),
                over={name: y for name, base in bases.items() if precise and (y := over(base, row)) is not None},
                quality=known.get(configuration(x, row)),
            )
        )
    return out


def _precision(members: Sequence[Row], own: Mapping[Key, Setting], dtype: str) -> Row | None:
    """The row of a case whose weights are changed to a dtype."""
    return next((x for x in members if own[x.identity].change("dtype") == dtype), None)


def _over(row: Row, base: Row | None, metric: str) -> float | None:
    """A metric over the base's."""
    one, other = row.value(metric) if metric else None, base.value(metric) if base and metric else None
    return one / other if one is not None and other else None
