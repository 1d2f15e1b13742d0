"""torchtitan's Llama 3 and its loss, blocks compiled as it compiles them, as a whole program for `train`.

Its trainer is a launcher of ranks with data loaders and checkpoints; what is taken here is what it does on one
GPU: its model in the dtype of the weights (its option `training.dtype`), its attention (FlexAttention over a mask
of documents, here one a sequence), its cross-entropy of logits in fp32, `torch.compile` of each block and of the
loss, clipping, and PyTorch's fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

REQUIRES = ("torchtitan",)
ENVIRONMENT = "torchtitan"
DEVICES = ("cuda",)
ATTENTION = "flex"
"""Its registry's default."""


class _Llama:
    """Its `Llama3Model` with separate projections of queries, keys and values: one matrix of all three would hold
    rows of ours in another order than a view can have.
    """

    def __init__(self, compiled: bool, attention: Callable[[], Any] | None = None) -> None:
        self._compiled = compiled
        self._attention = attention

    def build(self, chosen: Any, S: int, weights: Iterable[tuple[str, Any]]) -> None:
        """The model with these weights. Raises NotImplementedError for what is not of Llama's shape."""
        import torch
        from torchtitan.models.llama3.model import Llama3Model

        c = chosen.configuration
        if chosen.model.name != "llama":
            raise NotImplementedError(f"this baseline trains llama, not {chosen.model.name}")
        if c.experts or c.qk_norm != "none" or c.norms != "before" or c.multipliers is not None:
            raise NotImplementedError(f"torchtitan's Llama 3 has no configuration of {chosen.name}'s shape")
        drawn = list(weights)
        with torch.device("meta"):
            model = Llama3Model(_configuration(c, S, self._attention))
        model = model.to(drawn[0][1].dtype).to_empty(device=drawn[0][1].device)
        if c.tied:
            model.tok_embeddings.weight = model.lm_head.weight
        for layer in model.layers.values():
            layer.attention.rope._init_self_buffers(buffer_device=drawn[0][1].device)
        self._model, self._c = model, c
        with torch.no_grad():
            for name, values in drawn:
                p, ordered = self.parameters()[name]
                ours = ordered(p.detach())
                ours.copy_(values.view(ours.shape))
        self._loss: Callable[..., Any] = _cross_entropy
        if self._compiled:
            for layer in model.layers.values():
                layer.compile(fullgraph=True)
            self._loss = torch.compile(_cross_entropy)
        self._masks: Any = None

    def parameters(self) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
        """By our names, each with what makes of it a view in our order."""
        model = self._model
        found: dict[str, tuple[Any, Callable[[Any], Any]]] = {}
        # A tied table is one parameter by two names, of which the first counts.
        table = model.lm_head.weight if self._c.tied else model.tok_embeddings.weight
        found["embedding"] = table, _as_it_is
        for i, layer in enumerate(model.layers.values()):
            attention, feed = layer.attention, layer.feed_forward
            own: dict[str, tuple[Any, Callable[[Any], Any]]] = {
                "attention_norm": (layer.attention_norm, _as_it_is),
                "query": (attention.qkv_linear.wq, partial(_halves, heads=self._c.heads)),
                "key": (attention.qkv_linear.wk, partial(_halves, heads=self._c.kv_heads)),
                "value": (attention.qkv_linear.wv, _as_it_is),
                "output": (attention.wo, _as_it_is),
                "feed_norm": (layer.ffn_norm, _as_it_is),
                "gate": (feed.w1, _as_it_is),
                "up": (feed.w3, _as_it_is),
                "down": (feed.w2, _as_it_is),
            }
            found |= {f"layers.{i}.{name}": (part.weight, ordered) for name, (part, ordered) in own.items()}
        found["norm"] = model.norm.weight, _as_it_is
        if not self._c.tied:
            found["head"] = model.lm_head.weight, _as_it_is
        return found

    def loss(self, tokens: Any, targets: Any) -> Any:
        """The mean; each sequence is one document."""
        import torch

        positions = None
        if self._attention is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            if self._masks is None:  # of one document a sequence they are the same in each step
                self._masks = self._model.get_attention_masks(positions)
        return self._loss(self._model(tokens, positions, self._masks), targets) / targets.numel()


def _as_it_is(x: Any) -> Any:
    return x


def _halves(x: Any, heads: int) -> Any:
    """Rows of a head, which it rotates as neighbours, as two halves: (H·D, K) seen as (H, 2, D / 2, K)."""
    return x.view(heads, -1, 2, x.shape[-1]).transpose(1, 2)


def _cross_entropy(logits: Any, targets: Any) -> Any:
    """Its sum over tokens."""
    from torchtitan.components.loss import cross_entropy_loss

    return cross_entropy_loss(logits, targets)


def _configuration(c: Any, S: int, attention: Callable[[], Any] | None) -> Any:
    """Its configuration of a model of these numbers, nothing initialized."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    none = {"weight": skip_param_init}
    norm = RMSNorm.Config(normalized_shape=c.width, eps=c.eps, param_init=none)
    stretched = {"scaling": "llama", "scaling_factor": c.stretch} if c.stretch != 1 else {}
    rope = ComplexRoPE.Config(dim=c.head, max_seq_len=S, theta=c.base, **stretched)
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=norm,
        attention=make_gqa_config(
            dim=c.width,
            n_heads=c.heads,
            n_kv_heads=c.kv_heads,
            head_dim=c.head,
            wqkv_param_init=none,
            wo_param_init=none,
            inner_attention=attention() if attention is not None else get_attention_config(ATTENTION),
            rope=rope,
        ),
        feed_forward=make_ffn_config(dim=c.width, hidden_dim=c.hidden, w1_param_init=none, w2w3_param_init=none),
    )
    return Llama3Model.Config(
        dim=c.width,
        vocab_size=c.vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=c.vocabulary, embedding_dim=c.width, param_init=none),
        norm=norm,
        lm_head=Linear.Config(in_features=c.width, out_features=c.vocabulary, param_init=none),
        layers=[layer] * c.layers,
        enable_weight_tying=c.tied,
    )


def train(case: Any) -> _Llama:
    """`Llama3Model` with its loss, compiled block by block."""
    if case.world > 1:
        raise NotImplementedError(
            "torchtitan's ranks are started by its own launcher; here it trains in one process"
        )
    return _Llama(compiled=True)


IMPLEMENTATIONS = {"train": {"torchtitan": train}}
