"""Our attention of 8-bit floats through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention import attention_fp8 as module
from kernelmark.kernels.attention.attention_fp8 import E4M3, attention_fp8, quantize_heads
from kernelmark.suite.operators.attention_fp8 import attended, quantized

SMALL = {"B": 1, "H": 2, "Hkv": 1, "S": 100, "D": 32}


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("v_layout", ["rowmajor", "colmajor"])
def test_layouts(agrees, mask, v_layout):
    agrees("attention_fp8", SMALL, "e4m3", mask=mask, v_layout=v_layout)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(
    "axes",
    [
        {"B": 2, "H": 4, "Hkv": 2, "S": 70},
        {"H": 3, "Hkv": 3, "S": 65, "D": 64},
        {"S": 40, "D": 128},
        {"S": 33, "D": 256},
        {"S": 31, "D": 8},
        {"S": 47, "D": 80},
        {"S": 1},
        {"S": 2, "D": 1},
        {"B": 0},
        {"S": 0},
    ],
    ids=str,
)
def test_shapes(agrees, axes, mask):
    agrees("attention_fp8", SMALL | axes, "e4m3", mask=mask)


def draw(B=1, H=2, Hkv=2, S=100, D=32, scale=1.0):
    generator = torch.Generator().manual_seed(S * 1000 + D)
    parts = [quantized(torch.randn(B, heads, S, D, generator=generator) * scale) for heads in (H, Hkv, Hkv)]
    return {name: x[0] for name, x in zip("qkv", parts, strict=True)} | {
        f"{name}_scale": x[1] for name, x in zip("qkv", parts, strict=True)
    }


def exact(given, mask):
    wide = (given[x].double() * given[f"{x}_scale"].double()[..., None, None] for x in "qkv")
    return attended(*wide, mask)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def test_weights_are_rounded_to_e4m3_and_nothing_else():
    """In one block of keys the maximum is the row's: weights up to 2⁸ in E4M3, their sum before rounding."""
    given = draw(S=48)
    scores = (given["q"].double() @ given["k"].double().mT) * 32**-0.5
    scores *= (given["q_scale"] * given["k_scale"]).double()[..., None, None]
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * 256
    sums = weights.float().to(E4M3).double() @ given["v"].double()
    want = sums / weights.sum(-1, keepdim=True) * given["v_scale"].double()[..., None, None]
    got = attention_fp8(**given, mask="full", out_dtype=torch.float32)
    # A weight at the middle between two numbers goes either way.
    assert error(got, want) < 2e-3
    assert 0.01 < error(got, exact(given, "full")) < 0.03


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_out_dtype(dtype):
    given = draw()
    output = attention_fp8(**given, out_dtype=dtype)
    assert output.dtype == dtype
    assert output.is_contiguous()
    assert error(output, exact(given, "causal")) < 0.035


def test_scales_are_of_heads():
    given = draw(B=2, H=4, Hkv=2)
    changed = dict(given)
    factor = torch.tensor([[1.0, 1.0, 4.0, 4.0], [0.5, 0.5, 2.0, 2.0]])
    changed["q_scale"] = given["q_scale"] * factor
    changed["k_scale"] = given["k_scale"] / factor[:, ::2]
    changed["v_scale"] = given["v_scale"] * 8
    assert torch.equal(attention_fp8(**changed), attention_fp8(**given) * 8)
    changed["q_scale"] = given["q_scale"] * torch.tensor([1.0, 3.0, 1.0, 0.1])
    changed["k_scale"] = given["k_scale"]
    assert error(attention_fp8(**changed), exact(changed, "causal")) < 0.035


