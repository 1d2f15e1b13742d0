"""A server of this machine that plays OpenAI, Anthropic and Bedrock, to hold the measuring of endpoints to.

It stamps each chunk that it writes with the clock that the client stamps with, and plants what endpoints do:
delays,
stalls, merged chunks, cut streams, missing usage, 401, 429 and 500. A request is known by its number, `#17` in
its prompt.
"""

from __future__ import annotations

import json
import re
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

MODEL = "fake-1"
_NUMBER = re.compile(rb"#(\d{1,9})")


@dataclass
class Fake:
    """The server. `faults` by a request's number: `401`, `429`, `500`, `cut`, `stall`, `merged`, `no usage`."""

    first_ms: float = 5.0
    token_ms: float = 1.0
    stall_ms: float = 60.0
    tokens: int = 6
    faults: Mapping[int, str] = field(default_factory=dict)
    written: dict[int, list[int]] = field(default_factory=dict)
    """By request, when each chunk with text was written, ns of the monotonic clock."""
    asked: int = 0

    def __enter__(self) -> Fake:
        fake = self

        class Handler(_Handler):
            owner = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    owner: Fake
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else small chunks wait 40 ms for the other side's acknowledgement

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""

    def do_POST(self) -> None:
        fake = self.owner
        fake.asked += 1
        body = self.rfile.read(int(self.headers["content-length"]))
        found = _NUMBER.search(body)
        number = int(found[1]) if found else -1
        fault = fake.faults.get(number, "")
        if fault in ("401", "429", "500"):
            # As providers do: some tell the key that was wrong.
            said = f"planted; your key is {self.headers.get('authorization') or self.headers.get('x-api-key')}"
            self._error(int(fault), said)
            return
        bedrock = "converse-stream" in self.path
        kind = "application/vnd.amazon.eventstream" if bedrock else "text/event-stream"
        self.send_response(200)
        for name, value in (
            ("content-type", kind),
            ("transfer-encoding", "chunked"),
            ("openai-processing-ms", "7"),
            ("x-ratelimit-remaining-requests", "41"),
            ("x-ratelimit-remaining-tokens", "4100"),
            ("anthropic-ratelimit-requests-remaining", "41"),
            ("anthropic-ratelimit-tokens-remaining", "4100"),
        ):
            self.send_header(name, value)
        self.end_headers()
        script = _bedrock if bedrock else _SCRIPTS[self.path]
        events = script(list(self._pieces(fault)), fake.tokens, fault != "no usage", len(body) // 4)
        fake.written[number] = []
        for count, (text, data) in enumerate(events):
            if text:
                self._wait(fault, len(fake.written[number]))
                fake.written[number].append(time.monotonic_ns())
            if fault == "cut" and count > 3:
                self.close_connection = True
                return
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _wait(self, fault: str, chunk: int) -> None:
        fake = self.owner
        wait = fake.token_ms if chunk else fake.first_ms
        if fault == "stall" and chunk == 2:
            wait += fake.stall_ms
        time.sleep(wait / 1e3)

    def _pieces(self, fault: str) -> Iterator[str]:
        """The texts of chunks: a token each, or all but the first in one."""
        words = [f"word{i} " for i in range(self.owner.tokens)]
        yield words[0]
        yield from ["".join(words[1:])] if fault == "merged" else words[1:]

    def _error(self, status: int, message: str) -> None:
        raw = json.dumps({"error": {"message": message, "type": "planted"}, "message": message}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.send_header("retry-after", "30")
        self.end_headers()
        self.wfile.write(raw)


Events = Iterator[tuple[bool, bytes]]


def _sse(body: dict[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body)}\n\n".encode()


def _chat(pieces: list[str], tokens: int, usage: bool, prompt: int) -> Events:
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": MODEL}

    def choice(finish: str | None = None, **delta: str) -> dict[str, Any]:
        return {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield False, _sse(choice(role="assistant", content=""))
    for text in pieces:
        yield True, _sse(choice(content=text))
    yield False, _sse(choice("stop"))
    if usage:
        own = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        yield False, _sse({**frame, "choices": [], "usage": own})
    yield False, b"data: [DONE]\n\n"


def _responses(pieces: list[str], tokens: int, usage: bool, prompt: int) -> Events:
    frame: dict[str, Any] = {
        "id": "r", "object": "response", "created_at": 0, "model": MODEL, "output": [], "parallel_tool_calls":
        False, "tool_choice": "auto", "tools": [], "status": "in_progress",
    }  # fmt: skip
    yield False, _sse({"type": "response.created", "sequence_number": 0, "response": frame}, "response.created")
    for i, text in enumerate(pieces):
        body = {
            "type": "response.output_text.delta", "sequence_number": i + 1, "item_id": "i", "output_index": 0,
            "content_index": 0, "delta": text, "logprobs": [],
        }  # fmt: skip
        yield True, _sse(body, "response.output_text.delta")
    own = {
        "input_tokens": prompt, "output_tokens": tokens, "total_tokens": prompt + tokens,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    done = {**frame, "status": "completed", "usage": own if usage else None}
    yield (
        False,
        _sse({"type": "response.completed", "sequence_number": 99, "response": done}, "response.completed"),
    )


def _messages(pieces: list[str], tokens: int, usage: bool, prompt: int) -> Events:
    own = {"input_tokens": prompt, "output_tokens": 1}
    message: dict[str, Any] = {
        "id": "m", "type": "message", "role": "assistant", "model": MODEL, "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": own,
    }  # fmt: skip
    yield False, _sse({"type": "message_start", "message": message}, "message_start")
    block = {"type": "text", "text": ""}
    yield False, _sse({"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start")
    for text in pieces:
        delta = {"type": "text_delta", "text": text}
        yield True, _sse({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
    yield False, _sse({"type": "content_block_stop", "index": 0}, "content_block_stop")
    end: dict[str, Any] = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}}
    end["usage"] = {"output_tokens": tokens} if usage else None
    yield False, _sse(end, "message_delta")
    yield False, _sse({"type": "message_stop"}, "message_stop")


_SCRIPTS = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _messages}


def _bedrock(pieces: list[str], tokens: int, usage: bool, prompt: int) -> Events:
    yield False, _frame("messageStart", {"role": "assistant"})
    for text in pieces:
        yield True, _frame("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": text}})
    yield False, _frame("contentBlockStop", {"contentBlockIndex": 0})
    yield False, _frame("messageStop", {"stopReason": "end_turn"})
    if usage:
        own = {"inputTokens": prompt, "outputTokens": tokens, "totalTokens": prompt + tokens}
        yield False, _frame("metadata", {"usage": own, "metrics": {"latencyMs": 7}})


def _frame(kind: str, body: dict[str, Any]) -> bytes:
    """A message of AWS's event stream: lengths, headers and payload with a CRC each."""
    headers = b""
    for name, value in ((":event-type", kind), (":content-type", "application/json"), (":message-type", "event")):
        headers += bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
    payload = json.dumps(body).encode()
    prelude = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
    prelude += struct.pack(">I", zlib.crc32(prelude))
    whole = prelude + headers + payload
    return whole + struct.pack(">I", zlib.crc32(whole))
