"""Calls that come again, in C and in Python: the same is found in any mode and thread, and nothing is kept."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernelmark.kernels import _common, _in_c, _launch
from kernelmark.kernels._launch import Launch, forget, prepared, room_like
from kernelmark.kernels.matmul.linear import linear
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

SEEN: list[tuple] = []
"""What `scaled` was prepared for."""


def _prepare(x, y, factor):
    SEEN.append((x.shape, x.stride(), x.dtype, y.stride(), factor))
    made = room_like(x)

    def run(x, y, factor):
        with torch.no_grad():  # as a kernel, of which autograd knows nothing
            return made().copy_(x).mul_(y).mul_(factor)

    return run


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.factor = inputs[2]


def _backward(ctx, dy):
    x, y = ctx.saved_tensors
    return dy * y * ctx.factor, dy * x * ctx.factor, None


_operator = prepared(_prepare)
scaled = _common.operator(
    "tested_in_c(Tensor x, Tensor y, float factor) -> Tensor",
    _operator,
    lambda x, y, factor: torch.empty_like(x, memory_format=torch.contiguous_format),
    _save,
    _backward,
)


@pytest.fixture
def way(way, monkeypatch):
    """With nothing prepared before, and nothing afterwards."""
    monkeypatch.setattr(_launch, "_empty", None)
    forget()
    SEEN.clear()
    yield way
    forget()


def known(*shape, dtype=torch.float32):
    """A pair for which `scaled` was prepared, and which it knows."""
    x, y = torch.randn(*shape).to(dtype), torch.randn(*shape).to(dtype)
    for _ in range(3):
        scaled(x, y, 2.0)
    return x, y


@pytest.fixture
def pythons(monkeypatch):
    """How often arguments were looked at one by one."""
    seen = []
    monkeypatch.setattr(
        _launch, "likeness", lambda arguments, likeness=_launch.likeness: seen.append(1) or likeness(arguments)
    )
    return seen


def test_there_is_a_front_in_c_alone(way):
    known(2, 4)
    assert (_operator.front is not None) == (way == "c")
    forget()
    assert _operator.front is None


def test_what_comes_again_is_known(way, pythons):
    known(2, 4)
    del pythons[:]
    for _ in range(5):
        x, y = torch.randn(2, 4), torch.randn(2, 4)
        torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
    assert (len(SEEN), len(pythons)) == (1, 0)


class Own(torch.Tensor):
    pass


OTHERS = {
    "another shape": (lambda x: x.reshape(4, 2), 2),
    "other strides": (lambda x: x.t().contiguous().t(), 2),
    "a view": (lambda x: torch.cat([x, x], 1)[:, :4], 2),
    "another place within 16 bytes": (lambda x: torch.cat([x.flatten(), x.flatten()])[1:9].view(2, 4), 2),
    "another dtype": (lambda x: x.double(), 2),
    "a parameter": (lambda x: torch.nn.Parameter(x), 1),
    "requires a gradient": (lambda x: x.clone().requires_grad_(), 1),
    "negative": (lambda x: torch._neg_view(x), 1),
    "a subclass": (lambda x: x.as_subclass(Own), 1),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_what_differs_is_computed_as_it_is(way, pythons, other, place):
    pair = list(known(2, 4))
    change, kinds = OTHERS[other]
    changed = change(torch.randn(2, 4))
    pair[place] = changed
    pair[1 - place] = pair[1 - place].reshape(changed.shape)
    if pair[0].dtype != pair[1].dtype:
        kinds = 2
    del pythons[:]
    with contextlib.suppress(AssertionError) if other == "negative" else contextlib.nullcontext():
        for _ in range(3):
            got = scaled(*pair, 2.0)
            torch.testing.assert_close(got, (pair[0] * pair[1] * 2).to(got.dtype), check_dtype=False)
            assert got.requires_grad == changed.requires_grad
    assert len(pythons) >= 1
    assert len({x[:-1] for x in SEEN}) in (1, kinds)


@pytest.mark.parametrize("factor", [3.0, -2.0, 2, True, float("nan")])
def test_other_numbers(way, factor):
    x, y = known(2, 4)
    for _ in range(3):
        torch.testing.assert_close(scaled(x, y, factor), x * y * factor, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["nested", "sparse", "csr", "mkldnn", "meta", "freed", "none"])
def test_what_has_no_memory_does_not_end_the_process(way, kind):
    """Guards would at a nested tensor, PyTorch's function of addresses in C at a sparse one."""
    x, y = known(3, 3)
    freed = torch.randn(3, 3)
    freed.untyped_storage().resize_(0)
    others = {
        "nested": lambda: torch.nested.nested_tensor([y, y]),
        "sparse": y.to_sparse,
        "csr": y.to_sparse_csr,
        "mkldnn": y.to_mkldnn,
        "meta": lambda: y.to("meta"),
        "freed": lambda: freed,
        "none": lambda: None,
    }
    z = others[kind]()
    with contextlib.suppress(RuntimeError, TypeError, NotImplementedError, AttributeError):
        _operator.find((x, z, 2.0))
    with contextlib.suppress(RuntimeError, TypeError, NotImplementedError, AttributeError):
        _operator.find((z, y, 2.0))
    if kind != "freed":  # whose memory PyTorch's own operators would read as well
        for pair in ((x, z), (z, y)):
            before = len(SEEN)
            if kind == "meta":
                continue
            with pytest.raises((RuntimeError, TypeError, NotImplementedError, AttributeError)):
                scaled(*pair, 2.0)
            del SEEN[before:]
    torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)


