"""The kernels of attention for Hopper: nothing lies over their barriers, as compiled where they run.

In a process of its own: this one may have chosen Triton's interpreter.
"""

from __future__ import annotations

import json

import pytest
import torch

from ..kernels.barriers import laid_over

CODE = """
import json
import torch
from kernelmark.kernels import _hopper
from kernelmark.kernels.attention.attention import attention
from kernelmark.kernels.attention.attention_mla_decode import attention_mla_decode
from kernelmark.kernels.attention.attention_sparse import attention_sparse
from kernelmark.kernels.attention.attention_varlen import attention_varlen

def draw(*shape):
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

for D in (64, 128):
    for mask in ("causal", "full"):
        for fixed in (False, True):
            torch.use_deterministic_algorithms(fixed)
            for window in (None, 300, 100):
                attention(*draw(1, 2, 1024, D), mask, window).sum().backward()
            for lengths in ([1024, 1024], [700, 1348]):
                starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device="cuda")
                attention_varlen(*draw(2048, 2, D), starts, starts, *[max(lengths)] * 2, mask).sum().backward()
        torch.use_deterministic_algorithms(False)
        with torch.no_grad():
            blocks = torch.ones(1, 8, 8, dtype=torch.bool, device="cuda").tril()
            attention_sparse(*draw(1, 2, 1024, D), mask, blocks=blocks)
            attention(*draw(1, 2, 1024, 256), mask)
for D, Dv in ((192, 128), (96, 64), (64, 128)):
    for mask in ("causal", "full"):
        for window in (None, 300):
            attention(*draw(1, 2, 1024, 256), mask, window).sum().backward()
        q, k, _ = draw(1, 2, 1024, D)
        attention(q, k, draw(1, 2, 1024, Dv)[0], mask).sum().backward()
q, cache = (torch.randn(x, device="cuda", dtype=torch.bfloat16) for x in ((2, 1, 128, 576), (32, 64, 576)))
table = torch.arange(32, dtype=torch.int32, device="cuda").view(2, 16)
for B in (2, 1):
    lengths = torch.full((B,), 1024, dtype=torch.int32, device="cuda")
    attention_mla_decode(q[:B], cache, table[:B], lengths, 512, 0.07)
torch.cuda.synchronize()
print(json.dumps([[str(key), x.kernel.asm["ptx"]] for key, x in _hopper.compiled.items()]))
"""


def test_nothing_lies_over_a_barrier(apart) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels for Hopper are not taken here")
    compiled = json.loads(apart("-c", CODE))
    assert len(compiled) >= 16
    assert {key: found for key, ptx in compiled if (found := laid_over(ptx))} == {}
