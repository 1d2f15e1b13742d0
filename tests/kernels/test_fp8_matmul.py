"""Our products of 8-bit floats, as far as any GPU has them; `test_matmul_hopper.py` plays Hopper's."""

import pytest
import torch
from kernelmark.kernels._launch import forget
from kernelmark.kernels.matmul import _matmul_hopper as hopper
from kernelmark.kernels.matmul import fp8_matmul as module
from kernelmark.kernels.matmul.fp8_matmul import fp8_matmul, in_rows_of_k
from kernelmark.suite.operators import fp8_matmul as operator


@pytest.mark.parametrize("recipe", ["block", "row", "tensor", "group", "tile"])
def test_agrees(agrees, recipe):
    agrees("fp8_matmul", {"M": 17, "N": 150, "K": 300}, "e4m3", recipe=recipe)


@pytest.mark.parametrize(("layout", "recipe"), [("nn", "block"), ("tn", "group"), ("nn", "row")])
def test_agrees_in_layouts_of_gradients(agrees, layout, recipe):
    agrees("fp8_matmul", {"M": 1, "N": 40, "K": 2880}, "e4m3", recipe=recipe, layout=layout)


def test_transposes_what_lies_column_by_column():
    x = torch.randn(90, 70).to(torch.float8_e4m3fn)
    for given in (x, x.t(), x[3:80, :65], x.t()[5:, :67]):
        got = in_rows_of_k(given)
        assert got.stride(1) == 1
        assert torch.equal(got.float(), given.float())
        assert (got is given) == (given.stride(1) == 1)


def test_scales_that_lie_otherwise(agrees):
    def contiguous(given):
        return {name: given[name].contiguous() for name in ("scale_a", "scale_b")}

    agrees("fp8_matmul", {"M": 17, "N": 140, "K": 300}, "e4m3", change=contiguous)


