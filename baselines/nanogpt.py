"""nanoGPT's GPT and its step, as a whole program for `train`, from a checkout that `KERNELMARK_NANOGPT` names.

nanoGPT (github.com/karpathy/nanoGPT, MIT) is a folder of scripts on no package index. Of it `model.py` is loaded:
its `GPT` in the dtype of the weights, its loss, and its optimizer by `configure_optimizers`, which is PyTorch's
fused AdamW. Around them stands what its `train.py` does on one GPU, which as a script cannot be called:
`torch.compile` of the model, autocast in the forward pass, a loss that is divided by the number of micro-batches,
clipping. With masters in fp32 its weights are fp32, as there, and autocast makes products bf16.

Two things are the case's instead of its own, as every system of a case computes the same: GELU by tanh, as in
GPT-2, where its is exact; and a weight decay of all parameters, where it leaves out those of one dimension.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "KERNELMARK_NANOGPT"
"""The environment variable that names the checkout."""
DEVICES = ("cuda",)
# Without a checkout there is no such environment, and rows say so before anything is started.
ENVIRONMENT = "core" if os.environ.get(VARIABLE) else "nanogpt"
NO_ENVIRONMENT = (
    "nanoGPT is a folder of scripts and on no package index: git clone https://github.com/karpathy/nanoGPT, and "
    f"set {VARIABLE} to that folder"
)
EPSILON = 1e-5
"""Of its layer norms."""


class _Gpt:
    """Its model and its step: an engine, as `train` calls what clips and updates by itself."""

    stored: tuple[str, ...] = ("plain", "master32")

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled
        self._of: Any = None
        self._model: Any = None
        self._call: Any = None
        self._optimizer: Any = None

    def build(self, chosen: Any, S: int, weights: Iterable[tuple[str, Any]]) -> None:
        """The model with these weights, made and compiled once. Raises NotImplementedError for what is no GPT-2,
        ImportError without a checkout.
        """
        import torch

        c = chosen.configuration
        if chosen.model.name != "gpt2":
            raise NotImplementedError(f"nanoGPT trains gpt2, not {chosen.model.name}")
        if c.eps != EPSILON:
            raise NotImplementedError(f"nanoGPT's layer norms add {EPSILON:g}, those of {chosen.name} {c.eps:g}")
        drawn = list(weights)
        values = drawn[0][1]
        if self._of != c:
            theirs = checkout()
            given = {"block_size": c.positions, "vocab_size": c.vocabulary, "n_layer": c.layers}
            given |= {"n_head": c.heads, "n_embd": c.width, "dropout": 0.0, "bias": True}
            with torch.device(values.device), _quiet():
                model = theirs.GPT(theirs.GPTConfig(**given))
            for block in model.transformer.h:
                block.mlp.gelu.approximate = "tanh"
            self._of, self._model = c, model.to(values.dtype)
            self._call = torch.compile(model) if self._compiled else model
        # Of a CPU's autocast it makes no use either.
        dtype, narrow = values.dtype, values.dtype != torch.float32 and values.is_cuda
        self._cast: Callable[[], Any] = (
            (lambda: torch.autocast("cuda", dtype)) if narrow else contextlib.nullcontext
        )
        own = self.parameters()
        with torch.no_grad():
            for name, x in drawn:
                p = own[name][0].detach()
                p.copy_(x.view(p.shape))

    def parameters(self) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
        """By our names, each with what makes of it a view in our order, which is theirs."""
        body = self._model.transformer
        parts = {"embedding": body.wte, "positions": body.wpe, "norm": body.ln_f}
        for i, block in enumerate(body.h):
            own = {"attention_norm": block.ln_1, "projection": block.attn.c_attn, "output": block.attn.c_proj}
            own |= {"feed_norm": block.ln_2, "up": block.mlp.c_fc, "down": block.mlp.c_proj}
            parts |= {f"layers.{i}.{name}": part for name, part in own.items()}
        found = {name: (part.weight, _as_it_is) for name, part in parts.items()}
        biased = {name: part.bias for name, part in parts.items() if getattr(part, "bias", None) is not None}
        return found | {f"{name}_bias": (bias, _as_it_is) for name, bias in biased.items()}

    def start(self, stored: str, batch: int, accumulation: int, clip: float, adamw: Mapping[str, float]) -> None:
        """Its optimizer, which has made no step."""
        device = next(self._model.parameters()).device.type
        if stored == "master32":
            self._model.float()  # the same parameters: what is compiled and what is mapped stays
        self._optimizer = None  # its memory is reused
        with _quiet():
            self._optimizer = self._model.configure_optimizers(
                adamw["weight_decay"], adamw["lr"], (adamw["beta1"], adamw["beta2"]), device
            )
        for group in self._optimizer.param_groups:
            group |= {"weight_decay": adamw["weight_decay"], "eps": adamw["eps"]}
        self._accumulation, self._clip, self._done = accumulation, clip, 0

    def loss(self, tokens: Any, targets: Any) -> Any:
        """The mean, by its own forward pass."""
        with self._cast():
            return self._call(tokens, targets)[1]

    def backward(self, loss: Any) -> None:
        """Of a micro-batch's share of the step's mean."""
        (loss / self._accumulation).backward()

    def update(self) -> None:
        """Clips and updates after a step's last micro-batch."""
        import torch

        self._done += 1
        if self._done % self._accumulation:
            return
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def gradient(self, parameter: Any) -> Any:
        """Before clipping."""
        return parameter.grad


def _as_it_is(x: Any) -> Any:
    return x


def _quiet() -> Any:
    """It prints how many parameters it has; a worker's output is no place for that."""
    return contextlib.redirect_stdout(io.StringIO())


def checkout() -> ModuleType:
    """`model.py` of the checkout, loaded once. Raises ImportError where there is none."""
    path = Path(os.environ.get(VARIABLE, "")) / "model.py"
    if not path.is_file():
        raise ImportError(
            f"{VARIABLE} is {str(path.parent)!r}, where no model.py is; it names a checkout of nanoGPT"
        )
    name = f"_nanogpt_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # its dataclass looks itself up there
        try:
            with _quiet():
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def train(case: Any) -> _Gpt:
    """`GPT` with its loss and its optimizer, compiled."""
    if case.world > 1:
        raise NotImplementedError("nanoGPT's ranks are started by torchrun; here it trains in one process")
    return _Gpt(compiled=True)


IMPLEMENTATIONS = {"train": {"nanogpt": train}}
