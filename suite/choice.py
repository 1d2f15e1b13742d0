"""What of a plan is measured, and how: the options that all commands share which measure one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..registry.errors import InputError
from ..registry.store.record import DeviceKind, Pass
from .catalog import Catalog
from .measure.stopping import TimerName
from .plan import Cell, Plan, load


@dataclass(frozen=True)
class Choice:
    """A plan by name or file; what narrows it, what takes the place of its own cases, and how often and by which
    timer it is measured. What is not given stays as the plan has it.
    """

    plan: str = "quick"
    operators: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    passes: tuple[Pass, ...] = ()
    replicates: int | None = None
    cache: str | None = None
    timer: TimerName | None = None

    def load(self, catalog: Catalog, device: DeviceKind) -> Plan:
        """The plan so chosen. Raises `InputError` for what does not exist, or where nothing is left."""
        plan = load(self.plan, catalog, device, self.operators).but(self.replicates, self.cache, self.timer)
        return plan.at(self.axes, self.dtypes, self.passes, catalog)

    def unbudgeted(self, catalog: Catalog, device: DeviceKind, why: str) -> Plan:
        """As `load`, for what cannot leave out cells by time. Raises `InputError` for a plan with a budget."""
        plan = self.load(catalog, device)
        if plan.budget_s is not None:
            raise InputError(
                f"plan {plan.name!r} has budget_s = {plan.budget_s:g}, a limit for a run in one piece: {why}"
            )
        return plan

    def cells(self, plan: Plan, catalog: Catalog, device: DeviceKind) -> tuple[Cell, ...]:
        """The plan's cells, by the chosen implementations."""
        return plan.cells(catalog, device, self.implementations)

    @property
    def words(self) -> list[str]:
        """The same as options of a command, for a process elsewhere; the plan goes there by itself."""
        lists: Mapping[str, tuple[str, ...]] = {
            "operator": self.operators,
            "implementation": self.implementations,
            "axis": tuple(f"{x}={','.join(map(str, sizes))}" for x, sizes in self.axes.items()),
            "dtype": self.dtypes,
            "pass": self.passes,
        }
        words = [word for option, values in lists.items() for x in values for word in (f"--{option}", x)]
        for option, value in (("replicates", self.replicates), ("cache", self.cache), ("timer", self.timer)):
            words += [] if value is None else [f"--{option}", str(value)]
        return words

    def of_plan(self, name: str) -> Choice:
        """The same of another plan."""
        return replace(self, plan=name)
