"""What a call costs the host, of our operators beside PyTorch's: `python tests/kernels/host_time.py --json FILE`.

Microseconds a call, median over rounds. In each round come tensors never seen before, a call for each; the device
is waited for before and after, never between, and has less to do than the host. Three ways: forward alone, forward
and backward, and that of views with calls on two streams in turn. Then memory is used again with other strides,
and answers are held to PyTorch's. Exit 1 where a call costs more than 1.5 times PyTorch's, or an answer is wrong.

Not a test: it needs a GPU, and its times mean something only where nothing else runs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

MOST = 1.5
CALLS = 64
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""Triton's interpreter, which stands for a GPU on a CPU, multiplies no bf16."""


def ours(name: str) -> Any:
    """The operator of `kernels/`, by its family and name."""
    return getattr(importlib.import_module(f"kernelmark.kernels.{name}"), name.rpartition(".")[2])


@dataclass(frozen=True)
class Operator:
    """Shapes of its tensors, those among them that have gradients, and both calls."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    gradients: int
    more: Callable[[torch.device], tuple[torch.Tensor, ...]] = lambda device: ()


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def operators(rows: int = 128, width: int = 256, vocabulary: int = 1024) -> Iterator[Operator]:
    """Small enough for a device to be done before the host."""
    rms, add, layer = ours("norm.rms_norm"), ours("norm.add_rms_norm"), ours("norm.layer_norm")
    gelu, swiglu, rope = ours("activation.gelu"), ours("activation.swiglu"), ours("position.rope")
    attention, loss = ours("attention.attention"), ours("loss.cross_entropy")
    fused = ours("loss.fused_linear_cross_entropy")
    x, w = (1, rows, width), (width,)
    yield Operator("rms_norm", (x, w), rms, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), 2)

    def added(x: Any, r: Any, w: Any) -> Any:
        h = x + r
        return F.rms_norm(h, w.shape, w, 1e-6), h

    yield Operator("add_rms_norm", (x, x, w), add, added, 3)
    yield Operator("layer_norm", (x, w, w), layer, lambda x, w, b: F.layer_norm(x, w.shape, w, b), 3)
    yield Operator("gelu", (x,), lambda x: gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), 1)
    yield Operator("swiglu", (x, x), swiglu, lambda gate, up: F.silu(gate) * up, 2)
    linear = ours("matmul.linear")
    for some in (rows, 4):  # of few rows another kernel has them
        given = (some, width), (width, width)
        yield Operator(f"linear M={some}", given, linear, F.linear, 2)
    heads = (1, 4, rows, 64)

    def angles(device: torch.device) -> tuple[torch.Tensor, ...]:
        angle = torch.rand(rows, 32, device=device)
        return angle.cos(), angle.sin()

    yield Operator(
        "rope",
        (heads, heads),
        lambda q, k, cos, sin: rope(q, k, cos, sin, "half"),
        lambda q, k, cos, sin: (_turned(q, cos, sin), _turned(k, cos, sin)),
        2,
        angles,
    )
    # Both sides of the length from which on a GPU has another kernel.
    for S in (rows, 8 * rows):
        shape = (1, 4, S, 64)
        yield Operator(
            f"attention S={S}",
            (shape,) * 3,
            lambda q, k, v: attention(q, k, v, "causal"),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            3,
        )

    def targets(device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.randint(vocabulary, (rows,), device=device),)

    yield Operator("cross_entropy", ((rows, vocabulary),), loss, F.cross_entropy, 1, targets)
    yield Operator(
        "fused_linear_cross_entropy",
        ((rows, width), (vocabulary, width)),
        fused,
        lambda x, w, target: F.cross_entropy(x @ w.t(), target),
        2,
        targets,
    )


def made(one: Operator, device: torch.device, view: bool) -> tuple[torch.Tensor, ...]:
    """New inputs; as views, each lies in the first half of a larger tensor's rows."""
    found = []
    for shape in one.shapes:
        wide = (*shape[:-1], shape[-1] * 2) if view and len(shape) > 1 else shape
        x = torch.randn(wide, device=device, dtype=DTYPES[device.type])[..., : shape[-1]]
        found.append(x.detach().requires_grad_())
    return (*found, *one.more(device))


def called(one: Operator, call: Callable[..., Any], inputs: tuple[torch.Tensor, ...], backward: bool) -> Any:
    """The outputs, and gradients where they are asked for."""
    with nullcontext() if backward else torch.no_grad():
        out = call(*inputs)
    if not backward:
        return out
    out = out if isinstance(out, tuple) else (out,)
    return *out, *torch.autograd.grad(out, inputs[: one.gradients], [torch.ones_like(x) for x in out])


