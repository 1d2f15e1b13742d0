"""Collectives' kernels in several processes on shared memory, interpreted; and all-reduce in 8 bits on gloo."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from kernelmark.baselines import torch_distributed
from kernelmark.kernels.collective import _exchange, all_to_all, peer_copy
from kernelmark.kernels.collective import all_gather as gathering
from kernelmark.kernels.collective import all_reduce as module
from kernelmark.kernels.collective import reduce_scatter as scattering
from kernelmark.kernels.collective._symmetric import Symmetric, flags_bytes
from kernelmark.kernels.collective.all_reduce_quantized import all_reduce_quantized, pushed
from kernelmark.kernels.cpu.all_reduce_quantized import all_reduce_quantized as on_cpu
from kernelmark.kernels.quantization.gradient_compression import GROUP
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import all_gather, reduce_scatter
from kernelmark.suite.operators import all_reduce_quantized as quantizing

from ..ranks import Late, array, places, spread

PROGRAMS = 4
CAPACITY = 1 << 16
NUMBER = 2**32 - 3
"""Of the call before the first, in 32 bits: they wrap while a test runs."""


def shared_memory(world, number=0):
    """Buffers that forked processes share, at the same addresses in all of them."""
    size = flags_bytes(world, PROGRAMS) + 2 * CAPACITY
    buffers = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(world)]
    for x in buffers:
        x[: flags_bytes(world, PROGRAMS)].view(torch.int32)[:].fill_(number - (number >> 31 << 32))
    return buffers, torch.tensor([x.data_ptr() for x in buffers])


def _reduced(group, reduce, halves, buffers, peers, sizes, dtype, scale):
    """Of arrays that lie one element further each time, in place and beside."""
    capacity = CAPACITY * 2 // halves
    shared = Symmetric(peers, group.rank, group.size, PROGRAMS, capacity, buffers[group.rank], None)
    found = []
    for call, size in enumerate(sizes):
        whole = torch.full((size + 9,), 7.0, dtype=dtype)
        x = whole[call % 8 :][:size]
        x.copy_(array(group.rank, call, size, dtype))
        out = x if call % 2 else torch.empty_like(x)
        reduce(x, out, shared, scale)
        assert (whole[: call % 8] == 7).all()
        assert (whole[call % 8 + size :] == 7).all()
        if not call % 2:
            assert torch.equal(x, array(group.rank, call, size, dtype))
        found.append(out.float())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("reduce", "halves"),
    [
        (module.one_shot, 2),
        (module.two_shot_of_words, 2),
        (module.two_shot, 1),
    ],
    ids=["one_shot", "two_shot_of_words", "two_shot"],
)
def test_all_reduce_over_peers_memory(reduce, halves, world, dtype):
    """Calls after one another on one buffer, of sizes that end within a word, a tile and a part, and of more tiles
    than programs; the calls' number wraps.
    """
    sizes = (1, 700, 2077, 3, 1031, 256)
    found = spread(world, _reduced, reduce, halves, *shared_memory(world, NUMBER), sizes, dtype, 0.5)
    for call, size in enumerate(sizes):
        total = sum(array(rank, call, size, dtype).float() for rank in range(world)) * 0.5
        for rank in range(world):
            assert torch.equal(found[rank][call], found[0][call])
            torch.testing.assert_close(found[rank][call], total.to(dtype).float())


def _late(group, call, buffers, peers, size, before):
    """What one rank finds whose call is late; its programs last met in the call `before`."""
    buffers[group.rank][4 * PROGRAMS : flags_bytes(group.size, PROGRAMS)].view(torch.int32).fill_(before)
    torch.distributed.barrier()
    shared = Symmetric(peers, group.rank, group.size, PROGRAMS, CAPACITY, buffers[group.rank], None)
    x = array(group.rank, 0, size, torch.float32)
    out = torch.empty(group.size * size)
    time.sleep(0.3 * group.rank)
    if call is _exchange.pushed:
        call(x, out, shared)
    else:
        call(x, out[:size], shared, 1.0)
    return out


@pytest.mark.parametrize(("number", "before"), [(5, 2**31 - 2), (NUMBER, 0)])
@pytest.mark.parametrize("call", [module.two_shot, _exchange.pushed], ids=["two_shot", "pushed"])
def test_programs_that_met_long_ago_wait(call, number, before):
    """As those that only large arrays have, once there were 2^31 calls and more of small ones; or never."""
    found = spread(2, _late, call, *shared_memory(2, number), 300, before)
    arrays = [array(rank, 0, 300, torch.float32) for rank in range(2)]
    for out in found:
        if call is _exchange.pushed:
            torch.testing.assert_close(out, torch.cat(arrays))
        else:
            torch.testing.assert_close(out[:300], sum(arrays))


def _gathered(x, place, shared, gather):
    """Beside, and where a rank's own share lies already."""
    own = shared.rank * x.numel()
    out = torch.full((shared.world * x.numel(),), 9.0, dtype=x.dtype)
    if place == "in":
        out[own : own + x.numel()] = x
        gather(out[own : own + x.numel()], out, shared)
    else:
        gather(x, out, shared)
    return out


