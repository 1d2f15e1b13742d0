"""Attention over lists of blocks on a real GPU: the kernels for Hopper where the device is one, else the portable.

In a process of its own, this file as a program: pytest's may have chosen Triton's interpreter.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

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
    from kernelmark.kernels.attention_sparse import attention_sparse

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


def others(D, S, Hkv, heads, mask):
    """How many outputs are others than the first: of 60 one after the other, then of 20 on each of two streams at
    once and of a graph replayed as often on a third.
    """
    leaves, blocks = draw(D, S, Hkv, heads)
    alone = call(leaves, blocks, mask)
    repeated = sum(not torch.equal(call(leaves, blocks, mask), alone) for _ in range(60))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(leaves, blocks, mask)
    streams = [torch.cuda.Stream() for _ in range(3)]
    together = []
    for _ in range(20):
        captured.fill_(7)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[2]):
            graph.replay()
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                together.append(call(leaves, blocks, mask))
        torch.cuda.synchronize()
        together.append(captured.clone())
    return repeated, sum(not torch.equal(x, alone) for x in together)


@pytest.fixture(scope="module")
def answers():
    """By case and mask, of a process of its own."""
    environment = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(answers, case, mask):
    off, written = answers[json.dumps([*case, mask])]["error"]
    assert off < 5e-3
    assert written == 0


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_every_time(answers, case, mask):
    """Alone and beside others: launches share no counter."""
    assert answers[json.dumps([*case, mask])]["others"] == [0, 0]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                json.dumps([*case, mask]): {"error": error(*case, mask), "others": others(*case, mask)}
                for case, mask in itertools.product(CASES, ["causal", "full"])
            }
        )
    )
