"""The figures that other profilers print, from what `MemoryProfiler` measured: GB and per cent."""

from __future__ import annotations


class MemoryFigures:
    """What `MemoryProfiler` is asked for by those who know another one. None where nothing was measured;
    `why` says why.
    """

    peak_bytes: int | None
    host_peak_bytes: int | None
    reserved_peak_bytes: int | None

    def peak_memory_gpu(self) -> float | None:
        """Most device memory that the block took beyond what was allocated before it, in GB (10⁹ bytes)."""
        return None if self.peak_bytes is None else self.peak_bytes / 1e9

    def peak_memory_cpu(self) -> float | None:
        """Most host memory that the block took beyond what was resident before it, in GB (10⁹ bytes)."""
        return None if self.host_peak_bytes is None else self.host_peak_bytes / 1e9

    def get_peak_memory(self) -> float | None:
        """The device's peak in GB, or the host's where there is no device."""
        gpu = self.peak_memory_gpu()
        return self.peak_memory_cpu() if gpu is None else gpu

    def efficiency_score(self, baseline: MemoryFigures | None = None) -> float | None:
        """Per cent. Against a baseline: how much less device memory at the peak, so that 15 is "15 % better".

        Without one: how much of what was taken from the driver was in use at the peak.
        """
        if self.peak_bytes is None:
            return None
        if baseline is not None:
            theirs = baseline.peak_bytes
            return None if not theirs else (1 - self.peak_bytes / theirs) * 100
        return self.peak_bytes / self.reserved_peak_bytes * 100 if self.reserved_peak_bytes else None
