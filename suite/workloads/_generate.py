"""Programs that generate tokens: what `generate` measures, and how one is made of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..model import Chosen
from ..system import Assembly
from . import _inference as inference
from ._serving.engine import Engine

if TYPE_CHECKING:
    import torch


class Generates(Protocol):
    """What a system's factory gives. Decoding is greedy: the largest logit, the first of equal ones."""

    def load(self, chosen: Chosen, B: int, S: int, N: int, dtype: str, weights: inference.Weights) -> None:
        """Builds the model for B prompts of S tokens and N more, on the device that the weights are on."""
        ...

    def generate(self, prompt: torch.Tensor, N: int, stamp: Callable[[], None]) -> torch.Tensor:
        """N tokens (B, N) after prompts (B, S); `stamp` is called when each of the N is there."""
        ...

    def forced(self, prompt: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Logits (B, n + 1, V) after prompts (B, S) and each of n tokens (B, n) that are given: the same steps."""
        ...

    @property
    def cache_bytes(self) -> int | None:
        """Bytes that the cache of all sequences takes; None where the program does not say."""
        ...


class PartsGenerates:
    """Our engine on a system's parts."""

    def __init__(self, assembly: Assembly, page: int, products: str = "dtype") -> None:
        self.assembly, self.page = assembly, page
        inference.allowed(assembly, products)
        self.products = "dtype" if assembly.system.precision == "case" else products

    def load(self, chosen: Chosen, B: int, S: int, N: int, dtype: str, weights: inference.Weights) -> None:
        self.engine = Engine(self.assembly, chosen, dtype, weights, B, S + N, self.page)
        self.rows = []
        for number in range(B):
            if not self.engine.admits(S + N):
                raise MemoryError(f"the cache of {number} of {B} sequences of {S + N} tokens is all that fits")
            self.rows.append(self.engine.hold(S + N))

    def generate(self, prompt: torch.Tensor, N: int, stamp: Callable[[], None]) -> torch.Tensor:
        import torch

        token = self.engine.prefill(prompt, self.rows).token
        found = [token]
        stamp()
        for _ in range(N - 1):
            # A graph's token lies where the next step writes its own, and so do its logits.
            token = self.engine.decode(token, self.rows).token.clone()
            found.append(token)
            stamp()
        return torch.stack(found, 1)

    def forced(self, prompt: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        import torch

        found = [self.engine.prefill(prompt, self.rows).logits]
        found += [self.engine.decode(x, self.rows).logits.clone() for x in following.unbind(1)]
        return torch.stack(found, 1)

    def steps(self, prompt: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A decode step after prompts (B, S) are read: each call has the tokens (B,) of the one before. Where no
        more fit, the last place is written again.
        """
        token = self.engine.prefill(prompt, self.rows).token

        def step() -> torch.Tensor:
            nonlocal token
            token = self.engine.decode(token, self.rows).token.clone()
            return token

        return step

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as the engine holds them."""
        return self.engine.weight_bytes

    @property
    def cache_bytes(self) -> int:
        return self.engine.cache_bytes
