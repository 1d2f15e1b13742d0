"""Our attention over packed sequences through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels.attention import _attention_varlen_hopper_backward as unordered
from kernelmark.kernels.attention import attention_varlen as module
from kernelmark.kernels.attention.attention import attention
from kernelmark.kernels.attention.attention_varlen import attention_varlen
from kernelmark.kernels.cpu.attention_varlen import attention_varlen as on_cpu
from kernelmark.suite.operators.attention_varlen import reference
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative norm of the deviation that rounding explains; the interpreter truncates to bf16."""


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def draw(lengths, H, Hkv, D, dtype=torch.float32, keys=None, scale=1.0):
    """Arguments up to the mask: q, k, v, two times where sequences start, and their longest."""
    keys = lengths if keys is None else keys
    generator = torch.Generator().manual_seed(sum(lengths) * 1000 + D)
    tensors = [
        (torch.randn(tokens, heads, D, generator=generator) * scale).to(dtype).requires_grad_()
        for tokens, heads in ((sum(lengths), H), (sum(keys), Hkv), (sum(keys), Hkv))
    ]
    return [*tensors, starts(lengths), starts(keys), max(lengths, default=0), max(keys, default=0)]


def check(inputs, mask, tolerance=None, implementation=attention_varlen, sinks=None, **options):
    """Output and gradients of ours beside the reference's."""
    leaves, rest = inputs[:3], inputs[3:]
    q = leaves[0]
    tolerance = tolerance or TOLERANCE[q.dtype]
    options |= {} if sinks is None else {"sinks": sinks}
    output = implementation(*leaves, *rest, mask, **options)
    assert output.shape == q.shape
    assert output.dtype == q.dtype
    assert output.is_contiguous()
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(7)).to(q.dtype)
    beside = [] if sinks is None else [sinks]
    # Where nothing is seen the reference's output has no sinks in it.
    unseen = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(output, [*leaves, *beside], grad, **unseen)
    wide = [x.detach().double().requires_grad_() for x in (*leaves, *beside)]
    options |= {} if sinks is None else {"sinks": wide[3]}
    expected = reference(*wide[:3], *rest, mask, **options)
    wanted = (expected, *torch.autograd.grad(expected, wide, grad.double(), **unseen))
    # A query with one key has no gradient: what two equal numbers differ by when they were rounded apart.
    longest = [x.detach().float().norm(dim=-1).max().item() if x.numel() else 0.0 for x in leaves]
    least = 1e-6 + 2**-24 * grad.float().norm().item() * longest[2] * max(longest[:2]) * q.shape[-1] ** -0.5
    names = ("output", "dq", "dk", "dv", *["sinks"] * len(beside))
    for name, got, want in zip(names, (output, *gradients), wanted, strict=True):
        assert got.shape == want.shape, name
        size = want.detach().norm().item()
        error = (got.detach().double() - want.detach()).norm().item()
        assert error <= tolerance * size + least, (name, error, size)


MASKS = pytest.mark.parametrize("mask", ["causal", "full"])


@MASKS
@pytest.mark.parametrize(
    ("lengths", "H", "Hkv", "D"),
    [
        ([128], 1, 1, 16),
        ([65, 1, 70], 2, 1, 64),
        ([3, 0, 40, 0], 4, 2, 32),
        ([33, 64, 31], 3, 1, 48),
        ([17, 20], 1, 1, 160),
        ([1, 1, 1], 2, 2, 8),
    ],
)
def test_fp32(lengths, H, Hkv, D, mask):
    check(draw(lengths, H, Hkv, D), mask)


@MASKS
@pytest.mark.parametrize(
    ("lengths", "keys"),
    [
        ([40, 5, 70], [70, 66, 40]),
        ([100, 3], [30, 3]),
        ([1, 1, 1], [65, 1, 2]),
        ([20, 0, 7], [0, 9, 7]),
    ],
)
def test_more_or_fewer_keys_than_queries(lengths, keys, mask):
    """The causal mask ends where both do; early queries of the longer side see nothing and give zeros."""
    inputs = draw(lengths, 2, 1, 16, keys=keys)
    check(inputs, mask)
    output = attention_varlen(*(x.detach() for x in inputs[:5]), *inputs[5:], mask)
    for at, (queries, other) in zip(starts(lengths).tolist(), zip(lengths, keys, strict=True), strict=False):
        blind = max(0, queries - other) if mask == "causal" or not other else 0
        assert not output[at : at + blind].any()


