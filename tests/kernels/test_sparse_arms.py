"""Arms of `converge` whose attention is our `attention_sparse`, through Triton's interpreter, against those whose
attention is a mask of elements.
"""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from kernelmark.kernels.attention.attention_sparse import attention_sparse
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import converge
from kernelmark.suite.workloads._arms import ArmTrainer
from kernelmark.suite.workloads._gated import Gates
from kernelmark.suite.workloads._sparse import blocks, elements, left_out, masked, over_chosen, over_given
from kernelmark.suite.workloads._training import initial

PATTERNS = ("static", "window", "random", "dynamic", "learned")


def with_gradients(attention, heads=2, S=300):
    """Output and gradients of q, k, v whose blocks have means of their own, views of a projection as models make
    them: (B, S, heads, D) transposed.
    """
    generator = torch.Generator().manual_seed(4)

    def draw(heads: int) -> torch.Tensor:
        means = torch.randn(1, -(-S // 128), heads, 16, generator=generator).repeat_interleave(128, 1)[:, :S]
        return torch.randn(1, S, heads, 16, generator=generator) + means

    leaves = [draw(x).requires_grad_() for x in (2, heads, heads)]
    out = attention(*(x.transpose(1, 2) for x in leaves), "causal")
    grad = torch.randn(out.shape, generator=generator)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def by_kernel(pattern, call=attention_sparse, heard=lambda seen: None):
    if pattern in ("dynamic", "learned"):
        return over_chosen(call, 50, Gates(50) if pattern == "learned" else None, heard)
    return over_given(call, blocks(pattern, 50))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_by_our_kernel_are_those_of_the_mask(pattern):
    """Forward and backward, keys of fewer heads than queries, a last block that is not whole."""
    heads = 1 if pattern in ("static", "learned") else 2
    chosen = Gates(50) if pattern == "learned" else blocks(pattern, 50)
    heard: list[torch.Tensor] = []
    found = with_gradients(by_kernel(pattern, heard=heard.append), heads)
    wanted = with_gradients(masked(elements(chosen)), heads)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)
    assert [x.shape for x in heard] == ([(1, 2, 3, 3)] if pattern in ("dynamic", "learned") else [])
    assert all(float(left_out(x)) == pytest.approx(1 - 4 / 6) for x in heard), "rows of 1, 1 and 2 blocks"


def test_blocks_that_are_off_by_one_are_seen():
    """In the output and in every gradient: the third row sees the first block beside its own, not the second."""

    def shifted(q, k):
        seen = blocks("window", 50)(q, k)
        own = torch.eye(len(seen), dtype=torch.bool)
        return own | (seen & ~own).roll(-1, 1).tril(-1)

    found = with_gradients(over_given(attention_sparse, shifted))
    wanted = with_gradients(masked(elements(blocks("window", 50))))
    for x, y in zip(found, wanted, strict=True):
        assert not torch.allclose(x, y, rtol=1e-2, atol=1e-2)


def smaller(trainer, **sizes):
    """The interpreter takes seconds for the layers of the smallest model."""
    configuration = dataclasses.replace(trainer.recipe.chosen.configuration, **sizes)
    chosen = dataclasses.replace(trainer.recipe.chosen, configuration=configuration)
    trainer.recipe = dataclasses.replace(trainer.recipe, chosen=chosen)


@pytest.fixture
def made(monkeypatch):
    """Makes an arm of a tiny case whose part is our kernel for GPUs, interpreted."""
    call = Assembly.call

    def interpreted(self, part, operator, *given):
        if operator in ("attention_sparse", "attention"):  # the second is never called
            return attention_sparse
        by_torch = msgspec.structs.replace(self.system, base="torch")  # ours for a CPU are compiled first
        return call(dataclasses.replace(self, system=by_torch), part, operator, *given)

    monkeypatch.setattr(Assembly, "call", interpreted)
    axes = {"B": 1, "S": 260, "N": 1}
    case = converge.WORKLOAD.case(axes, "fp32", "program", model="llama-tiny", data="synthetic")

    def make(base: str, attention: str, **fields) -> ArmTrainer:
        system = System("arm", base=base, changes=Changes(attention=attention), **fields)
        trainer = converge.assemble(case, Assembly(system, converge.catalog()))
        smaller(trainer, layers=1, heads=2, kv_heads=1)
        trainer.load(initial(trainer.recipe, 3, torch.device("cpu")))
        return trainer

    return make


def test_a_model_trains_by_our_kernel_as_by_the_mask(made):
    """By gates that learn: whose kernel is told the blocks is beside the same mask above."""
    tokens, targets = torch.randint(0, 256, (2, 1, 1, 260), generator=torch.Generator().manual_seed(0))
    ours, theirs = (made(base, "learned-50") for base in ("kernelmark", "torch"))
    losses = [float(x.step(tokens, targets)) for x in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, x in theirs.gradients().items():
        torch.testing.assert_close(ours.gradients()[name], x, rtol=1e-3, atol=1e-5)
    assert ours.left_out(tokens[0]) == theirs.left_out(tokens[0]) > 0
    held = [[int(own[3]) for own in x.gates.held.values()] for x in (ours, theirs)]
    assert held[0] == held[1] == [1], "a step of the layer's gate, and none by looking"


def test_what_our_kernel_does_not_take_says_why(made):
    trainer = made("kernelmark", "static-50")
    smaller(trainer, head=320)
    with pytest.raises(NotImplementedError, match="of heads of up to 256 dimensions, not 320"):
        trainer._attention(torch.device("cpu"))
