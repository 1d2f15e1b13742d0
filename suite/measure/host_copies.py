"""Copies of a device's tensors on the host, in memory that the device reads and writes itself.

Memory as programs have it is copied through buffers of the driver, at a fraction of the link's rate. A device
reads memory itself that is locked: that may not be moved or swapped out. PyTorch's own such memory is rounded up
to a power of two, tensor by tensor, and kept when it is free; here all tensors lie in one piece, as large as they
are, which goes with the last of them.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Bytes at a multiple of which each tensor begins."""


def copies(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of one device on the host, in this dtype and without gaps; they are there when it returns.

    Those of a CUDA device are locked where the system allows it. `x.to(device, non_blocking=True)` brings one back
    in the order of the stream; the tensor here must live until that is done.
    """
    import torch

    device = next((x.device for x in tensors.values() if x.is_cuda), None)
    found = dict(zip(tensors, _laid([(x.shape, dtype) for x in tensors.values()], device), strict=True))
    for name, x in tensors.items():
        found[name].copy_(x.detach().to(dtype).contiguous(), non_blocking=True)
    if device is not None:
        torch.cuda.synchronize(device)
    return found


def room(likes: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Zeros on the host as large as these tensors, all of one device, in this dtype or each in its own; locked as
    of `copies`.
    """
    own = list(likes)
    return _laid([(x.shape, dtype or x.dtype) for x in own], next((x.device for x in own if x.is_cuda), None))


def _laid(wanted: Sequence[tuple[torch.Size, torch.dtype]], device: torch.device | None) -> list[torch.Tensor]:
    """Tensors of these shapes one behind the other in one piece of memory."""
    size, places = 0, []
    for shape, dtype in wanted:
        places.append(size)
        size += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    flat = _flat(max(size, ALIGNMENT), device)
    return [
        flat[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for at, (shape, dtype) in zip(places, wanted, strict=True)
    ]


def _flat(size: int, device: torch.device | None) -> torch.Tensor:
    """So many bytes, locked for a device where that can be. They go when nothing looks at them any more."""
    import torch

    try:
        memory = _Memory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host has no {size} bytes for copies of tensors: {error.strerror}") from error
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if device is not None:
        # Pages of 2 MiB are there, and locked, in a fraction of the time. And a process that is forked, a
        # compiler, has no part in this memory: the kernel would copy all locked pages for it.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):  # not every kernel has both
                memory.madvise(advice)
        flat.zero_()  # by all threads: locking would have the pages made by one
        memory.lock(flat.data_ptr(), device)
    return flat


class _Memory(mmap.mmap):
    """Memory that a device may have locked. A tensor made of it holds it."""

    locked: int | None = None
    """The address, where it is."""

    def lock(self, address: int, device: torch.device) -> None:
        """Locks it; it stays ordinary memory where the driver refuses."""
        import torch

        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)) == 0:
                self.locked = address
            else:
                _forget_error(device)

    def __del__(self) -> None:
        """Unlocks it, which must be before it is given back: what lies at that address next is other memory."""
        if self.locked is None or sys.is_finalizing():
            return
        import torch

        # A device that a fault has stopped answers with an error; then its process ends soon.
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.locked)


def _forget_error(device: torch.device) -> None:
    """CUDA holds a refusal against the next launch: this is that launch."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
