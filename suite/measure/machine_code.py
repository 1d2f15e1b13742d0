"""What one call makes a GPU run: the machine code of each Triton kernel, and how it is launched, in order.

Two commits whose calls launch the same machine code with the same grids and arguments take the same time on the
device, whatever their sources say. Of a kernel count its instructions and constants, and not its name, its debug
information or where its source lies: a comment moves lines, and the file is another one.

Beside Triton's kernels a call may allocate, view, fill and copy tensors. All else that torch runs on a device
depends on more than its name and shapes (switches, heuristics of a library), and nothing is claimed of such calls.
What neither Triton nor torch's own operations show (a graph that is replayed, a library of its own) is not seen at
all: `compare/same_code.py` reads off the source whether there can be any.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SECTIONS = (".text", ".rodata", ".nv.constant", ".nv.global", ".nv.info")
"""How names of sections begin that decide what a kernel does: instructions, constants, registers, parameters."""
NO_CONTENT = 8
"""The type of a section without bytes in the file (SHT_NOBITS)."""
OPTIONS = ("num_warps", "num_ctas", "cluster_dims", "shared", "launch_cooperative_grid", "launch_pdl")
"""Options of a launch, as far as a compiled kernel has them."""
# fmt: off
PLACED = frozenset({
    "aten::alias", "aten::as_strided", "aten::chunk", "aten::detach", "aten::empty", "aten::empty_like",
    "aten::empty_strided", "aten::expand", "aten::expand_as", "aten::flatten", "aten::narrow",
    "aten::new_empty", "aten::new_empty_strided", "aten::permute", "aten::reshape", "aten::resize_",
    "aten::select", "aten::slice", "aten::split", "aten::split_with_sizes", "aten::squeeze", "aten::t",
    "aten::transpose", "aten::unbind", "aten::unflatten", "aten::unsafe_split", "aten::unsqueeze", "aten::view",
    "aten::view_as", "aten::_reshape_alias", "aten::_unsafe_view", "aten::lift_fresh",
})
# fmt: on
"""Operations of torch that allocate, or look at the same memory otherwise: nothing runs on the device."""
# fmt: off
MOVED = frozenset({
    "aten::clone", "aten::contiguous", "aten::copy_", "aten::fill_", "aten::full", "aten::full_like",
    "aten::new_full", "aten::new_ones", "aten::new_zeros", "aten::ones", "aten::ones_like", "aten::to",
    "aten::zero_", "aten::zeros", "aten::zeros_like", "aten::_to_copy",
})
# fmt: on
"""Operations of torch that fill or copy: what runs is decided by their shapes."""
ENGINE = ("autograd::", "torch::autograd::", "kernelmark::")
"""How names of what only calls other operations begin; so do those without a namespace."""


def sections(binary: bytes, prefixes: Sequence[str]) -> list[bytes]:
    """Contents of those sections of a 64-bit ELF file (a cubin, a hsaco) whose names begin so, in their order."""
    start, size, count, names = (*struct.unpack_from("<Q", binary, 40), *struct.unpack_from("<HHH", binary, 58))
    headers = [struct.unpack_from("<IIQQQQ", binary, start + i * size) for i in range(count)]
    text = headers[names][4]
    found = []
    for name, kind, _, _, offset, length in headers:
        begin = text + name
        if kind != NO_CONTENT and binary[begin : binary.index(b"\0", begin)].decode().startswith(tuple(prefixes)):
            found.append(binary[offset : offset + length])
    return found


def code_of(binary: bytes) -> str:
    """A hash of a kernel's machine code."""
    digest = hashlib.sha256()
    for part in sections(binary, SECTIONS):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class Unknown(Exception):
    """What a call runs cannot be told."""


class _Launches:
    """Collects the launches of one call. Memory that they were given is held, so that none comes by twice."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.unknown: str | None = None
        self._held: list[Any] = []
        self._places: dict[int, int] = {}

    def note(self, kernel: Any, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """One launch, as Triton makes it. Raises nothing: it is within the call."""
        try:
            self.seen.append(self._launch(kernel, grid, arguments))
        except (Unknown, AttributeError, ValueError, struct.error) as error:  # another Triton, another format
            self.unknown = f"a launch of {getattr(kernel, 'name', '?')}: {error}"

    def _launch(self, kernel: Any, grid: Sequence[int], arguments: Sequence[Any]) -> tuple[Any, ...]:
        kinds = kernel.src.signature.values()
        # Constants are in the machine code.
        given = [self._told(x) for kind, x in zip(kinds, arguments, strict=True) if kind != "constexpr"]
        options = [str(getattr(kernel.metadata, name, None)) for name in OPTIONS]
        return code_of(kernel.kernel), (*map(int, grid), 1, 1)[:3], options, given

    def _told(self, x: Any) -> Any:
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, tuple | list):
            return [self._told(y) for y in x]
        if hasattr(x, "untyped_storage"):
            memory = x.untyped_storage()
            self._held.append(memory)
            place = self._places.setdefault(memory.data_ptr(), len(self._places))
            return str(x.dtype), place, x.storage_offset(), x.data_ptr() % 16
        if hasattr(x, "block_shape") and hasattr(x, "base"):  # a tensor map
            return self._told(x.base), list(x.shape), list(x.strides), list(x.block_shape)
        raise Unknown(f"an argument of a launch is a {type(x).__name__}")


@contextlib.contextmanager
def _watched(found: _Launches) -> Iterator[None]:
    """Notes every launch of a compiled Triton kernel.

    `launch_metadata` is asked with the grid and all arguments before each usual launch. A hook makes our kernels
    take the usual launch, and not their own shorter one (`kernels/_launch.py`).
    """
    try:
        from triton import knobs
        from triton.compiler.compiler import CompiledKernel

        class_: Any = CompiledKernel
        own, hooks = class_.launch_metadata, knobs.runtime.launch_enter_hook
    except (ImportError, AttributeError) as error:
        raise Unknown(f"this Triton does not tell of its launches: {error}") from None

    def noted(kernel: Any, grid: Sequence[int], stream: Any, *arguments: Any) -> Any:
        found.note(kernel, grid, arguments)
        return own(kernel, grid, stream, *arguments)

    def hook(metadata: Any) -> None:
        """Only has to be there."""

    class_.launch_metadata = noted
    hooks.add(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
        class_.launch_metadata = own


def beside(events: Sequence[Any]) -> list[tuple[str, Any]]:
    """What torch's own operations run of themselves, with shapes. Raises `Unknown` where it cannot be told."""
    found = []
    for event in events:
        if event.name in MOVED:
            found.append((event.name, event.input_shapes))
        elif "::" in event.name and event.name not in PLACED and not event.name.startswith(ENGINE):
            raise Unknown(f"{event.name} runs beside Triton's kernels")
    return found


def fingerprint(call: Callable[[], object]) -> str:
    """How many kernels a call launches, and a hash of all that it runs. Calls once, untimed, under a profiler.

    Raises `Unknown` where that cannot be told.
    """
    from torch.autograd.profiler_legacy import profile

    found = _Launches()
    # torch's older profiler: the newer one may take CUPTI, which times short calls here.
    with profile(use_cuda=False, record_shapes=True) as profiled, _watched(found):
        call()
    if found.unknown is not None:
        raise Unknown(found.unknown)
    if not found.seen:
        raise Unknown("no kernel of Triton's was launched")
    told = repr((found.seen, beside(profiled.function_events or ())))
    return f"{len(found.seen)} launches {hashlib.sha256(told.encode()).hexdigest()}"
