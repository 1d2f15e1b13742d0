"""Dynamic quantization to 8-bit floats on a CPU: a loop for the maxima, one for the values, by Inductor."""

from __future__ import annotations

import torch


@torch.compile(dynamic=False)
def fp8_quant(x: torch.Tensor, granularity: str, format: str) -> tuple[torch.Tensor, ...]:
    """x (M, N) to q (M, N) in the fp8 format and fp32 scales.

    The scales are (M, 1) by row, (M, ceil(N/128)) by block, (ceil(M/128), ceil(N/128)) by tile. By column q is
    (N, M) and they are (N, ceil(M/128)): block of the transpose. With "both" and "tile_both" the transpose's
    values and scales come after x's own.
    """
    if granularity == "both":
        return *fp8_quant(x, "block", format), *fp8_quant(x, "column", format)
    if granularity == "tile_both":
        q, scale = fp8_quant(x, "tile", format)
        return q, scale, q.t().contiguous(), scale.t()
    if granularity == "column":
        x, granularity = x.t(), "block"
    dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
    M, N = x.shape
    wide = x.float()
    if granularity == "tile":
        wide = torch.nn.functional.pad(wide, (0, -N % 128, 0, -M % 128)).view(-(-M // 128), 128, -(-N // 128), 128)
    elif granularity == "block":
        wide = torch.nn.functional.pad(wide, (0, -N % 128)).view(M, -1, 128)
    shared = (1, 3) if granularity == "tile" else (-1,)
    scale = wide.abs().amax(shared, keepdim=True).clamp(min=1e-30) / torch.finfo(dtype).max
    q = (wide / scale).to(dtype)
    if granularity == "row":
        return q, scale
    height, width = (-(-M // 128) * 128, -(-N // 128) * 128) if granularity == "tile" else (M, -(-N // 128) * 128)
    return q.view(height, width)[:M, :N], scale.squeeze((1, 3) if granularity == "tile" else -1)
