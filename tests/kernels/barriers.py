"""Memory barriers of a compiled kernel over which something else lies, read off its PTX.

Triton 3.6 gives a barrier's place in shared memory to others after its last use. A barrier that is initialised and
never waited for so comes to lie under scratch memory, which PTX forbids without an `mbarrier.inval` between: on an
H200 what went through that memory was wrong now and then.
"""

from __future__ import annotations

import re

BARRIER = 8
"""Bytes."""
WIDTHS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}

_places = re.compile(r"add\.s32\s+(%r\d+), %r\d+, (\d+);")
_barriers = re.compile(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]")
_scratch = re.compile(
    r"(?:ld|st)\.shared(?:\.v(?P<n>[24]))?\.(?P<type>b8|b16|b32|b64)\s+(?:[^;\[]*\s)?"
    r"\[\s*(?:global_smem\+(?P<place>\d+)|(?P<register>%r\d+)(?: \+ (?P<more>\d+))?)\s*\]"
)


def laid_over(ptx: str) -> set[int]:
    """Offsets of barriers that are loaded from or stored to as plain memory, at addresses known when compiling.

    Raises `ValueError` where not every barrier's place is found: another Triton may write it otherwise.
    """
    places = {register: int(offset) for register, offset in _places.findall(ptx)}
    barriers = {places[register] for register in _barriers.findall(ptx) if register in places}
    if len(barriers) != ptx.count("mbarrier.init"):
        raise ValueError(f"{len(barriers)} of {ptx.count('mbarrier.init')} barriers found")
    found = set()
    for match in _scratch.finditer(ptx):
        if match["place"]:
            begin = int(match["place"])
        elif match["register"] in places:
            begin = places[match["register"]] + int(match["more"] or 0)
        else:
            continue
        end = begin + int(match["n"] or 1) * WIDTHS[match["type"]]
        found |= {barrier for barrier in barriers if barrier < end and begin < barrier + BARRIER}
    return found
