"""ptxas serializes all products of a loop if one is in flight while another's operand in registers is made.

It says so only when it is asked (`-v`): C7513, "Potential Performance Loss: wgmma.mma_async instructions are
serialized". Each product is then waited for at once. So no product may be in flight at the end of a loop's body
whose next step computes an operand in registers: wait for all of them there.
"""

from __future__ import annotations

import _attention_loop as loop
import sm90


def serialized(drain: bool) -> tuple[bool, int]:
    """Whether ptxas serializes the loop's products, and how many waits there are."""
    constants = {**loop.SIZES, "PACK": True, "PIN": True, "DRAIN": drain}
    kernel = sm90.compiled(loop.attention_loop, loop.SIGNATURE, constants, num_warps=4)
    waits = sum(x.startswith("WARPGROUP.DEPBAR") for x in sm90.machine_code(kernel))
    return "serialized" in sm90.ptxas_says(kernel), waits


def show() -> bool:
    """Prints the effect; whether this Triton has it."""
    (bad, many), (good, few) = serialized(False), serialized(True)
    print(f"in flight at the loop's end: serialized {bad}, {many} waits; drained: serialized {good}, {few} waits")
    return bad and not good


if __name__ == "__main__":
    print(sm90.versions())
    show()