def test_a_tensor_that_changes(way):
    """Of one object: strides, memory, whether it has a gradient."""
    x, y = known(4, 4)
    x.t_()
    torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
    x.data = torch.randn(4, 4)
    torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
    x.set_(torch.randn(32).untyped_storage(), 1, (4, 4), (4, 1))
    torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
    x.requires_grad_()
    assert scaled(x, y, 2.0).requires_grad


def test_memory_that_is_used_again(way):
    known(4, 6)
    for shape in ((4, 6), (6, 4), (4, 6), (2, 12)) * 10:
        x, y = torch.randn(24).view(shape), torch.randn(24).view(shape)
        torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
        torch.testing.assert_close(scaled(x.t(), y.t(), 2.0), x.t() * y.t() * 2)


def test_results_are_not_written_over(way):
    x, y = known(2, 4)
    found = [scaled(x, y, 2.0) for _ in range(4)]
    kept = found[0].clone()
    for _ in range(4):
        scaled(torch.randn(2, 4), y, 2.0)
    assert torch.equal(found[0], kept)
    assert len({z.data_ptr() for z in found}) == 4


def test_gradients(way):
    x, y = (z.requires_grad_() for z in known(3, 5))
    for _ in range(4):
        given = torch.randn(3, 5)
        dx, dy = torch.autograd.grad(scaled(x, y, 2.0), (x, y), given)
        torch.testing.assert_close(dx, given * y * 2)
        torch.testing.assert_close(dy, given * x * 2)
        with torch.no_grad():
            assert not scaled(x, y, 2.0).requires_grad
        with torch.inference_mode():
            assert scaled(x, y, 2.0).is_inference()
            inferred = torch.randn(3, 5)
            torch.testing.assert_close(scaled(inferred, inferred, 2.0), inferred * inferred * 2)
    assert not scaled(x.detach(), y.detach(), 2.0).requires_grad


class Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_registered_operator(way):
    x, y = known(2, 4)
    with Noting() as noting:
        got = scaled(x, y, 2.0)
    assert any("tested_in_c" in name for name in noting.seen)
    torch.testing.assert_close(got, x * y * 2)
    with FakeTensorMode() as mode:
        fake = scaled(mode.from_tensor(x), mode.from_tensor(y), 2.0)
    assert type(fake).__name__ == "FakeTensor"
    torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_and_forward_mode(way):
    x, y = known(2, 4)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # in place of a gradient of zero
        torch.func.grad(lambda x: scaled(x, y, 2.0).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward mode"):
            scaled(dual, y, 2.0)
        torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: scaled(x, y, 2.0), (x,), (torch.ones_like(x),))


def test_graphs_hold_the_registered_operator(way):
    """What knows arguments again in C is not traced."""
    known(2, 4)
    seen = []

    def noting(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: scaled(x, y, 2.0) + 1, backend=noting, fullgraph=True)
    for _ in range(3):
        x, y = torch.randn(2, 4), torch.randn(2, 4)
        torch.testing.assert_close(compiled(x, y), x * y * 2 + 1)
        torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
    assert any("tested_in_c" in name for name in seen)


