"""Attention to chunks of keys as they come, on a real GPU: chunks that are late, by copy engines from the host's
memory on one GPU, and from one another's on two and more.

In processes of their own, this file as a program: a kernel that waits in vain ends with its process.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import socket
import sys
import time

import pytest
import torch

TIMES = 50
HUNG_S = 120
"""After which a call is taken to wait in vain."""

# World, rank, B, H, Hkv, blocks of 128 tokens of a chunk, D: one block and many, tiles of 192 rows that no chunk
# is a multiple of, heads that are no power of two, and more tiles than there are multiprocessors.
CASES = [
    (2, 0, 1, 4, 2, 3, 64),
    (2, 1, 2, 8, 1, 1, 128),
    (3, 1, 1, 16, 4, 7, 64),
    (4, 0, 1, 32, 8, 8, 128),
    (4, 3, 1, 12, 12, 5, 96),
    (4, 2, 2, 6, 2, 4, 40),
    (8, 5, 1, 8, 2, 2, 128),
]


def draw(B, H, Hkv, S, D, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + S + D)
    return (
        torch.randn(B, S, heads, D, device="cuda", dtype=torch.bfloat16, generator=generator).transpose(1, 2)
        for heads in (H, Hkv, Hkv)
    )


def rows_of(rank, world, L):
    return torch.cat([torch.arange(x * L, (x + 1) * L, device="cuda") for x in (rank, 2 * world - 1 - rank)])


def expected(q, k, v, mask, places):
    """The output and the natural log-sum-exp of queries at these places, in fp32, a head at a time."""
    found = []
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        of = h * k.shape[1] // q.shape[1]
        own, keys, values = (x[b, i].float() for x, i in ((q, h), (k, of), (v, of)))
        s = own @ keys.mT * q.shape[-1] ** -0.5
        if mask == "causal":
            s = s.masked_fill(torch.arange(k.shape[2], device="cuda") > places[:, None], float("-inf"))
        found.append((s.softmax(-1) @ values, s.logsumexp(-1)))
    return [torch.stack(x).unflatten(0, q.shape[:2]) for x in zip(*found, strict=True)]


def late(world, rank, B, H, Hkv, blocks, D, mask):
    """Of TIMES calls whose chunks were late by chance, how many gave other bits than one with all chunks there,
    and that one's relative errors. What has not come is no number.
    """
    from kernelmark.kernels.attention._as_they_come import Chunks, attention_as_they_come
    from kernelmark.kernels.attention._chunks import coming

    L = 128 * blocks
    q, k, v = draw(B, H, Hkv, 2 * world * L, D)
    places = rows_of(rank, world, L)
    q = q.transpose(1, 2)[:, places].transpose(1, 2)
    whole = torch.stack((k, v)).permute(1, 3, 0, 2, 4).contiguous()  # of each token its keys beside its values
    host = whole.cpu().pin_memory()
    keys, values = whole.permute(2, 0, 3, 1, 4)
    chunks = Chunks(rank, world, mask, L, 128, q.device)
    out = torch.empty(B, H, 2 * L, D, dtype=q.dtype, device="cuda")
    side = torch.cuda.Stream()
    by_chance = random.Random(world + rank)

    def bring(sequence, number):
        """By a copy engine: from the host's memory no kernel copies."""
        rows = slice(number * L, (number + 1) * L)
        whole[sequence, rows].copy_(host[sequence, rows], non_blocking=True)
        chunks.came()

    def call(longest):
        numbers = [*itertools.product(range(B), coming(rank, world, mask))]
        signals = chunks.begin()
        for sequence, number in numbers:
            if longest is None:
                bring(sequence, number)
            else:
                whole[sequence, number * L : (number + 1) * L] = float("nan")
        torch.cuda.synchronize()
        out.fill_(float("nan"))
        lse = attention_as_they_come(out, q, keys, values, mask, signals)
        if longest is not None:
            # Behind the launch: from the host, as a kernel that waits would find no multiprocessor.
            with torch.cuda.stream(side):
                for place in numbers:
                    time.sleep(by_chance.uniform(0, longest))
                    bring(*place)
        torch.cuda.synchronize()
        return out.clone(), lse.clone()

    there = call(None)
    wrong = sum(not all(map(torch.equal, call((0.002, 0.0002, 0)[turn % 3]), there)) for turn in range(TIMES))
    want = expected(q, keys, values, mask, places)
    return wrong, [((a.float() - b).norm() / b.norm()).item() for a, b in zip(there, want, strict=True)]


