"""Llama (Touvron et al., arXiv 2302.13971; Grattafiori et al., arXiv 2407.21783) and the families of its shape:
Mistral, Phi-4, Qwen3, OLMo-2, Granite 3.

A decoder with RMS norms, rotary positions, grouped key and value heads and a gated feed-forward. A family differs
in its numbers, in norms of queries and keys, in norms after a block in place of before it, and in multipliers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..model import FINAL_GAIN, Model, Part, Parts, Weight, gains, gated, looked_up, matrix, several
from ._experts import feed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The numbers of one model. `head` is a head's dimension, which need not be width / heads."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocabulary: int
    base: float
    eps: float = 1e-5
    tied: bool = False
    stretch: float = 1.0
    """Llama 3's factor on low frequencies of its rotary positions."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMS norms of queries and keys: over each head, or over all heads together."""
    norms: Literal["before", "after"] = "before"
    """Whether a block's norm is of its input or of its output."""
    multipliers: tuple[float, float, float, float] | None = None
    """Granite's: of embeddings, of what a block adds, of scores (in place of head^-0.5), and of logits."""
    experts: int = 0
    """How many feed-forwards there are to choose from; 0: one, for all tokens."""
    active: int = 0
    """How many of them a token goes through."""
    renormalized: bool = True
    """Whether the shares of a token's experts add up to 1."""


CONFIGURATIONS: Mapping[str, Llama] = {
    # Not published: what tests and CPUs run.
    "llama-tiny": Llama(
        layers=2, width=64, heads=4, kv_heads=2, head=16, hidden=160, vocabulary=512, base=1e4
    ),
    # Not published: a million parameters, for servers on CPUs.
    "llama-1m": Llama(
        layers=4, width=128, heads=4, kv_heads=2, head=32, hidden=352, vocabulary=1024, base=1e4
    ),
    # Not published: 85 million parameters on bytes; its positions have no end, for windows that grow.
    "llama-85m-bytes": Llama(
        layers=12, width=768, heads=12, kv_heads=12, head=64, hidden=2048, vocabulary=256, base=5e5, tied=True
    ),
    # Not published: Llama 3.2's vocabulary and depth at a width that every kernel takes; 1.2 billion parameters.
    "llama-1.2b": Llama(
        layers=16, width=2048, heads=16, kv_heads=8, head=128, hidden=8192, vocabulary=128256, base=5e5, tied=True
    ),
    # One layer of Llama 3.1 8B, with a table that is nothing beside it.
    "llama-block": Llama(
        layers=1, width=4096, heads=32, kv_heads=8, head=128, hidden=14336, vocabulary=256, base=5e5, tied=True
    ),
    # meta-llama/llama-models, the cards; Lightning-AI/litgpt, its configurations
    "llama-2-7b": Llama(
        layers=32, width=4096, heads=32, kv_heads=32, head=128, hidden=11008, vocabulary=32000, base=1e4
    ),
    "llama-2-13b": Llama(
        layers=40, width=5120, heads=40, kv_heads=40, head=128, hidden=13824, vocabulary=32000, base=1e4
    ),
    "llama-3.2-1b": Llama(
        layers=16, width=2048, heads=32, kv_heads=8, head=64, hidden=8192, vocabulary=128256, base=5e5, tied=True,
        stretch=32,
    ),
    "llama-3.2-3b": Llama(
        layers=28, width=3072, heads=24, kv_heads=8, head=128, hidden=8192, vocabulary=128256, base=5e5,
        tied=True, stretch=32,
    ),
    "llama-3.1-8b": Llama(
        layers=32, width=4096, heads=32, kv_heads=8, head=128, hidden=14336, vocabulary=128256, base=5e5, stretch=8
    ),
    "llama-3.1-70b": Llama(
        layers=80, width=8192, heads=64, kv_heads=8, head=128, hidden=28672, vocabulary=128256, base=5e5, stretch=8
    ),
    # Lightning-AI/litgpt, its configurations; mlc-ai/mlc-llm, its presets
    "qwen3-0.6b": Llama(
        layers=28, width=1024, heads=16, kv_heads=8, head=128, hidden=3072, vocabulary=151936, base=1e6, eps=1e-6,
        tied=True, qk_norm="head",
    ),
    "qwen3-8b": Llama(
        layers=36, width=4096, heads=32, kv_heads=8, head=128, hidden=12288, vocabulary=151936, base=1e6, eps=1e-6,
        qk_norm="head",
    ),
    "qwen3-32b": Llama(
        layers=64, width=5120, heads=64, kv_heads=8, head=128, hidden=25600, vocabulary=151936, base=1e6, eps=1e-6,
        qk_norm="head",
    ),
    "mistral-7b-v0.3": Llama(
        layers=32, width=4096, heads=32, kv_heads=8, head=128, hidden=14336, vocabulary=32768, base=1e6
    ),
    "phi-4": Llama(
        layers=40, width=5120, heads=40, kv_heads=10, head=128, hidden=17920, vocabulary=100352, base=2.5e5
    ),
    # allenai/OLMo, the configurations of November 2024
    "olmo-2-7b": Llama(
        layers=32, width=4096, heads=32, kv_heads=32, head=128, hidden=11008, vocabulary=100352, base=5e5,
        eps=1e-6, qk_norm="width", norms="after",
    ),
    "olmo-2-13b": Llama(
        layers=40, width=5120, heads=40, kv_heads=40, head=128, hidden=13824, vocabulary=100352, base=5e5,
        eps=1e-6, qk_norm="width", norms="after",
    ),
    # foundation-model-stack, its Granite
    "granite-3-8b": Llama(
        layers=40, width=4096, heads=32, kv_heads=8, head=128, hidden=12800, vocabulary=49155, base=1e4, tied=True,
        multipliers=(12.0, 0.22, 1 / 128, 1 / 16),
    ),
}  # fmt: skip


