"""The highest rate at which a server meets its limits: which rate is tried next. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PROBES = 10
"""Rates that a search tries at the most."""
CLOSE = 1.1
"""Ratio of the lowest rate that fails to the highest that meets, at which a search ends."""


@dataclass
class Search:
    """Rates that are tried, `rate` first: doubled or halved to where what they meet changes, then between."""

    rate: float
    low: float = 0.0
    """The highest that met the limits."""
    high: float = math.inf
    """The lowest that did not."""
    tried: list[tuple[float, float]] = field(default_factory=list)
    """Each rate, and the share of its requests that met them."""
    out_of_time: bool = False

    @property
    def next(self) -> float | None:
        """The rate to try; None where it is known to a tenth."""
        if not self.tried:
            return self.rate
        if self.low and self.high / self.low <= CLOSE:
            return None
        if math.isinf(self.high):
            return 2 * self.low
        return (self.low * self.high) ** 0.5 if self.low else self.high / 2

    def tell(self, share: float, met: bool) -> None:
        """What became of the rate."""
        rate = self.next
        assert rate is not None
        self.tried.append((rate, share))
        if met:
            self.low = rate
        else:
            self.high = rate

    @property
    def said(self) -> str | None:
        """Where it ended before the rate was known to a tenth: what is known, and why no more."""
        if self.next is None:
            return None
        why = "a further rate may take longer than the deadline leaves"
        if not self.out_of_time:
            why = f"{PROBES} rates were tried"
        if not self.tried:
            return f"no rate was tried: {self.rate:g} requests/s may take longer than the deadline leaves"
        if not self.low:
            return f"no rate down to {self.high:.3g} requests/s meets the SLO; {why}"
        above = "no higher one was tried" if math.isinf(self.high) else f"{self.high:.3g} does not"
        return f"the search ended early: {self.low:.3g} requests/s meets the SLO, {above}; {why}"
