"""The noise that the detector is calibrated against: what an unlocked GPU and its host do to timings.

All magnitudes are standard deviations of log time and are multiplied by `scale`. They are set above what one
H200 with unlocked clocks showed (between processes 0.1 to 0.3 % for large kernels, 2.5 % for the smallest;
within a process 3 to 10 %, nearly all of it one-sided outliers), so that the printed error rates are not
flattered. Every case draws its own magnitudes; a session is a run of processes in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from kernelmark.suite.compare.interleaved import balanced
from numpy.typing import NDArray

Floats = NDArray[np.floating]

ITERATIONS = 50
AUTOCORRELATION = 0.5
OUTLIERS = 0.04
OUTLIER_SIZE = 0.25
BAD_PROCESSES = 0.02
BAD_SIZE = 0.10
STATE_MEMORY = 0.8
"""Correlation of the machine's state between neighbouring processes."""
DRIFTING = 0.20
DRIFT = 0.02
BIMODAL = 0.10
MODE_GAP = 0.03
MODE_SWITCH = 0.15


@dataclass(frozen=True)
class Cases:
    """What stays the same of each case of one suite on one device."""

    within: Floats
    between: Floats
    state: Floats
    run: Floats
    drift: Floats
    gap: Floats

    def __len__(self) -> int:
        return len(self.within)


def draw_cases(generator: np.random.Generator, count: int, scale: float) -> Cases:
    """Draws the magnitudes of each case's noise, all multiplied by `scale`."""
    return Cases(
        within=scale * generator.uniform(0.01, 0.03, count),
        between=scale * generator.uniform(0.003, 0.008, count),
        state=scale * generator.uniform(0.002, 0.005, count),
        run=scale * generator.uniform(0.003, 0.010, count),
        drift=scale * DRIFT * (generator.random(count) < DRIFTING),
        gap=scale * MODE_GAP * (generator.random(count) < BIMODAL),
    )


def session(generator: np.random.Generator, cases: Cases, processes: int) -> Floats:
    """Log process medians of one session in the order the processes ran: (cases, processes), no run effect."""
    shape = (len(cases), processes)
    wide = (slice(None), None)
    iterations = _autoregressive(generator, (*shape, ITERATIONS), AUTOCORRELATION) * cases.within[:, None, None]
    slow = generator.random(iterations.shape, dtype=np.float32) < OUTLIERS
    iterations[slow] += generator.exponential(OUTLIER_SIZE, int(slow.sum()))
    medians = np.median(iterations, axis=2)
    medians += cases.between[wide] * generator.standard_normal(shape)
    # The machine's state is common to the suite and each case answers to it in its own strength.
    common = _autoregressive(generator, (1, processes), STATE_MEMORY)
    own = _autoregressive(generator, shape, STATE_MEMORY)
    medians += cases.state[wide] * (common + own) / np.sqrt(2)
    bad = generator.random(shape) < BAD_PROCESSES
    medians[bad] += generator.exponential(BAD_SIZE, int(bad.sum()))
    direction = generator.choice([-1.0, 1.0], (len(cases), 1))
    medians += cases.drift[wide] * direction * np.linspace(-0.5, 0.5, processes)
    switches = generator.random(shape) < MODE_SWITCH
    switches[:, 0] = generator.random(len(cases)) < 0.5
    medians += cases.gap[wide] * (np.cumsum(switches, axis=1) % 2)
    return np.asarray(medians, dtype=np.float64)


def run(generator: np.random.Generator, cases: Cases, processes: int) -> Floats:
    """A session as a stored run is one: on another day, with an effect of its own."""
    effect = cases.run * generator.standard_normal(len(cases))
    return session(generator, cases, processes) + effect[:, None]


def interleaved(generator: np.random.Generator, cases: Cases, pairs: int) -> tuple[Floats, Floats]:
    """Base and current medians of one session whose pairs ran in balanced order, as the command has it."""
    medians = session(generator, cases, 2 * pairs).reshape(len(cases), pairs, 2)
    orders = list(islice(balanced(2, str(generator.integers(1 << 31))), pairs))
    first = np.array([order[0] == 0 for order in orders])
    return np.where(first, medians[..., 0], medians[..., 1]), np.where(first, medians[..., 1], medians[..., 0])


def rounds(generator: np.random.Generator, cases: Cases, arms: int, count: int) -> Floats:
    """Log medians of so many arms in rounds, in balanced order: (cases, arms, rounds)."""
    medians = session(generator, cases, arms * count).reshape(len(cases), count, arms)
    for j, order in enumerate(islice(balanced(arms, str(generator.integers(1 << 31))), count)):
        medians[:, j] = medians[:, j][:, np.argsort(order)]
    return medians.transpose(0, 2, 1)


def blocked(generator: np.random.Generator, cases: Cases, pairs: int) -> tuple[Floats, Floats]:
    """The schedule to avoid: all base processes, then all current ones."""
    medians = session(generator, cases, 2 * pairs)
    return medians[:, :pairs], medians[:, pairs:]


def _autoregressive(generator: np.random.Generator, shape: tuple[int, ...], memory: float) -> Floats:
    """Stationary AR(1) of unit variance along the last axis."""
    from scipy.signal import lfilter

    white = generator.standard_normal(shape, dtype=np.float32)
    white[..., 1:] *= np.float32(np.sqrt(1 - memory**2))
    return np.asarray(lfilter([1.0], [1.0, -memory], white, axis=-1))
