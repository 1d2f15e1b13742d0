"""The limit of a case: what the device's own copies, products and exponentials took in the same run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from ..store.record import TF32, Cache, Case, Ceiling

IN_TF32 = frozenset({"matmul", "newton_schulz"})
"""Operators whose tolerance in fp32 lets products round their inputs to TF32."""

ABOVE = 1.02
"""A row above so much of its limit has passed it: what was taken for the device's ceiling is none. Up to there it
is the spread of two measurements.
"""


@dataclass(frozen=True)
class Ceilings:
    """Times of copies, of reading and of writing by bytes moved, matmul rate by dtype, and the rate of
    exponentials: medians over the run's replicates.
    """

    copy_ms: Mapping[int, float]
    matmul_flops_per_ms: Mapping[str, float]
    one_way_ms: Sequence[Mapping[int, float]] = ()
    """Of reading alone and of writing alone."""
    exponentials_per_ms: float | None = None
    _moving_ms: dict[int, float | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, ceilings: Iterable[Ceiling]) -> Ceilings:
        """From a journal's lines."""
        moved: dict[str, dict[int, list[float]]] = {x: {} for x in ("copy", "read", "write")}
        rates: dict[str, list[float]] = {}
        exponentials = []
        for x in ceilings:
            if x.what in moved:
                moved[x.what].setdefault(x.size, []).append(x.time_ms)
            elif x.what == "exponential":
                exponentials.append(x.size / x.time_ms)
            elif x.dtype is not None:
                rates.setdefault(x.dtype, []).append(x.size / x.time_ms)
        copy, *one_way = (
            {size: median(times) for size, times in sorted(found.items())} for found in moved.values()
        )
        return cls(
            copy,
            {dtype: median(values) for dtype, values in rates.items()},
            tuple(x for x in one_way if x),
            median(exponentials) if exponentials else None,
        )

    def moving_ms(self, size: int) -> float | None:
        """The least time that moving `size` bytes in all takes: of a copy, of reading alone or of writing alone,
        whichever is quickest, as a case does not say how much of it is which.
        """
        if size not in self._moving_ms:
            times = [_between(x, size) for x in (self.copy_ms, *self.one_way_ms) if x and size > 0]
            self._moving_ms[size] = min(times, default=None)
        return self._moving_ms[size]

    def limit_ms(self, case: Case, cache: Cache = "cold") -> float | None:
        """The largest of the least times for the case's bytes, for its matrix products and for its exponentials.

        None where a needed ceiling was not measured: half a limit would flatter nobody, but mislead. With a hot
        cache no byte has to come from memory, so that bytes set no limit. Exponentials count where they were
        measured; a CPU has no unit of them.
        """
        times: Sequence[float | None] = (
            [self.moving_ms(case.bytes)] if case.bytes and cache == "cold" else []
        ) + ([self._matmul_ms(case)] if case.flops else [])
        known = [x for x in times if x is not None]
        if not known or len(known) < len(times):
            return None
        return max(*known, case.exponentials / (self.exponentials_per_ms or math.inf))

    def multiplied(self, operator: str, products: str) -> str:
        """The dtype whose rate an operator's matrix products are held to: in fp32 TF32's, where the tolerance lets
        them be of it and the rate was measured.
        """
        in_tf32 = products == "fp32" and operator in IN_TF32 and TF32 in self.matmul_flops_per_ms
        return TF32 if in_tf32 else products

    def _matmul_ms(self, case: Case) -> float | None:
        rate = self.matmul_flops_per_ms.get(self.multiplied(case.operator, case.products))
        return case.flops / rate if rate else None

    def summary(self) -> dict[str, Any]:
        """Best copy bandwidth in GB/s and matmul rates in TFLOP/s, for reading."""
        copy = max((size / ms / 1e6 for size, ms in self.copy_ms.items()), default=None)
        one_way = [size / ms / 1e6 for x in self.one_way_ms for size, ms in x.items()]
        return {
            "copy_gbps": copy,
            "one_way_gbps": max(one_way, default=None),
            "matmul_tflops": {dtype: rate / 1e9 for dtype, rate in self.matmul_flops_per_ms.items()},
            "exponentials_per_s": None if self.exponentials_per_ms is None else self.exponentials_per_ms * 1e3,
        }


def _between(times_ms: Mapping[int, float], size: int) -> float:
    """Time at a size: between measured ones by power law, beyond the largest by its rate, below all the least."""
    sizes, times = list(times_ms), list(times_ms.values())
    if size >= sizes[-1]:
        return times[-1] * size / sizes[-1]
    return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(times))))
