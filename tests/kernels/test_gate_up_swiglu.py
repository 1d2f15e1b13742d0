"""Gate and up projections with SwiGLU as their epilogue; `test_dual_hopper.py` plays Hopper's."""

import pytest
import torch
from kernelmark.kernels._launch import forget
from kernelmark.kernels.matmul import _dual as portable
from kernelmark.kernels.matmul import gate_up_swiglu as module
from kernelmark.kernels.matmul.gate_up_swiglu import gate_up_swiglu

from .layouts import laid

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def drawn(M, N, K, dtype=torch.float32):
    scale = K**-0.5 if K else 1.0
    return (
        torch.randn(M, K).to(dtype),
        (torch.randn(N, K) * scale).to(dtype),
        (torch.randn(N, K) * scale).to(dtype),
    )


def wide(x, gate, up):
    """The answer in fp64."""
    first, second = (x.double() @ weight.double().t() for weight in (gate, up))
    return first * first.sigmoid() * second


def near(found, want, dtype):
    assert found.dtype == dtype
    assert (found.double() - want).norm() <= DTYPES[dtype] * want.norm()


@pytest.mark.parametrize(("M", "dtype"), [(3, "bf16"), (33, "bf16"), (33, "fp16")])
def test_agrees(agrees, M, dtype):
    agrees("gate_up_swiglu", {"M": M, "N": 41, "K": 35}, dtype)


