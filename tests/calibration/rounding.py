"""How far rounding products' inputs to E4M3 alone takes three steps of training from the model's in fp32.

    python tests/calibration/rounding.py --model gpt3-1.3b -B 8 -S 2048 --device cuda --precision 1x128

The answer of workload `train` with `linear` emulated, all else in fp32, beside the answer itself; with
`--base kernelmark` also a system that multiplies by kernels, as `train` steps it. Of the parameters that are
furthest off after three steps: the gradient's relative error at each step, each from the weights that its own
steps made, and that of the change, elements counting by the exact gradient, as in `train`'s check; then the
system's change beside the emulation's. A fault of the system is what it has beside the emulation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.system import Assembly, Precision, System
from kernelmark.suite.workloads import _expected, _fp8
from kernelmark.suite.workloads._recipe import Recipe, recipe
from kernelmark.suite.workloads._trainer import PartsTrainer
from kernelmark.suite.workloads.train import WORKLOAD

SHOWN = 4
"""Parameters that are printed of each way to compute."""
PARTS: Mapping[str, Precision] = {"rowwise": "parts_rowwise", "1x128": "parts_1x128"}

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

    def by_references(self, instead: Mapping[str, Callable[..., Any]]) -> Way:
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
        for step in range(_expected.STEPS):
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
    """By parameter the relative errors of its gradient at each step, and of its change, beyond what storing
    weights rounds away: a share of `stored` of them in a step.
    """

    def norm(x: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(x))

    found = {}
    for name, share in first.items():
        steps = zip(got.gradients, wanted.gradients, strict=True)
        errors = [norm(a[name] - b[name]) / (norm(b[name]) or 1.0) for a, b in steps]
        change = norm((wanted.weights[name] - initial[name]) * share.abs())
        off = norm((got.weights[name] - wanted.weights[name]) * share.abs())
        rounds = _expected.STEPS * stored * norm(wanted.weights[name] * share)
        found[name] = (*errors, max(0.0, off - rounds) / (change or 1.0))
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
    parser.add_argument("--precision", choices=tuple(PARTS), action="append")
    parser.add_argument("--base", help="a system's parts, beside the emulation")
    asked = parser.parse_args()
    catalog, device = Catalog.default(), torch.device(asked.device)
    torch.set_float32_matmul_precision("highest")
    axes, products = {"B": asked.B, "S": asked.S, "A": 1}, "e4m3"
    case = WORKLOAD.case(axes, "bf16", "program", model=asked.model, state=asked.state, products=products)
    for seed in asked.seed or [1]:
        steps = Steps(recipe(case, catalog.models), seed, device, catalog)
        initial = kept(dict(steps.initial()))
        wanted = steps.by_references({})
        first = wanted.gradients[0]
        for kind in asked.precision or PARTS:
            print(f"{case.full_name}, seed {seed}, {kind}")
            rounded = steps.by_references({"linear": _fp8.emulated(kind, False)})
            print("  emulated, from fp32:", *table(apart(rounded, wanted, first, initial)), sep="\n", flush=True)
            if asked.base is None:
                continue
            system = System("measured", base=asked.base, precision=PARTS[kind])
            own, stored = steps.by_system(system), _expected.ROUNDING[case.dtype]
            print(f"  {asked.base}, from fp32:", *table(apart(own, wanted, first, initial, stored)), sep="\n")
            near = apart(own, rounded, first, initial, stored)
            print(f"  {asked.base}, from the emulation:", *table(near), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
