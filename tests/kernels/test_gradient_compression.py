"""Our gradient compression and the way back."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.quantization.gradient_compression import (
    CHUNK,
    SCHEMES,
    gradient_compression,
    payload_bytes,
    sections,
)
from kernelmark.kernels.quantization.gradient_decompression import gradient_decompression
from kernelmark.suite.operators import gradient_compression as operator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = [1, 128, 130, 2051]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("N", SIZES)
def test_agrees(agrees, N, scheme, dtype):
    agrees("gradient_compression", {"N": N}, dtype, scheme=scheme)
    agrees("gradient_decompression", {"N": N}, dtype, scheme=scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decompression_agrees_in_bf16(agrees, scheme):
    agrees("gradient_decompression", {"N": 2051}, "bf16", scheme=scheme)


def exact(N, dtype, seed=0):
    """Numbers whose sums no format rounds, with many that are equal in magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(-64, 65, (N,), generator=generator) / 64).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("keep", [1, 8, 100])
@pytest.mark.parametrize("N", SIZES)
def test_topk_is_exact(N, keep, dtype):
    """The largest of each chunk and of equal ones the first, in ascending order of place, bit by bit."""
    gradient, residual = exact(N, dtype)
    payload, rest = gradient_compression(gradient, residual, "topk", keep)
    total = gradient + residual
    want = torch.zeros(N, dtype=dtype)
    values, places = (x.view(-1, keep) for x in sections(payload, N, "topk", keep, dtype))
    for number, start in enumerate(range(0, N, CHUNK)):
        chunk = total[start : start + CHUNK]
        order = chunk.abs().float().sort(descending=True, stable=True).indices[:keep].sort().values
        want[start + order] = chunk[order]
        assert places[number, : len(order)].tolist() == order.tolist()
        assert values[number, : len(order)].tolist() == chunk[order].tolist()
        assert all(x >= len(chunk) for x in places[number, len(order) :])
    assert torch.equal(rest, total - want)
    assert torch.equal(gradient_decompression(payload, N, dtype, "topk", keep), want)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_topk_finds_thresholds_far_below_the_largest(scale):
    """Outside of the two octaves that are searched first."""
    gradient = torch.zeros(CHUNK)
    gradient[[5, 700, 1023]] = torch.tensor([-1e3, 1.0, 1e-3]) * scale
    payload, rest = gradient_compression(gradient, torch.zeros(CHUNK), "topk", 3)
    assert not rest.any()
    assert torch.equal(gradient_decompression(payload, CHUNK, torch.float32, "topk", 3), gradient)
    _, rest = gradient_compression(gradient, torch.zeros(CHUNK), "topk", 2)
    assert rest.nonzero().tolist() == [[1023]]


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_what_is_lost_is_kept(scheme):
    """Over steps the sum of what was sent is the sum of the gradients, up to one step's residual."""
    generator = torch.Generator().manual_seed(0)
    sent = total = torch.zeros(300, dtype=torch.float64)
    residual = torch.zeros(300)
    for _ in range(20):
        gradient = torch.randn(300, generator=generator)
        payload, residual = gradient_compression(gradient, residual, scheme)
        sent = sent + gradient_decompression(payload, 300, torch.float32, scheme).double()
        total = total + gradient.double()
        torch.testing.assert_close(sent + residual, total, rtol=0, atol=1e-5)
    assert 1e-3 < residual.abs().max() < 0.5


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_quantized_payload(scheme):
    """Each group's largest at the largest number; zeros stay zeros; the end is filled with zeros."""
    gradient = torch.cat([torch.linspace(-3, 1, 128), torch.zeros(128), torch.ones(3)])
    payload, rest = gradient_compression(gradient, torch.zeros(259), scheme)
    values, scales = sections(payload, 259, scheme, 8, torch.float32)
    most = 127.0 if scheme == "int8" else 448.0
    assert values[0].float() == -most
    torch.testing.assert_close(scales, torch.tensor([3.0, 1e-30, 1.0]) / most)
    assert not values[128:256].float().any()
    assert not values[259:].float().any()
    if scheme == "int8":
        assert torch.equal(values[:128].float(), (gradient[:128] / scales[0]).round())
    torch.testing.assert_close(rest[:128], gradient[:128] - values[:128].float() * scales[0])


def test_shape_strides_and_another_dtype_of_the_residual():
    gradient = torch.randn(6, 50).t()
    residual = torch.randn(50, 6).half()
    payload, rest = gradient_compression(gradient, residual)
    assert (rest.shape, rest.dtype) == ((50, 6), torch.float16)
    dense = gradient_decompression(payload, 300, torch.float32).view(50, 6)
    torch.testing.assert_close(dense + rest, gradient + residual, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing(scheme):
    payload, rest = gradient_compression(torch.ones(0), torch.ones(0), scheme)
    assert payload.numel() == rest.numel() == 0
    assert gradient_decompression(payload, 0, torch.float32, scheme).numel() == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("N", [0, *SIZES])
def test_the_suite_knows_the_size_of_a_payload(N, scheme):
    """The kernel's account of its layout and the operator's are separate, and agree."""
    for dtype in DTYPES.values():
        assert payload_bytes(N, scheme, 8, dtype) == operator.payload_bytes(N, scheme, 8, dtype.itemsize)


X = torch.randn(4)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "gradient must be a tensor, not list", ([], X)),
        (TypeError, "residual has dtype torch.float64", (X, X.double())),
        (ValueError, r"residual has shape \(3,\), expected \(4,\)", (X, X[:3])),
        (ValueError, "scheme is 'int4', expected 'int8' or 'fp8' or 'topk'", (X, X, "int4")),
        (ValueError, "keep is 0, expected 1 to 1024", (X, X, "topk", 0)),
        (ValueError, "gradient is on meta", (X.to("meta"), X)),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        gradient_compression(*arguments)


P = torch.zeros(132, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "payload has dtype torch.float32", (X, 4, torch.float32)),
        (ValueError, r"payload has shape \(1, 132\), expected 1 dimensions", (P[None], 4, torch.float32)),
        (ValueError, "payload has 132 bytes, int8 of 129 elements has 264", (P, 129, torch.float32)),
        (ValueError, "payload has 132 bytes, topk of 4 elements has 48", (P, 4, torch.float32, "topk")),
        (ValueError, "size is -1", (P, -1, torch.float32)),
        (TypeError, "dtype is torch.float64", (P, 4, torch.float64)),
        (ValueError, "scheme is 'no'", (P, 4, torch.float32, "no")),
        (ValueError, "payload is not 4-byte aligned", (torch.zeros(133, dtype=torch.uint8)[1:], 4, torch.float32)),
    ],
)
def test_wrong_payloads(error, message, arguments):
    with pytest.raises(error, match=message):
        gradient_decompression(*arguments)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_registration(scheme):
    compression = torch.ops.kernelmark.gradient_compression.default
    torch.library.opcheck(compression, (torch.randn(300), torch.randn(300), scheme, 4))
    payload, _ = gradient_compression(torch.randn(300), torch.zeros(300), scheme, 4)
    decompression = torch.ops.kernelmark.gradient_decompression.default
    torch.library.opcheck(decompression, (payload, 300, torch.float32, scheme, 4))
