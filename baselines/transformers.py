"""Hugging Face Transformers: what its Llama, GPT-2 and Mamba models compute with, where it stands alone.

Its Mamba models call functions that give way to mamba-ssm's where that is installed. What is called here is what
they do without: its slow path, in PyTorch's operations.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from . import _blocks, _transformers_batches, _transformers_models

REQUIRES = ("transformers",)
DEVICES = {
    "transformers_generate_compiled": ("cuda",),
    "transformers_model_compiled": ("cuda",),
    "transformers_model_liger": ("cuda",),
}


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
    """`sdpa_attention_forward`, what its models run by default: PyTorch's attention, the output by position.

    A window is a mask of elements, as its models with windows make it; it is made once for all layers.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _blocks.takes(case, "sdpa_attention_forward")
    module: Any = _layer(case)
    windowed = "W" in case.axes
    causal = case.options["mask"] == "causal" and not windowed
    seen: Any = None

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0) -> Any:
        nonlocal seen
        if windowed and seen is None:
            seen = _blocks.window_mask(case, q.device)[None, None]
        return sdpa_attention_forward(module, q, k, v, seen, is_causal=causal)[0].transpose(1, 2)

    return call


def attention_eager(case: Any) -> Callable[..., Any]:
    """Llama's `eager_attention_forward`, which holds all scores; its mask is made once for all."""
    import torch
    from transformers.models.llama.modeling_llama import eager_attention_forward

    _blocks.takes(case, "Llama's eager_attention_forward")
    module: Any = _layer(case)
    S, D = case.axes["S"], case.axes["D"]
    windowed = "W" in case.axes
    hidden: Any = None

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0) -> Any:
        nonlocal hidden
        if hidden is None and (mask == "causal" or windowed):
            lowest = torch.full((S, S), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
            if windowed:
                hidden = lowest.masked_fill_(_blocks.window_mask(case, q.device), 0)[None, None]
            else:
                hidden = lowest.triu_(1)[None, None]
        return eager_attention_forward(module, q, k, v, hidden, D**-0.5)[0].transpose(1, 2)

    return call


def ssd(case: Any) -> Callable[..., Any]:
    """Mamba-2's slow path, in chunks of 256 as its models have them; the result in x's dtype, as they go on."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    if case.options["packed"]:
        raise NotImplementedError("the slow path cannot keep packed sequences apart")
    function = inspect.unwrap(mamba2_chunk_scan)

    def call(
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        dt_bias: Any,
        initial_state: Any,
        seq_idx: Any,
        dt_softplus: bool,
        return_final_state: bool,
    ) -> Any:
        result = function(
            x,
            dt,
            A,
            B,
            C,
            256,
            D=D,
            dt_bias=dt_bias,
            initial_states=initial_state,
            dt_softplus=dt_softplus,
            return_final_states=return_final_state,
        )
        return (result[0].to(x.dtype), result[1]) if return_final_state else result.to(x.dtype)

    return call


def selective_scan(case: Any) -> Callable[..., Any]:
    """Mamba's slow path: token by token, with the decays of all tokens in memory."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    if case.axes["S"] > 8192:
        raise NotImplementedError("token by token: beyond 8192 of them a call takes seconds")
    function = inspect.unwrap(mamba_selective_scan)

    def call(
        u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, delta_softplus: bool
    ) -> Any:
        y = function(u, delta, A, B, C, D, z, delta_bias=delta_bias, delta_softplus=delta_softplus)
        return y.to(u.dtype)

    return call


def selective_state_update(case: Any) -> Callable[..., Any]:
    """The decode steps of Mamba-2's slow path (form head) and of Mamba's (form channel), the state in place."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_state_update
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    heads = inspect.unwrap(mamba2_selective_state_update)
    channels = inspect.unwrap(mamba_selective_state_update)
    if case.options["form"] == "channel" and case.axes["H"] > 1:
        raise NotImplementedError("Mamba's slow path has one B and C for all channels")

    def by_head(
        state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: bool
    ) -> Any:
        A = A[:, None, None].expand(state.shape[1:])
        D, dt_bias = (t[:, None].expand(state.shape[1:3]) for t in (D, dt_bias))
        dt = dt[..., None].expand(x.shape)
        return heads(state, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)

    def by_channel(
        state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, dt_softplus: bool
    ) -> Any:
        state, x, dt, B, C, z = (t[:, 0] for t in (state, x, dt, B, C, z))
        y = channels(state, x, dt, A[0], B, C, D=D[0], dt_bias=dt_bias[0], dt_softplus=dt_softplus, z=z)
        return y[:, None]

    return by_head if case.options["form"] == "head" else by_channel


def gated_rms_norm(case: Any) -> Callable[..., Any]:
    """`MambaRMSNormGated`, its code on our weight."""
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    if case.options["order"] != "gate_first":
        raise NotImplementedError("MambaRMSNormGated applies the gate before the norm only")
    forward: Any = MambaRMSNormGated.forward

    def call(x: Any, z: Any, weight: Any, eps: float, group: int, order: str) -> Any:
        module: Any = SimpleNamespace(weight=weight, variance_epsilon=eps, group_size=group)
        return forward(module, x, z)

    return call


class _Model:
    """A model of its own class, as its users run it: what `forward` measures."""

    def load(self, chosen: Any, B: int, S: int, dtype: str, weights: Any) -> None:
        """Builds the model, its weights ours."""
        self._model = _transformers_models.build(chosen, S, weights)
        self._arguments = {} if chosen.model.name == "bert" else {"use_cache": False}

    def __call__(self, tokens: Any) -> Any:
        """Logits (B, S, V)."""
        import torch

        with torch.inference_mode():
            return self._model(tokens, **self._arguments).logits


class _Generate:
    """`model.generate`, greedy, with a cache that grows: what `generate` measures."""

    cache_bytes = None

    def load(self, chosen: Any, B: int, S: int, N: int, dtype: str, weights: Any) -> None:
        """Builds the model, its weights ours."""
        self._model = _transformers_models.build(chosen, S + N, weights)

    def _cache(self) -> Any:
        """What steps of given tokens keep; None for what the model chooses."""
        return None

    def generate(self, prompt: Any, N: int, stamp: Callable[[], None]) -> Any:
        """N tokens (B, N); its streamer is given the prompt first, and then each step's tokens."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Stamps(BaseStreamer):
            begun = False

            def put(self, value: Any) -> None:
                if self.begun:
                    stamp()
                self.begun = True

            def end(self) -> None:
                pass

        found = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=N,
            min_new_tokens=N,
            do_sample=False,
            streamer=Stamps(),
            pad_token_id=0,
        )
        return found[:, prompt.shape[1] :]

    def forced(self, prompt: Any, following: Any) -> Any:
        """Logits (B, n + 1, V) after the prompt and given tokens, each step with the cache of those before."""
        import torch

        with torch.inference_mode():
            out = self._model(prompt, past_key_values=self._cache(), use_cache=True, logits_to_keep=1)
            found = [out.logits[:, -1]]
            for token in following.unbind(1):
                cache = out.past_key_values
                out = self._model(token[:, None], past_key_values=cache, use_cache=True)
                found.append(out.logits[:, -1])
        return torch.stack(found, 1)


