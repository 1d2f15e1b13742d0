"""Attention whose values are narrower or wider than its keys, on drawn shapes and layouts, on a real GPU: output
and gradients no further from fp64 than 1.1 times PyTorch's own. Decoding from latent vectors no further than 1.1
times the portable kernel.

In a process of its own, this file as a program: pytest's may have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import random
from typing import NamedTuple

import pytest
import torch

from .test_gradients_gpu import ALLOWED

SEED = 7
DRAWS = 24
SCORES = 1 << 26
"""In fp64 half a GiB, of which a few are held at a time."""
DIMENSIONS = ((192, 128), (192, 128), (136, 72), (168, 104), (96, 64), (72, 40), (64, 128))


class Draw(NamedTuple):
    """A shape, a layout, and how many places away a key is hidden, 0 for none."""

    B: int
    H: int
    Hkv: int
    S: int
    D: int
    Dv: int
    mask: str
    storage: str
    dtype: str
    window: int


FIXED = (
    Draw(1, 16, 16, 2048, 192, 128, "causal", "bhsd", "bfloat16", 0),  # DeepSeek-V3's heads
    Draw(1, 8, 8, 1337, 192, 128, "full", "bshd", "float16", 0),
    Draw(2, 8, 8, 1000, 96, 64, "causal", "bshd", "bfloat16", 0),  # MiniCPM3's
)


def drawn(seed=SEED, count=DRAWS):
    chance = random.Random(f"latent {seed}")
    found = list(FIXED)
    while len(found) < count:
        Hkv, groups = chance.choice((1, 2, 4)), chance.choice((1, 1, 2, 4))
        case = Draw(
            chance.choice((1, 2)), Hkv * groups, Hkv, int(2 ** chance.uniform(6, 11.5)),
            *chance.choice(DIMENSIONS), chance.choice(("causal", "full")), chance.choice(("bhsd", "bshd")),
            chance.choice(("bfloat16", "float16")), chance.choice((0, 0, 64, 200)),
        )  # fmt: skip
        if case.B * case.H * case.S * case.S <= SCORES:
            found.append(case)
    return found


def laid(case, generator, device):
    """q, k, v and the output's gradient, stored as the case says."""
    sizes = (case.H, case.D), (case.Hkv, case.D), (case.Hkv, case.Dv), (case.H, case.Dv)
    found = []
    for heads, columns in sizes:
        shape = (case.B, heads, case.S) if case.storage == "bhsd" else (case.B, case.S, heads)
        x = torch.randn(*shape, columns, device=device, generator=generator).to(getattr(torch, case.dtype))
        found.append(x if case.storage == "bhsd" else x.transpose(1, 2))
    return found


def errors(case, device="cuda"):
    """Relative norms of the deviations from fp64 of output, dQ, dK and dV: ours, and PyTorch's."""
    from kernelmark.kernels.attention.attention import attention
    from torch.nn.functional import scaled_dot_product_attention

    *tensors, grad = laid(case, torch.Generator(device).manual_seed(case.S + case.D), device)
    at = torch.arange(case.S, device=device)
    apart = at[:, None] - at
    seen = apart >= 0 if case.mask == "causal" else apart == apart
    if case.window:
        seen = seen & (apart.abs() < case.window)

    def exact(q, k, v):
        k, v = (x.repeat_interleave(case.H // case.Hkv, 1) for x in (k, v))
        return (q @ k.mT * case.D**-0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ v

    def ours(q, k, v):
        return attention(q, k, v, case.mask, case.window or None)

    def theirs(q, k, v):
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    def results(call, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        output = call(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))

    want = results(exact, torch.float64)
    found = []
    for call in (ours, theirs):
        got = results(call, tensors[0].dtype)
        found.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)])
    return found


class Decoding(NamedTuple):
    """New tokens and heads, a page, the cached tokens of each sequence."""

    Sq: int
    H: int
    page: int
    dtype: str
    lengths: tuple[int, ...]


def decodings(seed=SEED, count=16):
    chance = random.Random(f"decoding {seed}")
    found = [Decoding(1, 128, 64, "bfloat16", (4096,) * 3), Decoding(1, 16, 64, "bfloat16", (100000,))]
    while len(found) < count:
        lengths = (int(2 ** chance.uniform(0, 13)) for _ in range(chance.choice((1, 2, 7, 40))))
        found.append(
            Decoding(
                chance.choice((1, 1, 2, 5)), chance.choice((1, 5, 16, 20, 64, 128)),
                chance.choice((16, 32, 64, 128)), chance.choice(("bfloat16", "float16")), tuple(lengths),
            )
        )  # fmt: skip
    return found


def decoded(case, device="cuda"):
    """The relative norms of the deviations from fp64: of the kernel that is taken, and of the portable one. What
    lies behind a sequence's length is no number.
    """
    from kernelmark.kernels.attention import attention_mla_decode as module

    generator = torch.Generator(device).manual_seed(sum(case.lengths))
    B, across, dtype = len(case.lengths), -(-max(case.lengths) // case.page), getattr(torch, case.dtype)
    q = torch.randn(B, case.Sq, case.H, 576, device=device, generator=generator).to(dtype)
    cache = torch.randn(B * across, case.page, 576, device=device, generator=generator).to(dtype)
    table = torch.randperm(B * across, device=device, generator=generator).int().view(B, across)
    want = []
    for b, length in enumerate(case.lengths):
        pages = cache[table[b].long()].view(-1, 576)
        pages[length:] = float("nan")
        cache[table[b].long()] = pages.view(across, case.page, 576)
        keys = pages[:length].double()
        at = torch.arange(length, device=device)
        seen = at <= length - case.Sq + torch.arange(case.Sq, device=device)[:, None]
        scores = (q[b].double() @ keys.mT * 192**-0.5).masked_fill(~seen[:, None], float("-inf"))
        want.append(scores.softmax(-1).nan_to_num(0) @ keys[:, :512])
    want = torch.stack(want)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    found = []
    for kernel in (module._hopper, lambda device: None):
        taken, module._hopper = module._hopper, kernel
        got = module.attention_mla_decode(q, cache, table, lengths, 512, 192**-0.5)
        module._hopper = taken
        found.append(((got.double() - want).norm() / want.norm()).item())
    return found


@pytest.fixture(scope="module")
def measured(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_latent_gpu"))


@pytest.mark.parametrize("case", drawn(), ids=lambda x: "-".join(map(str, x)))
def test_no_further_from_fp64_than_pytorch(measured, case):
    ours, theirs = measured[json.dumps(case)]
    assert all(a <= ALLOWED * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("case", decodings(), ids=lambda x: "-".join(map(str, (*x[:4], *x.lengths[:3]))))
def test_decoding_no_further_from_fp64_than_the_portable_kernel(measured, case):
    ours, portable = measured[json.dumps(case)]
    assert ours <= ALLOWED * portable, (ours, portable)


if __name__ == "__main__":
    found = {json.dumps(x): errors(x) for x in drawn()}
    print(json.dumps(found | {json.dumps(x): decoded(x) for x in decodings()}))
