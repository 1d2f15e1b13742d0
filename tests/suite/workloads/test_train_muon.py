"""Muon in training: held to fp32, as PyTorch's own class is; faults of its step; what follows from its recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import _muon as muon
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._trainer import PartsTrainer

LIBRARY = System("torch_optim_muon", changes=Changes(optimizer="torch_muon"))


def program(here: Any, system: System) -> Any:
    return train.assemble(here.case, Assembly(system, here.catalog))


def verified(here: Any, trainer: Any) -> float:
    """By how much the change of weights is off, of three steps that are checked."""
    run = train.Program(train.read(here.case), trainer, here.session, here.prepared)
    run.verify()
    return run.errors["change_error"]


@pytest.mark.parametrize(
    ("dtype", "state", "system"),
    [("fp32", "muon", LIBRARY), ("fp32", "muon", System("torch")), ("bf16", "muon_master32", System("torch"))],
)
def test_a_right_step_is_found_right(bench: Any, dtype: str, state: str, system: System) -> None:
    here = bench("gpt2-tiny", dtype=dtype, state=state, slice="first1")
    # torch.optim.Muon computes in bf16, whatever the gradient.
    assert verified(here, program(here, system)) < (1e-3 if system is not LIBRARY and dtype == "fp32" else 0.1)


class NoMomentum(PartsTrainer):
    def update(self) -> None:
        for i in self._matrices:
            self._states["exp_avgs"][i].zero_()
        super().update()


def _instead(step: Callable[[Any, Any], Any]) -> type[PartsTrainer]:
    """A trainer whose orthogonalization gives `step(grads, what it gave)`."""

    class Wrong(PartsTrainer):
        def optimizer(self, device: torch.device) -> Any:
            right: Any = super().optimizer(device)
            wrong = {
                shape: lambda grads, steps, call=call: step(grads, call(grads=grads, steps=steps))
                for shape, call in right.orthogonalize.items()
            }
            return replace(right, orthogonalize=wrong)

    return Wrong


@pytest.mark.parametrize(
    "kind",
    [
        NoMomentum,
        _instead(lambda grads, found: 0.5 * found),
        _instead(lambda grads, found: grads / grads.norm(dim=(1, 2), keepdim=True) * 8),
        _instead(lambda grads, found: found.flip(1)),
    ],
    ids=["no momentum", "half a step", "not orthogonal", "rows in another order"],
)
def test_a_faulty_step_is_found(bench: Any, kind: type[PartsTrainer]) -> None:
    here = bench("gpt2-tiny", dtype="fp32", state="muon", slice="first1")
    with pytest.raises(Incorrect, match="the change of"):
        verified(here, here.trainer(kind))


def test_a_step_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    p, b = torch.nn.Parameter(torch.randn(24, 40)), torch.zeros(24, 40)
    bias = torch.nn.Parameter(torch.randn(24))
    own, library = p.detach().clone(), muon.library([bias, p], [1])
    for _ in range(3):
        p.grad, bias.grad = torch.randn(24, 40), torch.randn(24)
        library.step()
        own, b = muon.reference(own, p.grad, b)
    torch.testing.assert_close(p.detach(), own, atol=1e-4, rtol=0)
    assert torch.equal(muon.reference(own, torch.zeros(24, 40), torch.zeros(24, 40))[0], own * (1 - 1e-4))


def test_what_follows_from_the_recipe_by_hand(bench: Any) -> None:
    """Four matrices a layer have one moment, all else two; iterations are in the limit, not in MFU."""
    one, other = (train.read(bench("gpt2-tiny", dtype="bf16", state=x).case) for x in ("plain", "muon"))
    shapes = [(192, 64), (64, 64), (256, 64), (64, 256)] * 2
    matrices = sum(M * N for M, N in shapes)
    assert len(other.hidden) == 8
    assert one.resident - other.resident == 2 * matrices
    assert one.bytes - other.bytes == 2 * 2 * matrices
    assert one.flops == other.flops
    # Of (r, s) five times r²s of half of X·Xᵀ, r³ of half of A·Aᵀ, 2r²s of B·X.
    iterations = sum(5 * (3 * 64 * 64 * max(x) + 64**3) for x in shapes)
    assert other.limit_ms(1e12, 1e12) - one.limit_ms(1e12, 1e12) == pytest.approx(
        1e3 * (iterations - 4 * matrices) / 1e12
    )


@pytest.mark.parametrize(
    ("state", "system", "said"),
    [
        ("plain", LIBRARY, "optimizer of this case is AdamW"),
        ("muon", System("a", changes=Changes(optimizer="torchao_adamw_8bit")), "optimizer of this case is Muon"),
        ("muon", System("a", states="host_streamed"), "states on the host are AdamW's"),
    ],
)
def test_what_cannot_be_says_why(bench: Any, state: str, system: System, said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        program(bench("gpt2-tiny", dtype="bf16", state=state), system)


def test_other_optimizers_of_a_library_take_no_stacks() -> None:
    with pytest.raises(NotImplementedError, match="no stacks of matrices"):
        muon.library([torch.zeros(2, 3, 4)], [0])
