"""Responses in any pieces, and what is none."""

from __future__ import annotations

import pytest
from kernelmark.suite.workloads._serving.http import Malformed, Response, head_of, length_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (b'data: {"a": 1}\n\n', b": a comment\r\ndata: two\r\n\r\n", b"data: [DONE]\n\n")
STREAM = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(x), x) for x in EVENTS) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, len(STREAM)])
def test_a_stream_in_any_pieces(size: int) -> None:
    response, found = Response(), []
    for i in range(0, len(STREAM), size):
        found += response.feed(STREAM[i : i + size])
    assert found == [b'{"a": 1}', b"two", b"[DONE]"]
    assert response.done
    response.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_events_whose_line_ends_are_cut(size: int) -> None:
    response, found = Response(), []
    stream = b"data: one\r\n\r\ndata: two\r\ndata: lines\r\n\r\ndata: three\n\n"
    response.feed(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    for i in range(0, len(stream), size):
        found += response.feed(stream[i : i + size])
    assert found == [b"one", b"two\nlines", b"three"]


def test_a_body_with_a_length_and_one_to_the_end() -> None:
    whole = Response()
    assert whole.feed(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy") == []
    assert (whole.status, bytes(whole.body), whole.done) == (429, b"busy", True)
    open_end = Response()
    open_end.feed(b"HTTP/1.1 200 OK\r\n\r\nsome")
    assert not open_end.done
    open_end.close()
    assert open_end.done


def test_events_within_a_chunk_are_there_when_they_came() -> None:
    """Where chunks begin and end says nothing of events: a proxy may put many into one."""
    response = Response()
    assert response.feed(HEAD + b"12\r\ndata: 1\n\n") == [b"1"]
    assert response.feed(b"data: 2\n") == []
    assert response.feed(b"\n") == [b"2"]
    assert response.feed(b"\r") == []
    assert response.feed(b"\n0\r\n\r\n") == []
    assert response.done


def test_lines_end_with_a_return_too() -> None:
    response = Response()
    response.feed(b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream\r\n\r\n")
    assert response.feed(b"data: one\r\r") == [b"one"]
    assert response.feed(b"data: two\r") == []
    assert response.feed(b"\n\ndata: three\n\r\n") == [b"two", b"three"]


def test_interim_responses_and_those_without_a_body() -> None:
    response = Response()
    assert response.feed(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n") == []
    assert not response.done
    assert response.feed(STREAM) == [b'{"a": 1}', b"two", b"[DONE]"]
    assert (response.status, response.done) == (200, True)
    none = Response()
    none.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (none.status, none.done) == (204, True)


def test_a_stream_that_is_cut() -> None:
    response = Response()
    response.feed(STREAM[:-30])
    with pytest.raises(Malformed, match="ended before"):
        response.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 2\xb20 OK\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        HEAD + b"zz\r\n",
        HEAD + b"-5\r\n",
        HEAD + b"1\r\nabc",
        b"x" * 40_000,
    ],
)
def test_what_is_no_response(raw: bytes) -> None:
    with pytest.raises(Malformed):
        Response().feed(raw)


@pytest.mark.parametrize("length", ["-1", "1_0", "١", "9" * 13, "0x10", "200"])
def test_what_is_no_length(length: str) -> None:
    with pytest.raises(Malformed):
        length_of({"content-length": length}, 100)


@pytest.mark.parametrize(
    "raw", [b"GET / HTTP/1.1\r\nno colon", b"GET / HTTP/1.1\r\n: x", b"G\r\nhost: a\r\nHost: b", b"G\r\n x: y"]
)
def test_what_is_no_head(raw: bytes) -> None:
    with pytest.raises(Malformed):
        head_of(raw)
