"""Attention over lists of blocks on a real GPU: the kernels for Hopper where the device is one, else the portable;
and its gradients.

In a process of its own, this file as a program: pytest's may have chosen Triton's interpreter.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch

# D, S, Hkv of 8 heads, heads of the mask: widths of tiles, what is filled up to them, grouped heads, more blocks
# of queries than a device has multiprocessors, and in the last what goes to the portable kernel.
CASES = [
    (64, 4096, 8, 8),
    (64, 4096, 2, 1),
    (40, 1280, 8, 8),
    (48, 2304, 4, 8),
    (128, 4096, 8, 8),
    (128, 1280, 2, 1),
    (64, 1152, 8, 8),
]
HEADS = 8


def draw(D, S, Hkv, heads):
    """(q, k, v) and blocks of which three in ten are kept, one row of them without any."""
    generator = torch.Generator("cuda").manual_seed(D + S)
    leaves = [
        torch.randn(1, n, S, D, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in (HEADS, Hkv, Hkv)
    ]
    n = -(-S // 128)
    blocks = torch.rand(heads, n, n, device="cuda", generator=generator) < 0.3
    blocks[:, n // 2] = False
    return leaves, blocks


def call(leaves, blocks, mask):
    from kernelmark.kernels.attention.attention_sparse import attention_sparse

    return attention_sparse(*leaves, mask, blocks=blocks)


def error(D, S, Hkv, heads, mask):
    """The relative norm of the deviation from fp64, and how many numbers of rows that see nothing are not 0."""
    leaves, blocks = draw(D, S, Hkv, heads)
    q, k, v = (x.double().repeat_interleave(HEADS // x.shape[1], 1) for x in leaves)
    seen = blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :S, :S]
    if mask == "causal":
        seen = seen.tril()
    weights = (q @ k.mT * D**-0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    blind = ~seen.any(-1)
    want = weights.masked_fill(blind[None, :, :, None], 0) @ v
    got = call(leaves, blocks, mask)
    hidden = got.masked_select(blind.expand(HEADS, S)[None, :, :, None])
    return ((got.double() - want).norm() / want.norm()).item(), int(hidden.count_nonzero())


def gradients(D, S, Hkv, heads, mask):
    """Relative norms of the deviations of dQ, dK and dV from fp64, and whether they are the same bits twice."""
    leaves, blocks = draw(D, S, Hkv, heads)
    leaves = [x.requires_grad_() for x in leaves]
    grad = torch.randn_like(leaves[0])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    k, v = (x.repeat_interleave(HEADS // Hkv, 1) for x in wide[1:])
    seen = blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :S, :S]
    if mask == "causal":
        seen = seen.tril()
    blind = ~seen.any(-1, keepdim=True)
    scores = (wide[0] @ k.mT * D**-0.5).masked_fill(~(seen | blind), float("-inf"))
    output = scores.softmax(-1).masked_fill(blind, 0) @ v
    want = torch.autograd.grad(output, wide, grad.double())
    got, again = (torch.autograd.grad(call(leaves, blocks, mask), leaves, grad) for _ in range(2))
    off = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
    return off, all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def others(D, S, Hkv, heads, mask):
    """How many outputs are others than the first: of 60 one after the other, then of launches at the same time."""
    from .company import disturbed

    leaves, blocks = draw(D, S, Hkv, heads)
    alone = call(leaves, blocks, mask)
    repeated = sum(not torch.equal(call(leaves, blocks, mask), alone) for _ in range(60))
    return repeated, disturbed(lambda: (call(leaves, blocks, mask),))


@pytest.fixture(scope="module")
def answers(apart):
    """By case and mask, of a process of its own."""
    return json.loads(apart("-m", "tests.gpu.test_attention_sparse_gpu"))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(answers, case, mask):
    off, written = answers[json.dumps([*case, mask])]["error"]
    assert off < 5e-3
    assert written == 0


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(answers, case, mask):
    off, same = answers[json.dumps([*case, mask])]["gradients"]
    assert all(x < 1e-2 for x in off), off
    assert same


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_every_time(answers, case, mask):
    """Alone and beside others: launches share no counter."""
    assert answers[json.dumps([*case, mask])]["others"] == [0, 0]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                json.dumps([*case, mask]): {
                    "error": error(*case, mask),
                    "gradients": gradients(*case, mask),
                    "others": others(*case, mask),
                }
                for case, mask in itertools.product(CASES, ["causal", "full"])
            }
        )
    )
