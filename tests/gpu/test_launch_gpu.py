"""Launches past the just-in-time compiler: tensors never seen before, views, two streams, memory that is reused.

In a process of its own: this one may have chosen Triton's interpreter, which has no such launches.
"""

from __future__ import annotations

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


def test_launches(apart):
    assert apart("-c", CODE) == "right"
