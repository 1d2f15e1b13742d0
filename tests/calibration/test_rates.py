"""A small table of rates on every test run: loose bounds that a broken rule exceeds; the whole is a command."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from kernelmark.registry.detection import decision
from kernelmark.registry.store.record import Key
from kernelmark.suite.compare import interleaved


@pytest.fixture(scope="module")
def rates() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration_rates", Path(__file__).with_name("rates.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_rates_are_of_what_ships(rates: ModuleType) -> None:
    assert rates.decide is decision.decide
    assert rates.DEFAULTS is decision.DEFAULTS
    assert rates.balanced is interleaved.balanced


def test_rows_of_a_batch_are_compared_as_if_alone(rates: ModuleType) -> None:
    """The same values one by one and together: the same verdicts, and not those of rows that lend their noise."""
    names = rates.keys(12)
    bench = rates.Bench(np.random.default_rng(9), rates.KINDS["3 %"], names, np.full(12, 0.05), 6)
    rows = bench.measure(dict.fromkeys(names, 6))
    with rates.apart(1):
        together = rates.decide(rows, lambda wanted: [], rates.DEFAULTS).verdicts
    one_by_one = tuple(rates.decide([x], lambda wanted: [], rates.DEFAULTS).verdicts[0] for x in rows)
    assert together == one_by_one
    assert rates.decide(rows, lambda wanted: [], rates.DEFAULTS).verdicts != one_by_one


@pytest.mark.parametrize("kind", ["0.3 %", "3 %", "10 %", "bimodal, 15 % apart", "heavy tails, 2 %"])
def test_unchanged_rows_are_hardly_ever_called(rates: ModuleType, kind: str) -> None:
    generator = np.random.default_rng(3)
    assert rates.called(generator, rates.KINDS[kind], 200, 400)[0] <= 2
    assert rates.called(generator, rates.KINDS[kind], 1, 100)[0] <= 1


@pytest.mark.parametrize(("kind", "allowed", "least"), [("0.3 %", 16, 20), ("3 %", 60, 18), ("5 %", 100, 17)])
def test_five_per_cent_are_found(rates: ModuleType, kind: str, allowed: int, least: int) -> None:
    hits = rates.found(np.random.default_rng(4), rates.KINDS[kind], 1, 200, allowed)
    assert 20 * hits >= least


@pytest.mark.parametrize("kind", ["drift of 20 %, 1 %", "second of a pair 4 %, 1 %"])
def test_neither_drift_nor_being_second_looks_like_another_machine(rates: ModuleType, kind: str) -> None:
    names = [Key(f"operator{i % 6}", f"case{i}", "kernelmark", "cold") for i in range(24)]
    generator = np.random.default_rng(5)
    for _ in range(10):
        bench = rates.Bench(generator, rates.KINDS[kind], names, np.zeros(24), 1000)
        kinds = {x.kind for x in bench.compare().verdicts}
        assert kinds <= {"no change", "inconclusive"}
