"""Hugging Face Transformers: what its Llama and GPT-2 models compute with, where it stands alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

REQUIRES = ("transformers",)


def rms_norm(case: Any) -> Callable[..., Any]:
    """`LlamaRMSNorm`, its code on our weight."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def call(x: Any, weight: Any, eps: float) -> Any:
        # The module holds nothing else; as a module it would take a parameter of its own.
        module: Any = SimpleNamespace(weight=weight, variance_epsilon=eps)
        return LlamaRMSNorm.forward(module, x)

    return call


def gelu_new(case: Any) -> Callable[..., Any]:
    """`NewGELUActivation`, GPT-2's: the tanh form written out in elementwise operations."""
    from transformers.activations import NewGELUActivation

    if case.options["approximate"] != "tanh":
        raise NotImplementedError("NewGELUActivation is the tanh form only")
    activation = NewGELUActivation()
    return lambda x, approximate: activation(x)


def gelu(case: Any) -> Callable[..., Any]:
    """`ACT2FN`'s `gelu_pytorch_tanh` or `gelu`, which newer models name in their configuration."""
    from transformers.activations import ACT2FN

    activation = ACT2FN["gelu_pytorch_tanh" if case.options["approximate"] == "tanh" else "gelu"]
    return lambda x, approximate: activation(x)


def rope(case: Any) -> Callable[..., Any]:
    """Llama's `apply_rotary_pos_emb`; cos and sin are doubled to its form inside the call."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    if case.options["layout"] != "half":
        raise NotImplementedError("apply_rotary_pos_emb has the half layout only")

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        cos, sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
        return apply_rotary_pos_emb(q, k, cos, sin)

    return call


IMPLEMENTATIONS = {
    "gelu": {"transformers": gelu, "transformers_gelu_new": gelu_new},
    "rms_norm": {"transformers": rms_norm},
    "rope": {"transformers": rope},
}
