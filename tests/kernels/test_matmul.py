"""Our matrix products, as far as any GPU has them; `test_matmul_hopper.py` plays Hopper's."""

import pytest
import torch
from kernelmark.kernels.matmul import _few_rows as few_rows
from kernelmark.kernels.matmul import matmul as module
from kernelmark.kernels.matmul.matmul import matmul

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
