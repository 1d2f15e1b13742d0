"""GPT-2 (Radford et al., 2019): a decoder with layer norms, learned positions and biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model import FINAL_GAIN, Model, Part, Parts, Weight, biases, gains, looked_up, matrix
from ._heads import attending

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Gpt2:
    """The numbers of one model; heads have width / heads dimensions."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024
    eps: float = 1e-5

    @property
    def head(self) -> int:
        """A head's dimension."""
        return self.width // self.heads


CONFIGURATIONS: Mapping[str, Gpt2] = {
    # Not published: what tests and CPUs run.
    "gpt2-tiny": Gpt2(layers=2, width=64, heads=4, vocabulary=512, positions=256),
    # Not published: the width and heads of a quick inference test; layers and vocabulary are ours.
    "gpt2-quick": Gpt2(layers=4, width=256, heads=8, vocabulary=8192, positions=512),
    # Not published: width and heads of a quick memory test; layers and vocabulary are ours.
    "gpt2-memory": Gpt2(layers=4, width=512, heads=8, vocabulary=8192, positions=512),
    "gpt2-1m-bytes": Gpt2(layers=5, width=128, heads=4, vocabulary=256, positions=256),
    # karpathy/nanoGPT, which trains with the vocabulary padded to a multiple of 64.
    "gpt2-124m": Gpt2(layers=12, width=768, heads=12),
    "gpt2-124m-padded": Gpt2(layers=12, width=768, heads=12, vocabulary=50304),
    # The blocks of the 124M model on bytes: no table of 50257 tokens.
    "gpt2-86m-bytes": Gpt2(layers=12, width=768, heads=12, vocabulary=256),
    # The same with positions for 32 blocks of 128: of fewer, no share that is left out is what it says.
    "gpt2-88m-bytes": Gpt2(layers=12, width=768, heads=12, vocabulary=256, positions=4096),
    "gpt2-350m": Gpt2(layers=24, width=1024, heads=16),
    "gpt2-774m": Gpt2(layers=36, width=1280, heads=20),
    "gpt2-1.5b": Gpt2(layers=48, width=1600, heads=25),
    # Layers and widths of GPT-3 1.3B and 6.7B (Brown et al., arXiv 2005.14165, table 2.1), heads as in OPT
    # (Zhang et al., arXiv 2205.01068, table 1), the vocabulary padded to a multiple of 64.
    "gpt3-1.3b": Gpt2(layers=24, width=2048, heads=32, vocabulary=50304, positions=2048),
    "gpt3-6.7b": Gpt2(layers=32, width=4096, heads=32, vocabulary=50304, positions=2048),
}


def weights(c: Gpt2) -> dict[str, Weight]:
    """All parameters by name; the table of tokens is the output projection too."""
    outward = (2 * c.layers) ** -0.5
    found = {
        "embedding": Weight((c.vocabulary, c.width), c.width**-0.5, share=1.0),
        "positions": Weight((c.positions, c.width), c.width**-0.5),
    }
    for i in range(c.layers):
        layer = {
            "attention_norm": gains(c.width),
            "attention_norm_bias": biases(c.width),
            "projection": matrix(3 * c.width, c.width),
            "projection_bias": biases(3 * c.width),
            "output": matrix(c.width, c.width, outward),
            "output_bias": biases(c.width),
            "feed_norm": gains(c.width),
            "feed_norm_bias": biases(c.width),
            "up": matrix(4 * c.width, c.width),
            "up_bias": biases(4 * c.width),
            "down": matrix(c.width, 4 * c.width, outward),
            "down_bias": biases(c.width),
        }
        found |= {f"layers.{i}.{name}": weight for name, weight in layer.items()}
    return found | {"norm": gains(c.width, FINAL_GAIN), "norm_bias": biases(c.width)}


