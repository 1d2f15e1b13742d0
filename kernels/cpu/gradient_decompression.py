"""Gradient decompression on a CPU: one fused loop by Inductor, or PyTorch's scatter."""

from __future__ import annotations

import torch


@torch.compile(dynamic=False)
def _dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (values.view(-1, 128).float() * scales[:, None]).to(dtype).view(-1)


def gradient_decompression(
    payload: torch.Tensor, size: int, dtype: torch.dtype, scheme: str, keep: int
) -> torch.Tensor:
    """payload (bytes,) uint8 to the gradient (size,) in `dtype`.

    See `kernels/quantization/gradient_decompression.py`.
    """
    if scheme != "topk":
        middle = -(-size // 128) * 128
        kind = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
        return _dequantized(payload[:middle].view(kind), payload[middle:].view(torch.float32), dtype)[:size]
    chunks = -(-size // 1024)
    middle = chunks * keep * dtype.itemsize
    values = payload[:middle].view(dtype).view(chunks, keep)
    places = payload[middle:].view(torch.int16).view(chunks, keep).long()
    dense = torch.zeros(chunks, 1024, dtype=dtype)
    return dense.scatter_(-1, places, values).view(-1)[:size]
