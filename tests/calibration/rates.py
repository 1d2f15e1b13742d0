"""How often unchanged rows are called, and how often 5 % is found: for 1, 10 and 200 rows, by kind of noise.

    python tests/calibration/rates.py [--rows N] [--power N] [--seed S]

Each row is one benchmark, simulated process by process in the order that the A/B runs them in, and passed
through the functions that the command line calls. `--rows` is how many unchanged rows each cell of the table
counts (of those compared alone or 200 together five times as many), `--power` how many slowed ones. No decision
is made here.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from unittest import mock

import numpy as np
from kernelmark.registry.detection import noise
from kernelmark.registry.detection.comparison import Comparison, Key, Side
from kernelmark.registry.detection.decision import DEFAULTS, Progress, decide
from kernelmark.suite.compare.interleaved import balanced
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]
"""Log times of so many rows and processes in the order they run."""

CALLED = ("regression", "warning", "improvement", "below the limit")
ROWS = (1, 10, 200)
BATCH = 400
"""So many rows that are compared alone are simulated at a time."""
MORE = 5
"""So many times as many rows are simulated of those that are compared alone or 200 together: they cost less."""
EFFECT = 0.05


def white(sd: float) -> Draw:
    """Processes that vary by so much, independently."""
    return lambda generator, shape: generator.normal(0, sd, shape)


def bimodal(gap: float, sd: float) -> Draw:
    """A process is in one of two states, as clocks and memory layouts make it."""
    return lambda generator, shape: gap * (generator.random(shape) < 0.5) + generator.normal(0, sd, shape)


def heavy(sd: float) -> Draw:
    """Student's t with three degrees of freedom."""
    return lambda generator, shape: sd * generator.standard_t(3, shape)


def sticky(sd: float, memory: float) -> Draw:
    """Neighbouring processes are alike: an autoregression of the first order."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Floats:
        out = generator.normal(0, sd, shape)
        for i in range(1, shape[1]):
            out[:, i] = memory * out[:, i - 1] + np.sqrt(1 - memory**2) * out[:, i]
        return out

    return draw


def drift(whole: float, sd: float) -> Draw:
    """The machine becomes slower by so much over the processes of a stage."""
    return lambda generator, shape: np.linspace(0, whole, shape[1]) + generator.normal(0, sd, shape)


def second(cost: float, sd: float) -> Draw:
    """To be the second of a pair costs so much."""
    return lambda generator, shape: cost * (np.arange(shape[1]) % 2) + generator.normal(0, sd, shape)


KINDS: Mapping[str, Draw] = {
    "0.3 %": white(0.003),
    "1 %": white(0.01),
    "3 %": white(0.03),
    "5 %": white(0.05),
    "10 %": white(0.1),
    "bimodal, 5 % apart": bimodal(0.05, 0.003),
    "bimodal, 15 % apart": bimodal(0.15, 0.01),
    "heavy tails, 2 %": heavy(0.02),
    "autocorrelation .6, 3 %": sticky(0.03, 0.6),
    "drift of 20 %, 1 %": drift(0.2, 0.01),
    "second of a pair 4 %, 1 %": second(0.04, 0.01),
}
POWERS = (("0.3 %", 25), ("1 %", 25), ("3 %", 25), ("3 %", 31), ("5 %", 80), ("bimodal, 5 % apart", 25))
"""Kinds of noise, and how many pairs of a row may be measured in all."""


def keys(rows: int) -> list[Key]:
    """So many rows of four operators: too few to show by themselves that a machine changed."""
    return [Key(f"operator{i % 4}", f"case{i}", "kernelmark", "cold") for i in range(rows)]


def pairs(generator: np.random.Generator, draw: Draw, rows: int, count: int) -> tuple[Floats, Floats]:
    """Base and current log times of so many rows and pairs, in the order that the command measures them in."""
    order = np.array(list(islice(balanced(2, str(generator.integers(1 << 31))), count)))
    logs = draw(generator, (rows, 2 * count)).reshape(rows, count, 2)
    first = order[:, 0] == 0
    return np.where(first, logs[..., 0], logs[..., 1]), np.where(first, logs[..., 1], logs[..., 0])


@dataclass
class Bench:
    """A comparison under way: measures what the detector asks for, as many pairs of a row as are allowed."""

    generator: np.random.Generator
    draw: Draw
    names: Sequence[Key]
    effects: Floats
    allowed: int
    spent: dict[Key, int] = field(default_factory=dict)

    def measure(self, wanted: Mapping[Key, int]) -> list[Comparison]:
        """Fresh pairs; none where they are used up."""
        counts = {key: min(pairs, self.allowed - self.spent.get(key, 0)) for key, pairs in wanted.items()}
        rows = [i for i, key in enumerate(self.names) if counts.get(key, 0) >= 3]
        if not rows:
            return []
        most = max(counts[self.names[i]] for i in rows)
        base, current = (np.exp(x) for x in pairs(self.generator, self.draw, len(rows), most))
        current *= 1 + self.effects[rows][:, None]
        out = []
        for i, b, c in zip(rows, base, current, strict=True):
            key, n = self.names[i], counts[self.names[i]]
            self.spent[key] = self.spent.get(key, 0) + n
            out.append(Comparison(key, Side(medians=tuple(b[:n].tolist())), Side(medians=tuple(c[:n].tolist()))))
        return out

    def compare(self) -> Progress:
        """The whole procedure."""
        return decide(self.measure(dict.fromkeys(self.names, DEFAULTS.pairs)), self.measure, DEFAULTS)


def apart(rows: int) -> contextlib.AbstractContextManager[object]:
    """For one row: those of a batch learn nothing of each other's noise, so that each is compared as if alone."""
    return mock.patch.object(noise, "MINIMUM_OTHERS", math.inf) if rows == 1 else contextlib.nullcontext()


