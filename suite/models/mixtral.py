"""Mixtral (Jiang et al., arXiv 2401.04088): a decoder of Llama's shape whose feed-forward is 2 of 8 experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..model import BOUNDS, Bound
from .llama import MODEL as LLAMA
from .llama import Llama

CONFIGURATIONS: Mapping[str, Llama] = {
    # Not published: what tests and CPUs run.
    "mixtral-tiny": Llama(
        layers=2, width=64, heads=4, kv_heads=2, head=16, hidden=96, vocabulary=512, base=1e4, experts=4, active=2
    ),
    # Lightning-AI/litgpt, its configurations; mlc-ai/mlc-llm, its presets
    "mixtral-8x7b": Llama(
        layers=32, width=4096, heads=32, kv_heads=8, head=128, hidden=14336, vocabulary=32000, base=1e6,
        experts=8, active=2,
    ),
}  # fmt: skip

ROUTED = {**BOUNDS, "bf16": Bound(loss=2e-2, gradient=3e-1, change=6e-1)}
"""Where two experts' shares are nearly equal, bf16 chooses another than fp32: a hundredth of the tokens or so,
which moves an expert's gradient by the root of twice that.
"""

MODEL = replace(
    LLAMA,
    name="mixtral",
    summary="decoder of Llama's shape with a feed-forward of experts, their shares renormalised",
    configurations=CONFIGURATIONS,
    bounds=ROUTED,
)
