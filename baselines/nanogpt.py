"""nanoGPT's and modded-nanogpt's steps of the 124M model, as whole programs. They cannot be had as packages."""

from __future__ import annotations

from typing import Any

REQUIRES = ("nanogpt",)
ENVIRONMENT = "nanogpt"
DEVICES = ("cuda",)
NO_ENVIRONMENT = (
    "nanoGPT and modded-nanogpt are folders of scripts without a release of their own on PyPI, which no lock can "
    "name; modded-nanogpt's model is no GPT-2 any more, and has no gradients to hold to one. The nearest row is "
    "torch_compile: GPT-2 by torch.compile with fused AdamW"
)


def train(case: Any) -> Any:
    """Never called: there is no environment."""
    raise NotImplementedError(NO_ENVIRONMENT)


IMPLEMENTATIONS = {"train": {"nanogpt": train, "modded_nanogpt": train}}
