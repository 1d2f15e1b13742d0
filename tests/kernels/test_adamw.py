"""Our AdamW."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels import _in_c
from kernelmark.kernels.optimizer import _addresses
from kernelmark.kernels.optimizer import adamw as module
from kernelmark.kernels.optimizer.adamw import adamw, adamw_clipped
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.operators.adamw import OPERATOR, reference

SHAPES = [(3, 70), (1,), (128,), (301,), (0,), (), (64, 2)]
NUMBERS = {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1.0}


def state(dtype=torch.float32, moment=None, masters=False, shapes=SHAPES):
    """params, grads, moments and masters."""
    moment = moment or dtype
    wide = [torch.randn(x) * 0.1 for x in shapes]
    return (
        [x.to(dtype) for x in wide],
        [(torch.randn(x) * 1e-2).to(dtype) for x in shapes],
        [(torch.randn(x) * 5e-3).to(moment) for x in shapes],
        [((torch.rand(x) + 0.5) * 1e-6).to(moment) for x in shapes],
        wide if masters else None,
    )


def expected(lists, step=10, **numbers):
    raised = [None if x is None else [y.double() for y in x] for x in lists]
    return reference(*raised, step, **NUMBERS | numbers)


def flat(lists):
    return [x for place in (0, 2, 3, 4) for x in lists[place] or ()]


def agrees(lists, want, dtype="fp32"):
    deviation(flat(lists), want, OPERATOR.tolerances[dtype])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(params=["python", "c"])
def _loop(request, monkeypatch):
    """What goes over tensors that are known: Python, or C as on a GPU."""
    if request.param == "c":
        if _in_c.compiled() is None:
            pytest.skip("there is no C compiler here")
        monkeypatch.setattr(_addresses, "functions", lambda device: _in_c.compiled())


LOOPS = pytest.mark.usefixtures("_loop")


@pytest.mark.parametrize("numbers", [{}, {"weight_decay": 0.0}, {"beta1": 0.0, "beta2": 0.5}, {"eps": 1e-3}])
@pytest.mark.parametrize("step", [1, 10, 100_000])
def test_agrees(step, numbers):
    lists = state()
    want = expected(lists, step, **numbers)
    grads = [x.clone() for x in lists[1]]
    assert adamw(*lists, step=step, **NUMBERS | numbers) is None
    agrees(lists, want)
    assert all(map(torch.equal, grads, lists[1]))


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_agrees_with_masters(dtype, moment):
    lists = state(dtype, moment, masters=True)
    want = expected(lists)
    adamw(*lists, step=10, **NUMBERS)
    agrees(lists, want, "bf16")
    # What is kept in fp32 has fp32's error.
    count = len(SHAPES)
    deviation(lists[4], want[3 * count :], OPERATOR.tolerances["fp32"])
    if moment == torch.float32:
        deviation([*lists[2], *lists[3]], want[count : 3 * count], OPERATOR.tolerances["fp32"])
    # One digit: the interpreter rounds to bf16 toward zero.
    torch.testing.assert_close([x.float() for x in lists[0]], lists[4], rtol=2**-7, atol=1e-6)


def test_agrees_in_bf16():
    lists = state(torch.bfloat16)
    want = expected(lists)
    adamw(*lists, step=10, **NUMBERS)
    agrees(lists, want, "bf16")


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.int32])
@pytest.mark.parametrize("step", [1, 10, 5000])
def test_step_and_rate_on_the_device(step, kind):
    """The corrections are then computed in the kernel, also where they cancel, as accurately as on the host."""
    for given in (step, torch.tensor(step, dtype=kind)):
        for lr in (0.05, torch.tensor(0.05)):
            lists = state()
            want = expected(lists, step)
            adamw(*lists, step=given, **NUMBERS | {"lr": lr})
            agrees(lists, want)


def test_a_beta_of_0_with_a_step_on_the_device():
    lists = state()
    want = expected(lists, 3, beta1=0.0, beta2=0.0)
    adamw(*lists, step=torch.tensor(3), **NUMBERS | {"beta1": 0.0, "beta2": 0.0})
    agrees(lists, want)


@LOOPS
def test_steps_follow_each_other():
    """Many steps on one state: like the reference's, finite, and on one table."""
    lists = state(shapes=[(40,), (7, 3)])
    wide = [[y.double() for y in x] for x in lists[:4]]
    module._tables.clear()
    for step in range(1, 31):
        new = reference(*wide, None, step, **NUMBERS)
        wide = [list(new[:2]), wide[1], list(new[2:4]), list(new[4:])]
        adamw(*lists, step=step, **NUMBERS)
    agrees(lists, flat((*wide, None)))
    assert len(module._tables) == 1


