"""Micro-batches of training steps in CUDA graphs, as a CPU can play them; `tests/gpu/test_steps_gpu.py` has real
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernelmark.suite.system import System
from kernelmark.suite.workloads import _expected, train
from kernelmark.suite.workloads._graphs import captured


def gradients(bench: Any, system: System) -> dict[str, torch.Tensor]:
    """Those of the second step of three micro-batches."""
    here = bench("llama-tiny", A=3)
    trainer, recipe, cpu = here.trainer(system=system), train.read(here.case), torch.device("cpu")
    trainer.load(_expected.initial(recipe, 11, cpu))
    for step in range(2):
        trainer.step(*_expected.Batches(recipe, 11, cpu).draw(step))
    return {name: x.clone() for name, x in trainer.gradients().items()}


def test_later_micro_batches_add_their_gradients(
    bench: Any, monkeypatch: pytest.MonkeyPatch, played_graphs: Callable[..., Any]
) -> None:
    wanted = gradients(bench, System("torch"))
    monkeypatch.setattr("kernelmark.suite.workloads._trainer.captured", played_graphs)
    for name, found in gradients(bench, System("torch_graph", execution="graph")).items():
        assert torch.equal(found, wanted[name]), name


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(NotImplementedError, match="are of CUDA devices"):
        captured(torch.device("cpu"), lambda: None)
