"""The least time that physics allows a case on a device: below it, a time is no time of that work.

From the data sheet's rates at the highest clock, so that no honest kernel can be faster: bytes at the peak of the
memory (what fits in a last-level cache left out, as inputs may lie there), operations at that of the fastest unit
that its products' dtype allows. Between this and the ceilings that a run measures lies what is merely surprising.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...registry.store.record import Case, Scalar

CACHE_BYTES = 192 << 20
"""No GPU's last-level cache is larger."""
MARGIN = 0.95
"""Share of the least time that is still believed: clocks are given in steps."""
SIXTEEN_BITS: Mapping[str, int] = {
    "7.0": 1024,
    "7.5": 1024,
    "8.0": 2048,
    "8.6": 1024,
    "8.7": 1024,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "10.3": 8192,
    "12.0": 1024,
    "12.1": 1024,
}
"""Operations (a multiply and an add are two) a clock and multiprocessor, dense, of 16-bit matrix units, by
capability; fp32 may be computed on them too. NVIDIA's architecture white papers."""
EIGHT_BITS = 4
"""How many times that narrower formats reach at most, 4-bit ones among them."""
LEAST_MS, LEAST_CALL_MS = 1e-4, 2e-5
"""No launch and no Python call is shorter."""
CPU_HZ = 7e9
CPU_BYTES = 192
"""Bytes a core reads and writes a clock at most: three vectors of 64 bytes, from its first cache."""
CPU_FLOPS = {"fp32": 128, "fp64": 64}
CPU_MATRIX_FLOPS = 4096
"""Operations a clock and core: two vector units, and of narrower formats matrix units."""


def least_ms(case: Case, device: str, conditions: Mapping[str, Scalar], noted: Mapping[str, Scalar]) -> float:
    """Milliseconds below which a time is refused; 0 for a case that does nothing.

    `conditions` and `noted` are those of a run's header. What they do not say bounds nothing.
    """
    if case.bytes <= 0 and case.flops <= 0:
        return 0.0
    if device == "cpu":
        return max(LEAST_CALL_MS, MARGIN * _cpu(case, conditions) * 1e3)
    seconds = _cuda(case, conditions, noted) if device == "cuda" else 0.0  # of others' peaks nothing is known here
    return max(LEAST_MS, MARGIN * seconds * 1e3)


def _cuda(case: Case, conditions: Mapping[str, Scalar], noted: Mapping[str, Scalar]) -> float:
    memory_mhz, bits = _number(noted, "gpu/max_memory_mhz"), _number(noted, "gpu/memory_bus_bits")
    sm_mhz, count = _number(noted, "gpu/max_sm_mhz"), _number(conditions, "gpu_sm_count")
    rate = SIXTEEN_BITS.get(str(conditions.get("gpu_capability")), 0)
    if case.products not in ("bf16", "fp16", "fp32", "fp64"):
        rate *= EIGHT_BITS
    bandwidth = 2 * memory_mhz * 1e6 * bits / 8  # both edges of the clock
    peak = rate * count * sm_mhz * 1e6
    moved = max(0, case.bytes - CACHE_BYTES)
    return max(moved / bandwidth if bandwidth else 0.0, case.flops / peak if peak else 0.0)


def _cpu(case: Case, conditions: Mapping[str, Scalar]) -> float:
    clocks = (_number(conditions, "cpu_count") or 1024) * CPU_HZ
    return max(
        case.bytes / (CPU_BYTES * clocks), case.flops / (CPU_FLOPS.get(case.products, CPU_MATRIX_FLOPS) * clocks)
    )


def _number(values: Mapping[str, Scalar], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
