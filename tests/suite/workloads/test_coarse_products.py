"""Steps by gradients of 8-bit products: honest ones are right, optimizers that do something else are found."""

from __future__ import annotations

import math
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
from kernelmark.suite.workloads._coarse_products import Apart
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
    NoCorrection: "the changes of all parameters are off by 0.4.* allowed 0.4",
    Faster: "the changes of all parameters are off by 0.5.* allowed 0.4",
    OneStays: f"the change of {ONE} is off by .* allowed 0.6",
    NoMomentum: "the changes of all parameters are off by 0.5.* allowed 0.4",
    Forgetful: "the changes of all parameters are off by 0.6.* allowed 0.4",
    LeftOut: "the changes of all parameters are 0.[67].* times them on average, allowed 0.8",
    OneTurns: f"the change of {ONE} is off by .* allowed 0.6",
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


def after(errors: dict[str, float], monkeypatch: pytest.MonkeyPatch, **given: Any) -> float:
    """The check of parameters whose changes are so far off; nothing is rounded away."""
    before = torch.zeros(2)
    changed = {name: torch.tensor([4.0, 0.0]) for name in errors}
    got = {name: torch.tensor([4.0, 4.0 * x]) for name, x in errors.items()}
    monkeypatch.setattr(answer, "initial", lambda *_: iter((name, before) for name in errors))
    monkeypatch.setattr(answer, "ROUNDING", {"bf16": 0.0})
    gradients = {name: torch.ones(2) for name in errors}
    expected: Any = SimpleNamespace(changed=changed, first=SimpleNamespace(gradients=gradients))
    trainer: Any = SimpleNamespace(weights=lambda: got)
    return coarse_products.check_weights(trainer, RECIPE, expected, 0, BOUNDS["e4m3"], **given)


def test_parameters_are_held_one_by_one_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = {f"w{i}": 0.1 for i in range(9)}
    assert after({**calm, "norm_bias": 0.59}, monkeypatch) == pytest.approx(0.59)
    with pytest.raises(Incorrect, match="norm_bias is off by 0.61 of its norm, allowed 0.6"):
        after({**calm, "norm_bias": 0.61}, monkeypatch)
    with pytest.raises(Incorrect, match=r"all parameters are off by 0.41 of their norms"):
        after({f"w{i}": 0.41 for i in range(9)}, monkeypatch)
    with pytest.raises(Incorrect, match="w0 is not finite"):
        after({"w0": float("nan")}, monkeypatch)


@pytest.mark.parametrize("along", [-0.21, 0.21])
def test_all_parameters_together_are_held_along_the_answer(along: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within its bound, and all together are."""
    before, changed = torch.zeros(2), {f"w{i}": torch.tensor([4.0, 0.0]) for i in range(9)}
    got = {name: x * (1 + along) for name, x in changed.items()}
    monkeypatch.setattr(answer, "initial", lambda *_: iter((name, before) for name in changed))
    gradients = {name: torch.ones(2) for name in changed}
    expected: Any = SimpleNamespace(changed=changed, first=SimpleNamespace(gradients=gradients))
    trainer: Any = SimpleNamespace(weights=lambda: got)
    with pytest.raises(Incorrect, match=f"are {1 + along:.3g} times them on average, allowed 0.8 to 1.2"):
        coarse_products.check_weights(trainer, RECIPE, expected, 0, BOUNDS["e4m3"])


def test_what_storing_rounds_is_no_part_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains of about one whose steps are lost in bf16: they would make the mean of the others smaller."""
    before = {"gain": torch.ones(64), **{f"w{i}": torch.zeros(64) for i in range(3)}}
    changed = {name: x + 3e-3 for name, x in before.items()}
    got = {name: before[name] + (0.0 if name == "gain" else 3e-3 * 1.41) for name in before}
    monkeypatch.setattr(answer, "initial", lambda *_: iter(before.items()))
    gradients = {name: torch.ones(64) for name in before}
    expected: Any = SimpleNamespace(changed=changed, first=SimpleNamespace(gradients=gradients))
    trainer: Any = SimpleNamespace(weights=lambda: got)
    with pytest.raises(Incorrect, match="all parameters are off by 0.4"):
        coarse_products.check_weights(trainer, RECIPE, expected, 0, BOUNDS["e4m3"])
    got.update({name: changed[name] for name in got if name != "gain"})
    assert coarse_products.check_weights(trainer, RECIPE, expected, 0, BOUNDS["e4m3"]) < 0.1


@pytest.mark.parametrize(("change", "found"), [(0.6, 0.0), (math.inf, 1.0)])
def test_gradients_that_are_approximated_on_their_way_hold_no_weights(
    monkeypatch: pytest.MonkeyPatch, change: float, found: float
) -> None:
    monkeypatch.setattr(answer, "check_weights", lambda *_: 1.0)
    monkeypatch.setattr(coarse_products, "check_weights", lambda *_, rounds: 0.0)
    given: Any = {
        "expected": None,
        "session": SimpleNamespace(seed=0),
        "errors": {"change_error": 0.0},
        "prepared": SimpleNamespace(coarse=coarse_products.NOTHING),
    }
    bound = Bound(loss=0.03, gradient=change, change=change)
    program: Any = SimpleNamespace(bound=bound, _bound_of_weights=lambda trainer: bound, **given)
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

    for part in (coarse_products.check_weights, coarse_products.check_step, coarse_products.rounding):
        assert part in spec("e4m3")
        assert part not in spec("dtype")


FAR = coarse_products.Rounding(Apart(0.5, 0.45, -0.1, -0.3), Apart(0.7, 0.5, -0.1, -0.2))
"""What rounding alone does to a deep model, say."""
DEEPER = coarse_products.Rounding(Apart(0.9, 0.45, -0.1, -0.36), Apart(1.0, 0.5, -0.1, -0.2))


def gradients(beside: float, along: float = 0.0, one: tuple[float, float] | None = None) -> tuple[Any, Any]:
    """Ten parameters whose gradients are so far beside the answer's and along it, and `one` that is otherwise."""
    names = [f"w{i}" for i in range(10)]
    off = dict.fromkeys(names, (beside, along)) | ({"w0": one} if one else {})
    wanted = {name: torch.tensor([4.0, 0.0]) for name in names}
    got = {name: torch.tensor([4.0 * (1 + off[name][1]), 4.0 * off[name][0]]) for name in names}
    trainer: Any = SimpleNamespace(gradients=lambda: got)
    return trainer, answer.Step(loss=2.0, norm=1.0, gradients=wanted, mean_square=8.0)


def stepped(rounds: coarse_products.Rounding, *off: Any) -> float:
    trainer, expected = gradients(*off)
    return coarse_products.check_step("the first step", trainer, 2.0, expected, BOUNDS["e4m3"], rounds)


def test_a_gradient_may_be_off_as_rounding_alone_is() -> None:
    assert stepped(coarse_products.NOTHING, 0.39) == pytest.approx(0.39)
    with pytest.raises(Incorrect, match=r"the gradient of w0 is off by 0.41 of its norm, allowed 0.4"):
        stepped(coarse_products.NOTHING, 0.41)
    assert stepped(FAR, 0.41) == pytest.approx(0.41)
    assert stepped(FAR, 0.3, 0.0, (0.62, 0.0)) == pytest.approx(0.62)
    with pytest.raises(Incorrect, match=r"the gradient of w0 is off by 0.63 of its norm, allowed 0.625"):
        stepped(FAR, 0.3, 0.0, (0.63, 0.0))


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ((0.57,), r"the gradients of all parameters are off by 0.57 of their norms, allowed 0.562"),
        (
            (0.4, -0.25),
            r"along the model's, the gradients of all parameters are 0.75 times them on average, allowed 0.8",
        ),
        (
            (0.4, 0.25),
            r"along the model's, the gradients of all parameters are 1.25 times them on average, allowed 0.8",
        ),
        (
            (0.3, 0.0, (0.0, -1.0)),
            r"along the model's, the gradients of one parameter are 0 times them, allowed 0.55 to 1.45",
        ),
        ((0.3, 0.0, (0.0, 0.46)), r"the gradients of one parameter are 1.46 times them, allowed 0.55"),
    ],
    ids=["together", "too short", "too long", "one is dropped", "one is longer"],
)
def test_what_rounding_does_not_do_is_found_beside_it(off: tuple[Any, ...], said: str) -> None:
    """Where rounding is so far off that one parameter's bound has room for a gradient that is dropped."""
    with pytest.raises(Incorrect, match=said):
        stepped(DEEPER, *off)


