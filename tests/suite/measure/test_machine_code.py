"""What a call launches, as data: made-up kernels in Triton's own class, machine code in made-up files."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch
from kernelmark.suite.measure.machine_code import Unknown, code_of, fingerprint, sections
from triton import knobs
from triton.compiler.compiler import CompiledKernel

SECTIONS = {".text.double": b"add", ".nv.info": b"40 registers", ".debug_line": b"line 7", ".symtab": b"double"}


def elf(contents: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections, and one without bytes of its own that claims many."""
    names, at, data, headers = b"\0", 64, b"", [(0,) * 6]
    for name, content in contents.items():
        headers.append((len(names), 1, 0, 0, at + len(data), len(content)))
        names += name.encode() + b"\0"
        data += content
    headers.append((len(names), 8, 0, 0, at, 1 << 40))
    names += b".nv.global\0"
    headers.append((len(names), 3, 0, 0, at + len(data), len(names) + 7))
    names += b".names\0"
    data += names
    table = b"".join(struct.pack("<IIQQQQ", *x) for x in headers)
    start = bytearray(64)
    struct.pack_into("<Q", start, 40, 64 + len(data))
    struct.pack_into("<HHH", start, 58, 40, len(headers), len(headers) - 1)
    return bytes(start) + data + table


def test_sections_by_name():
    assert sections(elf(SECTIONS), [".text"]) == [b"add"]
    assert sections(elf(SECTIONS), [".debug", ".nv"]) == [b"40 registers", b"line 7"]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({".debug_line": b"line 8"}, True),
        ({".symtab": b"twice"}, True),
        ({".text.double": b"mul"}, False),
        ({".nv.info": b"41 registers"}, False),
        ({".nv.constant0.double": b"3"}, False),
    ],
)
def test_what_machine_code_is(changed, same):
    assert (code_of(elf(SECTIONS)) == code_of(elf({**SECTIONS, **changed}))) is same


def test_a_kernels_name_is_no_code():
    other = {".text.twice": b"add", ".nv.info": b"40 registers"}
    assert code_of(elf(SECTIONS)) == code_of(elf(other))


def kernel(binary: bytes = elf(SECTIONS), **metadata: object) -> CompiledKernel:
    """One that Triton has compiled and loaded."""
    made = CompiledKernel.__new__(CompiledKernel)
    vars(made).update(
        src=SimpleNamespace(signature={"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}),
        metadata=SimpleNamespace(num_warps=4, **metadata),
        kernel=binary,
        module=object(),
        function=1,
        name="double",
    )
    return made


def launch(kernel: CompiledKernel, grid=(8,), n=5, block=64, alias=False):
    """A call that launches once, as Triton's runtime does where there are hooks."""

    def call():
        x = torch.empty(16)
        y = x if alias else torch.empty(16)
        kernel.launch_metadata(grid, 0, x, y, n, block)
        return y

    return call


FIRST = launch(kernel())


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (launch(kernel()), True),
        (launch(kernel(), grid=(8, 1, 1)), True),
        (launch(kernel(elf({**SECTIONS, ".debug_line": b"line 8"}))), True),
        (launch(kernel(), block=128), True),  # it would be in the machine code
        (launch(kernel(elf({**SECTIONS, ".text.double": b"mul"}))), False),
        (launch(kernel(shared=1024)), False),
        (launch(kernel(), grid=(9,)), False),
        (launch(kernel(), n=6), False),
        (launch(kernel(), alias=True), False),
        (lambda: (FIRST(), FIRST()), False),
        (lambda: (torch.zeros(4), FIRST()), False),
    ],
)
def test_what_is_the_same_call(other, same):
    found = fingerprint(FIRST)
    assert found.startswith("1 launches ")
    assert (fingerprint(other) == found) is same


def test_fills_count_by_their_shapes():
    def call(size):
        return lambda: (torch.zeros(size), FIRST())

    assert fingerprint(call(4)) == fingerprint(call(4)) != fingerprint(call(5))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: torch.empty(3), "no kernel of Triton's was launched"),
        (lambda: (FIRST(), torch.ones(2, 2) @ torch.ones(2, 2)), "aten::matmul runs beside"),
        (lambda: kernel().launch_metadata((1,), 0, torch.empty(1)), "a launch of double"),
        (lambda: kernel().launch_metadata((1,), 0, object(), None, 1, 2), "an argument of a launch is a object"),
        (launch(kernel(b"no such file")), "a launch of double"),
    ],
)
def test_what_cannot_be_told(call, why):
    with pytest.raises(Unknown, match=why):
        fingerprint(call)


def test_nothing_stays_behind():
    own, hooks = CompiledKernel.launch_metadata, list(knobs.runtime.launch_enter_hook.calls)

    def fails():
        FIRST()
        raise RuntimeError("the call itself")

    with pytest.raises(RuntimeError, match="the call itself"):
        fingerprint(fails)
    assert CompiledKernel.launch_metadata is own
    assert knobs.runtime.launch_enter_hook.calls == hooks
