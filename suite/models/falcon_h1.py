"""Falcon-H1 (Zuo et al., arXiv 2507.22448): its configuration, no module.

A decoder that has attention and a Mamba-2 scan side by side in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class FalconH1:
    """The numbers of one model; the scan has `scan_heads` heads of `scan_head` dimensions."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocabulary: int
    scan_heads: int
    scan_head: int
    state: int
    groups: int
    convolution: int


CONFIGURATIONS: Mapping[str, FalconH1] = {
    # Two copies of the published configuration by others, which agree where both speak;
    # NVIDIA-NeMo/Megatron-Bridge
    "falcon-h1-7b": FalconH1(
        layers=44, width=3072, heads=12, kv_heads=2, head=128, hidden=12288, vocabulary=130048, scan_heads=24,
        scan_head=128, state=256, groups=1, convolution=4,
    ),
}  # fmt: skip


def parts(c: FalconH1, B: int, S: int) -> tuple[Part, ...]:
    """Norms are one with the residual addition before them, but for the first."""
    rows = {"B": B, "S": S, "D": c.width}
    shape = {"B": B, "H": c.heads, "Hkv": c.kv_heads, "S": S, "D": c.head}
    convolved = c.scan_heads * c.scan_head + 2 * c.groups * c.state
    return (
        Part("norm", "rms_norm", rows, 1),
        Part("add_norm", "add_rms_norm", rows, 2 * c.layers),
        Part("rope", "rope", shape, c.layers, {"layout": "half"}),
        Part("attention", "attention", shape, c.layers, {"mask": "causal"}),
        Part(
            "convolution",
            "causal_conv1d",
            {"B": B, "D": convolved, "S": S, "W": c.convolution},
            c.layers,
            {"activation": "silu", "layout": "bsd"},
        ),
        Part(
            "scan",
            "ssd",
            {"B": B, "S": S, "H": c.scan_heads, "P": c.scan_head, "N": c.state, "G": c.groups},
            c.layers,
        ),
        Part("gate", "swiglu", {"M": B * S, "N": c.hidden}, c.layers),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


MODEL = Architecture(
    name="falcon_h1",
    summary="decoder with attention and a scan side by side",
    configurations=CONFIGURATIONS,
    parts=parts,
)
