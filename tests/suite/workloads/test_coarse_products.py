"""Steps by gradients of 8-bit products: honest ones are right, optimizers that do something else are found."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.model import BOUNDS, Bound
from kernelmark.suite.system import System
from kernelmark.suite.workloads import _coarse_products as coarse_products
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._fp8 import emulated
from kernelmark.suite.workloads._recipe import HYPERPARAMETERS
from kernelmark.suite.workloads._trainer import PartsTrainer

ROWS = System("rows", precision="parts_rowwise")
ONE = "layers.1.query"
RECIPE: Any = SimpleNamespace(dtype="bf16", stored="master32")
"""What the checks read of a recipe."""


class NoCorrection(PartsTrainer):
    """Biases are not corrected."""

    def _updated(self, step: int, **tensors: Any) -> None:
        super()._updated(1_000_000, **tensors)


class Faster(PartsTrainer):
    """One and a half times the rate."""

    def _updated(self, step: int, **tensors: Any) -> None:
        self.hyperparameters["lr"] = 1.5 * HYPERPARAMETERS["lr"]
        super()._updated(step, **tensors)


class OneStays(PartsTrainer):
    """One parameter is not stepped."""

    def _updated(self, step: int, **tensors: Any) -> None:
        i = self._names.index(ONE)
        before = tensors["masters"][i].clone(), tensors["params"][i].clone()
        super()._updated(step, **tensors)
        tensors["masters"][i].copy_(before[0])
        tensors["params"][i].copy_(before[1])


class NoMomentum(PartsTrainer):
    """There is no first moment."""

    def _updated(self, step: int, **tensors: Any) -> None:
        self.hyperparameters["beta1"] = 0.0
        super()._updated(step, **tensors)


class Forgetful(PartsTrainer):
    """Each step is the first."""

    def _updated(self, step: int, **tensors: Any) -> None:
        super()._updated(1, **tensors)
        for x in (*tensors["exp_avgs"], *tensors["exp_avg_sqs"]):
            x.zero_()


class LeftOut(PartsTrainer):
    """The second step changes nothing."""

    def _updated(self, step: int, **tensors: Any) -> None:
        if step != 2:
            super()._updated(step, **tensors)


class OneTurns(PartsTrainer):
    """From the second step on one parameter goes the other way."""

    def _updated(self, step: int, **tensors: Any) -> None:
        i = self._names.index(ONE)
        before = tensors["masters"][i].clone()
        super()._updated(step, **tensors)
        if step > 1:
            tensors["masters"][i].copy_(2 * before - tensors["masters"][i])
            tensors["params"][i].copy_(tensors["masters"][i])


FAULTS = {
    NoCorrection: "the changes of all parameters are 0.5.* times them on average, allowed 0.8 to 1.2",
    Faster: "the changes of all parameters are 1.4.* times them on average",
    OneStays: f"along the model.s, the change of {ONE} is .* times it, allowed 0.6 to 1.4",
    NoMomentum: "the changes of all parameters are 0.5.* times them on average",
    Forgetful: "the changes of all parameters are 0.6.* times them on average",
    LeftOut: "the changes of all parameters are 0.[67].* times them on average",
    OneTurns: f"along the model.s, the change of {ONE} is -0.* times it, allowed 0.6 to 1.4",
}


@pytest.fixture
def here(bench: Any) -> Any:
    """Two layers, masters in fp32, products in 8 bits."""
    return bench("llama-tiny", dtype="bf16", state="master32", products="e4m3", clip=0.0)


@pytest.mark.parametrize("state", ["master32", "plain"])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_products_in_eight_bits_are_right(bench: Any, model: str, state: str) -> None:
    """Of weights that are rounded after each step too."""
    here = bench(model, dtype="bf16", state=state, products="e4m3", clip=0.0)
    assert here.measure(here.trainer(PartsTrainer, ROWS)).samples["change_error"][0] < 0.4


@pytest.mark.parametrize("kind", FAULTS, ids=lambda x: x.__name__)
def test_what_is_wrong_with_their_optimizer_is_found(here: Any, kind: type[PartsTrainer]) -> None:
    with pytest.raises(Incorrect, match=FAULTS[kind]):
        here.measure(here.trainer(kind, ROWS))


def step_of(errors: dict[str, tuple[float, float]], scatter: dict[str, float]) -> float:
    """The check of gradients that are so far off across the answer's and along it, with what rounding makes."""
    wanted = {name: torch.tensor([1.0, 0.0]) for name in errors}
    got = {name: torch.tensor([1.0 + along, across]) for name, (across, along) in errors.items()}
    expected = answer.Step(1.0, 1.0, wanted, 0.5)
    trainer: Any = SimpleNamespace(gradients=lambda: got)
    return coarse_products.check_step("a step", trainer, 1.0, expected, BOUNDS["e4m3"], scatter)