def test_what_a_call_raises_comes_through(way):
    x, y = known(2, 4)
    (run,) = _operator._runs.values()
    calls = []

    def fails(*arguments):
        calls.append(len(arguments))
        raise KeyError("of the call")

    forget()
    run.run = fails
    _operator._runs[_launch.likeness((x, y, 2.0))[0]] = run
    run.looks = 4
    before = sys.getrefcount(x), sys.getrefcount(y)
    for _ in range(50):
        with pytest.raises(KeyError, match="of the call"):
            scaled(x, y, 2.0)
    assert calls == [3] * 50
    assert (sys.getrefcount(x), sys.getrefcount(y)) == before


def test_another_device_is_pythons(way, monkeypatch):
    x, y = known(2, 4)
    (run,) = _operator._runs.values()
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or contextlib.nullcontext())
    monkeypatch.setattr(_launch, "_device", lambda: 0)
    run.index, run.looks = 1, 4
    _operator._kinds.clear()
    _operator.front = None
    for _ in range(4):
        torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)
    assert entered == [1] * 4


def resident():
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for a process's memory")
def test_nothing_is_kept_of_calls(way):
    x, y = known(2, 4)
    followed = x.clone().requires_grad_()
    other = torch.randn(4, 2).t()
    wrong = y.to_sparse()
    for _ in range(9):  # all kinds are known
        scaled(followed, y, 2.0)
        scaled(other, y, 2.0)
    gc.collect()
    noted = [sys.getrefcount(z) for z in (x, y, followed, other, wrong, 2.0, scaled)]
    found = [*_operator._runs.values(), *(kind for kinds in _operator._kinds.values() for kind in kinds)]
    held = list(map(sys.getrefcount, found))
    before = resident()
    for n in range(100_000 if way == "c" else 10_000):
        scaled(x, y, 2.0)
        if n % 10 == 0:
            scaled(followed, y, 2.0)
            scaled(other, y, 2.0)
            with contextlib.suppress(RuntimeError, NotImplementedError):
                _operator.find((x, wrong, 2.0))
    gc.collect()
    assert [sys.getrefcount(z) for z in (x, y, followed, other, wrong, 2.0, scaled)] == noted
    assert list(map(sys.getrefcount, found)) == held
    assert resident() - before < 4 << 20


class Compiled:
    """A stand-in for a kernel that Triton compiled: what it is launched with goes to `handed`."""

    arg_names = ("x", "pair", "out", "n")

    def __init__(self, handed):
        run = lambda *given: handed(given[9:])  # noqa: E731  # behind grid, stream and what no hook asks for
        self.compiled = SimpleNamespace(function="function", packed_metadata=(4, 1, 0), run=run)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.compiled


@pytest.fixture
def device(way, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_launch, "_device", lambda: 0)
    monkeypatch.setattr(_launch, "_stream", lambda index: 100)
    return torch.device("cuda", 0)


def test_threads_do_not_meet(device, monkeypatch):
    """Each launch gets the addresses of its own call, whichever thread runs in between."""
    wrong, own, done = [], threading.local(), []

    def handed(given):
        for _ in range(3):  # others come in
            sum(range(20))
        if given != (own.x.data_ptr(), (own.y.data_ptr(), 0), own.out.data_ptr(), 5):
            wrong.append(given)
        done.append(1)

    launch = Launch(Compiled(handed), (7,), 5)
    first = torch.empty(4)
    launch(device, first, (first, None), first)
    interval = sys.getswitchinterval()

    def work():
        for n in range(400):
            own.x, own.y, own.out = torch.empty(n + 1), torch.empty(3), torch.empty(n + 2)
            launch(device, own.x, (own.y, None), own.out)
            z, y = torch.full((2, 4), float(n)), torch.full((2, 4), 0.5)
            if not scaled(z, y, 2.0).eq(n).all():
                wrong.append(n)

    try:
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for n in range(20):  # and what is known is forgotten meanwhile
            known(2, 4)
            if n % 5 == 0:
                forget()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert len(done) == 6 * 400