def test_a_known_answer():
    """Gates far below zero close, those far above let pass: up is 3, times the gate's own 40."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16().repeat(10, 1)
    gate = torch.tensor([[40.0, -60.0]]).bfloat16().expand(5, 2)
    up = torch.full((5, 2), 3.0).bfloat16()
    want = torch.tensor([120.0, 0.0]).repeat(10)[:, None].expand(20, 5)
    torch.testing.assert_close(gate_up_swiglu(x, gate, up).float(), want, rtol=0, atol=1e-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (17, 33, 70), (40, 8, 64), (20, 50, 7)])
def test_against_fp64(M, N, K, dtype):
    """Forward and backward, of sizes that no tile divides; what a gradient is asked of is the same to the bit."""
    given = drawn(M, N, K, dtype)
    want = wide(*given)
    plain = gate_up_swiglu(*given)
    near(plain, want, dtype)
    leaves = [x.clone().requires_grad_() for x in given]
    found = gate_up_swiglu(*leaves)
    assert torch.equal(found, plain)
    dy = torch.randn(M, N).to(dtype)
    raised = [x.double().requires_grad_() for x in given]
    gradients = torch.autograd.grad(found, leaves, dy)
    for got, expected in zip(gradients, torch.autograd.grad(wide(*raised), raised, dy.double()), strict=True):
        near(got, expected, dtype)


@pytest.mark.parametrize(
    "layouts", [("apart", "dense", "dense"), ("turned", "odd", "turned"), ("odd", "turned", "apart")]
)
def test_layouts(layouts):
    """Each matrix may lie in memory as it likes, the two weights otherwise than each other."""
    given = [laid(rows, 24, torch.float16, layout) for rows, layout in zip((33, 40, 40), layouts, strict=True)]
    leaves = [x.requires_grad_() for x in given]
    found = gate_up_swiglu(*leaves)
    near(found.detach(), wide(*given).detach(), torch.float16)
    dy = torch.randn(40, 33).half().t()
    raised = [x.detach().double().requires_grad_() for x in given]
    gradients = torch.autograd.grad(found, leaves, dy)
    for got, want in zip(gradients, torch.autograd.grad(wide(*raised), raised, dy.double()), strict=True):
        near(got, want, torch.float16)


def test_gate_and_up_are_written_where_a_gradient_is_asked_for(monkeypatch):
    seen = []
    own = portable.multiply
    monkeypatch.setattr(portable, "multiply", lambda *given: (seen.append(len(given[3])), own(*given)))
    x, gate, up = drawn(20, 24, 32)
    gate_up_swiglu(x, gate, up)
    up.requires_grad_()
    with torch.no_grad():
        gate_up_swiglu(x, gate, up)
    gate_up_swiglu(x, gate, up).sum().backward()
    assert seen == [1, 1, 3]
    assert x.grad is None
    assert gate.grad is None


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 1e-3), (torch.float32, 1e-3)])
def test_gradients_are_added_where_they_lie(dtype, most):
    """Of three micro-batches; autograd is given the first at the most."""
    _, *weights = (x.requires_grad_() for x in drawn(17, 24, 33, torch.float16))
    totals = [torch.zeros(24, 33, dtype=torch.float64) for _ in weights]
    if dtype == torch.float32:
        for weight in weights:
            weight.main_grad = torch.zeros(24, 33)
    for _ in range(3):
        x, dy = torch.randn(17, 33).half(), torch.randn(17, 24).half()
        gate_up_swiglu(x, *weights).backward(dy)
        raised = [weight.detach().double().requires_grad_() for weight in weights]
        for total, one in zip(totals, torch.autograd.grad(wide(x, *raised), raised, dy.double()), strict=True):
            total += one
        for weight in weights:
            if weight.grad is not None:  # which it stays
                weight.main_grad = weight.grad
    for weight, total in zip(weights, totals, strict=True):
        assert (weight.grad is None) == (dtype == torch.float32)
        assert (weight.main_grad.double() - total).norm() < most * total.norm()


@pytest.mark.parametrize("M", [0, 5, 20])
@pytest.mark.parametrize("K", [0, 32])
def test_any_leading_dimensions_and_none(M, K):
    x, gate, up = drawn(2 * M, 24, K, torch.bfloat16)
    leaves = [y.requires_grad_() for y in (x.view(2, M, K), gate, up)]
    found = gate_up_swiglu(*leaves)
    assert found.shape == (2, M, 24)
    assert torch.equal(found.flatten(0, 1), gate_up_swiglu(x, gate, up))
    found.sum().backward()
    assert [y.grad.shape for y in leaves] == [y.shape for y in leaves]
    if not (M and K):
        assert not any(y.grad.any() for y in leaves)


def test_a_result_is_changed_in_place():
    """As those of PyTorch's own functions are; autograd refuses it of views that a function gives."""
    x, gate, up = drawn(6, 8, 16, torch.float16)
    gate.requires_grad_()
    (want,) = torch.autograd.grad(2 * gate_up_swiglu(x.view(2, 3, 16), gate, up), gate, torch.ones(2, 3, 8).half())
    found = gate_up_swiglu(x.view(2, 3, 16), gate, up).mul_(2)
    (got,) = torch.autograd.grad(found, gate, torch.ones(2, 3, 8).half())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_changes_no_gradient(dtype, compiled):
    """The operator has no part in it; the products of its backward pass have none either."""
    call = torch.compile(gate_up_swiglu, backend="aot_eager") if compiled else gate_up_swiglu
    leaves = [x.requires_grad_() for x in drawn(5, 8, 16, dtype)]
    want = torch.autograd.grad(call(*leaves).sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(call(*leaves).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_registration():
    leaves = [x.requires_grad_() for x in drawn(5, 8, 16)]
    torch.library.opcheck(torch.ops.kernelmark.gate_up_swiglu.default, (*leaves, True))


def test_a_compiled_graph_asks_for_gate_and_up_where_it_needs_them():
    given = drawn(5, 8, 16)
    leaves = [x.clone().requires_grad_() for x in given]
    compiled = torch.compile(gate_up_swiglu, backend="aot_eager", fullgraph=True)
    want = torch.autograd.grad(gate_up_swiglu(*leaves).sum(), leaves)
    got = torch.autograd.grad(compiled(*leaves).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(compiled(*given), gate_up_swiglu(*given))


@pytest.mark.parametrize(("N", "K", "as_it_is"), [(24, 64, True), (24, 33, False), (21, 64, True)])
def test_hopper_is_given_both_weights_as_they_are(request, monkeypatch, N, K, as_it_is):
    """Those that it can load; else copies of them, and of results whose rows it cannot write."""
    from kernelmark.kernels.matmul import _dual_hopper as hopper
    from kernelmark.kernels.matmul._matmul_hopper import mapped, turned

    taken = []

    def multiply(x, gate, up, outputs, schedule, section):
        assert all(mapped(y) and not turned(y) for y in (x, gate, up, *outputs))
        assert schedule.preactivations == (len(outputs) == 3)
        taken.append([y.data_ptr() for y in (x, gate, up)])
        first, second = (x.double() @ weight.double().t() for weight in (gate, up))
        outputs[0].copy_(torch.nn.functional.silu(first) * second)
        for y, product in zip(outputs[1:], (first, second), strict=False):
            y.copy_(product)

    forget()
    request.addfinalizer(forget)
    monkeypatch.setattr(hopper, "multiply", multiply)
    monkeypatch.setattr(module, "on_hopper", lambda x: True)
    monkeypatch.setattr(module, "multiprocessors", lambda x: 132)
    x, gate, up = drawn(20, N, K, torch.bfloat16)
    near(gate_up_swiglu(x, gate, up), wide(x, gate, up), torch.bfloat16)
    assert (taken[-1] == [y.data_ptr() for y in (x, gate, up)]) == as_it_is
    by_columns = up.t().contiguous().t().requires_grad_()
    found = gate_up_swiglu(x, gate, by_columns)
    near(found.detach(), wide(x, gate, up), torch.bfloat16)
    assert taken[-1][2] != by_columns.data_ptr()
    (got,) = torch.autograd.grad(found.double().sum(), by_columns)
    raised = up.double().requires_grad_()
    near(got, torch.autograd.grad(wide(x, gate, raised).sum(), raised)[0], torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gate": torch.zeros(24, 16)}, ValueError, "gate has shape .*expected \\(N, 32\\)"),
        ({"up": torch.zeros(16, 32)}, ValueError, "up has shape"),
        ({"up": torch.zeros(24, 32).double()}, TypeError, "up has dtype"),
        ({"gate": torch.zeros(24, 32).half()}, TypeError, "gate has dtype"),
        ({"x": torch.tensor(1.0)}, ValueError, "x has no dimension"),
    ],
)
def test_what_is_wrong_is_named(change, error, message):
    given = {"x": torch.zeros(5, 32), "gate": torch.zeros(24, 32), "up": torch.zeros(24, 32)} | change
    with pytest.raises(error, match=message):
        gate_up_swiglu(**given)


def test_a_main_grad_of_another_shape_is_refused():
    x, gate, up = drawn(3, 24, 32, torch.bfloat16)
    up.requires_grad_().main_grad = torch.zeros(32, 24)
    with pytest.raises(ValueError, match="main_grad has shape"):
        gate_up_swiglu(x, gate, up)
