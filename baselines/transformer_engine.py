"""NVIDIA Transformer Engine: its fused operations, attention, loss and Adam, and models of its layers.

Its PyTorch part is built from source with nvcc and cuDNN's headers: an environment of its own.
"""

from __future__ import annotations

from typing import Any

from . import _blocks
from ._terms import Call, forcing, refusing, sparing
from ._transformer_engine_layers import Layers

REQUIRES = ("transformer-engine", "transformer-engine-torch")
ENVIRONMENT = "transformer_engine"
DEVICES = ("cuda",)


def _on(module: Any, **parameters: Any) -> Any:
    """A module's result of x with our tensors for its parameters, which it would otherwise make itself."""
    from torch.func import functional_call

    x = parameters.pop("x")
    return functional_call(module, parameters, (x,))


def _again(case: Any, call: Call) -> Call:
    """Its operations let go of what they saved at the first backward pass: to be repeated, they get copies."""
    return sparing(call) if case.pass_ == "backward" else call


def rms_norm(case: Any) -> Call:
    """`transformer_engine.pytorch.ops.RMSNorm`."""
    from transformer_engine.pytorch import ops

    module: Any = None

    def call(x: Any, weight: Any, eps: float) -> Any:
        nonlocal module
        if module is None:
            module = ops.RMSNorm(x.shape[-1], eps=eps, device=x.device, dtype=x.dtype)
        return _on(module, x=x, weight=weight)

    return _again(case, call)


def layer_norm(case: Any) -> Call:
    """`transformer_engine.pytorch.ops.LayerNorm`."""
    from transformer_engine.pytorch import ops

    module: Any = None

    def call(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        nonlocal module
        if module is None:
            module = ops.LayerNorm(x.shape[-1], eps=eps, device=x.device, dtype=x.dtype)
        return _on(module, x=x, weight=weight, bias=bias)

    return _again(case, call)


def gelu(case: Any) -> Call:
    """`transformer_engine.pytorch.ops.GELU`, the tanh form."""
    from transformer_engine.pytorch import ops

    if case.options["approximate"] != "tanh":
        raise NotImplementedError("Transformer Engine has the tanh form only")
    module = ops.GELU()
    return _again(case, lambda x, approximate: module(x))


def _gated(name: str) -> Any:
    def factory(case: Any) -> Call:
        import torch
        from transformer_engine.pytorch import ops

        module = getattr(ops, name)()

        def conversion(gate: Any, up: Any) -> Any:
            return torch.cat((gate, up), -1)

        return forcing(_again(case, lambda gate, up: module(conversion(gate, up))), conversion)

    factory.__doc__ = (
        f"`transformer_engine.pytorch.ops.{name}`, of gate and up side by side: laid so inside the call."
    )
    return factory


def cross_entropy(case: Any) -> Call:
    """`transformer_engine.pytorch.parallel_cross_entropy` on one device."""
    from transformer_engine.pytorch import parallel_cross_entropy

    if case.options["regularized"]:
        raise NotImplementedError("Transformer Engine's parallel_cross_entropy has no z-loss")
    return lambda logits, target: parallel_cross_entropy(logits[None], target[None], 0.0, True)


def attention(case: Any) -> Call:
    """`transformer_engine.pytorch.DotProductAttention`, which chooses cuDNN or FlashAttention; a window is its
    `window_size`.

    It takes (B, S, H, D) as it lies in memory: our (B, H, S, D) is copied to that order inside the call.
    """
    from transformer_engine.pytorch import DotProductAttention

    _blocks.takes(case, "DotProductAttention as it is called here", "Sk")
    H, Hkv, D = (case.axes[axis] for axis in ("H", "Hkv", "D"))
    causal = case.options["mask"] == "causal"
    if "W" in case.axes and not causal and _blocks.keys(case) != case.axes["S"]:
        raise NotImplementedError("DotProductAttention aligns a window without a mask to the first query and key")
    windowed = {"window_size": _blocks.reach(case)} if "W" in case.axes else {}
    kind = "causal_bottom_right" if _blocks.keys(case) != case.axes["S"] else "causal"
    kind = kind if causal else "no_mask"
    module = DotProductAttention(H, D, num_gqa_groups=Hkv, qkv_format="bshd", attn_mask_type=kind, **windowed)

    def conversion(q: Any, k: Any, v: Any, mask: str, window: int = 0) -> Any:
        return tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0) -> Any:
        return module(*conversion(q, k, v, mask)).unflatten(-1, (H, D)).transpose(1, 2)

    return forcing(call, conversion)


def _context_parallel(how: str) -> Any:
    """A factory for one of the ways by which `DotProductAttention` brings ranks' tokens together."""

    def factory(case: Any) -> Call:
        import torch
        import torch.distributed as dist
        from transformer_engine.pytorch import DotProductAttention

        _shares(case, how)
        H, Hkv, D = (case.axes[axis] for axis in ("H", "Hkv", "D"))
        kind = "causal" if case.options["mask"] == "causal" else "no_mask"
        module = DotProductAttention(H, D, num_gqa_groups=Hkv, qkv_format="bshd", attn_mask_type=kind)
        group = dist.group.WORLD
        module.set_context_parallel_group(group, dist.get_process_group_ranks(group), torch.cuda.Stream(), how)

        def conversion(q: Any, k: Any, v: Any, mask: str) -> Any:
            return tuple(x.transpose(1, 2).contiguous() for x in (q, k, v))

        def call(q: Any, k: Any, v: Any, mask: str) -> Any:
            return module(*conversion(q, k, v, mask)).unflatten(-1, (H, D)).transpose(1, 2)

        return refusing(forcing(call, conversion), AssertionError, ValueError)

    factory.__doc__ = f"""`transformer_engine.pytorch.DotProductAttention` of a context parallel group, by "{how}".

    Its ranks hold chunks r and 2·P - 1 - r as ours do (`attn_forward_func_with_cp` of its `context_parallel`).
    It takes (B, S, H, D) as it lies in memory: copied to that order inside the call. Not run yet.
    """
    return factory


