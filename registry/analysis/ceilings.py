"""The limit of a case: what the device's own copy and matmul took in the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ..store.record import Case, Ceiling


@dataclass(frozen=True)
class Ceilings:
    """Copy time by bytes moved, and matmul rate by dtype, medians over the run's replicates."""

    copy_ms: Mapping[int, float]
    matmul_flops_per_ms: Mapping[str, float]

    @classmethod
    def of(cls, ceilings: Iterable[Ceiling]) -> Ceilings:
        """From a journal's lines."""
        copies: dict[int, list[float]] = {}
        rates: dict[str, list[float]] = {}
        for x in ceilings:
            if x.what == "copy":
                copies.setdefault(x.size, []).append(x.time_ms)
            elif x.dtype is not None:
                rates.setdefault(x.dtype, []).append(x.size / x.time_ms)
        return cls(
            {size: median(times) for size, times in sorted(copies.items())},
            {dtype: median(values) for dtype, values in rates.items()},
        )

    def copy_time_ms(self, size: int) -> float | None:
        """Time of a device copy that moves `size` bytes in all; between measured sizes by power law."""
        if not self.copy_ms or size <= 0:
            return None
        sizes, times = list(self.copy_ms), list(self.copy_ms.values())
        if size >= sizes[-1]:
            return times[-1] * size / sizes[-1]
        return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(times))))

    def limit_ms(self, case: Case) -> float | None:
        """The larger of the copy's time for the case's bytes and the matmul's for its operations.

        None where a needed ceiling was not measured: half a limit would flatter nobody, but mislead.
        """
        times: Sequence[float | None] = ([self.copy_time_ms(case.bytes)] if case.bytes else []) + (
            [self._matmul_ms(case)] if case.flops else []
        )
        known = [x for x in times if x is not None]
        return max(known) if known and len(known) == len(times) else None

    def _matmul_ms(self, case: Case) -> float | None:
        rate = self.matmul_flops_per_ms.get(case.dtype)
        return case.flops / rate if rate else None

    def summary(self) -> dict[str, Any]:
        """Best copy bandwidth in GB/s and matmul rates in TFLOP/s, for reading."""
        copy = max((size / ms / 1e6 for size, ms in self.copy_ms.items()), default=None)
        return {
            "copy_gbps": copy,
            "matmul_tflops": {dtype: rate / 1e9 for dtype, rate in self.matmul_flops_per_ms.items()},
        }
