"""Definitions of latencies, on literal stamps."""

from __future__ import annotations

import pytest
from kernelmark.suite.workloads._serving import latencies as of
from kernelmark.suite.workloads._serving.client import read
from kernelmark.suite.workloads._serving.load import Load
from kernelmark.suite.workloads._serving.loaded import Loaded, figures
from kernelmark.suite.workloads._serving.messages import Seen

MS = 1_000_000


def seen(
    number: int = 0, s: float = 0, q: float = 1, chunks: tuple[float, ...] = (), e: float = 0, **more: object
) -> Seen:
    stamps = [round(x * MS) for x in chunks]
    return Seen(
        number=number,
        scheduled=round(s * MS),
        sent=round(q * MS),
        first=stamps[0] if stamps else None,
        last=stamps[-1] if stamps else None,
        end=round(e * MS) or None,
        chunks=stamps,
        outcome="ok",
        **more,  # type: ignore[arg-type]  # fields of Seen
    )


def test_a_request() -> None:
    x = seen(s=10, q=12, chunks=(50, 60, 90), e=95, tokens=9, sizes=[4, 2, 3])
    assert of.first_token(x) == pytest.approx(40)
    assert of.first_token(x, since_sent=True) == pytest.approx(38)
    assert of.token_time(x) == pytest.approx(40 / 5)  # 9 tokens less the 4 of the first chunk
    assert of.whole(x) == pytest.approx(85)
    assert of.whole(x, since_sent=True) == pytest.approx(83)
    assert of.dispatch(x) == pytest.approx(2)
    assert of.gaps([x]) == pytest.approx([10, 30])


def test_one_token_has_no_time_a_token() -> None:
    assert of.token_time(seen(chunks=(5,), e=6, tokens=1)) is None
    assert of.token_time(seen(chunks=(5, 9), e=10)) is None  # usage is missing
    assert of.meets(seen(chunks=(5,), e=6, tokens=1), (5, 1))  # it meets the limit that it has


def test_what_is_not_known_meets_no_limit() -> None:
    uncounted = seen(chunks=(5, 9), e=10)
    assert not of.meets(uncounted, (1e9, 1e9))
    assert not of.within([uncounted] * 500, (1e9, 1e9))
    assert of.meets(seen(chunks=(5, 9), e=10, tokens=2), (5, 4))


def test_percentiles_are_ranks() -> None:
    values = [float(x) for x in range(1, 501)]
    assert of.nearest_rank(values, 99) == 495
    assert of.nearest_rank([3.0, 1.0], 50) == 1
    assert of.p99(values) == 495
    assert of.p99(values[:-1]) is None


