"""How values are written for people: one wording for the terminal, the report and what runs say under way.

Latency in ms, bandwidth in GB/s (10⁹), throughput in TFLOP/s (10¹²). What is not known is an en dash, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

DASH = "–"
ABBREVIATIONS = ("ttft", "tpot", "itl", "slo", "mfu")
"""Words that are written in capitals."""


def ratio(value: float | None) -> str:
    """A speedup: `1.32×`."""
    if value is None or not math.isfinite(value):
        return DASH
    if value >= 1000:
        return ">1000×"
    return f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def wide(low: float, high: float) -> bool:
    """Whether an interval of a ratio says nothing: two noisy replicates give bounds of many digits."""
    return low <= 0 or high / low > 100


def bounds(low: float | None, high: float | None) -> str:
    """` [0.98, 1.02]` behind a ratio; nothing without an interval."""
    if low is None or high is None:
        return ""
    return " [too noisy]" if wide(low, high) else f" [{low:.2f}, {high:.2f}]"


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


def number(value: float | None, digits: int = 4) -> str:
    """A value to so many significant digits, without an exponent where that stays readable."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -6:
        return scientific(value)
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def scientific(value: float | None) -> str:
    """Two significant digits with an exponent: `2.1e-3`."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def size(value: float | None) -> str:
    """Bytes with a decimal prefix: `67.1 MB`."""
    return _prefixed(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def binary(size: float) -> str:
    """Bytes as collectives are spoken of: `64 KiB`, `1 MiB`."""
    name, unit = next(
        (x for x in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if size >= 0.999 * x[1]), ("B", 1)
    )
    return f"{size / unit:.3g} {name}"


def energy(value: float | None) -> str:
    """Joules with a prefix: `12.3 mJ`."""
    return _prefixed(value, ((1, "J"), (1e-3, "mJ"), (1e-6, "µJ")))


def measured(value: float | None, unit: str) -> str:
    """A metric's value as it is read, in a column that names its unit: bytes and joules with a prefix instead."""
    if unit == "B":
        return size(value)
    if unit == "J":
        return energy(value)
    if unit == "1" and value is not None and abs(value) < 0.1:
        return scientific(value)
    return number(value)


def quantity(value: float | None, unit: str) -> str:
    """A metric's value where no column names its unit: `0.06157 ms`, `67.1 MB`, `1.042`."""
    told = measured(value, unit)
    return told if told == DASH or unit in ("", "1", "B", "J") else f"{told} {unit}"


def _prefixed(value: float | None, units: Sequence[tuple[float, str]]) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    scale, unit = next((x for x in units if abs(value) >= x[0]), units[-1])
    scaled = value / scale
    if scaled == int(scaled) and scaled < 1000:
        return f"{scaled:.0f} {unit}"
    return f"{number(scaled, 3)} {unit}"


def seconds(value: float | None) -> str:
    """A duration: `3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if value is None or not math.isfinite(value):
        return DASH
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def titled(name: str) -> str:
    """A metric's name as a heading: `ttft` is TTFT, `peak_memory` is Peak memory."""
    words = [x.upper() if x in ABBREVIATIONS else x for x in name.replace("_", " ").split()]
    text = " ".join(words)
    return text[:1].upper() + text[1:]


def counted(count: int, what: str) -> str:
    """`1 row`, `2 rows`, `1,000 rows`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def moment(text: str) -> str:
    """A time in ISO 8601 to the second, in UTC; what is no such time stays as it is."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return text
    when = when.astimezone(UTC) if when.tzinfo else when
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def value(what: object) -> str:
    """A condition or an environment value as it stands in a header."""
    if what is None:
        return DASH
    if isinstance(what, bool):
        return "yes" if what else "no"
    return str(what)
