"""What makes Triton split 16-byte accesses: a mask with an odd bound, and a pointer from memory.

A load is as wide as alignment, contiguity and the mask allow. A mask `at < n` is the same for 8 neighbours only
if n is a multiple of 8, which an odd n is not: every access of the tensor is split, for the sake of the last
one. So only the last program should have the mask. A pointer that was read from memory has no alignment:
`tl.multiple_of` gives it one.
"""

# mypy: ignore-errors  # Triton's language has types of its own

import re

import sm90
import triton
import triton.language as tl


@triton.jit
def masked(x, y, n, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """A copy; MASK: every program has the mask, or only the last one."""
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if MASK:
        tl.store(y + at, tl.load(x + at, at < n), at < n)
    elif start + BLOCK <= n:
        tl.store(y + at, tl.load(x + at))


@triton.jit
def from_memory(table, y, HINT: tl.constexpr, BLOCK: tl.constexpr):
    """A copy of the tensor that a word of `table` points to; HINT: its address is said to be a multiple of 16."""
    at = tl.arange(0, BLOCK)
    source = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.bfloat16))
    if HINT:
        source = tl.multiple_of(source, 16)
    tl.store(y + at, tl.load(source + at))


def loads(kernel, **constants) -> int:
    """Bytes of the widest load of bf16 numbers from global memory of a kernel, compiled."""
    signature = {"x": "*bf16", "y": "*bf16", "n": "i32", "table": "*i64"}
    aligned = tuple(name for name in ("x", "y", "table") if name in kernel.arg_names)
    made = sm90.compiled(kernel, signature, {"BLOCK": 1024, **constants}, aligned, num_warps=4)
    found = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)\s", made.asm["ptx"])
    # A single load of 8 bytes is the address itself.
    return max(int(count or 1) * int(bits) // 8 for count, bits in found if (count, bits) != ("", "64"))


def show() -> bool:
    """Prints the effect; whether this Triton has it."""
    masks = loads(masked, MASK=True), loads(masked, MASK=False)
    pointers = loads(from_memory, HINT=False), loads(from_memory, HINT=True)
    print(f"bytes of a load: a mask in every program {masks[0]}, in none but the last {masks[1]}")
    print(f"bytes of a load: a pointer from memory {pointers[0]}, with tl.multiple_of {pointers[1]}")
    return masks[0] < masks[1] == 16 == pointers[1] > pointers[0]


if __name__ == "__main__":
    print(sm90.versions())
    show()
