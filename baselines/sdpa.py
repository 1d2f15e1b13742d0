"""`torch.nn.functional.scaled_dot_product_attention`, each of its backends by itself.

The choice is made as a user makes it, with `torch.nn.attention.sdpa_kernel` around every call; its few
microseconds of host time are part of what such a call costs. The backward pass is the backend's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from . import _blocks

REQUIRES = ("torch",)
DEVICES = {"sdpa_cudnn": ("cuda",), "sdpa_efficient": ("cuda",)}


def _forced(backend: str, cuda_only: bool = False, grouped: bool = True) -> Callable[[Any], Callable[..., Any]]:
    """A factory for one backend, which runs nothing but that backend."""

    def factory(case: Any) -> Callable[..., Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        chosen = getattr(SDPBackend, backend)
        _blocks.takes(case, "scaled_dot_product_attention", "Sk")
        groups = _blocks.grouped(case)
        causal = case.options["mask"] == "causal"
        S, Sk = case.axes["S"], _blocks.keys(case)
        # Its own causal mask is aligned to the first query and key.
        masked = {"attn_mask": causal_lower_right(S, Sk)} if causal and Sk != S else {"is_causal": causal}
        if groups and not grouped:
            raise NotImplementedError(f"{backend} has no grouped key and value heads")

        def call(q: Any, k: Any, v: Any, mask: str) -> Any:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, **masked, enable_gqa=groups)

        def first(q: Any, k: Any, v: Any, mask: str) -> Any:
            """The first call, which finds out whether the backend takes this case, and says why not."""
            if cuda_only and q.device.type != "cuda":
                raise NotImplementedError(f"{backend} exists for CUDA only")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    return call(q, k, v, mask)
                except RuntimeError as error:
                    if not str(error).startswith(("No available kernel", "No viable backend")):
                        raise
                    raise NotImplementedError(_reason(backend, [str(x.message) for x in caught])) from None

        return _after(first, call)

    return factory


def _windowless(name: str) -> Callable[[Any], Callable[..., Any]]:
    """Says that there is no window; PyTorch's own choice with a mask of elements is in `torch.py`."""

    def factory(case: Any) -> Callable[..., Any]:
        raise NotImplementedError(f"scaled_dot_product_attention has no window to give to {name}")

    return factory


def _after(first: Callable[..., Any], rest: Callable[..., Any]) -> Callable[..., Any]:
    """`first` for the first call, `rest` for all others."""
    current = first

    def call(**inputs: Any) -> Any:
        nonlocal current
        result = current(**inputs)
        current = rest
        return result

    return call


def _reason(backend: str, messages: list[str]) -> str:
    """The first warning that says more than that something follows or was switched off (the others are)."""
    for message in messages:
        text = message.split(" (Triggered internally")[0].strip()
        if not text.endswith(("not used because:", "has been runtime disabled.")):
            return f"{backend}: {text}"
    return f"{backend} does not take this case"


IMPLEMENTATIONS = {
    "attention": {
        "sdpa_flash": _forced("FLASH_ATTENTION"),
        "sdpa_cudnn": _forced("CUDNN_ATTENTION", cuda_only=True),
        "sdpa_efficient": _forced("EFFICIENT_ATTENTION", cuda_only=True, grouped=False),
        "sdpa_math": _forced("MATH"),
    },
    "attention_mla": {
        "sdpa_flash": _forced("FLASH_ATTENTION"),
        "sdpa_cudnn": _forced("CUDNN_ATTENTION", cuda_only=True),
        "sdpa_efficient": _forced("EFFICIENT_ATTENTION", cuda_only=True, grouped=False),
    },
    "attention_window": {
        "sdpa_flash": _windowless("FLASH_ATTENTION"),
        "sdpa_cudnn": _windowless("CUDNN_ATTENTION"),
        "sdpa_efficient": _windowless("EFFICIENT_ATTENTION"),
    },
}
