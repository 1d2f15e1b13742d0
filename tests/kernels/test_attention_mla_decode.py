"""Our decoding from latent vectors through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention import attention_mla_decode as module
from kernelmark.kernels.attention.attention_mla_decode import attention_mla_decode, launch

SMALL = {"B": 2, "Sq": 1, "H": 20, "S": 70, "C": 32, "R": 8}


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({}, {"page": 16, "lengths": "mixed"}),
        ({"Sq": 3, "H": 6}, {"page": 64}),
        ({"H": 1, "S": 1, "R": 0}, {"page": 16}),
        ({"B": 0}, {"page": 16}),
    ],
    ids=str,
)
def test_shapes(agrees, axes, options):
    agrees("attention_mla_decode", SMALL | axes, **options)


def test_strides(agrees):
    def strided(inputs):
        cache = inputs["cache"]
        return {
            "cache": torch.stack((cache, cache + 1), 1)[:, 0],
            "block_table": inputs["block_table"].t().contiguous().t(),
            "lengths": inputs["lengths"].repeat_interleave(2)[::2],
        }

    agrees("attention_mla_decode", SMALL, change=strided, page=16, lengths="mixed")


def draw(B=1, Sq=1, H=2, S=64, page=16, columns=24):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(B, Sq, H, columns, generator=generator)
    cache = torch.randn(B * S // page, page, columns, generator=generator)
    table = torch.arange(B * S // page, dtype=torch.int32).view(B, -1)
    return q, cache, table


@pytest.mark.parametrize(("parts", "latent"), [(5, 16), (3, 128)])
def test_any_number_of_parts_gives_the_same(parts, latent):
    """Joined by one program, and by two for some columns each."""
    q, cache, table = draw(B=2, columns=latent + 8)
    lengths = torch.tensor([64, 3], dtype=torch.int32)
    one, more = (launch(q, cache, table, lengths, latent, 0.2, parts=x) for x in (1, parts))
    torch.testing.assert_close(more, one, rtol=1e-5, atol=1e-6)


def test_what_goes_to_the_kernel_for_hopper(monkeypatch):
    taken = []

    def attend(q, cache, table, lengths, out, sums, levels, scale, parts):
        taken.append(parts)
        for x in (sums, levels):
            x.zero_()

    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    module._hopper.cache_clear()
    own = module._hopper(torch.device("cpu"))
    module._hopper.cache_clear()
    monkeypatch.setattr(module, "_hopper", lambda device: own)
    monkeypatch.setattr(own, "attend", attend)
    q, cache, table = draw(B=2, H=128, S=128, page=64, columns=576)
    lengths = torch.tensor([128, 3], dtype=torch.int32)
    launch(q.bfloat16(), cache.bfloat16(), table, lengths, 512, 0.2)
    launch(q.bfloat16(), cache.bfloat16(), table, lengths, 512, 0.2, parts=2)
    assert taken == [1, 2]
    for scale in (0.0, -0.1):
        assert not launch(q.half(), cache.half(), table, lengths, 512, scale, parts=1).isnan().any()
    assert not launch(q[:, :, :2], cache, table, lengths, 512, 0.2).isnan().any()  # fp32: the portable one
    assert len(taken) == 2


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(scale):
    q, cache, table = draw(B=2, Sq=2)
    lengths = torch.tensor([64, 3], dtype=torch.int32)
    keys = cache[table[0].long()].flatten(0, 1)[:63]
    weights = (q[0, 0] @ keys.T * scale).softmax(-1)
    torch.testing.assert_close(
        attention_mla_decode(q, cache, table, lengths, 16, scale)[0, 0], weights @ keys[:, :16]
    )


def test_other_gpus_have_the_portable_kernel(monkeypatch):
    for capability in ((8, 0), (10, 0), (0, 0)):
        monkeypatch.setattr(module, "capability", lambda device, c=capability: c)
        module._hopper.cache_clear()
        assert module._hopper(torch.device("cpu")) is None
    module._hopper.cache_clear()


def test_a_token_that_sees_nothing_gives_zeros_and_what_lies_beyond_is_not_seen():
    q, cache, table = draw(Sq=2)
    lengths = torch.tensor([1], dtype=torch.int32)
    table[0, 1:] = 1 << 20
    output = attention_mla_decode(q, cache, table, lengths, 16, 0.2)
    assert torch.equal(output[0, 0], torch.zeros_like(output[0, 0]))
    torch.testing.assert_close(output[0, 1], cache[0, :1, :16].expand(2, 16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"latent": 20}, "q has 20 latent of 24 dimensions"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"cache": torch.zeros(4, 24, 24)}, "pages of 24 tokens"),
        ({"lengths": torch.zeros(2, dtype=torch.int32)}, "lengths has shape"),
    ],
)
def test_wrong_input(change, said):
    q, cache, table = draw()
    given = {"q": q, "cache": cache, "block_table": table, "lengths": torch.ones(1, dtype=torch.int32)}
    with pytest.raises(ValueError, match=said):
        attention_mla_decode(**({**given, "latent": 16, "scale": 0.2} | change))
