"""Launches past the just-in-time compiler: tensors never seen before, views, two streams, memory that is reused.

In a process of its own: this one may have chosen Triton's interpreter, which has no such launches.
"""

from __future__ import annotations

import pytest

CODE = """
import torch
import torch.nn.functional as F
from kernelmark.kernels.activation.softmax import softmax
from kernelmark.kernels.activation.swiglu import swiglu
from kernelmark.kernels.norm.rms_norm import rms_norm

generator = torch.Generator("cuda").manual_seed(0)


def drawn(*shape):
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def near(got, wanted):
    assert (got.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm()


weight = drawn(5120)
for n in range(64):
    x = drawn(37 + n % 3, 5120 + 8 * (n % 2) + n % 5)[:, :5120].requires_grad_()
    y = rms_norm(x, weight)
    wanted = F.rms_norm(x.double(), (5120,), weight.double(), 1e-6)
    near(y, wanted)
    given = drawn(*y.shape)
    near(torch.autograd.grad(y, x, given)[0], torch.autograd.grad(wanted, x, given.double())[0])
    near(softmax(x.detach()), x.detach().double().softmax(-1))
    near(swiglu(x.detach(), x.detach()), F.silu(x.detach().double()) * x.detach().double())

places = set()
for shape in ((64, 100), (100, 64), (50, 128), (128, 50), (6400,), (64, 100)) * 4:
    x = drawn(6400).view(shape)
    places.add(x.data_ptr())
    near(softmax(x), x.double().softmax(-1))
    del x
assert len(places) < 24, "no memory was reused"

streams = torch.cuda.Stream(), torch.cuda.Stream()
inputs = [drawn(300, 5120) for _ in range(8)]
torch.cuda.synchronize()
results = []
for n, x in enumerate(inputs):
    with torch.cuda.stream(streams[n % 2]):
        results.append(rms_norm(x, weight))
torch.cuda.synchronize()
for x, y in zip(inputs, results):
    near(y, F.rms_norm(x.double(), (5120,), weight.double(), 1e-6))
print("right")
"""

PRODUCTS = """
import sys
import threading
import torch
import torch.nn.functional as F
from kernelmark.kernels import _in_c
from kernelmark.kernels.matmul.linear import linear

if sys.argv[1:] == ["python"]:
    _in_c.compiled = lambda: None
else:
    assert _in_c.compiled() is not None, "there is no C compiler"
torch.manual_seed(0)
far = []


def drawn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def near(got, wanted):
    if not (got.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm():
        far.append((tuple(got.shape), got.stride()))


def both(x, weight, bias=None):
    leaves = [z.detach().requires_grad_() for z in (x, weight, bias) if z is not None]
    y = linear(*leaves)
    given = torch.randn_like(y)
    wanted = F.linear(*(z.double() for z in leaves))
    near(y, wanted)
    gradients = torch.autograd.grad(y, leaves, given)
    for got, want in zip(gradients, torch.autograd.grad(wanted, leaves, given.double())):
        near(got, want)


# Each kind of call comes often enough to be known; views, places between boundaries, memory that is reused.
for M, N, K in ((1, 64, 128), (5, 41, 65), (130, 256, 64), (2049, 520, 264)):
    for _ in range(5):
        both(drawn(M, K), drawn(N, K))
        both(drawn(2, M, K), drawn(N, K), drawn(N))
        both(drawn(M, 2 * K)[:, K:], drawn(K, N).t())
        both(drawn(M, K + 8)[:, 1 : K + 1], drawn(N, K))
for shape in ((64, 128), (128, 64), (32, 256), (64, 128)) * 4:
    x, weight = drawn(8192).view(shape), drawn(48, shape[1])
    near(linear(x, weight), x.double() @ weight.double().t())

# A stream and a thread each, of the same kinds of calls.
def work(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.cuda.stream(torch.cuda.Stream()):
        for n in range(100):
            x = torch.randn(64 + n % 3, 128, device="cuda", generator=generator).bfloat16()
            weight = torch.randn(96, 128, device="cuda", generator=generator).bfloat16()
            both(x, weight)


for M in (64, 65, 66):  # compiled by one
    both(drawn(M, 128), drawn(96, 128))
torch.cuda.synchronize()
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

# Results are nobody else's: of eager calls, of a graph, and of CUDA graphs that torch.compile makes.
weight = drawn(256, 256)
kept = [linear(drawn(128, 256), weight) for _ in range(4)]
copies = [x.clone() for x in kept]
compiled = torch.compile(lambda x: linear(x, weight).relu(), mode="reduce-overhead")
for _ in range(5):
    torch.compiler.cudagraph_mark_step_begin()
    x = drawn(128, 256)
    near(compiled(x), (x.double() @ weight.double().t()).relu())
    linear(drawn(128, 256), weight)
assert all(map(torch.equal, kept, copies))
assert not far, far
print("right")
"""


def test_launches(apart):
    assert apart("-c", CODE) == "right"


@pytest.mark.parametrize("way", ["c", "python"])
def test_products(apart, way):
    assert apart("-c", PRODUCTS, way) == "right"
