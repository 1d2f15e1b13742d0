"""Shards gathered and scattered by copies among processes on shared memory; the sum by Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernelmark.kernels.collective import _sharded, _symmetric
from kernelmark.kernels.collective import all_gather as gathering
from kernelmark.kernels.collective import reduce_scatter as scattering
from kernelmark.kernels.collective._peers import Peers
from kernelmark.kernels.collective._symmetric import Symmetric
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train

from ..ranks import Late, Processes, array, places, spread

SIZES = (1, 700, 2077, 640, 3, 1031, 256)
"""Elements of a shard: of less than a slot, and of several with an end within one."""


class Turning(Late):
    """As memory of so many bytes, with its turns."""

    def __init__(self, group, memory):
        super().__init__(group, memory)
        self.capacity = memory[0].numel()
        self.turns = 0

    def turn(self):
        self.turns += 1
        return self.turns - 1


def _gathered(group, memory, dtype):
    peers, found = Turning(group, memory), []
    for call, size in enumerate(SIZES):
        out = torch.full((group.size * size,), 9.0, dtype=dtype)
        x = array(group.rank, call, size, dtype)
        if call % 2:  # where it belongs, as FSDP2 has it
            own = out.view(group.size, size)[group.rank]
            own.copy_(x)
            x = own
        _sharded.gather(x, out, peers)
        found.append(out)
    return found, peers.turns


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float16)])
def test_shards_are_gathered(world, dtype):
    """Calls after one another on two places of 512 bytes, in as many turns as they need, whoever is late."""
    turns = sum(-(-size * dtype.itemsize // 512) for size in SIZES)
    for found, taken in spread(world, _gathered, places(world, 2 * 512 + 100), dtype):
        assert taken == turns
        for call, size in enumerate(SIZES):
            assert torch.equal(found[call], torch.cat([array(rank, call, size, dtype) for rank in range(world)]))


def _scattered(group, memory, dtype, scale):
    peers, found = Turning(group, memory), []
    for call, size in enumerate(SIZES):
        x = array(group.rank, call, group.size * size, dtype)
        out = torch.empty(size, dtype=dtype)
        _sharded.scatter(x, out, peers, scale)
        assert torch.equal(x, array(group.rank, call, group.size * size, dtype))
        found.append(out)
    return found, peers.turns


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float16), (3, torch.float32), (4, torch.float32)])
def test_shards_are_scattered(world, dtype):
    """To the bit: sums in fp32 in the order of ranks, scaled and rounded once."""
    scale, slot = 1 / world, 512
    turns = sum(-(-size * dtype.itemsize // slot) for size in SIZES)
    found = spread(world, _scattered, places(world, 2 * (world - 1) * slot + 100), dtype, scale)
    for call, size in enumerate(SIZES):
        rows = torch.stack([array(rank, call, world * size, dtype).view(world, size) for rank in range(world)])
        for rank in range(world):
            total = torch.zeros(size)
            for row in rows[:, rank]:
                total += row.float()
            assert torch.equal(found[rank][0][call], (total * scale).to(dtype))
            assert found[rank][1] == turns


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_sum_stays_within_its_arrays(rank):
    """Slots are longer than what came, and what is beyond them is another's."""
    N = _sharded.BLOCK + 37
    came = torch.randn(2, N + 91)
    own, whole = torch.randn(N), torch.full((N + 5,), 7.0)
    _sharded.add(own, came, whole[:N], rank, 1.0)
    rows = [*came[:, :N]]
    rows.insert(rank, own)
    assert torch.equal(whole[:N], rows[0] + rows[1] + rows[2])
    assert (whole[N:] == 7.0).all()


