"""Work beside copies, in several processes on shared memory: there are no streams there, but ranks do meet."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.collective.all_gather_matmul import all_gather_matmul as gathering
from kernelmark.kernels.collective.all_gather_matmul import gathered_product
from kernelmark.kernels.collective.matmul_reduce_scatter import matmul_reduce_scatter as scattering
from kernelmark.kernels.collective.matmul_reduce_scatter import scattered_product
from kernelmark.suite.operators import all_gather_matmul, matmul_reduce_scatter

from ..ranks import Processes, places, spread

CALLS = 3
SIZES = {"M": 12, "N": 18, "K": 6}


def _called(group, function, operator, case, draws, memory):
    peers = Processes(group, memory)
    split = operator.OPERATOR.sharding.split
    return [function(*(split(x, case, group.rank) for x in given), peers) for given in draws]


@pytest.mark.parametrize(
    ("function", "operator"), [(gathered_product, all_gather_matmul), (scattered_product, matmul_reduce_scatter)]
)
def test_calls_after_one_another_are_right(function, operator):
    world = 3
    case = operator.OPERATOR.case({**SIZES, "gpus": world}, "fp32", "forward")
    generator = torch.Generator().manual_seed(world)
    draws = [tuple(operator.inputs(case, torch.device("cpu"), generator).values()) for _ in range(CALLS)]
    found = spread(world, _called, function, operator, case, draws, places(world, 1 << 12))
    for call, given in enumerate(draws):
        right = operator.reference(*(x.double() for x in given))
        for rank in range(world):
            wanted = operator.OPERATOR.sharding.of_output(right, case, rank)
            torch.testing.assert_close(found[rank][call].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [gathering, scattering])
def test_one_rank_has_no_peers(function):
    """And no memory that it would share with them."""
    a, w = torch.randn(5, 7), torch.randn(7, 3)
    (found,) = spread(1, lambda group: function(a, w))
    assert torch.equal(found, a @ w)


@pytest.mark.parametrize("sizes", [SIZES, {"M": 36, "N": 36, "K": 12}])
@pytest.mark.parametrize("operator", [all_gather_matmul, matmul_reduce_scatter])
def test_parts_make_up_the_whole(operator, sizes):
    """Also where a rank's parts of both matrices have one shape."""
    case = operator.OPERATOR.case({**sizes, "gpus": 3}, "fp32", "forward")
    for x in operator.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1)).values():
        sharding = operator.OPERATOR.sharding
        assert torch.equal(sharding.join([sharding.split(x, case, r) for r in range(3)], case), x)


def test_what_cannot_be_shared_is_said():
    case = all_gather_matmul.OPERATOR.case({**SIZES, "M": 13, "gpus": 2}, "fp32", "forward")
    with pytest.raises(NotImplementedError, match="M = 13 cannot be shared evenly by 2 ranks"):
        all_gather_matmul.inputs(case, torch.device("cpu"), torch.Generator())
