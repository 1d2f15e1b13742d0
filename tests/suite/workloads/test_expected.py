"""The answer to a training case, and its check: by numbers that are computed anew, tensor by tensor, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernelmark.suite.measure.host_copies import ALIGNMENT
from kernelmark.suite.model import Bound
from kernelmark.suite.operator import torch_dtype
from kernelmark.suite.workloads import _coarse_states as coarse
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import _muon as muon
from kernelmark.suite.workloads import train

norm = torch.linalg.vector_norm


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("state", ["plain", "muon"])
def test_the_answer_on_the_host(bench: Any, dtype: str, state: str) -> None:
    expected = bench(dtype=dtype, state=state).prepared.expected
    for step in (expected.first, expected.random):
        squares = sum(float(x.double().square().sum()) for x in step.gradients.values())
        size = sum(x.numel() for x in step.gradients.values())
        assert step.mean_square == pytest.approx(squares / size, rel=1e-5)
    assert {x.dtype for x in expected.first.gradients.values()} == {torch_dtype(dtype)}
    assert {x.dtype for x in expected.changed.values()} == {torch.float32}
    for one in (expected.first.gradients, expected.random.gradients, expected.changed):
        assert len({x.untyped_storage().data_ptr() for x in one.values()}) == 1
        assert all(x.data_ptr() % ALIGNMENT == 0 for x in one.values())


def plain_step(got: Any, expected: answer.Step) -> float:
    """The largest error of gradients, as it reads in words."""
    wide = {name: x.float() for name, x in expected.gradients.items()}
    squares, size = sum(float(norm(x)) ** 2 for x in wide.values()), sum(x.numel() for x in wide.values())
    return max(
        float(norm(got[name].float() - x))
        / max(float(norm(x)), answer.SMALL * (squares * x.numel() / size) ** 0.5)
        for name, x in wide.items()
    )


def plain_weights(got: Any, before: Any, expected: answer.Expected, dtype: str) -> float:
    """The largest error of the change of weights, likewise."""
    worst = 0.0
    for name, wanted in expected.changed.items():
        share = expected.first.gradients[name].float().abs()
        change = float(norm((wanted - before[name].float()) * share))
        rounded = answer.STEPS * answer.ROUNDING[dtype] * float(norm(wanted * share))
        worst = max(worst, (float(norm((got[name].float() - wanted) * share)) - rounded) / change)
    return worst


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_checks_are_what_they_say_and_leave_the_answer_and_the_system_as_they_are(bench: Any, dtype: str) -> None:
    own = bench(dtype=dtype, state="plain" if dtype == "fp32" else "master32")
    recipe, seed, cpu = train.read(own.case), own.session.seed, torch.device("cpu")
    expected, trainer = own.prepared.expected, own.trainer()
    kept = {name: x.clone() for name, x in tensors(expected).items()}
    bound = Bound(loss=1.0, gradient=1.0, change=10.0)
    trainer.load(answer.initial(recipe, seed, cpu))
    batches = answer.Batches(recipe, seed, cpu)
    for step in range(answer.STEPS):
        loss = float(trainer.step(*batches.draw(step)))
        if step == 0:
            gradients = {name: x.clone() for name, x in trainer.gradients().items()}
            found = answer.check_step("the first step", trainer, loss, expected.first, bound)
            assert found == pytest.approx(plain_step(gradients, expected.first), rel=1e-6, abs=1e-12)
            assert found > 0
            assert all(torch.equal(x, gradients[name]) for name, x in trainer.gradients().items())
    weights = {name: x.clone() for name, x in trainer.weights().items()}
    before = dict(answer.initial(recipe, seed, cpu))
    found = answer.check_weights(trainer, recipe, expected, seed, bound)
    assert found == pytest.approx(max(0.0, plain_weights(weights, before, expected, dtype)), rel=1e-6, abs=1e-12)
    for check in (coarse.check_weights, muon.check_weights):
        check(trainer, recipe, expected, seed, bound)
    assert all(torch.equal(x, weights[name]) for name, x in trainer.weights().items())
    assert all(torch.equal(x, kept[name]) for name, x in tensors(expected).items())


def tensors(expected: answer.Expected) -> dict[str, torch.Tensor]:
    """All of the answer's, by what they are and their name."""
    parts = {"first": expected.first.gradients, "random": expected.random.gradients, "changed": expected.changed}
    return {f"{part} {name}": x for part, own in parts.items() for name, x in own.items()}