def test_each_launch_asks_for_the_stream_and_device(device, monkeypatch):
    streams = iter(range(1000))
    monkeypatch.setattr(_launch, "_stream", lambda index: next(streams))
    index = [0]
    monkeypatch.setattr(_launch, "_device", lambda: index[0])
    entered = []

    @contextlib.contextmanager
    def within(device):
        entered.append(device)
        before, index[0] = index[0], 0
        yield
        index[0] = before

    monkeypatch.setattr(torch.cuda, "device", within)
    seen, x = [], torch.empty(4)
    kernel = Compiled(None)
    kernel.compiled.run = lambda *given: seen.append(given[3])
    launch = Launch(kernel, (7,), 5)
    for _ in range(4):
        launch(device, x, (x, None), x)
    assert seen == [0, 1, 2]
    del entered[:]
    index[0] = 1
    launch(device, x, (x, None), x)
    assert (seen, entered) == ([0, 1, 2, 3], [device])


def test_nothing_is_kept_of_launches(device):
    """Nor of those that fail."""
    state = [None]

    def handed(given):
        if state[0] is not None:
            raise state[0]

    launch = Launch(Compiled(handed), (7,), 123456789)
    x, y, sparse = torch.empty(4), torch.empty(5), torch.eye(3).to_sparse()
    launch(device, x, (y, None), x)
    number = launch._numbers[0]
    launch(device, x, (y, None), x)
    noted = [sys.getrefcount(z) for z in (x, y, sparse, number, None)][:-1]
    for n in range(20_000):
        state[0] = ValueError("of the launch") if n % 3 == 0 else None
        try:
            launch(device, x, (y, None), x)
        except ValueError:
            assert n % 3 == 0
        for wrong in ((x, (sparse, None), x), (sparse, (y, None), x), (x, (y, 3), x), (3, (y, None), x)):
            if n % 100 == 0:
                state[0] = None
                with pytest.raises((RuntimeError, TypeError, NotImplementedError, AttributeError)):
                    launch(device, *wrong)
    state[0] = wrong = None
    gc.collect()
    assert [sys.getrefcount(z) for z in (x, y, sparse, number)] == noted


def test_more_arguments_than_there_is_room_for_at_once(device):
    seen = []
    kernel = Compiled(None)
    kernel.compiled.run = lambda *given: seen.append(given)
    launch = Launch(kernel, (7,), *range(200))
    tensors = [torch.empty(n + 1) for n in range(150)]
    for _ in range(2):
        launch(device, *tensors)
    assert seen[0][9:] == (*(x.data_ptr() for x in tensors), *range(200))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_goes_on(way):
    x, y = known(2, 4)
    child = os.fork()
    if child == 0:  # no test's machinery may run here
        code = 1
        with contextlib.suppress(BaseException):
            z = torch.full((2, 4), 3.0)
            right = all(bool(scaled(z, torch.ones(2, 4), 2.0).eq(6).all()) for _ in range(10))
            known(3, 7)
            code = 0 if right else 1
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close(scaled(x, y, 2.0), x * y * 2)


def test_an_operator_goes_to_another_process():
    pickled = pickle.dumps(linear)
    assert pickle.loads(pickled) is linear
    program = (
        f"import pickle, torch; linear = pickle.loads({pickled!r}); "
        "print(linear(torch.ones(3, 32).bfloat16(), torch.ones(16, 32).bfloat16()).sum().item())"
    )
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert float(told) == 3 * 16 * 32


WRONG = [
    ("Front", ()),
    ("Front", (1, *[None] * 9)),
    ("Kind", (None,) * 9),
    ("Kind", (None, None, None, False, [1], (int,), None, int, int, None)),
    ("Kind", (None, None, None, False, (1, 2), (int,), None, int, int, None)),
    ("Launcher", (None,) * 14),
    ("Launcher", (print, True, [1], (), (), b"", 0, {}, None, None, None, None, None, None)),
    ("Launcher", (print, True, (), (), (), "", 0, {}, None, None, None, None, None, None)),
]


@pytest.mark.parametrize(("name", "given"), WRONG)
def test_wrong_arguments_of_c(name, given):
    module = _in_c.compiled()
    if module is None:
        pytest.skip("there is no C compiler here")
    with pytest.raises((TypeError, ValueError)):
        getattr(module, name)(*given)
    with pytest.raises(TypeError):
        getattr(module, name)(*given, more=1)


def test_a_launcher_takes_one_tuple(device):
    launch = Launch(Compiled(lambda given: None), (7,), 5)
    x = torch.empty(4)
    for _ in range(2):
        launch(device, x, (x, None), x)
    for given in ((), (1,), ([x],), ((x,), 1)):
        with pytest.raises((TypeError, IndexError)):
            launch._bound(*given)
