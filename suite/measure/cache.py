"""The cache before a call: cold means that nothing of the inputs is left in the last level."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
LARGEST_FLUSH = 256 << 20
"""A host may report a last-level cache that it shares with a whole socket; more than this is not flushed."""


def last_level_bytes(device: torch.device) -> int:
    """Size of the last-level cache in bytes: L2 of a GPU, the largest cache of a CPU (32 MiB if unknown)."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [parse_size(path.read_text()) for path in CPU_CACHE.glob("index*/size")]
    return max(sizes, default=32 << 20)


def parse_size(text: str) -> int:
    """`'32768K'` → 33554432, as Linux writes cache sizes."""
    text = text.strip()
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * scale


def flush(device: torch.device) -> Callable[[], None]:
    """A call that overwrites twice the last-level cache, queued on the current stream on a GPU."""
    import torch

    size = min(2 * last_level_bytes(device), LARGEST_FLUSH)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def overwrite() -> None:
        buffer.zero_()

    return overwrite
