"""Tokens at their experts and back: by processes that exchange, against a loop over tokens; and what cannot be."""

from __future__ import annotations

import re

import pytest
import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.operators import expert_exchange as operator

from ...ranks import spread

SIZES = {"M": 12, "D": 8, "E": 6, "K": 2}
CPU = torch.device("cpu")


def drawn(world, **sizes):
    case = operator.OPERATOR.case({**SIZES, **sizes, "gpus": world}, "fp32", "forward", skew=1)
    return case, operator.inputs(case, CPU, torch.Generator().manual_seed(2))


def _exchanged(group, case, given):
    own = {name: operator.OPERATOR.sharding.split(x, case, group.rank) for name, x in given.items()}
    peer = next(x for x in Catalog.default().of_operator("expert_exchange") if x.name == "torch_distributed")
    return peer.load()(case)(**own)


def test_tokens_come_back_from_all_their_experts():
    case, given = drawn(3)
    x, experts, weights, scale = (given[name].flatten(0, 1) for name in ("x", "experts", "weights", "scale"))
    right = torch.zeros_like(x)
    for token in range(SIZES["M"]):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            right[token] += weight * scale[expert] * x[token]
    torch.testing.assert_close(operator.reference(**given).flatten(0, 1), right)
    found = torch.cat(spread(3, _exchanged, case, given))
    torch.testing.assert_close(found, right)


def test_parts_make_up_the_whole():
    """Also where there are as many experts as tokens."""
    sharding = operator.OPERATOR.sharding
    for experts in (6, 12):
        case, given = drawn(3, E=experts)
        for x in given.values():
            assert torch.equal(sharding.join([sharding.split(x, case, r) for r in range(3)], case), x)


@pytest.mark.parametrize(("sizes", "said"), [({"E": 7}, "E = 7 cannot"), ({"M": 13}, "M = 13 cannot")])
def test_what_cannot_be_shared_is_said(sizes, said):
    with pytest.raises(NotImplementedError, match=said):
        drawn(3, **sizes)


def test_deep_ep_says_why_it_is_not_here(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELMARK_ENVIRONMENTS", str(tmp_path))
    (peer,) = (x for x in Catalog.default().parts if x.provider == "deep_ep")
    status, reason = peer.unavailable("cuda") or ("", "")
    assert status == "unavailable"
    assert re.search(r"cannot be locked: what PyPI has is a source archive .* by hand$", reason)
