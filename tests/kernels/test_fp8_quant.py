"""Our quantization to 8-bit floats."""

import pytest
import torch
from kernelmark.kernels._launch import forget, prepared
from kernelmark.kernels.quantization.fp8_quant import (
    FORMATS,
    GRANULARITIES,
    LARGEST,
    LAYOUTS,
    both_summed,
    fp8_quant,
    gelu_both,
    gelu_gradient_both_summed,
    layer_norm_both,
    norm_both,
    rows_both,
    rows_both_summed,
    swiglu_both,
)

ALL = pytest.mark.parametrize(
    ("granularity", "format"), [(g, f) for g in ("row", "block", "tile", "column") for f in ("e4m3", "e5m2")]
)


@pytest.mark.parametrize("granularity", ["both", "tile_both"])
def test_both_ways_agree(agrees, granularity):
    agrees("fp8_quant", {"M": 5, "N": 300}, "bf16", granularity=granularity, format="e4m3")


@ALL
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("axes", [{"M": 3, "N": 128}, {"M": 5, "N": 300}, {"M": 2, "N": 1030}])
def test_agrees(agrees, axes, dtype, granularity, format):
    agrees("fp8_quant", axes, dtype, granularity=granularity, format=format)


@ALL
def test_agrees_with_strides(agrees, granularity, format):
    axes, options = {"M": 5, "N": 300}, {"granularity": granularity, "format": format}
    agrees("fp8_quant", axes, change=lambda given: {"x": torch.randn(300, 5).t()}, **options)
    agrees("fp8_quant", axes, change=lambda given: {"x": torch.randn(5, 400)[:, 5:305]}, **options)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", ["row", "block"])
def test_exact(granularity, format):
    """The same values and scales as rounding in fp32 gives, where the scales are powers of two."""
    x = torch.randn(4, 256).clamp(-1, 1)
    x[:, ::128] = 1.0
    x *= LARGEST[format] * torch.tensor([[1.0], [0.5], [4.0], [2.0**-20]])
    q, scale = fp8_quant(x, granularity, format)
    assert scale.shape == (4, 1 if granularity == "row" else 2)
    assert scale[:, 0].tolist() == [1.0, 0.5, 4.0, 2.0**-20]
    assert torch.equal(q.float(), (x / scale[:, :1]).to(FORMATS[format]).float())


