"""Other people's endpoints, through their own SDKs: what a user of OpenAI, Anthropic or Bedrock waits for.

It costs money, so nothing is asked before its price is bounded: the environment says which model, and the most
that may be spent.

    KERNELMARK_ENDPOINT_MODEL    the model's name at the provider
    KERNELMARK_ENDPOINT_CAPS     requests=N,tokens=N,usd=X: the most of a whole run: its systems, cases, replicates
    KERNELMARK_ENDPOINT_PRICES   input=X,output=X: dollars a million tokens

What a run has taken stands in its own folder: one that is resumed goes on with what is left. Each shard is a
run by itself.

Keys stand in the SDKs' own variables; no key, and no text of an error, which may hold one, goes into a record.
Retries are off: a 429 is an outcome.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from ...registry.store.metric import Metric, Ratio
from ...registry.store.record import Case, Measurement
from ..measure.rounding import rounded
from ..workload import Workload
from ._serving import latencies
from ._serving.loaded import STAMP_METRICS, stamps
from ._serving.messages import Seen

if TYPE_CHECKING:
    from ..measure.session import Session

MODEL = "KERNELMARK_ENDPOINT_MODEL"
CAPS = "KERNELMARK_ENDPOINT_CAPS"
PRICES = "KERNELMARK_ENDPOINT_PRICES"
LEDGER = "endpoint.json"
COMMAND = "kernelmark run --plan endpoint"

METRICS = (
    Metric("answer", "ms", judged=Ratio(), shown="table", about="From asking to the end of the answer, warm."),
    Metric(
        "answer_ttft",
        "ms",
        judged=Ratio(),
        label="TTFT",
        shown="table",
        about="From asking to the first chunk with text, warm.",
    ),
    Metric(
        "answer_tpot",
        "ms",
        judged=Ratio(),
        label="TPOT",
        shown="table",
        about="From the first chunk with text to the last, over the tokens but one: chunks are no tokens. Those "
        "of reasoning that are not shown came before, and are none of them.",
    ),
    Metric("answer_gap", "ms", label="gaps", about="Between chunks with text, pooled."),
    Metric("cold_answer", "ms", about="The first request of a new client."),
    Metric("cold_ttft", "ms", label="cold TTFT", about="Its first chunk with text: connecting is in it."),
    Metric("server_time", "ms", about="What the provider says that it took, where it says so."),
    Metric("answer_failed", "1", summary="mean", label="failed", about="Share of requests that did not end well."),
    Metric("limited", "1", summary="mean", shown="table", about="Share of requests that were answered with 429."),
    Metric(
        "answer_tokens", "tokens", better="neither", about="Output tokens of an answer, by the provider's count."
    ),
    Metric("asked_tokens", "tokens", better="neither", about="Tokens of a prompt, by the provider's count."),
    Metric("cached_tokens", "tokens", better="neither", about="Of these, those that it had cached."),
    Metric("reasoning_tokens", "tokens", better="neither", about="Of an answer's, those that are not shown."),
    Metric(
        "left_requests",
        "requests",
        "neither",
        "minimum",
        about="Least of the requests that were left in its limit.",
    ),
    Metric(
        "left_tokens", "tokens", "neither", "minimum", about="Least of the tokens that were left in its limit."
    ),
    Metric("spent", "USD", about="Tokens at the prices given."),
    *STAMP_METRICS,
)

WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "letter",
    "market",
    "winter",
    "signal",
    "copper",
    "harbor",
    "meadow",
    "thunder",
    "pencil",
    "blanket",
    "morning",
    "island",
    "candle",
    "forest",
    "bridge",
    "mirror",
]
TOKENS_A_WORD = 3
"""Tokens that a word of a prompt is taken for at the most, before the provider has counted."""
OVERHEAD = 64
"""Tokens that are taken for a prompt's frame."""
TOKEN_S = 0.02
"""What a user waits for a token, about, on the wire and before it: for estimates."""
TIMEOUT_S = 120.0
COUNTS = ("prompt_tokens", "tokens")
"""What a provider counts of a request, and is paid for."""
SERVER_TIME = ("openai-processing-ms", "latency-ms")
LEFT = {
    "left_requests": ("x-ratelimit-remaining-requests", "anthropic-ratelimit-requests-remaining"),
    "left_tokens": ("x-ratelimit-remaining-tokens", "anthropic-ratelimit-tokens-remaining"),
}


class Endpoint(Protocol):
    """What a system's factory gives. `needs` names the variables of its key; `local` marks one that is asked on
    this machine.
    """

    needs: tuple[str, ...]
    local: bool

    def connect(self, url: str | None, timeout_s: float) -> None:
        """A new client, of the provider or of a server on this machine."""
        ...

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        """An answer as it comes: dicts of `headers`, `text`, `usage`, `model`, `tier`, `region`, `end`."""
        ...

    def close(self) -> None:
        """Ends the client's connections."""
        ...


