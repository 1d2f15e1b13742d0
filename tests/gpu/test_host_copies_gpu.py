"""Copies on the host that a device reads itself."""

from __future__ import annotations

import gc

import torch
from kernelmark.suite.measure.host_copies import copies
from kernelmark.suite.model import chosen
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._recipe import Recipe

CUDA = torch.device("cuda")


def test_copies_are_locked_and_come_back_as_they_were() -> None:
    tensors = {"table": torch.randn(1000, 64, device=CUDA), "norm": torch.randn(64, device=CUDA)}
    found = copies(tensors, torch.bfloat16)
    for name, x in found.items():
        assert x.is_pinned()
        assert torch.equal(x, tensors[name].bfloat16().cpu())
        assert torch.equal(x.to(CUDA, non_blocking=True), tensors[name].bfloat16())


def test_memory_that_was_given_back_is_not_locked_and_the_device_goes_on() -> None:
    for _ in range(20):
        found = copies({"x": torch.ones(1 << 20, device=CUDA)}, torch.float32)
        assert found["x"].is_pinned()
        del found
        gc.collect()
    assert not torch.ones(1 << 20).is_pinned()
    assert float(torch.ones(4, device=CUDA).sum()) == 4


def test_the_answer_of_a_training_case_is_locked() -> None:
    recipe = Recipe(chosen(train.catalog().models, "llama-tiny"), 2, 64, 1, "bf16", "bf16", "plain", 1.0)
    found = answer.compute(recipe, train.catalog(), 3, CUDA)
    for own in (found.first.gradients, found.random.gradients, found.changed):
        assert own
        assert all(x.is_pinned() for x in own.values())
