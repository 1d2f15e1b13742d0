"""Whisper (Radford et al., arXiv 2212.04356): its configuration, no module.

An encoder of 1500 frames of sound, and a decoder of text that attends to them: queries and keys of different
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class Whisper:
    """The numbers of one model; `layers` are those of the encoder, and of the decoder."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    frames: int = 1500
    positions: int = 448

    @property
    def head(self) -> int:
        """A head's dimension."""
        return self.width // self.heads


CONFIGURATIONS: Mapping[str, Whisper] = {
    # openai/whisper, its model
    "whisper-large-v3": Whisper(layers=32, width=1280, heads=20, hidden=5120, vocabulary=51866),
}


def parts(c: Whisper, B: int, S: int) -> tuple[Part, ...]:
    """Of S tokens of text for each sound of 1500 frames."""
    shape = {"B": B, "H": c.heads, "Hkv": c.heads, "S": S, "D": c.head}
    sound = shape | {"S": c.frames}
    gelu = {"approximate": "none"}
    return (
        Part("encoder_norm", "layer_norm", {"B": B, "S": c.frames, "D": c.width}, 2 * c.layers + 1),
        Part("encoder_attention", "attention", sound, c.layers, {"mask": "full"}),
        Part("encoder_activation", "gelu", {"M": B * c.frames, "N": c.hidden}, c.layers, dict(gelu)),
        Part("norm", "layer_norm", {"B": B, "S": S, "D": c.width}, 3 * c.layers + 1),
        Part("attention", "attention", shape, c.layers, {"mask": "causal"}),
        Part("cross_attention", "attention", shape | {"Sk": c.frames}, c.layers, {"mask": "full"}),
        Part("activation", "gelu", {"M": B * S, "N": c.hidden}, c.layers, dict(gelu)),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


MODEL = Architecture(
    name="whisper",
    summary="encoder of sound and decoder of text that attends to it",
    configurations=CONFIGURATIONS,
    parts=parts,
    longest=lambda c: c.positions,
    lengths=(32, 224, 448),
)