def _exchanged(group, exchange, buffers, peers, sizes, dtype):
    """All-gathers and all-to-alls in turn, of arrays that lie one element further each time; between words
    reduce-scatters beside and in place, and an all-reduce.
    """
    words = exchange is _exchange.exchanged
    shared = Symmetric(peers, group.rank, group.size, PROGRAMS, CAPACITY, buffers[group.rank], None)
    found = []
    for call, size in enumerate(sizes):
        place = "in" if call % 2 else "out"
        x, whole = array(group.rank, call, size, dtype), array(group.rank, call, group.size * size, dtype)
        later = torch.empty(call % 8 + whole.numel(), dtype=dtype)[call % 8 :].copy_(whole)
        out = torch.full((whole.numel() + 9,), 7.0, dtype=dtype)
        gathered = _gathered(x, place, shared, exchange)
        exchange(later, out[call % 8 :][: whole.numel()], shared)
        assert (out[: call % 8] == 7).all()
        assert (out[call % 8 + whole.numel() :] == 7).all()
        added = torch.empty_like(x)
        if words:
            module.one_shot(x, added, shared, 1.0)
            added = later.view(group.size, size)[group.rank] if place == "in" else added
            _exchange.scattered_sum(later, added, shared, 0.5)
        found.append((gathered, out[call % 8 :][: whole.numel()].clone(), added.clone(), later))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("exchange", [_exchange.exchanged, _exchange.pushed])
def test_exchange_over_peers_memory(exchange, world, dtype):
    """Calls after one another on one buffer, of shares that end within a word and a tile, and of more tiles than
    programs; the calls' number wraps.
    """
    sizes = (1, 700, 1077, 3, 1031, 256)
    found = spread(world, _exchanged, exchange, *shared_memory(world, NUMBER), sizes, dtype)
    for call, size in enumerate(sizes):
        shares = [array(rank, call, size, dtype) for rank in range(world)]
        rows = torch.stack([array(rank, call, world * size, dtype).view(world, size) for rank in range(world)])
        for rank in range(world):
            gathered, swapped, added, given = found[rank][call]
            assert torch.equal(gathered, torch.cat(shares))
            assert torch.equal(swapped, rows[:, rank].flatten())
            if exchange is _exchange.exchanged:
                if dtype != torch.bfloat16:  # which the interpreter rounds in its own way
                    torch.testing.assert_close(added, (rows[:, rank].float().sum(0) * 0.5).to(dtype))
                others = torch.arange(world) != rank if call % 2 else slice(None)
                assert torch.equal(given.view(world, size)[others], rows[rank][others])


