"""How many digits of a sample are recorded."""

from __future__ import annotations

from collections.abc import Iterable

CLOCK = 7
"""What a clock gives beyond them is noise, and bytes of the journal."""
FP32 = 9
"""As many tell any two numbers of fp32 apart: a resumed run is held to the same losses, bit by bit."""


def rounded(values: Iterable[float], digits: int = CLOCK) -> tuple[float, ...]:
    """Samples of so many digits. Whole numbers, bytes and counts, stay as they are."""
    return tuple(float(x) if float(x).is_integer() else float(f"{x:.{digits}g}") for x in values)