@settings(max_examples=8)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=4),
    mask=st.sampled_from(["causal", "full"]),
)
def test_any_lengths(pairs, mask):
    lengths, keys = zip(*pairs, strict=True)
    check(draw(lengths, 2, 1, 16, keys=keys), mask)


@settings(max_examples=5)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 100)), min_size=1, max_size=2),
    mask=st.sampled_from(["causal", "full"]),
    window=st.none() | st.integers(1, 120),
    cap=st.sampled_from([0.0, 1.5]),
    sunk=st.booleans(),
    apart=st.booleans(),
)
def test_any_options(pairs, mask, window, cap, sunk, apart):
    """Windows, caps and sinks, alone and together, over lengths of each side, contiguous and as views."""
    lengths, keys = zip(*pairs, strict=True)
    inputs = draw(lengths, 4, 2, 16, keys=keys)
    if apart:
        inputs[:3] = [torch.cat((x.detach(),) * 2, 1)[:, : x.shape[1]].requires_grad_() for x in inputs[:3]]
    sinks = torch.linspace(-2, 3, 4).requires_grad_() if sunk else None
    # A gradient in sinks is a sum over tokens of what cancels.
    check(inputs, mask, 2e-5, sinks=sinks, window=window, cap=cap)


def test_options_that_are_none_are_left_out():
    inputs = draw([40, 9], 2, 2, 16)
    plain = attention_varlen(*inputs)
    assert torch.equal(plain, attention_varlen(*inputs, window=None, sinks=None, cap=0.0))
    assert torch.equal(plain, attention_varlen(*inputs, window=40))
    nothing = torch.full((2,), -math.inf)
    assert torch.equal(plain, attention_varlen(*inputs, sinks=nothing))


@MASKS
@pytest.mark.parametrize("keys", [None, [70, 70, 40, 20, 6, 0]])
def test_on_a_cpu(mask, keys):
    lengths = [30, 30, 40, 0, 6, 6]
    check(draw(lengths, 4, 2, 16, keys=keys), mask, implementation=lambda *x: on_cpu(*x).contiguous())


@pytest.fixture
def _bf16_matmul(monkeypatch):
    """Triton 3.7's interpreter keeps bf16 as its bits, and multiplies those."""
    multiply = InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar.is_bf16():
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return x

    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest),
    )


@pytest.mark.usefixtures("_bf16_matmul")
@MASKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, mask):
    check(draw([70, 30, 65], 2, 1, 64, dtype), mask)


@MASKS
def test_equal_lengths_are_dense_attention(mask):
    inputs = draw([70] * 3, 2, 1, 16)
    packed = [x.detach().requires_grad_() for x in inputs[:3]]
    dense = [x.detach().unflatten(0, (3, 70)).transpose(1, 2).contiguous().requires_grad_() for x in packed]
    one, other = attention_varlen(*packed, *inputs[3:], mask), attention(*dense, mask)
    torch.testing.assert_close(one.unflatten(0, (3, 70)).transpose(1, 2), other, rtol=1e-5, atol=1e-6)
    gradients = zip(torch.autograd.grad(one.sum(), packed), torch.autograd.grad(other.sum(), dense), strict=True)
    for a, b in gradients:
        torch.testing.assert_close(a.unflatten(0, (3, 70)).transpose(1, 2), b, rtol=1e-5, atol=1e-6)


def test_packed_projections_and_other_layouts():
    """Views of one (T, 3, H, D), heads before tokens, and a last dimension that is not contiguous."""
    q, k, v, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in draw([40, 9], 2, 2, 16))
    both = torch.stack((q, k, v), 1)
    check([*(x.requires_grad_() for x in both.unbind(1)), *rest], "causal")
    q = q.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    k = k[:, :1].expand(49, 2, 16).requires_grad_()
    check([q, k, v.mT.contiguous().mT.requires_grad_(), *rest], "causal")


