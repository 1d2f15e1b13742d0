"""ViT (Dosovitskiy et al., arXiv 2010.11929): its configuration, no module. An encoder of patches of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class Vit:
    """The numbers of one model; `vocabulary` counts classes, 0 for none."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int = 1000

    @property
    def head(self) -> int:
        """A head's dimension."""
        return self.width // self.heads


CONFIGURATIONS: Mapping[str, Vit] = {
    # google-research/big_vision, its ViT; mlfoundations/open_clip, its table of models
    "vit-l": Vit(layers=24, width=1024, heads=16, hidden=4096),
}


def blocks(c: Vit, B: int, S: int) -> tuple[Part, ...]:
    """Attention that sees everything and an activation a layer."""
    return (
        Part(
            "attention",
            "attention",
            {"B": B, "H": c.heads, "Hkv": c.heads, "S": S, "D": c.head},
            c.layers,
            {"mask": "full"},
        ),
        Part("activation", "gelu", {"M": B * S, "N": c.hidden}, c.layers, {"approximate": "tanh"}),
    )


def parts(c: Vit, B: int, S: int) -> tuple[Part, ...]:
    """`blocks`, two norms a layer and one after all; one class an image."""
    return (
        Part("norm", "layer_norm", {"B": B, "S": S, "D": c.width}, 2 * c.layers + 1),
        *blocks(c, B, S),
        Part("loss", "cross_entropy", {"M": B, "V": c.vocabulary}, 1),
    )


MODEL = Architecture(
    name="vit",
    summary="encoder of images with layer norms before its blocks",
    configurations=CONFIGURATIONS,
    parts=parts,
    storage="packed",
    lengths=(197, 577),  # patches of 16 of images of 224 and 384, and the class token
    decodes=False,
)
