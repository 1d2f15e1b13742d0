"""Nodes that are agents of one host: what is wrong with what they found, and, marked, that they train as one."""

from __future__ import annotations

import pytest

from ..emulated_nodes import NO_PEERS, command, emulated, environment, judged


def test_what_is_judged():
    good = {"world": 4, "ways": {"ddp": {"losses": [6.0, 5.0], "alone": [6.0, 5.0001], "ms": 1.0}}}
    assert judged(good, "cpu", 4) == []
    assert judged(good, "cpu", 2) == ["4 ranks met, and not 2"]
    assert judged({}, "cpu", 4) == ["rank 0 said nothing"]
    wrong = {"world": 4, "ways": {"fsdp2": {"losses": [6.0, 5.0], "alone": [6.0, 5.5], "ms": 1.0}}}
    assert judged(wrong, "cpu", 4) == ["fsdp2: the loss of a step is off by 0.091, allowed 0.001"]


def test_a_node_has_its_own_gpus_and_no_peers(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment("cuda", 1, 2)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert NO_PEERS.items() <= environment("cuda", 0, 2).items()
    assert "CUDA_VISIBLE_DEVICES" not in environment("cpu", 0, 2)
    assert {"--nnodes=3", "--node-rank=1", "--nproc-per-node=2"} < set(command(3, 1, 2, 7, "out"))


@pytest.mark.ranks
def test_two_nodes_train_as_one_process():
    found, wrong = emulated("cpu", 2, 1, 50)
    assert wrong == []
    assert found["world"] == 2