def microseconds(one: Operator, call: Callable[..., Any], device: torch.device, way: str, rounds: int) -> float:
    """Of one call."""
    cuda = device.type == "cuda"
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda and way == "views" else [None]
    found = []
    for _ in range(rounds + 2):
        every = [made(one, device, way == "views") for _ in range(CALLS if cuda else 2)]
        _wait(device)
        gc.disable()
        begin = time.perf_counter_ns()
        for i, inputs in enumerate(every):
            with torch.cuda.stream(streams[i % len(streams)]):
                called(one, call, inputs, way != "forward")
        found.append((time.perf_counter_ns() - begin) / len(every) / 1e3)
        gc.enable()
        _wait(device)
    return statistics.median(found[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def wrong(one: Operator, device: torch.device) -> list[str]:
    """What is wrong where the same memory comes again with other strides, and then as it was."""
    memory = [torch.randn(x, device=device, dtype=DTYPES[device.type]) for x in one.shapes]
    more, found = one.more(device), []
    for turn in ("as it lies", "turned", "as it lies again"):
        inputs = []
        for x in memory:
            if turn == "turned" and x.dim() > 2:
                # The same address and numbers, dimensions stored in another order.
                order = [*range(1, x.dim() - 1), 0, x.dim() - 1]
                sizes = [x.shape[i] for i in order]
                x = x.view(sizes).permute(*(order.index(i) for i in range(x.dim())))
            elif turn == "turned" and x.dim() == 2:
                x = x.view(x.shape[1], x.shape[0]).t()
            inputs.append(x.detach().requires_grad_())
        both = [called(one, call, (*inputs, *more), True) for call in (one.ours, one.theirs)]
        for i, (a, b) in enumerate(zip(*both, strict=True)):
            a, b = a.detach().float(), b.detach().float()
            off = float((a - b).norm() / b.norm())
            if not off < 3e-2:
                found.append(f"{one.name}, {turn}: result {i} is off by {off:.2g}")
    return found


def optimizer(device: torch.device, rounds: int, tensors: int = 148) -> dict[str, float]:
    """One step of AdamW on gradients that are new, as an eager step's are; µs."""
    adamw, cuda = ours("optimizer.adamw"), device.type == "cuda"
    tensors = tensors if cuda else 3
    lists = [[torch.randn(512, device=device, dtype=torch.bfloat16) for _ in range(tensors)] for _ in range(3)]
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    steps = [torch.ones((), device=device) for _ in range(tensors)]

    def own(grads: Any) -> None:
        adamw(lists[0], grads, lists[1], lists[2], step=1, **numbers)

    def theirs(grads: Any) -> None:
        torch._fused_adamw_(
            lists[0], grads, lists[1], lists[2], [], steps, amsgrad=False, maximize=False, **numbers
        )

    found = {}
    for name, call in (("ours", own), ("theirs", theirs)):
        times, kept = [], []
        for _ in range(10 * rounds + 3):
            grads = [torch.randn_like(x) for x in lists[0]]
            kept.append(grads)  # so that the next ones lie elsewhere
            _wait(device)
            begin = time.perf_counter_ns()
            with torch.no_grad():
                call(grads)
            times.append((time.perf_counter_ns() - begin) / 1e3)
        found[name] = statistics.median(times[3:])
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    small = {} if device.type == "cuda" else {"rows": 4, "width": 16, "vocabulary": 32}
    rows, faults = [], []
    for one in operators(**small):
        if given.only and one.name not in given.only:
            continue
        faults += wrong(one, device)
        for way in ("forward", "both", "views"):
            row = {"operator": one.name, "way": way}
            row |= {
                name: microseconds(one, call, device, way, given.rounds)
                for name, call in (("ours", one.ours), ("theirs", one.theirs))
            }
            rows.append(row)
    if not given.only or "adamw" in given.only:
        rows.append({"operator": "adamw", "way": "new gradients", **optimizer(device, given.rounds)})
    for row in rows:
        row["ratio"] = row["ours"] / row["theirs"]
        print(f"{row['operator']:28}{row['way']:15}{row['ours']:9.1f}{row['theirs']:9.1f}{row['ratio']:7.2f}")
    print(*faults, sep="\n")
    if given.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        about = {"device": name, "torch": torch.__version__, "unit": "µs", "calls": CALLS}
        given.json.write_text(json.dumps({**about, "rows": rows, "faults": faults}, indent=1))
    return int(bool(faults) or any(row["ratio"] > MOST for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
