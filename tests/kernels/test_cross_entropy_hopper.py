"""Losses and gradients in one launch for Hopper, played as a whole in fp32 (`player.py`)."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels import _pipeline
from kernelmark.kernels.loss import _cross_entropy as portable
from kernelmark.kernels.loss import _cross_entropy_hopper as hopper

from . import player
from .player import Tiles, copy_in, nothing, play

DEVICE = torch.device("cpu")
SMALL = hopper.Schedule(groups=2, warps=1, lines=16, slots=5, ahead=1, held=1)
"""Chunks of 1024, of which four stay in slots and one in registers."""
PLAIN = portable.Options(-100, 0.0, 0.0)
LOWEST = torch.finfo(torch.float32).min


def played(patch, programs):
    """Has the kernel played by so many programs."""
    play(
        patch, (hopper,),
        _lined=lambda M, V, pitch, lines: ((M, hopper.cdiv(V, 64), 64), (pitch, 64, 1), lines),
        placed=lambda x, says: Tiles(x.as_strided(*says[:2]), 1, says[2], 64),
        _shared=nothing, _vectors=nothing, _lanes=nothing, _anew=lambda x: x,
    )  # fmt: skip
    patch.setattr(hopper, "multiprocessors", lambda x: programs)


def drawn(M, V, pitch=None, seed=0):
    """(logits, target): rows that lie as far apart, NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((M, pitch or hopper.cdiv(V, 64) * 64), torch.nan)
    memory[:, :V] = 3 * torch.randn(M, V, generator=generator)
    return memory[:, :V], torch.randint(0, V, (M,), generator=generator)


def run(logits, target, options=PLAIN, schedule=SMALL, dlogits=None, share=0.25):
    """(losses, gradients), these over the logits if no place is given."""
    losses = torch.full((len(logits),), torch.nan)
    dlogits = logits if dlogits is None else dlogits
    launch = hopper.losses_and_gradients(logits, dlogits, options, schedule)
    launch(DEVICE, logits, target, torch.tensor(share), losses, dlogits)
    return losses, dlogits


def answer(logits, target, options, share=0.25):
    """By PyTorch in fp64."""
    x = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        x, target, ignore_index=options.ignore_index, label_smoothing=options.smoothing, reduction="none"
    )
    losses = losses + options.z_loss * x.logsumexp(-1).square() * (target != options.ignore_index)
    (losses.sum() * share).backward()
    return losses.detach(), x.grad


def check(found, want):
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-5, equal_nan=True)