class Taken(msgspec.Struct, frozen=True):
    """What a run has taken: requests, tokens, dollars."""

    requests: int = 0
    tokens: int = 0
    usd: float = 0.0

    def plus(self, more: Taken) -> Taken:
        """Both."""
        return Taken(self.requests + more.requests, self.tokens + more.tokens, self.usd + more.usd)


@dataclass(frozen=True)
class Ledger:
    """What a run has taken, in a file of its own folder: processes of a run come one after the other."""

    path: Path | None

    def read(self) -> Taken:
        """What stands there; nothing where a run keeps nothing, or has taken nothing."""
        if self.path is None or not self.path.is_file():
            return Taken()
        return msgspec.json.decode(self.path.read_bytes(), type=Taken)

    def write(self, taken: Taken) -> None:
        """Puts it in place. Raises `OSError` where it cannot: what is not counted is not asked."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(taken))
            new.replace(self.path)


@dataclass(frozen=True)
class Caps:
    """The most that may be taken, and what a token costs in dollars."""

    requests: int
    tokens: int
    usd: float
    input: float
    output: float

    def hold(self, requests: int, prompt: int, output: int, already: str = "") -> Taken:
        """The most that so many requests take. Raises `NotImplementedError` where that goes beyond; `already` is
        said of the cap.
        """
        tokens = requests * (prompt + output)
        usd = self.cost(requests * prompt, requests * output)
        for what, most, cap in (
            ("requests", requests, self.requests),
            ("tokens", tokens, self.tokens),
            ("usd", usd, self.usd),
        ):
            if most > cap:
                raise NotImplementedError(
                    f"this case may take {most:.6g} {what}, the cap is {cap:.6g}{already} ({CAPS})"
                )
        return Taken(requests, tokens, usd)

    def less(self, taken: Taken) -> Caps:
        """What is left of it; none of what is overdrawn."""
        left = (max(0, self.requests - taken.requests), max(0, self.tokens - taken.tokens))
        return dataclasses.replace(self, requests=left[0], tokens=left[1], usd=max(0.0, self.usd - taken.usd))

    def cost(self, prompt: float, output: float) -> float:
        """Dollars of so many tokens."""
        return prompt * self.input + output * self.output


def caps(environment: Mapping[str, str]) -> Caps:
    """The caps that the environment states. Raises `NotImplementedError` where one is missing or no number."""
    found: dict[str, float] = {}
    for variable, names in ((CAPS, ("requests", "tokens", "usd")), (PRICES, ("input", "output"))):
        given = dict(x.partition("=")[::2] for x in environment.get(variable, "").split(",") if x)
        form = ",".join(f"{x}=NUMBER" for x in names)
        for name in names:
            try:
                found[name] = float(given[name])
            except (KeyError, ValueError):
                raise NotImplementedError(f"not run: set {variable} to {form}, then {COMMAND}") from None
            if not 0 <= found[name] < math.inf:
                raise NotImplementedError(f"not run: {name} of {variable} is no amount")
    return Caps(
        int(found["requests"]), int(found["tokens"]), found["usd"], found["input"] / 1e6, found["output"] / 1e6
    )


def permitted(system: Endpoint, environment: Mapping[str, str]) -> tuple[str, Caps]:
    """The model to ask, and the caps. Raises `NotImplementedError` with what must be set."""
    if system.local:
        return "fake-1", Caps(1 << 20, 1 << 30, 0.0, 0.0, 0.0)
    missing = [x for x in (*system.needs, MODEL) if not environment.get(x)]
    if missing:
        raise NotImplementedError(f"not run: set {', '.join(missing)}, then {COMMAND}")
    return environment[MODEL], caps(environment)


def prompt(number: int, words: int, generator: random.Random) -> str:
    """A prompt of so many words, no two alike from the first on."""
    drawn = " ".join(generator.choice(WORDS) for _ in range(words))
    return f"#{number} Go on with this list of words: {drawn}"


@dataclass
class Asked:
    """One request: its stamps, and what the answer says of itself."""

    seen: Seen
    usage: Mapping[str, int | None]
    headers: Mapping[str, str]
    said: Mapping[str, str]


def ask(system: Endpoint, model: str, number: int, text: str, output: int) -> Asked:
    """One request from begin to end; never raises for what an endpoint does."""
    begin = time.monotonic_ns()
    seen = Seen(number, begin, sent=begin, outcome="cut")
    usage: dict[str, int | None] = {}
    headers: dict[str, str] = {}
    said: dict[str, str] = {}
    try:
        for event in system.ask(model, text, output):
            now = time.monotonic_ns()
            if event.get("text"):
                seen.chunks.append(now)
            usage.update(event.get("usage") or {})
            headers.update(event.get("headers") or {})
            said.update({x: str(event[x])[:80] for x in ("model", "region", "tier") if event.get(x)})
            if event.get("end"):
                seen.outcome = "ok"
    except Exception as error:  # an SDK's errors are outcomes; their text may hold a key and is not looked at
        seen.outcome = outcome(error, bool(seen.chunks))
    seen.end = time.monotonic_ns()
    if seen.chunks:
        seen.first, seen.last = seen.chunks[0], seen.chunks[-1]
    elif seen.outcome == "ok":
        seen.outcome = "empty"
    seen.tokens, seen.prompt_tokens = usage.get("output"), usage.get("prompt")
    return Asked(seen, usage, headers, said)


def outcome(error: Exception, begun: bool) -> str:
    """How a request failed, by the error's kind and status alone."""
    status = getattr(error, "status_code", None)
    response = getattr(error, "response", None)
    if status is None and isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int) and not begun:
        # An error that an answer begins with has the status of the answer, which is none of a failure.
        return f"http {status}" if status >= 400 else "error"
    if "Timeout" in type(error).__name__:
        return "timeout"
    return "cut" if begun else "refused"


