"""Our decoding attention through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention import _decode_shares
from kernelmark.kernels.attention import attention_decode as module
from kernelmark.kernels.attention._decode_shares import fit_for, shares_of
from kernelmark.kernels.attention.attention_decode import Tile, attention_decode, launch, split, tile_for

TILE = Tile(16, 4, 3, True)
HOPPER = 9, 0
SMALL = {"B": 2, "Sq": 1, "H": 4, "Hkv": 2, "S": 70, "D": 32}


@pytest.mark.parametrize("page", [0, 16, 64, 128])
@pytest.mark.parametrize("lengths", ["equal", "mixed"])
def test_pages_and_lengths(agrees, page, lengths):
    agrees("attention_decode", SMALL, page=page, lengths=lengths)


@pytest.mark.parametrize(
    "axes",
    [
        {"Sq": 3},
        {"H": 6, "Hkv": 2, "Sq": 2},
        {"H": 2, "Hkv": 2},
        {"H": 20, "Hkv": 1},
        {"Sq": 4, "H": 8, "Hkv": 1, "D": 72},
        {"D": 48},
        {"D": 8},
        {"D": 160},
        {"S": 1},
        {"S": 200, "B": 1},
        {"B": 0},
    ],
    ids=str,
)
def test_shapes(agrees, axes):
    agrees("attention_decode", SMALL | axes, page=16)


def test_half_precision(agrees):
    agrees("attention_decode", SMALL, "fp16", page=16)


def test_strided_inputs(agrees):
    def strided(inputs):
        q = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
        both = torch.stack((inputs["k_cache"], inputs["v_cache"]), 1)  # as FlashInfer keeps them
        return {"q": q, "k_cache": both[:, 0], "v_cache": both[:, 1]}

    agrees("attention_decode", SMALL | {"Sq": 2}, change=strided, page=16)


@pytest.mark.parametrize("axes", [{}, {"Sq": 5, "H": 8}, {"Sq": 8, "D": 24, "Hkv": 4}], ids=str)
@pytest.mark.parametrize(("sinks", "cap"), [(True, 0), (False, 30), (True, 50)])
def test_sinks_and_caps(agrees, axes, sinks, cap):
    agrees("attention_decode", SMALL | axes, page=16, lengths="mixed", sinks=sinks, cap=cap)


@pytest.mark.parametrize("Sq", [2, 3, 4, 8])
def test_tokens_that_are_guessed_see_those_before_them(agrees, Sq):
    """As many as speculative decoding checks at a time, of grouped heads."""
    agrees("attention_decode", SMALL | {"Sq": Sq, "H": 12, "Hkv": 2}, page=0)


@pytest.mark.parametrize("divided", [{"parts": x} for x in (1, 2, 5, 40)] + [{"shares": x} for x in (1, 2, 9)])
def test_a_sink_counts_once_however_it_is_divided(divided):
    """In a sequence of no tokens too: it takes all of the weight, and has no value."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, 1, 4, 16, generator=generator)
    k, v = (torch.randn(2, 200, 2, 16, generator=generator) for _ in range(2))
    lengths = torch.tensor([200, 0], dtype=torch.int32)
    sinks = torch.tensor([-1.0, 0.5, 3.0, float("-inf")])
    output = launch(q, k, v, None, lengths, sinks, 0.0, tile=TILE, **divided)
    keys, values = (x[0].repeat_interleave(2, 1).double() for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q[0, 0].double() * 16**-0.5, keys)
    weights = torch.cat((scores, sinks.double()[:, None]), -1).softmax(-1)[:, :200]
    torch.testing.assert_close(
        output[0, 0].double(), torch.einsum("hk,khd->hd", weights, values), rtol=1e-4, atol=1e-5
    )
    assert not output[1].any()


def test_strided_table_and_lengths(agrees):
    def strided(inputs):
        table = inputs["block_table"].t().contiguous().t()
        return {"block_table": table, "lengths": inputs["lengths"].repeat_interleave(2)[::2]}

    agrees("attention_decode", SMALL | {"B": 2}, change=strided, page=16, lengths="mixed")