@ALL
def test_zeros_and_empty(granularity, format):
    q, scale = fp8_quant(torch.zeros(2, 130), granularity, format)
    assert q.float().abs().max() == 0
    assert scale.isfinite().all()
    for shape in ((0, 130), (2, 0), (0,)):
        q, scale = fp8_quant(torch.zeros(shape), granularity, format)
        if granularity == "column":
            M = sum(shape[:-1]) if len(shape) > 1 else 1
            assert (q.shape, scale.shape) == ((shape[-1], M), (shape[-1], -(-M // 128)))
            continue
        assert q.shape == shape
        across = 1 if granularity == "row" else -(-shape[-1] // 128)
        assert scale.shape == (
            (-(-sum(shape[:-1]) // 128) if len(shape) > 1 else 1, across)
            if granularity == "tile"
            else (*shape[:-1], across)
        )


@ALL
def test_one_element(granularity, format):
    q, scale = fp8_quant(torch.tensor([-3.0]), granularity, format)
    assert q.float().item() == -LARGEST[format]
    assert (q.float() * scale).item() == pytest.approx(-3.0)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_tiles(format):
    """Each square of 128 × 128 has its own scale, those at the edges too."""
    x = torch.randn(260, 300).clamp(-1, 1)
    x[::128, ::128] = 1.0
    powers = torch.tensor([[1.0, 2.0, 4.0], [0.5, 8.0, 0.25], [16.0, 2.0**-20, 1.0]])
    x *= LARGEST[format] * powers.repeat_interleave(128, 0).repeat_interleave(128, 1)[:260, :300]
    q, scale = fp8_quant(x, "tile", format)
    assert torch.equal(scale, powers)
    wide = powers.repeat_interleave(128, 0).repeat_interleave(128, 1)[:260, :300]
    assert torch.equal(q.float(), (x / wide).to(FORMATS[format]).float())


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(1, 1), (127, 65), (128, 64), (300, 70), (2, 150, 33)])
def test_columns_are_blocks_of_the_transpose(shape, format):
    """Bit by bit, of more dimensions, of strided rows, and at edges; scales of 128 rows lie together."""
    for x in (torch.randn(shape), torch.randn(*shape[:-1], shape[-1] + 9)[..., 4:-5]):
        q, scale = fp8_quant(x, "column", format)
        wanted, scales = fp8_quant(x.reshape(-1, shape[-1]).t().contiguous(), "block", format)
        assert torch.equal(q.float(), wanted.float())
        assert torch.equal(scale, scales)
        assert q.is_contiguous()
        assert scale.t().is_contiguous()


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(1, 1), (127, 65), (128, 64), (300, 140), (2, 150, 33)])
def test_both_ways_in_one_pass_are_two_passes(shape, format):
    """Bit by bit, with scales as matrix products take them: blocks and columns, tiles and their transpose."""
    for x in (torch.randn(shape), torch.randn(*shape[:-1], shape[-1] + 9)[..., 4:-5]):
        wanted = *fp8_quant(x, "block", format, "matmul"), *fp8_quant(x, "column", format)
        for got, want in zip(fp8_quant(x, "both", format), wanted, strict=True):
            assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            assert torch.equal(got.float(), want.float())
        for layout in ("rows", "matmul"):
            q, scale = fp8_quant(x, "tile", format, layout)
            got_q, got_scale, turned, turned_scale = fp8_quant(x, "tile_both", format, layout)
            assert torch.equal(got_q.float(), q.float())
            assert torch.equal(got_scale, scale)
            assert got_scale.stride() == scale.stride()
            assert torch.equal(turned.float(), q.float().view(-1, shape[-1]).t())
            assert turned.is_contiguous()
            assert torch.equal(turned_scale, scale.t())


@pytest.mark.parametrize("shape", [(0, 130), (2, 0), (2, 130)])
@pytest.mark.parametrize("granularity", ["both", "tile_both"])
def test_both_ways_of_nothing_and_of_zeros(shape, granularity):
    q, scale, turned, turned_scale = fp8_quant(torch.zeros(shape), granularity)
    assert (q.shape, turned.shape) == (shape, shape[::-1])
    assert q.float().abs().sum() == turned.float().abs().sum() == 0
    assert scale.isfinite().all()
    assert turned_scale.isfinite().all()


@pytest.mark.parametrize("shape", [(5, 300), (130, 1280)])
def test_layout_of_the_matmul(shape):
    """The same scales; of blocks column-major, of tiles in rows padded to four."""
    x = torch.randn(shape)
    (q, plain), (other, scale) = (fp8_quant(x, "block", layout=layout) for layout in ("rows", "matmul"))
    assert torch.equal(plain, scale)
    assert torch.equal(q.float(), other.float())
    assert plain.is_contiguous()
    assert scale.t().is_contiguous()
    plain, scale = (fp8_quant(x, "tile", layout=layout)[1] for layout in ("rows", "matmul"))
    assert torch.equal(plain, scale)
    assert scale.stride() == (-(-plain.shape[1] // 4) * 4, 1)


def test_more_dimensions():
    x = torch.randn(2, 3, 256)
    q, scale = fp8_quant(x, "block")
    assert (q.shape, scale.shape) == ((2, 3, 256), (2, 3, 2))
    flat, _ = fp8_quant(x.view(6, 256), "block")
    assert torch.equal(q.float().view(6, 256), flat.float())


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor, not int", (1,)),
        (TypeError, "x has dtype torch.int8", (torch.ones(3, dtype=torch.int8),)),
        (ValueError, r"x has shape \(\)", (torch.tensor(1.0),)),
        (ValueError, "x is on meta", (torch.ones(3, device="meta"),)),
        (
            ValueError,
            "granularity is 'tensor', expected 'row' or 'block' or 'tile' or 'column' or 'both' or 'tile_both'",
            (torch.ones(3), "tensor"),
        ),
        (
            ValueError,
            "layout is 'columns', expected 'rows' or 'matmul'",
            (torch.ones(3), "row", "e4m3", "columns"),
        ),
        (ValueError, "format is 'fp8', expected 'e4m3' or 'e5m2'", (torch.ones(3), "row", "fp8")),
        # Of operators of their own, one of which takes no layout.
        (TypeError, "x must be a tensor, not int", (1, "both", "e4m3", "columns")),
        (ValueError, r"x has shape \(\)", (torch.tensor(1.0), "tile_both")),
        (ValueError, "format is 'fp8', expected 'e4m3' or 'e5m2'", (torch.ones(3), "both", "fp8", "columns")),
        (ValueError, "layout is 'columns', expected", (torch.ones(3), "both", "e4m3", "columns")),
        (ValueError, "layout is 'columns', expected", (torch.ones(3), "tile_both", "e4m3", "columns")),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        fp8_quant(*arguments)


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        (norm_both, (torch.ones(3), torch.ones(3), torch.ones(3)), ValueError, "h has shape .*, expected 2"),
        (norm_both, (torch.ones(2, 3), torch.ones(3), torch.ones(3)), ValueError, "rstd has shape"),
        (norm_both, (torch.ones(2, 3), torch.ones(2).half(), torch.ones(3)), TypeError, "rstd has dtype"),
        (norm_both, (torch.ones(2, 3), torch.ones(2), torch.ones(2)), ValueError, "weight has shape"),
        (both_summed, (torch.ones(3),), ValueError, "x has shape .*, expected 2"),
        (rows_both, (torch.ones(3),), ValueError, "x has shape .*, expected 2"),
        (rows_both_summed, (torch.ones(2, 3).double(),), TypeError, "x has dtype"),
        (both_summed, (torch.ones(2, 3).double(),), TypeError, "x has dtype"),
        (layer_norm_both, (torch.ones(3), *[torch.ones(3)] * 4), ValueError, "h has shape .*, expected 2"),
        (layer_norm_both, (torch.ones(2, 3), *[torch.ones(3)] * 4), ValueError, "mean has shape"),
        (
            layer_norm_both,
            (torch.ones(2, 3), *[torch.ones(2)] * 2, torch.ones(3), torch.ones(3).half()),
            TypeError,
            "bias has dtype",
        ),
        (gelu_both, (torch.ones(3),), ValueError, "x has shape .*, expected 2"),
        (gelu_gradient_both_summed, (torch.ones(2, 3), torch.ones(3, 2)), ValueError, "x has shape"),
        (gelu_gradient_both_summed, (torch.ones(2, 3), torch.ones(2, 3).half()), TypeError, "x has dtype"),
        (swiglu_both, (torch.ones(3), torch.ones(3)), ValueError, "gate has shape .*, expected 2"),
        (swiglu_both, (torch.ones(2, 3), torch.ones(3, 2)), ValueError, "up has shape"),
        (swiglu_both, (torch.ones(2, 3), torch.ones(2, 3).half()), TypeError, "up has dtype"),
    ],
)
def test_wrong_arguments_of_what_is_computed_first(call, arguments, error, message):
    with pytest.raises(error, match=message):
        call(*arguments)


@pytest.mark.parametrize("x", [torch.randn(3, 200), torch.randn(2, 3, 140).transpose(0, 1), torch.randn(0, 130)])
def test_registration(x):
    of = torch.ops.kernelmark
    for layout in LAYOUTS:
        for granularity in ("row", "block", "tile", "column"):
            torch.library.opcheck(of.fp8_quant.default, (x, granularity, "e5m2", layout))
        torch.library.opcheck(of.fp8_quant_tile_both.default, (x, "e5m2", layout))
    torch.library.opcheck(of.fp8_quant_both.default, (x, "e5m2"))
    if x.dim() == 2:
        torch.library.opcheck(of.norm_both.default, (x, torch.rand(x.shape[0]), torch.rand(x.shape[1])))
        torch.library.opcheck(of.swiglu_both.default, (x, x.clone()))
        torch.library.opcheck(of.fp8_quant_both_summed.default, (x,))
        torch.library.opcheck(of.fp8_quant_rows_both.default, (x,))
        torch.library.opcheck(of.fp8_quant_rows_both_summed.default, (x,))
        moments = torch.rand(2, x.shape[0])
        torch.library.opcheck(of.layer_norm_both.default, (x, *moments, *torch.rand(2, x.shape[1])))
        torch.library.opcheck(of.gelu_both.default, (x,))
        torch.library.opcheck(of.gelu_gradient_both_summed.default, (x, x.clone()))


CALLS = {
    **{
        f"{granularity} {layout}": lambda x, g=granularity, y=layout: fp8_quant(x, g, layout=y)
        for granularity in GRANULARITIES
        for layout in LAYOUTS
    },
    "norm": lambda x: norm_both(x, x.abs().amax(1), x.abs().amax(0)),
    "swiglu": lambda x: swiglu_both(x, x.flip(0)),
    "summed": both_summed,
    "rows": rows_both,
    "rows, summed": rows_both_summed,
    "layer norm": lambda x: layer_norm_both(x, x.mean(1), x.abs().amax(1), x.abs().amax(0), x[0]),
    "gelu": gelu_both,
    "gelu's gradient": lambda x: gelu_gradient_both_summed(x, x.flip(0)),
}


@pytest.fixture
def preparations(monkeypatch):
    """What is prepared for from here on."""
    seen, first = [], prepared._first

    def noted(self, alike, *arguments):
        seen.append(alike)
        return first(self, alike, *arguments)

    forget()
    monkeypatch.setattr(prepared, "_first", noted)
    return seen


def same(found, wanted):
    return all(
        (a.shape, a.stride()) == (b.shape, b.stride()) and torch.equal(a.float(), b.float())
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_is_prepared_once(call, preparations):
    """For tensors that are alike; for others between them anew, and neither's sizes are the other's."""
    memory = torch.randn(3, 2, 20, 300)

    def given(i):
        """As it lies, less of it, what is copied as its columns are far apart, and rows of a wider one."""
        a, b = memory[i]
        return a, a[:6, :128].contiguous(), b.t(), b[:, 4:140]

    once = [[call(x) for x in given(i)] for i in range(3)]
    assert len(preparations) == 4
    for i in range(3):
        for found, x in zip(once[i], given(i), strict=True):
            forget()
            assert same(found, call(x))
    assert not any(same(*pair) for pair in zip(once[0], once[1], strict=True))


def test_padding_of_the_matmuls_tiles_is_there():
    """Behind the last row too: who reads four scales at a time reads what is theirs."""
    for granularity in ("tile", "tile_both"):
        scale = fp8_quant(torch.randn(130, 300), granularity, layout="matmul")[1]
        assert (scale.shape, scale.stride()) == ((2, 3), (4, 1))
        assert scale.untyped_storage().nbytes() >= 2 * 4 * 4


def dequantized(q, scale, turned, turned_scale):
    """Both in fp32: as it is, and the transpose turned back."""
    across = q.float() * scale.repeat_interleave(128, 1)[:, : q.shape[1]]
    down = turned.float() * turned_scale.repeat_interleave(128, 1)[:, : turned.shape[1]]
    return across, down.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (131, 300), (4300, 70), (5, 129)])
def test_sums_of_the_same_read(shape, dtype):
    x = (torch.randn(shape[0], shape[1] + 7) + 0.3).to(dtype)[:, 3:-4]
    *found, sums = both_summed(x)
    assert same(found, fp8_quant(x, "both"))
    assert (sums.shape, sums.dtype) == (shape[1:], dtype)
    want = x.double().sum(0)
    close = {"rtol": 2**-7, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-3}
    torch.testing.assert_close(sums.double(), want, **close)
    assert torch.equal(sums, both_summed(x)[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (131, 300), (1000, 70), (5, 129)])
def test_rows_of_both_ways_are_two_passes(shape, dtype):
    """Of rows of a wider matrix, one of zeros and a column of zeros among them."""
    x = torch.randn(shape[0], shape[1] + 7).to(dtype)[:, 3:-4]
    x[shape[0] // 2], x[:, shape[1] // 3] = 0, 0
    found = rows_both(x)
    assert same(found, (*fp8_quant(x), *fp8_quant(x.t().contiguous())))
    *again, sums = rows_both_summed(x)
    assert same(again, found)
    assert torch.equal(sums, both_summed(x)[4])
    assert same(rows_both(x.t().contiguous().t()), found), "columns that lie apart are copied first"


@pytest.mark.parametrize("shape", [(0, 130), (130, 0)])
def test_sums_of_nothing(shape):
    for summed in (both_summed, rows_both_summed):
        for _ in range(2):
            sums = summed(torch.ones(shape))[4]
            assert torch.equal(sums, torch.zeros(shape[1]))
            sums.add_(7)
    assert same(rows_both(torch.ones(shape)), (*fp8_quant(torch.ones(shape)), *fp8_quant(torch.ones(shape[::-1]))))


def wider(*shape):
    """Rows of a wider matrix."""
    return torch.randn(shape[0], shape[1] + 9).bfloat16()[:, 5:-4]


def of_a_layer_norm(x, _):
    weight, bias = torch.rand(x.shape[1]).bfloat16(), torch.randn(x.shape[1]).bfloat16()
    x += 3
    h = x.float()
    mean, rstd = h.mean(1), (h.var(1, correction=0) + 1e-5).rsqrt()
    want = torch.nn.functional.layer_norm(h, x.shape[1:], weight.float(), bias.float(), 1e-5)
    return layer_norm_both(x, mean, rstd, weight, bias), want


def of_an_rms_norm(x, _):
    weight, rstd = torch.rand(x.shape[1]).bfloat16(), torch.rand(len(x))
    return norm_both(x, rstd, weight), x.float() * rstd[:, None] * weight.float()


def of_a_gate(x, other):
    return swiglu_both(x, other), torch.nn.functional.silu(x.float()) * other.float()


def of_gelu(x, _):
    return gelu_both(x), torch.nn.functional.gelu(x.float(), approximate="tanh")


def of_gelus_gradient(x, other):
    exact = other.float().requires_grad_()
    torch.nn.functional.gelu(exact, approximate="tanh").backward(x.float())
    *found, sums = gelu_gradient_both_summed(x, other)
    torch.testing.assert_close(sums.float(), exact.grad.sum(0), rtol=2**-7, atol=2e-2)
    return tuple(found), exact.grad


COMPUTED = (of_a_layer_norm, of_an_rms_norm, of_a_gate, of_gelu, of_gelus_gradient)


@pytest.mark.parametrize("shape", [(131, 150), (1, 1), (128, 128), (300, 5)])
@pytest.mark.parametrize("of", COMPUTED)
def test_both_of_what_is_computed_first(of, shape):
    """Norms, gates, GELU and its gradient, of rows of a wider matrix; none is rounded to 16 bits before."""
    found, want = of(wider(*shape), wider(*shape))
    plain = fp8_quant(want.contiguous(), "both")
    assert [(a.shape, a.stride()) for a in found] == [(a.shape, a.stride()) for a in plain]
    for got in dequantized(*found):
        assert (got - want).norm() < 0.03 * want.norm()
    torch.testing.assert_close(found[1], plain[1])
    torch.testing.assert_close(found[3], plain[3])
