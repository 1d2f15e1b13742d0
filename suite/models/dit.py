"""DiT (Peebles and Xie, arXiv 2212.09748): its configuration, no module.

A denoiser of latent images whose heads have 72 dimensions. Its norms have no weights of their own, but scales and
shifts that its condition gives; no operator here is that: they are no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class Dit:
    """The numbers of one model, which has no vocabulary."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int = 0

    @property
    def head(self) -> int:
        """A head's dimension."""
        return self.width // self.heads


CONFIGURATIONS: Mapping[str, Dit] = {
    # facebookresearch/DiT, its models
    "dit-xl": Dit(layers=28, width=1152, heads=16, hidden=4608),
}


def parts(c: Dit, B: int, S: int) -> tuple[Part, ...]:
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


MODEL = Architecture(
    name="dit",
    summary="denoiser of latent images with heads of 72 dimensions",
    configurations=CONFIGURATIONS,
    parts=parts,
    storage="packed",
    lengths=(256, 1024),  # latents of images of 256 and 512 in patches of 2
    decodes=False,
)
