"""Times that no device can reach, from the data sheets of two."""

from __future__ import annotations

import pytest
from kernelmark.registry.store.record import Case
from kernelmark.suite.run.peaks import CACHE_BYTES, LEAST_CALL_MS, LEAST_MS, MARGIN, least_ms

H100 = {"gpu_capability": "9.0", "gpu_sm_count": 132}
H100_NOTED = {"gpu/max_memory_mhz": 2619, "gpu/memory_bus_bits": 5120, "gpu/max_sm_mhz": 1980}


def case(bytes_: int, flops: int = 0, dtype: str = "bf16") -> Case:
    return Case("double", "x", {}, {}, dtype, "forward", "5bec", bytes_, flops)


def test_bytes_at_the_memorys_peak_without_what_a_cache_may_hold():
    # 3.35 TB/s: NVIDIA H100 SXM5 data sheet
    assert least_ms(case(CACHE_BYTES + 3_352_320_000), "cuda", H100, H100_NOTED) == pytest.approx(MARGIN)
    assert least_ms(case(CACHE_BYTES), "cuda", H100, H100_NOTED) == LEAST_MS


@pytest.mark.parametrize(("dtype", "tflops"), [("bf16", 1070.5), ("fp32", 1070.5), ("e4m3", 4 * 1070.5)])
def test_operations_at_the_peak_of_the_fastest_unit(dtype, tflops):
    found = least_ms(case(1, int(tflops * 1e9), dtype), "cuda", H100, H100_NOTED)
    assert found == pytest.approx(MARGIN, rel=1e-3)


@pytest.mark.parametrize(("products", "tflops"), [("dtype", 1070.5), ("e4m3", 4 * 1070.5)])
def test_products_in_8_bits_may_be_as_quick_as_these(products, tflops):
    """A decode step of many sequences is bound by products, not by bytes."""
    step = Case("generate", "x", {}, {"products": products}, "bf16", "program", "5bec", 1, int(tflops * 1e9))
    assert least_ms(step, "cuda", H100, H100_NOTED) == pytest.approx(MARGIN, rel=1e-3)


def test_what_is_not_known_bounds_nothing():
    assert least_ms(case(1 << 40, 1 << 60), "cuda", {}, {}) == LEAST_MS
    assert least_ms(case(1 << 40, 1 << 60), "cuda", {"gpu_capability": True}, {"gpu/max_sm_mhz": "x"}) == 1e-4
    assert least_ms(case(0), "cuda", H100, H100_NOTED) == 0


def test_a_cpu():
    cores = {"cpu_count": 2}
    assert least_ms(case(16), "cpu", cores, {}) == LEAST_CALL_MS
    assert least_ms(case(2_688_000_000), "cpu", cores, {}) == pytest.approx(MARGIN)  # all from its first cache
    assert least_ms(case(1, 1_792_000_000, "fp32"), "cpu", cores, {}) == pytest.approx(MARGIN)
    assert least_ms(case(1, 10**15, "bf16"), "cpu", {}, {}) > 0
