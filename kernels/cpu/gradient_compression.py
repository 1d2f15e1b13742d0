"""Gradient compression on a CPU: fused loops by Inductor, and PyTorch's top-k."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


@torch.compile(dynamic=False)
def _quantized(
    gradient: torch.Tensor, residual: torch.Tensor, scheme: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = pad(gradient.float() + residual.float(), (0, -gradient.numel() % 128)).view(-1, 128)
    largest, dtype = (127.0, torch.int8) if scheme == "int8" else (448.0, torch.float8_e4m3fn)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    scaled = (groups / scale).round() if scheme == "int8" else groups / scale
    sent = scaled.to(dtype)
    # In whole groups: torch 2.13 compiles a slice of them here to a loop that leaves out the last, partial one.
    return sent, scale, (groups - sent.float() * scale).to(residual.dtype)


def gradient_compression(
    gradient: torch.Tensor, residual: torch.Tensor, scheme: str, keep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """gradient, residual (N,) to payload (bytes,) uint8 and new residual.

    See `kernels/quantization/gradient_compression.py`.
    """
    N = gradient.numel()
    if scheme != "topk":
        sent, scale, rest = _quantized(gradient, residual, scheme)
        payload = torch.cat([sent.view(-1).view(torch.uint8), scale.view(-1).view(torch.uint8)])
        return payload, rest.view(-1)[:N]
    total = pad((gradient.float() + residual.float()).to(gradient.dtype), (0, -N % 1024)).view(-1, 1024)
    magnitude = total.abs()
    magnitude.view(-1)[N:] = -1
    places = magnitude.topk(keep, -1).indices
    values = total.gather(-1, places)
    rest = total.scatter_(-1, places, 0).view(-1)[:N].to(residual.dtype)
    parts = (values.view(-1).view(torch.uint8), places.to(torch.int16).view(-1).view(torch.uint8))
    return torch.cat(parts), rest
