"""How far rounding products' inputs to E4M3 alone takes three steps of training from the model's in fp32.

    python tests/calibration/rounding.py --model gpt3-1.3b -B 8 -S 2048 --device cuda --precision 1x128

The answer of workload `train` with `linear` emulated, all else in fp32, beside the answer itself; with
`--base kernelmark` also a system that multiplies by kernels, as `train` steps it. Of the parameters that are
furthest off after three steps: the gradient's relative error at each step, each from the weights that its own
steps made, and that of the change, elements counting by the exact gradient, as in `train`'s check; then the
system's change beside the emulation's. A fault of the system is what it has beside the emulation.

With `--gradients` only the first step's gradients, each kind's: how far the furthest parameters are off, and
the least and the most that any is along the answer's; then how many are over the bound of `train`, and how much
further off they are than by 1x128. `--layers` makes the model as deep.

Above each table the change of the first step, of the parameter that is furthest off, and of three steps, of that
and of all, and how long changes are along the answer's (`_coarse_products`); with `--faults` the same of
optimizers that do something else, by exact gradients.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import BOUNDS
from kernelmark.suite.system import Assembly, Precision, System
from kernelmark.suite.workloads import _expected, _fp8
from kernelmark.suite.workloads._coarse_products import SEEN
from kernelmark.suite.workloads._recipe import HYPERPARAMETERS, Recipe, recipe
from kernelmark.suite.workloads._trainer import PartsTrainer
from kernelmark.suite.workloads.train import WORKLOAD

SHOWN = 4
"""Parameters that are printed of each way to compute."""
PARTS: Mapping[str, Precision] = {"rowwise": "parts_rowwise", "1x128": "parts_1x128"}
KINDS = (*PARTS, "tensorwise", "tensorwise_e5m2")
KIND = "1x128"
"""What the other kinds' scatter of gradients is told beside."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """What one way to compute gave: gradients by step and the weights after them, on the host in fp32."""

    gradients: list[Tensors]
    weights: Tensors


