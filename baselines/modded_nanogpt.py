"""modded-nanogpt's step of the 124M model, as a whole program. It cannot be held to GPT-2."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = "modded_nanogpt"
DEVICES = ("cuda",)
NO_ENVIRONMENT = (
    "modded-nanogpt's model is no GPT-2 any more (rotary positions, other norms, activations, skips and "
    "optimizers), and has no gradients to hold to one; it is one script of a speed record, on no package index. "
    "The nearest row is nanogpt"
)


def train(case: Any) -> Any:
    """Never called: there is no environment."""
    raise NotImplementedError(NO_ENVIRONMENT)


IMPLEMENTATIONS = {"train": {"modded_nanogpt": train}}
