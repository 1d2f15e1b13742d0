"""All-reduce in 8 bits with error feedback on a CPU: the steps of `kernels/collective`, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.distributed as dist

GROUP = 128
LARGEST = {"int8": 127.0, "fp8": 448.0}


def all_reduce_quantized(
    x: torch.Tensor, residual: torch.Tensor, scheme: str = "int8"
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N,) and residual fp32 (N,) to the sum over ranks of both and the new residual.

    See `kernels/collective/all_reduce_quantized.py`.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    N = x.numel()
    if more := -N % (GROUP * world):
        x, residual = (torch.nn.functional.pad(y, (0, more)) for y in (x, residual))
        out, rest = all_reduce_quantized(x, residual, scheme)
        return out[:N], rest[:N]
    values, scales, rest = _quantized((x.float() + residual).view(-1, GROUP), scheme)
    theirs, their_scales = torch.empty_like(values), torch.empty_like(scales)
    dist.all_to_all_single(_bytes(theirs), _bytes(values))
    dist.all_to_all_single(their_scales, scales)
    total = (theirs.float() * their_scales).view(world, -1, GROUP).sum(0)
    sums, sum_scales, lost = _quantized(total, scheme)
    chunk = N // world
    rest.view(-1)[rank * chunk : (rank + 1) * chunk] += lost.view(-1)
    whole, whole_scales = torch.empty_like(values), torch.empty_like(scales)
    dist.all_gather_into_tensor(_bytes(whole), _bytes(sums))
    dist.all_gather_into_tensor(whole_scales, sum_scales)
    return (whole.float() * whole_scales).to(x.dtype).view(N), rest.view(N)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """As groups of processes take them, which know no E4M3."""
    return values.view(torch.uint8)


def _quantized(groups: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(groups, 128) to values of 8 bits, fp32 scales (groups, 1) and what rounding lost."""
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST[scheme]
    scaled = groups / scales
    values = scaled.round().to(torch.int8) if scheme == "int8" else scaled.to(torch.float8_e4m3fn)
    return values, scales, groups - values.float() * scales