def measure(case: Case, system: Endpoint, session: Session, prepared: None) -> Measurement:
    """One endpoint: a cold request, then warm ones of so many users, each waiting for its answer."""
    model, most = permitted(system, os.environ)
    words, output, requests = (case.axes[x] for x in ("words", "output", "requests"))
    ledger = Ledger(None if system.local or session.scratch is None else session.scratch / LEDGER)
    taken = ledger.read()
    already = (
        f" after the {taken.requests} requests, {taken.tokens} tokens, {taken.usd:.6g} usd that this run took"
    )
    most = most.less(taken)
    may = most.hold(requests, TOKENS_A_WORD * words + OVERHEAD, output, already if taken.requests else "")
    from ._serving.fake_provider import Fake

    with (
        Fake() if system.local else nullcontext() as fake,
        _connected(system, fake.url if fake else None),
        session.stage("sample"),
    ):
        ledger.write(taken.plus(may))  # before the first is asked: a process may be killed
        found = all_of(system, model, case, session.seed, most)
    ledger.write(taken.plus(took(found, may, requests, most)))
    with session.stage("summarize"):
        return summarize(found, most, requests)


@contextmanager
def _connected(system: Endpoint, url: str | None) -> Iterator[None]:
    """A new client, and its end. Errors of a client tell its key as any do: only their kind is said."""
    try:
        system.connect(url, TIMEOUT_S)
    except ImportError:
        raise  # what is not installed
    except Exception as error:
        raise RuntimeError(f"no client of this endpoint: {type(error).__name__}") from None
    try:
        yield
    finally:
        with suppress(Exception):  # all is asked by then
            system.close()


def all_of(system: Endpoint, model: str, case: Case, seed: int, most: Caps) -> list[Asked]:
    """The case's requests, the first alone. What comes after a cap is reached is not asked."""
    words, output, requests, users = (case.axes[x] for x in ("words", "output", "requests", "users"))
    if not users:
        raise NotImplementedError("nobody asks: users is 0; at least 1 is needed")
    from concurrent.futures import ThreadPoolExecutor

    generator = random.Random(f"{seed}/endpoint")
    texts = [prompt(number, words, generator) for number in range(requests)]
    found = [ask(system, model, 0, texts[0], output)]
    if found[0].seen.outcome in ("http 401", "http 403", "http 404"):
        return found  # a wrong key or model is wrong in all others too

    def one(number: int) -> Asked | None:
        done = list(found)
        prompt_tokens = sum(x.seen.prompt_tokens or 0 for x in done)
        output_tokens = sum(x.seen.tokens or 0 for x in done)
        if prompt_tokens + output_tokens >= most.tokens or most.cost(prompt_tokens, output_tokens) > most.usd:
            return None
        asked = ask(system, model, number, texts[number], output)
        found.append(asked)
        return asked

    with ThreadPoolExecutor(users) as pool:
        list(pool.map(one, range(1, requests)))
    return found


def took(found: Sequence[Asked], may: Taken, requests: int, most: Caps) -> Taken:
    """What these took by the provider's count. One that it did not count, as a failed one, may have taken its
    share of all that the case `may` take by so many requests.
    """
    tokens, usd = 0, 0.0
    for x in found:
        prompt, output = (getattr(x.seen, name) for name in COUNTS)
        if prompt is None or output is None:
            tokens, usd = tokens + math.ceil(may.tokens / requests), usd + may.usd / requests
        else:
            tokens, usd = tokens + prompt + output, usd + most.cost(prompt, output)
    return Taken(len(found), tokens, usd)


