"""OLMoE (Muennighoff et al., arXiv 2409.02060): 8 of 64 small experts, norms of queries and keys over the whole
width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .llama import Llama
from .mixtral import MODEL as MIXTRAL

CONFIGURATIONS: Mapping[str, Llama] = {
    # Not published: what tests and CPUs run.
    "olmoe-tiny": Llama(
        layers=2, width=64, heads=4, kv_heads=4, head=16, hidden=32, vocabulary=512, base=1e4, qk_norm="width",
        experts=8, active=2, renormalized=False,
    ),
    # NVIDIA-NeMo/Megatron-Bridge, its OLMoE
    "olmoe-1b-7b": Llama(
        layers=16, width=2048, heads=16, kv_heads=16, head=128, hidden=1024, vocabulary=50304, base=1e4,
        qk_norm="width", experts=64, active=8, renormalized=False,
    ),
}  # fmt: skip

MODEL = replace(
    MIXTRAL,
    name="olmoe",
    summary="decoder of Llama's shape with many small experts, their shares as the softmax gives them",
    configurations=CONFIGURATIONS,
)
