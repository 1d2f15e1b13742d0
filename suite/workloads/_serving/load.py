"""What is asked of a server, and when: arrivals and lengths, drawn from a seed. Pure.

Two families that are never mixed. *Open*: requests arrive by a schedule that knows nothing of the server, and
every latency counts from the schedule. *Closed*: so many users, each of whom asks again when the answer is there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

OPEN = ("poisson", "gamma", "constant")
LOADS = (*OPEN, "closed", "search")
"""`search`: Poisson arrivals at rates that a bisection chooses."""
LENGTHS = ("fixed", "lognormal", "shared", "turns")
"""Lengths of prompts and answers: all alike; log-normal around the given medians; all alike with half of the
prompt the same for all; conversations whose prompt grows by a turn.

What a conversation holds as the answers so far is drawn, and not what the server said: so that all systems read
the same prompts, and because arrivals by a schedule do not wait for an answer. Of a turn's prompt a cache of
prefixes can find the prompt of the turn before, not the answer to it.
"""

SHAPE = 0.25
"""Of gamma arrivals: a coefficient of variation of 2, against 1 of Poisson's."""
SIGMA = 0.8
"""Of log-normal lengths, whose median is the length given; cut at an eighth and at four times of that."""
TURNS = 4
"""Of a conversation. A turn's prompt is the one before with an answer's and a question's length of new tokens."""

WARM = 0.1
"""Share of an open load's requests that come before its window."""


class Asked(msgspec.Struct, frozen=True):
    """One request: the tokens of its prompt, how many are to come, and when after the begin (open) or of which
    user in which turn (closed).
    """

    number: int
    prompt: tuple[int, ...]
    output: int
    at_s: float = 0.0
    user: int = 0


@dataclass(frozen=True)
class Load:
    """A load: its family, its rate in requests/s (open) or its users (closed), and what is asked."""

    kind: str
    rate: float
    users: int
    requests: int
    input: int
    output: int
    lengths: str
    vocabulary: int

    def draw(self, seed: int) -> tuple[Asked, ...]:
        """The requests in the order of their arrival; a closed load's in turns over its users."""
        generator = random.Random(f"{seed}/load")
        times = arrivals(self.kind, self.rate, self.requests, generator)
        shared = tuple(generator.randrange(self.vocabulary) for _ in range(self.input // 2))
        found = []
        history: dict[int, tuple[int, ...]] = {}
        for number in range(self.requests):
            user = number % self.users if self.users else number % max(1, self.requests // TURNS)
            size, output = self._lengths(generator)
            fresh = tuple(generator.randrange(self.vocabulary) for _ in range(size))
            if self.lengths == "shared":
                prompt = (*shared, *fresh[len(shared) :])
            elif self.lengths == "turns":
                prompt = (*history.pop(user, ()), *fresh)
                answer = tuple(generator.randrange(self.vocabulary) for _ in range(output))
                if len(prompt) + output < TURNS * (self.input + self.output):
                    history[user] = (*prompt, *answer)
            else:
                prompt = fresh
            # The first token is the request's own, so that no server's prefix cache has luck.
            if self.lengths in ("fixed", "lognormal"):
                prompt = (number % self.vocabulary, *prompt[1:])
            found.append(Asked(number, prompt, output, times[number], user))
        return tuple(found)

    def _lengths(self, generator: random.Random) -> tuple[int, int]:
        if self.lengths != "lognormal":
            return self.input, self.output
        sizes = []
        for middle in (self.input, self.output):
            drawn = middle * generator.lognormvariate(0.0, SIGMA)
            sizes.append(round(min(4 * middle, max(1, middle / 8, drawn))))
        return sizes[0], sizes[1]

    @property
    def longest(self) -> int:
        """The most tokens of a request, prompt and answer together."""
        each = self.input + self.output
        return each * {"lognormal": 4, "turns": TURNS}.get(self.lengths, 1)


def arrivals(kind: str, rate: float, count: int, generator: random.Random) -> list[float]:
    """Seconds after the begin at which requests come, `rate` a second on the average; 0 for a closed load."""
    if kind == "closed":
        return [0.0] * count
    found, now = [], 0.0
    for _ in range(count):
        found.append(now)
        if kind == "constant":
            now += 1 / rate
        elif kind == "gamma":
            now += generator.gammavariate(SHAPE, 1 / (rate * SHAPE))
        else:
            now += generator.expovariate(rate)
    return found


SLOS: Mapping[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "2000-100": (2000.0, 100.0),
    "500-30": (500.0, 30.0),
    "2000-200": (2000.0, 200.0),
    "450-40": (450.0, 40.0),
    "6000-175": (6000.0, 175.0),
    "4500-80": (4500.0, 80.0),
    "2000-80": (2000.0, 80.0),
    "1500-15": (1500.0, 15.0),
    "3000-80": (3000.0, 80.0),
    "2000-20": (2000.0, 20.0),
}
"""First token and time a token, in ms, that all requests but a hundredth are to meet: those of MLPerf Inference's
rules (July 2026) for servers and for interactive use.
"""


def split(asked: Sequence[Asked], processes: int, closed: bool) -> list[tuple[Asked, ...]]:
    """The requests of each of several client processes: in turns, a user's all in one."""
    return [
        tuple(x for i, x in enumerate(asked) if (x.user if closed else i) % processes == part)
        for part in range(processes)
    ]