class _GenerateCompiled(_Generate):
    """`model.generate` with a cache of fixed size, for which it compiles its decode steps by itself on a GPU."""

    def load(self, chosen: Any, B: int, S: int, N: int, dtype: str, weights: Any) -> None:
        """Builds the model, its weights ours."""
        super().load(chosen, B, S, N, dtype, weights)
        self._longest = S + N
        self._model.generation_config.cache_implementation = "static"

    def _cache(self) -> Any:
        from transformers import StaticCache

        return StaticCache(self._model.config, max_cache_len=self._longest)


def generate(case: Any) -> _Generate:
    """`model.generate` of its own class, attention by `sdpa`."""
    _steps(case)
    return _Generate()


def generate_compiled(case: Any) -> _GenerateCompiled:
    """The same with a static cache, its decode steps by torch.compile."""
    _steps(case)
    return _GenerateCompiled()


def generate_batch(case: Any) -> _transformers_batches.Generate:
    """Its continuous batching."""
    return _transformers_batches.Generate()


def _steps(case: Any) -> None:
    if str(case.options["model"]).startswith("mamba"):
        raise NotImplementedError("its Mamba classes keep another cache, which this baseline does not step")


class _Serve(_transformers_models.Folder):
    """`transformers serve`."""

    def command(self, folder: Any, port: int, longest: int, device: str) -> list[str]:
        """Its own command, in the interpreter that runs us."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--device", device]
        return [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), *where]


def serve(case: Any) -> _Serve:
    """`transformers serve` on a folder with our weights, by chats: it takes no token ids."""
    for name in ("accelerate", "fastapi", "openai", "uvicorn"):  # its extra `serving`
        importlib.import_module(name)
    return _Serve()


def model(case: Any) -> _Model:
    """`AutoModelForCausalLM` or `AutoModelForMaskedLM`, attention by `sdpa`."""
    return _Model()


def train(case: Any) -> _transformers_models.Training:
    """`AutoModelForCausalLM` with the loss that it computes of its logits, attention by `sdpa`."""
    _alone(case)
    return _transformers_models.Training()


def train_compiled(case: Any) -> _transformers_models.Training:
    """The same by torch.compile."""
    import torch

    _alone(case)
    return _transformers_models.Training(lambda family, model: torch.compile(model, dynamic=False))


def train_liger(case: Any) -> _transformers_models.Training:
    """Llama with Liger's `apply_liger_kernel_to_llama`: its norms, its gated activation, and its loss, which holds
    no logits. Its rotary positions take the place of a function of Transformers' module, for every model in this
    process; they are left out.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    _alone(case)

    def patch(family: str, model: Any) -> Any:
        if family != "llama":
            raise NotImplementedError(f"Liger has no patch of Transformers' {family}")
        apply_liger_kernel_to_llama(rope=False, model=model)
        return model

    return _transformers_models.Training(patch)


def _alone(case: Any) -> None:
    if case.world > 1:
        raise NotImplementedError("its model classes train in one process here")


def _layer(case: Any) -> SimpleNamespace:
    """What its functions ask of the layer that they are called for."""
    return SimpleNamespace(num_key_value_groups=case.axes["H"] // case.axes["Hkv"], training=False)


IMPLEMENTATIONS = {
    "attention": {"transformers": attention, "transformers_eager": attention_eager},
    "attention_window": {"transformers": attention, "transformers_eager": attention_eager},
    "forward": {"transformers_model": model},
    "gated_rms_norm": {"transformers": gated_rms_norm},
    "generate": {
        "transformers_generate": generate,
        "transformers_generate_batch": generate_batch,
        "transformers_generate_compiled": generate_compiled,
    },
    "gelu": {"transformers": gelu, "transformers_gelu_new": gelu_new},
    "rms_norm": {"transformers": rms_norm},
    "rope": {"transformers": rope},
    "selective_scan": {"transformers": selective_scan},
    "selective_state_update": {"transformers": selective_state_update},
    "serve": {"transformers_serve": serve},
    "ssd": {"transformers": ssd},
    "train": {
        "transformers_model": train,
        "transformers_model_compiled": train_compiled,
        "transformers_model_liger": train_liger,
    },
}