def _scattered(group, buffers, peers, sizes):
    """Sums of this rank's shares, out of place and in place, with what is left of the array."""
    scattering.words_memory = lambda x, world, use: Symmetric(
        peers, group.rank, group.size, PROGRAMS, CAPACITY, buffers[group.rank], None
    )
    found = []
    for call, size in enumerate(sizes):
        x = array(group.rank, call, group.size * size, torch.float32)
        out = scattering.reduce_scatter(x)
        assert torch.equal(x, array(group.rank, call, group.size * size, torch.float32))
        own = scattering.reduce_scatter(x, "in")
        assert own.data_ptr() == x.view(group.size, size)[group.rank].data_ptr()
        found.append((out, own.clone(), x))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_reduce_scatter_by_words_and_beyond(world):
    """Odd lengths; the last is too large for words and goes by the group's own."""
    sizes = (1, 701, _exchange.WORDS_BYTES // 4 // world + 1)
    found = spread(world, _scattered, *shared_memory(world, NUMBER), sizes)
    for call, size in enumerate(sizes):
        rows = torch.stack(
            [array(rank, call, world * size, torch.float32).view(world, size) for rank in range(world)]
        )
        for rank in range(world):
            out, own, left = found[rank][call]
            torch.testing.assert_close(out, rows[:, rank].sum(0))
            torch.testing.assert_close(own, out)
            others = torch.arange(world) != rank
            assert torch.equal(left.view(world, size)[others], rows[rank][others])


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [2, 4])
def test_shares_of_the_largest_arrays_fit(world, width):
    share = _exchange.WORDS_BYTES // world // width
    for tiles in (_exchange.NARROW, _exchange.WIDE):
        assert world * 2 * width * -(-share // tiles.block) * tiles.block <= _exchange.words_bytes(world)
    share = _exchange.PUSHED_BYTES // world // width // _exchange.TURN * _exchange.TURN
    assert _exchange.pushes(share, width, world)
    assert not _exchange.pushes(share + _exchange.TURN, width, world)
    assert not _exchange.pushes(share - 1, width, world)
    assert world * width * _exchange.slot(share) <= _exchange.PUSHED_BYTES


SHARES = (7, 333, 100, 64, 5, 200, 31)
"""Elements: of which peers can begin with none, and with some."""


def _pulled(group, memory):
    peers, found = Late(group, memory), []
    for call, size in enumerate(SHARES):
        x = array(group.rank, call, size, torch.float16)
        ranks = SimpleNamespace(rank=group.rank, world=group.size)
        place = "in" if call % 2 else "out"
        found.append(_gathered(x, place, ranks, lambda x, out, _: gathering.pulled(x, out, peers)))
    return found, peers.met


@pytest.mark.parametrize(("world", "meetings"), [(2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2])])
def test_all_gather_by_copy_engines(world, meetings):
    """Calls after one another in one place, whoever is late."""
    for found, met in spread(world, _pulled, places(world, 2 * max(SHARES))):
        assert met == meetings * len(SHARES)
        for call, size in enumerate(SHARES):
            shares = [array(rank, call, size, torch.float16) for rank in range(world)]
            assert torch.equal(found[call], torch.cat(shares))


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [2, 4])
def test_words_of_the_largest_arrays_fit(world, width):
    """Twice their bytes, in whole tiles: a slot for each rank, and of two shots two."""
    least = module.words_bytes(world)
    size = module.one_shot_bytes(world) // width
    for tiles in (module.ONE_SHOT, module.WIDE):
        assert world * 2 * width * -(-size // tiles.block) * tiles.block <= least
    size = module.WORDS_BYTES // width
    assert 2 * world * 2 * width * -(-size // (world * module.WORDS.block)) * module.WORDS.block <= least


def _steps(group, function, size, steps, scheme="int8"):
    rest = torch.zeros(size)
    total, wire = torch.zeros(size), torch.zeros(size)
    for step in range(steps):
        x = array(group.rank, step, size, torch.float32)
        out, rest = function(x, rest, scheme)
        wire += out
        total += x
    return total, wire, rest, out


@pytest.mark.parametrize(
    ("function", "scheme", "world", "least", "most"),
    [
        (all_reduce_quantized, "int8", 2, 1e-4, 0.02),
        (on_cpu, "int8", 3, 1e-4, 0.02),
        (all_reduce_quantized, "fp8", 3, 5e-3, 0.05),
        (on_cpu, "fp8", 4, 5e-3, 0.05),
    ],
)
def test_what_eight_bits_lose_comes_back(function, scheme, world, least, most):
    """Sums over steps and what is still owed make up the exact sums: nothing is lost for good. Also of a length
    that is no whole number of groups.
    """
    size = 2 * GROUP * 2 + 5
    found = spread(world, _steps, function, size, 3, scheme)
    exact = sum(x[0] for x in found)
    wire, owed = found[0][1], sum(x[2] for x in found)
    torch.testing.assert_close(wire + owed, exact, rtol=1e-5, atol=1e-4)
    error = float((wire - exact).norm() / exact.norm())
    assert least < error < most
    assert all(torch.equal(x[3], found[0][3]) for x in found)


def _quantized_both_ways(group, buffers, peers, sizes, dtype, scheme):
    """Results and residuals over peers' memory and by collectives, of calls after one another on one buffer, which
    `all_reduce` uses in between.
    """
    shared = Symmetric(peers, group.rank, group.size, PROGRAMS, 2 * CAPACITY, buffers[group.rank], None)
    same = []
    for call, size in enumerate(sizes):
        x = array(group.rank, call, size, dtype)
        rest = array(group.rank, call + 50, size, torch.float32)
        kept = x.clone(), rest.clone()
        ours, theirs = pushed(x, rest, shared, scheme), all_reduce_quantized(x, rest, scheme)
        total, plain = torch.empty_like(x), x.to(torch.float32, copy=True)
        module.two_shot(x, total, shared, 1.0)
        torch.distributed.all_reduce(plain)
        torch.testing.assert_close(total, plain.to(dtype))
        same += [torch.equal(a, b) for a, b in (*zip(ours, theirs, strict=True), (x, kept[0]), (rest, kept[1]))]
    return same


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.float16)])
def test_over_peers_memory_eight_bits_are_the_same(world, dtype, scheme):
    """To the bit, of sizes that end within a tile and of more tiles than programs."""
    sizes = [GROUP * world * groups for groups in (1, 19, 4, 3)]
    found = spread(world, _quantized_both_ways, *shared_memory(world, NUMBER), sizes, dtype, scheme)
    assert found == [[True] * 4 * len(sizes)] * world


