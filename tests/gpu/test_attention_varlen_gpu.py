"""Packed attention's paths on a real GPU: the kernels for Hopper where the device is one, with PyTorch's switch
for deterministic algorithms off and on, and the portable ones.

In a process of its own, this file as a program: pytest's may have chosen Triton's interpreter.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial

import pytest
import torch

ODD = [700, 1, 0, 1030, 130, 64, 513, 999]
MANY = [17 * i % 700 for i in range(60)]

# D, lengths of queries, of keys, Hkv of 4 heads: tails and an empty sequence, more and fewer keys than queries, a
# sequence without keys, equal lengths, more tiles than a device has multiprocessors, heads of other columns than a
# tile, and a width that the kernels for Hopper do not take.
CASES = [
    (64, ODD, ODD, 2),
    (128, ODD, ODD, 2),
    (64, ODD, [900, 5, 70, 700, 0, 1000, 513, 1100], 4),
    (128, ODD, [900, 5, 70, 700, 0, 1000, 513, 1100], 1),
    (64, [1024] * 3, [1024] * 3, 4),
    (128, [1024] * 3, [1024] * 3, 1),
    (64, MANY, MANY, 2),
    (128, MANY, MANY, 2),
    (96, ODD, ODD, 2),
    (36, ODD, ODD, 2),
]

# The same with window, sinks and cap: windows shorter than a block and longer than most sequences, all alone and
# together, heads of each width that has columns left over.
OPTIONS = [
    (64, ODD, ODD, 1, 128, True, 0),
    (64, MANY, MANY, 2, 1, False, 0),
    (64, ODD, [900, 5, 70, 700, 0, 1000, 513, 1100], 4, 300, False, 50),
    (128, ODD, ODD, 2, 300, False, 0),
    (128, ODD, [900, 5, 70, 700, 0, 1000, 513, 1100], 1, 77, True, 0),
    (128, MANY, MANY, 2, 0, True, 30),
    (40, ODD, ODD, 2, 0, False, 0),
    (72, ODD, [900, 5, 70, 700, 0, 1000, 513, 1100], 4, 0, True, 0),
    (80, ODD, ODD, 4, 1000, False, 0),
    (112, MANY, MANY, 1, 0, False, 50),
    (120, ODD, ODD, 2, 64, True, 0),
]

# Passes by kernels for Hopper, and whether deterministic algorithms are asked for.
PATHS = [(("forward", "backward"), False), (("forward", "backward"), True), ((), False)]


def draw(D, lengths, keys, Hkv):
    """(q, k, v), dO and what says where sequences begin."""
    generator = torch.Generator("cuda").manual_seed(D + sum(keys))
    q, k, v, grad = (
        torch.randn(sum(n), heads, D, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n, heads in ((lengths, 4), (keys, Hkv), (keys, Hkv), (lengths, 4))
    )
    starts = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in (lengths, keys)
    ]
    return [x.requires_grad_() for x in (q, k, v)], grad, (*starts, max(lengths), max(keys))


def run(leaves, grad, rest, mask, fixed, window=0, cap=0):
    """Output and the gradients, of sinks too where these are the fourth leaf."""
    from kernelmark.kernels.attention.attention_varlen import attention_varlen

    torch.use_deterministic_algorithms(fixed)
    try:
        out = attention_varlen(*leaves[:3], *rest, mask, window or None, *(leaves[3:] or [None]), cap)
        return (out, *torch.autograd.grad(out, leaves, grad))
    finally:
        torch.use_deterministic_algorithms(False)


def errors(D, lengths, keys, Hkv, *options, infinite=False):
    """Relative norms of the deviations of output and gradients, of each path; options are a window, whether there
    are sinks, a cap and the mask, or this alone. With `infinite` one key of seven is -inf, of which a sequence's
    first is none.
    """
    from kernelmark.kernels.attention import attention_varlen as module
    from kernelmark.suite.operators.attention_varlen import reference

    window, sunk, cap, mask = options if len(options) > 1 else (0, False, 0, *options)
    leaves, grad, rest = draw(D, lengths, keys, Hkv)
    if sunk:
        leaves.append(torch.linspace(-1, 3, 4, device="cuda").requires_grad_())
    if infinite:
        with torch.no_grad():
            leaves[0][..., 0] = 1
            leaves[1][torch.cat([torch.arange(n) % 7 == 3 for n in keys]).cuda(), :, 0] = float("-inf")
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = reference(*wide[:3], *rest, mask, window, *(wide[3:] or [None]), cap)
    want = (want, *torch.autograd.grad(want, wide, grad.double()))
    found = []
    for module.HOPPER, fixed in PATHS:
        got = run(leaves, grad, rest, mask, fixed, window, cap)
        found.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)])
    return found


def changes(D, lengths, keys, Hkv, mask):
    """How many of 30 runs gave other bits than the first in the output, dQ, dK and dV, of each path, beside work
    that shifts their schedule.
    """
    from kernelmark.kernels.attention import attention_varlen as module

    leaves, grad, rest = draw(D, lengths, keys, Hkv)
    other = torch.cuda.Stream()
    ballast = torch.randn(1024, 1024, device="cuda")
    found = []
    for module.HOPPER, fixed in PATHS:
        first = run(leaves, grad, rest, mask, fixed)
        counts = [0, 0, 0, 0]
        for i in range(30):
            with torch.cuda.stream(other):
                for _ in range(i % 5):
                    ballast @ ballast
            again = run(leaves, grad, rest, mask, fixed)
            counts = [n + (not torch.equal(a, b)) for n, a, b in zip(counts, first, again, strict=True)]
        found.append(counts)
    return found


@pytest.fixture(scope="module")
def accuracy(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_varlen_gpu", "errors"))


@pytest.fixture(scope="module")
def hardship(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_varlen_gpu", "extremes"))


@pytest.fixture(scope="module")
def repeats(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_varlen_gpu", "changes"))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(accuracy, case, mask):
    for path in accuracy[json.dumps([*case, mask])]:
        output, *gradients = path
        assert output < 5e-3, path
        assert all(x < 1e-2 for x in gradients), path  # a NaN is not


@pytest.fixture(scope="module")
def variants(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_varlen_gpu", "variants"))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_windows_sinks_and_caps(variants, case, mask):
    for path in variants[json.dumps([*case, mask])]:
        output, *gradients = path
        assert output < 5e-3, path
        assert all(x < 1e-2 for x in gradients), path  # a NaN is not


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_of_minus_infinity(hardship, case, mask):
    """dQ is NaN by them."""
    for path in hardship[json.dumps([*case, mask])]:
        output, _, *gradients = path
        assert output < 5e-3, path
        assert all(x < 1e-2 for x in gradients), path  # a NaN is not


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_every_time(repeats, case, mask):
    """But for dQ on Hopper, where the switch is off."""
    shipped, fixed, portable = repeats[json.dumps([*case, mask])]
    assert fixed == portable == [0, 0, 0, 0]
    output, _, dk, dv = shipped
    assert (output, dk, dv) == (0, 0, 0)


if __name__ == "__main__":
    extremes = partial(errors, infinite=True)
    of = {"errors": errors, "variants": errors, "extremes": extremes, "changes": changes}[sys.argv[1]]
    cases = OPTIONS if sys.argv[1] == "variants" else CASES
    print(
        json.dumps(
            {json.dumps([*x, mask]): of(*x, mask) for x, mask in itertools.product(cases, ["causal", "full"])}
        )
    )