def test_starts_may_be_strided():
    q, k, v, cu, _, *longest = draw([40, 9], 2, 2, 16)
    apart = torch.stack((cu, cu), 1)[:, 0]
    assert torch.equal(
        attention_varlen(q, k, v, apart, apart, *longest), attention_varlen(q, k, v, cu, cu, *longest)
    )


def test_expanded_gradient():
    q, k, v, *rest = draw([20, 11], 1, 1, 16)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(attention_varlen(q, k, v, *rest).sum(), (q, k, v))
    want = torch.autograd.grad(reference(*wide, *rest, "causal").sum(), wide)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@MASKS
@pytest.mark.parametrize("sign", [1, -1])
def test_large_magnitudes(mask, sign):
    """Scores of about ±1000, far beyond what 2^x holds, and tails whose zeros would stand out among them.

    Numpy warns of overflow in the rows of padding of dK and dV, which are never stored.
    """
    q, k, v, *rest = draw([45, 20], 1, 1, 16, scale=10.0)
    q, k, v = (x.detach().abs() + 1 for x in (q, k, v))
    inputs = [q.requires_grad_(), (sign * k).requires_grad_(), v.requires_grad_(), *rest]
    check(inputs, mask, tolerance=2e-3)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@MASKS
def test_a_neighbour_has_no_effect(mask):
    """Not even one of NaN, of whose rows numpy warns: sequences are as by themselves, bit for bit."""
    q, k, v, *rest = draw([50, 70, 41], 2, 1, 16)
    spoilt = [x.detach().clone() for x in (q, k, v)]
    for x in spoilt:
        x[50:120] = torch.nan
        x.requires_grad_()
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    results = []
    for leaves in ((q, k, v), spoilt):
        output = attention_varlen(*leaves, *rest, mask)
        results.append([output, *torch.autograd.grad(output, leaves, grad)])
    for a, b in zip(*results, strict=True):
        for part in (slice(0, 50), slice(120, 161)):
            assert torch.equal(a[part], b[part])
        assert bool(b[50:120].isnan().all())


