"""Whether one skipped layer shows in logits of products in E4M3, by its size and by its direction.

    python tests/calibration/skipped.py [--layers 32]

A narrow Llama of random weights by our engine on a CPU: in bf16, and with products of layers in E4M3, whole and
without one layer. Printed are the deviation of its logits from the model's in fp32 and from a twin's (in fp32 too,
products rounded to E4M3 as the system's are), which share of the layer `generate` says is missing, and the largest
such share of any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import Chosen
from kernelmark.suite.models.llama import Llama
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _expected, _fp8
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads._generate import PartsGenerates
from torch.nn import functional

SEED, B, S, GIVEN = 7, 2, 40, 8
CPU = torch.device("cpu")
KINDS = {"parts_rowwise": "rowwise", "parts_1x128": "1x128"}


class Measured:
    """The model, the tokens, its logits in fp32, and what skipping each layer does to them."""

    def __init__(self, layers: int) -> None:
        self.catalog = Catalog.default()
        numbers = Llama(
            layers=layers, width=256, heads=4, kv_heads=2, head=64, hidden=704, vocabulary=1024, base=1e4
        )
        self.chosen = Chosen(self.catalog.models["llama"], "narrow", numbers)
        chance = torch.Generator().manual_seed(SEED)
        self.tokens = torch.randint(0, 1024, (B, S + GIVEN), generator=chance)
        self.at = list(range(S - 1, S + GIVEN))
        self.layers = list(range(layers))
        given = self.chosen, "bf16", SEED, self.tokens, self.at, self.catalog
        self.wanted = inference.answer(*given)
        self.changes = inference.without(*given, self.layers)

    def twin(self, kind: str) -> torch.Tensor:
        """Logits in fp32, inputs of layers' products rounded to E4M3."""

        def linear(x: Any, weight: Any, bias: Any = None) -> Any:
            rows = x.flatten(0, -2)
            a = _fp8.rounded(rows, _fp8.scale(rows, kind))
            b = _fp8.rounded(weight, _fp8.scale(weight, kind, True))
            return (a @ b.T).unflatten(0, x.shape[:-1])

        instead: dict[str, Callable[..., Any]] = {
            "linear": linear,
            "loss": lambda x, weight, target: functional.linear(x[self.at], weight),
        }
        with torch.no_grad():
            module = _expected.reference_module(self.chosen, S + GIVEN, self.catalog, CPU, instead)
            inference.fill(module, inference.initial(self.chosen, "bf16", SEED, CPU))
            return torch.stack([module(row[None], row[None]) for row in self.tokens])

    def engine(self, system: System, skipped: int | None) -> torch.Tensor:
        """Logits of our engine, maybe without a layer."""
        last = () if skipped is None else tuple(f"layers.{skipped}.{x}" for x in inference.LAST)
        weights = (
            (name, x * 0 if name in last else x) for name, x in inference.initial(self.chosen, "bf16", SEED, CPU)
        )
        made = PartsGenerates(Assembly(system, self.catalog), 16, "e4m3")
        made.load(self.chosen, B, S, GIVEN + 1, "bf16", weights)
        return made.forced(self.tokens[:, :S], self.tokens[:, S:]).float()

    def shares(self, got: torch.Tensor) -> list[float]:
        """Which share of each layer is missing."""
        return inference.shares(got, self.wanted, self.changes)


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative norm of a deviation."""
    return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted))


def main() -> None:
    """Prints a line a system and layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(1)
    x = Measured(layers)
    sizes = [off(x.wanted + change, x.wanted) for change in x.changes]
    print(f"{layers} layers of width 256; a skipped one alone: {min(sizes):.3f} to {max(sizes):.3f}")
    print(
        "| products | skipped | from the model | from the twin | of the layer missing | of another, at the most |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    systems = [System("torch")]
    systems += [System(name, parts={"fp8_matmul": "kernelmark_cpu"}, precision=name) for name in KINDS]  # type: ignore[arg-type]  # words of `Precision`
    for system in systems:
        twin = x.twin(KINDS[system.name]) if system.name in KINDS else None
        for skipped in (None, 1, layers // 2, layers - 2):
            got = x.engine(system, skipped)
            shares = x.shares(got)
            own = "–" if skipped is None else f"{shares[skipped]:.3f}"
            others = max(abs(y) for i, y in enumerate(shares) if i != skipped)
            beside = "–" if twin is None else f"{off(got, twin):.3f}"
            what = "bf16" if system.name == "torch" else f"E4M3, `{system.name}`"
            where = "none" if skipped is None else str(skipped)
            print(f"| {what} | {where} | {off(got, x.wanted):.3f} | {beside} | {own} | {others:.3f} |")


if __name__ == "__main__":
    main()
