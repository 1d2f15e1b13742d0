"""Attention over processes against one process's in fp64: gathered and ring, masks, grouped heads, gradients."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention._context_parallel import chunks_of, gathered, merge
from kernelmark.kernels.attention._pulled import REST, Pulled
from kernelmark.kernels.cpu.attention_context_parallel import (
    PARTIAL,
    attention_context_parallel,
    attention_context_parallel_ring,
)
from kernelmark.registry.store.record import Case
from kernelmark.suite.operators import attention_context_parallel as operator

from ...ranks import Processes, places, spread

AXES = {"B": 1, "H": 4, "Hkv": 2, "S": 24, "D": 8}


def drawn(world, mask):
    B = 2 if world == 2 else 1  # chunks of one sequence are batches without a copy
    case = operator.OPERATOR.case({**AXES, "B": B, "gpus": world}, "fp32", "forward", mask=mask)
    generator = torch.Generator().manual_seed(3)
    inputs = operator.inputs(case, torch.device("cpu"), generator)
    q, k, v = (inputs[x].double() for x in "qkv")
    return case, q, k, v, torch.randn(q.shape, generator=generator, dtype=torch.float64)


def _parts(group, case: Case, mask, form, memory, q, k, v, grad):
    given = [operator.split(x, case, group.rank).requires_grad_() for x in (q, k, v)]
    if form == "pulled":
        out = gathered(*given, mask, PARTIAL, Pulled(Processes(group, memory)))
    else:
        calls = {"gathered": attention_context_parallel, "ring": attention_context_parallel_ring}
        out = calls[form](*given, mask)
    found = torch.autograd.grad(out, given, operator.split(grad, case, group.rank))
    return [out.detach(), *found]


@pytest.mark.parametrize(("world", "form"), [(2, "gathered"), (3, "pulled"), (3, "ring")])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_ranks_together_are_one_process(world, form, mask):
    case, q, k, v, grad = drawn(world, mask)
    parts = spread(world, _parts, case, mask, form, places(world, 1 << 14), q, k, v, grad)
    given = [x.requires_grad_() for x in (q, k, v)]
    whole = operator.reference(*given, mask)
    wanted = [whole.detach(), *torch.autograd.grad(whole, given, grad)]
    for i, right in enumerate(wanted):
        found = operator.join([x[i] for x in parts], case)
        tolerance = 1e-5 if form == "ring" else 1e-12  # a ring's sums are fp32
        assert float((found - right).norm() / right.norm()) < tolerance, i


class Late(Processes):
    """Whose copies beside the first are not there yet."""

    def beside(self, number):
        self.late = number == REST
        return super().beside(number)

    def place(self, rank, shape, dtype):
        there = super().place(rank, shape, dtype)
        return torch.full_like(there, torch.nan) if getattr(self, "late", False) and rank != self.rank else there


def _early(group, case, memory, k):
    own = operator.split(k, case, group.rank)
    return Pulled(Late(group, memory)).start(own, own, "causal")


def test_the_early_chunk_finds_its_keys_among_the_first_copies():
    """Nothing else is waited for before it is attended to."""
    case, _, k, _, _ = drawn(3, "causal")
    length = AXES["S"] // 6
    for rank, (whole, _) in enumerate(spread(3, _early, case, places(3, 1 << 14), k)):
        end = (rank + 1) * length
        assert torch.equal(whole[:, :, :end], k[:, :, :end])
        assert rank == 2 or whole.isnan().any()  # to the last rank only early chunks come, and those are first


def test_every_rank_of_a_causal_mask_has_the_same_work():
    assert len({sum(chunk + 1 for chunk in chunks_of(rank, 4)) for rank in range(4)}) == 1


def test_merging_parts_is_attending_to_all_keys():
    _, q, k, v, _ = drawn(2, "full")
    out, level = torch.zeros(q.shape), torch.full(q.shape[:3], -torch.inf)
    for keys in (slice(0, 5), slice(5, 24)):
        merge(out, level, *PARTIAL.forward(q, k[:, :, keys], v[:, :, keys], "full"))
    right, lse = PARTIAL.forward(q, k, v, "full")
    torch.testing.assert_close(out, right.float())
    torch.testing.assert_close(level, lse.float())


def test_rows_of_a_long_sequence_are_those_of_all(monkeypatch):
    case, q, k, v, _ = drawn(2, "causal")
    whole = operator.reference(q, k, v, "causal")
    monkeypatch.setattr(operator, "SAMPLED_FROM", 1)
    monkeypatch.setattr(operator, "SAMPLED_ROWS", 6)
    rows = operator.sampled(24)
    assert len(set(rows)) == 6
    assert rows[-1] == 23
    some = operator.reference(q, k, v, "causal")
    torch.testing.assert_close(some, whole[:, :, rows])
    parts = [operator.part(some, case, rank) for rank in range(2)]
    for rank, own in enumerate(parts):
        of_rank = operator.split(whole, case, rank)
        torch.testing.assert_close(own, of_rank[:, :, operator.local_rows(24, 2, rank)])
    assert sum(x.shape[2] for x in parts) == 6


def test_a_sequence_that_cannot_be_cut_is_said():
    case = operator.OPERATOR.case({**AXES, "S": 26, "gpus": 2}, "fp32", "forward")
    with pytest.raises(NotImplementedError, match="26 tokens cannot be cut into 4 equal chunks for 2 ranks"):
        operator.length(case)
