"""Our matrix products, as far as any GPU has them; `test_matmul_hopper.py` plays Hopper's."""

import random

import pytest
import torch
from kernelmark.kernels._launch import forget, prepared
from kernelmark.kernels.matmul import _few_rows as few_rows
from kernelmark.kernels.matmul import _matmul_hopper as hopper
from kernelmark.kernels.matmul import matmul as module
from kernelmark.kernels.matmul.matmul import matmul, rows_added, rows_here, rows_normed

AXES = [{"M": 17, "N": 40, "K": 72}, {"M": 3, "N": 33, "K": 65}, {"M": 32, "N": 64, "K": 64}]


@pytest.mark.parametrize("epilogue", ["none", "bias", "swiglu"])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("axes", AXES[:2])
def test_agrees(agrees, axes, layout, epilogue):
    agrees("matmul", axes, layout=layout, epilogue=epilogue)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_agrees_in_16_bits(agrees, dtype):
    agrees("matmul", AXES[2], dtype)


@pytest.mark.parametrize(
    ("M", "N", "K", "epilogue", "dtype"),
    [
        (1, 40, 64, "none", "bf16"),
        (3, 33, 65, "swiglu", "bf16"),
        (4, 1, 1, "bias", "fp16"),
        (5, 70, 96, "swiglu", "fp16"),
        (16, 49, 31, "bias", "bf16"),
    ],
)
def test_few_rows(agrees, monkeypatch, M, N, K, epilogue, dtype):
    """The tiles have rows and columns beyond these, and steps beyond K; the other kernels are not asked."""
    monkeypatch.setattr(module.portable, "multiply", None)
    agrees("matmul", {"M": M, "N": N, "K": K}, dtype, epilogue=epilogue)
    if epilogue != "swiglu":  # rows of larger matrices, and numbers that lie apart
        agrees(
            "matmul",
            {"M": M, "N": N, "K": K},
            dtype,
            change=lambda given: {
                "a": torch.randn(M, 3 * K).to(given["a"].dtype)[:, K : 3 * K : 2],
                "b": torch.randn(2 * N, K + 3).to(given["b"].dtype)[::2, 1 : K + 1].t(),
            },
        )


@pytest.mark.parametrize("slices", [1, 4])
def test_slices_of_a_step(agrees, monkeypatch, slices):
    """What warps that share a step sum up, in steps that K is no multiple of."""
    chosen = few_rows.replace
    monkeypatch.setattr(few_rows, "replace", lambda tile, **change: chosen(tile, **{**change, "slices": slices}))
    for M, N, K, epilogue in ((2, 35, 41, "bias"), (9, 18, 96, "swiglu"), (16, 50, 33, "none")):
        agrees("matmul", {"M": M, "N": N, "K": K}, "bf16", epilogue=epilogue)


def tiles(room, count=400):
    """(M, N, K, gated, tile, warps) of random sizes on 132 multiprocessors."""
    draw = random.Random(25)
    for _ in range(count):
        M, N, K = draw.randint(2, 16), int(2 ** draw.uniform(0, 18)), int(2 ** draw.uniform(0, 15))
        gated = draw.random() < 0.3
        yield M, N, K, gated, *few_rows.tile(M, N, K, gated, False, 132, room)


