"""Mamba-2 (Dao and Gu, arXiv 2405.21060): a causal convolution, a scan and a gated norm a layer; no attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..model import FINAL_GAIN, Model, Part, Parts, Weight, biases, gains, looked_up, matrix

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """The numbers of one model: heads of `head` dimensions make twice the width, as all published ones have it."""

    layers: int
    width: int
    vocabulary: int = 50288
    head: int = 64
    state: int = 128
    groups: int = 1
    window: int = 4
    eps: float = 1e-5

    @property
    def inner(self) -> int:
        """The width of the scan."""
        return 2 * self.width

    @property
    def heads(self) -> int:
        """Heads of the scan."""
        return self.inner // self.head

    @property
    def convolved(self) -> int:
        """Channels of the convolution: the scan's inputs, B and C."""
        return self.inner + 2 * self.groups * self.state


CONFIGURATIONS: Mapping[str, Mamba2] = {
    # Not published: what tests and CPUs run.
    "mamba2-tiny": Mamba2(layers=2, width=64, vocabulary=512, head=16, state=16),
    "mamba2-1m-bytes": Mamba2(layers=9, width=128, vocabulary=256, head=32, state=32),
    # Of as many parameters as gpt2-86m-bytes.
    "mamba2-86m-bytes": Mamba2(layers=23, width=768, vocabulary=256),
    # state-spaces/mamba, its Mamba2; NVIDIA-NeMo/NeMo (the padded vocabulary)
    "mamba2-130m": Mamba2(layers=24, width=768),
    "mamba2-1.3b": Mamba2(layers=48, width=2048),
    "mamba2-2.7b": Mamba2(layers=64, width=2560),
}


def weights(c: Mamba2) -> dict[str, Weight]:
    """All parameters by name; the table of tokens is the output projection too."""
    found = {"embedding": Weight((c.vocabulary, c.width), c.width**-0.5, share=1.0)}
    for i in range(c.layers):
        layer = {
            "norm": gains(c.width),
            "input": matrix(c.inner + c.convolved + c.heads, c.width),
            "convolution": Weight((c.convolved, c.window), c.window**-0.5),
            "convolution_bias": biases(c.convolved),
            "decay": Weight((c.heads,), 0.5, math.log(4.0)),
            "skip": gains(c.heads),
            "step_bias": Weight((c.heads,), 0.5, math.log(math.expm1(0.02))),
            "gated_norm": gains(c.inner),
            "output": matrix(c.width, c.inner, c.layers**-0.5),
        }
        found |= {f"layers.{i}.{name}": weight for name, weight in layer.items()}
    return found | {"norm": gains(c.width, FINAL_GAIN)}


def parts(c: Mamba2, B: int, S: int) -> tuple[Part, ...]:
    """Norms are one with the residual addition before them, but for the first."""
    return (
        Part("norm", "rms_norm", {"B": B, "S": S, "D": c.width}, 1),
        Part("add_norm", "add_rms_norm", {"B": B, "S": S, "D": c.width}, c.layers),
        Part(
            "convolution",
            "causal_conv1d",
            {"B": B, "D": c.convolved, "S": S, "W": c.window},
            c.layers,
            {"activation": "silu", "layout": "bsd"},
        ),
        Part(
            "scan",
            "ssd",
            {"B": B, "S": S, "H": c.heads, "P": c.head, "N": c.state, "G": c.groups},
            c.layers,
        ),
        Part(
            "gated_norm",
            "gated_rms_norm",
            {"B": B, "S": S, "D": c.inner, "G": c.groups},
            c.layers,
            {"order": "gate_first"},
        ),
        Part("loss", "fused_linear_cross_entropy", {"M": B * S, "D": c.width, "V": c.vocabulary}, 1),
    )


def module(c: Mamba2, parts: Parts) -> torch.nn.Module:
    """The model, of PyTorch's linear layers and the parts given."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    linear, lookup = parts["linear"], looked_up(parts)
    shapes = {name: weight.shape for name, weight in weights(c).items()}

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            prefix = f"layers.{index}."
            for name, shape in shapes.items():
                if name.startswith(prefix):
                    setattr(self, name.removeprefix(prefix), nn.Parameter(torch.empty(shape)))

        def mix(self: Any, y: Any) -> Any:
            """(B, S, D) to (B, S, D)."""
            z, xbc, dt = linear(y, self.input).split([c.inner, c.convolved, c.heads], -1)
            xbc = parts["convolution"](
                x=xbc,
                weight=self.convolution,
                bias=self.convolution_bias,
                initial_state=None,
                activation="silu",
                layout="bsd",
            )
            x, B, C = xbc.split([c.inner, c.groups * c.state, c.groups * c.state], -1)
            out = parts["scan"](
                x=x.unflatten(-1, (c.heads, c.head)),
                dt=dt,
                A=-self.decay.float().exp(),
                B=B.unflatten(-1, (c.groups, c.state)),
                C=C.unflatten(-1, (c.groups, c.state)),
                D=self.skip.float(),
                dt_bias=self.step_bias.float(),
                initial_state=None,
                seq_idx=None,
                dt_softplus=True,
                return_final_state=False,
            )
            out = parts["gated_norm"](
                x=out.flatten(2),
                z=z,
                weight=self.gated_norm,
                eps=c.eps,
                group=c.inner // c.groups,
                order="gate_first",
            )
            return linear(out, self.output)

        def forward(self, y: Any, h: Any, following: Any) -> Any:
            """y is the norm of the stream h, `following` the next norm's weight."""
            return parts["add_norm"](x=self.mix(y), residual=h, weight=following, eps=c.eps)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recompute = False
            self.embedding = nn.Parameter(torch.empty(shapes["embedding"]))
            self.layers = nn.ModuleList(Layer(i) for i in range(c.layers))
            self.norm = nn.Parameter(torch.empty(shapes["norm"]))

        def prepare(self, S: int, device: torch.device, dtype: torch.dtype) -> None:
            """Nothing depends on positions."""

        def forward(self, tokens: Any, targets: Any) -> Any:
            h, table = lookup(tokens, self.embedding)
            norms = [*(layer.norm for layer in self.layers), self.norm]
            y = parts["norm"](x=h, weight=norms[0], eps=c.eps)
            for layer, following in zip(self.layers, norms[1:], strict=True):
                if self.recompute:
                    y, h = checkpoint(layer, y, h, following, use_reentrant=False)
                else:
                    y, h = layer(y, h, following)
            return parts["loss"](x=y.flatten(0, 1), weight=table, target=targets.flatten())

    return Decoder()


MODEL = Model(
    name="mamba2",
    summary="layers of a causal convolution, a state-space scan and a gated norm; no attention",
    configurations=CONFIGURATIONS,
    weights=weights,
    parts=parts,
    # The scan's own operations, a hundredth of the projections', are left out of the floor.
    attention=lambda c: 0,
    module=module,
)