@LOOPS
def test_a_new_address_or_size_makes_a_new_table():
    lists = state(shapes=[(200,)])
    for grads in ([torch.randn(200)], [torch.randn(200)]):
        given = (lists[0], grads, *lists[2:])
        want = expected(given)
        adamw(*given, step=10, **NUMBERS)
        agrees(given, want)
    shorter = tuple(None if x is None else [y[:130] for y in x] for x in lists)
    before = lists[0][0].clone()
    want = expected(shorter)
    adamw(*shorter, step=10, **NUMBERS)
    agrees(shorter, want)
    assert torch.equal(lists[0][0][130:], before[130:])


@LOOPS
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:130],
        lambda x: x[:200].view(20, 10).t(),
        lambda x: x.view(torch.bfloat16)[: x.numel()],
    ],
)
def test_other_tensors_at_the_same_addresses(change):
    """Memory that others have taken over: the table of those before must not be used for them."""
    before = state(shapes=[(300,)])[:4]
    adamw(*before, step=10, **NUMBERS)
    for x in (before[2], before[3]):
        x[0].zero_()  # any bits of a float are fine as two of bf16, but for NaNs
    before[0][0].fill_(1.0)
    before[1][0].fill_(0.5)
    after = tuple([change(x) for x in tensors] for tensors in before)
    want = expected((*after, None))
    adamw(*after, step=10, **NUMBERS)
    agrees((*after, None), want, "bf16" if after[0][0].dtype == torch.bfloat16 else "fp32")


@LOOPS
def test_new_gradients_at_the_same_addresses():
    """The same memory as new objects is the same table."""
    lists = state(shapes=[(40,), (7, 3)])
    module._tables.clear()
    for step in range(1, 4):
        want = expected(lists, step)
        adamw(lists[0], [x.view_as(x) for x in lists[1]], *lists[2:], step=step, **NUMBERS)
        agrees(lists, want)
    assert len(module._tables) == 1


@LOOPS
def test_other_gradients_where_those_lay_that_had_moved():
    """Of gradients at new addresses no object is noted: the next ones there are looked at again."""
    lists = state(shapes=[(20, 10)])
    moved = torch.randn(20, 10)
    for grad in (lists[1][0], moved, moved.view(10, 20).t(), moved):
        given = (lists[0], [grad], *lists[2:])
        want = expected(given)
        adamw(*given, step=10, **NUMBERS)
        agrees(given, want)
    with pytest.raises(ValueError, match=r"grads\[0\] has shape"):
        adamw(lists[0], [moved.view(10, 20)], *lists[2:], step=10, **NUMBERS)


@LOOPS
def test_gradients_that_move_are_all_that_is_sent():
    """An eager step's gradients are somewhere else each time. What was sent before is left as it is: a captured
    graph may read it.
    """
    lists = state(shapes=[(40,), (7, 3)])
    module._tables.clear()
    found, kept = [], []
    for step in range(1, 5):
        if step != 3:  # in the third step they are where they were
            kept.append([x.clone() for x in lists[1]])
        want = expected((lists[0], kept[-1], *lists[2:]), step)
        adamw(lists[0], kept[-1], *lists[2:], step=step, **NUMBERS)
        agrees(lists, want)
        (table,) = module._tables.values()
        found.append((table.words, table.grads))
    assert len({id(words) for words, _ in found}) == 1
    assert len({id(grads) for _, grads in found}) == 3
    assert found[1][1] is found[2][1]
    for (_, sent), grads in zip((found[0], found[1], found[3]), kept, strict=True):
        assert sent.tolist() == [x.data_ptr() for x in grads]


@LOOPS
def test_gradients_elsewhere_are_refused_at_any_step():
    """A kernel would read a host's addresses."""
    lists = state(shapes=[(40,), (7, 3)])
    adamw(*lists, step=1)
    with pytest.raises(ValueError, match=r"grads\[0\] is on meta"):
        adamw(lists[0], [x.to("meta") for x in lists[1]], *lists[2:], step=2)


def test_numbers_are_floats_whatever_is_given(monkeypatch):
    """An integer of the first step would be a constant of all others."""
    seen = []

    def launch(self, device, *tensors, numbers):
        seen.extend(numbers[0])

    monkeypatch.setattr(module.Launch, "__call__", launch)
    integers = {"lr": 1, "eps": 1, "weight_decay": 0}
    adamw(*state(), step=1, **NUMBERS | integers)
    adamw(*state(), step=torch.ones(()), **NUMBERS | integers)
    assert {type(x) for x in seen} == {float}