def called(generator: np.random.Generator, draw: Draw, rows: int, number: int) -> tuple[int, int, int, int]:
    """Of some `number` unchanged rows, in comparisons of `rows`: calls, rows that stayed open, pairs of all rows,
    and how many rows it were."""
    size = min(BATCH, number) if rows == 1 else rows
    names, calls, still, spent = keys(size), 0, 0, 0
    comparisons = max(1, number // size)
    for _ in range(comparisons):
        bench = Bench(generator, draw, names, np.zeros(size), 10**6)
        with apart(rows):
            kinds = [x.kind for x in bench.compare().verdicts]
        calls += sum(x in CALLED for x in kinds)
        still += kinds.count("inconclusive")
        spent += sum(bench.spent.values())
    return calls, still, spent, comparisons * size


def found(generator: np.random.Generator, draw: Draw, rows: int, number: int, allowed: int) -> float:
    """How often a lone slowdown of 5 % among `rows` is called slower, within so many pairs of it."""
    size = min(BATCH, number) if rows == 1 else rows
    names, hits = keys(size), 0
    slowed = range(size if rows == 1 else 1)
    effects = np.zeros(size)
    effects[slowed] = EFFECT
    comparisons = number // len(slowed)
    for _ in range(comparisons):
        with apart(rows):
            verdicts = Bench(generator, draw, names, effects, allowed).compare().verdicts
        hits += sum(verdicts[i].kind in ("regression", "warning") for i in slowed)
    return hits / (comparisons * len(slowed))


def lines(number: int, powers: int, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[str]:
    """Markdown, line by line: of unchanged rows a kind of noise a line, and of slowed ones."""
    yield (
        "| processes vary by | called of unchanged rows, compared alone | 10 together | 200 together | "
        "left open | pairs of a lone row |"
    )
    yield "|---|--:|--:|--:|--:|--:|"
    for i, kind in enumerate(kinds):
        cells, still, spent = [], 0.0, 0.0
        for rows in ROWS:
            generator = np.random.default_rng([seed, i, rows])
            of = number if rows == 10 else MORE * number
            calls, inconclusive, used, of = called(generator, KINDS[kind], rows, of)
            cells.append(f"{calls} of {of:,}")
            if rows == 1:
                still, spent = inconclusive / of, used / of
        yield f"| {kind} | {' | '.join(cells)} | {still:.1%} | {spent:.0f} |"
    yield ""
    yield "| processes vary by | pairs in all | finds 5 %, compared alone | 10 together | 200 together | of |"
    yield "|---|--:|--:|--:|--:|--:|"
    for kind, allowed in POWERS:
        if kind in kinds:
            shares = []
            for rows in ROWS:
                many = {1: MORE * powers, 10: powers, 200: max(1, powers // 4)}[rows]
                generator = np.random.default_rng([seed, allowed, rows])
                shares.append(f"{found(generator, KINDS[kind], rows, many, allowed):.3f}")
            of = f"{MORE * powers:,}, {powers}, {max(1, powers // 4)}"
            yield f"| {kind} | {allowed} | {' | '.join(shares)} | {of} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="False calls and power of the A/B, by the number of rows.")
    parser.add_argument(
        "--rows",
        type=int,
        default=8000,
        help="unchanged rows a cell of the table; of those alone or 200 together five times as many",
    )
    parser.add_argument("--power", type=int, default=400, help="slowed rows a cell")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this noise; repeatable")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    for line in lines(chosen.rows, chosen.power, chosen.seed, tuple(chosen.kind or KINDS)):
        print(line, flush=True)
    print(f"\nSeed {chosen.seed}, {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    main()
