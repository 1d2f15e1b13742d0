"""What layers in 8 bits ask for, and that torch.compile finds it made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.operators import fp8_matmul
from kernelmark.suite.products import asks, by_blocks, by_rows
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import train

M, N, K = 24, 40, 56
CPU = torch.device("cpu")


@pytest.fixture
def asked() -> set[Any]:
    """What was asked for."""
    return set()


@pytest.fixture
def parts(asked: set[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`quantize` and `product` by their definitions, which write down what they are asked for."""

    def quantize(x: torch.Tensor, granularity: str) -> Any:
        asked.add((granularity, tuple(x.shape)))
        if granularity == "row":
            values, scales = fp8_matmul.scaled(x, 1, x.shape[1])
            return values, scales
        found = fp8_matmul.scaled(x, *((128, 128) if granularity.startswith("tile") else (1, 128)))
        if granularity == "both":
            return *found, *fp8_matmul.scaled(x.t().contiguous(), 1, 128)
        return (*found, *(y.t().contiguous() for y in found)) if granularity == "tile_both" else found

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str, bias: Any = None) -> Any:
        asked.add((recipe, (a.shape[0], b.shape[1], a.shape[1])))
        out = fp8_matmul.reference(*(x.double() for x in (a, b, scale_a, scale_b)), recipe)
        return (out if bias is None else out + bias).to(torch.bfloat16)

    return quantize, product


@pytest.mark.parametrize("by", [by_rows, by_blocks])
def test_a_layer_asks_for_what_it_says(by, parts, asked):
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((M, K), (N, K)))
    linear = by(*parts)
    linear(x, weight).sum().backward()
    with torch.no_grad():
        linear(x, weight)
    told = asks(by, M, N, K)
    assert asked == {*told.quantized, *told.multiplied}


def given_by(system: System) -> Callable[..., Any]:
    """How the layers of a step by this system multiply."""
    axes, options = {"B": 2, "S": 8}, {"model": "gpt2-tiny", "state": "master32", "products": "e4m3"}
    case = train.WORKLOAD.case(axes, "bf16", "program", **options)
    linear: Callable[..., Any] = train.assemble(case, Assembly(system, Catalog.default())).parts(CPU)["linear"]
    return linear


# Our kernel for CPUs is looked at, and imports Inductor, which warns of torch.jit that it still uses itself.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("base", ["torch", "kernelmark"])
@pytest.mark.parametrize("precision", ["parts_rowwise", "parts_1x128"])
def test_a_bias_is_added_whoever_multiplies(monkeypatch, parts, base, precision):
    """Within our product, after that of a library, whose operator has none."""
    quantize, product = parts
    taken = []

    def multiply(**given):
        taken.append("bias" in given)
        return product(**given)

    def call(self, part, operator, *_):
        if operator == "fp8_matmul":
            return multiply
        return lambda x, granularity, format: quantize(x, granularity)

    monkeypatch.setattr(Assembly, "call", call)
    given = Assembly(System("x", base=base, precision=precision), Catalog.default())
    linear = given.linear("bf16", "cpu")
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((3, 5, K), (N, K), (N,)))
    leaves = [y.requires_grad_() for y in (x, weight, bias)]
    out = linear(x, weight, bias)
    assert taken == [base == "kernelmark"]
    plain = linear(x, weight)
    torch.testing.assert_close(out, plain + bias, rtol=2**-7, atol=2**-5)
    grad = torch.randn_like(out)
    dx, dweight, dbias = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(dbias, grad.flatten(0, -2).sum(0))
    assert all(map(torch.equal, (dx, dweight), torch.autograd.grad(plain, leaves[:2], grad)))
    assert taken[1:] == [False] * 5, "gradients have no bias"