def test_the_window_of_users_opens_when_each_had_an_answer() -> None:
    users = {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    rows = [seen(i, s=10 * i, chunks=(10 * i + 5,), e=10 * i + 9) for i in range(6)]
    found = of.window(rows, users)
    assert found == of.Window(19 * MS, 49 * MS)
    rows[1].end = rows[3].end = rows[5].end = None
    assert of.window(rows, users) is None


def arriving(count: int, every: float, service: float) -> list[Seen]:
    """One server, first come first served."""
    free, rows = 0.0, []
    for i in range(count):
        free = max(free, i * every) + service
        rows.append(seen(i, s=i * every, q=i * every, chunks=(free,), e=free, tokens=1))
    return rows


def test_a_backlog_that_grows_is_saturation() -> None:
    for service, expected in ((500.0, True), (120.0, True), (99.0, False), (20.0, False)):
        rows = arriving(200, 100.0, service)
        window = of.window(rows, None)
        assert window is not None
        assert of.saturated(rows, window) is expected, service


def test_who_was_refused_waits_no_longer() -> None:
    rows = arriving(1000, 100.0, 20.0)
    window = of.window(rows, None)
    assert window is not None
    for outcome, expected in (("refused", False), ("malformed", False), ("timeout", True)):
        for x in rows[::10]:
            x.outcome, x.end = outcome, None
        assert of.saturated(of.waiting(rows), window) is expected, outcome


def test_goodput_counts_what_failed_as_missed() -> None:
    good = seen(chunks=(10, 20), e=21, tokens=2)
    late = seen(chunks=(100, 110), e=111, tokens=2)
    failed = Seen(2, 0, outcome="http 429")
    assert [of.meets(x, (50, 10)) for x in (good, late, failed)] == [True, False, False]
    assert not of.meets(good, (50, 9))
    assert of.within([good] * 99 + [failed], (50, 10))
    assert not of.within([good] * 98 + [failed, late], (50, 10))
    assert of.outcomes([good, failed, failed]) == {"http 429": 2, "ok": 1}


def test_tokens_of_the_window() -> None:
    window = of.Window(10 * MS, 20 * MS)
    sized = seen(chunks=(5, 15, 25), e=26, tokens=9, sizes=[1, 5, 3])
    even = seen(chunks=(5, 15, 25), e=26, tokens=6)
    assert of.tokens_within([sized], window) == 5
    assert of.tokens_within([even], window) == 2


@pytest.mark.parametrize("users", [0, 1])
@pytest.mark.parametrize("requests", [10, 600])
def test_ten_a_second_are_ten_a_second(users: int, requests: int) -> None:
    """What opens a window is not of it: with ten requests it would make a rate a tenth too high."""
    rows = [
        seen(i, s=100 * i, q=100 * i, chunks=(100 * i + 99,), e=100 * i + 99, tokens=1) for i in range(requests)
    ]
    window = of.window(rows, {x.number: 0 for x in rows} if users else None)
    assert window is not None
    wanted = Load("closed" if users else "constant", 0 if users else 10, users, requests, 1, 1, "fixed", 9)
    found = figures(Loaded(wanted, (), rows, window, 0, [], False), (100, 100))
    for name in ("served_per_s", "output_per_s", "goodput"):
        assert found[name] == (pytest.approx(10),), name


@pytest.mark.parametrize("requests", [7, 4001])
def test_failed_requests_keep_their_stamps(requests: int) -> None:
    rows = [seen(i, s=i, q=i, chunks=(i + 1, i + 2), e=i + 3, tokens=2) for i in range(requests)]
    failed = {
        1: Seen(1, 1 * MS, outcome="unsent"),
        3: Seen(3, 3 * MS, sent=4 * MS, end=9 * MS, outcome="http 429"),
    }
    rows = [failed.get(x.number, x) for x in rows]
    window = of.Window(0, 10**12)
    found = figures(
        Loaded(Load("constant", 1, 0, requests, 1, 1, "fixed", 9), (), rows, window, 0, [], False), None
    )
    every = -(-requests // 2000)
    kept = rows[::every]
    names = ("scheduled", "sent", "first", "last", "end", "chunks", "ok")
    assert {len(found[f"stamp_{x}"]) for x in names} == {len(kept)}
    assert found["stamp_scheduled"] == tuple(pytest.approx(float(x.number)) for x in kept)
    assert found["stamp_ok"] == tuple(float(x.number not in failed) for x in kept)
    if every == 1:
        assert (found["stamp_sent"][1], found["stamp_sent"][3], found["stamp_first"][3]) == (-1, 4, -1)
        assert (found["stamp_end"][1], found["stamp_end"][3]) == (-1, 9)
        assert found["stamp_chunks"][:4] == (2, 0, 2, 0)


def test_thinned_by_rule() -> None:
    assert of.thinned(list(range(10)), 4) == [0, 3, 6, 9]
    assert of.thinned([1.0], 4) == [1.0]


def event(text: str = "", total: int | None = None, finish: str | None = None) -> bytes:
    import msgspec

    choice = {"text": text, "finish_reason": finish}
    usage = None if total is None else {"completion_tokens": total, "prompt_tokens": 3}
    return msgspec.json.encode({"choices": [choice], "usage": usage})


def test_a_stream_is_read() -> None:
    x = Seen(0, 0, outcome="ok")
    read(x, [(1, event()), (5, event("a", 2)), (9, event("b", 3, "length")), (12, b"[DONE]")])
    assert (x.outcome, x.first, x.last, x.tokens, x.sizes, x.text) == ("ok", 5, 9, 3, [2, 1], "ab")
    cut = Seen(0, 0, outcome="ok")
    read(cut, [(5, event("a"))])
    assert cut.outcome == "cut"
    thinking = Seen(0, 0, outcome="ok")
    read(thinking, [(4, b'{"choices":[{"delta":{"reasoning_content":"hm"},"finish_reason":null}]}')])
    assert thinking.first == 4
    broken = Seen(0, 0, outcome="ok")
    read(broken, [(4, b'{"choices": 3}')])
    assert broken.outcome == "malformed"
    # Text without a count, text with one, then no event: chunks whose sizes are not all known have none.
    half = Seen(0, 0, outcome="ok")
    read(half, [(4, event("a")), (5, event("b", 2)), (6, b'{"choices": 3}')])
    assert (half.outcome, half.chunks, half.sizes) == ("malformed", [4, 5], [])
    assert of.tokens_within([half], of.Window(0, 9)) == 2
    told = Seen(0, 0, outcome="ok")
    read(told, [(4, b'{"error": {"message": "no"}}')])
    assert told.outcome == "error"