def _without(group):
    """Ranks without memory in common, of dtypes that only some of it knows, and of nothing."""
    found = []
    for dtype in (torch.float32, torch.uint8):
        x = (torch.arange(3) + 3 * group.rank).to(dtype)
        out = x.new_empty(3 * group.size)
        gathering.all_gather.into(x, out, torch.distributed.group.WORLD)
        found.append(out.tolist())
    for dtype, mean in ((torch.float32, False), (torch.float32, True), (torch.int32, False)):
        x = (torch.arange(2 * group.size) * (group.rank + 1)).to(dtype)
        out = x.new_empty(2)
        scattering.reduce_scatter.into(x, out, torch.distributed.group.WORLD, mean)
        found.append(out.tolist())
    return found


def test_ranks_without_memory_in_common_exchange_by_their_group():
    first, second = spread(2, _without)
    assert first[:2] == second[:2] == [[0, 1, 2, 3, 4, 5]] * 2
    assert [*zip(first[2:], second[2:], strict=True)] == [([0, 3], [6, 9]), ([0, 1.5], [3, 4.5]), ([0, 3], [6, 9])]


@pytest.fixture
def memory(monkeypatch):
    """Symmetric memory of one rank of four; what is asked for."""
    asked = []

    def symmetric_if_any(group, device, programs, size, use):
        asked.append((size, use))
        capacity = _symmetric.capacity_for(size, 1)
        return Symmetric(torch.zeros(4), 1, 4, programs, capacity, torch.zeros(8), None)

    monkeypatch.setattr("kernelmark.kernels.collective._peers.symmetric_if_any", symmetric_if_any)
    return asked


def test_a_shard_of_a_layer_of_8b_goes_at_once(memory):
    """Over four GPUs: one meeting. Larger ones take as much memory as a piece."""
    shard = 218_112_000 // 4 * 2
    for slots in (1, 3):
        peers = _sharded._peers(torch.empty(1), None, shard, slots, "layers")
        assert _sharded._slots(peers, slots)[2] >= shard
        assert _sharded._slots(peers, slots)[2] % _sharded.LINE == 0
    assert _sharded._peers(torch.empty(1), None, 0, 1, "nothing") is None
    assert _sharded._peers(torch.empty(1), None, 8, 0, "one rank") is None
    assert [use for _, use in memory] == ["layers"] * 2
    assert shard <= _sharded.PIECE
    assert [_symmetric.capacity_for(2 * slots * _sharded.PIECE, 1) for slots in (1, 3)] == PIECES_BYTES


PIECES_BYTES = [256 << 20, 768 << 20]


