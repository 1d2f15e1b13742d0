"""The kernel whose time is the exponential units': what it computes, and that it computes no more than it says."""

from __future__ import annotations

import re

import pytest
import torch

exponentials = pytest.importorskip("kernelmark.suite.measure.exponentials", reason="Triton is not installed")


def test_one_exponential_a_round_and_element_for_a_gpu():
    """Compiled for Hopper: in its loop, as often as it is unrolled, one for each of a thread's elements."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {"out": "*fp32", "rounds": "i32", "block": "constexpr"}
    source = ASTSource(exponentials._rounds, signature, {(2,): exponentials.BLOCK})
    found = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": exponentials.WARPS})
    ptx = found.asm["ptx"]
    elements = exponentials.BLOCK // (32 * exponentials.WARPS)
    count = len(re.findall(r"ex2\.approx", ptx))
    assert count > 0
    assert count % elements == 0
    assert "st.global" in ptx, "or the compiler would take it all away"


def test_a_call_says_how_many_it_computes():
    count, _ = exponentials.call(torch.device("cpu"), programs=3, rounds=5)
    assert count == 3 * exponentials.BLOCK * 5
