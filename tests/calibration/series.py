"""How often a history has a change point that is none, and how often a step is found: by kind of noise.

    python tests/calibration/series.py [--series N] [--seed S]

Each series is one benchmark over so many commits, a value a commit, passed through the function that `kernelmark
history` calls. No change is found here otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from kernelmark.registry.detection.changepoints import change_points
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Draw = Callable[[np.random.Generator, int], Floats]
"""Log times of so many commits."""

STEP = 0.1
"""What a planted change makes slower, from the commit of its place on."""
BEFORE, AFTER = 20, 20
ODD = 0.4


def white(sd: float) -> Draw:
    """Runs that vary by so much, independently."""
    return lambda generator, commits: generator.normal(0, sd, commits)


def sticky(sd: float, memory: float) -> Draw:
    """Neighbouring runs are alike: an autoregression of the first order, as machines' states last over commits."""

    def draw(generator: np.random.Generator, commits: int) -> Floats:
        out = generator.normal(0, sd, commits)
        for i in range(1, commits):
            out[i] = memory * out[i - 1] + np.sqrt(1 - memory**2) * out[i]
        return out

    return draw


def with_odd(draw: Draw, share: float) -> Draw:
    """Some runs are odd, slower by `ODD`."""

    def odd(generator: np.random.Generator, commits: int) -> Floats:
        return draw(generator, commits) + np.log1p(ODD) * (generator.random(commits) < share)

    return odd


KINDS: Mapping[str, Draw] = {
    "0.5 %": white(0.005),
    "3 %": white(0.03),
    "0.5 %, one run in 20 odd": with_odd(white(0.005), 0.05),
    "autocorrelation .6, 0.7 %": sticky(0.007, 0.6),
    "autocorrelation .6, 3 %": sticky(0.03, 0.6),
}
LENGTHS = (40, 100)
"""Commits of a series without a change."""
STEPS = ("0.5 %", "0.5 %, one odd run", "0.5 %, one run in 20 odd", "3 %", "autocorrelation .6, 0.7 %")


def false_series(generator: np.random.Generator, draw: Draw, commits: int, number: int) -> int:
    """Of so many series without a change, those in which one is found."""
    return sum(bool(change_points(np.exp(draw(generator, commits)).tolist(), generator)) for _ in range(number))


def found(generator: np.random.Generator, kind: str, number: int) -> int:
    """Of so many series with a step, those in which it is found where it is, give or take a commit."""
    hits = 0
    for _ in range(number):
        one_odd = kind == "0.5 %, one odd run"
        logs = KINDS["0.5 %" if one_odd else kind](generator, BEFORE + AFTER)
        logs[BEFORE:] += np.log1p(STEP)
        if one_odd:
            logs[generator.integers(len(logs))] += np.log1p(ODD)
        points = change_points(np.exp(logs).tolist(), generator)
        hits += any(abs(x.index - BEFORE) <= 1 for x in points)
    return hits


def lines(number: int, seed: int) -> Iterator[str]:
    """Markdown, line by line: of series without a change a kind of noise a line, and of those with a step."""
    yield f"| runs vary by | {' | '.join(f'{x} commits' for x in LENGTHS)} |"
    yield "|---|--:|--:|"
    for i, (kind, draw) in enumerate(KINDS.items()):
        counts = [
            f"{false_series(np.random.default_rng([seed, i, x]), draw, x, number)} of {number:,}" for x in LENGTHS
        ]
        yield f"| {kind} | {' | '.join(counts)} |"
    yield ""
    yield f"| runs vary by | a step of {STEP:.0%} after {BEFORE} of {BEFORE + AFTER} commits is found |"
    yield "|---|--:|"
    for i, kind in enumerate(STEPS):
        yield f"| {kind} | {found(np.random.default_rng([seed, 100 + i]), kind, number)} of {number:,} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="False and found change points of histories.")
    parser.add_argument("--series", type=int, default=1000, help="a cell of the tables")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    for line in lines(chosen.series, chosen.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
