"""Models of Transformer Engine's own layers, with the weights of ours: `TransformerLayer`, its norms and its loss,
in bf16 or within its autocast to 8 bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

FIRST_SCALE = 2.0**16
"""Of gradients in E5M2 before one was seen, by delayed scaling. Its own is 1, at which those of a mean over
thousands of tokens are nothing. It ends with the first step.
"""


class Layers:
    """A decoder of its layers: a `Program` of `train`. Embeddings and the output projection are PyTorch's."""

    def __init__(self, recipe: str | None) -> None:
        """In 8 bits by a recipe of its `common.recipe`, or as the weights are."""
        self._recipe = recipe
        self.products = None if recipe is None else "e4m3"
        """Of its layers, where they are not in the weights' dtype."""

    def build(self, chosen: Any, S: int, weights: Iterable[tuple[str, Any]]) -> None:
        """The model with these weights. Raises NotImplementedError for what its layer does not compute."""
        import torch
        from torch.nn import ModuleList, Parameter
        from transformer_engine import pytorch as te

        _builds(chosen)
        c, self._family = chosen.configuration, chosen.model.name
        drawn = iter(weights)
        first = next(drawn)
        given = {"dtype": first[1].dtype, "device": first[1].device}
        self._layers = ModuleList(_layer(chosen, i, **given) for i in range(c.layers))
        norm = te.LayerNorm if self._family == "gpt2" else te.RMSNorm
        self._norm = norm(c.width, eps=c.eps, **given)
        self._embedding = Parameter(torch.empty(c.vocabulary, c.width, **given))
        self._positions = self._head = None
        self._turns: dict[str, Any] = {}
        if self._family == "gpt2":
            self._positions = Parameter(torch.empty(c.positions, c.width, **given))
        else:
            self._turns = {"rotary_pos_emb": _turns(c, S, first[1].device)}
            self._head = None if c.tied else Parameter(torch.empty(c.vocabulary, c.width, **given))
        own = self.parameters()
        with torch.no_grad():
            for name, values in itertools.chain([first], drawn):
                p, ordered = own[name]
                ours = ordered(p.detach())
                ours.copy_(values.view(ours.shape))
        self._fresh = True

    def parameters(self) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
        """By our names, each with what makes of it a view in our order. Gate and up are halves of one."""
        found: dict[str, tuple[Any, Callable[[Any], Any]]] = {"embedding": (self._embedding, _whole)}
        if self._positions is not None:
            found["positions"] = self._positions, _whole
        layers: Iterable[Any] = self._layers
        for i, layer in enumerate(layers):
            attention, feed = layer.self_attention, layer.layernorm_mlp
            own: dict[str, tuple[Any, Callable[[Any], Any]]]
            if self._family == "gpt2":
                own = {
                    "attention_norm_bias": (attention.layernorm_qkv.layer_norm_bias, _whole),
                    "projection": (attention.layernorm_qkv.weight, _whole),
                    "projection_bias": (attention.layernorm_qkv.bias, _whole),
                    "output_bias": (attention.proj.bias, _whole),
                    "feed_norm_bias": (feed.layer_norm_bias, _whole),
                    "up": (feed.fc1_weight, _whole),
                    "up_bias": (feed.fc1_bias, _whole),
                    "down_bias": (feed.fc2_bias, _whole),
                }
            else:
                own = {
                    "query": (attention.layernorm_qkv.query_weight, _whole),
                    "key": (attention.layernorm_qkv.key_weight, _whole),
                    "value": (attention.layernorm_qkv.value_weight, _whole),
                    "gate": (feed.fc1_weight, partial(_half, upper=False)),
                    "up": (feed.fc1_weight, partial(_half, upper=True)),
                }
            own |= {
                "attention_norm": (attention.layernorm_qkv.layer_norm_weight, _whole),
                "output": (attention.proj.weight, _whole),
                "feed_norm": (feed.layer_norm_weight, _whole),
                "down": (feed.fc2_weight, _whole),
            }
            found |= {f"layers.{i}.{name}": x for name, x in own.items()}
        found["norm"] = self._norm.weight, _whole
        if self._family == "gpt2":
            found["norm_bias"] = self._norm.bias, _whole
        if self._head is not None:
            found["head"] = self._head, _whole
        return found

    def loss(self, tokens: Any, targets: Any) -> Any:
        """The mean."""
        from torch.nn import functional
        from transformer_engine.pytorch import parallel_cross_entropy

        h = functional.embedding(tokens, self._embedding)
        if self._positions is not None:
            h = h + self._positions[: tokens.shape[1]]
        with self._precision():
            for layer in self._layers:
                h = layer(h, **self._turns)
        if self._fresh:
            self._fresh = False
            seed_gradients(self._layers.modules())
        logits = functional.linear(self._norm(h), self._embedding if self._head is None else self._head)
        return parallel_cross_entropy(logits, targets, 0.0, True)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._recipe is None:
            return nullcontext()
        from transformer_engine import pytorch as te
        from transformer_engine.common import recipe

        within: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=getattr(recipe, self._recipe)())
        return within


