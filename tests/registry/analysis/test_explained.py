"""What differs between two profiled steps, from literal ones."""

from __future__ import annotations

import pytest
from kernelmark.registry.analysis.explained import difference, stated
from kernelmark.registry.store.record import Launched, Launches

MATMUL = Launched("nvjet_tst_128x256", "product", 96, 40.0)


def step(*kernels: Launched, gap_ms: float = 0.0) -> Launches:
    return Launches("train", "B4-tiny", "any", 2, gap_ms, kernels)


BASE = step(
    MATMUL,
    Launched("triton_red_fused_add_rms_norm_3", "other", 32, 3.2),
    Launched("triton_poi_fused_clone_1", "copy", 16, 0.8),
)


def test_copies_launches_and_lost_fusion_are_counted() -> None:
    exchanged = step(
        MATMUL,
        Launched("_norm_forward", "ours", 32, 2.0),
        Launched("void at::native::vectorized_elementwise_kernel<add>", "other", 32, 1.5),
        Launched("void at::native::direct_copy_kernel_cuda", "copy", 48, 2.4),
        gap_ms=0.5,
    )
    found = difference(BASE, exchanged)
    assert (found.launches, found.copies) == (64, 32)
    assert found.copies_ms == pytest.approx(1.6)
    assert [x.name for x in found.gone] == ["triton_red_fused_add_rms_norm"]
    assert [x.name for x in found.new] == [
        "_norm_forward",
        "void at::native::vectorized_elementwise_kernel<add>",
    ]
    assert stated(found) == (
        "+32 layout copies (+1.600 ms); +64 launches; gone: triton_red_fused_add_rms_norm × 32 (3.200 ms); "
        "new: _norm_forward × 32 (2.000 ms), at::native::vectorized_elementwise_kernel<add> × 32 (1.500 ms); "
        "waiting +0.500 ms"
    )


def test_a_compilers_numbers_name_no_other_kernel() -> None:
    renumbered = step(
        MATMUL,
        Launched("triton_red_fused_add_rms_norm_7", "other", 32, 3.2),
        Launched("triton_poi_fused_clone_4", "copy", 16, 0.8),
    )
    assert stated(difference(BASE, renumbered)) == "the same kernels, as often, in the same time"


def test_the_same_kernels_may_take_longer() -> None:
    """A neighbour that left its result in the cache, or not."""
    slower = step(with_ms(MATMUL, 41.5), *BASE.kernels[1:])
    assert stated(difference(BASE, slower)) == "other kernels +1.500 ms"


def with_ms(x: Launched, ms: float) -> Launched:
    return Launched(x.name, x.kind, x.calls, ms)


def test_a_kernel_that_is_called_less_often_is_gone_as_often() -> None:
    fewer = step(Launched(MATMUL.name, MATMUL.kind, 72, 30.0), *BASE.kernels[1:])
    found = difference(BASE, fewer)
    assert [(x.calls, x.ms) for x in found.gone] == [(24, 10.0)]
    assert (found.launches, found.kept_ms) == (-24, 0)
    assert stated(found).startswith("−24 launches; gone: nvjet_tst_128x256 × 24")


def test_on_a_cpu_a_copy_counts_once_and_events_around_it_not_at_all() -> None:
    base = step(Launched("aten::addmm", "product", 4, 2.0), Launched("aten::copy_", "copy", 2, 0.1))
    more = step(
        Launched("aten::addmm", "product", 4, 2.0),
        Launched("aten::clone", "copy", 3, 0.02),
        Launched("aten::copy_", "copy", 5, 0.25),
        Launched("aten::empty_strided", "other", 3, 0.01),
        Launched("autograd::engine::evaluate_function: CloneBackward0", "other", 3, 0.5),
        Launched("CloneBackward0", "other", 3, 0.01),
    )
    assert stated(difference(base, more)) == "+3 layout copies (+0.170 ms); +3 launches"
