"""DeepSeek-V3 (arXiv 2412.19437): its configuration, no module.

A decoder of experts whose queries, keys and values come from latent vectors: keys have 128 dimensions of their own
and 64 rotary ones that all heads share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model import Architecture, Part


@dataclass(frozen=True, kw_only=True)
class DeepSeek:
    """The numbers of one model."""

    layers: int
    dense: int
    """Layers at the start whose feed-forward is one for all tokens."""
    width: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rotary: int
    value: int
    hidden: int
    expert_hidden: int
    experts: int
    active: int
    shared: int
    vocabulary: int


CONFIGURATIONS: Mapping[str, DeepSeek] = {
    # deepseek-ai/DeepSeek-V3, its inference configuration
    "deepseek-v3": DeepSeek(
        layers=61, dense=3, width=7168, heads=128, q_rank=1536, kv_rank=512, nope=128, rotary=64, value=128,
        hidden=18432, expert_hidden=2048, experts=256, active=8, shared=1, vocabulary=129280,
    ),
}  # fmt: skip


def parts(c: DeepSeek, B: int, S: int) -> tuple[Part, ...]:
    """Norms before a block are one with the residual addition before them, but for the first; those of the latent
    vectors stand alone. Experts work on the tokens that chose them, all together.
    """
    routed = c.layers - c.dense
    return (
        Part("norm", "rms_norm", {"B": B, "S": S, "D": c.width}, 1),
        Part("add_norm", "add_rms_norm", {"B": B, "S": S, "D": c.width}, 2 * c.layers),
        Part("query_norm", "rms_norm", {"B": B, "S": S, "D": c.q_rank}, c.layers),
        Part("latent_norm", "rms_norm", {"B": B, "S": S, "D": c.kv_rank}, c.layers),
        Part(
            "rope",
            "rope",
            {"B": B, "H": c.heads, "Hkv": 1, "S": S, "D": c.rotary},
            c.layers,
            {"layout": "interleaved"},
        ),
        Part(
            "attention",
            "attention_mla",
            {"B": B, "H": c.heads, "S": S, "D": c.nope + c.rotary, "Dv": c.value},
            c.layers,
            {"mask": "causal"},
        ),
        Part("gate", "swiglu", {"M": B * S, "N": c.hidden}, c.dense),
        Part("expert_gate", "swiglu", {"M": B * S * c.active, "N": c.expert_hidden}, routed),
        Part("shared_gate", "swiglu", {"M": B * S, "N": c.shared * c.expert_hidden}, routed),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


MODEL = Architecture(
    name="deepseek",
    summary="decoder of experts with latent attention",
    configurations=CONFIGURATIONS,
    parts=parts,
)
