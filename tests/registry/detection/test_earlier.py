"""What earlier runs say: which of their means count, and the noise that is kept for the next comparison."""

from __future__ import annotations

import pytest
from kernelmark.registry.detection.comparison import Noise
from kernelmark.registry.detection.decision import Progress
from kernelmark.registry.detection.earlier import Mean, joined, noise_seen, run_means, unchanged, with_noise
from kernelmark.registry.detection.verdict import Verdict
from kernelmark.registry.store.index import Spreads
from kernelmark.registry.store.processes import Processes
from kernelmark.registry.store.record import Key

KEY = Key("gelu", "M4", "kernelmark", "cold")
NAN = float("nan")


def mean(ms: float = 1.0, processes: int = 3, definition: str = "5bec/events") -> Mean:
    return Mean(ms, processes, "kernelmark", definition)


def test_a_mean_is_trimmed_and_leaves_out_processes_without_a_value() -> None:
    rows = {KEY: Processes((1.0, 1.0, NAN, 1.0, 1.0, 50.0), "kernelmark", "5bec/events")}
    assert run_means(rows) == {KEY: Mean(pytest.approx(1.0), 5, "kernelmark", "5bec/events")}


def test_unchanged_runs_measured_the_same_often_enough() -> None:
    runs = [mean(), mean(definition="else"), mean(processes=2), mean(1.1)]
    found = unchanged([{KEY: x} for x in runs], {KEY: mean()}, processes=3)
    assert found[KEY].runs == (1.0, 1.1)
    other = Key("gelu", "M8", "kernelmark", "cold")
    both = joined({other: found[KEY]}, found)
    assert both[KEY].runs == (1.0, 1.1)
    assert both[other].runs == ()


def test_noise_is_remembered_and_kept_short() -> None:
    spreads: Spreads = {}
    for number in range(12):
        verdict = Verdict(KEY, "no change", "", noise=Noise(1e-4 * (number + 1), 4.0))
        spreads = with_noise(spreads, Progress((verdict,)))
    noise = noise_seen(spreads)[KEY].noise
    assert [round(x.variance * 1e4) for x in noise] == list(range(3, 13))
