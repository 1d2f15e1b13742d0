"""A loop carries each 16-bit number in a register of its own.

Probabilities in bf16 that one step computes and the next one multiplies take as many registers as they have
elements, twice what they need. Packed by two into 32-bit words before the loop's end, and unpacked where they
are multiplied, they take half; the unpacking is no instruction, as the registers are the operand's own.
"""

from __future__ import annotations

import _attention_loop as loop
import sm90


def registers(pack: bool) -> int:
    """Registers a thread of the loop, its row maximum pinned, so that both products are under way at once."""
    constants = {**loop.SIZES, "PACK": pack, "PIN": True, "DRAIN": True}
    return sm90.resources(sm90.compiled(loop.attention_loop, loop.SIGNATURE, constants, num_warps=4))["registers"]


def show() -> bool:
    """Prints the effect; whether this Triton has it."""
    single, packed = registers(False), registers(True)
    print(f"registers a thread with 16-bit numbers: {single}; with words of two: {packed}")
    return packed + 32 <= single


if __name__ == "__main__":
    print(sm90.versions())
    show()