@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "group"])
@pytest.mark.parametrize(("M", "N", "K"), [(5, 11, 13), (1, 1, 1), (16, 24, 1001), (3, 24, 32), (150, 101, 2048)])
def test_rows_that_begin_anywhere_are_copied_to_where_hopper_loads_them(monkeypatch, M, N, K, recipe):
    taken = []

    def multiply(a, b, out, schedule, dealt, section, scale_a, scale_b, bias, split):
        assert all(hopper.mapped(x) and not hopper.turned(x) for x in (a, b, out))
        taken.append((a, b, out))
        if steps > 8 and recipe in ("block", "group"):
            assert schedule.staged, "what is long enough has its scales copied to where they can be staged"
            assert hopper.stageable(scale_a, scale_b, recipe)
        assert schedule.bias == (bias is not None)
        y = a.double() @ b.double().t()
        out.copy_(y if bias is None else y + bias)

    monkeypatch.setattr(hopper, "multiply", multiply)
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "needs_e4m3", lambda name, x: None)
    monkeypatch.setattr(module, "multiprocessors", lambda x: 132)
    a, b = (torch.randn(rows, K).to(torch.float8_e4m3fn) for rows in (M, N))
    steps = -(-K // 128)
    scales = {
        "tensor": (torch.ones(()), torch.ones(())),
        "row": (torch.ones(M, 1), torch.ones(1, N)),
        "block": (torch.ones(M, steps), torch.ones(steps, -(-N // 128))),
        "group": (torch.ones(M, steps), torch.ones(steps, N)),
    }[recipe]
    bias = torch.randn(N).bfloat16()
    lain = a.repeat_interleave(2, 1)[:, ::2] if M > 1 else a  # neither its rows nor its columns are dense
    for left in (a, a.t().contiguous().t(), lain):
        for right in (b.t(), b.t().contiguous()):
            got = module._launch(left, right, *scales, recipe)
            assert got.is_contiguous()
            torch.testing.assert_close(got.double(), a.double() @ b.double().t(), rtol=1e-2, atol=1e-2)
            biased = module._launch(left, right, *scales, recipe, bias)
            torch.testing.assert_close(biased.double(), a.double() @ b.double().t() + bias, rtol=1e-2, atol=1e-2)
    if (N % 8, K % 16) == (0, 0):
        assert taken[0][0].data_ptr() == a.data_ptr(), "what can be mapped is not copied"


@pytest.mark.parametrize("recipe", operator.OPERATOR.options["recipe"])
def test_adds_a_bias(recipe):
    """That it is rounded once shows on a GPU alone: the interpreter rounds towards 0."""
    case = operator.OPERATOR.case({"M": 17, "N": 150, "K": 300}, "e4m3", "forward", recipe=recipe)
    given = operator.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    bias = (torch.randn(300) * 50).bfloat16()[::2]
    want = (
        operator.reference(**{name: x.double() if torch.is_tensor(x) else x for name, x in given.items()}) + bias
    )
    torch.testing.assert_close(fp8_matmul(**given, bias=bias).double(), want, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("recipe", operator.OPERATOR.options["recipe"])
def test_a_call_is_prepared_once_on_hopper(request, monkeypatch, recipe):
    """New numbers are multiplied; with a bias it is another kind of call."""
    forget()
    request.addfinalizer(forget)
    made, ran = [], []

    def planned(a, b, out, schedule, dealt, section, scale_a, scale_b, bias, split):
        assert all(hopper.mapped(x) and not hopper.turned(x) for x in (a, b, out))
        made.append(schedule)

        def run(a, b, out, scale_a, scale_b, bias):
            y = a.double() @ b.double().t()
            ran.append((scale_a.shape, scale_b.shape))
            out.copy_(y if bias is None else y + bias)

        return run

    monkeypatch.setattr(hopper, "planned", planned)
    monkeypatch.setattr(hopper, "multiply", lambda *_: pytest.fail("nothing has to be copied"))
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "needs_e4m3", lambda name, x: None)
    monkeypatch.setattr(module, "multiprocessors", lambda x: 132)
    M, N, K = 144, 160, 384
    sizes = {"tensor": ((), ()), "row": ((M, 1), (N, 1)), "block": ((M, 3), (2, 3)), "group": ((M, 3), (N, 3))}
    of_a, of_b = {**sizes, "tile": ((2, 3), (2, 3))}[recipe]
    scale_a, scale_b = (
        torch.ones(x[::-1]).t() if len(x) == 2 and x[0] > 2 and x[1] > 1 else torch.ones(x) for x in (of_a, of_b)
    )
    given = scale_a, scale_b.t() if scale_b.dim() else scale_b, recipe
    for _ in range(2):
        a, b = (torch.randn(rows, K).to(torch.float8_e4m3fn) for rows in (M, N))
        bias = torch.randn(N).bfloat16()
        for extra in (None, bias):
            got = fp8_matmul(a, b.t(), *given, extra)
            want = a.double() @ b.double().t() + (0 if extra is None else extra)
            torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    assert [x.bias for x in made] == [False, True]
    assert {x.scales for x in made} == {recipe}
    assert ran == [(of_a, of_b)] * 4


@pytest.mark.parametrize("recipe", ["block", "group"])
def test_scales_that_lie_otherwise_are_copied_at_each_call(request, monkeypatch, recipe):
    """Of a call that is prepared: those of this call, not of the first."""
    forget()
    request.addfinalizer(forget)
    made = []

    def planned(a, b, out, schedule, dealt, section, scale_a, scale_b, bias, split):
        made.append(schedule.staged)
        assert hopper.stageable(scale_a, scale_b, recipe)

        def run(a, b, out, scale_a, scale_b, bias):
            assert hopper.stageable(scale_a, scale_b, recipe)
            out.copy_(a.double() @ b.double().t() * scale_a[0, 0] * scale_b[0, 0])

        return run

    monkeypatch.setattr(hopper, "planned", planned)
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "needs_e4m3", lambda name, x: None)
    monkeypatch.setattr(module, "multiprocessors", lambda x: 132)
    M, N, K = 143, 160, 2048  # rows by no four: their scales cannot be staged as they lie
    a, b = (torch.randn(rows, K).to(torch.float8_e4m3fn) for rows in (M, N))
    for factor in (1.0, 2.0, 3.0):
        scale_a = torch.full((16, M), factor).t()
        scale_b = torch.full((16, N if recipe == "group" else 2), factor)
        got = fp8_matmul(a, b.t(), scale_a, scale_b, recipe)
        want = a.double() @ b.double().t() * factor**2
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
    assert made == [True]


def test_empty():
    q = torch.zeros(4, 0).to(torch.float8_e4m3fn)
    one = torch.ones(())
    assert fp8_matmul(q, q.t(), one, one, "tensor").eq(0).all()
    bias = torch.arange(4).bfloat16()
    assert torch.equal(fp8_matmul(q, q.t(), one, one, "tensor", bias), bias.expand(4, 4))
    assert fp8_matmul(q.t(), q, one, one, "tensor").shape == (0, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"recipe": "column"}, ValueError, "recipe is 'column'"),
        ({"recipe": "row"}, ValueError, r"scale_a has shape \(\), expected \(4, 1\)"),
        ({"recipe": "block"}, ValueError, r"scale_a has shape \(\), expected \(4, 2\)"),
        ({"a": torch.zeros(4, 200)}, TypeError, "a has dtype torch.float32"),
        ({"bias": torch.zeros(4)}, TypeError, "bias has dtype torch.float32"),
        ({"bias": torch.zeros(5).bfloat16()}, ValueError, r"bias has shape \(5,\), expected \(4,\)"),
    ],
)
def test_says_what_is_wrong(change, error, message):
    q = torch.zeros(4, 200).to(torch.float8_e4m3fn)
    given = {"a": q, "b": q.t(), "scale_a": torch.ones(()), "scale_b": torch.ones(()), "recipe": "tensor"}
    with pytest.raises(error, match=message):
        fp8_matmul(**given | change)
