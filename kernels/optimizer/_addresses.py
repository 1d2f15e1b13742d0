"""Addresses of many tensors in one call, for an optimizer's step, which asks hundreds where they lie.

Python's loop over them costs the host 50 ns a tensor. In C (`_in_c`) it is a tenth, by the function that the code
of PyTorch's Inductor reads addresses by. Where one of these is not there, Python's loop finds the same.
"""

from __future__ import annotations

import operator as py
import struct
import sys
import weakref
from typing import Any

import torch

from .._launch import in_c

_read: int | None = getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", None)


def functions(device: torch.device) -> Any:
    """Those in C for tensors of a device, or None."""
    return in_c(device) if isinstance(_read, int) else None


def addresses(tensors: list[torch.Tensor]) -> bytes:
    """int64 words, one a tensor. Of any objects: those that lie nowhere raise AttributeError, TypeError or
    RuntimeError.
    """
    return struct.pack(f"{len(tensors)}q", *map(torch.Tensor.data_ptr, tensors))


_LOWEST = slice(0 if sys.byteorder == "little" else 7, None, 8)
_EVEN = bytes(range(0, 256, 16))


def aligned(places: bytes) -> bool:
    """Whether all of such words are multiples of 16: by each one's lowest byte."""
    return not places[_LOWEST].translate(None, _EVEN)


def known_addresses(tensors: list[torch.Tensor], device: torch.device) -> bytes:
    """`addresses` of strided tensors that are known to have memory; in C others could not raise anything."""
    module, found = functions(device), None
    if module is not None:
        found = module.addresses(tensors, _read, torch.Tensor, torch.nn.Parameter)
    return addresses(tensors) if found is None else found


def same(references: list[weakref.ref[torch.Tensor]], tensors: list[torch.Tensor], device: torch.device) -> bool:
    """Whether these are the very objects that were referred to."""
    module = functions(device)
    if module is not None:
        found: bool = module.same(references, tensors)
        return found
    return len(references) == len(tensors) and all(map(py.is_, map(py.call, references), tensors))