def test_layers_of_8b_and_what_is_larger_than_a_piece_have_one_memory(memory):
    """Over four GPUs gradients of layers come first: memory that they outgrew would stay beside the other."""
    for shard in (218_112_000 // 4 * 2, 2 * 128_256 * 4096 // 4 * 2):
        _sharded._peers(torch.empty(1), None, shard, 3, "gradients")
    assert [size for size, _ in memory] == PIECES_BYTES[1:] * 2


@pytest.mark.parametrize("last", range(1, 40))
def test_what_is_outgrown_is_less_than_what_takes_its_place(memory, last):
    for size in range(1, last * 10_007, 997):
        _sharded._peers(torch.empty(1), None, size, 3, "gradients")
    *outgrown, most = sorted({size for size, _ in memory})
    assert sum(outgrown) < most or most <= 3 * 2 * _sharded.LINE
    assert most < 2 * 2 * 3 * max(last * 10_007, _sharded.LINE)


def test_turns_are_counted_by_memory_and_forgotten_with_it(memory, monkeypatch):
    monkeypatch.setattr(_symmetric, "_turns", {})
    first = Peers.if_any(None, torch.device("cpu"), 100, "a")
    second = Peers.if_any(None, torch.device("cpu"), 100, "b")
    assert [first.turn(), first.turn(), second.turn(), first.turn()] == [0, 1, 0, 2]
    monkeypatch.setattr(_symmetric, "_known", {})
    _symmetric.forget()
    assert (first.turn(), second.turn()) == (0, 0)


def test_no_graph_holds_a_turn(monkeypatch):
    """It would replay one turn again and again, of two that calls must take one after the other."""
    shared = SimpleNamespace(buffer=SimpleNamespace(is_cuda=True, data_ptr=lambda: 5))
    monkeypatch.setattr(_symmetric, "_turns", {})
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
        if not capturing:
            assert [_symmetric.next_turn(shared), _symmetric.next_turn(shared)] == [0, 1]
            continue
        with pytest.raises(RuntimeError, match="no CUDA graph may hold"):
            _symmetric.next_turn(shared)
    assert _symmetric._turns == {5: 2}


def test_exchanges_have_streams_of_their_own(monkeypatch):
    """Urgent ones, which begin behind the caller's work, and which the caller waits for."""
    told = []

    class Watched(Processes):
        def beside(self, number):
            told.append(("beside", number))
            return super().beside(number)

        def wait(self, number):
            told.append(("wait", number))

    peers = Watched(SimpleNamespace(rank=0, size=2), None)

    def asked(group, device, size, use, priority):
        told.append((use, priority))
        return peers

    monkeypatch.setattr(_sharded.Peers, "if_any", asked)
    monkeypatch.setattr(_sharded, "gather", lambda x, out, peers: told.append("gather"))
    monkeypatch.setattr(_sharded, "scatter", lambda x, out, peers, scale: told.append(scale))
    monkeypatch.setattr(_sharded.dist, "get_world_size", lambda group: 2)
    _sharded.gather_into(torch.ones(2), torch.ones(4), None)
    _sharded.scatter_into(torch.ones(4), torch.ones(2), None, True)
    _sharded.scatter_into(torch.ones(4), torch.ones(2), None)
    one, two = _sharded.GATHERING, _sharded.SCATTERING
    assert told[:4] == [("shards gathered", -1), ("beside", one), "gather", ("wait", one)]
    assert told[4:8] == [("shards scattered", -1), ("beside", two), 0.5, ("wait", two)]
    assert told[8:] == [("shards scattered", -1), ("beside", two), 1.0, ("wait", two)]
    assert one != two


def _steps(group, memory, parts):
    """Steps of a tiny model by FSDP2, whose exchanges go over these memories; how many turns they took."""
    peers = [Turning(group, x) for x in memory]
    _sharded._peers = lambda x, group, size, slots, use: peers[use == "shards scattered"]
    case = train.WORKLOAD.case(
        {"B": 1, "S": 16, "A": 2, "gpus": group.size}, "fp32", "program", model="llama-tiny", parallel="fsdp2"
    )
    trainer = train.assemble(case, Assembly(System("some", "torch", parts), train.catalog()))
    whole = train.read(train.WORKLOAD.whole(case))
    trainer.load(answer.initial(whole, 5, torch.device("cpu")))
    batches = answer.Batches(whole, 5, torch.device("cpu"))
    losses = [float(trainer.step(*map(trainer.parallel.share, batches.draw(step)))) for step in range(2)]
    with trainer.parallel.local():
        trainer.step(*map(trainer.parallel.share, batches.draw(2)))
    losses.append(float(trainer.step(*map(trainer.parallel.share, batches.draw(3)))))
    return losses, {name: x.clone() for name, x in trainer.weights().items()}, [x.turns for x in peers]


@pytest.mark.minutes  # `test_fsdp_exchanges` holds FSDP2's side each time, and the others here the exchanges
def test_fsdp2_trains_by_them():
    """As by its own: over places that take the table in pieces, two micro-batches a step."""
    memory = [places(2, 2 * size) for size in (30_000, 20_000)]
    ours = spread(2, _steps, memory, {"all_gather": "kernelmark", "reduce_scatter": "kernelmark"})
    plain = spread(2, _steps, memory, {})
    for mine, theirs in zip(ours, plain, strict=True):
        assert theirs[2] == [0, 0]
        assert mine[2] == ours[0][2]
        assert min(mine[2]) > 20
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
        for name, x in mine[1].items():
            torch.testing.assert_close(x, theirs[1][name], rtol=1e-5, atol=1e-6)