# Numpy's, of dQ, in which these keys are multiplied by 0.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@MASKS
@pytest.mark.parametrize("lengths", [[70, 50, 33], [64, 96]])
def test_keys_of_minus_infinity(lengths, mask):
    """They weigh nothing, beside a sequence's end too: rows that fill its last tile up are zeros, and 0 · -inf is
    NaN, which no gradient may get but dQ.
    """
    q, k, v, *rest = draw(lengths, 2, 1, 16)
    q, k = (x.detach() for x in (q.abs(), k))
    weightless = [20, lengths[0] - 1, lengths[0] + 40]
    k[weightless, :, 3] = -math.inf
    leaves = [q.requires_grad_(), k.requires_grad_(), v]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found, want = attention_varlen(*leaves, *rest, mask), reference(*wide, *rest, mask)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    _, *gradients = torch.autograd.grad(found, leaves, grad)
    _, *expected = torch.autograd.grad(want, wide, grad.double())
    for a, b in zip((found, *gradients), (want, *expected), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    for x in gradients:
        assert not x[weightless].any()


# As above.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_that_see_only_keys_of_minus_infinity():
    """They give zeros and have no part in the gradients of keys and values."""
    q, k, v, *rest = draw([30, 50, 33], 2, 1, 16)
    q, k = (x.detach() for x in (q.abs(), k))
    k[30:50, :, 3] = -math.inf
    leaves = [q.requires_grad_(), k.requires_grad_(), v]
    output = attention_varlen(*leaves, *rest, "causal")
    assert output.isfinite().all()
    assert not output[30:50].any()
    _, *gradients = torch.autograd.grad(output.sum(), leaves)
    for x in gradients:
        assert x.isfinite().all()
        assert not x[30:50].any()
        assert x[50:].any(-1).all()


@pytest.mark.parametrize(
    ("lengths", "keys", "H", "D"),
    [([], [], 2, 8), ([0, 0], [0, 0], 2, 8), ([0], [5], 2, 8), ([5], [0], 2, 8), ([4, 3], [4, 3], 0, 8)],
)
def test_empty(lengths, keys, H, D):
    inputs = draw(lengths, H, H, D, keys=keys)
    output = attention_varlen(*inputs)
    assert output.shape == inputs[0].shape
    assert not output.any()
    for x, gradient in zip(inputs[:3], torch.autograd.grad(output.sum(), inputs[:3]), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


@MASKS
@pytest.mark.parametrize(("resident", "streamed"), [(16, 64), (64, 16)])
def test_blocks_of_other_sizes(monkeypatch, resident, streamed, mask):
    monkeypatch.setattr(module, "tiles", lambda kernel, q, longest: module.Tiles(resident, streamed, 4, 1))
    check(draw([70, 16, 33], 3, 3, 16, keys=[80, 16, 20]), mask)


def rows_of(lengths, others, block):
    table, rows = module.listed(starts(lengths), starts(others), sum(lengths), block)
    listed = table.view(-1, module.FIELDS.value)
    return listed[: int(listed[rows, 0]), :7].tolist(), rows


@settings(max_examples=40)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=6),
    block=st.sampled_from([16, 64]),
)
def test_every_block_is_listed_once_and_the_heaviest_first(pairs, block):
    lengths, others = zip(*pairs, strict=True)
    listed, rows = rows_of(lengths, others, block)
    order = sorted(range(len(pairs)), key=lambda b: (-others[b], b))
    expected = []
    for b in order:
        blocks = -(-lengths[b] // block)
        before = len(expected)
        own = [sum(lengths[:b]), lengths[b], sum(others[:b]), others[b], before, blocks, b]
        expected += [own] * blocks
    assert listed == expected
    assert len(listed) <= rows


def test_a_list_of_more_sequences_and_blocks_than_are_taken_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    lengths = [i % 3 for i in range(31)] + [100]
    listed, _ = rows_of(lengths, lengths, 16)
    assert [row[1] for row in listed] == [100] * 7 + [2] * 10 + [1] * 10
    assert [row[4] for row in listed] == [0] * 7 + list(range(7, 27))


def test_starts_that_do_not_ascend_write_nothing_beyond_the_list():
    mine = torch.tensor([0, 500], dtype=torch.int32)
    table, rows = module.listed(mine, mine, 32, 16)
    assert rows == 3
    assert int(table.view(-1, module.FIELDS.value)[rows, 0]) == rows


def test_hopper_is_chosen_by_capability_and_shape(monkeypatch):
    for capability in ((0, 0), (8, 0), (10, 0)):
        module._hopper.cache_clear()
        monkeypatch.setattr(module, "capability", lambda device, c=capability: c)
        assert module._hopper(torch.device("cpu")) is None
    module._hopper.cache_clear()
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    hopper = module._hopper(torch.device("cpu")).forward
    module._hopper.cache_clear()

    def fits(T=2048, D=64, dtype=torch.bfloat16, longest=1024):
        x = torch.empty(T, 3, 2, D, dtype=dtype)[:, 1]
        return hopper.fits(x, x, x, longest)

    assert fits()
    assert fits(T=1001, D=128, dtype=torch.float16)
    assert not fits(longest=512)
    assert not fits(D=96)
    assert not fits(dtype=torch.float32)
    x = torch.empty(2, 2048, 64, dtype=torch.bfloat16).transpose(0, 1)
    assert not hopper.fits(x, x, x, 1024)


@pytest.fixture
def modules(monkeypatch):
    """The kernels for Hopper, as if that were what runs."""
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    module._hopper.cache_clear()
    found = module._hopper(torch.device("cpu"))
    module._hopper.cache_clear()
    monkeypatch.setattr(module, "_hopper", lambda device: found)
    return found


def test_blocks_are_listed_in_the_tiles_of_hopper(monkeypatch, modules):
    taken = []
    monkeypatch.setattr(modules.forward, "forward", lambda *given: taken.append(given[6:]))
    cu = starts([600, 100])
    for D in (64, 128):
        x = torch.zeros(700, 1, D, dtype=torch.bfloat16)
        module._launch_forward(x, x, x, cu, cu, 600, 600, True)
    # Rows that the list has room for: 192 tokens each, and 128.
    nothing = 0, None, 0.0
    assert taken == [(5, True, *nothing), (7, True, *nothing)]
    # Windows, sinks and caps too; a window as wide as all tokens is none. One as wide as the longest may hide
    # something: that may be said to be less than it is.
    sinks = torch.zeros(2)[::2]
    for window in (100, 600, 700):
        module._launch_forward(x, x, x, cu, cu, 600, 600, True, window, sinks, 30.0)
        *_, seen, passed, cap = taken.pop()
        assert (seen, cap) == (window % 700, 30.0)
        assert passed.is_contiguous()


def test_gradients_on_hopper_follow_the_switch_for_deterministic_algorithms(monkeypatch, modules):
    """Which kernels are taken; `test_attention_varlen_hopper.py` plays them."""
    deterministic = modules.deterministic
    assert modules.backward is unordered
    taken = []
    for each in (deterministic, unordered):
        monkeypatch.setattr(each, "backward", lambda grad, *_, each=each: taken.append((each, grad)))
    q, k, v, out = torch.zeros(4, 700, 1, 64, dtype=torch.bfloat16)
    # Contiguous, but where no descriptor can be.
    grad = torch.ones(1 + q.numel(), dtype=torch.bfloat16)[1:].view(q.shape)
    cu = starts([600, 100])

    def kernels():
        module._launch_backward(grad, q, k, v, cu, cu, out, torch.zeros(1, 700), 600, 600, True)
        each, passed = taken.pop()
        assert passed.data_ptr() % 16 == 0
        assert torch.equal(passed, grad)
        return each

    assert kernels() is unordered
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels() is deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels() is unordered
    with monkeypatch.context() as patch:
        patch.setattr(unordered, "AVAILABLE", False)
        assert kernels() is deterministic
    monkeypatch.setattr(unordered, "fits", lambda heads, slots: False)
    assert kernels() is deterministic


def test_which_gradients_hopper_takes(monkeypatch, modules):
    """Windows, caps, heads of other columns and sinks; the deterministic kernels sinks alone."""
    taken = []
    for each in (modules.deterministic, unordered):
        monkeypatch.setattr(each, "backward", lambda *given, each=each: taken.append((each, *given[12:])))

    class Portable(Exception):
        """Raised where those kernels begin."""

        def __getitem__(self, grid):
            raise self

    monkeypatch.setattr(module, "_delta", Portable())
    cu = starts([600, 100])

    def kernels(D=64, longest=600, sinks=None, **options):
        x = torch.zeros(700, 2, D, dtype=torch.bfloat16)
        given = {"window": 0, "sinks": sinks, "cap": 0.0} | options
        try:
            module._launch_backward(x, x, x, x, cu, cu, x, torch.zeros(2, 700), longest, longest, True, **given)
        except Portable:
            return None
        return taken.pop()

    sinks = torch.zeros(2)
    for fixed in (False, True):
        torch.use_deterministic_algorithms(fixed)
        try:
            own = modules.deterministic if fixed else unordered
            assert kernels() == (own, 600)
            assert kernels(sinks=sinks) == (own, 600)
            assert kernels(window=700) == (own, 600)  # of all tokens: it hides nothing
            for given, options in (
                ({"window": 100}, (100, 0.0)),
                # The longest may be said to be less than it is.
                ({"window": 600}, (600, 0.0)),
                ({"cap": 30.0, "sinks": sinks}, (0, 30.0)),
                ({"D": 128, "window": 9, "cap": 1.0}, (9, 1.0)),
                ({"D": 40}, ()),
                ({"D": 120, "window": 100, "sinks": sinks}, (100, 0.0)),
            ):
                assert kernels(**given) == (None if fixed else (unordered, 600, *options))
            for given in ({"D": 32}, {"D": 136}, {"D": 84}, {"longest": 512}, {"cap": 1001.0}):
                assert kernels(**given) is None
        finally:
            torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(unordered, "AVAILABLE", False)
    assert kernels(sinks=sinks) == (modules.deterministic, 600)
    assert kernels(window=100) is None


def test_statistics_too_many_for_coordinates_do_not_fit():
    assert unordered.fits(1 << 12, (1 << 12) - 1)
    assert not unordered.fits(1 << 12, 1 << 12)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, "mask is 'sliding'", {"mask": "sliding"}),
        (TypeError, "q must be a tensor", {"q": None}),
        (TypeError, "q has dtype torch.float64", {"q": torch.zeros(8, 2, 16, dtype=torch.float64)}),
        (TypeError, "v has dtype torch.float16", {"v": torch.zeros(8, 2, 16, dtype=torch.float16)}),
        (ValueError, r"q has shape \(1, 2, 8, 16\)", {"q": torch.zeros(1, 2, 8, 16)}),
        (ValueError, r"k has shape \(8, 2, 15\)", {"k": torch.zeros(8, 2, 15)}),
        (ValueError, r"v has shape \(9, 2, 16\)", {"v": torch.zeros(9, 2, 16)}),
        (ValueError, "k has 3 heads, which do not divide the 2 of q", {"k": torch.zeros(8, 3, 16)}),
        (ValueError, "head dimension 257", {"q": torch.zeros(8, 2, 257)}),
        (ValueError, "k is on meta", {"k": torch.zeros(8, 2, 16, device="meta")}),
        (TypeError, "cu_seqlens_q has dtype torch.int64", {"cu_seqlens_q": torch.tensor([0, 8])}),
        (ValueError, "cu_seqlens_q is empty", {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}),
        (ValueError, r"cu_seqlens_k has shape \(3,\)", {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}),
        (ValueError, "max_seqlen_k is -1", {"max_seqlen_k": -1}),
        (ValueError, "window is 0", {"window": 0}),
        (TypeError, "window must be an integer", {"window": 1.5}),
        (ValueError, "cap is -1", {"cap": -1.0}),
        (ValueError, r"sinks has shape \(3,\)", {"sinks": torch.zeros(3)}),
    ],
)
def test_errors(error, match, change):
    inputs = {name: torch.zeros(8, 2, 16) for name in "qkv"}
    inputs |= {f"cu_seqlens_{x}": starts([8]) for x in "qk"} | {f"max_seqlen_{x}": 8 for x in "qk"}
    with pytest.raises(error, match=match):
        attention_varlen(**(inputs | change))


