"""Decoding attention on a GPU against fp64, on drawn batches: few sequences, as many as fill it, and more."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from kernelmark.kernels._common import capability, multiprocessors
from kernelmark.kernels.attention._decode_shares import fit_for, shares_of
from kernelmark.kernels.attention.attention_decode import attention_decode
from kernelmark.suite.operators.attention_decode import reference

CUDA = torch.device("cuda")
CLOSE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""Of the norm of the answer."""


class Draw(NamedTuple):
    """Sequences, new tokens, key heads and query heads of each, columns, most tokens, those of a page (0: no
    pages), and what is beside the scores.
    """

    B: int
    Sq: int
    Hkv: int
    groups: int
    D: int
    S: int
    page: int
    sinks: bool
    cap: float


FIXED = (
    Draw(100, 1, 8, 4, 128, 2300, 64, False, 0.0),  # in shares, that begin and end within sequences
    Draw(64, 1, 8, 4, 128, 2600, 128, True, 0.0),  # a share for each sequence
    Draw(50, 1, 8, 2, 256, 2600, 64, False, 0.0),
    Draw(300, 2, 1, 8, 128, 3000, 64, False, 30.0),
    Draw(200, 1, 8, 4, 128, 400, 64, False, 0.0),  # whole sequences
    Draw(1, 1, 8, 4, 128, 30000, 64, False, 0.0),  # parts of one
)


def drawn() -> list[Draw]:
    chance = random.Random(20261130)
    found = list(FIXED)
    while len(found) < 32:
        B = chance.choice((1, 3, 20, 70, 150))
        found.append(
            Draw(
                B, chance.choice((1, 1, 2, 5)), chance.choice((1, 2, 4, 8, 10)), chance.choice((1, 2, 4, 7, 8)),
                chance.choice((40, 64, 80, 128, 128, 128, 192, 256)), chance.randint(1, 5000 if B < 100 else 2500),
                chance.choice((0, 16, 64, 64, 128)), chance.random() < 0.2, chance.choice((0.0, 0.0, 0.0, 30.0)),
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("case", drawn(), ids=lambda x: "-".join(map(str, x)))
def test_as_near_to_fp64_as_the_dtype_is(case: Draw, dtype: torch.dtype) -> None:
    """A graph gives the same of other lengths; one of them is 0."""
    generator = torch.Generator(CUDA).manual_seed(case.B + case.S)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA, generator=generator).to(dtype)

    H, across = case.Hkv * case.groups, -(-case.S // case.page) if case.page else 0
    shape = (case.B * across, case.page) if case.page else (case.B, case.S)
    q, k, v = draw(case.B, case.Sq, H, case.D), *(draw(*shape, case.Hkv, case.D) for _ in range(2))
    table = None
    if case.page:
        table = torch.randperm(case.B * across, device=CUDA, generator=generator).int().view(case.B, across)
    lengths = (case.S * torch.rand(case.B, device=CUDA, generator=generator) ** 2).int()
    lengths[0], lengths[-1] = 0, case.S
    sinks = draw(H) if case.sinks else None
    given = q, k, v, table, lengths, sinks, case.cap

    def near() -> None:
        want = reference(*(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given))
        want = want.nan_to_num(0.0)  # a token that sees nothing
        assert (found.double() - want).norm() <= CLOSE[dtype] * want.norm()

    found = attention_decode(*given)
    near()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention_decode(*given)
    lengths.copy_(lengths.flip(0))
    graph.replay()
    near()


def test_draws_take_shares() -> None:
    """Else the file is of parts alone."""
    device = capability(CUDA)
    if device != (9, 0):
        pytest.skip("shares are for Hopper")
    processors = multiprocessors(torch.empty(0, device=CUDA))
    taken = []
    for x in drawn():
        fit = fit_for(x.Sq * x.groups, x.D, 2, x.page, device)
        if fit is not None and shares_of(x.B, x.Hkv, x.S, fit, processors):
            taken.append(x.D)
    assert taken.count(128) >= 3
    assert taken.count(256) >= 1