def weights(c: Llama) -> dict[str, Weight]:
    """All parameters by name. What a block adds is drawn smaller by the number of blocks, as GPT-2's is."""
    outward = (2 * c.layers) ** -0.5
    found = {"embedding": Weight((c.vocabulary, c.width), c.width**-0.5, share=float(c.tied))}
    queries, keys = c.heads * c.head, c.kv_heads * c.head
    for i in range(c.layers):
        layer = {
            "attention_norm": gains(c.width),
            "query": matrix(queries, c.width),
            "key": matrix(keys, c.width),
            "value": matrix(keys, c.width),
            "output": matrix(c.width, queries, outward),
            "feed_norm": gains(c.width),
        }
        if c.experts:
            share = c.active / c.experts
            layer["router"] = matrix(c.experts, c.width)
            inward = Weight((c.experts, c.hidden, c.width), c.width**-0.5, share=share)
            layer |= {"gate": inward, "up": inward}
            layer["down"] = Weight((c.experts, c.width, c.hidden), outward * c.hidden**-0.5, share=share)
        else:
            layer |= {"gate": matrix(c.hidden, c.width), "up": matrix(c.hidden, c.width)}
            layer["down"] = matrix(c.width, c.hidden, outward)
        if c.qk_norm != "none":
            wide = c.qk_norm == "width"
            layer["query_norm"] = gains(queries if wide else c.head)
            layer["key_norm"] = gains(keys if wide else c.head)
        found |= {f"layers.{i}.{name}": weight for name, weight in layer.items()}
    found["norm"] = gains(c.width, FINAL_GAIN)
    if not c.tied:
        found["head"] = matrix(c.vocabulary, c.width)
    return found