def test_one_that_is_dropped_is_found_whatever_rounding_does() -> None:
    """Also where rounding leaves nearly nothing of one along the model's."""
    far = coarse_products.Rounding(Apart(0.9, 0.4, -0.1, -0.85), Apart())
    with pytest.raises(Incorrect, match=r"the gradients of one parameter are 0 times them, allowed 0.1 to 1.9"):
        stepped(far, 0.3, 0.0, (0.0, -1.0))


def test_gradients_that_are_shorter_than_rounding_makes_them_are_found_within_the_bound() -> None:
    with pytest.raises(Incorrect, match=r"the gradients of all parameters are 0.65 times them on average"):
        stepped(coarse_products.NOTHING, 0.1, -0.35)


def test_weights_may_be_off_as_rounding_alone_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = {f"w{i}": 0.1 for i in range(9)}
    far = {"rounds": FAR}
    assert after({**calm, "norm_bias": 0.87}, monkeypatch, **far) == pytest.approx(0.87)
    with pytest.raises(Incorrect, match="norm_bias is off by 0.88 of its norm, allowed 0.875"):
        after({**calm, "norm_bias": 0.88}, monkeypatch, **far)
    assert after({f"w{i}": 0.6 for i in range(9)}, monkeypatch, **far) == pytest.approx(0.6)
    with pytest.raises(Incorrect, match=r"all parameters are off by 0.63 of their norms, allowed 0.625"):
        after({f"w{i}": 0.63 for i in range(9)}, monkeypatch, **far)


def test_a_case_says_what_rounding_alone_does(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to scale is tried, and what a system has beyond its bounds is told beside it."""
    own = type(bench("llama-tiny"))(bench("llama-tiny").catalog, "llama-tiny", dtype="bf16", products="e4m3")
    rounds = own.prepared.coarse
    assert 0.1 < rounds.gradients.together <= rounds.gradients.worst < 0.4
    assert 0.0 < abs(rounds.gradients.along) <= abs(rounds.gradients.astray) < 0.2
    assert 0.0 < rounds.changes.together < 0.4
    narrow = Bound(loss=3e-2, gradient=0.1, change=6e-1)  # of which bf16's .15 is left
    monkeypatch.setitem(BOUNDS, "e4m3", narrow)  # type: ignore[arg-type]  # a dict
    found = own.measure(own.trainer(PartsTrainer, ROWS))
    assert found.remarks == (
        "gradients are off by more than 0.15, as those of a step that is rounded and nothing else are by "
        f"{rounds.gradients.worst:.3g}: up to 1.25 times that is allowed",
    )


def test_without_memory_for_it_the_bounds_stay(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, weights: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PartsTrainer, "load", full)
    own = type(bench("llama-tiny"))(bench("llama-tiny").catalog, "llama-tiny", dtype="bf16", products="e4m3")
    assert own.prepared.coarse == coarse_products.NOTHING
