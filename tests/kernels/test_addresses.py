"""Addresses of many tensors: C finds what Python does, and is not asked where it could not raise."""

from __future__ import annotations

import struct
import sys
import weakref

import pytest
import torch
from kernelmark.kernels import _in_c, _launch
from kernelmark.kernels.optimizer import _addresses
from triton.runtime import build

CPU = torch.device("cpu")


@pytest.fixture
def in_c(monkeypatch):
    """For tensors of a CPU as for those of a GPU."""
    if _in_c.compiled() is None:
        pytest.skip("there is no C compiler here")
    monkeypatch.setattr(_launch, "_DEVICES", ("cpu",))
    return _addresses.functions(CPU)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_addresses(in_c, count):
    memory = torch.empty(8, 64)
    tensors = [x[i % 3 :] for i, x in enumerate(memory[:count])]
    tensors[1:2] = [torch.nn.Parameter(x) for x in tensors[1:2]]
    want = struct.pack(f"{count}q", *(x.data_ptr() for x in tensors))
    assert _addresses.addresses(tensors) == want
    assert _addresses.known_addresses(tensors, CPU) == want
    assert in_c.addresses(tensors, _addresses._read, torch.Tensor, torch.nn.Parameter) == want


def test_a_tensor_without_memory_lies_at_0(in_c):
    assert _addresses.known_addresses([torch.empty(0)], CPU) == bytes(8)


@pytest.mark.parametrize("low", range(1, 16))
def test_aligned(low):
    words = [0, 16, 0x7F00_1234_5670, 0x7F00_1234_56F0]
    assert _addresses.aligned(struct.pack("4q", *words))
    for place in range(4):
        shifted = [x + low * (i == place) for i, x in enumerate(words)]
        assert not _addresses.aligned(struct.pack("4q", *shifted))
    assert _addresses.aligned(b"")


def test_objects_of_other_types_are_pythons(in_c):
    class Own(torch.Tensor):
        pass

    x = torch.empty(4)
    tensors = [x, x.as_subclass(Own)]
    assert in_c.addresses(tensors, _addresses._read, torch.Tensor, torch.nn.Parameter) is None
    assert _addresses.known_addresses(tensors, CPU) == _addresses.addresses(tensors)
    for other in (None, 3, [x]):
        with pytest.raises((AttributeError, TypeError)):
            _addresses.known_addresses([x, other], CPU)


@pytest.mark.parametrize("given", [(), ([],), ((), 1, int, int), ([], 0, int, int), ([], "1", int, int)])
def test_wrong_arguments_of_c(in_c, given):
    with pytest.raises((TypeError, ValueError)):
        in_c.addresses(*given)


@pytest.mark.parametrize("given", [(), ([],), ([], ()), ([1], [1])])
def test_wrong_arguments_of_c_for_the_same(in_c, given):
    with pytest.raises(TypeError):
        in_c.same(*given)


@pytest.mark.parametrize("c", [True, False])
def test_the_same(request, c):
    if c:
        request.getfixturevalue("in_c")
    tensors = [torch.empty(4) for _ in range(3)]
    noted = list(map(weakref.ref, tensors))
    assert _addresses.same(noted, list(tensors), CPU)
    assert not _addresses.same(noted, tensors[:2], CPU)
    assert not _addresses.same(noted[:2], tensors, CPU)
    assert not _addresses.same(noted, tensors[::-1], CPU)
    assert not _addresses.same(noted, [*tensors[:2], tensors[2].detach()], CPU)
    tensors[2] = torch.empty(9)
    assert noted[2]() is None
    assert not _addresses.same(noted, tensors, CPU)


def test_nothing_is_kept(in_c):
    x = torch.empty(4)
    noted, before = [weakref.ref(x)], sys.getrefcount(x)
    for _ in range(100):
        in_c.same(noted, [x])
        in_c.addresses([x], _addresses._read, torch.Tensor, torch.Tensor)
        in_c.addresses([x, 1], _addresses._read, torch.Tensor, torch.Tensor)
    assert sys.getrefcount(x) == before
    del x
    assert noted[0]() is None


def fails(*_, **__):
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize("missing", ["compiler", "function"])
def test_python_finds_them_where_c_cannot(monkeypatch, missing):
    monkeypatch.setattr(_launch, "_DEVICES", ("cpu",))
    if missing == "compiler":
        monkeypatch.setattr(build, "compile_module_from_src", fails)
    else:
        monkeypatch.setattr(_addresses, "_read", None)
    _in_c.compiled.cache_clear()
    try:
        assert _addresses.functions(CPU) is None
        tensors = [torch.empty(4), torch.empty(9)]
        assert _addresses.known_addresses(tensors, CPU) == _addresses.addresses(tensors)
        assert _addresses.same(list(map(weakref.ref, tensors)), tensors, CPU)
    finally:
        _in_c.compiled.cache_clear()


def test_tensors_of_other_devices_are_pythons():
    """Nothing is compiled where Triton interprets."""
    assert _addresses.functions(CPU) is None