@pytest.mark.parametrize("room", [96 * 1024, 220 * 1024])
def test_tiles_of_few_rows_fit(room):
    """Each alone, and on Hopper all of a multiprocessor at once where they are not to take turns."""
    for M, N, K, gated, tile, warps in tiles(room):
        given = M, N, K, gated, tile
        lines = tile.columns * (2 if gated else 1)
        held = (tile.stages - 1) * (lines + tile.rows) * tile.step * 2
        each = -(-N // (tile.columns * 132))
        assert M <= tile.rows <= few_rows.MOST, given
        assert held <= room, given
        assert warps == tile.slices, given
        assert tile.step // tile.slices in (64, 128), given
        assert tile.even == (K % tile.step == 0), given
        if each <= few_rows.ONCE and room > 200 * 1024:
            assert held * min(each, few_rows.ONCE) <= room, given
        if tile.slices > 1:
            assert 2 * tile.step <= K or tile.columns == 32, given


def test_fewer_programs_have_more_warps():
    """And as many bytes on their way at a time, within a factor of two."""
    found = [few_rows.tile(8, N, 8192, False, False, 132, 220 * 1024) for N in (2048, 6144, 16384, 131072)]
    assert [warps for _, warps in found] == [4, 2, 1, 2]
    for (tile, _), each in zip(found[:3], (1, 3, 8), strict=True):
        assert 0.5 <= each * (tile.stages - 1) * tile.columns * tile.step * 2 / few_rows.FLYING <= 2
    assert few_rows.tile(8, 2048, 256, False, False, 132, 220 * 1024)[1] == 1  # too short to share


def test_which_products_have_few_rows():
    a, weight = torch.zeros(17, 8).half(), torch.zeros(4, 8).half()
    assert few_rows.takes(a[:16], weight)
    assert not few_rows.takes(a, weight)
    assert not few_rows.takes(a[:16], torch.zeros(8, 4).half().t())
    assert not few_rows.takes(a[:16].float(), weight.float())  # TF32 is the other kernel's


def test_strides(agrees):
    """Parts of larger matrices, and one whose rows and columns both lie apart."""
    agrees("matmul", AXES[2], change=lambda given: {"a": torch.randn(40, 90)[3:35, 5:69]})
    agrees("matmul", AXES[2], change=lambda given: {"a": torch.randn(32, 128)[:, ::2]})


def test_empty():
    assert matmul(torch.zeros(0, 8), torch.zeros(8, 4)).shape == (0, 4)
    assert matmul(torch.zeros(3, 0), torch.zeros(0, 2), torch.ones(2)).eq(1).all()
    assert matmul(torch.zeros(3, 0), torch.zeros(0, 2)).eq(0).all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"b": torch.zeros(9, 4)}, ValueError, "b has shape (9, 4), expected (8, N)"),
        ({"b": torch.zeros(8, 4).half()}, TypeError, "b has dtype torch.float16, expected torch.float32"),
        ({"b": torch.zeros(8, 3), "gated": True}, ValueError, "expected an even number of columns"),
        ({"bias": torch.zeros(4), "gated": True}, ValueError, "a gated product takes none"),
        ({"bias": torch.zeros(5)}, ValueError, "bias has shape (5,), expected (4,)"),
        ({"a": torch.zeros(8)}, ValueError, "expected 2 dimensions"),
    ],
)
def test_says_what_is_wrong(given, error, message):
    import re

    with pytest.raises(error, match=re.escape(message)):
        matmul(**{"a": torch.zeros(3, 8), "b": torch.zeros(8, 4)} | given)


def planned(made):
    """Of the kernel for Hopper: what was planned for goes to `made`, a run is the product and its bias."""

    def plan(a, b, out, schedule, dealt, section, scale_a=None, scale_b=None, bias=None, split=0):
        made.append(schedule)
        lie = [(x.shape, x.stride()) for x in (a, b, out)]

        def run(a, b, out, scale_a=None, scale_b=None, bias=None):
            # Of what it is called with only addresses are read.
            a, b, out = (x.detach().as_strided(*how) for x, how in zip((a, b, out), lie, strict=True))
            y = a.double() @ b.double().t()
            out.copy_(y if bias is None else y + bias)

        return run

    return plan


