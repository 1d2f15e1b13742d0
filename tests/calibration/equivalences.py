"""How often the rule for equivalence is wrong, and how often it finds what is there. Prints tables in Markdown.

Paired relative differences are drawn around a truth that is a multiple of the margin, spread as a share of it, in
five distributions; the code that decides is what ships.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from kernelmark.registry.detection.equivalence import equivalent
from kernelmark.registry.store.metric import Equivalence
from numpy.typing import NDArray

MARGIN = 0.0025
"""That of a loss between two precisions: a quarter of a per cent."""
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def _correlated(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Autocorrelation .3, as of seeds that run one after the other on a machine that drifts. Variance 1."""
    out = generator.normal(size=count)
    for i in range(1, count):
        out[i] = 0.3 * out[i - 1] + np.sqrt(1 - 0.3**2) * out[i]
    return out


KINDS: dict[str, Draw] = {
    "normal": lambda generator, count: generator.normal(size=count),
    "heavy tails": lambda generator, count: generator.standard_t(3, count) / np.sqrt(3),
    "skewed": lambda generator, count: generator.exponential(size=count) - 1,
    "skewed the other way": lambda generator, count: 1 - generator.exponential(size=count),
    "autocorrelation .3": _correlated,
}
"""Differences with mean 0 and variance 1."""
COUNTS = (5, 10, 20)
SPREADS = (0.3, 1.0)
"""Standard deviation of a pair's difference, in margins."""


def outcomes(draw: Draw, truth: float, spread: float, pairs: int, number: int, seed: object) -> Counter[str]:
    """What is said of so many rows whose true difference is `truth` margins."""
    generator = np.random.default_rng(seed)  # type: ignore[arg-type]  # a sequence of numbers
    rule = Equivalence(MARGIN)
    found: Counter[str] = Counter()
    for _ in range(number):
        current = 1 + MARGIN * (truth + spread * draw(generator, pairs))
        found[equivalent((1.0,) * pairs, tuple(current), rule).kind] += 1
    return found


def lines(number: int, seed: int) -> Iterator[str]:
    """Markdown, line by line."""
    yield "| differences are | pairs | spread, in margins | called equivalent | called worse | called better |"
    yield "|---|--:|--:|--:|--:|--:|"
    for i, (kind, draw) in enumerate(KINDS.items()):
        for pairs in COUNTS:
            for spread in SPREADS:
                said = outcomes(draw, 1.0, spread, pairs, number, (seed, i, pairs, int(10 * spread)))
                shares = (f"{said[x] / number:.1%}" for x in ("equivalent", "worse", "better"))
                yield f"| {kind} | {pairs} | {spread:g} | {' | '.join(shares)} |"
    yield ""
    yield "| true difference, in margins | pairs | spread, in margins | equivalent | worse | inconclusive |"
    yield "|---|--:|--:|--:|--:|--:|"
    for truth in (0.0, 0.5, 2.0):
        for pairs in COUNTS:
            for spread in SPREADS:
                said = outcomes(
                    KINDS["normal"], truth, spread, pairs, number, (seed, pairs, int(10 * spread), int(10 * truth))
                )
                shares = (f"{said[x] / number:.1%}" for x in ("equivalent", "worse", "inconclusive"))
                yield f"| {truth:g} | {pairs} | {spread:g} | {' | '.join(shares)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="How often the rule for equivalence is wrong, and its power.")
    parser.add_argument("--rows", type=int, default=4000, help="rows a cell")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    start = time.monotonic()
    for line in lines(chosen.rows, chosen.seed):
        print(line, flush=True)
    print(f"\nSeed {chosen.seed}, {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    main()
