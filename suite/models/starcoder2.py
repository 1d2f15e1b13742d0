"""StarCoder2 (Lozhkov et al., arXiv 2402.19173): configurations, no module.

A decoder with layer norms, rotary positions, few key and value heads, a window and an activation without a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class StarCoder2:
    """The numbers of one model; the window is the model cards'."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int = 49152
    head: int = 128
    window: int = 4096
    positions: int = 16384


CONFIGURATIONS: Mapping[str, StarCoder2] = {
    # NVIDIA-NeMo/NeMo, its starcoder2; mlc-ai/mlc-llm, its presets
    "starcoder2-3b": StarCoder2(layers=30, width=3072, heads=24, kv_heads=2),
    "starcoder2-7b": StarCoder2(layers=32, width=4608, heads=36, kv_heads=4),
    "starcoder2-15b": StarCoder2(layers=40, width=6144, heads=48, kv_heads=4),
}


def parts(c: StarCoder2, B: int, S: int) -> tuple[Part, ...]:
    """A window as long as the sequence hides nothing: it is no window there."""
    shape = {"B": B, "H": c.heads, "Hkv": c.kv_heads, "S": S, "D": c.head}
    windowed = c.window < S
    return (
        Part("norm", "layer_norm", {"B": B, "S": S, "D": c.width}, 2 * c.layers + 1),
        Part("rope", "rope", shape, c.layers, {"layout": "half"}),
        Part(
            "attention",
            "attention_window" if windowed else "attention",
            shape | ({"W": c.window} if windowed else {}),
            c.layers,
            {"mask": "causal"},
        ),
        Part("activation", "gelu", {"M": B * S, "N": 4 * c.width}, c.layers, {"approximate": "tanh"}),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


MODEL = Architecture(
    name="starcoder2",
    summary="decoder with layer norms, a window and few key heads",
    configurations=CONFIGURATIONS,
    parts=parts,
    longest=lambda c: c.positions,
)