@pytest.mark.parametrize(("scheme", "step"), [("int8", 2e-2), ("fp8", 0.25)])
def test_the_kernel_and_the_cpu_agree(scheme, step):
    world, size = 2, 2 * GROUP * 2
    ours, plain = (spread(world, _steps, x, size, 1, scheme) for x in (all_reduce_quantized, on_cpu))
    apart = (ours[0][1] - plain[0][1]).abs()
    assert float(apart.max()) <= step
    assert float((apart > 1e-4).float().mean()) < 0.05  # a tie, rounded to the other side


def _verified(group, dropped):
    """How a measurement of sums in eight bits ends, whose residual is given back or not."""
    case = quantizing.OPERATOR.case({"N": 700, "gpus": 2}, "fp32", "forward", scheme="fp8")
    bench = Workbench.build(quantizing.OPERATOR, case, torch.device("cpu"), 1, group)

    def call(x, residual, scheme="int8"):
        out, rest = on_cpu(x, residual, scheme)
        return out, torch.zeros_like(rest) if dropped else rest

    few = Sampling(min_samples=3, max_samples=3, min_seconds=0, warmup_s=0, energy="never")
    try:
        device = Cpu()
        device.group = group
        Trial(device, bench, "hot", few, Stages()).run(lambda: call)
    except Incorrect as error:
        return str(error)
    return ""


def test_a_residual_that_is_not_kept_is_seen_by_all_ranks_together():
    """Each alone finds nothing amiss with it."""
    assert spread(2, _verified, False) == ["", ""]
    assert all("output 2" in x for x in spread(2, _verified, True))


def _in_place(group, case, wrong):
    """How a measurement in place ends: by torch.distributed, or by a call that is `wrong` in some way."""
    right = torch_distributed.IMPLEMENTATIONS[case.operator]["torch_distributed"](case)

    def call(x, place):
        out = right(x, place)
        if wrong == "copies":
            return out.clone()
        if wrong == "writes beside":
            x.view(group.size, -1)[1 - group.rank] += 1
        return out

    forgotten = []
    call.shared, call.forget = lambda x, place: 1000, lambda: forgotten.append(group.rank)
    definition = {x.name: x for x in (all_gather.OPERATOR, reduce_scatter.OPERATOR)}[case.operator]
    bench = Workbench.build(definition, case, torch.device("cpu"), 1, group)
    few = Sampling(min_samples=3, max_samples=3, min_seconds=0, warmup_s=0, energy="never")
    try:
        device = Cpu()
        device.group = group
        found = Trial(device, bench, "hot", few, Stages()).run(lambda: call).samples
    except Incorrect as error:
        return str(error)
    own = 4 * bench.inputs["x"].numel()
    return found.get("rank_memory") in (None, (found.get("memory", (0,))[0] + own + 1000,)), forgotten