def test_strided_inputs(agrees):
    def strided(inputs):
        tokens = {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
        return tokens | {"q_scale": inputs["q_scale"].t().contiguous().t()}

    agrees("attention_fp8", SMALL | {"B": 2, "H": 4, "Hkv": 2}, "e4m3", change=strided)
    agrees("attention_fp8", SMALL, "e4m3", change=lambda inputs: {"q": inputs["q"].mT.contiguous().mT})


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_blocks_of_other_sizes(monkeypatch, mask):
    given = draw(H=3, Hkv=3, S=150)
    monkeypatch.setattr(module, "heads_in_l2", lambda k, groups: 2 * groups)
    for resident, streamed in ((32, 64), (64, 32)):
        monkeypatch.setattr(module, "tiles", lambda q, tma, r=resident, s=streamed: module.Tiles(r, s, 4, 1))
        assert error(attention_fp8(**given, mask=mask), exact(given, mask)) < 0.035


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_descriptors(monkeypatch, mask):
    """The path through tensor descriptors, which a GPU takes from compute capability 9.0 on."""
    monkeypatch.setattr(module, "_tma", lambda *tensors: True)
    monkeypatch.setattr(module, "tiles", lambda q, tma: module.Tiles(32, 32, 4, 1))
    given = draw(H=2, Hkv=1, S=80, D=48)
    assert error(attention_fp8(**given, mask=mask), exact(given, mask)) < 0.035


def test_descriptors_are_for_even_strides(monkeypatch):
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.uint8).view(E4M3)

    assert module._tma(empty(1, 2, 1024, 16))
    assert module._tma(empty(1, 2, 3, 16))
    assert module._tma(empty(1, 1024, 2, 16).transpose(1, 2))
    assert not module._tma(empty(1, 2, 1024, 8))
    assert not module._tma(empty(1, 2, 1024, 1000))
    assert not module._tma(empty(1, 1, 1024, 16).expand(1, 4, 1024, 16))
    monkeypatch.setattr(module, "capability", lambda device: (8, 9))
    assert not module._tma(empty(1, 2, 1024, 16))


def test_hidden_keys_have_no_effect():
    given = draw(S=70)
    before = attention_fp8(**given)
    for name in "kv":
        given[name] = given[name].clone()
        given[name].view(torch.uint8)[:, :, 40:] = 0x7E
    assert torch.equal(attention_fp8(**given)[:, :, :40], before[:, :, :40])


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_large_and_tiny_scores(mask):
    """Scores of hundreds, which choose one key; and zeros, of whose scales the product is no fp32 number."""
    given = draw(S=45, scale=30.0)
    output = attention_fp8(**given, mask=mask)
    assert bool(output.isfinite().all())
    assert error(output, exact(given, mask)) < 0.035
    for name in "qk":
        given[name], given[f"{name}_scale"] = quantize_heads(torch.zeros(1, 2, 45, 32))
    assert error(attention_fp8(**given, mask=mask), exact(given, mask)) < 0.01


def test_a_scale_that_is_nan_spoils_its_head_alone():
    """The interpreter reads NaN in E4M3 as a number: of those there is a check on the GPU only."""
    given = draw(S=40)
    given["k_scale"][0, 0] = torch.nan
    output = attention_fp8(**given)
    assert bool(output[:, 0].isnan().all())
    assert not output[:, 1].isnan().any()


@pytest.mark.parametrize(
    ("kind", "match", "change"),
    [
        (ValueError, "mask is 'sliding'", {"mask": "sliding"}),
        (TypeError, "out_dtype is torch.float8_e4m3fn", {"out_dtype": E4M3}),
        (TypeError, "q must be a tensor", {"q": None}),
        (TypeError, "q has dtype torch.bfloat16", {"q": torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)}),
        (TypeError, "v has dtype torch.float8_e5m2", {"v": torch.zeros(1, 2, 8, 16).to(torch.float8_e5m2)}),
        (ValueError, r"q has shape \(2, 8, 16\)", {"q": torch.zeros(2, 8, 16).to(E4M3)}),
        (ValueError, r"k has shape \(1, 2, 9, 16\)", {"k": torch.zeros(1, 2, 9, 16).to(E4M3)}),
        (ValueError, r"v has shape \(1, 1, 8, 16\)", {"v": torch.zeros(1, 1, 8, 16).to(E4M3)}),
        (ValueError, "k has 3 heads, which do not divide the 2 of q", {"k": torch.zeros(1, 3, 8, 16).to(E4M3)}),
        (ValueError, "head dimension 257", {"q": torch.zeros(1, 2, 8, 257).to(E4M3)}),
        (ValueError, r"q_scale has shape \(2,\)", {"q_scale": torch.ones(2)}),
        (TypeError, "k_scale has dtype torch.float64", {"k_scale": torch.ones(1, 2, dtype=torch.float64)}),
        (ValueError, "v_scale is on meta", {"v_scale": torch.ones(1, 2, device="meta")}),
        (NotImplementedError, "v_scale requires a gradient", {"v_scale": torch.ones(1, 2, requires_grad=True)}),
        (NotImplementedError, "q requires a gradient", {"q": torch.zeros(1, 2, 8, 16).to(E4M3).requires_grad_()}),
    ],
)
def test_errors(kind, match, change):
    inputs = {name: torch.zeros(1, 2, 8, 16).to(E4M3) for name in "qkv"}
    inputs |= {f"{name}_scale": torch.ones(1, 2) for name in "qkv"}
    with pytest.raises(kind, match=match):
        attention_fp8(**inputs | change)


