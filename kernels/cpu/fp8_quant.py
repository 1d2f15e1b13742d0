"""Dynamic quantization to 8-bit floats on a CPU: a loop for the maxima, one for the values, by Inductor."""

from __future__ import annotations

import torch


@torch.compile(dynamic=False)
def fp8_quant(x: torch.Tensor, granularity: str, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N) to q (M, N) in the fp8 format and fp32 scales, (M, 1) by row or (M, ceil(N/128)) by block."""
    dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
    M, N = x.shape
    wide = x.float()
    if granularity == "block":
        wide = torch.nn.functional.pad(wide, (0, -N % 128)).view(M, -1, 128)
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(dtype).max
    q = (wide / scale).to(dtype)
    return (q, scale) if granularity == "row" else (q.view(M, -1)[:, :N], scale.squeeze(-1))