@pytest.mark.parametrize("on_hopper", [False, True])
@pytest.mark.parametrize("M", [3, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_a_call_is_prepared_once(request, monkeypatch, M, biased, on_hopper):
    """For tensors that are alike: new numbers are multiplied, and others between them are another kind."""
    made: list = []
    forget()
    request.addfinalizer(forget)
    if on_hopper:
        monkeypatch.setattr(hopper, "planned", planned(made))
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
        monkeypatch.setattr(module, "multiprocessors", lambda x: 132)
    prepared_for = []
    first = prepared._first
    monkeypatch.setattr(prepared, "_first", lambda self, *given: prepared_for.append(1) or first(self, *given))
    N, K = 48, 64
    for nth in range(3):
        a, b, bias = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.randn(N).bfloat16()
        for x, weight in ((a, b.t()), (a, b.t().contiguous()), (a[:, :40], b[:, :40].t())):
            got = matmul(x, weight, bias if biased else None)
            want = x.double() @ weight.double() + (bias if biased else 0)
            torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
        assert len(prepared_for) == 3, nth
    # Of few rows the other kernel has those whose weight lies row by row.
    assert len(made) == on_hopper * (3 if M > 16 else 1)
    assert [x.bias for x in made] == [biased] * len(made)


def some_rows(M, K, N, dtype, gated=False):
    """Rows of a larger matrix, residuals, a norm's weight, and a weight, twice as tall where it is gated."""
    a, residual = torch.randn(M + 1, 2 * K).to(dtype)[1:, K:], torch.randn(M, N).to(dtype)
    weight = torch.randn((2 if gated else 1) * N, K + 3).to(dtype)[:, 1 : K + 1] * K**-0.5
    return a, residual, (torch.rand(N) + 0.5).to(dtype), weight.t()


CLOSE = {torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6}, torch.float16: {"rtol": 2**-9, "atol": 2**-8}}
SUMS = {"rtol": 16 * 2**-24, "atol": 0}
"""Of 16 numbers in fp32."""


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("M", [1, 2, 7, 16])
@pytest.mark.parametrize(("K", "N"), [(64, 40), (65, 33), (1, 1), (300, 9), (32, 8)])
def test_rows_are_added_and_squares_summed(K, N, M, dtype):
    a, residual, gain, b = some_rows(M, K, N, dtype)
    h, y, squares = rows_added(a, b, residual, gain)
    assert (h.shape, y.shape, h.dtype, y.dtype) == ((M, N), (M, N), dtype, dtype)
    assert (squares.shape, squares.dtype) == ((M, -(-N // (8 if M == 1 else 16))), torch.float32)
    torch.testing.assert_close(h.double(), a.double() @ b.double() + residual.double(), **CLOSE[dtype])
    torch.testing.assert_close(y.double(), h.double() * gain.double(), rtol=CLOSE[dtype]["rtol"], atol=0)
    summed = {} if M == 1 else SUMS
    torch.testing.assert_close(squares.double().sum(1), h.double().square().sum(1), **summed)


def test_many_columns_of_a_program(monkeypatch):
    """Of which several sums of squares are left."""
    monkeypatch.setattr(few_rows, "tile", lambda *_: (few_rows.Tile(64, 8, 64, 1, 3, False, False, True), 1))
    forget()
    a, residual, gain, b = some_rows(5, 48, 200, torch.float16)
    h, _, squares = rows_added(a, b, residual, gain)
    forget()
    torch.testing.assert_close(h.double(), a.double() @ b.double() + residual.double(), **CLOSE[torch.float16])
    parts = torch.nn.functional.pad(h.double().square(), (0, 8)).view(5, 13, 16).sum(2)
    torch.testing.assert_close(squares.double(), parts, **SUMS)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("M", [1, 3, 8, 9])
@pytest.mark.parametrize(("K", "N", "parts"), [(64, 40, 8), (65, 33, 9), (1, 1, 1), (300, 9, 38), (300, 9, 290)])
def test_rows_are_normalized_where_they_are_multiplied(K, N, parts, M, dtype, gated):
    h, _, _, b = some_rows(M, K, N, dtype, gated)
    gain = (torch.rand(K) + 0.5).to(dtype)
    squares = torch.nn.functional.pad(h.float().square(), (0, -K % parts)).view(M, parts, -1).sum(2)
    found = rows_normed(h * gain, squares, b, 1e-5, gated)
    want = torch.nn.functional.rms_norm(h.double(), (K,), gain.double(), 1e-5) @ b.double()
    if gated:
        want = torch.nn.functional.silu(want[:, :N]) * want[:, N:]
    assert (found.shape, found.dtype) == ((M, N), dtype)
    torch.testing.assert_close(found.double(), want, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("M", [1, 3, 16])
@pytest.mark.parametrize(("K", "N"), [(64, 40), (65, 33), (300, 9)])
def test_rows_by_weights_in_eight_bits(K, N, M, dtype):
    """As by the numbers that these stand for: rows are not quantized."""
    a, residual, gain, b = some_rows(M, K, 2 * N, dtype)
    scale = torch.rand(2 * N) + 0.5
    held = b.t().to(torch.float8_e4m3fn).t()
    want = held.double() * scale.double()
    h, y, squares = rows_added(a, held, residual, gain, scale)
    torch.testing.assert_close(h.double(), a.double() @ want + residual.double(), **CLOSE[dtype])
    torch.testing.assert_close(y.double(), h.double() * gain.double(), rtol=CLOSE[dtype]["rtol"], atol=0)
    torch.testing.assert_close(squares.double().sum(1), h.double().square().sum(1), **SUMS)
    squares = a.float().square().sum(1, keepdim=True)
    normed = torch.nn.functional.rms_norm(a.double(), (K,), eps=1e-5) @ want
    torch.testing.assert_close(rows_normed(a, squares, held, 1e-5, scale=scale).double(), normed, **CLOSE[dtype])
    gated = torch.nn.functional.silu(normed[:, :N]) * normed[:, N:]
    found = rows_normed(a, squares, held, 1e-5, True, scale)
    torch.testing.assert_close(found.double(), gated, **CLOSE[dtype])


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize(("K", "N"), [(0, 20), (7, 0)])
def test_rows_of_nothing(K, N, M):
    a, residual, b = torch.ones(M, K).half(), torch.randn(M, N).half(), torch.ones(N, K).half()
    h, y, squares = rows_added(a, b.t(), residual, torch.full((N,), 2.0).half())
    assert torch.equal(h, residual)
    assert torch.equal(y, 2 * residual)
    assert squares.shape == (M, -(-N // (8 if M == 1 else 16)))
    torch.testing.assert_close(squares.sum(1), h.float().square().sum(1))
    assert torch.equal(rows_normed(a, torch.zeros(M, 1), b.t()), torch.zeros(M, N).half())


@pytest.mark.parametrize("M", [1, 4])
def test_rows_of_one_call_are_not_anothers(M):
    """Prepared once, for new numbers; another eps is another call."""
    for _ in range(3):
        h, _, _, b = some_rows(M, 64, 24, torch.bfloat16)
        squares = h.float().square().sum(1, keepdim=True)
        for eps in (1e-5, 1.0):
            want = torch.nn.functional.rms_norm(h.double(), (64,), eps=eps) @ b.double()
            found = rows_normed(h, squares, b, eps)
            torch.testing.assert_close(found.double(), want, **CLOSE[torch.bfloat16])


ONE = torch.ones(1, 4).half()
EIGHT = ONE.to(torch.float8_e4m3fn).t()


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        (rows_added, (ONE.float(), ONE.t(), ONE, ONE[0]), TypeError, "a has dtype"),
        (rows_added, (torch.ones(17, 4).half(), ONE.t(), ONE[:, :1], ONE[0]), ValueError, "expected 1 to 16 rows"),
        (rows_added, (torch.ones(0, 4).half(), ONE.t(), ONE[:, :1], ONE[0]), ValueError, "expected 1 to 16 rows"),
        (rows_added, (ONE, ONE.t(), ONE, ONE[0]), ValueError, "residual has shape"),
        (rows_added, (ONE, ONE.t(), ONE[:, :1], ONE[0]), ValueError, "weight has shape"),
        (rows_added, (ONE, torch.ones(4, 3).half(), ONE[:, :3], ONE[0, :3]), ValueError, "b has strides"),
        (rows_added, (ONE, ONE.t(), ONE[:, :1], ONE[0, :1], ONE[0, :1].float()), TypeError, "b has dtype"),
        (rows_added, (ONE, EIGHT, ONE[:, :1], ONE[0, :1]), TypeError, "b has dtype"),
        (rows_added, (ONE, EIGHT, ONE[:, :1], ONE[0, :1], ONE[0, :1]), TypeError, "scale has dtype"),
        (rows_added, (ONE, EIGHT, ONE[:, :1], ONE[0, :1], ONE[0].float()), ValueError, "scale has shape"),
        (rows_normed, (ONE, ONE, ONE.t()), TypeError, "squares has dtype"),
        (rows_normed, (ONE, torch.ones(2, 3), ONE.t()), ValueError, "squares has shape"),
        (rows_normed, (ONE, torch.ones(1, 0), ONE.t()), ValueError, "squares has shape"),
        (rows_normed, (ONE, ONE.float(), ONE.t(), 1e-6, True), ValueError, "an even number of columns"),
    ],
)
def test_wrong_rows(call, arguments, error, message):
    with pytest.raises(error, match=message):
        call(*arguments)


def test_rows_on_other_gpus(monkeypatch):
    """As AMD's are seen, which go the usual way."""
    monkeypatch.setattr(few_rows, "INTERPRETED", False)
    monkeypatch.setattr(few_rows, "capability", lambda device: (0, 0))
    a, residual, gain, b = some_rows(1, 16, 12, torch.bfloat16)
    assert not rows_here(a.device)
    forget()
    for call in (lambda: rows_added(a, b, residual, gain), lambda: rows_normed(a, torch.rand(1, 3), b)):
        with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
            call()


@pytest.mark.parametrize("M", [1, 3])
def test_registration_of_rows(M):
    a, residual, gain, b = some_rows(M, 16, 12, torch.bfloat16)
    squares = torch.rand(M, 3)
    torch.library.opcheck(torch.ops.kernelmark.matmul_rows_added.default, (a, b, residual, gain, None))
    for gated in (False, True):
        torch.library.opcheck(torch.ops.kernelmark.matmul_rows_normed.default, (a, squares, b, 1e-6, gated, None))
    # Of E4M3 what checks schemas cannot tell whether inputs were changed.
    some = {"test_utils": ("test_faketensor", "test_autograd_registration")}
    held, scale = b.t().to(torch.float8_e4m3fn).t(), torch.rand(12)
    given = a, held, residual, gain, scale
    torch.library.opcheck(torch.ops.kernelmark.matmul_rows_added.default, given, **some)
    given = a, squares, held, 1e-6, False, scale
    torch.library.opcheck(torch.ops.kernelmark.matmul_rows_normed.default, given, **some)
