"""Our block-sparse attention through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention.attention_sparse import LONGEST, attention_sparse, chosen, listed
from kernelmark.suite.operators.attention_sparse import attended, choose, scores

SMALL = {"B": 1, "H": 2, "Hkv": 1, "S": 520, "D": 16}


@pytest.mark.parametrize("pattern", ["static", "dynamic", "learned"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_patterns(agrees, pattern, mask):
    agrees("attention_sparse", SMALL, pattern=pattern, mask=mask, sparsity=50)


@pytest.mark.parametrize(("mask", "S"), [("causal", 390), ("full", 260)])
def test_a_threshold(agrees, mask, S):
    agrees("attention_sparse", SMALL | {"S": S}, pattern="threshold", mask=mask, sparsity=90)


def test_a_threshold_of_nothing_keeps_the_largest_and_its_own():
    q, k, v = draw(S=384, H=1, Hkv=1)
    _, blocks = attention_sparse(q, k, v, threshold=0.0)
    assert blocks.sum(-1)[0, 0].tolist() == [1, 2, 2]
    with pytest.raises(ValueError, match="threshold is -1"):
        attention_sparse(q, k, v, threshold=-1)


@pytest.mark.parametrize(
    "axes",
    [{"B": 2, "H": 4, "Hkv": 2, "S": 384}, {"D": 24}, {"S": 1}, {"S": 129, "D": 80}, {"B": 0}, {"S": 0}],
    ids=str,
)
def test_shapes(agrees, axes):
    agrees("attention_sparse", SMALL | axes, pattern="learned", sparsity=75)


def test_half_precision(agrees):
    agrees("attention_sparse", SMALL, "fp16", pattern="dynamic", sparsity=75)


def test_strided_inputs(agrees):
    def strided(inputs):
        return {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}

    agrees("attention_sparse", SMALL, change=strided, pattern="dynamic", sparsity=50)


def draw(B=1, H=2, Hkv=2, S=384, D=16):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(B, heads, S, D, generator=generator) for heads in (H, Hkv, Hkv)]


def masks(heads, n, share=0.5):
    return torch.rand(heads, n, n, generator=torch.Generator().manual_seed(5)) < share


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("heads", [1, 2])
def test_any_mask_of_blocks(mask, heads):
    """Own blocks left out, rows without any, blocks that the causal mask hides."""
    q, k, v = draw(B=2, Hkv=1, S=600)
    blocks = masks(heads, 5)
    blocks[:, 2] = False
    output = attention_sparse(q, k, v, mask, blocks=blocks)
    wide = attended(q.double(), k.double(), v.double(), mask, blocks)
    torch.testing.assert_close(output.double(), wide, rtol=1e-4, atol=1e-5)
    assert torch.equal(output[:, :, 256:384], torch.zeros_like(output[:, :, 256:384]))


def test_a_mask_may_be_strided():
    q, k, v = draw()
    blocks = masks(2, 3)
    turned = blocks.mT.contiguous().mT
    assert turned.stride() != blocks.stride()
    assert torch.equal(attention_sparse(q, k, v, blocks=turned), attention_sparse(q, k, v, blocks=blocks))


def test_lists_are_descending_and_an_empty_row_has_its_own_block():
    blocks = masks(2, 20)
    blocks[1, 7] = False
    for causal in (True, False):
        lists, counts = listed(blocks, causal)
        for head in range(2):
            for row in range(20):
                kept = blocks[head, row].nonzero().flatten()
                kept = kept[kept <= row] if causal else kept
                assert counts[head, row] == len(kept)
                assert lists[head, row, : len(kept)].tolist() == kept.flip(0).tolist()
                assert len(kept) or lists[head, row, 0] == row


@pytest.mark.parametrize("sparsity", [0, 30, 99])
def test_choice_is_the_reference_s(sparsity):
    q, k, _ = draw(B=2, H=4, S=128 * 18 - 5)
    for mask in ("causal", "full"):
        blocks, lists, counts = chosen(q, k, None, None, mask == "causal", sparsity)
        expected = choose(scores(q.double(), k.double(), mask, None, None), mask, sparsity)
        assert torch.equal(blocks, expected)
        again = listed(expected.flatten(0, 1), mask == "causal")
        assert torch.equal(counts, again[1])
        used = torch.arange(18) < counts[..., None]
        assert torch.equal(lists[used], again[0][used])


def test_of_equal_scores_the_first_are_chosen():
    q, k, _ = draw(S=128 * 10)
    blocks, _, _ = chosen(torch.zeros_like(q), k, None, None, False, 70)
    for row in range(10):
        first = [x for x in range(10) if x != row][:2]
        assert blocks[0, 0, row].nonzero().flatten().tolist() == sorted([row, *first])


def test_scores_that_are_no_numbers_are_chosen_last():
    q, k, _ = draw(S=128 * 4)
    k[0, :, :128] = float("nan")
    blocks, _, counts = chosen(q, k, None, None, False, 25)
    assert counts.unique().tolist() == [3]
    assert blocks[0, 0].sum(-1).tolist() == [3] * 4
    assert not blocks[0, 0, 1:, 0].any()


def test_large_scores_do_not_overflow():
    q, k, v = draw()
    output = attention_sparse(q * 1e4, k * 1e4, v, blocks=masks(1, 3))
    assert bool(output.isfinite().all())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask": "sliding"}, ValueError, "mask is 'sliding'"),
        ({"q": torch.zeros(2, 384, 16)}, ValueError, "q has shape"),
        ({"q": torch.zeros(1, 2, 384, 300)}, ValueError, "q has head dimension 300"),
        ({"k": torch.zeros(1, 2, 384, 16, dtype=torch.float16)}, TypeError, "k has dtype"),
        ({"k": torch.zeros(1, 3, 384, 16)}, ValueError, "k has 3 heads"),
        ({"v": torch.zeros(1, 2, 383, 16)}, ValueError, "v has shape"),
        ({"blocks": torch.zeros(1, 3, 3)}, TypeError, "blocks has dtype"),
        ({"blocks": torch.zeros(3, 3, 3, dtype=torch.bool)}, ValueError, "blocks has shape"),
        ({"blocks": torch.zeros(1, 3, 2, dtype=torch.bool)}, ValueError, "blocks has shape"),
        ({"sparsity": 100}, ValueError, "sparsity is 100"),
        ({"gate_q": torch.zeros(2, 16, 4)}, TypeError, "gate_k must be a tensor"),
        ({"gate_k": torch.zeros(2, 16, 4)}, TypeError, "gate_q must be a tensor"),
        ({"gate_q": torch.zeros(2, 16, 300)}, ValueError, "gate_q has 300 features"),
        ({"gate_q": torch.zeros(2, 15, 4)}, ValueError, "gate_q has shape"),
        ({"gate_q": torch.zeros(2, 16, 4), "gate_k": torch.zeros(2, 16, 5)}, ValueError, "gate_k has shape"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_name_the_argument(change, error, message):
    q, k, v = draw()
    with pytest.raises(error, match=message):
        attention_sparse(**{"q": q, "k": k, "v": v} | change)


def test_too_many_tokens_to_choose_among():
    q = torch.zeros(1, 1, 1, 1).expand(1, 1, LONGEST + 1, 1)
    with pytest.raises(ValueError, match="to choose among"):
        attention_sparse(q, q, q)


@pytest.mark.parametrize("given", [True, False])
def test_torch_compile_sees_one_operator(given):
    q, k, v = draw()
    more = {"blocks": masks(1, 3)} if given else {"sparsity": 50}
    compiled = torch.compile(attention_sparse, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, **more), attention_sparse(q, k, v, **more))