CALM = {f"w{i}": (0.2, 0.0) for i in range(9)}
ALONE = dict.fromkeys(CALM, 0.2)


@pytest.mark.parametrize(
    ("key", "alone", "said"),
    [
        ((0.55, 0.0), 0.30, ""),
        ((0.55, 0.0), 0.25, "the gradient of key is off by 0.55 of its norm, allowed 0.5"),
        ((0.75, -0.2), 0.39, ""),
        ((0.81, 0.0), 0.60, "the gradient of key is off by 0.81 of its norm, allowed 0.8"),
        ((0.50, -0.45), 0.60, "along the model's, the gradient of key is 0.55 times it, allowed 0.6 to 1.4"),
        ((0.30, 0.45), 0.60, "along the model's, the gradient of key is 1.45 times it"),
        ((0.00, -1.0), 0.60, "the gradient of key is off by 1 of its norm, allowed 0.8"),
        ((math.nan, 0.0), 0.60, "the gradient of key is not finite"),
    ],
)
def test_a_gradient_is_off_as_much_as_rounding_alone_makes_it_and_not_along_the_answer(
    key: tuple[float, float], alone: float, said: str
) -> None:
    given = {**CALM, "key": key}, {**ALONE, "key": alone}
    if not said:
        assert step_of(*given) == pytest.approx(math.hypot(*key))
        return
    with pytest.raises(Incorrect, match=said):
        step_of(*given)


def test_where_all_gradients_are_further_off_each_may_be() -> None:
    further = dict.fromkeys(CALM, (0.35, 0.0))
    assert step_of({**further, "key": (0.6, 0.0)}, {**ALONE, "key": 0.25}) == pytest.approx(0.6)
    with pytest.raises(Incorrect, match="key is off by 0.6 of its norm, allowed 0.5"):
        step_of({**CALM, "key": (0.6, 0.0)}, {**ALONE, "key": 0.25})


def test_without_an_emulation_the_bound_is_the_model_s() -> None:
    assert step_of({"key": (0.39, 0.0)}, {}) == pytest.approx(0.39)
    with pytest.raises(Incorrect, match="off by 0.41 of its norm, allowed 0.4; rounding alone makes 0"):
        step_of({"key": (0.41, 0.0)}, {})


def deep(r: Any) -> Any:
    """The same with sixteen layers."""
    configuration = replace(r.chosen.configuration, layers=16)
    return replace(r, chosen=replace(r.chosen, configuration=configuration))


def test_rounding_alone_is_what_an_emulated_system_makes(here: Any, catalog: Any) -> None:
    """A system in fp32 whose products are rounded so is off by that, and nothing else."""
    r, seed, cpu = deep(train.read(here.case)), here.session.seed, torch.device("cpu")
    first = answer.compute(r, catalog, seed, cpu).first
    scatter = coarse_products.scattered(r, catalog, seed, cpu, first)
    assert scatter.keys() == first.gradients.keys()
    module = answer.reference_module(r.chosen, r.S, catalog, cpu, {"linear": emulated("1x128", False)})
    own = dict(module.named_parameters())
    for name, values in answer.initial(r, seed, cpu):
        own[name].data.copy_(values)
    (tokens,), (targets,) = answer.Batches(r, seed, cpu).draw(0)
    module(tokens, targets).backward()
    for name, x in own.items():
        wanted = first.gradients[name].float()
        assert scatter[name] == pytest.approx(float((x.grad - wanted).norm() / wanted.norm()), rel=1e-3)
    assert max(scatter.values()) > 0.2


def test_exact_products_scatter_nothing(here: Any, catalog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse_products, "emulated", lambda *_, **__: torch.nn.functional.linear)
    r, cpu = train.read(here.case), torch.device("cpu")
    found = coarse_products.scattered(r, catalog, here.session.seed, cpu, here.prepared.expected.first)
    assert max(found.values()) < 0.01  # the answer is kept in bf16


def test_only_products_in_eight_bits_have_an_emulation(here: Any, bench: Any) -> None:
    assert here.prepared.scattered
    assert not bench("llama-tiny", dtype="bf16", state="master32").prepared.scattered


