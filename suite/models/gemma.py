"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786): configurations, no module.

A decoder with RMS norms before and after its blocks whose layers see a window or everything in turns, with scores
and logits capped (Gemma 2) or queries and keys normalized (Gemma 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part
from ..operator import Option


@dataclass(frozen=True, kw_only=True)
class Gemma:
    """The numbers of one model. Of each `turn` of layers the last sees everything, the others a window."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocabulary: int
    window: int
    turn: int
    cap: int = 0
    qk_norm: bool = False

    @property
    def whole(self) -> int:
        """Layers that see everything."""
        return self.layers // self.turn


CONFIGURATIONS: Mapping[str, Gemma] = {
    # google/gemma_pytorch, its configurations; mlc-ai/mlc-llm, its presets
    "gemma-2-9b": Gemma(
        layers=42, width=3584, heads=16, kv_heads=8, head=256, hidden=14336, vocabulary=256000, window=4096,
        turn=2,
        cap=50,
    ),
    "gemma-2-27b": Gemma(
        layers=46, width=4608, heads=32, kv_heads=16, head=128, hidden=36864, vocabulary=256000, window=4096,
        turn=2,
        cap=50,
    ),
    # google/gemma_pytorch; Lightning-AI/litgpt, its configurations; the text part
    "gemma-3-4b": Gemma(
        layers=34, width=2560, heads=8, kv_heads=4, head=256, hidden=10240, vocabulary=262144, window=1024,
        turn=6,
        qk_norm=True,
    ),
    "gemma-3-27b": Gemma(
        layers=62, width=5376, heads=32, kv_heads=16, head=128, hidden=21504, vocabulary=262144, window=1024,
        turn=6,
        qk_norm=True,
    ),
}  # fmt: skip


def parts(c: Gemma, B: int, S: int) -> tuple[Part, ...]:
    """Norms before a block are one with the residual addition before them, those after a block stand alone."""
    rows = {"B": B, "S": S, "D": c.width}
    shape = {"B": B, "H": c.heads, "Hkv": c.kv_heads, "S": S, "D": c.head}
    options: dict[str, Option] = {"mask": "causal", "cap": c.cap}
    found = [
        Part("norm", "rms_norm", rows, 2 * c.layers + 1),
        Part("add_norm", "add_rms_norm", rows, 2 * c.layers),
    ]
    if c.qk_norm:
        for name, heads in (("query_norm", c.heads), ("key_norm", c.kv_heads)):
            found.append(Part(name, "rms_norm", {"B": B, "S": S * heads, "D": c.head}, c.layers))
    return (
        *found,
        Part("rope", "rope", shape, c.layers, {"layout": "half"}),
        Part("attention", "attention", shape, c.whole, options),
        Part("attention_window", "attention_window", shape | {"W": c.window}, c.layers - c.whole, options),
        Part("gate", "geglu", {"M": B * S, "N": c.hidden}, c.layers),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


MODEL = Architecture(
    name="gemma",
    summary="decoder with windows in most layers and norms on both sides of its blocks",
    configurations=CONFIGURATIONS,
    parts=parts,
)
