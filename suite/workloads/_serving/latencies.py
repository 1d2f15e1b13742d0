"""From stamps to latencies and rates, by stated definitions. Pure; stamps in ns, results in ms and seconds.

Of a request: s scheduled, q first byte sent, f first chunk with text (reasoning included), t last chunk with
text, e end of the stream; N tokens by the server's own count.

* first token: f − s, what a user waits; f − q is what the server took. Dispatch delay: q − s.
* time a token (TPOT): (t − f) / (N − tokens of the first chunk); none where that divides by nothing.
* gaps (ITL): between chunks with text, pooled over requests: long answers count more.
* end to end: e − s, and e − q.
* goodput: requests of the window that meet all limits, over the window's length; what failed is a miss, and so is
  an answer whose server did not count its tokens: what is not known never meets a limit.
* rates: what came after the moment that opened the window, over its length.
* percentiles: nearest rank; p99 of at least 500 only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .load import WARM
from .messages import Seen

MS = 1e-6
ENOUGH = 500
"""Requests that a 99th percentile takes at the least."""
WAITED = ("timeout", "unsent")
"""Ends of requests that were waiting when their client gave up."""
MISSED = 0.01
"""Share of requests that may miss a limit: what is limited are 99th percentiles."""


def nearest_rank(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def p99(values: Sequence[float]) -> float | None:
    """The 99th percentile, None of too few."""
    return nearest_rank(values, 99) if len(values) >= ENOUGH else None


def first_token(seen: Seen, since_sent: bool = False) -> float | None:
    """ms from the schedule, or from the first byte sent, to the first text."""
    begin = seen.sent if since_sent else seen.scheduled
    return None if seen.first is None or begin is None else (seen.first - begin) * MS


def token_time(seen: Seen) -> float | None:
    """ms a token after the first chunk, which is taken for one token where a server gives no sizes of chunks."""
    if seen.first is None or seen.last is None or seen.tokens is None:
        return None
    after = seen.tokens - (seen.sizes[0] if seen.sizes else 1)
    return (seen.last - seen.first) * MS / after if after > 0 else None


def whole(seen: Seen, since_sent: bool = False) -> float | None:
    """ms from the schedule, or from the first byte sent, to the end of the stream."""
    begin = seen.sent if since_sent else seen.scheduled
    return None if seen.end is None or begin is None else (seen.end - begin) * MS


def dispatch(seen: Seen) -> float | None:
    """ms from the schedule to the first byte sent: the client's own share, or a connection's."""
    return None if seen.sent is None else (seen.sent - seen.scheduled) * MS


@dataclass(frozen=True)
class Window:
    """The steady part of a load, in ns: requests scheduled in it count, and tokens that came in it."""

    opens: int
    closes: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.closes - self.opens) / 1e9

    def holds(self, stamp: int | None) -> bool:
        """Whether a stamp lies in it."""
        return stamp is not None and self.opens <= stamp <= self.closes

    def adds(self, stamp: int | None) -> bool:
        """Whether what happened then counts over its length. What opened it does not: ten a second are ten after
        the first, and not eleven, in a window from one of them to another a second later.
        """
        return stamp is not None and self.opens < stamp <= self.closes


def opened(requests: int) -> int:
    """Requests of an open load that its window holds."""
    return requests - math.floor(WARM * requests)


def enough() -> int:
    """The fewest requests of an open load whose window holds as many as a 99th percentile takes."""
    return next(x for x in itertools.count(ENOUGH) if opened(x) >= ENOUGH)


def window(seen: Sequence[Seen], users: dict[int, int] | None) -> Window | None:
    """The window of an open load: from where its warm-up's share of requests has come, to the last arrival. Of a
    closed one (`users` by number of request): from where each user had an answer, to where the first has no more
    to ask. None where there is none.
    """
    if users is None:
        ordered = sorted(x.scheduled for x in seen)
        found = Window(ordered[math.floor(WARM * len(ordered))], ordered[-1])
    else:
        mine: dict[int, list[Seen]] = {}
        for x in seen:
            mine.setdefault(users[x.number], []).append(x)
        ends = [[x.end for x in one if x.end is not None] for one in mine.values()]
        if not all(ends):
            return None
        found = Window(max(min(x) for x in ends), min(max(x) for x in ends))
    return found if found.closes > found.opens else None


def waiting(seen: Sequence[Seen]) -> list[Seen]:
    """Those that a backlog is of. A request that was refused, or whose answer broke, has no end and waits no more:
    with it a server that refuses some would look as if it could not follow.
    """
    return [x for x in seen if x.end is not None or x.outcome in WAITED]


def backlog(seen: Sequence[Seen], window: Window, looks: int = 20) -> list[int]:
    """Requests that had come and were not over, at so many moments of the window."""
    moments = [window.opens + (window.closes - window.opens) * i // (looks - 1) for i in range(looks)]
    never = window.closes + 1
    return [sum(x.scheduled <= at < (x.end or never) for x in seen) for at in moments]


def saturated(seen: Sequence[Seen], window: Window) -> bool:
    """Whether an open load's backlog grows over its window by more than chance would: then its latencies say how
    long the load lasted, and nothing of the server.

    The growth is that of a straight line through the backlog; a rate a tenth above what the server can do grows
    by a tenth of the arrivals. Chance moves a steady backlog by about the root of the arrivals at the most.
    """
    counts = backlog(seen, window)
    n, mean, middle = len(counts), sum(counts) / len(counts), (len(counts) - 1) / 2
    slope = sum((i - middle) * (y - mean) for i, y in enumerate(counts)) / sum((i - middle) ** 2 for i in range(n))
    arrived = sum(window.holds(x.scheduled) for x in seen)
    return slope * (n - 1) > max(2.0, 2 * math.sqrt(arrived))


def tail(seen: Sequence[Seen], of: Callable[[Seen], float | None], most_s: float) -> float:
    """ms at the 99th percentile of these requests. One that did not end well, or whose tokens the server did not
    count, is taken to have lasted as long as it may; one without a second token has no time a token.
    """
    values = []
    for x in seen:
        known = x.outcome == "ok" and x.tokens is not None
        if (value := of(x) if known else most_s * 1e3) is not None:
            values.append(value)
    return nearest_rank(values, 99) if values else 0.0


def meets(seen: Seen, limits: tuple[float, float]) -> bool:
    """Whether a request ended well and is known to be within the limits of first token and time a token, in ms.

    Without the server's count of tokens the second is not known, and not met. An answer of one token, or one whose
    first chunk has all of them, has no second to meet.
    """
    first, each = first_token(seen), token_time(seen)
    if seen.outcome != "ok" or first is None or seen.tokens is None:
        return False
    return first <= limits[0] and (each is None or each <= limits[1])


def within(seen: Sequence[Seen], limits: tuple[float, float]) -> bool:
    """Whether all but a hundredth of these requests meet the limits."""
    return sum(not meets(x, limits) for x in seen) <= MISSED * len(seen)


def gaps(seen: Iterable[Seen]) -> list[float]:
    """ms between chunks with text, of all requests."""
    return [(b - a) * MS for x in seen for a, b in itertools.pairwise(x.chunks)]


def tokens_within(seen: Iterable[Seen], window: Window) -> float:
    """Tokens that came in the window: by the sizes of chunks, else a request's tokens in equal parts."""
    total = 0.0
    for x in seen:
        each: Sequence[float] = x.sizes or [(x.tokens or 0) / max(1, len(x.chunks))] * len(x.chunks)
        total += sum(size for stamp, size in zip(x.chunks, each, strict=True) if window.adds(stamp))
    return total


def outcomes(seen: Iterable[Seen]) -> dict[str, int]:
    """How many requests ended how."""
    found: dict[str, int] = {}
    for x in seen:
        found[x.outcome] = found.get(x.outcome, 0) + 1
    return dict(sorted(found.items()))


def thinned(values: Sequence[float], most: int) -> list[float]:
    """Every k-th, k the least that leaves at most `most`."""
    step = max(1, math.ceil(len(values) / most))
    return list(values[::step])