@pytest.mark.parametrize("causal", [True, False])
def test_operator_contract(causal):
    """Schema, fake tensors, autograd registration and tracing, as torch checks them."""
    torch.library.opcheck(
        torch.ops.kernelmark.attention_varlen.default, (*draw([12, 8], 2, 1, 16), causal, 0, None, 0.0)
    )


def test_no_gradient_is_asked_of_the_log_sum_exp():
    _, lse = module._attention_varlen(*draw([8], 1, 1, 16), True, 0, None, 0.0)
    assert not lse.requires_grad


def test_a_window_is_not_lost_to_a_longest_that_is_too_small(monkeypatch):
    """Hopper's kernel is given the window where the longest sequence is said to be shorter than it is."""
    given = []
    forward = SimpleNamespace(
        takes=lambda *_: True, unit=lambda D: 64, forward=lambda *arguments: given.append(arguments[8])
    )
    monkeypatch.setattr(module, "_hopper", lambda device: SimpleNamespace(forward=forward))
    q, k, v, *starts_, _, _ = draw([300], 2, 1, 16)
    module._launch_forward(q, k, v, *starts_, 60, 60, True, 100)
    module._launch_forward(q, k, v, *starts_, 60, 60, True, 100, cap=2000.0)  # of the portable kernels
    assert given == [100]
