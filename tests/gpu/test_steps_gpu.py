"""What steps of training are fused of, on a GPU: AdamW that clips, eager and in a graph; sums of columns; rows
added by their numbers; micro-batches in graphs, and what no graph can hold.
"""

from __future__ import annotations

import json
import sys

import pytest

SHAPES = ((50257, 64), (64,), (1,), (3, 70), (2304, 33), (0,), (1 << 20,))
SUMS = ((8192, 768), (1, 50257), (1001, 1), (33, 2305), (70_000, 8), (5, 3072))

LOOKED_UP = (
    (8192, 768, 50257),
    (16384, 2048, 128256),
    (1001, 33, 7),
    (1, 1, 1),
    (70_000, 8, 100_003),
    (33, 2305, 1),
)


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


def by_number() -> dict[str, float]:
    """How far rows added by their numbers are from fp64's, beside a rounding to bf16, in a graph too: of
    numbers drawn alike and by Zipf's law.
    """
    import torch
    from kernelmark.kernels.matmul._lookup import add_rows

    found = {}
    for M, N, count in LOOKED_UP:
        alike = torch.randint(0, count, (M,), device="cuda")
        rare = (count ** torch.rand(M, device="cuda") - 1).long().clamp(max=count - 1)
        x = torch.randn(M, 2 * N, device="cuda", dtype=torch.bfloat16)[:, N // 2 : N // 2 + N]
        for name, numbers in {"alike": alike, "zipf": rare}.items():
            before = torch.randn(count, N, device="cuda", dtype=torch.bfloat16)
            eager, captured, given = before.clone(), before.clone(), numbers.clone()
            add_rows(eager, x, numbers)
            graph = torch.cuda.CUDAGraph()
            given.zero_()
            with torch.cuda.graph(graph):
                add_rows(captured, x, given)
            given.copy_(numbers)  # others than when it was captured, which is known to the device alone
            for _ in range(2):
                captured.copy_(before)
                graph.replay()
            want = before.double().index_add(0, numbers, x.double())
            room = before.double().abs().index_add(0, numbers, x.double().abs()) * 1e-6 + want.abs() * 2**-8
            off = ((eager.double() - want).abs() - room).max()
            found[f"{M}x{N} {name}"] = float(off) if torch.equal(eager, captured) else float("nan")
    return found


def accumulated() -> dict[str, float]:
    """How far gradients of the second of two steps are, of three micro-batches each in CUDA graphs, from those of
    PyTorch's eager step: at other weights where the first step was wrong.
    """
    import torch
    from kernelmark.suite.system import Assembly, System
    from kernelmark.suite.workloads import _expected, train

    catalog, device, found = train.catalog(), torch.device("cuda"), {}

    def stepped(model: str, dtype: str, system: System) -> dict[str, torch.Tensor]:
        case = train.WORKLOAD.case({"B": 2, "S": 96, "A": 3}, dtype, "program", model=model)
        recipe = train.read(case)
        trainer = train.assemble(case, Assembly(system, catalog))
        trainer.load(_expected.initial(recipe, 5, device))
        for step in range(2):
            trainer.step(*_expected.Batches(recipe, 5, device).draw(step))
        return {name: x.clone() for name, x in trainer.gradients().items()}

    for model in ("gpt2-tiny", "llama-tiny"):
        for dtype in ("fp32", "bf16"):
            want = stepped(model, dtype, System("torch"))
            for system in (
                System("torch_graph", execution="graph"),
                System("kernelmark_graph", base="kernelmark", execution="graph"),
                System("x", base="kernelmark", parts={"linear": "kernelmark"}, execution="graph"),
            ):
                if "linear" in system.parts and dtype == "fp32":
                    continue  # our products take 16 bits
                got = stepped(model, dtype, system)
                found[f"{model} {dtype} {system.name}"] = max(
                    float((got[name].double() - x.double()).norm() / x.double().norm()) for name, x in want.items()
                )
    return found


def refused() -> dict[str, str]:
    """What is said of a call that waits for the device, and what a call after it leaves in its graph."""
    import torch
    from kernelmark.suite.workloads._graphs import captured

    device = torch.device("cuda")
    x = torch.full((64,), 2.0, device=device)
    said = ""
    try:
        captured(device, lambda: x * x.sum().item())
    except NotImplementedError as error:
        said = str(error)
    torch.rand(1, device=device)
    ((graph, result),) = captured(device, lambda: x * x)
    x.fill_(3.0)
    graph.replay()
    return {"said": said, "then": str(float(result.mean()))}


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


def test_rows_by_their_numbers(measured):
    assert {name: x for name, x in measured["by_number"].items() if not x <= 0} == {}


def test_micro_batches_in_graphs(measured):
    allowed = {"fp32": 1e-4, "bf16": 0.05}
    assert {name: x for name, x in measured["accumulated"].items() if not x < allowed[name.split()[1]]} == {}


def test_a_step_that_waits_for_the_device_is_refused_and_nothing_after_it(measured):
    found = measured["refused"]
    assert found["said"].startswith("a CUDA graph cannot hold it: ")
    assert "previous error" not in found["said"], "the call's own error, not that of the capture's end"
    assert found["then"] == "9.0"


if __name__ == "__main__":
    found: dict[str, dict[str, float] | dict[str, str]] = {
        f"{o} {g}": clipped(o, g) for o in (False, True) for g in (False, True)
    }
    found |= {"sums": summed(), "by_number": by_number(), "accumulated": accumulated(), "refused": refused()}
    json.dump(found, sys.stdout)
