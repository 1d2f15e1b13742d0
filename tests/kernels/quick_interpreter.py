"""Triton's interpreter without what it does for nothing: nearly half of what the tests of the kernels took.

It puts its own functions in place of the language's at every call of a device function, although a launch has done
so, and looks through whole modules each time. It makes a table of all types for each tensor. And it computes
whether integers overflow, for an assertion that it has only where it debugs. What kernels compute stays its own.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_find_dtype = functools.cache(interpreter._get_np_dtype)
_sanitize_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
_PATCHED: set[Any] = set()
"""Functions of the launch that runs whose language is the interpreter's."""


class _Scope(interpreter._LangPatchScope):
    """Of a launch, at whose end the language is Triton's again."""

    def restore(self) -> None:
        _PATCHED.clear()
        super().restore()


def _patch_once(function: Any) -> Any:
    """Once a launch: a kernel, then each device function that it calls, whose scope nobody asks for."""
    if function in _PATCHED:
        return None
    _PATCHED.add(function)
    return _patch_lang(function)


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


def _get_np_dtype(kind: Any) -> np.dtype[Any]:
    scalar = kind.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _find_dtype(scalar)


def _sanitize_when_asked(self: TritonSemantic, *operands: Any) -> None:
    if self.builder.options.debug:
        _sanitize_overflow(self, *operands)


def install() -> None:
    """For all kernels of this process."""
    interpreter._LangPatchScope = _Scope
    interpreter._patch_lang = _patch_once
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype
    TritonSemantic.binary_op_sanitize_overflow_impl = _sanitize_when_asked
