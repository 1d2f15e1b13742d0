"""The bound of sums in eight bits: right ranks stay below it whatever they are given, wrong ones do not."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels.cpu import all_reduce_quantized as on_cpu
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.operators import all_reduce_quantized as operator

OPERATOR = operator.OPERATOR


class Threads:
    """`torch.distributed` among threads, as far as ours needs it."""

    def __init__(self, world):
        self.world, self.own, self.all = world, threading.local(), [None] * world
        self.met = threading.Barrier(world, timeout=20)  # one that fails leaves nobody waiting

    def get_world_size(self):
        return self.world

    def get_rank(self):
        return self.own.rank

    def everybodys(self, x):
        self.all[self.own.rank] = x
        self.met.wait()
        found = list(self.all)
        self.met.wait()
        return found

    def all_to_all_single(self, out, x):
        parts = [y.view(self.world, -1)[self.own.rank] for y in self.everybodys(x)]
        out.copy_(torch.cat(parts).view_as(out))
        self.met.wait()  # nobody changes what others read

    def all_gather_into_tensor(self, out, x):
        out.copy_(torch.cat([y.flatten() for y in self.everybodys(x)]).view_as(out))
        self.met.wait()


def in_all(ranks, call):
    """What a call by rank gives in each."""

    def one(rank):
        ranks.own.rank = rank
        try:
            return call(rank)
        except BaseException:
            ranks.met.abort()
            raise

    with ThreadPoolExecutor(ranks.world) as pool:
        return [x.result() for x in [pool.submit(one, rank) for rank in range(ranks.world)]]


def exchanged(x, residual, scheme, fault=""):
    """(sum, residual) of each rank by our steps on a CPU, one of which may be wrong."""
    kept = on_cpu.dist, on_cpu._quantized

    def stuck(groups, scheme):
        values, scales, _ = kept[1](groups, scheme)
        ones = torch.ones_like(scales)
        return values, ones, groups - values.float() * ones

    def call(rank):
        given, rest = x[rank], residual[rank]
        if fault == "incoming residual dropped":
            rest = torch.zeros_like(rest)
        if fault == "a rank's contribution lost" and rank == 1:
            given, rest = torch.zeros_like(given), torch.zeros_like(rest)
        out, left = on_cpu.all_reduce_quantized(given, rest, scheme)
        left = left.clone()
        if fault == "residual not kept":
            left.zero_()
        if fault == "old residual given back":
            left = residual[rank].clone()
        if fault == "the sum's rounding not kept":
            _, _, plain = kept[1]((given.float() + rest).view(-1, operator.GROUP), scheme)
            left = plain.view(-1)
        if fault == "a segment skipped":
            out = out.clone()
            out[-operator.GROUP :] = 0
        return out, left

    try:
        on_cpu._quantized = stuck if fault == "a scale stuck at 1" else kept[1]
        on_cpu.dist = Threads(len(x))
        return in_all(on_cpu.dist, call)
    finally:
        on_cpu.dist, on_cpu._quantized = kept


def held(x, residual, scheme, found, norm=None):
    """Raises where any rank is off, as the harness finds it."""
    world, size = x.shape
    case = OPERATOR.case({"N": size, "gpus": world}, "fp32", "forward", scheme=scheme)
    tolerance = OPERATOR.tolerance(case)
    tolerance = tolerance if norm is None else msgspec.structs.replace(tolerance, norm=norm)
    right = operator.reference(x.double(), residual.double(), scheme)
    for rank, result in enumerate(found):
        mine = {"x": x[rank], "residual": residual[rank]}
        outputs = operator.across(list(operator.results(result, mine)), lambda part: [y[1] for y in found])
        deviation(outputs, [operator.part(y, case, rank) for y in right], tolerance)


def drawn(world, size, seed=0, spread_of=0.0):
    """Numbers as the operator's; of `spread_of` octaves around, by group and by element."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(world, size, generator=generator)
    far = torch.rand(world, size, generator=generator) - 0.5
    return x * 2 ** (spread_of * far), 0.01 * torch.randn(world, size, generator=generator)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 130, 4096, 5000])
def test_right_sums_are_within_the_bound(size, world, scheme):
    """Of several ranks, whose sum is larger than what each has, and of lengths that no rank's part is whole of."""
    x, residual = drawn(world, size)
    held(x, residual, scheme, exchanged(x, residual, scheme), norm=math.inf if size < 4096 else None)


@settings(max_examples=25)
@given(
    st.integers(2, 4),
    st.integers(1, 700),
    st.sampled_from(["int8", "fp8"]),
    st.floats(0, 40),
    st.integers(0, 10**6),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e20]),
)
def test_and_of_any_magnitudes(world, size, scheme, octaves, seed, unit):
    """Also where ranks' numbers are far apart, nearly cancel, or are below a group's normal ones."""
    x, residual = drawn(world, size, seed, octaves)
    x[1, : size // 2] = -x[0, : size // 2] * (1 + 2**-6)
    x, residual = x * unit, residual * unit
    held(x, residual, scheme, exchanged(x, residual, scheme), norm=math.inf)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_the_bound_is_no_wider_than_two_roundings(scheme):
    """What is kept comes near it; and a sum that is off by a hundredth more is refused."""
    x, residual = drawn(4, 1 << 15)
    found = exchanged(x, residual, scheme)
    right = operator.reference(x.double(), residual.double(), scheme)
    kept = torch.stack([y[1] for y in found])
    ratio = kept.abs() / right[4]
    assert 0.9 < float(ratio.max()) <= 1
    part = x.shape[1] // 4
    apart = torch.stack([right[4][r, r * part :][:part] for r in range(4)])
    own = torch.stack([operator.rounding((x + residual)[r, r * part :][:part], scheme) for r in range(4)])
    assert float((apart / own).median()) > 1.5  # where a rank rounds the sum as well
    found[0][0][7] = right[0][7] + 1.01 * right[3][7]
    with pytest.raises(Incorrect, match="output 0: 1 of 32768 elements beyond"):
        held(x, residual, scheme, found)


FAULTS = (
    "a scale stuck at 1", "incoming residual dropped", "residual not kept", "old residual given back",
    "the sum's rounding not kept", "a segment skipped", "a rank's contribution lost",
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_sums_are_not(fault, world, scheme):
    x, residual = drawn(world, 4096)
    with pytest.raises(Incorrect):
        held(x, residual, scheme, exchanged(x, residual, scheme, fault))


def test_who_rounds_which_sums():
    """A part's length is that of our kernels: whole groups, so that the last ranks' may be nothing."""
    x, residual = drawn(4, 130)
    right = operator.reference(x.double(), residual.double())
    own = torch.stack([operator.rounding(row, "int8") for row in (x + residual).double()])
    apart = right[4] - own > 1e-3
    assert apart[0, :128].all()
    assert apart[1, 128:].all()
    assert not apart[2:].any()
