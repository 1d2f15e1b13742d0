"""Programs of a launch that meet, at a barrier or in a cluster: the same answers over shapes by turns, over
streams at once, and in graphs.

In a process of its own: this one may have chosen Triton's interpreter, under which nothing waits.
"""

from __future__ import annotations

CODE = """
import torch
from kernelmark.kernels import _grid_barrier
from kernelmark.kernels.norm.add_rms_norm import add_rms_norm
from kernelmark.kernels.norm.layer_norm import layer_norm
from kernelmark.kernels.norm.rms_norm import rms_norm
from kernelmark.kernels.activation.softmax import softmax

torch.manual_seed(0)
calls = []
for rows, length in ((1, 65537), (3, 262143), (64, 40000), (132, 32768), (16, 20001), (64, 65536)):
    x, residual = torch.randn(2, rows, length, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, length, device="cuda", dtype=torch.bfloat16)
    calls += [
        lambda x=x, w=weight: rms_norm(x, w, 1e-6),
        lambda x=x, w=weight, b=bias: layer_norm(x, w, b, 1e-5),
        lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-6)[0],
        lambda x=x: softmax(x),
    ]
    plain = torch.nn.functional.layer_norm(x.double(), (length,), weight.double(), bias.double(), 1e-5)
    assert (calls[-3]().double() - plain).norm() < 8e-3 * plain.norm()
    plain = torch.softmax(x.double(), -1)
    assert (calls[-1]().double() - plain).norm() < 8e-3 * plain.norm()
wanted = [call() for call in calls]
assert all(torch.equal(call(), y) for _ in range(20) for call, y in zip(calls, wanted))
torch.cuda.synchronize()

streams = [torch.cuda.Stream() for _ in range(4)]
for turn in range(20):
    got = []
    for i, call in enumerate(calls):
        with torch.cuda.stream(streams[(turn + i) % 4]):
            got.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(y, z) for y, z in zip(got, wanted)), turn

graphs = []
for call in calls:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    graphs.append((graph, y))
for turn in range(20):
    for i, (graph, _) in enumerate(graphs):
        with torch.cuda.stream(streams[i % 4]):
            graph.replay()
torch.cuda.synchronize()
assert all(torch.equal(y, z) for (_, y), z in zip(graphs, wanted))

pool = next(iter(_grid_barrier._pools.values()))
assert pool.memory[:, 0].eq(0).all(), "a count was left"
print("right")
"""


def test_programs_meet(apart):
    assert apart("-c", CODE) == "right"
