"""From what a user asks for to an order, with everything checked that this machine can know."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...registry.errors import InputError
from ...registry.store.home import Home
from .. import shards
from ..catalog import Catalog
from ..measure.stopping import TimerName
from ..plan import BUILTIN, Plan, load
from ..run.supervisor import new_run
from .order import Container, EngineName, Order, salt

SHARDS = 16
"""Parts of a plan by default, where it has so many cases: enough that a host's death costs little."""
NO_CONTROL = "none"


@dataclass(frozen=True)
class Asked:
    """A plan by name or file, what narrows it, and what its shards need."""

    plan: str
    device: Literal["cuda", "cpu"]
    operators: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    replicates: int | None = None
    cache: str | None = None
    timer: TimerName | None = None
    seed: int | None = None
    control: str | None = None
    """operator/case, `none`, or None: the one that is fit."""
    image: str | None = None
    container: Literal["docker", "pyxis", "apptainer"] | None = None
    gpus_per_shard: int = 1
    shared: bool = False
    address: str | None = None
    options: tuple[str, ...] = ()

    def loaded(self, catalog: Catalog) -> Plan:
        """The plan, narrowed. Raises `InputError` for one with a budget, which is for a run in one piece."""
        plan = load(self.plan, catalog, self.device, self.operators)
        if plan.budget_s is not None:
            raise InputError(
                f"plan {plan.name!r} has budget_s = {plan.budget_s:g}, a limit for a run in one piece: shards "
                f"would each leave out rows by themselves. Take it out of the plan; --operator or fewer cases "
                f"make a run shorter."
            )
        return plan.but(self.replicates, self.cache, self.timer)

    def measured(self, catalog: Catalog) -> Plan:
        """The plan, narrowed, with the cases alone that a run of it measures."""
        plan = self.loaded(catalog)
        return shards.measured(plan, plan.cells(catalog, self.device, self.implementations))

    def order(self, engine: EngineName, count: int | None, catalog: Catalog, home: Home, plan: Plan) -> Order:
        """The order of a run in so many shards; `plan` is that of `measured`, or what a comparison measures."""
        cells = plan.cells(catalog, self.device, self.implementations)
        number = count or min(SHARDS, len(plan.cases))
        control = None
        if self.control != NO_CONTROL and number > 1:
            control = self.control or shards.control_case(plan, cells)
        seconds = shards.seconds(plan, cells, number, control)
        words = [x for value in self.operators for x in ("--operator", value)]
        words += [x for value in self.implementations for x in ("--implementation", value)]
        for option, given in (("replicates", self.replicates), ("cache", self.cache), ("timer", self.timer)):
            words += [] if given is None else [f"--{option}", str(given)]
        file = None if self.plan in BUILTIN else Path(self.plan)
        return Order(
            run=new_run(),
            engine=engine,
            shards=number,
            plan=self.plan if file is None else file.name,
            plan_text=None if file is None else file.read_text(encoding="utf-8"),
            device=self.device,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            seconds=tuple(x * plan.replicates for x in seconds),
            salt=salt(home),
            arguments=tuple(words),
            control=control,
            image=self.image,
            container=self._container(engine),
            gpus=self.gpus_per_shard if self.device == "cuda" else 0,
            exclusive=not self.shared,
            options=self.options,
            address=self.address,
        )

    def _container(self, engine: EngineName) -> Container:
        if self.image is None:
            if self.container is not None:
                raise InputError(f"--container {self.container} needs --image.")
            return "none"
        if "sha256:" not in self.image:
            raise InputError(f"--image {self.image}: by digest, so that every host runs the same: name@sha256:…")
        if self.container in ("pyxis", "apptainer") and engine != "slurm":
            raise InputError(f"--container {self.container} is Slurm's; on {engine} it is docker.")
        # A pod is the container.
        return "none" if engine == "kubernetes" else self.container or "docker"
