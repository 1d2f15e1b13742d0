"""Any OpenAI-compatible server that runs on this machine already: its URL stands in KERNELMARK_SERVER_URL.

Its weights are its own, so its answers are not checked, and the row says so. It must take prompts of token ids and
`ignore_eos`, or answers of the wrong length count as failed.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "KERNELMARK_SERVER_URL"


class Server:
    """The server at a URL."""

    checked = False
    words = False
    path = "/v1/completions"

    def __init__(self, url: str) -> None:
        self.url = url
        self.extra: dict[str, Any] = {"ignore_eos": True}


def server(case: Any) -> Server:
    """The server that the environment names."""
    url = os.environ.get(VARIABLE)
    if not url:
        raise NotImplementedError(f"{VARIABLE} names no server: set it to http://127.0.0.1:PORT")
    return Server(url)


IMPLEMENTATIONS = {"serve": {"server_at_url": server}}
