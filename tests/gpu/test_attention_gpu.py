"""Attention's paths on a real GPU: the kernels for Hopper where the device is one, with PyTorch's switch for
deterministic algorithms off and on, and the portable ones.

In a process of its own, this file as a program: pytest's may have chosen Triton's interpreter.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys

import pytest
import torch

# D, S, Hkv of 4 heads, window: widths of tiles, what is filled up to them, tails, grouped heads; up to D = 64 also
# lengths that tiles of 192 rows divide, and not, so that one group of the first or two lie before the sequence; up
# to D = 128 more tiles than a device has multiprocessors.
CASES = [
    (64, 2048, 4, None),
    (64, 2304, 2, None),
    (48, 1024, 1, None),
    (128, 1024, 2, None),
    (96, 1024, 4, None),
    (40, 1280, 1, None),
    (256, 1024, 2, None),
    (160, 1024, 4, None),
    (64, 2048, 2, 300),
    (64, 1280, 1, 100),
    (48, 2304, 2, 1),
    (64, 1024, 4, 700),
    (64, 4096, 4, 700),
    (128, 2048, 4, 1024),
    (128, 1280, 4, 100),
    (128, 4352, 2, None),
    (128, 4352, 4, 1024),
    (256, 2048, 4, 500),
    (96, 1001, 2, 77),
    (256, 515, 4, None),
]

# Passes by kernels for Hopper, and whether deterministic algorithms are asked for.
PATHS = [(("forward", "backward"), False), (("forward", "backward"), True), ((), False)]


def paths():
    """Turns each path on, says whether it is deterministic; calls are prepared for it, not for the one before."""
    from kernelmark.kernels._launch import forget
    from kernelmark.kernels.attention import _dispatch

    for _dispatch.HOPPER, fixed in PATHS:
        forget()
        yield fixed


def expected(q, k, v, mask, window):
    """Output and log-sum-exp in fp64."""
    S = q.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(S, device=q.device)[:, None] - torch.arange(S, device=q.device)
    hidden = distance.abs() >= (window or S)
    if mask == "causal":
        hidden |= distance < 0
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def errors(D, S, Hkv, window, mask):
    """Relative norms of the deviations of output, log-sum-exp and the three gradients, of each path."""
    from kernelmark.kernels.attention import attention as module

    generator = torch.Generator("cuda").manual_seed(D + S)
    q, k, v, grad = (
        torch.randn(2, heads, S, D, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (4, Hkv, Hkv, 4)
    )
    grad_lse = torch.randn(2, 4, S, device="cuda", generator=generator)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = expected(*wide, mask, window)
    want = (*want, *torch.autograd.grad(want, wide, (grad.double(), grad_lse.double())))
    found = []
    for fixed in paths():
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.use_deterministic_algorithms(fixed)
        got = module.attention(*leaves, mask, window, return_lse=True)
        got = (*got, *torch.autograd.grad(got, leaves, (grad, grad_lse)))
        torch.use_deterministic_algorithms(False)
        found.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)])
    return found


def extremes(D, S, Hkv, window, mask):
    """What each path makes wrong of denormal and very large inputs, and of keys of -inf."""
    from kernelmark.kernels.attention import attention as module

    generator = torch.Generator("cuda").manual_seed(D + S)
    drawn = [torch.randn(1, heads, S, D, device="cuda", generator=generator) for heads in (4, Hkv, Hkv)]
    found = []
    for fixed in paths():
        torch.use_deterministic_algorithms(fixed)
        wrong = [f"inputs of {x:g}: {y}" for x in (1e-40, 1e3) for y in _scaled(module, drawn, x, window, mask)]
        wrong += [f"keys of -inf: {x}" for x in _infinite(module, drawn, window, mask)]
        found.append(wrong + _rising(module, [x.clone() for x in drawn], window, mask))
        torch.use_deterministic_algorithms(False)
    return found


def _scaled(module, drawn, scale, window, mask):
    leaves = [(x * scale).bfloat16().requires_grad_() for x in drawn]
    out, lse = module.attention(*leaves, mask, window, return_lse=True)
    named = {"output": out, "log-sum-exp": lse}
    named |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True))
    wrong = [f"{name} is not finite" for name, x in named.items() if not x.isfinite().all()]
    want, _ = expected(*(x.detach().double() for x in leaves), mask, window)
    # Scores of a million have no digits below 1/16; a denormal number's last digit is the least number's.
    least = torch.finfo(torch.bfloat16).smallest_normal * torch.finfo(torch.bfloat16).eps
    allowed = (0.05 if scale > 1 else 5e-3) * want.norm() + least * out.numel() ** 0.5
    return wrong + (["output"] if (out.double() - want).norm() > allowed else [])


def _infinite(module, drawn, window, mask):
    """Rows that see no other key give zeros and an lse of -inf; such keys have no gradient. dQ is NaN by them."""
    q, k, v = (x.bfloat16() for x in drawn)
    q = q.abs().clamp_min(0.01)
    k[:, :, :200, 3] = k[:, :, 500, 3] = float("-inf")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = module.attention(*leaves, mask, window, return_lse=True)
    _, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    want, level = expected(*(x.detach().double() for x in leaves), mask, window)
    empty = level == float("-inf")
    wrong = [] if torch.equal(lse == float("-inf"), empty) else ["which rows are empty"]
    if not (lse - level)[~empty].abs().max() < 1e-2:
        wrong.append("log-sum-exp")
    if out[empty].any():
        wrong.append("empty rows are not 0")
    if not (out.double() - want.nan_to_num(0)).norm() < 5e-3 * want.nan_to_num(0).norm():
        wrong.append("output")
    for name, x in (("dk", dk), ("dv", dv)):
        # A query that sees one key alone has no use for another weight.
        idle = name == "dk" and window == 1
        if not x.isfinite().all() or x[:, :, 500].any() or not (idle or x[:, :, 501].any()):
            wrong.append(name)
    return wrong


def _rising(module, drawn, window, mask):
    """Maxima that rise from one block of keys to the next, in most rows, by less than is let pass and by more."""
    q, k, v = drawn
    wrong = []
    for rise, dtype in itertools.product((0.5, 2, 7), (torch.bfloat16, torch.float16)):
        q[..., 0], k[..., 0] = q.shape[-1] ** 0.5, torch.arange(q.shape[2], 0, -1, device="cuda") / 128 * rise
        q[:, :, 5::7, 0] = 0
        narrow = [x.to(dtype) for x in (q, k, v)]
        out, lse = module.attention(*narrow, mask, window, return_lse=True)
        want, level = expected(*(x.double() for x in narrow), mask, window)
        if not (out.double() - want).norm() < 5e-3 * want.norm() or not (lse - level).abs().max() < 1e-2:
            wrong.append(f"maxima that rise by {rise}, {dtype}")
    return wrong


def changes(D, S, Hkv, window, mask):
    """How many of 30 times gave other bits than the first in output, log-sum-exp, dQ, dK and dV, of each path,
    beside work that shifts their schedule.
    """
    from kernelmark.kernels.attention import attention as module

    leaves = [
        torch.randn(2, heads, S, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, Hkv, Hkv)
    ]
    grad = torch.randn_like(leaves[0])
    other = torch.cuda.Stream()
    ballast = torch.randn(1024, 1024, device="cuda")
    found = []

    def results(fixed):
        torch.use_deterministic_algorithms(fixed)
        try:
            out, lse = module.attention(*leaves, mask, window, return_lse=True)
            return out, lse, *torch.autograd.grad(out, leaves, grad)
        finally:
            torch.use_deterministic_algorithms(False)

    for fixed in paths():
        first = results(fixed)
        counts = [0] * 5
        for i in range(30):
            with torch.cuda.stream(other):
                for _ in range(i % 5):
                    ballast @ ballast
            again = results(fixed)
            counts = [n + (not torch.equal(a, b)) for n, a, b in zip(counts, first, again, strict=True)]
        found.append(counts)
    return found


def beside(D, S, Hkv, window, mask):
    """How many outputs and log-sum-exps of launches at the same time were others than those of one alone."""
    from kernelmark.kernels.attention import attention as module

    from .company import disturbed

    q, k, v = (torch.randn(2, heads, S, D, device="cuda", dtype=torch.bfloat16) for heads in (4, Hkv, Hkv))

    def call():
        return module.attention(q, k, v, mask, window, return_lse=True)

    return disturbed(call)


@pytest.fixture(scope="module")
def accuracy(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_gpu", "errors"))


@pytest.fixture(scope="module")
def hardship(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_gpu", "extremes"))


@pytest.fixture(scope="module")
def repeats(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_gpu", "changes"))


@pytest.fixture(scope="module")
def company(apart):
    return json.loads(apart("-m", "tests.gpu.test_attention_gpu", "beside"))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_right(accuracy, case, mask):
    for path in accuracy[json.dumps([*case, mask])]:
        output, lse, *gradients = path
        assert output < 5e-3, path
        assert lse < 1e-3, path
        assert all(x < 1e-2 for x in gradients), path  # a NaN is not


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_extreme_inputs(hardship, case, mask):
    assert hardship[json.dumps([*case, mask])] == [[], [], []]


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_every_time(repeats, case, mask):
    """But for dQ on Hopper, where the switch is off."""
    shipped, fixed, portable = repeats[json.dumps([*case, mask])]
    assert fixed == portable == [0] * 5
    assert shipped[:2] == shipped[3:] == [0, 0]


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_beside_others(company, case, mask):
    """Launches at the same time do not disturb each other, by what they count in memory least of all."""
    assert company[json.dumps([*case, mask])] == 0


if __name__ == "__main__":
    of = {"errors": errors, "extremes": extremes, "changes": changes, "beside": beside}[sys.argv[1]]
    given = [(*x, mask) for x, mask in itertools.product(CASES, ["causal", "full"])]
    # Most of the time goes to compiling; what the first two compiled the others find. Those are about what runs at
    # once, and are alone.
    several = min(8, os.cpu_count() or 1) if of in (errors, extremes) else 1
    with multiprocessing.get_context("spawn").Pool(several) as pool:
        found = pool.starmap(of, given, chunksize=1)
    print(json.dumps({json.dumps(x): y for x, y in zip(given, found, strict=True)}))
