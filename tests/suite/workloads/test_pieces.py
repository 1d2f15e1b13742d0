"""Large answers in pieces: the same numbers as at once, and never as large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.operators import adamw, fused_linear_cross_entropy
from kernelmark.suite.workloads import _expected, _muon, _pieces, _recipe, train

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 100 elements."""
    monkeypatch.setattr(_pieces, "PIECE", 100)


def test_a_loss_of_some_rows_at_a_time() -> None:
    torch.manual_seed(1)
    seen: list[int] = []

    def whole(x: Any, weight: Any, target: Any) -> Any:
        seen.append(len(x))
        return fused_linear_cross_entropy.reference(x, weight, target)

    x = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(32, 8, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 32, (11,))
    wanted = fused_linear_cross_entropy.reference(x, weight, target)
    gradients = torch.autograd.grad(wanted, (x, weight))
    got = _pieces.loss(whole)(x, weight, target)
    assert seen == [3, 3, 3, 2]  # of 32 logits each
    torch.testing.assert_close(got, wanted)
    times = torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(got, (x, weight), times), tuple(0.5 * g for g in gradients))
    assert len(seen) == 8  # made again, not kept


def test_an_update_of_some_elements_at_a_time() -> None:
    torch.manual_seed(1)
    given = dict(train.HYPERPARAMETERS)
    p, g, m, v = (torch.rand(23, 17) for _ in range(4))
    wanted = adamw.reference([p], [g], [m], [v], None, 2, **given)
    sizes: list[int] = []

    def whole(params: Any, *rest: Any, **named: Any) -> Any:
        sizes.append(params[0].numel())
        return adamw.reference(params, *rest, **named)

    got = _pieces.update(whole)([p], [g], [m], [v], None, 2, **given)
    assert sizes == [100, 100, 100, 91]
    for new, old, expected in zip(got, (p, m, v), wanted, strict=True):
        assert new is old
        assert torch.equal(new, expected)


@pytest.mark.parametrize("state", ["plain", "muon"])
def test_an_answer_in_pieces_is_the_answer(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several passes, of which the later ones add to gradients that are there."""
    monkeypatch.setattr(_expected, "TOGETHER", 32)
    case = train.WORKLOAD.case({"B": 3, "S": 32}, "fp32", "program", model="llama-tiny", state=state)
    r, catalog = train.read(case), Catalog.default()
    compute = _muon.compute if r.hidden else _expected.compute
    whole, pieces = (compute(r, x, 3, CPU) for x in (catalog, _pieces.in_pieces(catalog)))
    assert pieces.first.loss == pytest.approx(whole.first.loss, rel=1e-6)
    for name, x in whole.first.gradients.items():
        torch.testing.assert_close(pieces.first.gradients[name], x, rtol=1e-4, atol=1e-6)
    for name, x in whole.changed.items():
        off = torch.linalg.vector_norm(pieces.changed[name] - x) / torch.linalg.vector_norm(x)
        assert float(off) < 1e-4


def test_a_large_model_has_its_answer_in_pieces(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recipe, "LARGE_ANSWER", 1)
    made: list[str] = []

    class Seen(_pieces.InPieces):
        def operator(self, name: str) -> Any:
            made.append(name)
            return super().operator(name)

    monkeypatch.setattr(_pieces, "in_pieces", lambda x: Seen(x.roots, x.systems))
    shared = bench("gpt2-tiny")
    here = type(shared)(shared.catalog, "gpt2-tiny", clip=0.0)
    found = here.measure(here.trainer())
    assert {"adamw", "fused_linear_cross_entropy"} <= set(made)
    assert found.samples["change_error"][0] < 1e-2
    assert found.remarks == ()
