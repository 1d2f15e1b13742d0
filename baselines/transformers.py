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


def attention(case: Any) -> Callable[..., Any]:
    """`sdpa_attention_forward`, what its models run by default: PyTorch's attention, the output by position."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module: Any = _layer(case)
    causal = case.options["mask"] == "causal"

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        return sdpa_attention_forward(module, q, k, v, None, is_causal=causal)[0].transpose(1, 2)

    return call


def attention_eager(case: Any) -> Callable[..., Any]:
    """Llama's `eager_attention_forward`, which holds all scores; its causal mask is made once for all."""
    import torch
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module: Any = _layer(case)
    S, D = case.axes["S"], case.axes["D"]
    hidden: Any = None

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        nonlocal hidden
        if hidden is None and mask == "causal":
            lowest = torch.full((S, S), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
            hidden = lowest.triu_(1)[None, None]
        return eager_attention_forward(module, q, k, v, hidden, D**-0.5)[0].transpose(1, 2)

    return call


def _layer(case: Any) -> SimpleNamespace:
    """What its functions ask of the layer that they are called for."""
    return SimpleNamespace(num_key_value_groups=case.axes["H"] // case.axes["Hkv"], training=False)


IMPLEMENTATIONS = {
    "attention": {"transformers": attention, "transformers_eager": attention_eager},
    "gelu": {"transformers": gelu, "transformers_gelu_new": gelu_new},
    "rms_norm": {"transformers": rms_norm},
    "rope": {"transformers": rope},
}
