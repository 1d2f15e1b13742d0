"""Outputs over two sets of keys, merged by a kernel, against the output over both."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention import _context_parallel
from kernelmark.kernels.attention._merge import merge
from kernelmark.kernels.attention.attention import attention


@pytest.mark.parametrize(("dtype", "D", "rows"), [("float32", 8, 37), ("float16", 80, 70), ("float16", 128, 33)])
def test_two_parts_are_one(dtype, D, rows):
    """Rows beyond a program's, heads that are no power of two, and an output that is a part of a larger one."""
    q = torch.randn(2, 3, rows, D).to(getattr(torch, dtype))
    k, v = torch.randn(2, 2, 3, 20, D).to(q.dtype)
    (first, level), (part, lse) = (
        attention(q, k[:, :, keys], v[:, :, keys], "full", return_lse=True) for keys in (slice(7), slice(7, 20))
    )
    whole, of_all = attention(q.float(), k.float(), v.float(), "full", return_lse=True)
    memory, levels = q.new_zeros(2, 3, 2 * rows, D), torch.zeros(2, 3, 2 * rows)
    for half in (0, 1):  # of each head, and of each row
        to, of = (x[:, :, half * rows :][:, :, :rows] for x in (memory, levels))
        to.copy_(first)
        of.copy_(level)
        merge(to, of, part.contiguous(), lse)
        near = {} if dtype == "float32" else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(to.float(), whole, **near)
        torch.testing.assert_close(of, of_all)
    wide, natural = first.float().clone(), level.clone()
    _context_parallel.merge(wide, natural, part, lse)
    torch.testing.assert_close(memory[:, :, rows:], wide.to(q.dtype), rtol=1e-2, atol=1e-3)
    by_row = first.transpose(1, 2).contiguous().transpose(1, 2)
    merge(by_row, level, part.contiguous(), lse)
    assert torch.equal(by_row, memory[:, :, :rows])


def test_rows_that_see_nothing_in_one_part_or_in_both():
    out, part = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    level = torch.tensor([-torch.inf, 2.0, -torch.inf, 3.0]).view(1, 1, 4)
    lse = torch.tensor([1.0, -torch.inf, -torch.inf, torch.nan]).view(1, 1, 4)
    part[:, :, 1:3] = 0
    out[:, :, 1] = 5
    merge(out, level, part, lse)
    assert out[0, 0, :3, 0].tolist() == [1.0, 5.0, 0.0]
    assert level[0, 0, :3].tolist() == [1.0, 2.0, -torch.inf]
    assert out[0, 0, 3].isnan().all()
