"""ptxas moves a softmax behind the wait for the product that it should run under.

`warpgroup_mma_wait` names the results that it waits for. What does not depend on them may run before or after
it, and ptxas puts the exponentials after: the matrix units then wait for the softmax, and the overlap that the
source asks for is lost. A store to shared memory which never happens, and which depends on the row maximum, is
moved over no wait. It pins the row maximum before the wait, and with it the exponentials that can be computed
from there.
"""

from __future__ import annotations

import _attention_loop as loop
import sm90


def exponentials(pin: bool) -> int:
    """How many exponentials of the loop stand before the wait for the product with V."""
    constants = {**loop.SIZES, "PACK": True, "PIN": pin, "DRAIN": True}
    code = sm90.machine_code(sm90.compiled(loop.attention_loop, loop.SIGNATURE, constants, num_warps=4))
    waits = [i for i, x in enumerate(code) if x.startswith("WARPGROUP.DEPBAR")]
    # The first is for the first block's scores; in the loop one for the scores and one for the product with V.
    return sum("MUFU.EX2" in x for x in code[waits[1] : waits[2]])


def show() -> bool:
    """Prints the effect; whether this Triton has it."""
    loose, pinned = exponentials(False), exponentials(True)
    print(f"exponentials under the product with V: {loose}; with the row maximum pinned: {pinned}")
    return loose == 0 < pinned


if __name__ == "__main__":
    print(sm90.versions())
    show()
