"""DiT (Peebles and Xie, arXiv 2212.09748): its configuration, no module.

A denoiser of latent images whose heads have 72 dimensions. Its norms have no weights of their own, but scales and
shifts that its condition gives; no operator here is that: they are no part.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..model import Architecture
from .vit import Vit, blocks

CONFIGURATIONS: Mapping[str, Vit] = {
    # facebookresearch/DiT, its models
    "dit-xl": Vit(layers=28, width=1152, heads=16, hidden=4608, vocabulary=0),
}

MODEL = Architecture(
    name="dit",
    summary="denoiser of latent images with heads of 72 dimensions",
    configurations=CONFIGURATIONS,
    parts=blocks,
    storage="packed",
    lengths=(256, 1024),  # latents of images of 256 and 512 in patches of 2
    decodes=False,
)
