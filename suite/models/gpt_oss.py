"""gpt-oss (OpenAI, 2025): configurations, no module.

A decoder of experts whose layers see a window or everything in turns, with a sink a head. Its experts have biases,
which operator `moe` (`activation=clamped`) has not: they are no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part
from ..operator import Option


@dataclass(frozen=True, kw_only=True)
class GptOss:
    """The numbers of one model, whose other numbers both share."""

    layers: int
    experts: int
    width: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head: int = 64
    hidden: int = 2880
    active: int = 4
    vocabulary: int = 201088
    window: int = 128


CONFIGURATIONS: Mapping[str, GptOss] = {
    # openai/gpt-oss, its model and README
    "gpt-oss-20b": GptOss(layers=24, experts=32),
    "gpt-oss-120b": GptOss(layers=36, experts=128),
}


def parts(c: GptOss, B: int, S: int) -> tuple[Part, ...]:
    """Norms are one with the residual addition before them, but for the first."""
    rows = {"B": B, "S": S, "D": c.width}
    shape = {"B": B, "H": c.heads, "Hkv": c.kv_heads, "S": S, "D": c.head}
    options: dict[str, Option] = {"mask": "causal", "sinks": True}
    return (
        Part("norm", "rms_norm", rows, 1),
        Part("add_norm", "add_rms_norm", rows, 2 * c.layers),
        Part("rope", "rope", shape, c.layers, {"layout": "half"}),
        Part("attention", "attention", shape, c.layers // 2, options),
        Part("attention_window", "attention_window", shape | {"W": c.window}, c.layers // 2, options),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


MODEL = Architecture(
    name="gpt_oss",
    summary="decoder of experts with sinks and windows in every second layer",
    configurations=CONFIGURATIONS,
    parts=parts,
)