def draw(B=2, Sq=1, H=2, S=64, D=16):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(B, Sq, H, D, generator=generator)
    k, v = (torch.randn(B, S, H, D, generator=generator) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_any_number_of_parts_gives_the_same(parts):
    q, k, v = draw(S=100)
    lengths = torch.tensor([100, 3], dtype=torch.int32)
    one = launch(q, k, v, None, lengths, parts=1, tile=TILE)
    torch.testing.assert_close(launch(q, k, v, None, lengths, parts=parts, tile=TILE), one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shares", [1, 2, 3, 7, 30, 66])
@pytest.mark.parametrize("page", [0, 16])
def test_any_number_of_shares_gives_the_same(shares, page):
    """Sequences that begin or end within a share, fill several, or are empty; fewer tiles than shares too."""
    for tokens in ([100, 3], [64] * 5, [0, 0, 7], [1], [0], [200, 0, 1, 16, 17, 33, 150, 0, 0, 90]):
        q, k, v = draw(B=len(tokens), Sq=2, S=208)
        lengths = torch.tensor(tokens, dtype=torch.int32)
        one = launch(q, k, v, None, lengths, parts=1, tile=TILE)
        table = None
        if page:
            k, v = (x.reshape(-1, page, 2, 16) for x in (k, v))
            table = torch.arange(len(k), dtype=torch.int32).view(len(tokens), -1)
        found = launch(q, k, v, table, lengths, tile=TILE, shares=shares)
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("joined", [1, 2, 16])
def test_parts_are_joined_some_at_a_time(joined, monkeypatch):
    q, k, v = draw(B=3, S=700)
    lengths = torch.tensor([9, 700, 400], dtype=torch.int32)
    one = launch(q, k, v, None, lengths, parts=1, tile=TILE)
    monkeypatch.setattr(_decode_shares, "JOINED", joined)
    torch.testing.assert_close(launch(q, k, v, None, lengths, tile=TILE, shares=60), one, rtol=1e-5, atol=1e-6)


def test_shares_are_given_on_where_queries_are_too_many_for_a_program(monkeypatch):
    q, k, v = draw(Sq=300, S=310, D=256)
    lengths = torch.tensor([310, 290], dtype=torch.int32)
    taken = []
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *given: taken.append(given[-1]) or attend(*given))
    torch.testing.assert_close(launch(q, k, v, None, lengths, shares=3), launch(q, k, v, None, lengths, parts=1))
    assert len(taken) > 1
    assert set(taken) == {3}


def test_shares_are_taken_where_they_are_faster(monkeypatch):
    """The answer is that of parts."""
    q, k, v = (x.half() for x in draw(B=40, S=128, D=128))  # bf16's products are not the interpreter's
    table = torch.arange(40 * 2, dtype=torch.int32).view(40, 2)
    lengths = torch.arange(40, dtype=torch.int32) * 128 // 39
    paged = [x.reshape(-1, 64, 2, 128) for x in (k, v)]
    expected = launch(q, *paged, table, lengths, parts=1)
    taken = []
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *given: taken.append(given[-1]) or attend(*given))
    monkeypatch.setattr(_decode_shares, "LONG", 128)
    monkeypatch.setattr(module, "multiprocessors", lambda tensor: 16)
    monkeypatch.setattr(module, "capability", lambda device: HOPPER)
    torch.testing.assert_close(launch(q, *paged, table, lengths), expected, rtol=1e-2, atol=1e-3)
    assert taken == [32]


def test_a_token_that_sees_nothing_gives_zeros():
    q, k, v = draw(Sq=3)
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    for divided in ({"parts": 1}, {"parts": 2}, {"shares": 2}):
        output = launch(q, k, v, None, lengths, tile=TILE, **divided)
        assert torch.equal(output[0], torch.zeros_like(output[0]))
        assert torch.equal(output[1, :2], torch.zeros_like(output[1, :2]))
        torch.testing.assert_close(output[1, 2], v[1, 0])


def test_what_lies_beyond_a_length_is_not_seen():
    q, k, v = draw()
    lengths = torch.tensor([20, 64], dtype=torch.int32)
    expected = attention_decode(q, k, v, None, lengths)
    k[0, 20:], v[0, 20:] = float("nan"), float("inf")
    assert torch.equal(attention_decode(q, k, v, None, lengths), expected)


def test_large_scores_do_not_overflow():
    q, k, v = draw()
    lengths = torch.tensor([64, 64], dtype=torch.int32)
    output = attention_decode(q * 1e4, k * 1e4, v, None, lengths)
    best = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()).argmax(-1)
    picked = torch.stack([v[b, best[b, 0], torch.arange(2)] for b in range(2)])[:, None]
    torch.testing.assert_close(output, picked)


def test_split_fills_the_device_and_no_more():
    assert split(64, 8, 4096, TILE, 132) == 1
    assert split(64, 8, 4096, TILE._replace(fits=False), 132) == 2
    assert split(1, 8, 131072, TILE, 132) == 66
    assert split(1, 1, 131072, TILE, 132) == module.LONGEST_PARTS
    assert split(1, 8, 16, TILE, 132) == 1
    assert split(0, 8, 0, TILE, 132) == 1


@pytest.mark.parametrize(
    ("B", "heads", "tokens", "D", "shares"),
    [
        (1, 8, 131072, 128, 0),
        (16, 8, 8192, 128, 0),
        (17, 8, 8192, 128, 66),
        (64, 8, 4096, 128, 64),
        (64, 8, 2048, 128, 0),
        (100, 8, 2048, 128, 66),
        (96, 8, 1152, 128, 66),
        (112, 8, 1152, 128, 0),
        (132, 8, 4096, 128, 66),
        (133, 8, 4096, 128, 0),
        (300, 1, 4096, 128, 528),
        (1, 600, 4096, 128, 0),
        (40, 8, 3000, 256, 40),
        (60, 8, 1500, 256, 0),
        (60, 8, 3000, 256, 49),
        (100, 8, 3000, 256, 0),
    ],
)
def test_shares_fill_the_device_and_no_more(B, heads, tokens, D, shares):
    assert shares_of(B, heads, tokens, fit_for(16, D, 2, 64, HOPPER), 132) == shares