@pytest.mark.parametrize("operator", [all_gather, reduce_scatter])
@pytest.mark.parametrize("wrong", ["", "copies", "writes beside"])
def test_collectives_in_place(operator, wrong):
    case = operator.OPERATOR.case({"N": 64, "gpus": 2}, "fp32", "forward", place="in")
    assert case.name == "N64-gpus2-in-fp32-forward"
    found = spread(2, _in_place, case, wrong)
    if not wrong:
        assert found == [(True, [0]), (True, [1])]
    elif wrong == "copies":
        assert all(operator is all_gather or "it changed its inputs" in x for x in found), found
    else:
        assert all("output" in x or "it changed its inputs" in x for x in found), found


def _opened(group):
    """What each of three calls sees of the ranks' arrays; rank 1's lies elsewhere in the last."""
    torch.multiprocessing.reductions.reduce_tensor = lambda x: (torch.tensor, (x.tolist(),))
    first, second = (torch.tensor([float(10 * call + group.rank)]) for call in (1, 2))
    calls = [first, first, second if group.rank == 1 else first]
    return [torch.cat(peer_copy._arrays(x)).tolist() for x in calls]


def test_ranks_agree_whether_arrays_lie_where_they_were_opened():
    assert spread(3, _opened) == [[[10.0, 11.0, 12.0], [10.0, 11.0, 12.0], [10.0, 21.0, 12.0]]] * 3


def _in_two_dtypes(group):
    torch.multiprocessing.reductions.reduce_tensor = lambda x: (torch.tensor, (x.tolist(),))
    x = torch.ones(2, dtype=torch.bfloat16)
    return [str(a.dtype) for own in (x, x.view(torch.float16)) for a in peer_copy._arrays(own)]


def test_a_view_in_another_dtype_is_opened_anew():
    assert spread(1, _in_two_dtypes) == [["torch.bfloat16", "torch.float16"]]


def test_copies_wait_for_what_peers_had_queued(monkeypatch):
    """A peer's array is written when all have met, not before."""
    theirs, met = torch.zeros(3), []

    def barrier(channel):
        met.append(channel)
        theirs.fill_(7.0)

    queue = SimpleNamespace(wait_stream=lambda other: None)
    handle = SimpleNamespace(barrier=barrier)
    monkeypatch.setattr(peer_copy, "symmetric", lambda *_, **__: SimpleNamespace(handle=handle))
    monkeypatch.setattr(peer_copy, "stream", lambda device, number: queue)
    monkeypatch.setattr(peer_copy, "_arrays", lambda x: [x, theirs])
    monkeypatch.setattr(peer_copy, "dist", SimpleNamespace(**{
        "get_rank": lambda: 0, "get_world_size": lambda: 2, "group": SimpleNamespace(WORLD=None),
    }))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    assert peer_copy.peer_copy(torch.zeros(3), "pair").tolist() == [[7.0] * 3]
    assert met == [1, 0]


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="x has dtype torch.int64"):
        module.all_reduce(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="x must be contiguous"):
        module.all_reduce(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="place is 'here', expected 'out' or 'in'"):
        module.all_reduce(torch.zeros(4), "here")
    with pytest.raises(ValueError, match="x has shape \\(4, 4\\), expected 1 dimensions"):
        all_to_all.all_to_all(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="place is 'here', expected 'out' or 'in'"):
        scattering.reduce_scatter(torch.zeros(4), "here")


def _of_nothing(group):
    calls = all_to_all.all_to_all, gathering.all_gather, scattering.reduce_scatter
    return [call(torch.zeros(0)).tolist() for call in calls]


def _of_a_length_that_ranks_cannot_share(group):
    for call in (all_to_all.all_to_all, scattering.reduce_scatter):
        with pytest.raises(ValueError, match="x has 3 elements, expected a multiple of 2 ranks"):
            call(torch.zeros(3))


def test_exchanges_of_nothing_and_of_what_cannot_be_shared():
    assert spread(2, _of_nothing) == [[[], [], []]] * 2
    spread(2, _of_a_length_that_ranks_cannot_share)
