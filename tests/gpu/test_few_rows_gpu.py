"""Products of few rows with what is beside them on a GPU, against fp64, and a step of decoding that they make."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from kernelmark.kernels.matmul.matmul import matmul, rows_added, rows_normed, rows_turned
from kernelmark.kernels.norm.add_rms_norm import add_rms_norm
from kernelmark.kernels.position.rope_cache_write import rope_cache_write
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads._serving.engine import Engine

CUDA = torch.device("cuda")
CLOSE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


def near(found, want, dtype):
    """Over the largest: a sum of many has no last place of its own."""
    assert (found.double() - want.double()).abs().max() <= 2 * CLOSE[dtype] * want.double().abs().max()


def shapes():
    """(K, N) that Llama 3.1 8B and 1B have, and random ones: odd widths, few and many programs."""
    drawn = random.Random(20261128)
    some = [
        (drawn.randint(1, 9000), drawn.choice((drawn.randint(1, 900), 3 * drawn.randint(1, 9000))))
        for _ in range(16)
    ]
    return [(4096, 4096), (14336, 4096), (4096, 14336), (4096, 128256), (2048, 8192), *some]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("M", [1, 2, 5, 8, 9, 16])
@pytest.mark.parametrize(("K", "N"), shapes())
def test_rows_against_fp64(K, N, M, dtype):
    torch.manual_seed(K + N + M)
    a, residual = torch.randn(M, K, device=CUDA).to(dtype), torch.randn(M, N, device=CUDA).to(dtype)
    weight = (torch.randn(N, K, device=CUDA) * K**-0.5).to(dtype)
    gain = (torch.rand(N, device=CUDA) + 0.5).to(dtype)
    h, y, squares = rows_added(a, weight.t(), residual, gain)
    near(h, a.double() @ weight.double().t() + residual, dtype)
    near(y, h.double() * gain.double(), dtype)
    torch.testing.assert_close(squares.double().sum(1), h.double().square().sum(1), rtol=1e-5, atol=0)
    rows = min(700, 2 * N)
    behind = (torch.randn(2 * rows, N, device=CUDA) * N**-0.5).to(dtype)
    normed = torch.nn.functional.rms_norm(h.double(), (N,), gain.double(), 1e-5) @ behind.double().t()
    near(rows_normed(y, squares, behind.t(), 1e-5), normed, dtype)
    gated = torch.nn.functional.silu(normed[:, :rows]) * normed[:, rows:]
    near(rows_normed(y, squares, behind.t(), 1e-5, gated=True), gated, dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("M", [1, 3, 8, 16])
@pytest.mark.parametrize(("K", "N"), shapes()[:12])
def test_rows_by_weights_in_eight_bits(K, N, M, dtype):
    torch.manual_seed(K + N + M)
    a, residual = torch.randn(M, K, device=CUDA).to(dtype), torch.randn(M, N, device=CUDA).to(dtype)
    held = (torch.randn(N, K, device=CUDA) * K**-0.5 * 64).to(torch.float8_e4m3fn)
    scale = (torch.rand(N, device=CUDA) + 0.5) / 64
    weight = held.double() * scale.double()[:, None]
    h, _, squares = rows_added(a, held.t(), residual, torch.ones(N, device=CUDA).to(dtype), scale)
    near(h, a.double() @ weight.t() + residual, dtype)
    squares = a.float().square().sum(1, keepdim=True)
    normed = torch.nn.functional.rms_norm(a.double(), (K,), eps=1e-5) @ weight.t()
    near(rows_normed(a, squares, held.t(), 1e-5, scale=scale), normed, dtype)
    half = N // 2
    gated = torch.nn.functional.silu(normed[:, :half]) * normed[:, half : 2 * half]
    found = rows_normed(a, squares, held[: 2 * half].t(), 1e-5, True, scale[: 2 * half])
    near(found, gated, dtype)


@pytest.mark.parametrize("M", [1, 3, 8, 16])
@pytest.mark.parametrize(
    ("K", "H", "Hkv", "D"), [(4096, 32, 8, 128), (2048, 32, 8, 64), (1001, 3, 1, 40), (576, 9, 3, 64)]
)
def test_rows_turned(K, H, Hkv, D, M):
    """As in three launches, in a graph too, whose lengths move on."""
    torch.manual_seed(K)
    weight = (torch.randn((H + 2 * Hkv) * D, K, device=CUDA) * K**-0.5).bfloat16()
    x, residual = (torch.randn(M, K, device=CUDA).bfloat16() for _ in range(2))
    gain = (torch.rand(K, device=CUDA) + 0.5).bfloat16()
    y, h = add_rms_norm(x, residual, gain, 1e-5)
    squares = h.float().square().sum(1, keepdim=True)
    angle = torch.rand(300, D // 2, device=CUDA) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    caches = [torch.zeros(4 * M, 64, Hkv, D, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    table = torch.randperm(4 * M, device=CUDA).int().view(M, 4)
    lengths = torch.ones(M, dtype=torch.int32, device=CUDA)

    def step():
        return rows_turned(h * gain, squares, weight.t(), cos, sin, *caches[:2], table, lengths, 1e-5)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = step()
    for cache in caches[:2]:
        cache.zero_()  # of the first token of each sequence, which `step` wrote
    for length in (1, 64, 65, 200):
        lengths.copy_((length + 17 * torch.arange(M, device=CUDA)) % 256)
        lengths.clamp_(min=1)
        graph.replay()
        apart = matmul(y, weight.t()).view(M, 1, -1, D).split([H, Hkv, Hkv], 2)
        want = rope_cache_write(*apart, cos, sin, *caches[2:], table, lengths)
        near(q, want, torch.bfloat16)
        for found, other in zip(caches[:2], caches[2:], strict=True):
            near(found, other, torch.bfloat16)
            assert torch.equal(found.ne(0).any(3).any(2), other.ne(0).any(3).any(2))


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize(
    ("model", "changes"), [("llama-tiny", {}), ("llama-tiny", {"head": 128}), ("gpt2-tiny", {})]
)
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("precision", ["case", "parts_rowwise"])
def test_a_step_of_few_sequences(model, changes, execution, B, precision):
    """Three of them in a graph of four."""
    catalog = Catalog.default()
    found = chosen(catalog.models, model)
    found = dataclasses.replace(found, configuration=dataclasses.replace(found.configuration, **changes))
    assembly = Assembly(System("x", base="kernelmark", execution=execution, precision=precision), catalog)
    engine = Engine(assembly, found, "bf16", inference.initial(found, "bf16", 3, CUDA), 4, 64, 16)
    assert (engine.few is not None) == (model == "llama-tiny")
    tokens = torch.randint(0, 512, (B, 20), generator=torch.Generator().manual_seed(1)).to(CUDA)
    rows = [engine.hold(64) for _ in range(B)]
    given = [engine.prefill(tokens[:, :12], rows).logits.clone()]
    given += [engine.decode(tokens[:, i], rows).logits.clone() for i in range(12, 20)]
    answer = inference.answer(found, "bf16", 3, tokens, range(11, 20), catalog)
    if precision == "case":
        inference.deviation(found.model.name, torch.stack(given, 1), answer, "bf16")  # which has a bound
    else:
        inference.deviation_in_8_bits(found.model.name, torch.stack(given, 1), answer)
