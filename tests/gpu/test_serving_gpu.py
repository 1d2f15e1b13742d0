"""Continuous batching on a GPU, a pass ahead of what is read: answers are those of each request by itself."""

from __future__ import annotations

import random

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

CUDA = torch.device("cuda")


def engine(model: str, system: System, sequences: int) -> Engine:
    catalog = Catalog.default()
    found = chosen(catalog.models, model)
    made = Engine(
        Assembly(system, catalog), found, "fp32", inference.initial(found, "fp32", 3, CUDA), sequences, 96, 16
    )
    made.capture()
    return made


def alone(e: Engine, wanted: Wanted) -> list[int]:
    """An answer by steps that are each read before the next is launched."""
    row = e.hold(len(wanted.prompt) + wanted.output)
    found = [e.prefill(torch.tensor([wanted.prompt], device=CUDA), [row]).token.tolist()[0]]
    while len(found) < wanted.output:
        found.append(e.decode(torch.tensor(found[-1:], device=CUDA), [row]).token.tolist()[0])
    e.release(row)
    return found


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny", "mamba2-tiny"])
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_answers_do_not_depend_on_what_runs_beside(model: str, execution: str) -> None:
    system = System("torch_served", base="torch", execution=execution)
    drawn = random.Random(20261130)
    asked = []
    for _ in range(70):
        prompt = tuple(drawn.randrange(512) for _ in range(drawn.choice((7, 7, 7, drawn.randint(1, 50)))))
        asked.append(Wanted(prompt, drawn.randint(1, 40), 0.0, 5, True, True, False, True, False))
    e = engine(model, system, 40)
    found: list[list[int]] = [[] for _ in asked]

    def emit(made: list[Made]) -> None:
        for x in made:
            found[x.number].extend(x.tokens)

    scheduler = Scheduler(e, 511, emit)
    for number, x in enumerate(asked[:50]):
        scheduler.add(number, x)
    later = iter(enumerate(asked[50:], 50))
    turns = 0
    while scheduler.busy:
        scheduler.turn()
        turns += 1
        if turns % 3 == 0 and (more := next(later, None)) is not None:
            scheduler.add(*more)
    for more in later:
        scheduler.add(*more)
    while scheduler.busy:
        scheduler.turn()
    assert not e.held
    assert found == [alone(e, x) for x in asked]