def token_time(asked: Asked) -> float | None:
    """ms a token that was shown: what a model thought in silence is counted too, and came in no chunk."""
    seen, hidden = asked.seen, asked.usage.get("reasoning") or 0
    if seen.tokens is None:
        return None
    return latencies.token_time(replace(seen, tokens=seen.tokens - hidden))


def summarize(found: Sequence[Asked], most: Caps, requests: int | None = None) -> Measurement:
    """What is recorded of so many requests. Raises `RuntimeError` where no warm request ended well."""
    cold, warm = found[0], [x for x in found[1:] if x.seen.outcome == "ok"]
    ends = ", ".join(f"{n} {what}" for what, n in latencies.outcomes(x.seen for x in found).items())
    if not warm:
        raise RuntimeError(f"no warm request ended well: {ends}")
    uncounted = any(x.seen.outcome == "ok" and None in [getattr(x.seen, y) for y in COUNTS] for x in found)
    several: dict[str, Iterable[float | None]] = {
        "answer": (latencies.whole(x.seen) for x in warm),
        "answer_ttft": (latencies.first_token(x.seen) for x in warm),
        "answer_tpot": (token_time(x) for x in warm),
        "answer_gap": latencies.gaps(x.seen for x in warm),
        "cold_answer": [latencies.whole(cold.seen)] if cold.seen.outcome == "ok" else [],
        "cold_ttft": [latencies.first_token(cold.seen)],
        "server_time": (_number(x.headers, SERVER_TIME) for x in warm),
        "answer_failed": [sum(x.seen.outcome != "ok" for x in found) / len(found)],
        "limited": [sum(x.seen.outcome == "http 429" for x in found) / len(found)],
        "answer_tokens": (x.usage.get("output") for x in warm),
        "asked_tokens": (x.usage.get("prompt") for x in warm),
        "cached_tokens": (x.usage.get("cached") for x in warm),
        "reasoning_tokens": (x.usage.get("reasoning") for x in warm),
        "spent": [] if uncounted else [most.cost(*(sum(getattr(x.seen, y) or 0 for x in found) for y in COUNTS))],
        **{name: [_number(x.headers, names) for x in found] for name, names in LEFT.items()},
    }
    samples = {name: rounded(y for y in values if y is not None) for name, values in several.items()}
    samples |= {name: rounded(x) for name, x in stamps([x.seen for x in found], cold.seen.scheduled).items()}
    remarks = [f"requests by their end: {ends}"] if len(warm) < len(found) - 1 else []
    if uncounted:
        remarks.append(
            "usage is missing of some answers: no time a token of them, and what was spent is not known"
        )
    if requests is not None and len(found) < requests:
        remarks.append(
            f"a cap was reached: {requests - len(found)} of {requests} requests were not asked ({CAPS})"
        )
    said = {name: sorted({x.said[name] for x in found if name in x.said}) for name in ("model", "region", "tier")}
    remarks += [f"{name}: {', '.join(values)}" for name, values in said.items() if values]
    return Measurement(
        samples={name: x for name, x in samples.items() if x}, timer="monotonic", remarks=tuple(remarks)
    )


def _number(headers: Mapping[str, str], names: Sequence[str]) -> float | None:
    for name in names:
        try:
            value = float(headers.get(name, ""))
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return None


@dataclass(frozen=True, kw_only=True)
class OfModel(Workload):
    """A workload on what the environment names: another model is another case."""

    def computes(self, case: Case) -> tuple[object, ...]:
        """How it is asked, and of which model."""
        return (*super().computes(case), os.environ.get(MODEL, ""))


def lasts(case: Case) -> float:
    """About the seconds that users wait for answers, permitted or not: plans are cut alike on all machines."""
    return case.axes["requests"] / max(1, case.axes["users"]) * case.axes["output"] * TOKEN_S


WORKLOAD = OfModel(
    name="endpoint",
    summary="A provider's endpoint through its SDK: first token, time a token, limits; costs money",
    axes={
        "users": "users who each wait for an answer before they ask again",
        "requests": "requests, the first of which is cold",
        "words": "words of a prompt",
        "output": "tokens of an answer, at the most",
    },
    least={"requests": 2, "words": 1, "output": 1},
    dtypes=("unstated",),
    bytes=lambda case: 0,
    flops=lambda case: 0,
    lasts=lasts,
    measured=METRICS,
    measure=measure,
    definition=(ask, prompt, latencies.token_time, tuple(WORDS)),
    plans={},
)
