"""One decode step of a selective state-space model (Gu and Dao, arXiv 2312.00752; Dao and Gu, 2405.21060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """state (B, H, P, N); x (B, H, P); B and C (B, G, N); steps and decays as a model is initialized.

    Form head is Mamba-2's: dt (B, H), A, D and dt_bias (H,), no z. Form channel is Mamba-1's: dt and z
    (B, H, P), A (H, P, N), D and dt_bias (H, P). A is -1 to -16; softplus(dt_bias) is log-uniform in
    [0.001, 0.1]. A, D and dt_bias are fp32, the state is fp32 or of the case's dtype, the rest is of that.
    """
    import torch

    B, H, P, N, G = (case.axes[axis] for axis in ("B", "H", "P", "N", "G"))
    dtype = torch_dtype(case.dtype)
    head = case.options["form"] == "head"
    each = (H,) if head else (H, P)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, generator=generator)

    step = 0.001 * 100.0 ** uniform(*each)
    rate = 1 + 15 * uniform(H) if head else torch.arange(1.0, N + 1, device=device).expand(H, P, N).contiguous()
    return {
        "state": normal(B, H, P, N, dtype=torch.float32 if case.options["state"] == "fp32" else dtype),
        "x": normal(B, H, P),
        "dt": normal(B, *each),
        "A": -rate,
        "B": normal(B, G, N),
        "C": normal(B, G, N),
        "D": normal(*each, dtype=torch.float32),
        "z": None if head else normal(B, H, P),
        "dt_bias": step.expm1().log(),
        "dt_softplus": True,
    }


def reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, state): exp(dt · A) · state + dt · x ⊗ B, and its product with C, plus D · x, times silu(z)."""
    import torch

    assert dt_softplus
    H = state.shape[1]
    step = torch.nn.functional.softplus(dt + dt_bias, threshold=50.0)
    if A.dim() == 1:
        step, A, D = step[..., None], A[:, None, None], D[:, None]
    enters, leaves = (m.repeat_interleave(H // m.shape[1], 1)[:, :, None] for m in (B, C))
    state = state * (step[..., None] * A).exp() + (step * x)[..., None] * enters
    y = (state * leaves).sum(-1) + D * x
    return y if z is None else y * torch.nn.functional.silu(z), state


def results(result: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call returns, y, and what it leaves in the state."""
    return result, inputs["state"]


def bytes_(case: Case) -> int:
    """Reads and writes the state; reads x, dt, B, C, z and the parameters, writes y."""
    B, H, P, N, G = (case.axes[axis] for axis in ("B", "H", "P", "N", "G"))
    head = case.options["form"] == "head"
    wide = 4 if case.options["state"] == "fp32" else BYTES[case.dtype]
    each = H if head else H * P
    parameters = 4 * (2 * each + (H if head else H * P * N))
    small = B * (2 * H * P + each + 2 * G * N + (0 if head else H * P))
    return 2 * B * H * P * N * wide + small * BYTES[case.dtype] + parameters


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="selective_state_update",
    summary="one decode step of a selective state-space model, state in place",
    axes={"B": "batch", "H": "heads", "P": "head dimension", "N": "state", "G": "groups of B and C"},
    options={"form": ("head", "channel"), "state": ("fp32", "same")},
    inputs=inputs,
    reference=reference,
    results=results,
    in_place=("state",),
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"],
    plans={
        "quick": (grid("forward", B=128, H=80, P=64, N=128, G=1),),
        "quick_cpu": (grid("forward", B=2, H=8, P=64, N=64, G=1, dtypes="fp32"),),
        "standard": (
            grid("forward", B=[1, 32, 256], H=80, P=64, N=128, G=1),
            grid("forward", B=256, H=80, P=64, N=128, G=1, options={"state": "same"}),
            grid("forward", B=[32, 1024], H=1, P=8192, N=16, G=1, options={"form": "channel"}),
        ),
        "full": (
            grid("forward", B=128, H=80, P=64, N=128, G=1, dtypes=["fp16", "fp32"]),
            grid("forward", B=128, H=128, P=64, N=128, G=8),
            grid("forward", B=63, H=3, P=50, N=20, G=3, options={"form": ["head", "channel"]}),
        ),
    },
)