def seed_gradients(modules: Iterable[Any]) -> None:
    """Gives modules by delayed scaling a scale of gradients, between their first forward and backward passes."""
    for module in modules:
        state = (getattr(module, "fp8_meta", None) or {}).get("scaling_bwd")
        if (scale := getattr(state, "scale", None)) is not None and hasattr(state, "amax_history"):
            scale.fill_(FIRST_SCALE)


def _builds(chosen: Any) -> None:
    """Raises NotImplementedError for a model that is not of these layers."""
    c, family = chosen.configuration, chosen.model.name
    if family not in ("gpt2", "llama"):
        raise NotImplementedError(f"this baseline trains gpt2 and llama, not {family}")
    if family == "llama" and (
        c.experts or c.qk_norm != "none" or c.norms != "before" or c.multipliers is not None
    ):
        raise NotImplementedError(f"Transformer Engine's layer, as called here, is not of {chosen.name}'s shape")


def _layer(chosen: Any, index: int, dtype: Any, device: Any) -> Any:
    """One of its layers. Of GPT-2 queries, keys and values are one matrix, one after the other, as ours are."""
    from transformer_engine import pytorch as te

    c = chosen.configuration
    shared = {
        "layernorm_epsilon": c.eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layer_number": index + 1,
        "kv_channels": c.head,
        "self_attn_mask_type": "causal",
        "attn_input_format": "bshd",
        "params_dtype": dtype,
        "device": device,
    }
    if chosen.model.name == "gpt2":
        own = {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "bias": True, "activation": "gelu"}
        return te.TransformerLayer(c.width, 4 * c.width, c.heads, normalization="LayerNorm", **own, **shared)
    own = {"num_gqa_groups": c.kv_heads, "bias": False, "activation": "swiglu", "normalization": "RMSNorm"}
    return te.TransformerLayer(c.width, c.hidden, c.heads, **own, **shared)


def _whole(x: Any) -> Any:
    return x


def _half(x: Any, upper: bool) -> Any:
    """One of two matrices that are rows of one."""
    return x.unflatten(0, (2, -1))[int(upper)]


def _turns(c: Any, S: int, device: Any) -> Any:
    """Angles (S, 1, 1, D), fp32, both halves of a head alike; stretched as Llama 3.1 does, where the model is."""
    import torch

    each = []
    for i in range(c.head // 2):
        x = c.base ** (-2 * i / c.head)
        if c.stretch != 1:
            # Waves longer than 8192 positions by all of it, shorter than a quarter of that not at all.
            mix = min(1.0, max(0.0, (8192 * x / (2 * math.pi) - 1) / 3))
            x = mix * x + (1 - mix) * x / c.stretch
        each.append(x)
    angles = torch.arange(S, device=device, dtype=torch.float32)[:, None] * torch.tensor(each, device=device)
    return torch.cat((angles, angles), -1)[:, None, None]
