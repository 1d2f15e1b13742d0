"""Tokens at the ranks of their experts and back, in several processes on shared memory, interpreted."""

from __future__ import annotations

import time

import pytest
import torch
from kernelmark.kernels.collective import expert_exchange as module
from kernelmark.kernels.collective._symmetric import Symmetric
from kernelmark.suite.operators import expert_exchange as operator

from ..ranks import spread
from .test_collectives import CAPACITY, NUMBER, PROGRAMS, shared_memory


def drawn(world, tokens, D, E, K, seed, dtype=torch.float32, only=None):
    """Whole inputs, as the operator's; of `only` some experts if any are named."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(world, tokens, E, generator=generator)
    if only is not None:
        logits[..., [x for x in range(E) if x not in only]] = -99.0
    chosen = logits.topk(K, -1)
    return {
        "x": torch.randn(world, tokens, D, generator=generator).to(dtype),
        "experts": chosen.indices,
        "weights": chosen.values.softmax(-1),
        "scale": torch.randn(world, E // world, D, generator=generator).to(dtype),
    }


def _calls(group, buffers, peers, draws, late):
    """Calls after one another in one memory, of other sizes each, whoever is late."""
    shared = Symmetric(peers, group.rank, group.size, PROGRAMS, 2 * CAPACITY, buffers[group.rank], None)
    found = []
    for call, given in enumerate(draws):
        own = {name: x[group.rank].clone() for name, x in given.items()}
        kept = {name: x.clone() for name, x in own.items()}
        if late:
            time.sleep(0.03 * ((group.rank + call) % group.size))
        found.append(module.exchanged(**own, shared=shared, block=64, warps=4))
        assert all(torch.equal(own[name], x) for name, x in kept.items())
    return found


SIZES = (
    {"tokens": 7, "D": 37, "E": 6, "K": 2},
    {"tokens": 1, "D": 1, "E": 6, "K": 1},
    {"tokens": 9, "D": 130, "E": 12, "K": 5, "only": (0, 1, 2, 3, 9)},  # the second of three ranks gets nothing
    {"tokens": 5, "D": 64, "E": 6, "K": 2, "only": (0, 1)},  # all go to the first
    {"tokens": 6, "D": 48, "E": 6, "K": 6},  # each to every expert
)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float16), (3, torch.float32)])
def test_tokens_come_back_from_all_their_experts(world, dtype):
    """Of other widths, numbers of tokens and of experts in each call, more tokens than programs, and odd rows;
    experts and ranks without a token; the calls' number wraps.
    """
    draws = [drawn(world, **sizes, seed=call, dtype=dtype) for call, sizes in enumerate(SIZES)]
    found = spread(world, _calls, *shared_memory(world, NUMBER), draws, True)
    for call, given in enumerate(draws):
        right = operator.reference(**{k: x if x.dtype == torch.int64 else x.double() for k, x in given.items()})
        for rank in range(world):
            off = 1e-5 if dtype == torch.float32 else 4e-3
            torch.testing.assert_close(found[rank][call].double(), right[rank], rtol=off, atol=off)


def _sent(group, buffers, peers, given):
    """What lies in this rank's memory after a call, where nothing was at first."""
    shared = Symmetric(peers, group.rank, group.size, PROGRAMS, 2 * CAPACITY, buffers[group.rank], None)
    own = {name: x[group.rank] for name, x in given.items()}
    module.exchanged(**own, shared=shared, block=64, warps=4)
    torch.distributed.barrier()
    slot = shared.capacity // (2 * group.size) // module.LINE * module.LINE
    (tokens, D), row = own["x"].shape, module.row_of(own["x"].shape[1])
    areas = buffers[group.rank][shared.data :][: 2 * group.size * slot].view(2, group.size, slot)
    rows = areas[:, :, : 4 * tokens * row].view(torch.float32).view(2, group.size, tokens, row)
    return (rows[..., :D] != 0).any(-1).tolist(), (rows[..., D:] != 0).any().item()


def test_a_token_goes_once_to_each_rank_that_has_experts_of_it():
    """And to no other, nor beyond a row's end."""
    given = drawn(3, 6, 37, 6, 3, seed=5, only=(0, 1, 2, 3, 5))
    for rank, ((came, back), beyond) in enumerate(spread(3, _sent, *shared_memory(3), given)):
        homes = given["experts"] // 2
        assert came == [[bool((homes[s, t] == rank).any()) for t in range(6)] for s in range(3)]
        assert back == [[bool((homes[rank, t] == o).any()) for t in range(6)] for o in range(3)]
        assert not beyond


def test_slots_are_of_all_tokens_in_whole_lines():
    x = torch.empty(100, 37, dtype=torch.bfloat16)
    assert module.slot_bytes(x, 8) == 100 * 48 * 2 + 6400
    assert module.slot_bytes(x[:1], 1) == 128 + 128


def _alone(group, given):
    return module.expert_exchange(**{name: x[0] for name, x in given.items()})


def test_one_rank_needs_no_peers_and_nothing_no_exchange():
    given = drawn(1, 5, 7, 4, 2, seed=1)
    (found,) = spread(1, _alone, given)
    torch.testing.assert_close(found, operator.reference(**given)[0])
    empty = {
        **given,
        "x": given["x"][:, :0],
        "experts": given["experts"][:, :0],
        "weights": given["weights"][:, :0],
    }
    assert spread(1, _alone, empty)[0].shape == (0, 7)


X, EXPERTS, WEIGHTS = torch.zeros(4, 6), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "experts has dtype torch.float32", (X, WEIGHTS, WEIGHTS, X)),
        (ValueError, r"experts has shape \(3, 2\), expected 4 rows", (X, EXPERTS[:3], WEIGHTS[:3], X)),
        (ValueError, r"weights has shape \(4, 1\), expected \(4, 2\)", (X, EXPERTS, WEIGHTS[:, :1], X)),
        (TypeError, "scale has dtype torch.float16", (X, EXPERTS, WEIGHTS, X.half())),
        (ValueError, r"scale has shape \(4, 5\), expected 6 columns", (X, EXPERTS, WEIGHTS, X[:, :5])),
    ],
)
def test_wrong_arguments_are_named(error, message, arguments):
    with pytest.raises(error, match=message):
        module.expert_exchange(*arguments)
