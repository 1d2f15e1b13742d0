"""A feed-forward of experts: routing, products by expert, combination."""

import pytest
import torch
from kernelmark.kernels.matmul import _grouped_hopper
from kernelmark.kernels.matmul import moe as module
from kernelmark.kernels.matmul._routing import chosen, listed
from kernelmark.kernels.matmul.moe import moe

from . import groups

AXES = {"M": 17, "D": 40, "F": 24, "E": 3, "K": 2}


def test_agrees(agrees):
    agrees("moe", AXES, "bf16", skew=3)


@pytest.mark.parametrize("M", [1, 9])
def test_agrees_in_8_bits(agrees, M):
    """An expert's width is no multiple of 128, of which the gate's and up's blocks are counted apart."""
    agrees("moe", AXES | {"M": M, "D": 160, "F": 150}, "e4m3")


CLAMPED = {"gate_up": 2, "limit": 1.0}
"""Weights times so much, clamped at so much: nearly a third of gates, two thirds of ups."""


def clamping(given):
    return {"gate_up": given["gate_up"] * CLAMPED["gate_up"], "limit": CLAMPED["limit"]}


def clamping_in_8_bits(given):
    return {"scale_gate_up": given["scale_gate_up"] * CLAMPED["gate_up"], "limit": CLAMPED["limit"]}


def test_agrees_clamped(agrees):
    agrees("moe", AXES, "bf16", clamping, activation="clamped")
    agrees("moe", AXES | {"M": 9, "D": 160, "F": 150}, "e4m3", clamping_in_8_bits, activation="clamped")


def test_agrees_clamped_on_hopper(agrees, on_hopper):
    axes = {"M": 30, "D": 32, "F": 32, "E": 3, "K": 2}
    agrees("moe", axes, "e4m3", clamping_in_8_bits, activation="clamped")
    assert [x.limit for x in on_hopper] == [1.0, 0.0]


def test_parts_of_larger_matrices(agrees):
    """One token of a width that no tile divides, its row and the weights' between others."""

    def change(given):
        wide = torch.randn(1, 2900).bfloat16()
        wide[:, 10:2890] = given["x"]
        router = torch.randn(2, 2901).bfloat16()
        router[:, 21:] = given["router"]
        down = torch.randn(2, 2880, 40).bfloat16()
        down[:, :, 16:] = given["down"]
        return {"x": wide[:, 10:2890], "router": router[:, 21:], "down": down[:, :, 16:]}

    agrees("moe", {"M": 1, "D": 2880, "F": 24, "E": 2, "K": 1}, "bf16", change)


@pytest.fixture
def on_hopper(monkeypatch):
    """As on Hopper, where PyTorch computes the products of groups: the schedules that were asked for."""
    asked = []

    def multiply(a, b, out, tiles, schedule, *rest, **scales):
        asked.append(schedule)
        assert all(map(_grouped_hopper.mapped, (a, b, out)))
        groups.multiply(a, b, out, tiles, schedule, *rest, **scales)

    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(_grouped_hopper, "multiply", multiply)
    return asked


@pytest.mark.parametrize(("M", "dtype", "groups"), [(192, "bf16", 2), (96, "e4m3", 2), (30, "e4m3", 1)])
def test_agrees_on_hopper(agrees, on_hopper, M, dtype, groups):
    """Tokens are copied to their experts' rows, with their scales, and each comes back from where it was."""
    agrees("moe", {"M": M, "D": 160, "F": 144, "E": 3, "K": 2}, dtype, skew=3)
    assert [(x.gated, x.groups) for x in on_hopper] == [(True, groups), (False, groups)]
    assert on_hopper[0].quantized == (dtype == "e4m3")


def test_what_cannot_be_mapped_takes_the_portable_kernel(agrees, on_hopper):
    agrees("moe", AXES | {"M": 192, "F": 30}, "bf16")
    assert on_hopper == []


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(("M", "height"), [(1, 16), (11, 16), (18, 32), (40, 64)])
def test_few_rows_an_expert_have_low_tiles(agrees, on_hopper, M, height, dtype):
    agrees("moe", {"M": M, "D": 160, "F": 144, "E": 3, "K": 2}, dtype, skew=1)
    assert [x.height for x in on_hopper] == [height, height]


@pytest.mark.parametrize(("M", "E", "k"), [(1, 3, 3), (37, 9, 2)])
def test_every_choice_has_one_place(M, E, k):
    """In a tile of its expert; tiles that are left over are nobody's."""
    x, router = torch.randn(M, 24).bfloat16(), torch.randn(E, 24).bfloat16()
    choices = chosen(x, router, k)
    experts, shares, rows = choices.experts, choices.shares, listed(choices, 16)
    logits = x.double() @ router.double().T
    assert torch.equal(experts.long(), logits.topk(k, -1).indices)
    torch.testing.assert_close(shares, logits.topk(k, -1).values.softmax(-1).float(), rtol=1e-3, atol=1e-3)
    places = rows.row_of.view(-1, 16)
    assert sorted(places[places >= 0].tolist()) == list(range(M * k))
    for group, tile in zip(rows.group_of.tolist(), places, strict=True):
        assert experts.flatten()[tile[tile >= 0].long()].eq(group).all()
        assert (group >= 0) == bool((tile >= 0).any())


def test_nothing():
    router, weight = torch.zeros(2, 8).bfloat16(), torch.zeros(2, 8, 8).bfloat16()
    y, experts = moe(torch.zeros(0, 8).bfloat16(), router, weight, weight[:, :, :4], None, None, 1)
    assert (y.shape, experts.shape) == ((0, 8), (0, 1))


def test_says_what_is_wrong():
    given = {
        "x": torch.zeros(3, 8).bfloat16(),
        "router": torch.zeros(2, 8).bfloat16(),
        "gate_up": torch.zeros(2, 8, 8).bfloat16(),
        "down": torch.zeros(2, 8, 4).bfloat16(),
        "scale_gate_up": None,
        "scale_down": None,
        "top_k": 1,
    }
    for change, message in (
        ({"top_k": 3}, "top_k is 3, expected 1 to 2"),
        ({"limit": -7.0}, "limit is -7.0, expected a finite number above 0"),
        ({"down": torch.zeros(2, 8, 5).bfloat16()}, r"down has shape \(2, 8, 5\), expected \(2, 8, 4\)"),
        ({"scale_down": torch.ones(2, 1, 1)}, "scales are given, but the weights are bf16"),
        ({"router": torch.zeros(2, 9).bfloat16()}, r"router has shape \(2, 9\), expected \(2, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            moe(**given | change)
