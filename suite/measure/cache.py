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
INFINITY_CACHE = ("gfx940", "gfx941", "gfx942", "gfx950")
INFINITY_CACHE_BYTES = 256 << 20
"""AMD's MI300 and MI350 have this behind an L2 of 4 MiB a chiplet, and torch tells of the L2 alone."""
UNKNOWN_BYTES = {"xpu": 408 << 20, "mps": 96 << 20}
"""Where torch does not say: the most that any has, Intel's Data Center GPU Max 1550 and Apple's M2 Ultra."""


def last_level_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache: of a GPU what torch says, of a CPU its largest (32 MiB if unknown)."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        behind = INFINITY_CACHE_BYTES if torch.version.hip and architecture in INFINITY_CACHE else 0
        return max(int(properties.L2_cache_size), behind)
    if device.type in UNKNOWN_BYTES:
        told = torch.xpu.get_device_properties(device) if device.type == "xpu" else None
        return int(getattr(told, "last_level_cache_size", 0)) or UNKNOWN_BYTES[device.type]
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

    size = 2 * last_level_bytes(device)
    if device.type == "cpu":
        size = min(size, LARGEST_FLUSH)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def overwrite() -> None:
        buffer.zero_()

    return overwrite
