"""Our block-sparse attention through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention import attention_sparse as module
from kernelmark.kernels.attention.attention_sparse import LONGEST, attention_sparse, chosen, listed, walk
from kernelmark.suite.operators.attention_sparse import attended, choose, scores

SMALL = {"B": 1, "H": 2, "Hkv": 1, "S": 300, "D": 16}


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
    [{"B": 2, "S": 200}, {"H": 4, "Hkv": 2, "S": 200}, {"D": 24}, {"S": 129, "D": 80}, {"B": 0}, {"S": 0}],
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


@pytest.mark.parametrize(("mask", "heads", "S"), [("causal", 1, 300), ("full", 2, 300), ("causal", 4, 256)])
def test_gradients_of_any_mask_of_blocks(mask, heads, S):
    """Own blocks left out, queries without any, keys that nobody chose; gradients are laid out like the inputs."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(B=2, Hkv=1, S=S))
    blocks = masks(heads, -(-S // 128), 0.6)
    blocks[:, 1] = False
    blocks[0, :, 0] = False
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    shown = blocks if heads < 4 else blocks.view(2, 2, *blocks.shape[1:])
    # One mask a sequence is what a choice gives: the operator below takes it, the function one for all sequences.
    output = attention_sparse(*leaves, mask, blocks=blocks) if heads < 4 else walked(leaves, blocks)
    given = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(attended(*wide, mask, shown), wide, given.double())
    got = torch.autograd.grad(output, leaves, given)
    for x, y, leaf in zip(got, want, leaves, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)
        assert x.stride() == leaf.stride()
    again = torch.autograd.grad(
        attention_sparse(*leaves, mask, blocks=blocks) if heads < 4 else walked(leaves, blocks), leaves, given
    )
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


def walked(leaves, blocks):
    """A list for each head of each sequence."""
    lse = torch.empty(leaves[0].shape[:3])

    class Walk(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out = walk(q, k, v, *listed(blocks, True), True, lse=lse)
            ctx.save_for_backward(q, k, v, out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return torch.ops.kernelmark.attention_sparse_backward(grad, *ctx.saved_tensors, lse, blocks, True)

    return Walk.apply(*leaves)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_it_says_what_its_lists_leave_out(mask):
    """Of given blocks those that the mask lets see, and of a choice those that were chosen."""
    q, k, v = draw(B=2, S=500)
    blocks = masks(2, 4)
    dense, seen = (10, blocks.tril()) if mask == "causal" else (16, blocks)
    left_out = attention_sparse.tiles_left_out
    assert left_out(q, k, v, mask, 0, blocks) == pytest.approx(1 - int(seen.sum()) / (2 * dense))
    _, kept = attention_sparse(q, k, v, mask, threshold=6.0)
    assert left_out(q, k, v, mask, threshold=6.0) == pytest.approx(1 - int(kept.sum()) / (4 * dense))


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


def test_lists_of_keys_are_ascending():
    blocks = masks(1, 12)
    blocks[0, :, 3] = False
    for causal in (True, False):
        lists, counts = listed(blocks, causal, of_keys=True)
        seen = blocks[0].tril() if causal else blocks[0]
        for key in range(12):
            chose = seen[:, key].nonzero().flatten()
            assert lists[0, key, : len(chose)].tolist() == chose.tolist()
            assert counts[0, key] == len(chose)


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
        ({"sparsity": 33.3}, ValueError, "sparsity is 33.3, expected a whole number"),
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


@pytest.mark.parametrize("given", [True, False])
def test_torch_compile_trains_by_one_operator(given):
    leaves = [x.requires_grad_() for x in draw(S=200)]
    more = {"blocks": masks(1, 2)} if given else {"sparsity": 50}

    def loss(*leaves):
        output = attention_sparse(*leaves, **more)
        return (output if given else output[0]).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(call(*leaves), leaves) for call in (compiled, loss))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_no_log_sum_exp_without_gradients(monkeypatch):
    """Inference runs the kernel that it did before there was a backward pass."""
    asked = []
    real = module.walk
    monkeypatch.setattr(module, "walk", lambda *x, lse, **more: asked.append(lse) or real(*x, lse=lse, **more))
    q, k, v = draw(S=130)
    attention_sparse(q, k, v)
    with torch.no_grad():
        attention_sparse(q.requires_grad_(), k, v)
    assert asked == [None, None]
    attention_sparse(q, k, v)
    assert asked[2].shape == q.shape[:3]


def test_a_gate_alone_has_no_gradient():
    """Without one of q, k or v there is no log-sum-exp to walk back by."""
    q, k, v = draw(S=130)
    gate = torch.ones(2, 16, 4, requires_grad=True)
    output, _ = attention_sparse(q, k, v, gate_q=gate, gate_k=gate)
    assert not output.requires_grad
    output, _ = attention_sparse(q.requires_grad_(), k, v, gate_q=gate, gate_k=gate)
    output.sum().backward()
    assert gate.grad is None


@pytest.mark.parametrize("training", [True, False])
def test_registration(training):
    """In 16 bits, where the log-sum-exp has another dtype."""
    q, k, v = (x.half() for x in draw(S=130))
    checks = ("test_schema", "test_faketensor")
    given = (q, k, v, masks(1, 2), True, training)
    torch.library.opcheck(torch.ops.kernelmark.attention_sparse.default, given, test_utils=checks)
    choosing = (q, k, v, None, None, True, 50, -1.0, training)
    torch.library.opcheck(torch.ops.kernelmark.attention_sparse_chosen.default, choosing, test_utils=checks)


def test_one_token():
    q, k, v = draw(S=1)
    torch.testing.assert_close(attention_sparse(q, k, v)[0], v)
