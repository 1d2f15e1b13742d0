"""Triton's interpreter without what it does for nothing: more than half of what the tests of the kernels took.

It puts its own functions in place of the language's at every call of a device function, although a launch has done
so, and looks through whole modules each time. It makes a table of all types for each tensor, and the type of a
block with its sizes anew for each value. It looks for what two operands have to become where they are of one type
already, and compares their sizes by way of more lists of them. And it computes whether integers overflow, for an
assertion that it has only where it debugs. What kernels compute stays its own.
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
_make_block_type = tl.block_type.__init__
_broadcast_values = TritonSemantic.broadcast_impl_value
_checked_operands = TritonSemantic.binary_op_type_checking_impl
_unwrap_if_constexpr = tl.core._unwrap_if_constexpr
_compiled_block = tl.block_type.to_ir
_same_dtype = tl.dtype.__eq__
_PATCHED: set[Any] = set()
"""Functions of the launch that runs whose language is the interpreter's."""
_BLOCKS: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Types of blocks of the launch that runs, by their elements' type and their sizes."""
_CHECKED = tl.core.builtin(lambda: None).__code__
"""Of the functions that only ask whether they have a semantic, then call what they wrap."""
_PLAIN = "int32", "int64", "fp32"
"""Types that a number in their range is taken for."""
_KEPT = *_PLAIN, "int1"
"""Types whose numbers become nothing else where two of them are added, multiplied, divided or compared."""
_UNWRAPPED = {int, bool, float, str, type(None), tl.dtype, tl.pointer_type, tl.block_type, tl.tensor}
_OF_SCALARS = tl.tuple([]), tl.constexpr(1)


class _Scope(interpreter._LangPatchScope):
    """Of a launch, at whose end the language is Triton's again."""

    def restore(self) -> None:
        _PATCHED.clear()
        _BLOCKS.clear()
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


@functools.cache
def _interpreted(member: Any) -> Any:
    """A function of the language that has the interpreter's semantic, whatever it is given."""
    asked = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKED else member

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return asked(*arguments, **named)

    return call


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(owner, name, _interpreted(member))


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Once for all blocks of a launch that are alike. A type that is kept is no other's by its id."""
    if not isinstance(shape, list | tl.tuple):
        return _make_block_type(self, element_ty, shape)  # says what is wrong with it
    element = (
        (id(element_ty.element_ty), element_ty.address_space, element_ty.const)
        if isinstance(element_ty, tl.pointer_type)
        else id(element_ty)
    )
    key = element, *[x.value if isinstance(x, tl.constexpr) else x for x in shape]
    if (known := _BLOCKS.get(key)) is None:
        _make_block_type(self, element_ty, shape)
        self._of_tensors = tl.tuple([tl.constexpr(x) for x in self.shape]), tl.constexpr(self.numel)
        known = _BLOCKS[key] = dict(self.__dict__)
    self.__dict__.update(known)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = type._of_tensors if type.is_block() else _OF_SCALARS


def _splat(self: TritonSemantic, one: Any, like: tl.block_type) -> tl.tensor:
    kind = like.with_element_ty(one.dtype)
    return tl.tensor(self.builder.create_splat(kind, one.handle), kind)


def _stretched(self: TritonSemantic, block: tl.tensor, shape: list[int]) -> tl.tensor:
    if block.type.shape.values == shape:
        return block
    return tl.tensor(self.builder.create_broadcast(block.handle, shape), tl.block_type(block.dtype, shape))


def _broadcast(self: TritonSemantic, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    a, b = lhs.type, rhs.type
    if not (a.is_block() and b.is_block()):
        if a.is_block():
            return lhs, _splat(self, rhs, a)
        return (_splat(self, lhs, b) if b.is_block() else lhs), rhs
    x, y = a.shape.values, b.shape.values
    if x == y:
        return lhs, rhs
    if len(x) != len(y) or any(p != q and p != 1 and q != 1 for p, q in zip(x, y, strict=True)):
        return _broadcast_values(self, lhs, rhs)
    shape = [q if p == 1 else p for p, q in zip(x, y, strict=True)]
    return _stretched(self, lhs, shape), _stretched(self, rhs, shape)


def _check_operands(
    self: TritonSemantic,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Two of one type, a pointer and an integer, or a number that the other's type holds: nothing is converted."""
    if isinstance(lhs, tl.tensor):
        kind = lhs.dtype.name
        if isinstance(rhs, tl.tensor):
            other = rhs.dtype.name
            pointed = allow_lhs_ptr and other in ("int32", "int64") and lhs.dtype.is_ptr()
            if pointed or (kind == other and kind in _KEPT):
                return _broadcast(self, lhs, rhs)
        elif arithmetic_check and kind in _PLAIN:
            whole = type(rhs) is int and -(1 << 31) <= rhs < 1 << 31
            if whole or (type(rhs) is float and kind == "fp32"):
                return _broadcast(self, lhs, self.scalar_constant(rhs, lhs.dtype))
    return _checked_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _unwrap(value: Any) -> Any:
    kind = value.__class__
    if kind is tl.constexpr:
        return value.value
    return value if kind in _UNWRAPPED else _unwrap_if_constexpr(value)


def _is_dtype(self: tl.dtype, other: Any) -> bool:
    return self is other or (self.name == other.name if isinstance(other, tl.dtype) else _same_dtype(self, other))


def _block_to_ir(self: tl.block_type, builder: Any) -> Any:
    """The interpreter's builder has Triton's own types, and would make an equal one."""
    if builder is not interpreter.interpreter_builder:
        return _compiled_block(self, builder)
    self.element_ty.to_ir(builder)  # which refuses what it does not know
    return self


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
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _get_np_dtype
    TritonSemantic.binary_op_sanitize_overflow_impl = _sanitize_when_asked
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _check_operands
    tl.core._unwrap_if_constexpr = _unwrap
    tl.block_type.to_ir = _block_to_ir
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    tl.dtype.__eq__ = _is_dtype