def after(errors: dict[str, tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> float:
    """The check of parameters whose changes are so far off across and along; nothing is rounded away."""
    before = torch.zeros(2)
    changed = {name: torch.tensor([4.0, 0.0]) for name in errors}
    got = {name: torch.tensor([4.0 + 4.0 * along, 4.0 * across]) for name, (across, along) in errors.items()}
    monkeypatch.setattr(answer, "initial", lambda *_: iter((name, before) for name in errors))
    monkeypatch.setattr(answer, "ROUNDING", {"bf16": 0.0})
    gradients = {name: torch.ones(2) for name in errors}
    expected: Any = SimpleNamespace(changed=changed, first=SimpleNamespace(gradients=gradients))
    trainer: Any = SimpleNamespace(weights=lambda: got)
    return coarse_products.check_weights(trainer, RECIPE, expected, 0, BOUNDS["e4m3"])


@pytest.mark.parametrize(
    ("norm_bias", "said"),
    [
        ((0.59, 0.0), ""),
        ((0.75, -0.39), ""),
        ((0.10, 0.58), ""),
        ((0.60, 0.41), "along the model's, the change of norm_bias is 1.41 times it, allowed 0.6 to 1.4"),
        ((0.10, -0.70), "along the model's, the change of norm_bias is 0.3 times it"),
        ((0.91, 0.0), "the change of norm_bias is off by 0.91 of its norm, allowed 0.9"),
        ((0.00, -1.0), "the change of norm_bias is off by 1 of its norm, allowed 0.9"),
        ((math.nan, 0.0), "norm_bias is not finite"),
    ],
)
def test_one_parameter_may_be_off_across_what_it_should_change_by(
    norm_bias: tuple[float, float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**{f"w{i}": (0.1, 0.0) for i in range(9)}, "norm_bias": norm_bias}
    if not said:
        assert after(given, monkeypatch) == pytest.approx(math.hypot(*norm_bias))
        return
    with pytest.raises(Incorrect, match=said):
        after(given, monkeypatch)


@pytest.mark.parametrize(
    ("each", "said"),
    [
        ((0.44, -0.11), ""),
        ((0.10, -0.21), "the changes of all parameters are 0.79 times them on average, allowed 0.8 to 1.2"),
        ((0.10, 0.21), "the changes of all parameters are 1.21 times them on average"),
        ((0.61, 0.0), "the changes of all parameters are off by 0.61 of their norms, allowed 0.6"),
    ],
)
def test_all_parameters_together_are_held_tightly(
    each: tuple[float, float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {f"w{i}": each for i in range(9)}
    if not said:
        assert after(given, monkeypatch) == pytest.approx(math.hypot(*each))
        return
    with pytest.raises(Incorrect, match=said):
        after(given, monkeypatch)


def test_what_storing_rounds_is_no_part_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains of about one whose steps are lost in bf16: they would make the mean of the others smaller."""
    before = {"gain": torch.ones(64), **{f"w{i}": torch.zeros(64) for i in range(3)}}
    changed = {name: x + 3e-3 for name, x in before.items()}
    got = {name: before[name] + (0.0 if name == "gain" else 3e-3 * 1.25) for name in before}
    monkeypatch.setattr(answer, "initial", lambda *_: iter(before.items()))
    gradients = {name: torch.ones(64) for name in before}
    expected: Any = SimpleNamespace(changed=changed, first=SimpleNamespace(gradients=gradients))
    trainer: Any = SimpleNamespace(weights=lambda: got)
    with pytest.raises(Incorrect, match="all parameters are 1.25 times them on average"):
        coarse_products.check_weights(trainer, RECIPE, expected, 0, BOUNDS["e4m3"])
    got.update({name: changed[name] for name in got if name != "gain"})
    assert coarse_products.check_weights(trainer, RECIPE, expected, 0, BOUNDS["e4m3"]) < 0.1


@pytest.mark.parametrize(("change", "found"), [(0.6, 0.0), (math.inf, 1.0)])
def test_gradients_that_are_approximated_on_their_way_hold_no_weights(
    monkeypatch: pytest.MonkeyPatch, change: float, found: float
) -> None:
    monkeypatch.setattr(answer, "check_weights", lambda *_: 1.0)
    monkeypatch.setattr(coarse_products, "check_weights", lambda *_: 0.0)
    given: Any = {"expected": None, "session": SimpleNamespace(seed=0), "errors": {"change_error": 0.0}}
    program: Any = SimpleNamespace(bound=Bound(loss=0.03, gradient=change, change=change), **given)
    trainer: Any = SimpleNamespace(products="e4m3")
    recipe: Any = SimpleNamespace(hidden=(), products="e4m3")
    train.Program._check_weights(program, trainer, recipe)
    assert program.errors["change_error"] == found


def test_the_check_is_part_of_what_a_case_is() -> None:
    def spec(products: str) -> tuple[object, ...]:
        case = train.WORKLOAD.case(
            {"B": 1, "S": 8}, "bf16", "program", model="llama-tiny", state="plain", products=products
        )
        return train.WORKLOAD.computes(case)

    for check in (coarse_products.check_weights, coarse_products.check_step, coarse_products.scattered):
        assert check in spec("e4m3")
        assert check not in spec("dtype")
