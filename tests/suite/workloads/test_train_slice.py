"""Models too large for an answer in fp32: systems are checked with their first layers, before and after."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernelmark.baselines import transformers
from kernelmark.registry.store.record import Case
from kernelmark.suite.corpus.manifest import load
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.workloads import _recipe, train
from kernelmark.suite.workloads._trainer import PartsTrainer


@pytest.fixture
def here(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A case of two layers, of which one is checked."""
    monkeypatch.setattr(_recipe, "LARGE_ANSWER", 1)
    monkeypatch.setattr(_recipe, "LARGEST_ANSWER", 1)
    monkeypatch.setattr(_recipe, "CHECKED_LAYERS", 1)
    shared = bench("gpt2-tiny")
    return type(shared)(shared.catalog, "gpt2-tiny", clip=0.0)  # its answer is nobody else's


def test_a_right_system_is_labelled(here: Any) -> None:
    found = here.measure(here.trainer())
    assert found.remarks == ("checked with 1 of its 2 layers",)
    assert found.samples["gradient_error"][0] < 1e-4
    assert found.samples["change_error"][0] < 1e-2
    assert set(here.prepared.expected.changed) < set(
        train.read(here.case).chosen.model.weights(_configuration(here))
    )


def test_a_whole_program_is_checked_too(here: Any) -> None:
    assert here.measure(transformers.train(here.case)).samples["change_error"][0] < 1e-2


class NoOptimizer(PartsTrainer):
    def update(self) -> None:
        """Forgotten."""


class LateNoOptimizer(PartsTrainer):
    """Does all of its work until it is timed."""

    made = 0

    def of(self, recipe: Any) -> PartsTrainer:
        kind = PartsTrainer if type(self).made == 0 else NoOptimizer
        type(self).made += 1
        return kind(recipe, self.assembly)


@pytest.mark.parametrize("kind", [NoOptimizer, LateNoOptimizer])
def test_a_faulty_system_is_found(here: Any, kind: type[PartsTrainer]) -> None:
    with pytest.raises(Incorrect, match="after 3 steps: the change of"):
        here.measure(here.trainer(kind))


class Unbounded(PartsTrainer):
    """Fails with all layers alone."""

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().step(tokens, targets)
        return loss * math.inf if self.recipe.chosen.configuration.layers > 1 else loss


def test_the_whole_model_must_train_too(here: Any) -> None:
    with pytest.raises(Incorrect, match="loss is not finite"):
        here.measure(here.trainer(Unbounded))


def test_a_program_that_takes_no_slice(here: Any) -> None:
    class Own:
        step = PartsTrainer.step

    with pytest.raises(NotImplementedError, match="takes no slice"):
        train.Program(train.read(here.case), Own(), here.session, here.prepared)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("model", "part", "expected"),
    [
        ("llama-3.1-8b", "whole", False),
        ("llama-2-13b", "whole", True),
        ("llama-3.1-70b", "first4", False),
        ("llama-3.1-70b", "first8", True),
    ],
)
def test_which_models_are_checked_in_part(model: str, part: str, expected: bool) -> None:
    assert train.sliced(_case(model, part)) is expected


def test_only_rows_of_large_models_are_known_by_pieces() -> None:
    small, large = (train.WORKLOAD.computes(_case(x, "whole")) for x in ("llama-3.2-3b", "llama-3.1-8b"))
    assert train.prepare in small
    assert train.prepare_large not in small
    assert train.prepare_large in large
    assert train.prepare not in large


def test_an_epoch_is_of_the_corpus(here: Any) -> None:
    assert load().parts["train"].bytes == train.EPOCH


def _case(model: str, part: str) -> Case:
    return train.WORKLOAD.case({"B": 1, "S": 2048}, "bf16", "program", model=model, slice=part)


def _configuration(here: Any) -> Any:
    return train.read(here.case).chosen.configuration
