"""Queries, keys and values of one token a sequence in one launch, against what it is in three."""

import pytest
import torch
from kernelmark.kernels.matmul.matmul import rows_normed, rows_turned, turns
from kernelmark.kernels.position.rope_cache_write import rope_cache_write


def given(K, H, Hkv, D, dtype, lengths=(14,)):
    """Tokens in pages of their sequences; caches and weight are parts of larger ones."""
    M, pages, page = len(lengths), 4 * len(lengths) + 1, 4
    b = (torch.randn((H + 2 * Hkv) * D, K + 8) * K**-0.5).to(dtype)[:, :K].t()
    y = torch.randn(M, K + 2).to(dtype)[:, 1:-1]
    squares = torch.nn.functional.pad(y.float().square(), (0, -K % 3)).view(M, 3, -1).sum(2)
    caches = [torch.zeros(pages, page + 1, Hkv, D + 8, dtype=dtype)[:, :page, :, :D] for _ in range(2)]
    angle = torch.rand(20, D // 2) * 6
    table = torch.tensor([[3, 0, 4, 1]], dtype=torch.int32) + 4 * torch.arange(M, dtype=torch.int32)[:, None]
    where = table, torch.tensor(lengths, dtype=torch.int32)
    return [y, squares, b, angle.cos().to(dtype), angle.sin().to(dtype), *caches, *where]


CLOSE = {torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5}, torch.float16: {"rtol": 2**-9, "atol": 2**-8}}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("K", "H", "Hkv", "D"), [(64, 4, 2, 16), (100, 3, 1, 8), (32, 1, 1, 40), (33, 2, 2, 64)])
@pytest.mark.parametrize("lengths", [(1,), (14,), (16,), (9, 16, 1), (5,) * 16])
def test_is_what_it_is_in_three_launches(K, H, Hkv, D, dtype, lengths):
    inputs = given(K, H, Hkv, D, dtype, lengths)
    y, squares, b, cos, sin, *rest = inputs
    apart = [x.clone() for x in rest[:2]]
    M = len(lengths)
    normed = rows_normed(y, squares, b, 1e-5).view(M, 1, -1, D)
    want = rope_cache_write(*normed.split([H, Hkv, Hkv], 2), cos, sin, *apart, *rest[2:])
    q = rows_turned(*inputs, 1e-5)
    assert (q.shape, q.dtype, q.is_contiguous()) == ((M, 1, H, D), dtype, True)
    torch.testing.assert_close(q, want, **CLOSE[dtype])
    for found, other in zip(rest[:2], apart, strict=True):
        torch.testing.assert_close(found, other, **CLOSE[dtype])
        assert found.ne(0).any(3).sum() == M * Hkv, "one token of each is written, and nothing else"


@pytest.mark.parametrize("lengths", [(14,), (9, 16, 1)])
def test_by_weights_in_eight_bits(lengths):
    """As by the numbers that these stand for."""
    inputs = given(64, 2, 1, 16, torch.float16, lengths)
    scale = torch.rand(inputs[2].shape[1]) + 0.5
    held = inputs[2].t().to(torch.float8_e4m3fn).t()
    apart = [*inputs[:2], (held.float() * scale).half().t().contiguous().t(), *inputs[3:5]]
    caches = [x.clone() for x in inputs[5:7]]
    inputs[2] = held
    found, want = rows_turned(*inputs, 1e-5, scale), rows_turned(*apart, *caches, *inputs[7:], 1e-5)
    close = {"rtol": 2**-7, "atol": 2**-7}  # the product of a number and a scale is rounded in one of them
    torch.testing.assert_close(found, want, **close)
    for x, y in zip(inputs[5:7], caches, strict=True):
        torch.testing.assert_close(x, y, **close)


def test_tokens_of_one_call_are_not_anothers():
    """Prepared once; each goes to its own place, of its own caches."""
    first = given(64, 2, 1, 16, torch.bfloat16, (1,))
    q = rows_turned(*first)
    for length in (2, 9):
        inputs = given(64, 2, 1, 16, torch.bfloat16, (length,))
        inputs[:5] = first[:5]
        assert not torch.equal(rows_turned(*inputs), q), "another position turns otherwise"
        written = inputs[5].ne(0).any(3).any(2).nonzero().tolist()
        assert written == [[[3, 0, 4, 1][(length - 1) // 4], (length - 1) % 4]]


def test_which_heads():
    assert turns(64)
    assert turns(8)
    assert not turns(12)


@pytest.mark.parametrize(
    ("at", "value", "error", "message"),
    [
        (0, torch.ones(1, 64), TypeError, "y has dtype"),
        (0, torch.ones(17, 64).half(), ValueError, "expected 1 to 16 rows"),
        (0, torch.ones(2, 64).half(), ValueError, "squares has shape"),
        (
            slice(0, 3),
            [torch.ones(1, 0).half(), torch.ones(1, 1), torch.ones(96, 0).half().t()],
            ValueError,
            "numbers",
        ),
        (1, torch.ones(1, 3).half(), TypeError, "squares has dtype"),
        (2, torch.ones(64, 96).half(), ValueError, "b has strides"),
        (2, torch.ones(95, 64).half().t(), ValueError, "b has shape"),
        (2, torch.ones(64, 64).half().t(), ValueError, "b has shape"),
        (3, torch.ones(20, 7).half(), ValueError, "cos has shape"),
        (4, torch.ones(20, 8), TypeError, "sin has dtype"),
        (5, torch.ones(5, 4, 2, 12).half(), ValueError, "v_cache has shape"),
        (6, torch.ones(5, 4, 16, 2).half().mT, ValueError, "v_cache has stride"),
        (7, torch.ones(2, 4, dtype=torch.int32), ValueError, "block_table has shape"),
        (8, torch.ones(1), TypeError, "lengths has dtype"),
    ],
)
def test_wrong_arguments(at, value, error, message):
    inputs = given(64, 2, 2, 16, torch.float16)
    inputs[at] = value
    with pytest.raises(error, match=message):
        rows_turned(*inputs)


def test_heads_that_do_not_divide():
    inputs = given(64, 2, 2, 16, torch.float16)
    inputs[5:7] = [torch.ones(5, 4, 2, 12).half() for _ in range(2)]
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        rows_turned(*inputs)


@pytest.mark.parametrize("lengths", [(14,), (3, 8)])
def test_registration(lengths):
    inputs = *given(32, 2, 1, 8, torch.bfloat16, lengths), 1e-6, None
    torch.library.opcheck(torch.ops.kernelmark.matmul_rows_turned.default, inputs)
