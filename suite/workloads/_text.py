"""What is learned from: bytes of the corpus, or of a small source that needs nothing; one order for all arms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..measure.verify import Unavailable
from ._random import generator

if TYPE_CHECKING:
    import torch

DATA = ("corpus", "synthetic")
ENCODED = "corpus_gpt2"
"""The corpus in GPT-2's tokens."""
VALIDATED = {"corpus": 1 << 18, "synthetic": 1 << 11}
"""Bytes that the validation loss is taken over."""
VALIDATED_TOKENS = 1 << 16
"""Tokens that it is taken over."""
SYNTHETIC = {"train": 1 << 19, "validation": 1 << 14}
"""Bytes of the synthetic source."""
ALPHABET = 32
"""Bytes that occur in it."""
BITS = math.log(2)
"""Nats of a bit."""


@dataclass(frozen=True)
class Source:
    """Two texts as arrays of bytes, uint8 (n,), or of tokens of more bytes, uint16 (n,)."""

    train: Any
    validation: Any
    validated: int
    share: float = 1.0
    """Tokens a byte of the validation text."""


def source(data: str) -> Source:
    """The texts of an option `data`. Raises `Unavailable` where there is no corpus."""
    import numpy as np

    from ..corpus import place  # listing reads this file, and no corpus

    if data == "synthetic":
        return _made()
    try:
        if data == ENCODED:
            return _encoded(place.encoded(), place.opened().parts["validation"])
        found = place.opened()
    except place.NoCorpus as error:
        raise Unavailable(f"data: {error}") from None
    parts = {name: np.frombuffer(part, dtype=np.uint8) for name, part in found.parts.items()}
    return Source(parts["train"], parts["validation"], VALIDATED[data])


def _encoded(parts: Mapping[str, Any], validation: Any) -> Source:
    import numpy as np

    tokens = {name: np.frombuffer(part, dtype="<u2") for name, part in parts.items()}
    share = len(tokens["validation"]) / len(validation)
    return Source(tokens["train"], tokens["validation"], VALIDATED_TOKENS, share)


def synthetic() -> Source:
    """Bytes that depend on the last one and on the one eight before, by a fixed table: what attention finds, and
    what a count of pairs does not. Drawn by arithmetic that every machine does alike.
    """
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(22))
    likely = generator.integers(0, ALPHABET, (ALPHABET, ALPHABET))
    chains, size = 64, sum(SYNTHETIC.values())
    text = np.zeros((size // chains, chains), dtype=np.uint8)
    text[:8] = generator.integers(0, ALPHABET, (8, chains))
    odd = generator.integers(0, ALPHABET, text.shape)
    chance = generator.integers(0, 100, text.shape)
    for i in range(8, len(text)):
        text[i] = np.where(chance[i] < 85, likely[text[i - 1], text[i - 8]], odd[i])
    whole = (text.T.reshape(-1) + 64).astype(np.uint8)
    at = SYNTHETIC["train"]
    return Source(whole[:at], whole[at:], VALIDATED["synthetic"])


_made = cache(synthetic)


@dataclass(frozen=True)
class Order:
    """Which bytes are in which step's batch: windows of S + 1 at places drawn on the host from the seed."""

    text: Any
    seed: int
    A: int
    B: int
    S: int
    device: torch.device

    def draw(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) int64 (A, B, S) of a step, the targets the bytes one place on."""
        import torch

        chance = generator(self.seed, "cpu", step)
        starts = torch.randint(0, len(self.text) - self.S, (self.A * self.B,), generator=chance)
        found = windows(self.text, starts.tolist(), self.S, self.device).view(self.A, self.B, self.S + 1)
        return found[..., :-1].contiguous(), found[..., 1:].contiguous()


def windows(text: Any, starts: list[int], S: int, device: torch.device) -> torch.Tensor:
    """int64 (n, S + 1): the bytes from each start on."""
    import numpy as np
    import torch

    found = np.stack([text[x : x + S + 1] for x in starts]).astype(np.int64)
    return torch.from_numpy(found).to(device)


def validation(given: Source, B: int, S: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches (tokens, targets), (B, S) each, that lie evenly over the validation text: the same for everyone.

    Raises `Unavailable` for a text of fewer bytes than a batch has.
    """
    batches = min(given.validated, len(given.validation) - 1) // (B * S)
    if not batches:
        raise Unavailable(f"data: {len(given.validation)} bytes to validate on, fewer than a batch of {B} × {S}")
    count = batches * B
    step = (len(given.validation) - S - 1) // count
    for i in range(0, count, B):
        found = windows(given.validation, [x * step for x in range(i, i + B)], S, device)
        yield found[:, :-1].contiguous(), found[:, 1:].contiguous()
