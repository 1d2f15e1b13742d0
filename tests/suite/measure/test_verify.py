"""The correctness gate, on literal tensors."""

from __future__ import annotations

import math

import pytest
import torch
from kernelmark.suite.measure.verify import Incorrect, deviation, flat, poison
from kernelmark.suite.operator import TOLERANCES, Tolerance

WIDE = Tolerance(norm=0.1, absolute=0.5, relative=0.1)
INF, NAN = math.inf, math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def refused(outputs, references, tolerance=WIDE) -> str:
    with pytest.raises(Incorrect) as error:
        deviation(outputs, references, tolerance)
    return str(error.value)


def test_the_same_is_no_deviation():
    assert deviation([f64(1, -2, 3)], [f64(1, -2, 3)], WIDE) == 0
    assert deviation([torch.ones(2, 0)], [torch.ones(2, 0)], WIDE) == 0
    assert deviation([f64(0, 0)], [f64(0, 0)], WIDE) == 0
    assert deviation([], [], WIDE) == 0


def test_an_imaginary_part_is_not_left_out():
    assert "complex" in refused([torch.complex(f64(1, 2), f64(0, 9))], [f64(1, 2)])


def test_the_relative_norm_of_the_worst_output():
    outputs, references = [f64(3, 4), f64(3, 4.1), f64(3, 4.01)], [f64(3, 4)] * 3
    assert deviation(outputs, references, WIDE) == pytest.approx(0.02)


def test_a_lower_precision_is_compared_in_the_references():
    assert deviation([torch.tensor([0.1], dtype=torch.bfloat16)], [f64(0.1)], TOLERANCES["bf16"]) < 4e-3


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_never_passes(value):
    assert refused([f64(1, value, 3)], [f64(1, 2, 3)]) == "output: 1 of 3 elements are NaN or infinite"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_it_passes_where_the_reference_has_the_same(value):
    assert deviation([f64(1, value, 3)], [f64(1, value, 3)], WIDE) == 0
    assert deviation([f64(value, value)], [f64(value, value)], WIDE) == 0


@pytest.mark.parametrize(("got", "right"), [(INF, -INF), (NAN, INF), (INF, NAN), (2.0, INF), (2.0, NAN)])
def test_it_does_not_pass_for_another(got, right):
    assert "differs from the reference where that is not finite" in refused([f64(1, got)], [f64(1, right)])


def test_numbers_and_shapes():
    assert refused([f64(1)], [f64(1), f64(2)]) == "1 outputs where the reference has 2"
    said = refused([f64(1), f64(1, 2)], [f64(1), f64(1, 2, 3)])
    assert said == "output 1 has shape (2,), the reference (3,)"


def test_the_border_of_the_norm():
    assert deviation([f64(10, 11)], [f64(10, 10)], WIDE) == pytest.approx(0.0707, abs=1e-4)
    assert refused([f64(10, 12)], [f64(10, 10)]) == "output: relative error 0.141, allowed 0.1"


def test_the_border_of_an_element():
    """One bad element of many hides in the norm; the bound on elements finds it."""
    right = torch.ones(10_000, dtype=torch.float64)
    wrong = right.clone()
    wrong[77] += 0.5 + 0.1 - 1e-9  # absolute × the typical magnitude, and relative × the value
    assert deviation([wrong], [right], WIDE) == pytest.approx(0.006)
    wrong[77] += 2e-9
    said = refused([wrong], [right])
    assert said == "output: 1 of 10000 elements beyond tolerance, the farthest by 0.6 (typical magnitude 1)"


def test_a_few_of_very_many_elements_may_be_beyond_their_bound():
    """But none far, and no more than a few: one of ten million each."""
    right = torch.ones(20_000_000)
    wrong = right.clone()
    wrong[5], wrong[7_000_000] = 2.0, 0.0
    assert deviation([wrong], [right], WIDE) == pytest.approx(3.2e-4, rel=0.1)
    wrong[9] = 2.0
    assert "3 of 20000000 elements beyond tolerance" in refused([wrong], [right])
    wrong[7_000_000] = wrong[9] = 1.0
    wrong[5] = 1.0 + 10 * 0.6 + 1e-3
    assert "1 of 20000000 elements beyond tolerance, the farthest by 6" in refused([wrong], [right])


def test_a_reference_of_zeros_bounds_the_largest_deviation():
    assert refused([f64(0, 0.2)], [f64(0, 0)]) == "output: relative error 0.2, allowed 0.1"


def test_flat():
    a, b = f64(1), f64(2)
    assert flat(a) == [a]
    assert flat((a, None, b)) == [a, b]
    with pytest.raises(AssertionError):
        flat({"a": a})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_leaves_nan(dtype):
    whole = torch.zeros(4, 6, dtype=dtype)
    poison((whole[1:3, ::2],))
    assert whole.isnan().all()  # the memory behind a view too: the next call gets all of it


def test_poison_of_what_is_no_float_or_wants_a_gradient():
    q = torch.zeros(3, dtype=torch.float8_e4m3fn)
    i = torch.zeros(3, dtype=torch.int32)
    y = torch.ones(2, requires_grad=True) * 2
    poison([q, i, y])
    assert q.float().isnan().all()
    assert i.tolist() == [-1] * 3
    assert y.isnan().all()
    poison(torch.empty(0))
