"""Endpoints held to a server of this machine that stamps what it writes: outcomes, caps, and keys that stay where
they are.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import random
import re
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import Case, Measurement, baseline
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.workloads import endpoint
from kernelmark.suite.workloads._serving import latencies
from kernelmark.suite.workloads._serving.fake_provider import Fake
from kernelmark.suite.workloads._serving.http import Response

KEY = "sk-THE-SECRET-0123456789"
FAULTS = {2: "429", 3: "500", 4: "cut", 5: "stall", 6: "merged", 7: "no usage", 8: "401"}
PERMITTED = {
    endpoint.MODEL: "m",
    endpoint.CAPS: "requests=20,tokens=100000,usd=1",
    endpoint.PRICES: "input=1,output=2",
}


class Status(Exception):
    """An SDK's error: its text tells the key, as some providers do."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status_code = status


class Plain:
    """OpenAI's chat protocol by the standard library: an endpoint that needs no SDK."""

    needs: tuple[str, ...] = ()
    local = True

    def connect(self, url: str | None, timeout_s: float) -> None:
        assert url is not None
        self.where = url.removeprefix("http://")

    def close(self) -> None:
        pass

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection(self.where, timeout=10)
        try:
            yield from self._answer(connection, prompt)
        finally:
            connection.close()

    def _answer(self, connection: http.client.HTTPConnection, prompt: str) -> Iterator[dict[str, Any]]:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]})
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        try:
            if answer.status != 200:
                raise Status(answer.status, answer.read().decode())
            yield {"headers": {x.lower(): y for x, y in answer.getheaders()}}
            events = Response(status=200, headers={"content-type": "text/event-stream"}, _left=-1)
            while data := answer.read1(1 << 16):
                for payload in events.feed(data):
                    yield from self._event(payload)
        finally:
            answer.close()

    def _event(self, payload: bytes) -> Iterator[dict[str, Any]]:
        if payload == b"[DONE]":
            return
        event = json.loads(payload)
        for choice in event["choices"]:
            yield {"text": choice["delta"].get("content"), "end": choice["finish_reason"], "model": event["model"]}
        if event.get("usage"):
            yield {
                "usage": {"prompt": event["usage"]["prompt_tokens"], "output": event["usage"]["completion_tokens"]}
            }


def sdk(name: str) -> Any:
    """An adapter of a provider's SDK on this machine, where that is installed."""
    needs = {"fake_bedrock_converse": "boto3", "fake_anthropic_messages": "anthropic"}.get(name, "openai")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    found = next(x for x in Catalog.default().of_operator("endpoint") if x.name == name)
    assert found.provider == "fake"
    return found.load()(a_case())


def a_case(**axes: int) -> Case:
    given = {"users": 2, "requests": 9, "words": 8, "output": 6} | axes
    return endpoint.WORKLOAD.case(given, "unstated", "program")


@pytest.mark.parametrize(("axis", "least"), [("requests", 2), ("words", 1), ("output", 1)])
def test_nothing_that_is_asked_is_refused(axis: str, least: int) -> None:
    with pytest.raises(InputError, match=f"endpoint: axis {axis} is {least - 1}; it is at least {least}"):
        a_case(**{axis: least - 1})
    with pytest.raises(InputError, match=f"axis {axis} is -1; sizes are not negative"):
        a_case(**{axis: -1})


def test_without_users_nobody_asks() -> None:
    with pytest.raises(NotImplementedError, match="nobody asks: users is 0; at least 1 is needed"):
        endpoint.all_of(None, "a-model", a_case(users=0), 0, None)  # type: ignore[arg-type]  # nobody is asked