@LOOPS
def test_lists_that_take_turns(monkeypatch):
    """Groups of parameters: what has been noted of one is still known when it comes again."""
    module._tables.clear()
    groups = [state(shapes=[(40,), (7, 3)]), state(shapes=[(9,)], masters=True)]
    for step in range(1, 5):
        for lists in groups:
            want = expected(lists, step)
            adamw(lists[0], [x.clone() for x in lists[1]], *lists[2:], step=step, **NUMBERS)
            agrees(lists, want)
        monkeypatch.setattr(module, "_looked_up", lambda *_: pytest.fail("looked at all of each tensor"))
        monkeypatch.setattr(module, "_as_noted", lambda *_: pytest.fail("looked at all of each tensor"))
    assert len(module._tables) == 2


@LOOPS
def test_parameters_that_are_laid_elsewhere_and_back():
    """The same objects with other memory, as of whoever swaps it; what was theirs is left as it is."""
    module._tables.clear()
    lists = state(shapes=[(40,), (7, 3)])
    for place in (0, 2, 3):
        here, there = lists[place][1].data, torch.rand(7, 3) * 1e-3
        for memory in (there, here, there):
            other = here if memory is there else there
            before = other.clone()
            lists[place][1].data = memory
            for _ in range(2):
                want = expected(lists)
                adamw(*lists, step=10, **NUMBERS)
                agrees(lists, want)
            assert torch.equal(other, before)


@LOOPS
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "other", [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor([x, x])], ids=["sparse", "nested"]
)
def test_a_gradient_that_lies_nowhere(other):
    """C would end the process where Python raises."""
    lists = state(shapes=[(40,), (7, 3)])
    for _ in range(3):
        adamw(lists[0], [x.clone() for x in lists[1]], *lists[2:], step=1)
    before = lists[0][0].clone()
    with pytest.raises((RuntimeError, ValueError)):
        adamw(lists[0], [lists[1][0], other(lists[1][1])], *lists[2:], step=2)
    assert torch.equal(lists[0][0], before)


@LOOPS
def test_tables_are_given_up(monkeypatch):
    monkeypatch.setattr(module, "TABLES", 2)
    keep = [state(shapes=[(8,)]) for _ in range(5)]
    for lists in keep:
        adamw(*lists, step=1)
    assert len(module._tables) == 2


def test_strides_and_alignment():
    for change in (
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    ):
        lists = tuple(None if x is None else [change(y) for y in x] for x in state(shapes=[(5, 30), (70,)]))
        want = expected(lists)
        adamw(*lists, step=10, **NUMBERS)
        agrees(lists, want)


@pytest.mark.parametrize("places", [1, 3])
def test_memory_may_have_the_negative_of_a_gradient(places):
    """As that has which autograd leaves of a number where it came by a conjugate; also where others lay before."""
    number = torch.ones((), requires_grad=True)
    (torch.complex(torch.zeros(()), number).conj() * 2j).real.backward()
    assert number.grad.is_neg()
    for gradient in (number.grad.clone(), number.grad):
        lists = state(shapes=[(), (3,), (70,)][:places])
        lists[1][0] = gradient
        for _ in range(2):
            want = expected(lists)
            adamw(*lists, step=10, **NUMBERS)
            agrees(lists, want)
    assert adamw_clipped(*lists, max_norm=100, step=10, **NUMBERS) >= 2


def test_autograd_knows_that_parameters_changed():
    p = torch.nn.Parameter(torch.randn(4))
    square = (p * p).sum()
    adamw([p], [torch.randn(4)], [torch.zeros(4)], [torch.zeros(4)], step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_nothing_to_do():
    adamw([], [], [], [], step=1)
    adamw(*state(shapes=[(0,), (0, 4)]), step=1)


X = [torch.randn(4)]


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "grads has 0 tensors, params has 1", (X, [], X, X)),
        (ValueError, "exp_avgs has 2 tensors, params has 1", (X, X, X * 2, X)),
        (ValueError, r"exp_avg_sqs\[0\] has shape \(3,\), expected \(4,\)", (X, X, X, [X[0][:3]])),
        (TypeError, r"grads\[0\] has dtype torch.float64", (X, [X[0].double()], X, X)),
        (TypeError, r"grads\[1\] has dtype torch.float32", (X * 2, [X[0].half(), *X], X * 2, X * 2)),
        (TypeError, r"masters\[0\] has dtype torch.bfloat16", (X, X, X, X, [X[0].bfloat16()])),
        (ValueError, r"params\[0\] is on meta", ([X[0].to("meta")], X, X, X)),
        (TypeError, r"grads\[1\] must be a tensor, not NoneType", (X * 2, [*X, None], X * 2, X * 2)),
        (TypeError, r"params\[0\] must be a tensor, not NoneType", ([None], X, X, X)),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        adamw(*arguments, step=1)


