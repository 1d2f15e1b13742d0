"""Copies on the host: what they hold, where they lie, and when their memory goes, by a driver that is played."""

from __future__ import annotations

import contextlib
import gc
import mmap
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.suite.measure import host_copies
from kernelmark.suite.measure.host_copies import ALIGNMENT, copies, room

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(st.dictionaries(st.text(max_size=3), st.tuples(SHAPES, DTYPES), max_size=5), DTYPES, st.booleans())
def test_copies_are_the_tensors_in_one_dtype_one_behind_the_other(
    drawn: dict[str, tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype, turned: bool
) -> None:
    tensors = {name: torch.randn(shape).to(own) for name, (shape, own) in drawn.items()}
    if turned:
        tensors = {name: x.mT if x.dim() > 1 else x for name, x in tensors.items()}
    found = copies(tensors, dtype)
    assert list(found) == list(tensors)
    end = 0
    for name, x in found.items():
        assert torch.equal(x, tensors[name].to(dtype))
        assert (x.dtype, x.is_contiguous(), x.requires_grad) == (dtype, True, False)
        assert x.storage_offset() * dtype.itemsize == end
        assert x.numel() == 0 or x.data_ptr() % ALIGNMENT == 0
        end += -(-x.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    assert all(x.untyped_storage().nbytes() == max(end, ALIGNMENT) for x in found.values())


def test_copies_are_their_own() -> None:
    weight = torch.ones(3, requires_grad=True)
    found = copies({"a": weight, "b": torch.zeros(3)}, torch.float32)
    with torch.no_grad():
        weight.fill_(7)
    found["b"].fill_(5)
    assert found["a"].tolist() == [1, 1, 1]


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=5), st.none() | DTYPES)
def test_room_is_as_large_as_the_tensors(
    drawn: list[tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype | None
) -> None:
    found = room((torch.ones(x, dtype=own) for x, own in drawn), dtype)
    assert [(tuple(x.shape), x.dtype) for x in found] == [(x, dtype or own) for x, own in drawn]
    for number, x in enumerate(found, 1):
        assert not x.any()
        x.fill_(number)
    for number, x in enumerate(found, 1):  # none lies in another's place
        assert (x == number).all()


class Driver:
    """What `torch.cuda` is asked for, and in which order."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.told: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.told.append(("locked", address, size))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.told.append(("unlocked", address))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def play(answer: int) -> Driver:
        played = Driver(answer)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: played)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: played.told.append(("waited",)))
        monkeypatch.setattr(host_copies, "_forget_error", lambda device: played.told.append(("forgotten",)))
        return played

    return play


CUDA = torch.device("cuda", 0)


def test_memory_is_unlocked_once_with_the_last_view_of_it(driver: Any) -> None:
    played = driver(0)
    flat = host_copies._flat(1000, CUDA)
    address, view = flat.data_ptr(), flat[256:512].view(torch.float32)
    assert played.told == [("locked", address, 1000)]
    del flat
    gc.collect()
    view.fill_(3)
    assert len(played.told) == 1
    del view
    gc.collect()
    assert played.told[1:] == [("waited",), ("unlocked", address)]


def test_what_a_driver_refuses_to_lock_is_ordinary_memory(driver: Any) -> None:
    played = driver(2)
    flat = host_copies._flat(1000, CUDA)
    assert played.told[1:] == [("forgotten",)]
    flat.fill_(3)
    del flat
    gc.collect()
    assert played.told[1:] == [("forgotten",)]


def test_a_kernel_without_huge_pages_will_do(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, advice: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(host_copies._Memory, "madvise", refuse, raising=False)
    played = driver(0)
    assert host_copies._flat(512, CUDA).tolist() == [0] * 512
    gc.collect()
    assert [x[0] for x in played.told] == ["locked", "waited", "unlocked"]


def test_a_host_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_copies, "_Memory", refuse)
    with pytest.raises(MemoryError, match="the host has no 4096 bytes for copies of tensors"):
        copies({"x": torch.ones(1024)}, torch.float32)


def test_a_process_that_is_forked_has_no_part_in_locked_memory(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(0)
    advised: list[int] = []
    monkeypatch.setattr(host_copies._Memory, "madvise", lambda self, advice: advised.append(advice), raising=False)
    host_copies._flat(512, CUDA)
    assert mmap.MADV_DONTFORK in advised
    advised.clear()
    host_copies._flat(512, None)
    assert not advised