def _shares(case: Any, how: str) -> None:
    """Raises NotImplementedError for what its context parallelism does not compute."""
    if case.world == 1:
        raise NotImplementedError("one rank has nothing to bring: `attention` is that case")
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError(
            f"cuDNN and FlashAttention, over which it shares a sequence, have no {case.dtype}"
        )
    if case.pass_ == "backward":
        raise NotImplementedError(
            "its first backward pass lets go of what forward saved: it cannot be repeated alone"
        )
    few = [x for x in (case.axes["H"], case.axes["Hkv"]) if x % case.world]
    if how == "a2a" and few:
        raise NotImplementedError(f"{few[0]} heads cannot be shared by {case.world} ranks")


def attention_varlen(case: Any) -> Call:
    """`transformer_engine.pytorch.DotProductAttention` on packed tokens, its layout `thd`."""
    from transformer_engine.pytorch import DotProductAttention

    _blocks.takes(case, "DotProductAttention as it is called here", "Sk")
    H, Hkv, D = (case.axes[axis] for axis in ("H", "Hkv", "D"))
    causal, other = case.options["mask"] == "causal", case.options["keys"] != "same"
    if case.axes["W"] and other and not causal:
        raise NotImplementedError("DotProductAttention aligns a window without a mask to the first query and key")
    kind = "padding" if not causal else "padding_causal_bottom_right" if other else "padding_causal"
    windowed = {"window_size": _blocks.reach(case)} if case.axes["W"] else {}
    module = DotProductAttention(H, D, num_gqa_groups=Hkv, qkv_format="thd", attn_mask_type=kind, **windowed)

    def call(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        mask: str,
        **rest: Any,
    ) -> Any:
        return module(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_k,
        ).view(q.shape)

    return call


def adamw(case: Any) -> Call:
    """The kernel of `transformer_engine.pytorch.optimizers.FusedAdam`, which knows masters.

    As with PyTorch's, the optimizer's own work around it on the host is left out.
    """
    import torch
    import transformer_engine_torch
    from transformer_engine.pytorch.optimizers import multi_tensor_applier

    overflow: Any = None

    def call(
        params: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        masters: Any,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        nonlocal overflow
        if overflow is None:
            overflow = torch.zeros(1, dtype=torch.int32, device=params[0].device)
        lists = [grads, params, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]
        multi_tensor_applier(
            transformer_engine_torch.multi_tensor_adam, overflow, lists,
            lr, beta1, beta2, eps, step, 1, 1, weight_decay,
        )  # fmt: skip

    return call


def quantized_linear(case: Any) -> Call:
    """`transformer_engine.pytorch.LayerNormLinear` quantizes its weight itself."""
    raise NotImplementedError(
        "Transformer Engine's LayerNormLinear takes a weight in 16 bits and quantizes it itself; here it is E4M3"
    )


def _train(recipe: str | None) -> Any:
    def factory(case: Any) -> Layers:
        if case.world > 1:
            raise NotImplementedError("Transformer Engine's layers are trained in one process here")
        if recipe is not None and case.options["products"] == "dtype":
            raise NotImplementedError(f"this case's products are in {case.dtype}; float8 is another recipe's")
        if recipe is not None and case.dtype != "bf16":
            raise NotImplementedError("Transformer Engine's layers multiply in 8 bits beside bf16 here")
        return Layers(recipe)

    how = "in the weights' dtype" if recipe is None else f"in 8 bits by `{recipe}`"
    factory.__doc__ = (
        f"`TransformerLayer`s, its last norm and `parallel_cross_entropy`, {how}; PyTorch's fused AdamW."
    )
    return factory


IMPLEMENTATIONS = {
    "train": {
        "transformer_engine_layers": _train(None),
        "transformer_engine_layers_tensorwise": _train("Float8CurrentScaling"),
        "transformer_engine_layers_delayed": _train("DelayedScaling"),
        "transformer_engine_layers_1x128": _train("Float8BlockScaling"),
    },
    "quantized_linear": {"transformer_engine": quantized_linear},
    "adamw": {"transformer_engine": adamw},
    "attention": {"transformer_engine": attention},
    "attention_context_parallel": {
        "transformer_engine_cp_p2p": _context_parallel("p2p"),
        "transformer_engine_cp_all_gather": _context_parallel("all_gather"),
        "transformer_engine_cp_a2a": _context_parallel("a2a"),
    },
    "attention_window": {"transformer_engine": attention},
    "attention_varlen": {"transformer_engine": attention_varlen},
    "cross_entropy": {"transformer_engine": cross_entropy},
    "geglu": {"transformer_engine": _gated("GEGLU")},
    "gelu": {"transformer_engine": gelu},
    "layer_norm": {"transformer_engine": layer_norm},
    "rms_norm": {"transformer_engine": rms_norm},
    "swiglu": {"transformer_engine": _gated("SwiGLU")},
}
