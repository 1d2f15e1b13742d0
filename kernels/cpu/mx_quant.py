"""Quantization to block formats on a CPU: loops for the maxima and the elements, by Inductor."""

from __future__ import annotations

import torch


@torch.compile(dynamic=False)
def mx_quant(x: torch.Tensor, format: str, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N) to q, scales: float8_e4m3fn or two E2M1 a byte; E8M0 as bytes, or float8_e4m3fn for nvfp4."""
    M, N = x.shape
    group = 16 if format == "nvfp4" else 32
    wide = torch.nn.functional.pad(x, (0, -N % group)).view(M, -1, group).float()
    largest = wide.abs().amax(-1, keepdim=True)
    if scale is not None:
        scales = (largest / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn)
        part = scales.float() * scale
        y = wide * torch.where(part == 0, 0, 1 / part)
    else:
        power = ((largest.view(torch.int32) >> 23) - (8 if format == "mxfp8" else 2)).clamp(min=0)
        scales = power.to(torch.uint8)
        y = wide * ((254 - power) << 23).view(torch.float32)
    scales = scales.squeeze(-1)
    if format == "mxfp8":
        return y.clamp(-448, 448).to(torch.float8_e4m3fn).view(M, -1)[:, :N], scales
    a = y.abs()
    code = torch.minimum(torch.minimum(2 * a, a + 2), (0.5 * a + 4).clamp(max=7)).round().to(torch.uint8)
    code = (code | (torch.signbit(y).to(torch.uint8) << 3)).view(M, -1)
    return (code[:, ::2] | (code[:, 1::2] << 4))[:, : -(-N // 2)], scales