@dataclass(frozen=True)
class Steps:
    """A recipe's first steps, of one seed."""

    r: Recipe
    seed: int
    device: torch.device
    catalog: Catalog

    def initial(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights at the start."""
        return _expected.initial(self.r, self.seed, self.device)

    def by_references(self, instead: Mapping[str, Callable[..., Any]], steps: int = _expected.STEPS) -> Way:
        """In fp32, by the operators' references but for those given."""
        r = self.r
        module = _expected.reference_module(r.chosen, r.S, self.catalog, self.device, instead)
        module.recompute = True
        own = dict(module.named_parameters())
        for name, values in self.initial():
            own[name].data.copy_(values)
        moments = {name: (torch.zeros_like(x.data), torch.zeros_like(x.data)) for name, x in own.items()}
        batches = _expected.Batches(r, self.seed, self.device)
        gradients = []
        for step in range(steps):
            _expected._step(module, own, batches.draw(step), r, keep=False)
            gradients.append(kept({name: x.grad for name, x in own.items()}))
            _expected._update(own, moments, step + 1, self.catalog.operator("adamw").reference)
        return Way(gradients, kept(own))

    def by_system(self, system: System) -> Way:
        """As `train` steps a system."""
        trainer = PartsTrainer(self.r, Assembly(system, self.catalog))
        trainer.load(self.initial())
        batches = _expected.Batches(self.r, self.seed, self.device)
        gradients = []
        for step in range(_expected.STEPS):
            trainer.step(*batches.draw(step))
            gradients.append(kept(trainer.gradients()))
        return Way(gradients, kept(trainer.weights()))


def kept(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """On the host, in fp32."""
    return {name: x.detach().to("cpu", torch.float32, copy=True) for name, x in tensors.items()}


def apart(
    got: Way, wanted: Way, first: Tensors, initial: Tensors, stored: float = 0.0
) -> dict[str, tuple[float, ...]]:
    """By parameter the relative errors of its gradient at each step, and of its change (`changes`)."""
    found = {}
    for name, change in changes(got.weights, wanted.weights, first, initial, stored).items():
        steps = zip(got.gradients, wanted.gradients, strict=True)
        errors = [float((a[name] - b[name]).norm()) / (float(b[name].norm()) or 1.0) for a, b in steps]
        found[name] = (*errors, change)
    return found


def changes(
    got: Tensors, wanted: Tensors, first: Tensors, initial: Tensors, stored: float = 0.0
) -> dict[str, float]:
    """How far each parameter's change is off, of its norm, beyond what storing weights rounds away: a share of
    `stored` of them in a step.
    """
    found = {}
    for name, share in first.items():
        off, way = (float((x * share).norm()) for x in (got[name] - wanted[name], wanted[name] - initial[name]))
        rounds = _expected.STEPS * stored * float((wanted[name] * share).norm())
        found[name] = max(0.0, off - rounds) / (way or 1.0)
    return found


def summed(got: Way, wanted: Way, first: Tensors, initial: Tensors, adamw: Callable[..., Any]) -> str:
    """A line on the first step, by each way's first gradients, and on three."""

    def stepped(gradients: Tensors) -> Tensors:
        return {
            name: adamw(
                [x], [gradients[name]], *([torch.zeros_like(x)] for _ in range(2)), None, 1, **HYPERPARAMETERS
            )[0]
            for name, x in initial.items()
        }

    one = changes(stepped(got.gradients[0]), stepped(first), first, initial)
    return (
        f"the first step {max(one.values()):.3f}; three steps {told(got.weights, wanted.weights, first, initial)}"
    )


def told(got: Tensors, wanted: Tensors, first: Tensors, initial: Tensors) -> str:
    """The change that is furthest off, and of those that weights in bf16 show (`_coarse_products`) the root of the
    mean of the squares, and how long they are along the answer's: the least, the most and on average.
    """
    found = changes(got, wanted, first, initial)
    seen, along = [], []
    for name, share in first.items():
        way = (wanted[name] - initial[name]) * share.abs()
        stored = SEEN * _expected.ROUNDING["bf16"] * (wanted[name] * share).norm()
        if stored < way.norm():
            seen.append(found[name])
            length = ((got[name] - initial[name]) * share.abs() * way).sum() / way.square().sum()
            along.append(float(length))
    lengths = f"along {min(along):.3f} to {max(along):.3f}, on average {fmean(along):.3f}"
    return f"{max(found.values()):.3f}, together {root(seen):.3f}, {lengths}"


def scatter(steps: Steps, kinds: list[str]) -> Iterator[str]:
    """Of the first gradients what each kind's rounding makes, beside what the emulated one does."""
    wanted = steps.by_references({}, 1).gradients[0]
    norm = {name: float(x.norm()) or 1.0 for name, x in wanted.items()}
    ways = {
        kind: steps.by_references({"linear": _fp8.emulated(kind, False)}, 1).gradients[0]
        for kind in (KIND, *(x for x in kinds if x != KIND))
    }
    alone = {name: float((ways[KIND][name] - x).norm()) / norm[name] for name, x in wanted.items()}
    for kind, got in ways.items():
        off = {name: float((got[name] - x).norm()) / norm[name] for name, x in wanted.items()}
        along = {name: float((got[name] * x).sum()) / norm[name] ** 2 for name, x in wanted.items()}
        most = max(1.0, median(off[name] / alone[name] for name in off if alone[name]))
        far = {name: off[name] / (most * alone[name]) for name in off if off[name] > BOUNDS["e4m3"].gradient}
        worst = sorted(off, key=lambda name: -off[name])[:SHOWN]
        yield f"  {kind:<16} " + ", ".join(f"{name} {off[name]:.3f}" for name in worst)
        beyond = (
            f"; {len(far)} of {len(off)} over the bound: of {KIND} most {most:.2f} times, beside that one "
            f"{max(far.values(), default=0.0):.2f} at most"
        )
        middle, least, furthest = root(off.values()), min(along.values()), max(along.values())
        yield f"    root mean square {middle:.3f}; along {least:.3f} to {furthest:.3f}{beyond if far else ''}"


def root(errors: Iterable[float]) -> float:
    """Of the mean of their squares."""
    return math.sqrt(fmean(x * x for x in errors))


FAULTS: Mapping[str, Mapping[str, float]] = {
    "one and a half times the rate": {"lr": 1.5 * HYPERPARAMETERS["lr"]},
    "no first moment": {"beta1": 0.0},
    "biases are not corrected": {"step": 1_000_000},
    "no second step": {"left_out": 2},
    "each step is the first": {"step": 1, "forgotten": 1},
}


def faulty(wanted: Way, initial: Tensors, adamw: Callable[..., Any], fault: Mapping[str, float]) -> Tensors:
    """What an optimizer with a fault makes of a way's gradients."""
    given = {**HYPERPARAMETERS, **{x: y for x, y in fault.items() if x in HYPERPARAMETERS}}
    found = {}
    for name, x in initial.items():
        m = v = torch.zeros_like(x)
        for step in range(1, _expected.STEPS + 1):
            if fault.get("left_out") == step:
                continue
            if "forgotten" in fault:
                m = v = torch.zeros_like(x)
            number = int(fault.get("step", step))
            x, m, v = adamw([x], [wanted.gradients[step - 1][name]], [m], [v], None, number, **given)
        found[name] = x
    return found


def table(found: Mapping[str, tuple[float, ...]]) -> Iterator[str]:
    """A line of each parameter that is furthest off."""
    worst = sorted(found, key=lambda name: -found[name][-1])[:SHOWN]
    for name in worst:
        *gradients, change = found[name]
        yield f"    {name:<28} gradients {' '.join(f'{x:.3f}' for x in gradients)}   change {change:.3f}"


def main() -> int:
    """Prints each seed's tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-memory")
    parser.add_argument("-B", type=int, default=4)
    parser.add_argument("-S", type=int, default=256)
    parser.add_argument("--state", default="master32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--precision", choices=KINDS, action="append")
    parser.add_argument("--base", help="a system's parts, beside the emulation")
    parser.add_argument("--faults", action="store_true", help="what optimizers with a fault do too")
    parser.add_argument("--gradients", action="store_true", help="the first step's gradients alone")
    parser.add_argument("--layers", type=int, help="as many in place of the model's")
    asked = parser.parse_args()
    catalog, device = Catalog.default(), torch.device(asked.device)
    torch.set_float32_matmul_precision("highest")
    axes, products = {"B": asked.B, "S": asked.S, "A": 1}, "e4m3"
    case = WORKLOAD.case(axes, "bf16", "program", model=asked.model, state=asked.state, products=products)
    for seed in asked.seed or [1]:
        r = recipe(case, catalog.models)
        if asked.layers:
            deep = replace(r.chosen.configuration, layers=asked.layers)
            r = replace(r, chosen=replace(r.chosen, configuration=deep))
        steps = Steps(r, seed, device, catalog)
        if asked.gradients:
            print(f"{case.full_name}, {r.chosen.configuration.layers} layers, seed {seed}")
            print(*scatter(steps, asked.precision or KINDS), sep="\n", flush=True)
            continue
        initial = kept(dict(steps.initial()))
        wanted = steps.by_references({})
        first, adamw = wanted.gradients[0], catalog.operator("adamw").reference
        for name, fault in FAULTS.items() if asked.faults else ():
            off = told(faulty(wanted, initial, adamw, fault), wanted.weights, first, initial)
            print(f"{case.full_name}, seed {seed}, {name}: three steps {off}", flush=True)
        for kind in asked.precision or KINDS:
            print(f"{case.full_name}, seed {seed}, {kind}")
            rounded = steps.by_references({"linear": _fp8.emulated(kind, False)})
            print("  emulated, from fp32:", summed(rounded, wanted, first, initial, adamw))
            print(*table(apart(rounded, wanted, first, initial)), sep="\n", flush=True)
            if asked.base is None or kind not in PARTS:
                continue
            system = System("measured", base=asked.base, precision=PARTS[kind])
            own, stored = steps.by_system(system), _expected.ROUNDING[case.dtype]
            print(f"  {asked.base}, from fp32:", summed(own, wanted, first, initial, adamw))
            print(*table(apart(own, wanted, first, initial, stored)), sep="\n")
            near = apart(own, rounded, first, initial, stored)
            print(f"  {asked.base}, from the emulation:", *table(near), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