def parts(c: Llama, B: int, S: int) -> tuple[Part, ...]:
    """Norms before a block are one with the residual addition before them, but for the first."""
    rows = {"B": B, "S": S, "D": c.width}
    after = c.norms == "after"
    found = [Part("norm", "rms_norm", rows, 2 * c.layers + 1 if after else 1)]
    if not after:
        found.append(Part("add_norm", "add_rms_norm", rows, 2 * c.layers))
    for name, heads in (("query_norm", c.heads), ("key_norm", c.kv_heads)):
        if c.qk_norm == "head":
            found.append(Part(name, "rms_norm", {"B": B, "S": S * heads, "D": c.head}, c.layers))
        elif c.qk_norm == "width":
            found.append(Part(name, "rms_norm", {"B": B, "S": S, "D": heads * c.head}, c.layers))
    shape = {"B": B, "H": c.heads, "Hkv": c.kv_heads, "S": S, "D": c.head}
    return (
        *found,
        Part("rope", "rope", shape, c.layers, {"layout": "half"}),
        Part("attention", "attention", shape, c.layers, {"mask": "causal"}),
        Part("gate", "swiglu", {"M": B * S * max(1, c.active), "N": c.hidden}, c.layers),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


def named(c: Llama, B: int, S: int) -> tuple[Part, ...]:
    """The projections and their rotation together, not where queries and keys have a norm between the two; gate
    and up with what gates them, not of experts.
    """
    found = []
    if c.qk_norm == "none":
        axes = {"B": B, "S": S, "K": c.width, "H": c.heads, "Hkv": c.kv_heads, "D": c.head}
        found.append(Part("qkv_rope", "qkv_rope", axes, c.layers))
    if not c.experts:
        axes = {"M": B * S, "N": c.hidden, "K": c.width}
        found.append(Part("gate_up_swiglu", "gate_up_swiglu", axes, c.layers))
    return tuple(found)


def frequencies(c: Llama) -> list[float]:
    """Radians a position of each pair of a head, the low ones stretched as Llama 3 does for long contexts.

    Wavelengths above 8192 positions are stretched by the whole factor, those below a quarter of it not at all, and
    between them the two are mixed.
    """
    plain = [c.base ** (-2 * i / c.head) for i in range(c.head // 2)]
    if c.stretch == 1:
        return plain
    found = []
    for x in plain:
        turns = 8192 * x / (2 * math.pi)  # of 8192 positions
        mix = min(1.0, max(0.0, (turns - 1) / 3))
        found.append(mix * x + (1 - mix) * x / c.stretch)
    return found


def module(c: Llama, parts: Parts) -> torch.nn.Module:
    """The model, of PyTorch's linear layers and the parts given."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    shapes = {name: weight.shape for name, weight in weights(c).items()}
    linear, lookup = parts["linear"], looked_up(parts)
    projected, fed = several(parts), gated(parts)
    together: Any = parts.get("qkv_rope")
    normed: Any = parts.get("normed")
    embed, adds, scores, logits = c.multipliers or (1.0, 1.0, c.head**-0.5, 1.0)
    # Parts scale scores by head^-0.5; what a family has in its place is made up for in the queries. Exactly 1
    # where it has nothing: 128^-0.5 · 128^0.5 is not, and would be a launch of its own.
    query_scale = scores * c.head**0.5 if c.multipliers else 1.0

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            prefix = f"layers.{index}."
            for name, shape in shapes.items():
                if name.startswith(prefix):
                    setattr(self, name.removeprefix(prefix), nn.Parameter(torch.empty(shape)))

        def attend(self, y: Any, cos: Any, sin: Any) -> Any:
            """(B, S, D) to (B, S, D): q, k, v are views of their projections, never copied here."""
            if together is not None:
                weights = {"query": self.query, "key": self.key, "value": self.value}
                return self.attended(*together(x=y, **weights, cos=cos, sin=sin))
            q, k, v = projected(y, self.query, self.key, self.value)
            return self.attended(*self.turned(q, k, v, cos, sin))

        def attended(self, q: Any, k: Any, v: Any) -> Any:
            """Queries, keys and values (B, H, S, D) to (B, S, D)."""
            if query_scale != 1:
                q = q * query_scale
            out = parts["attention"](q=q, k=k, v=v, mask="causal").transpose(1, 2)
            return linear(out.reshape(*out.shape[:2], -1), self.output)

        def turned(self, q: Any, k: Any, v: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
            """Projections (B, S, H · D) as queries, keys and values (B, H, S, D)."""
            B, S, _ = q.shape
            if c.qk_norm == "width":
                q = parts["query_norm"](x=q, weight=self.query_norm, eps=c.eps)
                k = parts["key_norm"](x=k, weight=self.key_norm, eps=c.eps)
            q, k, v = (x.view(B, S, -1, c.head) for x in (q, k, v))
            if c.qk_norm == "head":
                q = parts["query_norm"](x=q, weight=self.query_norm, eps=c.eps)
                k = parts["key_norm"](x=k, weight=self.key_norm, eps=c.eps)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return (*parts["rope"](q=q, k=k, cos=cos, sin=sin, layout="half"), v)

        def feed(self, y: Any) -> Any:
            """(B, S, D) to (B, S, D)."""
            rows = y.flatten(0, 1)
            if c.experts:
                weights = self.router, self.gate, self.up, self.down
                return feed(rows, *weights, c.active, c.renormalized, parts["gate"]).view_as(y)
            return linear(fed(rows, self.gate, self.up), self.down).view_as(y)

        def forward(self, *inputs: Any) -> Any:
            if normed is not None:
                return self.fused(*inputs)
            return self.before(*inputs) if c.norms == "before" else self.after(*inputs)

        def fused(self, x: Any, h: Any, cos: Any, sin: Any) -> Any:
            """Of norms before blocks that are one with the products behind them: x is the block's before, which is
            not yet added to the stream h; None for h where there is none before.
            """
            h, q, k, v = normed(x, h, self.attention_norm, c.eps, self.query, self.key, self.value)
            x = scaled(self.attended(*self.turned(q, k, v, cos, sin)))
            h, gate, up = normed(x, h, self.feed_norm, c.eps, self.gate, self.up)
            return scaled(parts["down"](gate, up, self.down)), h

        def before(self, y: Any, h: Any, cos: Any, sin: Any, following: Any) -> Any:
            """Of norms before blocks: y is the norm of the stream h, and `following` the next norm's weight."""
            y, h = parts["add_norm"](
                x=scaled(self.attend(y, cos, sin)), residual=h, weight=self.feed_norm, eps=c.eps
            )
            return parts["add_norm"](x=scaled(self.feed(y)), residual=h, weight=following, eps=c.eps)

        def after(self, h: Any, cos: Any, sin: Any) -> Any:
            """Of norms after blocks."""
            h = h + scaled(parts["norm"](x=self.attend(h, cos, sin), weight=self.attention_norm, eps=c.eps))
            return h + scaled(parts["norm"](x=self.feed(h), weight=self.feed_norm, eps=c.eps))

    def scaled(x: Any) -> Any:
        return x if adds == 1 else x * adds

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recompute = False
            self.embedding = nn.Parameter(torch.empty(shapes["embedding"]))
            self.layers = nn.ModuleList(Layer(i) for i in range(c.layers))
            self.norm = nn.Parameter(torch.empty(shapes["norm"]))
            if not c.tied:
                self.head = nn.Parameter(torch.empty(shapes["head"]))

        def prepare(self, S: int, device: torch.device, dtype: torch.dtype) -> None:
            """The tables (S, head / 2) of the rotary positions."""
            turns = torch.tensor(frequencies(c), dtype=torch.float64, device=device)
            angle = torch.arange(S, dtype=torch.float64, device=device)[:, None] * turns
            self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)

        def forward(self, tokens: Any, targets: Any) -> Any:
            h, table = lookup(tokens, self.embedding)
            if embed != 1:
                h = h * embed
            y = self.before(h) if c.norms == "before" else self.behind(h)
            if logits != 1:
                y = y * logits
            return parts["loss"](
                x=y.flatten(0, 1), weight=table if c.tied else self.head, target=targets.flatten()
            )

        def before(self, h: Any) -> Any:
            if normed is not None:
                x, h = h, None
                for layer in self.layers:
                    x, h = self.run(layer, x, h, self.cos, self.sin)
                return parts["add_norm"](x=x, residual=h, weight=self.norm, eps=c.eps)[0]
            norms = [*(layer.attention_norm for layer in self.layers), self.norm]
            y = parts["norm"](x=h, weight=norms[0], eps=c.eps)
            for layer, following in zip(self.layers, norms[1:], strict=True):
                y, h = self.run(layer, y, h, self.cos, self.sin, following)
            return y

        def behind(self, h: Any) -> Any:
            for layer in self.layers:
                h = self.run(layer, h, self.cos, self.sin)
            return parts["norm"](x=h, weight=self.norm, eps=c.eps)

        def run(self, layer: Any, *inputs: Any) -> Any:
            return checkpoint(layer, *inputs, use_reentrant=False) if self.recompute else layer(*inputs)

    return Decoder()


MODEL = Model(
    name="llama",
    summary="decoder with RMS norms, rotary positions, grouped heads and a gated feed-forward",
    configurations=CONFIGURATIONS,
    weights=weights,
    parts=parts,
    attention=lambda c: c.layers * c.heads * c.head,
    module=module,
    named=named,
    fused=lambda c: ("normed", "down") if c.norms == "before" and not c.experts else (),
)
