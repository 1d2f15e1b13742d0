"""Shares and ratios as they are written everywhere: `83 %`, `+2.1 %`, `1.32×`. What is not known is an en dash."""

from __future__ import annotations

import math

DASH = "–"


def ratio(value: float | None) -> str:
    """A speedup: `1.32×`."""
    if value is None or not math.isfinite(value):
        return DASH
    if value >= 1000:
        return ">1000×"
    return f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def percent(value: float | None, digits: int = 0) -> str:
    """A fraction as per cent: `83 %`."""
    return DASH if value is None or not math.isfinite(value) else f"{value * 100:.{digits}f} %"


def change(value: float | None) -> str:
    """A ratio as a signed change: 1.021 is `+2.1 %`; from a factor of 11 on it stays a ratio."""
    if value is None or not math.isfinite(value):
        return DASH
    if value >= 11:
        return ratio(value)
    text = f"{(value - 1) * 100:+.1f} %".replace("-", "−")
    return "0.0 %" if text in ("+0.0 %", "−0.0 %") else text


def signed(share: float | None) -> str:
    """A fraction with its sign: .021 is `+2.1 %`."""
    return DASH if share is None else change(1 + share)
