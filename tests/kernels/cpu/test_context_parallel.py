"""Attention over processes against one process's in fp64: gathered, pulled, as they come, and ring; masks, grouped
heads, gradients; which copies are made.
"""

from __future__ import annotations

import time
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kernelmark.baselines import ulysses
from kernelmark.kernels import _hopper
from kernelmark.kernels.attention import _as_they_come as as_they_come
from kernelmark.kernels.attention import attention_context_parallel as on_gpus
from kernelmark.kernels.attention._as_they_come import Chunks
from kernelmark.kernels.attention._chunks import FIELDS, TABLE
from kernelmark.kernels.attention._context_parallel import (
    Attention,
    Brought,
    chunks_of,
    gathered,
    held,
    merge,
    ring,
)
from kernelmark.kernels.attention._pulled import REST, Pulled, _copy, shared_bytes
from kernelmark.kernels.collective._symmetric import buffer_bytes, capacity_for
from kernelmark.kernels.cpu.attention_context_parallel import (
    PARTIAL,
    attention_context_parallel,
    attention_context_parallel_ring,
)
from kernelmark.registry.store.record import Case
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import attention
from kernelmark.suite.operators import attention_context_parallel as operator
from torch.utils._python_dispatch import TorchDispatchMode

from ...ranks import Processes, Sent, places, spread

AXES = {"B": 1, "H": 4, "Hkv": 2, "S": 24, "D": 8}


def drawn(world, mask):
    B = 2 if world == 2 else 1  # chunks of one sequence are batches without a copy
    case = operator.OPERATOR.case({**AXES, "B": B, "gpus": world}, "fp32", "forward", mask=mask)
    generator = torch.Generator().manual_seed(3)
    inputs = operator.inputs(case, torch.device("cpu"), generator)
    q, k, v = (inputs[x].double() for x in "qkv")
    return case, q, k, v, torch.randn(q.shape, generator=generator, dtype=torch.float64)


def _write(word, place, value):
    """As a stream does."""
    word[place : place + 1] = torch.tensor([value], dtype=torch.uint32)


