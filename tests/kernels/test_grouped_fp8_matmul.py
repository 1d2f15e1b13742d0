"""Products of groups of rows in 8 bits, contiguous and masked."""

import pytest
import torch
from kernelmark.kernels.matmul import _grouped_hopper
from kernelmark.kernels.matmul import grouped_fp8_matmul as module
from kernelmark.kernels.matmul.grouped_fp8_matmul import grouped_fp8_matmul

from . import groups as by_tiles

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(("layout", "recipe"), [("contiguous", "block"), ("masked", "row")])
def test_agrees(agrees, layout, recipe):
    agrees("grouped_fp8_matmul", {"E": 2, "M": 3, "N": 40, "K": 2880}, "e4m3", layout=layout, recipe=recipe)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("recipe", ["block", "row"])
def test_agrees_on_hopper(monkeypatch, agrees, layout, recipe):
    """Which rows are whose, in tiles whose products PyTorch computes."""
    asked = []

    def multiply(a, b, out, tiles, schedule, *rest):
        asked.append(schedule.masked)
        by_tiles.multiply(a, b, out, tiles, schedule, *rest)

    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(_grouped_hopper, "multiply", multiply)
    agrees("grouped_fp8_matmul", {"E": 3, "M": 150, "N": 40, "K": 272}, "e4m3", layout=layout, recipe=recipe)
    assert asked == [layout == "masked"]


def test_masked_rows_are_left_alone(agrees):
    """A group without rows, one that is full, and scales that lie otherwise."""

    def change(given):
        return {"groups": torch.tensor([0, 128], dtype=torch.int32), "scale_a": given["scale_a"].contiguous()}

    agrees("grouped_fp8_matmul", {"E": 2, "M": 1, "N": 24, "K": 130}, "e4m3", change, layout="masked")


def test_parts_of_larger_matrices():
    a = torch.randn(128, 300).to(E4M3)[:, 100:228]
    b = torch.randn(1, 16, 300).to(E4M3)[:, :, 4:132]
    groups = torch.zeros(128, dtype=torch.int32)
    got = grouped_fp8_matmul(a, b, torch.ones(128, 1), torch.ones(1, 1, 1), groups)
    torch.testing.assert_close(got, (a.double() @ b[0].double().T).bfloat16())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": torch.zeros(2, 128, 128).to(E4M3)}, ValueError, r"expected \(T, 128\) or \(1, M, 128\)"),
        ({"groups": torch.zeros(128)}, TypeError, "groups has dtype"),
        ({"groups": torch.zeros(1, dtype=torch.int32)}, ValueError, r"groups has shape \(1,\), expected \(128,\)"),
        ({"recipe": "tile"}, ValueError, "recipe is 'tile'"),
        ({"scale_b": torch.ones(1, 16)}, ValueError, r"scale_b has shape \(1, 16\), expected \(1, 1, 1\)"),
    ],
)
def test_says_what_is_wrong(change, error, message):
    given = {
        "a": torch.zeros(128, 128).to(E4M3),
        "b": torch.zeros(1, 16, 128).to(E4M3),
        "scale_a": torch.ones(128, 1),
        "scale_b": torch.ones(1, 1, 1),
        "groups": torch.zeros(128, dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        grouped_fp8_matmul(**given | change)
