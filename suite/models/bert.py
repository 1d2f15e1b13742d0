"""BERT (Devlin et al., arXiv 1810.04805): an encoder with norms after each block, trained to predict tokens.

Every position is predicted: which 15 % are masked is a matter of data, and a step costs the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model import FINAL_GAIN, Model, Part, Parts, Weight, biases, gains, looked_up, matrix
from ._heads import attending

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Bert:
    """The numbers of one model; heads have width / heads dimensions."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 30522
    positions: int = 512
    types: int = 2
    eps: float = 1e-12

    @property
    def head(self) -> int:
        """A head's dimension."""
        return self.width // self.heads


CONFIGURATIONS: Mapping[str, Bert] = {
    # Not published: what tests and CPUs run.
    "bert-tiny": Bert(layers=2, width=64, heads=4, vocabulary=512),
    # huggingface/transformers and NVIDIA-NeMo/NeMo, their BERT
    "bert-base": Bert(layers=12, width=768, heads=12),
    "bert-large": Bert(layers=24, width=1024, heads=16),
}


def weights(c: Bert) -> dict[str, Weight]:
    """All parameters by name; the table of tokens is the output projection too. The pooler, which no token's
    prediction uses, is left out, and so is the bias of the output projection.
    """
    found = {
        "embedding": Weight((c.vocabulary, c.width), c.width**-0.5, share=1.0),
        "positions": Weight((c.positions, c.width), c.width**-0.5),
        "types": Weight((c.types, c.width), c.width**-0.5),
        "norm": gains(c.width),
        "norm_bias": biases(c.width),
    }
    for i in range(c.layers):
        layer = {
            "projection": matrix(3 * c.width, c.width),
            "projection_bias": biases(3 * c.width),
            "output": matrix(c.width, c.width),
            "output_bias": biases(c.width),
            "attention_norm": gains(c.width),
            "attention_norm_bias": biases(c.width),
            "up": matrix(4 * c.width, c.width),
            "up_bias": biases(4 * c.width),
            "down": matrix(c.width, 4 * c.width),
            "down_bias": biases(c.width),
            "feed_norm": gains(c.width),
            "feed_norm_bias": biases(c.width),
        }
        found |= {f"layers.{i}.{name}": weight for name, weight in layer.items()}
    return found | {
        "transform": matrix(c.width, c.width),
        "transform_bias": biases(c.width),
        "transform_norm": gains(c.width, FINAL_GAIN),
        "transform_norm_bias": biases(c.width),
    }


def parts(c: Bert, B: int, S: int) -> tuple[Part, ...]:
    """Two norms, attention that sees everything and an activation a layer; more of each around the layers."""
    return (
        Part("norm", "layer_norm", {"B": B, "S": S, "D": c.width}, 2 * c.layers + 2),
        Part(
            "attention",
            "attention",
            {"B": B, "H": c.heads, "Hkv": c.heads, "S": S, "D": c.head},
            c.layers,
            {"mask": "full"},
        ),
        Part("activation", "gelu", {"M": B * S, "N": 4 * c.width}, c.layers, {"approximate": "none"}),
        Part("transform", "gelu", {"M": B * S, "N": c.width}, 1, {"approximate": "none"}),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


def module(c: Bert, parts: Parts) -> torch.nn.Module:
    """The model, of PyTorch's linear layers and the parts given."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    linear, lookup = parts["linear"], looked_up(parts)
    attended = attending(parts["attention"], c.heads, "full")
    shapes = {name: weight.shape for name, weight in weights(c).items()}

    def normed(x: Any, weight: Any, bias: Any) -> Any:
        return parts["norm"](x=x, weight=weight, bias=bias, eps=c.eps)

    def joined(x: Any, h: Any, weight: Any, bias: Any) -> Any:
        """The norm of x + h."""
        if (added := getattr(parts["norm"], "added", None)) is None:
            return normed(h + x, weight, bias)
        return added(x=x, residual=h, weight=weight, bias=bias, eps=c.eps)[0]

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            prefix = f"layers.{index}."
            for name, shape in shapes.items():
                if name.startswith(prefix):
                    setattr(self, name.removeprefix(prefix), nn.Parameter(torch.empty(shape)))

        def forward(self, h: Any) -> Any:
            """(B, S, D) to (B, S, D); q, k, v are views of one projection."""
            projected = linear(h, self.projection, self.projection_bias)
            out = attended(projected)
            out = linear(out, self.output, self.output_bias)
            h = joined(out, h, self.attention_norm, self.attention_norm_bias)
            up = parts["activation"](x=linear(h.flatten(0, 1), self.up, self.up_bias), approximate="none")
            down = linear(up, self.down, self.down_bias).view_as(h)
            return joined(down, h, self.feed_norm, self.feed_norm_bias)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recompute = False
            for name, shape in shapes.items():
                if not name.startswith("layers."):
                    setattr(self, name, nn.Parameter(torch.empty(shape)))
            self.layers = nn.ModuleList(Layer(i) for i in range(c.layers))

        def prepare(self, S: int, device: torch.device, dtype: torch.dtype) -> None:
            """Positions are learned: nothing to make."""

        def forward(self, tokens: Any, targets: Any) -> Any:
            own: Any = self
            h, table = lookup(tokens, own.embedding)
            h = h + own.positions[: tokens.shape[1]] + own.types[0]
            h = normed(h, self.norm, self.norm_bias)
            for layer in self.layers:
                h = checkpoint(layer, h, use_reentrant=False) if self.recompute else layer(h)
            y = linear(h.flatten(0, 1), self.transform, self.transform_bias)
            y = parts["transform"](x=y, approximate="none").view_as(h)
            y = normed(y, self.transform_norm, self.transform_norm_bias)
            return parts["loss"](x=y.flatten(0, 1), weight=table, target=targets.flatten())

    return Encoder()


MODEL = Model(
    name="bert",
    summary="encoder with layer norms after its blocks, learned positions and biases",
    configurations=CONFIGURATIONS,
    weights=weights,
    parts=parts,
    attention=lambda c: 2 * c.layers * c.width,
    module=module,
    longest=lambda c: c.positions,
    storage="packed",
    decodes=False,
)