def between(rank, world, port, cases):
    """What a rank does. The first prints, of each case, how far output and gradients are from one GPU's in fp32,
    in the worst rank; how many calls took the one launch, negative; and how often the same call gave the same
    bits.
    """
    import torch.distributed as dist
    from kernelmark.kernels.attention import _attention_hopper_forward as hopper
    from kernelmark.kernels.attention.attention_context_parallel import attention_context_parallel

    faulthandler.dump_traceback_later(HUNG_S * 2, exit=True)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device)
    launches = []
    forward = hopper.forward_as_they_come
    hopper.forward_as_they_come = lambda *given: (launches.append(1), forward(*given))
    found = []
    by_chance = random.Random(rank)
    for B, H, Hkv, L, D, mask in cases:
        launches.clear()
        S, places = 2 * world * L, rows_of(rank, world, L)
        errors, before, same = torch.zeros(4, device=device), torch.empty(0), 0
        for turn in range(6):
            whole = [x.contiguous() for x in draw(B, H, Hkv, S, D, seed=turn // 2)]
            grad = torch.randn(B, H, S, D, device=device, generator=torch.Generator(device).manual_seed(turn // 2))
            grad = grad.bfloat16()
            own = [x[:, :, places].requires_grad_(turn < 4) for x in whole]
            time.sleep(by_chance.choice((0, 0, 0.003)))  # ranks are late
            out = attention_context_parallel(*own, mask)
            if turn % 2:
                same += torch.equal(out, before)
            before = out.detach()
            got = [out]
            wide = [x.float().requires_grad_() for x in whole]
            with torch.set_grad_enabled(turn < 4):
                all_ = torch.nn.functional.scaled_dot_product_attention(
                    *wide, is_causal=mask == "causal", enable_gqa=True
                )
            want = [all_]
            if turn < 4:
                got += torch.autograd.grad(out, own, grad[:, :, places])
                want += torch.autograd.grad(all_, wide, grad.float())
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                b = b[:, :, places]
                errors[i] = torch.maximum(errors[i], (a.float() - b).norm() / b.norm())
        worst = torch.cat((errors, torch.tensor([-len(launches), -same], device=device)))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found.append(worst.tolist())
    if rank == 0:
        print(json.dumps(found))
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


BETWEEN = [
    (B, H, Hkv, L, D, mask)
    for B, H, Hkv, L, D in ((1, 8, 2, 512, 128), (2, 4, 4, 384, 64), (1, 4, 1, 128, 96), (1, 4, 2, 200, 128))
    for mask in ("causal", "full")
]
"""The last one's chunks are no whole blocks: its calls are two, of `attention`."""


def main(arguments):
    faulthandler.dump_traceback_later(HUNG_S * 4, exit=True)
    if arguments[0] == "late":
        print(json.dumps(late(*json.loads(arguments[1]))))
        return
    import torch.multiprocessing
    from kernelmark.suite.measure.ranks import LOOPBACK, NO_MULTICAST

    os.environ.update({**NO_MULTICAST, **LOOPBACK})
    world = int(arguments[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(between, (world, port, BETWEEN), nprocs=world)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("case", CASES)
def test_late_chunks_change_no_bit(apart, case, mask):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel for Hopper is not taken here")
    wrong, errors = json.loads(apart(__file__, "late", json.dumps([*case, mask])))
    assert wrong == 0
    assert errors[0] < 5e-3
    assert errors[1] < 1e-3


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_are_one_gpu(apart, world):
    """Outputs and gradients, with ranks that are late; the same output twice; by one launch where that is due."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel for Hopper is not taken here")
    for (*_, L, _, _), found in zip(BETWEEN, json.loads(apart(__file__, "ranks", str(world))), strict=True):
        *errors, launches, same = found
        assert max(errors) < 1e-2, found
        assert -launches == (6 if L % 128 == 0 else 0)
        assert -same == 3


if __name__ == "__main__":
    main(sys.argv[1:])