@pytest.mark.parametrize("biased", [True, False])
def test_who_quantizes_sums_a_gradient_for_its_bias(parts, biased):
    """In one read, where there is a bias."""
    quantize, product = parts
    taken = []

    def summed(grad):
        taken.append(grad.shape)
        return *quantize(grad, "both"), grad.sum(0) + 1

    x, weight, bias = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((M, K), (N, K), (N,)))
    leaves = (x, weight, bias) if biased else (x, weight)
    grad = torch.randn(M, N).bfloat16()
    want = torch.autograd.grad(by_blocks(quantize, product)(*leaves), leaves, grad)
    quantize.summed = summed  # type: ignore[attr-defined]  # functions have any
    got = torch.autograd.grad(by_blocks(quantize, product)(*leaves), leaves, grad)
    assert taken == [(M, N)] * biased
    assert all(map(torch.equal, got[:2], want))
    assert not biased or torch.equal(got[2], want[2] + 1)


@pytest.mark.parametrize(("device", "own"), [("cuda", True), ("cpu", False)])
def test_scales_of_blocks_lie_as_products_load_them(monkeypatch, device, own):
    """Where our kernel quantizes, which can be asked for that; of inputs alone."""
    asked = []
    monkeypatch.setattr(Assembly, "call", lambda self, *_: lambda **given: asked.append(given.get("layout")))
    given = Assembly(System("x", base="kernelmark", precision="parts_1x128"), Catalog.default())
    quantize, _ = given.eight_bits("bf16", device)
    for granularity in ("block", "tile", "row", "both"):
        quantize(torch.ones(3, 4), granularity)
    assert asked == ["matmul" if own else None, None, None, None]


@pytest.mark.parametrize("biased", [True, False])
def test_who_quantizes_turns_what_the_backward_pass_multiplies(parts, asked, biased):
    """In the same reads, once for each tensor: the same products, of the same numbers."""
    quantize, product = parts

    def turned(x):
        assert x.is_contiguous()
        reads.append(x.shape)
        return *quantize(x, "row"), *quantize(x.t().contiguous(), "row")

    reads: list[tuple[int, ...]] = []
    x, weight, bias = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((M, K), (N, K), (N,)))
    leaves = (x, weight, bias) if biased else (x, weight)
    grad = torch.randn(N, M).bfloat16().t()
    plain = by_rows(quantize, product)
    out = plain(*leaves)
    want = torch.autograd.grad(out, leaves, grad)
    quantize.turned = turned  # type: ignore[attr-defined]  # functions have any
    quantize.turned_summed = lambda x: (*turned(x), x.sum(0) + 1)  # type: ignore[attr-defined]  # as above
    found = by_rows(quantize, product)(*leaves)
    assert torch.equal(found, out)
    got = torch.autograd.grad(found, leaves, grad)
    assert reads == [(M, K), (N, K), (M, N)]
    assert all(map(torch.equal, got[:2], want))
    assert not biased or torch.equal(got[2], want[2] + 1)
    with torch.no_grad():
        assert torch.equal(by_rows(quantize, product)(*leaves), out)
    assert len(reads) == 3, "without gradients nothing is turned"


# torch.compile makes objects of the functions that it traces.
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")
@pytest.mark.parametrize(
    ("system", "dtype"),
    [
        (System("x", precision="parts_rowwise"), torch.bfloat16),
        (System("x", parts={"linear": "torch"}), torch.bfloat16),
        (System("x", parts={"linear": "torch"}, changes=Changes(dtype="fp16")), torch.float16),
    ],
    ids=["eight bits", "a named product", "a named product in fp16"],
)
def test_a_compiler_finds_what_a_step_asks_for(monkeypatch, system, dtype):
    """Where it does not, it traces how an implementation is looked up, which older ones than ours cannot."""
    model = chosen(Catalog.default().models, "gpt2-tiny")
    linear = given_by(system)

    def looked_up(*given):
        raise AssertionError(f"looked up {given} while it was traced")

    monkeypatch.setattr(Assembly, "call", looked_up)
    compiled = torch.compile(linear, backend="eager", fullgraph=True, dynamic=False)
    for part in model.model.products(model.configuration, 2, 8):
        x, weight, bias = (
            torch.randn(shape).to(dtype).requires_grad_()
            for shape in ((2, 8, part.axes["K"]), (part.axes["N"], part.axes["K"]), (part.axes["N"],))
        )
        given = (x, weight, bias) if part.options["bias"] else (x, weight)
        compiled(*given).sum().backward()
        assert weight.grad is not None
        assert torch.isfinite(weight.grad).all()