@settings(max_examples=30)
@given(
    st.integers(1, 7), st.integers(1, 9000), st.integers(0, 2), st.integers(1, 4), st.integers(1, 4),
    st.integers(2, 8), st.integers(0, 2), st.integers(0, 3), st.booleans(), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_right(M, V, more, programs, groups, slots, ahead, held, smooth, square, seed):
    """Rows of less than a chunk, of some, and of more than there are slots; nothing is written between rows."""
    lines = 48 if groups == 3 else 16  # a whole number of vectors for each thread
    schedule = hopper.Schedule(groups, 1, lines, slots, min(ahead, slots - 1), held)
    options = portable.Options(-100, 0.1 * smooth, 0.01 * square)
    logits, target = drawn(M, V, (hopper.cdiv(V, 64) + more) * 64, seed)
    target[torch.randint(0, M, ())] = -100
    want = answer(logits, target, options)
    with pytest.MonkeyPatch.context() as patch:
        played(patch, programs)
        check(run(logits, target, options, schedule), want)
    assert logits._base[:, V:].isnan().all()


@pytest.mark.parametrize("V", [4096, 4097, 5120, 13001])
def test_beside_the_logits(monkeypatch, V):
    """Gradients go elsewhere, with another pitch; of rows whose chunks all stay, and of longer ones."""
    logits, target = drawn(5, V)
    before = logits.clone()
    dlogits = torch.full((5, hopper.cdiv(V, 64) * 64 + 128), torch.nan)
    played(monkeypatch, 2)
    check(run(logits, target, dlogits=dlogits[:, :V]), answer(before, target, PLAIN))
    assert torch.equal(logits, before)
    assert dlogits[:, V:].isnan().all()


@pytest.mark.parametrize("V", [700, 4096, 4097, 13001])
@pytest.mark.parametrize("options", [PLAIN, portable.Options(-100, 0.1, 0.01)])
def test_without_gradients(monkeypatch, V, options):
    """The same losses bit by bit; logits stay as they are."""
    logits, target = drawn(5, V)
    before, losses = logits.clone(), torch.full((5,), torch.nan)
    played(monkeypatch, 2)
    hopper.losses_alone(logits, options, SMALL)(DEVICE, logits, target, losses)
    assert torch.equal(logits, before)
    assert torch.equal(losses, run(logits, target, options)[0])


def special(V):
    """Rows that are easily NaN, or are to be."""
    logits, target = drawn(9, V)
    logits[0] = -torch.inf
    logits[1] = LOWEST
    logits[2, ::2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 7] = 1.0
    logits[4, V - 1] = 1e38
    logits[5, 0] = torch.inf
    target[2:5] = torch.tensor([1, 7, V - 1])
    target[6], target[7], target[8] = V, -5, -100
    return logits, target


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("V", [1000, 7001])
@pytest.mark.parametrize("options", [PLAIN, portable.Options(-100, 0.1, 0.01)])
def test_as_the_portable_kernel(monkeypatch, V, options):
    """Also of what is not finite, and of targets that are none."""
    logits, target = special(V)
    losses, dlogits = torch.full((9,), torch.nan), torch.empty_like(logits)
    launch = portable.losses_and_gradients(logits, dlogits, options)
    launch(DEVICE, logits, target, torch.tensor(0.25), losses, dlogits)
    played(monkeypatch, 2)
    check(run(logits, target, options), (losses, dlogits))


def test_a_common_offset_costs_no_digits(monkeypatch):
    logits, target = drawn(3, 1500)
    logits.mul_(8).round_().div_(8)  # exact where 2^20 is added
    want = answer(logits, target, PLAIN)
    played(monkeypatch, 2)
    check(run(logits.add_(2**20), target), want)


def test_a_slot_that_is_not_given_up_is_found(monkeypatch):
    played(monkeypatch, 1)
    monkeypatch.setattr(player, "SECONDS", 0.5)
    release = hopper.Ring.release
    monkeypatch.setattr(hopper.Ring, "release", lambda self, at: None if at.stage == 2 else release(self, at))
    with pytest.raises(AssertionError, match="nobody arrives"):
        run(*drawn(3, 7001))


def test_a_chunk_that_is_not_waited_for_is_found(monkeypatch):
    """Which is copied once more for pass 2, and comes late."""
    played(monkeypatch, 1)
    waits, wait = threading.local(), hopper.Ring.wait

    def late(*arguments):
        time.sleep(0.02)
        copy_in(*arguments)

    def first(self, at):
        waits.count = getattr(waits, "count", 0) + 1
        if waits.count <= most:
            wait(self, at)

    monkeypatch.setattr(player, "SECONDS", 1)
    monkeypatch.setattr(_pipeline, "copy_in", late)
    monkeypatch.setattr(hopper.Ring, "wait", first)
    for most in (9, 7):  # chunks of both passes, and of the first
        logits, target = drawn(1, 7001)
        want = answer(logits, target, PLAIN)
        with nullcontext() if most == 9 else pytest.raises(AssertionError, match="not close|nobody arrives"):
            check(run(logits, target), want)


def test_what_it_takes(monkeypatch):
    """Rows of 12800 numbers, the first of them anywhere in memory."""
    monkeypatch.setattr(hopper, "SHORTEST", 8192)
    memory = torch.empty(5 * 12800, dtype=torch.bfloat16)
    start = -memory.data_ptr() % 128 // 2
    x = memory[start : start + 4 * 12800].view(4, 12800)
    assert hopper.fits(x, x)
    assert hopper.fits(x[:, :12345], x[:, :12345])
    assert hopper.fits(x[1:], x[:-1])
    assert not hopper.fits(x[:, :8191], x[:, :8191])
    assert hopper.fits(x[:, 64:], x[:, 64:])
    assert hopper.fits(x[:, 8:-56], x[:, 8:-56])
    assert not hopper.fits(x[:, 8:], x[:, 8:])
    assert not hopper.fits(x[:, 4:-60], x[:, 4:-60])
    assert not hopper.fits(x, x.as_strided(x.shape, (12808, 1)))
    assert not hopper.fits(x, x.half())
    assert not hopper.fits(x.view(torch.int16), x.view(torch.int16))
    assert not hopper.fits(x[:, ::2], x[:, ::2])


def test_what_goes_there(monkeypatch):
    """Rows for every multiprocessor, of which the interpreter has three, on compute capability 9.0 alone; at each
    call, addresses at which rows may be read to the end of a line.
    """
    taken = []
    monkeypatch.setattr(hopper, "SHORTEST", 8192)
    monkeypatch.setattr(portable, "Launch", lambda *_, **__: lambda *_: taken.append("portable"))
    monkeypatch.setattr(hopper, "losses_and_gradients", lambda *_: lambda *_: taken.append("hopper"))
    monkeypatch.setattr(hopper, "losses_alone", lambda *_: lambda *_: taken.append("hopper alone"))
    memory = torch.empty(5 * 12800, dtype=torch.bfloat16)
    start = -memory.data_ptr() % 128 // 2
    x = memory[start : start + 4 * 12800].view(4, 12800)[:, :12345]
    moved = x.as_strided(x.shape, x.stride(), x.storage_offset() + 8)
    given = torch.zeros(4, dtype=torch.int64), torch.ones(()), torch.empty(4)

    def both(x, other):
        """What is prepared for one, called with another."""
        taken.clear()
        portable.losses_and_gradients(x, x, PLAIN)(DEVICE, other, *given, other)
        portable.losses_alone(x, PLAIN)(DEVICE, other, given[0], given[2])
        return taken

    assert both(x, x) == ["portable", "portable"]
    monkeypatch.setattr(portable, "capability", lambda device: (9, 0))
    assert both(x, x) == ["hopper", "hopper alone"]
    assert both(x, moved) == ["portable", "portable"]
    assert both(x[:2], x[:2]) == ["portable", "portable"]
    assert both(x[:, :8000], x[:, :8000]) == ["portable", "portable"]
    monkeypatch.setattr(portable, "capability", lambda device: (10, 0))
    assert both(x, x) == ["portable", "portable"]