def _as_they_come(out, q, k, v, mask, signals):
    """As the kernel does, by the table alone: each chunk of queries with its own keys, then with those of a list,
    whose chunks the word must say are there. Keys lie in chunks of as many rows as queries have.
    """
    memory, length = signals.memory.tolist(), q.shape[2] // 2
    levels = torch.empty(q.shape[:3], dtype=q.dtype)
    for turn in range(2):
        place, own, blocks, entry = memory[TABLE + turn * FIELDS :][:FIELDS]
        rows, keys = torch.arange(place, place + length), [torch.arange(own, own + length)]
        for at in range(entry, entry + 2 * blocks // length, 2):
            assert (memory[0] - signals.begun, memory[at + 1] <= memory[1]) == (len(k) * memory[1], True)
            keys.append(torch.arange(memory[at] + 1 - length, memory[at] + 1))
        given = (x[:, :, torch.cat(keys[::-1])] for x in (k, v))  # its own at the end, where the mask is
        part = torch.empty_like(q[:, :, rows])
        levels[:, :, rows] = PARTIAL.forward(part, q[:, :, rows], *given, mask)
        out[:, :, rows] = part
    return levels


def _parts(group, case: Case, mask, form, memory, q, k, v, grad):
    given = [operator.split(x, case, group.rank).requires_grad_() for x in (q, k, v)]
    if form == "pulled":
        out = gathered(*given, mask, PARTIAL, Pulled(Processes(group, memory)))
    elif form == "as they come":
        chunks = Chunks(group.rank, group.size, mask, given[0].shape[2] // 2, 1, torch.device("cpu"))
        alone = PARTIAL._replace(forward=None, as_they_come=_as_they_come)
        for _ in range(2):  # the word goes on
            out = gathered(*given, mask, alone, Pulled(Processes(group, memory), chunks=chunks))
    else:
        calls = {"gathered": attention_context_parallel, "ring": attention_context_parallel_ring}
        out = calls[form](*given, mask)
    found = torch.autograd.grad(out, given, operator.split(grad, case, group.rank))
    return [out.detach(), *found]


@pytest.mark.parametrize(
    ("world", "form"),
    [
        (2, "gathered"),
        (3, "pulled"),
        (3, "ring"),
        (4, "pulled"),
        (2, "as they come"),
        (3, "as they come"),
        (4, "as they come"),
    ],
)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_ranks_together_are_one_process(monkeypatch, world, form, mask):
    monkeypatch.setattr(as_they_come, "_write", _write)
    case, q, k, v, grad = drawn(world, mask)
    parts = spread(world, _parts, case, mask, form, places(world, 1 << 14), q, k, v, grad)
    given = [x.requires_grad_() for x in (q, k, v)]
    whole = operator.reference(*given, mask)
    wanted = [whole.detach(), *torch.autograd.grad(whole, given, grad)]
    for i, right in enumerate(wanted):
        found = operator.join([x[i] for x in parts], case)
        tolerance = 1e-5 if form == "ring" else 1e-12  # a ring's sums are fp32
        assert float((found - right).norm() / right.norm()) < tolerance, i


class Counted(TorchDispatchMode):
    """Bytes of the tensors that are there, made within, and the most that there were."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self._there = 0, 0, set()

    def __torch_dispatch__(self, function, types, given=(), named=None):
        found = function(*given, **(named or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self._there | self.known:
                self._there.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _gone(self, address, size):
        self._there.discard(address)
        self.now -= size


FORMS = [False, True, None]
"""Whether keys are kept for a backward pass, None where they go round."""


def _alone(group, case, mask, memory, q, k, v):
    """Of calls without gradients: this rank's rows, and the bytes that each form took beside inputs and places."""
    given = [operator.split(x, case, group.rank) for x in (q, k, v)]
    peers = Processes(group, memory)
    rows = [gathered(*given, mask, PARTIAL, Pulled(peers, kept=False)) for _ in range(2)]
    light = Attention(lambda out, q, k, v, mask: q.new_empty(q.shape[:3]), PARTIAL.backward, lambda *parts: None)
    took = []
    for kept in FORMS:
        form = partial(gathered, arriving=Pulled(peers, kept)) if kept is not None else ring
        counted = Counted()
        counted.known = {x.untyped_storage().data_ptr() for x in (*given, *memory)}
        with counted, torch.no_grad():
            form(*given, mask, attention=light)
        took.append(counted.most)
    return rows, took


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_without_gradients_keys_lie_where_peers_pull_them(mask):
    """Nothing is kept twice; and what is held is what is said, but for a row's log-sum-exps."""
    world, sizes = 3, {"B": 1, "H": 4, "Hkv": 2, "S": 96, "D": 64}
    case = operator.OPERATOR.case({**sizes, "gpus": world}, "fp32", "forward", mask=mask)
    inputs = operator.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(3))
    q, k, v = (inputs[x] for x in "qkv")
    own = operator.split(k, case, 0)
    places_ = places(world, shared_bytes(own, world, kept=False))
    found = spread(world, _alone, case, mask, places_, q, k, v)
    whole = operator.reference(q.double(), k.double(), v.double(), mask)
    for i in range(2):
        torch.testing.assert_close(operator.join([x[0][i] for x in found], case), whole.float())
    for place, kept in enumerate(FORMS):
        form = "ring" if kept is None else "gathered"
        said = held(**sizes, world=world, itemsize=4, form=form, kept=bool(kept))
        shared = shared_bytes(own, world, kept) if form == "gathered" else 0
        most = max(x[1][place] for x in found)
        assert 0.95 < most / (said.total - said.inputs - shared) < 1.15, (form, kept)


def test_two_million_tokens_take_less_than_20_gib_of_four_gpus():
    sizes = {"B": 1, "H": 32, "Hkv": 8, "S": 1 << 21, "D": 128, "world": 4, "itemsize": 2}
    gathered_ = held(**sizes, form="gathered", kept=False)
    assert gathered_.total == 18 << 30
    assert gathered_.keys == buffer_bytes(4, 1, gathered_.keys, 1) - 128
    assert held(**{**sizes, "Hkv": 32}, form="ring", kept=False).total < held(
        **{**sizes, "Hkv": 32}, form="gathered", kept=False
    ).total  # fmt: skip


def test_memory_of_one_half_is_not_rounded_to_a_power_of_two():
    gib = 1 << 30
    assert [capacity_for(x, 1) for x in (1, 2 * gib, 2 * gib + 1)] == [1 << 16, 2 * gib, 2 * gib + gib // 4]
    assert [capacity_for(x, 2) for x in (1, 2 * gib, 2 * gib + 1)] == [1 << 16, 2 * gib, 4 * gib]


class Late(Processes):
    """Whose copies beside the first are not there yet."""

    def beside(self, number):
        self.late = number == REST
        return super().beside(number)

    def place(self, rank, shape, dtype):
        there = super().place(rank, shape, dtype)
        return torch.full_like(there, torch.nan) if getattr(self, "late", False) and rank != self.rank else there


def _early(group, case, memory, k):
    own = operator.split(k, case, group.rank)
    return Pulled(Late(group, memory)).start(own, own, "causal")


def test_the_early_chunk_finds_its_keys_among_the_first_copies():
    """Nothing else is waited for before it is attended to."""
    case, _, k, _, _ = drawn(3, "causal")
    length = AXES["S"] // 6
    for rank, (whole, _) in enumerate(spread(3, _early, case, places(3, 1 << 14), k)):
        end = (rank + 1) * length
        assert torch.equal(whole[:, :, :end], k[:, :, :end])
        assert rank == 2 or whole.isnan().any()  # to the last rank only early chunks come, and those are first


class Seen(TorchDispatchMode):
    """The copies from other ranks' places: from which rank, and of how many bytes."""

    def __init__(self, peers):
        super().__init__()
        places_ = peers._places
        self._ends = [(x.data_ptr(), x.data_ptr() + x.nbytes) for i, x in enumerate(places_) if i != peers.rank]
        self._ranks = [i for i in range(peers.world) if i != peers.rank]
        self.copies = []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        if function is torch.ops.aten.copy_.default:
            to, source = given[:2]
            for rank, (begin, end) in zip(self._ranks, self._ends, strict=True):
                if begin <= source.data_ptr() < end:
                    assert to.is_contiguous()
                    assert source.is_contiguous()
                    self.copies.append((rank, source.nbytes))
        return function(*given, **(named or {}))


def _copied(group, case, mask, kept, counted, memory, k):
    own = operator.split(k, case, group.rank)
    peers = Processes(group, memory)
    chunks = Chunks(group.rank, group.size, mask, own.shape[2] // 2, 1, torch.device("cpu")) if counted else None
    pulled = Pulled(peers, kept, chunks)
    with Seen(peers) as seen:
        whole = pulled.start(own, own, mask)
    pulled.end()
    if chunks is not None:
        assert chunks.memory[0] == len(seen.copies)  # one more behind each
    return seen.copies, _hopper.fits(whole[0], *whole, _hopper.WIDTHS)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_a_chunk_is_one_copy_and_no_two_ranks_pull_from_one(monkeypatch, mask, kept, counted):
    """All sequences' early ones first; or, where they are counted, all of one sequence after the other."""
    monkeypatch.setattr(as_they_come, "_write", _write)
    world, sizes = 4, {"B": 2, "H": 4, "Hkv": 2, "S": 24, "D": 64}
    case = operator.OPERATOR.case({**sizes, "gpus": world}, "fp32", "forward", mask=mask)
    k = torch.randn(2, 2, 24, 64).bfloat16()
    place = shared_bytes(operator.split(k, case, 0), world, kept)
    found = spread(world, _copied, case, mask, kept, counted, places(world, place), k)
    chunk = 2 * 2 * 3 * 64 * 2  # K and V of one sequence
    for rank, (copies, fits) in enumerate(found):
        chunks = 2 * (world - 1) - (rank if mask == "causal" else 0)  # without the late ones of earlier ranks
        assert [size for _, size in copies] == [chunk] * 2 * chunks
        assert fits  # the kernels for Hopper take keys as they lie
        if counted:
            assert copies[:chunks] == copies[chunks:]
    if counted:  # as each of two sequences
        found = [([x for x in copies[: len(copies) // 2] for _ in range(2)], fits) for copies, fits in found]
    for step in zip(*([rank for rank, _ in copies] for copies, _ in found), strict=False):
        assert len(set(step)) == world  # as long as all have something to pull
    rest = [[rank for rank, _ in copies[2 * (world - 1) :: 2]] for copies, _ in found]
    for step in range(world - 1):
        sources = [x[step] for x in rest if len(x) > step]
        assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("D", [8, 6, 7])
def test_keys_are_laid_however_they_lie(D):
    """In wide numbers where rows, strides and addresses allow it."""
    x = torch.randn(2 * 3 * 5 * D + 2).bfloat16()
    for first in range(3):
        given = x[first:][: 30 * D].view(2, 3, 5, D)
        for keys in (given, given.transpose(0, 1), given.mT.contiguous().mT, given[..., :3]):
            to = torch.zeros(keys.shape[0], keys.shape[2], keys.shape[1], keys.shape[3]).bfloat16().transpose(1, 2)
            _copy(to, keys)
            assert torch.equal(to, keys)


def _kernels(group, case, memory, q, k, v, grad):
    """This rank's part by the kernels for GPUs, whose peers are processes."""
    given = [operator.split(x, case, group.rank).requires_grad_() for x in (q, k, v)]
    peers = Processes(group, memory)
    found = []
    for parts in (1, 2):
        out = on_gpus._in_parts(*given, "causal", Pulled(peers), parts)
        found.append([out.detach(), *torch.autograd.grad(out, given, operator.split(grad, case, group.rank))])
    return found


def test_kernels_take_keys_as_they_are_brought():
    case, *given = drawn(2, "causal")
    q, k, v, grad = (x.float() for x in given)
    found = spread(2, _kernels, case, places(2, 1 << 14), q, k, v, grad)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    whole = operator.reference(*wide, "causal")
    wanted = [whole.detach(), *torch.autograd.grad(whole, wide, grad.double())]
    for parts in range(2):  # heads together, and one after the other
        for i, right in enumerate(wanted):
            torch.testing.assert_close(operator.join([x[parts][i] for x in found], case), right.float())


@pytest.mark.parametrize("counted", [False, True])
def test_all_ranks_lay_keys_alike(monkeypatch, counted):
    """Whether or not a rank's kernel takes its queries, which may lie at another place than those of others."""
    monkeypatch.setattr(on_gpus, "Peers", SimpleNamespace(of=lambda *_: SimpleNamespace(rank=0, world=2)))
    monkeypatch.setattr(on_gpus.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(on_gpus, "chunks", lambda *_: "a word" if counted else None)
    k = torch.empty(()).expand(1, 32, 8192, 128)
    assert on_gpus._pulled(k, k, k, "causal")[1] == 4


def test_every_rank_of_a_causal_mask_has_the_same_work():
    assert len({sum(chunk + 1 for chunk in chunks_of(rank, 4)) for rank in range(4)}) == 1


def test_merging_parts_is_attending_to_all_keys():
    _, q, k, v, _ = drawn(2, "full")
    out, level = torch.zeros(q.shape), torch.full(q.shape[:3], -torch.inf)
    part = torch.empty_like(q)
    for keys in (slice(0, 5), slice(5, 24)):
        merge(out, level, part, PARTIAL.forward(part, q, k[:, :, keys], v[:, :, keys], "full"))
    lse = PARTIAL.forward(part, q, k, v, "full")
    torch.testing.assert_close(out, part.float())
    torch.testing.assert_close(level, lse.float())


def test_rows_of_a_long_sequence_are_those_of_all(monkeypatch):
    case, q, k, v, _ = drawn(2, "causal")
    whole = operator.reference(q, k, v, "causal")
    monkeypatch.setattr(operator, "SAMPLED_FROM", 1)
    monkeypatch.setattr(operator, "SAMPLED_ROWS", 6)
    rows = operator.sampled(24)
    assert len(set(rows)) == 6
    assert rows[-1] == 23
    some = operator.reference(q, k, v, "causal")
    torch.testing.assert_close(some, whole[:, :, rows])
    parts = [operator.part(some, case, rank) for rank in range(2)]
    for rank, own in enumerate(parts):
        of_rank = operator.split(whole, case, rank)
        torch.testing.assert_close(own, of_rank[:, :, operator.local_rows(24, 2, rank)])
    assert sum(x.shape[2] for x in parts) == 6


def _trial(group, case, wrong):
    """How a measurement of forward and backward ends, and whether timed calls had gradients in every row."""

    def call(q, k, v, mask):
        seen.append(q.requires_grad)
        out = attention_context_parallel(q, k, v, mask)
        factors = {"k": (1.0, 1.1), "q": (1.1, 1.0)}.get(wrong)
        if factors is not None:  # the same output, and another gradient
            q, k = (x * f - (x * f - x).detach() for x, f in zip((q, k), factors, strict=True))
            again = attention_context_parallel(q, k, v, mask)
            return again - (again - out).detach()
        return out

    seen = []
    bench = Workbench.build(operator.OPERATOR, case, torch.device("cpu"), 1, group)
    few = Sampling(min_samples=3, max_samples=3, min_seconds=0, warmup_s=0)
    try:
        found = Trial(_device(group), bench, "hot", few, Stages()).run(lambda: call)
    except Incorrect as error:
        return str(error)
    assert all(seen)
    return len(found.samples["latency"]), [int((x == 0).all(-1).sum()) for x in bench.gradients]


@pytest.mark.parametrize("wrong", ["", "q", "k"])
def test_gradients_of_a_long_sequence_are_checked_in_a_sample(wrong, monkeypatch):
    monkeypatch.setattr(operator, "SAMPLED_FROM", 1)
    monkeypatch.setattr(operator, "SAMPLED_ROWS", 6)
    case = operator.OPERATOR.case({**AXES, "gpus": 2}, "fp32", "forward_backward", mask="causal")
    found = spread(2, _trial, case, wrong)
    if not wrong:
        assert found == [(3, [0])] * 2
    else:
        assert all(f"output {1 if wrong == 'q' else 2}" in x for x in found), found
    with pytest.raises(NotImplementedError, match="forward and backward in one"):
        operator.inputs(operator.OPERATOR.case(AXES, "fp32", "backward"), torch.device("cpu"), None)


FEW = Sampling(min_samples=3, max_samples=3, min_seconds=0, warmup_s=0, energy="never")


def _device(group):
    found = Cpu()
    found.group = group
    return found


def _without(group, case, memory):
    """How many collectives a call of each form makes, and one of it that sends nothing; whether that of the pulled
    form gives the same again without its peers; and what a measurement says is exposed.
    """
    bench = Workbench.build(operator.OPERATOR, case, torch.device("cpu"), 1, group)
    ulysses_ = ulysses.IMPLEMENTATIONS["attention_context_parallel"]["ulysses"](case)
    counts = []
    for call in (attention_context_parallel, attention_context_parallel_ring, ulysses_):
        for of in (call, call.local()):
            once = bench.call(of)
            once()
            with Sent() as counted:
                once()
            counts.append(counted.count)
    peers = Processes(group, memory)
    own = bench.call(partial(gathered, attention=PARTIAL, arriving=Brought(Pulled(peers))))
    first = own()
    peers.place = peers.meet = None  # whatever asks for peers fails
    with Sent() as counted:
        again = own()
    counts.append(counted.count)
    same = torch.equal(first[0], again[0])
    measured = Trial(_device(group), bench, "hot", FEW, Stages()).run(lambda: attention_context_parallel).samples
    return counts, same, measured["exposed_communication"][0], max(measured["latency"])


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_the_same_without_communication_sends_nothing(mask):
    case = operator.OPERATOR.case({**AXES, "gpus": 2}, "fp32", "forward_backward", mask=mask)
    for counts, same, exposed, latency in spread(2, _without, case, places(2, 1 << 14)):
        sent, still = counts[:6:2], [*counts[1:6:2], counts[6]]
        assert all(x > 0 for x in sent), counts
        assert still == [0] * 4
        assert same  # of the keys that the first call brought
        assert 0 <= exposed < latency


def _whole(group, case):
    """What a measurement says of a case that each rank computes whole, the second one's calls taking longer."""

    def call(q, k, v, mask, **rest):
        time.sleep(0.02 * group.rank)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    bench = Workbench.build(attention.OPERATOR, case, torch.device("cpu"), 1, group)
    return Trial(_device(group), bench, "hot", FEW, Stages()).run(lambda: call).samples


def test_each_rank_may_compute_the_whole_and_the_slowest_counts():
    case = attention.OPERATOR.case({**AXES, "gpus": 2}, "fp32", "forward")
    assert (case.name, case.flops) == (
        "B1-H4-Hkv2-S24-D8-gpus2-causal-fp32-forward", attention.OPERATOR.case(AXES, "fp32", "forward").flops
    )  # fmt: skip
    first, second = spread(2, _whole, case)
    assert first["each_gpu"] == second["each_gpu"]
    quick, slow = first["each_gpu"]
    assert slow > quick + 10
    assert min(first["latency"]) > 20
    assert "exposed_communication" not in first


def test_a_sequence_that_cannot_be_cut_is_said():
    case = operator.OPERATOR.case({**AXES, "S": 26, "gpus": 2}, "fp32", "forward")
    with pytest.raises(NotImplementedError, match="26 tokens cannot be cut into 4 equal chunks for 2 ranks"):
        operator.length(case)
