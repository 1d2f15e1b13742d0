"""Whole programs in `train`: a model of somebody's own class is held to ours, and to its own step's faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernelmark.baselines import transformers
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._whole import WholeTrainer


def test_transformers_own_class_is_right(bench: Any) -> None:
    here = bench("gpt2-tiny", A=2)
    found = here.measure(transformers.train(here.case)).samples
    assert found["loss_error"][0] < 1e-6
    assert found["gradient_error"][0] < 1e-4
    assert found["change_error"][0] < 1e-2


class NoOptimizer(WholeTrainer):
    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        before = {name: x.clone() for name, x in self.weights().items()}
        loss = super().step(tokens, targets)
        for name, x in self.weights().items():
            x.copy_(before[name])
        return loss


class OneMicroBatch(WholeTrainer):
    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().step(tokens[:1], targets[:1])


@pytest.mark.parametrize(("kind", "said"), [(NoOptimizer, "change of"), (OneMicroBatch, "loss is|gradient of")])
def test_a_faulty_step_is_found(bench: Any, kind: type[WholeTrainer], said: str) -> None:
    here = bench("gpt2-tiny", A=2)
    with pytest.raises(Incorrect, match=said):
        here.measure(kind(train.read(here.case), transformers.train(here.case)))


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        ("mamba2-tiny", {}, "trains llama and gpt2, not mamba2"),
        ("gpt2-tiny", {"dtype": "bf16", "state": "master32"}, "no masters"),
        ("gpt2-tiny", {"dtype": "bf16", "state": "muon"}, "optimizer is Muon"),
    ],
)
def test_what_it_lacks(bench: Any, model: str, fields: dict[str, Any], said: str) -> None:
    here = bench(model, **fields)
    with pytest.raises(NotImplementedError, match=said):
        here.measure(transformers.train(here.case))
