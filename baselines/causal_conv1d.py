"""causal-conv1d (Tri Dao): its CUDA operators, where they were built for this device, and its reference."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

REQUIRES = ("causal-conv1d",)
ENVIRONMENT = "mamba"
DEVICES = ("cuda",)


def _interface(built: bool) -> Any:
    """`causal_conv1d.causal_conv1d_interface`; unless the operators are asked for, without the extension."""
    if built:
        importlib.import_module("causal_conv1d_cuda")
    absent = importlib.util.find_spec("causal_conv1d_cuda") is None
    if absent:
        # Imported by the interface, and not used by its reference.
        sys.modules["causal_conv1d_cuda"] = ModuleType("causal_conv1d_cuda")
    try:
        return importlib.import_module("causal_conv1d.causal_conv1d_interface")
    finally:
        if absent:
            del sys.modules["causal_conv1d_cuda"]


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, weight: Any, bias: Any, initial_state: Any, activation: str, layout: str) -> Any:
        if layout == "bsd":
            # It tells the layout by the strides.
            x = x.transpose(1, 2)
            initial_state = None if initial_state is None else initial_state.transpose(1, 2)
        kind = "silu" if activation == "silu" else None
        y = function(x, weight, bias, initial_states=initial_state, activation=kind)
        return y.transpose(1, 2) if layout == "bsd" else y

    return call


def causal_conv1d(case: Any) -> Callable[..., Any]:
    """`causal_conv1d_fn`."""
    if case.options["initial"] and case.options["layout"] == "bds":
        raise NotImplementedError("causal_conv1d_fn takes an initial state with contiguous channels only")
    return _forward(_interface(built=True).causal_conv1d_fn)


def causal_conv1d_reference(case: Any) -> Callable[..., Any]:
    """`causal_conv1d_ref`: PyTorch's grouped convolution."""
    return _forward(_interface(built=False).causal_conv1d_ref)


def causal_conv1d_update(case: Any) -> Callable[..., Any]:
    """`causal_conv1d_update`."""
    return _step(_interface(built=True).causal_conv1d_update)


def causal_conv1d_update_reference(case: Any) -> Callable[..., Any]:
    """`causal_conv1d_update_ref`: PyTorch's grouped convolution."""
    return _step(_interface(built=False).causal_conv1d_update_ref)


def _step(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, conv_state: Any, weight: Any, bias: Any, activation: str) -> Any:
        return function(x, conv_state, weight, bias, activation="silu" if activation == "silu" else None)

    return call


IMPLEMENTATIONS = {
    "causal_conv1d": {"causal_conv1d": causal_conv1d, "causal_conv1d_reference": causal_conv1d_reference},
    "causal_conv1d_update": {
        "causal_conv1d": causal_conv1d_update,
        "causal_conv1d_reference": causal_conv1d_update_reference,
    },
}
