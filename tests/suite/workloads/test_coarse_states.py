"""Moments in 8 bits are held to a bound of their own: honest ones are right, planted faults are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.model import BOUNDS
from kernelmark.suite.system import Changes, System
from kernelmark.suite.workloads import _coarse_states as coarse
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads._arms import ArmTrainer
from kernelmark.suite.workloads._coarse_states import BLOCK, Twin, rounded
from kernelmark.suite.workloads._recipe import HYPERPARAMETERS

SYSTEM = System("twin", changes=Changes(optimizer="twin_adamw_8bit"))


class Forgetful(Twin):
    """Moments are never updated."""

    def _kept(self, moment: Any, signed: bool) -> Any:
        return torch.zeros_like(moment)


class NoMomentum(Twin):
    """The first moment is never updated."""

    def _kept(self, moment: Any, signed: bool) -> Any:
        return torch.zeros_like(moment) if signed else super()._kept(moment, signed)


class NoCorrection(Twin):
    """Biases are not corrected."""

    def _bias_corrected(self) -> int:
        return 1_000_000


class TwiceTheScale(Twin):
    """Blocks come back twice as large."""

    def _kept(self, moment: Any, signed: bool) -> Any:
        return 2 * super()._kept(moment, signed)


class HalfTheScale(Twin):
    """Blocks come back half as large."""

    def _kept(self, moment: Any, signed: bool) -> Any:
        return super()._kept(moment, signed) / 2


class NeighboursScale(Twin):
    """A block has the scale of the one before."""

    def _kept(self, moment: Any, signed: bool) -> Any:
        found = super()._kept(moment, signed)
        if found is moment:
            return moment
        largest = moment.reshape(-1, BLOCK).abs().amax(1, keepdim=True).clamp(min=1e-12)
        return (found.reshape(-1, BLOCK) / largest * largest.roll(1, 0)).view_as(moment)


def _trainer(kind: type[Twin]) -> type[ArmTrainer]:
    class Arm(ArmTrainer):
        def library(self, held: list[Any]) -> Any:
            return kind(held, self.assembly.catalog.operator("adamw").reference)

    return Arm


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_moments_in_eight_bits_are_right(bench: Any, dtype: str) -> None:
    here = bench("llama-tiny", dtype=dtype)
    assert here.measure(here.trainer(ArmTrainer, SYSTEM)).samples["change_error"][0] < 0.05


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(
            (kind, dtype)
            for kind in (Forgetful, NoMomentum, NoCorrection, TwiceTheScale)
            for dtype in ("fp32", "bf16")
        ),
        (HalfTheScale, "fp32"),
        (NeighboursScale, "fp32"),
    ],
)
def test_what_is_wrong_with_them_is_found(bench: Any, kind: type[Twin], dtype: str) -> None:
    here = bench("llama-tiny", dtype=dtype)
    with pytest.raises(Incorrect, match="change of .* with moments in 8 bits"):
        here.measure(here.trainer(_trainer(kind), SYSTEM))


def test_rounding_to_a_blocks_table() -> None:
    x = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(1))
    found = rounded(x, True)
    largest = x.abs().amax(1, keepdim=True)
    near = x.abs() > 0.1 * largest
    assert torch.equal(found[x == largest], x[x == largest])  # of minus the largest there is no number
    assert (
        float(((found - x).abs() / largest)[near].max()) <= 0.9 / 64 / 2 * 1.01
    )  # 64 numbers in the upper decade
    assert len(set(coarse._numbers(True))) == len(set(coarse._numbers(False))) == 256
    assert torch.equal(rounded(x[:1], True), x[:1])  # too small to be rounded
    assert float(rounded(torch.full((coarse.LEAST,), 1e-9).index_fill_(0, torch.tensor(0), 1.0), False)[1]) == 0.0


def test_a_step_that_no_table_can_make_is_not_a_fault(catalog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element whose second moment became 0, and whose next gradients are nothing: the step is as long as one
    likes.
    """
    chance = torch.Generator().manual_seed(2)
    before = torch.randn(16, BLOCK, generator=chance)
    gradients = [torch.randn(16, BLOCK, generator=chance) for _ in range(answer.STEPS)]
    for i, g in enumerate(gradients):
        g[:, 0], g[:, 1] = 10.0, 4e-3 if i == 0 else 1e-7
    reference = catalog.operator("adamw").reference
    wanted, m, v = before, torch.zeros_like(before), torch.zeros_like(before)
    own = torch.nn.Parameter(before.clone())
    twin = Twin([own], reference)
    for step, own.grad in enumerate(gradients, 1):
        wanted, m, v = reference([wanted], [own.grad], [m], [v], None, step, **HYPERPARAMETERS)
        twin.step()
    monkeypatch.setattr(answer, "initial", lambda *_: iter([("table", before)]))
    trainer: Any = SimpleNamespace(weights=lambda: {"table": own.detach()})
    expected: Any = SimpleNamespace(
        changed={"table": wanted}, first=SimpleNamespace(gradients={"table": gradients[0]})
    )
    given: Any = (trainer, SimpleNamespace(dtype="fp32"), expected, 0, BOUNDS["bf16"])
    with pytest.raises(Incorrect, match="the change of table is off"):
        answer.check_weights(*given)
    assert coarse.check_weights(*given) < 0.1


def test_they_go_on_with_their_moments(catalog: Any) -> None:
    reference = catalog.operator("adamw").reference
    chance = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(16, BLOCK, generator=chance)) for _ in range(2)]
    gradient = torch.randn(16, BLOCK, generator=chance)
    one = Twin(params[:1], reference)
    params[0].grad = gradient
    one.step()
    two = Twin(params[1:], reference)
    two.load_state_dict(one.state_dict())
    params[1].data.copy_(params[0].data)
    params[1].grad = gradient
    one.step()
    two.step()
    assert torch.equal(params[0], params[1])
