"""An event loop that wakes to the microsecond, for a client that sends by a schedule.

Python's `EpollSelector` rounds every wait up to a whole millisecond. A client on it sends up to 1 ms late, and
finds its own loop late by as much, however idle the machine is.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import time

SELECTABLE = 1024
"""select(2) takes descriptors below this."""

if hasattr(selectors, "EpollSelector"):  # Linux alone has it

    class PreciseSelector(selectors.EpollSelector):
        """Epoll that waits to the microsecond. Epoll itself waits the whole milliseconds; for the rest select(2)
        waits, which takes microseconds, on the descriptor of epoll, which is readable when there is an event.
        """

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """The events, or none after `timeout` seconds."""
            if timeout is None or timeout <= 0 or self.fileno() >= SELECTABLE:
                return super().select(timeout)
            until, whole = time.monotonic() + timeout, int(timeout * 1e3)
            # Most events come now and cost one call, as on any loop. Half a millisecond less is rounded up.
            if whole and (found := super().select((whole - 0.5) / 1e3)):
                return found
            ready, _, _ = select.select([self], [], [], max(0.0, until - time.monotonic()))
            return super().select(0) if ready else []


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop that waits to the microsecond; where there is no epoll, the one that Python takes by itself."""
    if hasattr(selectors, "EpollSelector"):
        return asyncio.SelectorEventLoop(PreciseSelector())
    return asyncio.new_event_loop()
