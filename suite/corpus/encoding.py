"""The corpus in GPT-2's tokens, beside the texts it is made of: 16 bits a token, where an encoder is there.

The encoder is the file of merges that `tiktoken` knows as `r50k_base` and loads from the network. Here it is read
from a file, whose hash is that library's own; `openai-whisper` ships the same bytes.
"""

from __future__ import annotations

import base64
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...registry.errors import InputError
from ...registry.progress import Tell, untold
from .build import ENDING, sha256
from .manifest import Manifest
from .text import END

ENCODER = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
"""SHA-256 of the file of merges."""
VARIABLE = "KERNELMARK_GPT2_ENCODER"
BETWEEN = 50256
"""The token after each text; those of merges come before."""
TOKENS = 50257
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""Where GPT-2 cuts a text before it merges (Radford et al., "Language models are unsupervised multitask learners",
2019).
"""
ENCODED = f".gpt2-{ENCODER[:12]}.u16"
"""Ends the name of a part in tokens, little-endian."""
TOGETHER = 1 << 24
"""Bytes that are encoded at a time, about."""
MAKE = "Make it with: kernelmark corpus encode"
NEEDS = (
    f"GPT-2's encoding needs the package tiktoken and its file of merges, r50k_base.tiktoken: name it with "
    f"--encoder or {VARIABLE}, or install openai-whisper, which ships it as gpt2.tiktoken"
)


def encoder_file(given: Path | None = None) -> Path:
    """Where the merges lie: as given, by the variable, or within `openai-whisper`. Raises `InputError`."""
    if given is not None or (named := os.environ.get(VARIABLE)):
        return given or Path(named or "")
    found = importlib.util.find_spec("whisper")
    for folder in (found and found.submodule_search_locations) or ():
        if (path := Path(folder) / "assets" / "gpt2.tiktoken").is_file():
            return path
    raise InputError(f"{NEEDS}.")


def encoder(given: Path | None = None) -> Any:
    """`tiktoken`'s encoding of a file of merges. Raises `InputError` where something is missing or another's."""
    path = encoder_file(given)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path.name} cannot be read: {error.strerror}. {NEEDS}.") from None
    if (found := sha256(data)) != ENCODER:
        raise InputError(f"{path.name} has sha256 {found}, GPT-2's merges {ENCODER}.")
    try:
        import tiktoken
    except ImportError:
        raise InputError(f"{NEEDS}.") from None
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, data.splitlines())}
    return tiktoken.Encoding(
        "gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": BETWEEN}
    )


def encode(manifest: Manifest, folder: Path, by: Any, tell: Tell = untold) -> dict[str, int]:
    """Writes the parts of a corpus that lies in a folder as tokens, and says how many each has."""
    import numpy as np

    found = {}
    for name in manifest.parts:
        data = (folder / (name + ENDING)).read_bytes()
        made = folder / (name + ENCODED)
        partial = made.with_suffix(f".{os.getpid()}")
        count, done = 0, 0
        try:
            with open(partial, "wb") as file:
                for texts in _some(data):
                    for tokens in by.encode_ordinary_batch(texts):
                        count += file.write(np.array([*tokens, BETWEEN], dtype="<u2").tobytes()) // 2
                    done += sum(map(len, texts))
                    tell(name, min(1.0, done / len(data)))
            os.replace(partial, made)
        finally:
            partial.unlink(missing_ok=True)
        found[name] = count
    return found


def _some(data: bytes) -> Iterator[list[str]]:
    """The texts of a part, some at a time."""
    at = 0
    while at < len(data):
        end = data.find(END, min(at + TOGETHER, len(data) - 1))
        end = len(data) if end < 0 else end
        yield [x.decode() for x in data[at:end].split(END) if x]
        at = end + 1
