"""MagiAttention: context parallel attention over masks in slices. It cannot be locked."""

from __future__ import annotations

from typing import Any

REQUIRES = ("magi-attention",)
ENVIRONMENT = "magi_attention"
DEVICES = ("cuda",)
NO_ENVIRONMENT = (
    "MagiAttention has no release on PyPI: it is compiled from its repository with CUDA's compiler, which no lock "
    "of ours names. The nearest rows are context_parallel_allgather and ulysses"
)


def attention_context_parallel(case: Any) -> Any:
    """Never called: there is no environment."""
    raise NotImplementedError(NO_ENVIRONMENT)


IMPLEMENTATIONS = {"attention_context_parallel": {"magi_attention": attention_context_parallel}}