def test_programs_of_shares_have_registers_enough():
    assert fit_for(16, 128, 2, 64, HOPPER).registers == 128
    assert fit_for(16, 256, 2, 128, HOPPER).registers == 168


@pytest.mark.parametrize(
    ("rows", "D", "element", "page", "device"),
    [
        (32, 128, 2, 64, HOPPER),
        (16, 96, 2, 64, HOPPER),
        (16, 256, 4, 64, HOPPER),
        (16, 128, 2, 0, HOPPER),
        (16, 128, 2, 32, HOPPER),
        (16, 128, 2, 64, (8, 9)),
        (16, 128, 2, 64, (0, 0)),
    ],
)
def test_where_programs_of_shares_do_not_fit_or_were_not_measured_there_are_none(rows, D, element, page, device):
    assert fit_for(rows, D, element, page, device) is None


def test_tiles():
    """Those of several new tokens have longer pipelines over a block table, and fit as often as the others."""
    assert (
        tile_for(16, 128, 2, paged=True, device=(9, 0))
        == tile_for(16, 64, 2, paged=True, device=(9, 0))
        == (64, 4, 3, True)
    )
    assert tile_for(16, 128, 2, paged=False, device=(9, 0)) == (128, 8, 3, True)
    assert tile_for(16, 128, 2, paged=False, device=(8, 9)) == (64, 4, 3, True)
    assert tile_for(32, 128, 2, paged=True, device=(9, 0)) == (32, 2, 5, True)
    assert (
        tile_for(32, 128, 2, paged=False, device=(9, 0))
        == tile_for(64, 128, 2, paged=True, device=(9, 0))
        == (64, 4, 3, False)
    )
    assert (
        tile_for(16, 64, 4, paged=True, device=(9, 0))
        == tile_for(16, 256, 2, paged=False, device=(9, 0))
        == (32, 4, 3, True)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 2, 16)}, ValueError, "q has shape"),
        ({"q": torch.zeros(2, 1, 2, 300)}, ValueError, "q has head dimension 300"),
        ({"k_cache": torch.zeros(2, 64, 2, 16, dtype=torch.float16)}, TypeError, "k_cache has dtype"),
        ({"k_cache": torch.zeros(2, 64, 3, 16)}, ValueError, "k_cache has 3 heads"),
        ({"k_cache": torch.zeros(3, 64, 2, 16)}, ValueError, "k_cache has shape"),
        ({"v_cache": torch.zeros(2, 63, 2, 16)}, ValueError, "v_cache has shape"),
        ({"lengths": torch.zeros(2)}, TypeError, "lengths has dtype"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks has shape"),
        ({"cap": -1.0}, ValueError, "cap is -1"),
        ({"cap": float("nan")}, ValueError, "cap is nan"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, "lengths has shape"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int64)}, TypeError, "block_table has dtype"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "block_table has shape"),
        (
            {
                "block_table": torch.zeros(2, 1, dtype=torch.int32),
                "k_cache": torch.zeros(2, 24, 2, 16),
                "v_cache": torch.zeros(2, 24, 2, 16),
            },
            ValueError,
            "pages of 24 tokens",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_name_the_argument(change, error, message):
    q, k, v = draw()
    arguments = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_table": None,
        "lengths": torch.tensor([64, 64], dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        attention_decode(**arguments | change)


def test_torch_compile_sees_one_operator():
    q, k, v = draw()
    lengths = torch.tensor([64, 9], dtype=torch.int32)
    compiled = torch.compile(attention_decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, None, lengths), attention_decode(q, k, v, None, lengths))


def test_more_tokens_than_a_program_holds(monkeypatch):
    """Some at a time: what each sees does not change, in sequences shorter than the first ones too."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 9, 6, 40, generator=generator)
    k, v = (torch.randn(3, 90, 2, 40, generator=generator) for _ in range(2))
    lengths = torch.tensor([90, 9, 4], dtype=torch.int32)
    whole = attention_decode(q, k, v, None, lengths)
    monkeypatch.setattr(module, "LARGEST", 2 * 64 * 4 * 3 * 4)
    torch.testing.assert_close(attention_decode(q, k, v, None, lengths), whole)
    monkeypatch.setattr(module, "LARGEST", 1)  # a token at a time, of whatever heads there are
    torch.testing.assert_close(attention_decode(q, k, v, None, lengths), whole)


@pytest.mark.parametrize("cap", [1e4, 1e7])
def test_a_large_cap_is_nearly_none(cap):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 4, 32, generator=generator)
    k, v = (torch.randn(1, 50, 2, 32, generator=generator) for _ in range(2))
    lengths = torch.tensor([50], dtype=torch.int32)
    capped, plain = (attention_decode(q, k, v, None, lengths, cap=x) for x in (cap, 0.0))
    torch.testing.assert_close(capped, plain, rtol=1e-5, atol=1e-6)
