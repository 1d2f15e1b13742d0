"""Operators whose calls update their inputs: permitted where declared, and verified all the same."""

from __future__ import annotations

import random

import pytest
import torch
from kernelmark.registry.store.record import Case
from kernelmark.suite.measure import group
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.measure.workbench import Workbench, tensors
from kernelmark.suite.operator import Operator

FEW = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=1, warmup_s=0)


def inputs(case: Case, device: torch.device, generator: torch.Generator):
    """A list of weights, another of gradients, and a rate."""
    lists = [[torch.randn(x, generator=generator) for x in ((3, 4), (5,))] for _ in range(2)]
    return {"weights": lists[0], "grads": lists[1], "rate": 0.5}


def reference(weights, grads, rate):
    """Weights half as large, less the gradients."""
    return tuple(w * rate - g for w, g in zip(weights, grads, strict=True))


def operator(in_place=("weights",), results=lambda result, given: tuple(given["weights"])) -> Operator:
    return Operator(
        name="step",
        summary="a step",
        axes={"N": "nothing"},
        inputs=inputs,
        reference=reference,
        bytes=lambda case: 1,
        flops=lambda case: 0,
        plans={},
        in_place=in_place,
        results=results,
    )


def trial(chosen: Operator) -> Trial:
    case = chosen.case({"N": 1}, "fp32", "forward")
    bench = Workbench.build(chosen, case, torch.device("cpu"), 1)
    return Trial(Cpu(), bench, "hot", FEW, Stages())


def step(weights, grads, rate):
    for w, g in zip(weights, grads, strict=True):
        w.mul_(rate).sub_(g)


def run(call, chosen=None):
    return trial(chosen or operator()).run(lambda: call)


def wrong(call, chosen=None) -> str:
    with pytest.raises(Incorrect) as error:
        run(call, chosen)
    return str(error.value)


def test_lists_are_inputs():
    here = trial(operator()).bench
    assert [name for name, _ in tensors(here.inputs)] == ["weights", "weights", "grads", "grads"]
    assert len(here.varied) == len(here.values) == len(here.decoys) == 4
    assert [x.dtype for x in here.references] == [torch.float64] * 2
    assert not here.changed()
    here.inputs["grads"][1][0] += 1
    assert here.changed()
    here.lay(here.values)
    assert not here.changed()


def test_a_step_in_place_is_measured():
    measured = run(step)
    assert len(measured.samples["latency"]) == 6
    assert measured.samples["error"][0] < 1e-6


def test_who_returns_the_answer_and_leaves_the_inputs_is_wrong():
    assert "relative error" in wrong(reference)


def test_other_inputs_are_left_alone():
    def spoils(weights, grads, rate):
        step(weights, grads, rate)
        grads[1].zero_()

    assert wrong(spoils) == "it changed its inputs"


def test_undeclared_it_is_not_allowed():
    assert wrong(step, operator(in_place=())) == "it changed its inputs"


def test_half_a_step_is_caught():
    def forgets(weights, grads, rate):
        step(weights[:1], grads[:1], rate)

    assert wrong(forgets).startswith("output 1: relative error")


def test_a_step_that_ends_while_timed_is_caught():
    count = []

    def tires(weights, grads, rate):
        count.append(0)
        if len(count) < 5:
            step(weights, grads, rate)

    assert "relative error" in wrong(tires)


@pytest.mark.parametrize("seed", range(4))
def test_a_state_that_grows_over_all_bounds_is_caught(seed, monkeypatch):
    """Whichever step lays the state anew: the infinities are looked for before."""
    monkeypatch.setattr(group.Alone, "random", random.Random(seed))
    calls = []

    def later(weights, grads, rate):
        calls.append(0)
        step(weights, grads, rate)
        if 2 < len(calls) < 8:
            weights[0][0, 0] = torch.inf

    with pytest.raises(Incorrect, match="not finite any more"):
        run(later)


def either(result, given):
    """The results are what is returned."""
    return tuple(result)


def test_in_place_or_not_where_results_are_returned():
    """As a library's operator beside others that leave the inputs: both are right, and both are checked."""

    def updates(weights, grads, rate):
        step(weights, grads, rate)
        return weights

    for call in (updates, reference):
        assert run(call, operator(results=either)).samples["error"][0] < 1e-6


def test_what_was_changed_must_be_the_result():
    def scribbles(weights, grads, rate):
        result = reference(weights, grads, rate)
        weights[0].zero_()
        return result

    assert wrong(scribbles, operator(results=either)) == "it changed its inputs"


def test_an_answer_beside_an_update_is_poisoned():
    """One result in place, the other in memory that is kept from the call before and not written."""
    kept: list[torch.Tensor] = []

    def forgets(weights, grads, rate):
        first, second = reference(weights, grads, rate)
        weights[0].copy_(first)
        if kept:
            kept[0][1:] = second[1:]
        else:
            kept.append(second)
        return weights[0], kept[0]

    assert "1 of 5 elements are NaN" in wrong(forgets, operator(results=either))


def test_nothing_returned_is_no_answer():
    assert wrong(lambda **inputs: None, operator(results=None)) == "0 outputs where the reference has 2"
