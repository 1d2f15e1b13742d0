"""The decoding operator: its cases, its reference against torch's attention, its costs."""

from __future__ import annotations

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS
from kernelmark.suite.operators.attention_decode import OPERATOR, lengths_of, reference

AXES = {"B": 3, "Sq": 2, "H": 4, "Hkv": 2, "S": 50, "D": 16}


def drawn(**options):
    case = OPERATOR.case(AXES, "fp32", "forward", **options)
    return case, OPERATOR.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("lengths", ["equal", "mixed"])
def test_reference_agrees_with_torch(page, lengths):
    case, inputs = drawn(page=page, lengths=lengths)
    result = IMPLEMENTATIONS["attention_decode"]["torch"](case)(**inputs)
    torch.testing.assert_close(result, reference(**inputs), rtol=1e-4, atol=1e-5)


def test_mixed_lengths_go_from_whole_to_half():
    case, inputs = drawn(page=16, lengths="mixed")
    assert lengths_of(case) == [50, 38, 25]
    assert inputs["lengths"].tolist() == [50, 38, 25]


def test_every_sequence_has_pages_of_its_own():
    _, inputs = drawn(page=16)
    assert inputs["block_table"].shape == (3, 4)
    assert sorted(inputs["block_table"].flatten().tolist()) == list(range(12))
    assert inputs["k_cache"].shape == (12, 16, 2, 16)


def test_costs_count_each_key_and_value_once():
    case = OPERATOR.case({"B": 64, "Sq": 1, "H": 32, "Hkv": 8, "S": 4096, "D": 128}, "bf16", "forward", page=64)
    cache = 2 * 64 * 4096 * 8 * 128 * 2
    assert case.bytes == cache + 2 * 64 * 32 * 128 * 2 + 4 * 64 * 65
    assert case.flops == 4 * 64 * 32 * 4096 * 128
    mixed = OPERATOR.case(dict(case.axes), "bf16", "forward", page=64, lengths="mixed")
    assert 0.74 < mixed.bytes / case.bytes < 0.76