@pytest.mark.parametrize(
    ("error", "message", "numbers"),
    [
        (ValueError, "step is 0, expected at least 1", {"step": 0}),
        (ValueError, "beta1 is 1.0, expected at least 0 and less than 1", {"step": 1, "beta1": 1.0}),
        (ValueError, "beta2 is -0.5, expected at least 0 and less than 1", {"step": 1, "beta2": -0.5}),
        (ValueError, r"step has shape \(1,\)", {"step": torch.ones(1)}),
        (TypeError, "step has dtype torch.float64", {"step": torch.tensor(1.0, dtype=torch.float64)}),
        (TypeError, "lr has dtype torch.float64", {"step": 1, "lr": torch.tensor(0.1, dtype=torch.float64)}),
    ],
)
def test_wrong_numbers(error, message, numbers):
    with pytest.raises(error, match=message):
        adamw(X, X, X, X, **numbers)


def test_registration():
    lists = [*state(shapes=[(40,), (3, 5)])[:4], []]
    numbers = (10, 0.05, 0.9, 0.999, 1e-8, 1.0)
    operator = torch.ops.kernelmark.adamw.default
    torch.library.opcheck(operator, (*lists, None, None, *numbers))
    torch.library.opcheck(operator, (*lists, torch.tensor(3), torch.tensor(0.1), *numbers))


def clipped_apart(lists, max_norm, **numbers):
    """By PyTorch's clipping of gradients in fp64, then a step: what `lists` should be, and the norm."""
    raised = [None if x is None else [y.double() for y in x] for x in lists]
    norm = torch.stack([x.norm() for x in raised[1]]).norm() if raised[1] else torch.zeros(())
    grads = [x * min(1.0, max_norm / (float(norm) + 1e-6)) for x in raised[1]]
    return reference(raised[0], grads, *raised[2:], 10, **NUMBERS | numbers), norm


@pytest.mark.parametrize("max_norm", [1e3, 0.1, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("shapes", [SHAPES, [(64,)] * 9, [(1000,), (0,)], [(0,)]])
def test_agrees_clipped(max_norm, dtype, masters, shapes):
    lists = state(dtype, torch.float32, masters, shapes)
    want, norm = clipped_apart(lists, max_norm)
    grads = [x.clone() for x in lists[1]]
    found = adamw_clipped(*lists, max_norm=max_norm, step=10, **NUMBERS)
    agrees(lists, want, "fp32" if dtype == torch.float32 else "bf16")
    # Of moments in fp32 the error is fp32's: they say how much was clipped, where parameters hardly do.
    deviation([*lists[2], *lists[3]], want[len(shapes) : 3 * len(shapes)], OPERATOR.tolerances["fp32"])
    assert float(found) == pytest.approx(float(norm), rel=1e-5)
    assert all(map(torch.equal, grads, lists[1]))


def test_clipped_with_a_step_and_a_rate_on_the_device():
    for lr in (0.05, torch.tensor(0.05)):
        lists = state()
        want, _ = clipped_apart(lists, 0.1)
        adamw_clipped(*lists, max_norm=0.1, step=torch.tensor(10), **NUMBERS | {"lr": lr})
        agrees(lists, want)


def test_clipped_as_tensors_lie():
    lists = tuple(
        None if x is None else [torch.stack([y, y], -1)[..., 0] for y in x] for x in state(shapes=[(5, 30), (70,)])
    )
    want, norm = clipped_apart(lists, 0.1)
    assert float(adamw_clipped(*lists, max_norm=0.1, step=10, **NUMBERS)) == pytest.approx(float(norm), rel=1e-5)
    agrees(lists, want)


def test_a_gradient_that_is_no_number():
    """As after `clip_grad_norm_`: nothing is one any more."""
    lists = state(shapes=[(40,), (7,)])
    lists[1][0][3] = torch.nan
    assert adamw_clipped(*lists, max_norm=1.0, step=1).isnan()
    assert all(x.isnan().all() for x in lists[0])


def test_nothing_to_clip():
    assert adamw_clipped([], [], [], [], max_norm=1.0, step=1) == 0


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_a_wrong_norm(most):
    with pytest.raises(ValueError, match="max_norm is .*, expected more than 0"):
        adamw_clipped(X, X, X, X, max_norm=most, step=1)


def test_registration_clipped():
    lists = [*state(shapes=[(40,), (3, 5)])[:4], []]
    numbers = (10, 0.05, 0.9, 0.999, 1e-8, 1.0, 0.5)
    torch.library.opcheck(torch.ops.kernelmark.adamw_clipped.default, (*lists, None, None, *numbers))


def test_compiled():
    """torch.compile sees the operator whole."""
    lists = state(shapes=[(40,), (3, 5)])
    want = expected(lists)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(params, grads, exp_avgs, exp_avg_sqs):
        adamw(params, grads, exp_avgs, exp_avg_sqs, step=10, **NUMBERS)

    step(*lists[:4])
    agrees(lists, want)