def test_without_gradients_it_takes_what_requires_them():
    given = draw(S=20)
    want = attention_fp8(**given)
    given["v_scale"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(attention_fp8(**given), want)


def test_operator_contract():
    """Schema, fake tensors and tracing, as torch checks them."""
    for v_layout in (lambda v: v, lambda v: v.mT.contiguous().mT):
        given = draw(S=20)
        given["v"] = v_layout(given["v"])
        arguments = (*given.values(), True, torch.float16)
        # The test of the schema multiplies inputs, for which 8-bit floats have no operator.
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.kernelmark.attention_fp8.default, arguments, test_utils=checks)
    for x in (torch.randn(1, 4, 20, 16), torch.randn(1, 4, 20, 16, dtype=torch.float16)):
        for colmajor in (True, False):
            torch.library.opcheck(torch.ops.kernelmark.quantize_heads.default, (x, colmajor, 2))


def test_torch_compile_sees_one_operator():
    given = draw(S=40)
    compiled = torch.compile(attention_fp8, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given), attention_fp8(**given))


@pytest.mark.parametrize("layout", ["rowmajor", "colmajor"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_heads(layout, groups, dtype):
    x = (
        torch.randn(2, 4, 150, 24, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1, 3, 0.1, 50])[:, None, None]
    )
    x = x.to(dtype)
    x8, scale = quantize_heads(x, layout, groups)
    _, expected = quantized(x, groups)
    assert torch.equal(scale, expected)
    assert x8.dtype == E4M3
    assert x8.stride() == ((4 * 24 * 160, 24 * 160, 1, 160) if layout == "colmajor" else x.stride())
    back = x8.double() * scale.double()[..., None, None]
    # Half a step of three binary digits, and half the smallest number.
    assert bool(
        ((back - x.double()).abs() <= x.double().abs() * 2**-4 * 1.0001 + scale[..., None, None] / 1000).all()
    )
    assert float(x8.float().abs().amax()) == 448


def test_quantize_heads_of_strided_and_of_no_numbers():
    x = torch.randn(2, 50, 3, 16).transpose(1, 2)
    x8, scale = quantize_heads(x)
    again, same = quantize_heads(x.contiguous())
    assert torch.equal(x8.float(), again.float())
    assert torch.equal(scale, same)
    x = torch.randn(1, 2, 50, 16)
    x[0, 1, 3, 4] = torch.nan
    x8, scale = quantize_heads(x)
    assert x8.float().isnan().nonzero().tolist() == [[0, 1, 3, 4]]
    assert bool(scale.isfinite().all())
    for shape in ((0, 2, 8, 16), (1, 2, 0, 16)):
        x8, scale = quantize_heads(torch.zeros(shape), "colmajor")
        assert x8.shape == shape
        assert scale.shape == shape[:2]


@pytest.mark.parametrize(
    ("kind", "match", "arguments"),
    [
        (ValueError, "layout is 'row'", (torch.zeros(1, 2, 3, 4), "row")),
        (ValueError, r"x has shape \(2, 3, 4\)", (torch.zeros(2, 3, 4),)),
        (TypeError, "x has dtype torch.int32", (torch.zeros(1, 2, 3, 4, dtype=torch.int32),)),
        (ValueError, "groups is 3, which does not divide the 2 heads", (torch.zeros(1, 2, 3, 4), "rowmajor", 3)),
        (ValueError, "groups is 0", (torch.zeros(1, 2, 3, 4), "rowmajor", 0)),
    ],
)
def test_quantize_heads_errors(kind, match, arguments):
    with pytest.raises(kind, match=match):
        quantize_heads(*arguments)


def test_quantized_by_us_it_is_attention():
    """From bf16 on: about √2 of a head's rounding on top of the kernel's own."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 120, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
    (q8, qs), (k8, ks), (v8, vs) = quantize_heads(q, groups=2), quantize_heads(k), quantize_heads(v, "colmajor")
    output = attention_fp8(q8, k8, v8, qs, ks, vs)
    assert error(output, attended(q.double(), k.double(), v.double(), "causal")) < 0.06
