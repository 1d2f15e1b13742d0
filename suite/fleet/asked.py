"""From what a user asks for to an order, with everything checked that this machine can know."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.record import Case, DeviceKind
from .. import shards
from ..catalog import Catalog
from ..choice import Choice
from ..plan import BUILTIN, Plan
from ..run.supervisor import new_run
from .order import Container, EngineName, Order, salt

SHARDS = 16
"""Parts of a plan by default, where it has so many cases: enough that a host's death costs little."""
NO_CONTROL = "none"


@dataclass(frozen=True)
class Asked:
    """What is measured, and what its shards need."""

    choice: Choice
    device: DeviceKind
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
        return self.choice.unbudgeted(catalog, self.device, shards.EACH_ITS_OWN)

    def measured(self, catalog: Catalog) -> Plan:
        """The plan, narrowed, with the cases alone that a run of it measures."""
        plan = self.loaded(catalog)
        return shards.measured(plan, self.choice.cells(plan, catalog, self.device))

    def too_large(self, plan: Plan) -> tuple[Case, ...]:
        """The cases that need more GPUs than a shard has: their rows will be `unsupported`."""
        return tuple(x for x in plan.cases if self.device == "cuda" and x.world > self.gpus_per_shard)

    def order(
        self, engine: EngineName, count: int | None, catalog: Catalog, home: Home, plan: Plan, by_seed: bool = True
    ) -> Order:
        """The order of a run in so many shards; `plan` is that of `measured`, or what a comparison measures,
        which is not cut `by_seed`.
        """
        cells = self.choice.cells(plan, catalog, self.device)
        number = count or min(SHARDS, shards.most(plan, cells) if by_seed else len(plan.cases))
        control = None
        if self.control != NO_CONTROL and number > 1:
            large = {x.full_name for x in self.too_large(plan)}
            fit = replace(plan, cases=tuple(x for x in plan.cases if x.full_name not in large))
            control = self.control or shards.control_case(fit if fit.cases else plan, cells)
        seconds = shards.seconds(plan, cells, number, control, by_seed=by_seed)
        file = None if self.choice.plan in BUILTIN else Path(self.choice.plan)
        return Order(
            run=new_run(),
            engine=engine,
            shards=number,
            plan=self.choice.plan if file is None else file.name,
            plan_text=None if file is None else file.read_text(encoding="utf-8"),
            device=self.device,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            seconds=tuple(x * plan.replicates for x in seconds),
            salt=salt(home),
            arguments=tuple(self.choice.words),
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
