"""The losses of the first steps: the rate that they are taken at, and what is left of it."""

from __future__ import annotations

import pytest
from kernelmark.suite.workloads import _followed as followed
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._recipe import HYPERPARAMETERS


class Noting:
    """A trainer that notes weights, rates and tokens."""

    def __init__(self):
        self.hyperparameters = dict(HYPERPARAMETERS)
        self.noted = []

    def load(self, weights):
        self.noted.append(("load", *weights))

    def step(self, tokens, targets):
        self.noted.append((tokens, targets, self.hyperparameters["lr"]))
        return 10.0 - tokens


def test_the_rate_rises_from_nothing_and_is_the_recipe_s_again():
    trainer = Noting()
    found = followed.losses(trainer, iter([("norm", 1)]), lambda i: (i, -i), 4)
    assert found == [10.0, 9.0, 8.0, 7.0]
    assert trainer.noted[0] == ("load", ("norm", 1))
    assert [x[:2] for x in trainer.noted[1:]] == [(0, 0), (1, -1), (2, -2), (3, -3)]
    assert [x[2] for x in trainer.noted[1:]] == pytest.approx([5e-5, 1e-4, 1.5e-4, 2e-4])
    assert trainer.hyperparameters == HYPERPARAMETERS


def test_only_cases_that_are_followed_are_defined_by_it():
    """Rows of others keep the definition that they were recorded under."""
    one, two = (
        train.WORKLOAD.case(
            {"B": 1, "S": 64, "gpus": 2, "follow": steps}, "fp32", "program", model="llama-tiny", parallel="ddp"
        )
        for steps in (0, 8)
    )
    assert followed.losses not in train.WORKLOAD.computes(one)
    assert followed.losses in train.WORKLOAD.computes(two)
    assert one.spec != two.spec
