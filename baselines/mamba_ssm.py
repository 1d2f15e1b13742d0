"""mamba-ssm (Tri Dao and Albert Gu): its Triton operators, which need none of its CUDA extensions.

`import mamba_ssm` imports the extension of Mamba-1's scan first of all, which is not there unless it was built for
this device. So the package is entered below its `__init__`, as the files are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

REQUIRES = ("mamba-ssm", "einops", "triton")
ENVIRONMENT = "mamba"
DEVICES = ("cuda",)


def module(name: str) -> Any:
    """The module `mamba_ssm.<name>`, without what `mamba_ssm/__init__.py` would import."""
    if "mamba_ssm" not in sys.modules:
        found = importlib.util.find_spec("mamba_ssm")
        if found is None or not found.submodule_search_locations:
            raise ImportError("mamba_ssm is not installed")
        package = ModuleType("mamba_ssm")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
    return importlib.import_module(f"mamba_ssm.{name}")


def ssd(case: Any) -> Callable[..., Any]:
    """`mamba_chunk_scan_combined`, in chunks of 256 as its models call it.

    An initial state is that of sequence 0, which is the first of a row here too.
    """
    function = module("ops.triton.ssd_combined").mamba_chunk_scan_combined

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
        return function(
            x,
            dt,
            A,
            B,
            C,
            256,
            D=D,
            dt_bias=dt_bias,
            initial_states=initial_state,
            seq_idx=seq_idx,
            dt_softplus=dt_softplus,
            return_final_states=return_final_state,
        )

    return call


def mamba3(case: Any) -> Callable[..., Any]:
    """`mamba3_siso_combined`, called as its module Mamba3 does: what belongs to heads with time last, and angles
    of all heads, as views. It computes in bf16, whatever it is given.
    """
    if case.dtype != "bf16":
        raise NotImplementedError("mamba3_siso_combined rounds its inputs to bf16")
    if case.axes["A"] % 2:
        raise NotImplementedError("mamba3_siso_combined takes an even number of angles")
    function = module("ops.triton.mamba3.mamba3_siso_combined").mamba3_siso_combined

    def call(
        x: Any,
        B: Any,
        C: Any,
        dt: Any,
        adt: Any,
        trap: Any,
        angles: Any,
        B_bias: Any,
        C_bias: Any,
        D: Any,
        z: Any,
    ) -> Any:
        dt, adt, trap = (t.transpose(1, 2) for t in (dt, adt, trap))
        turns = angles[:, :, None].expand(-1, -1, x.shape[2], -1)
        return function(C, B, x, adt, dt, trap, C_bias, B_bias, turns, D=D, Z=z, chunk_size=64)

    return call


def selective_state_update(case: Any) -> Callable[..., Any]:
    """`selective_state_update`; steps and decays of heads as expanded views, by which it knows them as such."""
    function = module("ops.triton.selective_state_update").selective_state_update

    def call(
        state: Any,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        z: Any,
        dt_bias: Any,
        dt_softplus: bool,
    ) -> Any:
        if A.dim() == 1:
            A = A[:, None, None].expand(state.shape[1:])
            D, dt_bias = (t[:, None].expand(state.shape[1:3]) for t in (D, dt_bias))
            dt = dt[..., None].expand(x.shape)
        return function(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)

    return call


def selective_scan(case: Any) -> Callable[..., Any]:
    """`selective_scan_fn`, which is CUDA and has to be built for this device."""
    importlib.import_module("selective_scan_cuda")
    return _scan(module("ops.selective_scan_interface").selective_scan_fn)


def selective_scan_reference(case: Any) -> Callable[..., Any]:
    """`selective_scan_ref`: PyTorch's operations, token by token, with the decays of all tokens in memory."""
    if case.axes["S"] > 8192:
        raise NotImplementedError("token by token: beyond 8192 of them a call takes seconds")
    absent = importlib.util.find_spec("selective_scan_cuda") is None
    if absent:
        # Imported beside it, and not used by it.
        sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    try:
        return _scan(module("ops.selective_scan_interface").selective_scan_ref)
    finally:
        if absent:
            del sys.modules["selective_scan_cuda"]


def _scan(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, delta_softplus: bool
    ) -> Any:
        return function(u, delta, A, B, C, D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus)

    return call


def gated_rms_norm(case: Any) -> Callable[..., Any]:
    """`rmsnorm_fn` of its gated layer norm."""
    function = module("ops.triton.layernorm_gated").rmsnorm_fn

    def call(x: Any, z: Any, weight: Any, eps: float, group: int, order: str) -> Any:
        size = None if group == x.shape[-1] else group
        return function(x, weight, None, z=z, eps=eps, group_size=size, norm_before_gate=order == "norm_first")

    return call


IMPLEMENTATIONS = {
    "gated_rms_norm": {"mamba_ssm": gated_rms_norm},
    "mamba3": {"mamba_ssm": mamba3},
    "selective_scan": {"mamba_ssm": selective_scan, "mamba_ssm_reference": selective_scan_reference},
    "selective_state_update": {"mamba_ssm": selective_state_update},
    "ssd": {"mamba_ssm": ssd},
}