@pytest.mark.parametrize(
    ("name", "sdk"),
    [("openai_chat", "openai"), ("anthropic_messages", "anthropic"), ("bedrock_converse", "boto3")],
)
def test_a_played_provider_says_how_its_sdk_is_installed(
    name: str, sdk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = next(x for x in Catalog.default().of_operator("endpoint") if x.name == f"fake_{name}").load()

    def lacks(module: str) -> Callable[[str], None]:
        def missing(_: str) -> None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        return missing

    monkeypatch.setattr(importlib, "import_module", lacks(sdk))
    with pytest.raises(ImportError, match=f"^{sdk} is not installed: pip install {sdk}$"):
        factory(a_case())
    monkeypatch.setattr(importlib, "import_module", lacks("httpx"))  # which the SDK needs in its turn
    with pytest.raises(ModuleNotFoundError, match="^No module named 'httpx'$"):
        factory(a_case())


@pytest.mark.parametrize(
    "name",
    ["plain", "fake_openai_chat", "fake_openai_responses", "fake_anthropic_messages", "fake_bedrock_converse"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the SDKs' own
def test_what_endpoints_do_is_reported_as_that(name: str) -> None:
    system = Plain() if name == "plain" else sdk(name)
    with Fake(faults=FAULTS) as fake:
        system.connect(fake.url, 10)
        asked = [endpoint.ask(system, "fake-1", i, endpoint.prompt(i, 5, random.Random(i)), 6) for i in range(9)]
        system.close()
    seen = [x.seen for x in asked]
    assert [x.outcome for x in seen] == [
        "ok", "ok", "http 429", "http 500", "cut", "ok", "ok", "ok", "http 401",
    ]  # fmt: skip
    assert fake.asked == 9, "an SDK tried again by itself"
    for x in seen[:2]:
        off = [(a - b) / 1e6 for a, b in zip(x.chunks, fake.written[x.number], strict=True)]
        assert min(off) >= 0
        # A bound against blunders, as other tests share these cores; an SDK's first answer makes its types.
        assert x.number == 0 or sorted(off)[2] < 100
        assert (x.tokens, len(x.chunks)) == (6, 6)
        assert latencies.first_token(x) >= fake.first_ms  # type: ignore[operator]  # it has one
    assert max(latencies.gaps([seen[5]])) > fake.stall_ms / 2  # the chunk before may be read late
    assert len(seen[6].chunks) == 2
    assert seen[7].tokens is None
    assert asked[0].said.get("model") == "fake-1"


def test_no_key_goes_into_a_record() -> None:
    system = Plain()
    with Fake(faults=FAULTS) as fake:
        system.connect(fake.url, 10)
        found = endpoint.all_of(system, "fake-1", a_case(), 3, endpoint.caps(PERMITTED))
    record = endpoint.summarize(found, endpoint.caps(PERMITTED))
    assert KEY not in repr(record)
    assert KEY not in repr(found)
    assert "429" in record.remarks[0]
    assert record.samples["limited"] == (pytest.approx(1 / 9),)
    assert record.samples["left_requests"][0] == 41
    assert record.samples["server_time"] == (7.0,) * 4
    with Fake(faults=dict.fromkeys(range(9), "401")) as fake:
        system.connect(fake.url, 10)
        found = endpoint.all_of(system, "fake-1", a_case(), 3, endpoint.caps(PERMITTED))
        assert fake.asked == 1, "a key that is wrong is wrong in all others too"
    with pytest.raises(RuntimeError, match=r"no warm request ended well: 1 http 401$") as failed:
        endpoint.summarize(found, endpoint.caps(PERMITTED))
    assert KEY not in str(failed.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({endpoint.MODEL: ""}, "not run: set KERNELMARK_ENDPOINT_MODEL, then kernelmark run --plan endpoint"),
        ({endpoint.CAPS: ""}, "not run: set KERNELMARK_ENDPOINT_CAPS to requests=NUMBER,tokens=NUMBER,usd=NUMBER"),
        ({endpoint.PRICES: "input=x,output=1"}, "not run: set KERNELMARK_ENDPOINT_PRICES"),
        ({endpoint.CAPS: "requests=9,tokens=9e5,usd=nan"}, "is no amount"),
        ({endpoint.CAPS: "requests=8,tokens=100000,usd=1"}, "may take 9 requests, the cap is 8"),
        ({endpoint.CAPS: "requests=9,tokens=100,usd=1"}, "may take 846 tokens, the cap is 100"),
        ({endpoint.CAPS: "requests=9,tokens=1e5,usd=0.0001"}, "may take 0.0009 usd, the cap is 0.0001"),
        ({"KEY": ""}, "not run: set KEY"),
    ],
)
def test_nothing_is_asked_before_its_price_is_bounded(
    changed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Real(Plain):
        needs = ("KEY",)
        local = False

        def connect(self, url: str | None, timeout_s: float) -> None:
            raise AssertionError("it was asked")

    for name, value in ({**PERMITTED, "KEY": KEY} | changed).items():
        monkeypatch.setenv(name, value)
    session = Session(Cpu(), 1, 0, Sampling(), Stages())
    with pytest.raises(NotImplementedError, match=message):
        endpoint.measure(a_case(), Real(), session, None)


class Scripted(Plain):
    """Answers of two chunks 20 ms apart, with such usage."""

    def __init__(self, usage: dict[str, int]) -> None:
        self.usage = usage

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        yield {"text": "a"}
        time.sleep(0.02)
        yield {"text": "b"}
        yield {"end": True, "usage": self.usage}


def summary(usage: dict[str, int], **caps: str) -> Measurement:
    most = endpoint.caps(PERMITTED | caps)
    found = endpoint.all_of(Scripted(usage), "m", a_case(requests=4, users=1), 3, most)
    return endpoint.summarize(found, most, 4)


def test_what_was_thought_in_silence_came_in_no_chunk() -> None:
    shown = summary({"prompt": 5, "output": 102, "reasoning": 100})
    assert min(shown.samples["answer_tpot"]) >= 20
    assert shown.samples["answer_tokens"] == (102.0,) * 3
    assert "answer_tpot" not in summary({"prompt": 5, "output": 100, "reasoning": 100}).samples


def test_an_error_within_an_answer_is_no_http_200() -> None:
    """As Anthropic's SDK raises one that comes as the first event: with the status of the stream."""
    assert endpoint.outcome(Status(200, "overloaded"), False) == "error"
    assert endpoint.outcome(Status(200, "overloaded"), True) == "cut"
    assert endpoint.outcome(Status(529, "overloaded"), False) == "http 529"


def test_what_was_spent_is_known_or_not_said() -> None:
    assert summary({"prompt": 5, "output": 2}).samples["spent"] == (pytest.approx(4 * 9e-6),)
    found = summary({})
    assert "spent" not in found.samples
    assert "what was spent is not known" in found.remarks[0]


def test_what_a_cap_left_out_is_said() -> None:
    found = summary({"prompt": 5, "output": 2000}, **{endpoint.CAPS: "requests=4,tokens=4000,usd=1"})
    assert len(found.samples["answer"]) == 1
    assert found.remarks == ("a cap was reached: 2 of 4 requests were not asked (KERNELMARK_ENDPOINT_CAPS)",)


class Paid(Plain):
    """A provider that counts so many tokens an answer, of 846 that nine requests of `a_case` may take; it fails
    beyond those that it has answers for.
    """

    needs = ("KEY",)
    local = False

    def __init__(self, answers: int = 1 << 20) -> None:
        self.asked, self.answers = 0, answers

    def connect(self, url: str | None, timeout_s: float) -> None:
        pass

    def ask(self, model: str, prompt: str, output: int) -> Iterator[dict[str, Any]]:
        self.asked += 1
        if self.asked > self.answers:
            raise Status(429, KEY)
        yield {"text": "a"}
        yield {"end": True, "usage": {"prompt": 10, "output": 5}}


def paid(monkeypatch: pytest.MonkeyPatch, folder: Path | None, caps: str) -> Callable[..., Measurement]:
    """Replicates of a run, each as in a process of its own."""
    for name, value in (PERMITTED | {"KEY": KEY, endpoint.CAPS: caps}).items():
        monkeypatch.setenv(name, value)

    def measure(replicate: int, system: Paid, users: int = 2) -> Measurement:
        session = Session(Cpu(), 1, replicate, Sampling(), Stages(), folder)
        return endpoint.measure(a_case(users=users), system, session, None)

    return measure


def test_a_cap_is_of_all_replicates_and_cases_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = Paid()
    measure = paid(monkeypatch, tmp_path / "run", "requests=20,tokens=100000,usd=1")
    measure(0, system)
    measure(1, system, users=3)
    beyond = "may take 9 requests, the cap is 2 after the 18 requests, 270 tokens, 0.00036 usd that this run took"
    with pytest.raises(NotImplementedError, match=beyond):
        measure(2, Paid())
    assert system.asked == 18
    paid(monkeypatch, tmp_path / "another", "requests=20,tokens=100000,usd=1")(0, Paid())
    paid(monkeypatch, None, "requests=9,tokens=100000,usd=1")(0, Paid())


@pytest.mark.parametrize(("caps", "what"), [("tokens=900,usd=1", "tokens"), ("tokens=100000,usd=0.001", "usd")])
def test_what_is_counted_is_what_was_taken(
    caps: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine answers of 15 tokens leave 765 of 900 tokens, where 846 may be taken; so of dollars."""
    measure = paid(monkeypatch, tmp_path, f"requests=100,{caps}")
    measure(0, Paid())
    with pytest.raises(NotImplementedError, match=rf"may take \S+ {what}"):
        measure(1, Paid())


def test_what_nobody_counted_may_have_been_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = paid(monkeypatch, tmp_path, "requests=100,tokens=100000,usd=1")
    measure(0, Paid(answers=3))
    ledger = endpoint.Ledger(tmp_path / endpoint.LEDGER)
    assert ledger.read() == endpoint.Taken(9, 3 * 15 + 6 * 94, pytest.approx(3 * 20e-6 + 6 * 1e-4))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint, "all_of", killed)
    with pytest.raises(KeyboardInterrupt):
        measure(1, Paid())
    assert ledger.read().tokens == 3 * 15 + 6 * 94 + 846  # it stands before the first is asked


def test_the_caps_that_the_page_shows_are_enough_for_the_plan() -> None:
    """What it says that the plan takes of one system, by the case's own bound."""
    root = Path(endpoint.__file__).parents[2]
    table = tomllib.loads((root / "suite" / "plans" / "endpoint.toml").read_text())
    (case,) = table["cases"]
    axes = case["axes"]
    requests = table["replicates"] * len(axes["users"]) * axes["requests"]
    tokens = requests * (endpoint.TOKENS_A_WORD * axes["words"] + endpoint.OVERHEAD + axes["output"])
    page = (root / "docs" / "serving.md").read_text(encoding="utf-8")
    assert f"asks {requests} times in plan `endpoint`, for {tokens:,} tokens" in page
    shown = re.search(rf"{endpoint.CAPS}=requests=(\d+),tokens=(\d+)", page)
    assert shown is not None
    assert (requests, tokens) <= (int(shown[1]), int(shown[2]))


def test_every_request_of_an_endpoint_has_its_stamps() -> None:
    system = Paid(answers=3)
    most = endpoint.caps(PERMITTED)
    samples = endpoint.summarize(endpoint.all_of(system, "m", a_case(users=1), 3, most), most, 9).samples
    assert samples["stamp_ok"] == (1.0,) * 3 + (0.0,) * 6
    assert samples["stamp_first"][3:] == (-1.0,) * 6
    assert all(0 <= a <= b for a, b in zip(samples["stamp_first"][:3], samples["stamp_end"], strict=False))
    assert len(samples["stamp_end"]) == len(samples["stamp_chunks"]) == 9


def test_a_fake_is_nobodys_baseline() -> None:
    assert not baseline("fake", "fake_openai_chat")
    assert baseline("openai", "openai_chat")


def test_a_local_endpoint_is_measured() -> None:
    session = Session(Cpu(), 1, 0, Sampling(), Stages())
    found = endpoint.measure(a_case(), Plain(), session, None)
    assert len(found.samples["answer"]) == 8
    assert found.samples["answer_failed"] == (0.0,)
    assert found.remarks == ("model: fake-1",)
    assert msgspec.json.encode(found)


def test_another_model_is_another_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(endpoint.MODEL, "one")
    one = a_case().spec
    monkeypatch.setenv(endpoint.MODEL, "two")
    assert a_case().spec != one


@pytest.mark.parametrize(("axis", "least"), [("requests", 2), ("words", 1), ("output", 1)])
def test_what_asks_nothing_is_no_case(axis: str, least: int) -> None:
    """Of two requests one is warm."""
    with pytest.raises(InputError, match=f"axis {axis} is {least - 1}; it is at least {least}"):
        a_case(**{axis: least - 1})
