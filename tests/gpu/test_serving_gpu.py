"""Continuous batching on a GPU, launched ahead of what is read: answers are those of each request by itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads._serving.engine import Engine
from kernelmark.suite.workloads._serving.protocol import Wanted
from kernelmark.suite.workloads._serving.scheduler import Scheduler
from kernelmark.suite.workloads._serving.wire import Made

from ..serving.alone import alone

CUDA = torch.device("cuda")


def engine(model: str, execution: str, sequences: int, cached: int) -> Engine:
    catalog, system = Catalog.default(), System("torch_served", base="torch", execution=execution)
    found = chosen(catalog.models, model)
    weights = inference.initial(found, "fp32", 3, CUDA)
    made = Engine(Assembly(system, catalog), found, "fp32", weights, sequences, 96, 16, cached)
    made.capture()
    return made


def drawn_requests(drawn: random.Random, warm: bool) -> list[Wanted]:
    """Neighbours of one length and others; half of them may end by a token."""
    found = []
    for i in range(70):
        prompt = tuple(drawn.randrange(512) for _ in range(drawn.choice((7, 7, 7, drawn.randint(1, 50)))))
        temperature = drawn.choice((0.0, 0.0, 3.0)) if warm else 0.0
        found.append(Wanted(prompt, drawn.randint(1, 40), temperature, i, True, True, False, i % 2 == 0, False))
    return found


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny", "mamba2-tiny"])
@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("warm", [False, True])
def test_answers_do_not_depend_on_what_runs_beside(model: str, execution: str, warm: bool) -> None:
    """Rows and pages are too few for all: what a sequence leaves is another's while a pass of it is under way."""
    drawn = random.Random(f"{model}/{execution}/{warm}")
    asked = drawn_requests(drawn, warm)
    e = engine(model, execution, 40, cached=1600)
    may_end = [x for x in asked if not x.ignore_eos][:10]
    end = Counter(y for x in may_end for y in alone(e, x, -1)[:-1]).most_common(1)[0][0]
    found: list[list[int]] = [[] for _ in asked]

    def emit(made: list[Made]) -> None:
        for x in made:
            found[x.number].extend(x.tokens)

    scheduler = Scheduler(e, end, emit)
    left = set()
    for number, x in enumerate(asked):
        scheduler.add(number, x)
        if drawn.random() < 0.4:
            scheduler.turn()
        if drawn.random() < 0.1:
            left.add(gone := drawn.randint(0, number))
            scheduler.give_up(gone)
    for _ in range(5000):
        if scheduler.busy:
            scheduler.turn()
    assert not scheduler.busy
    assert not e.held
    assert any(len(found[i]) < x.output for i, x in enumerate(asked) if i not in left), "none ended by its token"
    for number, x in enumerate(asked):
        whole = alone(e, x, end)
        told = found[number]
        assert told == (whole[: len(told)] if number in left else whole), (number, x)
