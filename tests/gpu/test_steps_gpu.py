"""What steps of training are fused of, on a GPU: AdamW that clips, eager and in a graph, and sums of columns."""

from __future__ import annotations

import json
import sys

import pytest

SHAPES = ((50257, 64), (64,), (1,), (3, 70), (2304, 33), (0,), (1 << 20,))
SUMS = ((8192, 768), (1, 50257), (1001, 1), (33, 2305), (70_000, 8), (5, 3072))


def clipped(odd: bool, graph: bool) -> dict[str, float]:
    """How far moments are from those of PyTorch's clipping in fp64, relative, and the norm from its norm."""
    import torch
    from kernelmark.kernels.optimizer.adamw import adamw_clipped

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        """In bf16; odd: it begins between the boundaries of 16 bytes."""
        size = torch.Size(shape).numel()
        memory = torch.randn(size + 1, device="cuda", dtype=torch.bfloat16)
        return memory[int(odd) : size + int(odd)].view(shape)

    params, grads = [drawn(x) for x in SHAPES], [drawn(x) for x in SHAPES]
    firsts, seconds = ([torch.zeros(x, device="cuda") for x in SHAPES] for _ in range(2))
    given = {"params": params, "grads": grads, "exp_avgs": firsts, "exp_avg_sqs": seconds, "max_norm": 1.0}
    count = torch.ones((), device="cuda")
    norm = adamw_clipped(**given, step=count if graph else 1)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            norm = adamw_clipped(**given, step=count)
        for x in (*grads, *firsts, *seconds):
            x.normal_() if x.dtype == torch.bfloat16 else x.zero_()
        captured.replay()
    wide = [x.double() for x in grads]
    exact = torch.stack([x.square().sum() for x in wide]).sum().sqrt()
    scale = min(1.0, 1.0 / (float(exact) + 1e-6))
    off = max(
        float((m.double() - 0.1 * scale * g).norm() / (0.1 * scale * g).norm())
        for m, g in zip(firsts, wide, strict=True)
        if m.numel()
    )
    return {"moments": off, "norm": abs(float(norm / exact) - 1)}


def summed() -> dict[str, float]:
    """How far sums of columns are from fp64's, beside a rounding to bf16."""
    import torch
    from kernelmark.kernels.matmul._columns import sums_of_columns

    found = {}
    for M, N in SUMS:
        for name, x in {
            "dense": torch.randn(M, N, device="cuda"),
            "turned": torch.randn(N, M, device="cuda").t(),
            "apart": torch.randn(M, 2 * N + 1, device="cuda")[:, 1::2],
        }.items():
            values = x.bfloat16() if name == "dense" else x
            want = values.double().sum(0)
            room = values.double().abs().sum(0) * 1e-6 + want.abs() * (2**-8 if name == "dense" else 1e-6)
            found[f"{M}x{N} {name}"] = float(((sums_of_columns(values).double() - want).abs() / room).max())
    return found


@pytest.fixture(scope="module")
def measured(apart):
    return json.loads(apart("-m", "tests.gpu.test_steps_gpu"))


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_clipped_steps(measured, odd, graph):
    found = measured[f"{odd} {graph}"]
    assert found["moments"] < 1e-5
    assert found["norm"] < 1e-5


def test_sums_of_columns(measured):
    assert {name: x for name, x in measured["sums"].items() if not x <= 1} == {}


if __name__ == "__main__":
    found: dict[str, dict[str, float]] = {f"{o} {g}": clipped(o, g) for o in (False, True) for g in (False, True)}
    json.dump(found | {"sums": summed()}, sys.stdout)