def parts(c: Gpt2, B: int, S: int) -> tuple[Part, ...]:
    """Two norms, attention and an activation a layer."""
    return (
        Part("norm", "layer_norm", {"B": B, "S": S, "D": c.width}, 2 * c.layers + 1),
        Part(
            "attention",
            "attention",
            {"B": B, "H": c.heads, "Hkv": c.heads, "S": S, "D": c.head},
            c.layers,
            {"mask": "causal"},
        ),
        Part("activation", "gelu", {"M": B * S, "N": 4 * c.width}, c.layers, {"approximate": "tanh"}),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


def module(c: Gpt2, parts: Parts) -> torch.nn.Module:
    """The model, of PyTorch's linear layers and the parts given."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    linear, norm, lookup = parts["linear"], parts["norm"], looked_up(parts)
    attended = attending(parts["attention"], c.heads, "causal")
    added: Any = getattr(norm, "added", None)
    normed: Any = parts.get("layer_normed")
    shapes = {name: weight.shape for name, weight in weights(c).items()}

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            prefix = f"layers.{index}."
            for name, shape in shapes.items():
                if name.startswith(prefix):
                    setattr(self, name.removeprefix(prefix), nn.Parameter(torch.empty(shape)))

        def _attend(self, y: Any) -> Any:
            """(B, S, D) to (B, S, D); q, k, v are views of one projection."""
            return self._joined(linear(y, self.projection, self.projection_bias))

        def _joined(self, projected: Any) -> Any:
            """A projection (B, S, 3·D) to (B, S, D)."""
            return linear(attended(projected), self.output, self.output_bias)

        def _feed(self, y: Any) -> Any:
            """(B, S, D) to (B, S, D)."""
            up = linear(y.flatten(0, 1), self.up, self.up_bias)
            up = parts["activation"](x=up, approximate="tanh")
            return linear(up, self.down, self.down_bias).view_as(y)

        def forward(self, *inputs: Any) -> Any:
            if normed is not None:
                return self._fused(*inputs)
            return self._plain(*inputs) if added is None else self._added(*inputs)

        def _plain(self, h: Any) -> Any:
            """Of the stream h (B, S, D), to itself."""
            y = norm(x=h, weight=self.attention_norm, bias=self.attention_norm_bias, eps=c.eps)
            h = h + self._attend(y)
            y = norm(x=h, weight=self.feed_norm, bias=self.feed_norm_bias, eps=c.eps)
            return h + self._feed(y)

        def _added(self, y: Any, h: Any, following: Any, following_bias: Any) -> Any:
            """Of norms that add first: y is the norm of the stream h, `following` the next norm's weight."""
            own = {"weight": self.feed_norm, "bias": self.feed_norm_bias}
            y, h = added(x=self._attend(y), residual=h, **own, eps=c.eps)
            return added(x=self._feed(y), residual=h, weight=following, bias=following_bias, eps=c.eps)

        def _fused(self, x: Any, h: Any) -> Any:
            """Of norms that are one with the products behind them: x is the block's before, which is not yet added
            to the stream h; None for h where there is none before.
            """
            norms = (self.attention_norm, self.attention_norm_bias), (self.feed_norm, self.feed_norm_bias)
            h, projected = normed(x, h, *norms[0], c.eps, self.projection, self.projection_bias)
            x = self._joined(projected)
            h, x = parts["fed"](x, h, *norms[1], c.eps, self.up, self.up_bias, self.down, self.down_bias)
            return x, h

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recompute = False
            self.embedding = nn.Parameter(torch.empty(shapes["embedding"]))
            self.positions = nn.Parameter(torch.empty(shapes["positions"]))
            self.layers = nn.ModuleList(Layer(i) for i in range(c.layers))
            self.norm = nn.Parameter(torch.empty(shapes["norm"]))
            self.norm_bias = nn.Parameter(torch.empty(shapes["norm_bias"]))

        def prepare(self, S: int, device: torch.device, dtype: torch.dtype) -> None:
            """Positions are learned: nothing to make."""

        def forward(self, tokens: Any, targets: Any) -> Any:
            h, table = lookup(tokens, self.embedding)
            h = h + self.positions[: tokens.shape[1]]
            y = self._through(h)
            return parts["loss"](x=y.flatten(0, 1), weight=table, target=targets.flatten())

        def _through(self, h: Any) -> Any:
            """All layers and the last norm."""
            last = {"weight": self.norm, "bias": self.norm_bias, "eps": c.eps}
            if normed is not None:
                x, h = h, None
                for layer in self.layers:
                    x, h = self._run(layer, x, h)
                return norm(x=h + x, **last) if added is None else added(x=x, residual=h, **last)[0]
            if added is None:
                for layer in self.layers:
                    h = self._run(layer, h)
                return norm(x=h, **last)
            norms = [(x.attention_norm, x.attention_norm_bias) for x in self.layers]
            y = norm(x=h, weight=norms[0][0], bias=norms[0][1], eps=c.eps)
            for layer, following in zip(self.layers, [*norms[1:], (self.norm, self.norm_bias)], strict=True):
                y, h = self._run(layer, y, h, *following)
            return y

        def _run(self, layer: Any, *inputs: Any) -> Any:
            return checkpoint(layer, *inputs, use_reentrant=False) if self.recompute else layer(*inputs)

    return Decoder()


MODEL = Model(
    name="gpt2",
    summary="decoder with layer norms, learned positions and biases",
    configurations=CONFIGURATIONS,
    weights=weights,
    parts=parts,
    attention=lambda c: c.layers * c.width,
    module=module,
    longest=lambda c: c.positions,
    storage="packed",
    fused=lambda c: ("layer_normed", "fed"),
)
