"""Calls that are prepared once, and launches past the just-in-time compiler: what they hand over, and when not."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from kernelmark.kernels import _launch
from kernelmark.kernels._launch import Launch, forget, prepared
from triton.backends.nvidia import driver as nvidia


@pytest.fixture
def made(way):
    """What was prepared for, and a function that is prepared so."""
    seen = []

    def prepare(x, size):
        seen.append((tuple(x.shape), x.stride(), x.dtype, size))
        return lambda x, size: (x.shape, size)

    return seen, prepared(prepare)


def test_a_call_is_prepared_once_for_tensors_that_are_alike(made):
    seen, call = made
    for _ in range(3):
        assert call(torch.empty(2, 4), 1) == ((2, 4), 1)
    assert seen == [((2, 4), (4, 1), torch.float32, 1)]


def test_what_is_forgotten_is_prepared_anew(made):
    seen, call = made
    for _ in range(2):
        call(torch.empty(2, 4), 1)
    forget()
    call(torch.empty(2, 4), 1)
    assert len(seen) == 2


def test_a_call_is_prepared_anew_for_what_differs(made):
    seen, call = made
    x = torch.empty(64)
    for tensor, size in (
        (x[:8].view(2, 4), 1),
        (x[:8].view(4, 2), 1),  # the same memory with another shape
        (x[:8].view(4, 2).t(), 1),  # with other strides
        (x[:8].view(torch.int32).view(2, 4), 1),
        (x[1:9].view(2, 4), 1),  # elsewhere between two boundaries
        (x[:8].view(2, 4), 2),
    ):
        assert call(tensor, size) == (tensor.shape, size)
    assert len(seen) == 6
    assert call(x[4:12].view(2, 4), 1) == ((2, 4), 1)
    assert len(seen) == 6


@pytest.fixture
def looks(monkeypatch):
    """How often arguments were looked at one by one."""
    seen = []
    monkeypatch.setattr(
        _launch, "likeness", lambda arguments, likeness=_launch.likeness: seen.append(1) or likeness(arguments)
    )
    return seen


@pytest.fixture
def paired(way):
    """What was prepared for, and a function of two tensors and a number that is prepared so."""
    seen = []

    def prepare(x, y, size):
        seen.append((x.shape, y.shape, size))
        return lambda x, y, size: (x.shape, y.shape, size)

    return seen, prepared(prepare)


def test_arguments_that_come_again_are_known_at_a_glance(paired, looks):
    assert _launch._guards is not None
    seen, call = paired
    for _ in range(5):
        assert call(torch.empty(2, 4), torch.empty(3), 1) == ((2, 4), (3,), 1)
    assert (len(seen), len(looks)) == (1, 2)


KNOWN = torch.zeros(64)[:8].view(2, 4)


@pytest.mark.parametrize(
    ("x", "size", "times"),
    [
        (torch.zeros(4, 2), 1, 2),
        (torch.zeros(4, 2).t(), 1, 2),
        (torch.zeros(2, 4).int(), 1, 2),
        (torch.zeros(2, 4, device="meta"), 1, 2),
        (torch.zeros(64)[1:9].view(2, 4), 1, 2),
        (torch.zeros(2, 4), 2, 2),
        (torch.zeros(2, 4), "1", 2),
        # Alike as keys of what is prepared.
        (torch.zeros(2, 4), True, 1),
        (torch.nn.Parameter(torch.zeros(2, 4)), 1, 1),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_what_differs_is_not_known_at_a_glance(paired, looks, x, size, times, place):
    seen, call = paired
    for _ in range(3):
        call(KNOWN, KNOWN.clone(), 1)
    del looks[:]
    pair = (x, KNOWN) if place == 0 else (KNOWN, x)
    assert call(*pair, size) == (*(y.shape for y in pair), size)
    assert (len(seen), len(looks)) == (times, 1)
    call(KNOWN, KNOWN.clone(), 1)
    assert (len(seen), len(looks)) == (times, 1)


def test_the_same_memory_with_other_strides_is_not_known_at_a_glance(paired, looks):
    """Memory that was freed and given to another: its address says nothing."""
    seen, call = paired
    x, y = torch.zeros(4, 4), torch.zeros(4, 4)
    for _ in range(3):
        call(x, y, 1)
    assert call(x, y.t(), 1) == call(x, y, 1)
    assert (len(seen), len(looks)) == (2, 3)
    y.t_()  # of the very object
    call(x, y, 1)
    assert (len(seen), len(looks)) == (2, 4)
    del y
    call(x, torch.zeros(4, 4), 1)
    assert (len(seen), len(looks)) == (2, 4)


def test_a_tensor_in_the_place_of_a_number_is_no_number_that_is_equal(paired):
    _, call = paired
    call.numbers = {2: "size"}
    x, y = torch.empty(2, 4), torch.empty(2, 4)
    for _ in range(3):
        call(x, y, 1)
    with pytest.raises(TypeError, match="size must be a number, not a tensor"):
        call(x, y, torch.ones(()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("other", ["negative", "subclass", "nested", "sparse", "none"])
def test_other_tensors_beside_one_that_is_known(way, other):
    """Guards would end the process at the nested one."""
    call = prepared(lambda x, y: lambda x, y: "strided")
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    for _ in range(3):
        assert call(x, y) == "strided"

    class Own(torch.Tensor):
        pass

    kinds = {
        "negative": lambda: torch._neg_view(y),
        "subclass": lambda: y.as_subclass(Own),
        "nested": lambda: torch.nested.nested_tensor([y, y]),
        "sparse": y.to_sparse,
        "none": lambda: None,
    }
    z = kinds[other]()
    if other in ("nested", "sparse"):
        with pytest.raises(RuntimeError):
            call.find((x, z))
    elif other == "none":
        found, differentiate = call.find((x, z))
        assert found not in call._runs.values()
        assert not differentiate
    else:
        assert call.find((x, z)) == (None, False)


def test_whether_autograd_wants_to_know_is_known_too(paired):
    _, call = paired
    x, y, z = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    for _ in range(3):
        call(z, x, 1)
        call(z, y, 1)
    assert call.find((z, y, 1))[1]
    assert not call.find((z, x, 1))[1]
    with torch.no_grad():
        assert not call.find((z, y, 1))[1]
    x.requires_grad_()
    assert call.find((z, x, 1))[1]


def test_only_so_many_kinds_are_known_at_a_glance(paired, looks):
    """Those beyond are looked at one by one, each time."""
    seen, call = paired
    sizes = range(_launch.FAMILIAR + 2)
    x, y = torch.empty(2, 4), torch.empty(2, 4)
    for _ in range(3):
        for size in sizes:
            assert call(x, y, size) == ((2, 4), (2, 4), size)
    assert len(seen) == len(sizes)
    assert sum(map(len, call._kinds.values())) == _launch.FAMILIAR
    del looks[:]
    for size in sizes:
        call(x, y, size)
    assert len(looks) == 2


def test_the_same_tensor_twice(paired, looks):
    """Guards take it for none that they know."""
    seen, call = paired
    x = torch.empty(2, 4)
    for _ in range(9):
        assert call(x, x, 1) == ((2, 4), (2, 4), 1)
    assert (len(seen), len(looks)) == (1, 9)
    assert not sum(map(len, call._kinds.values()))


def test_what_is_forgotten_is_not_known_at_a_glance(paired):
    seen, call = paired
    for _ in range(3):
        call(KNOWN, KNOWN.clone(), 1)
    forget()
    call(KNOWN, KNOWN.clone(), 1)
    assert len(seen) == 2


def test_without_guards_all_is_looked_at(paired, looks, monkeypatch):
    monkeypatch.setattr(_launch, "_guards", None)
    seen, call = paired
    for _ in range(4):
        call(KNOWN, KNOWN.clone(), 1)
    assert (len(seen), len(looks)) == (1, 4)


def test_guards_that_see_less_are_not_trusted(monkeypatch):
    class Blind:
        def __init__(self, *tensors, **dynamic):
            self.shape = tensors[0].shape

        def check(self, x):
            return x.shape == self.shape

    assert _launch._trusted_guards() is torch._C._dynamo.guards.TensorGuards
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Blind)
    assert _launch._trusted_guards() is None
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", lambda *tensors: None)  # called otherwise
    assert _launch._trusted_guards() is None
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert _launch._trusted_guards() is None


def test_memory_that_was_freed_and_given_to_another_shape(made):
    _, call = made
    for shape in ((3, 5), (5, 3), (15,), (3, 5)) * 8:
        x = torch.empty(shape)
        assert call(x, 0)[0] == shape
        del x


def test_only_so_many_kinds_are_remembered(made, monkeypatch):
    seen, call = made
    monkeypatch.setattr(_launch, "MOST", 4)
    for size in (*range(6), 5, 0):
        call(torch.empty(1), size)
    assert [x[-1] for x in seen] == [0, 1, 2, 3, 4, 5, 0]


def test_wrong_arguments_are_checked_before_anything_is_prepared():
    def check(x):
        raise TypeError("x is wrong")

    call = prepared(lambda x: pytest.fail("prepared"), check)
    for x in ([1.0], None, torch.empty(1)):
        with pytest.raises(TypeError, match="x is wrong"):
            call(x)


@triton.jit
def _add(pair, out, n, amount, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(pair[0] + at, at < n) + amount, at < n)


def test_a_launch_on_a_cpu_is_the_interpreters():
    launch = Launch(_add, (1,), 3, 2.0, BLOCK=4)
    for _ in range(2):
        x, out = torch.randn(3), torch.empty(3)
        launch(x.device, (x, None), out)
        assert torch.equal(out, x + 2)


class Kernel:
    """A stand-in for what Triton compiles: notes launches, the usual ones and those of what was compiled."""

    arg_names = ("pair", "out", "n", "BLOCK", "LAST")

    def __init__(self):
        self.usual, self.direct = [], []
        self.compiled = SimpleNamespace(
            function="function", packed_metadata="metadata", run=lambda *arguments: self.direct.append(arguments)
        )

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.usual.append((grid, arguments, constants))
            return self.compiled

        return launch


@pytest.fixture
def kernel(way, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_launch, "_device", lambda: 0)
    streams = iter(range(100, 200))
    monkeypatch.setattr(_launch, "_stream", lambda index: next(streams))
    return Kernel()


def test_later_launches_hand_addresses_to_the_compiled_kernel(kernel):
    device = torch.device("cuda", 0)
    launch = Launch(kernel, (7,), 5, LAST=2, BLOCK=64, num_warps=4)
    tensors = [torch.empty(3) for _ in range(6)]
    for x, y in zip(tensors[::2], tensors[1::2], strict=True):
        launch(device, (x, None), y)
    ((grid, arguments, constants),) = kernel.usual
    assert grid == (7,)
    assert arguments[0][0] is tensors[0]
    assert arguments[0][1] is None
    assert arguments[2:] == (5,)
    assert constants == {"BLOCK": 64, "LAST": 2, "num_warps": 4}
    # Each in its call's stream, and constants in the order of the kernel's.
    for n, (x, y) in enumerate((tensors[2:4], tensors[4:6])):
        head = 7, 1, 1, 100 + n, "function", "metadata", None, None, None
        assert kernel.direct[n] == (*head, (x.data_ptr(), 0), y.data_ptr(), 5, 64, 2)
    assert len(kernel.direct) == 2


def test_later_launches_of_tensors_alone(kernel):
    launch = Launch(kernel, (7, 2), 5, LAST=2, BLOCK=64)
    for _ in range(2):
        x, y = torch.empty(3), torch.nn.Parameter(torch.empty(3))
        launch(torch.device("cuda", 0), x, y)
    assert kernel.direct[0][:3] == (7, 2, 1)
    assert kernel.direct[0][9:] == (x.data_ptr(), y.data_ptr(), 5, 64, 2)


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_launches(kernel, monkeypatch, hook):
    launch = Launch(kernel, (7,), 5, LAST=2, BLOCK=64)
    monkeypatch.setattr(triton.knobs.runtime, hook, SimpleNamespace(calls=[print]))
    for _ in range(3):
        launch(torch.device("cuda", 0), (torch.empty(1), None), torch.empty(1))
    assert (len(kernel.usual), len(kernel.direct)) == (3, 0)


def test_an_unknown_version_of_triton_is_launched_as_usual(kernel, monkeypatch):
    monkeypatch.setattr(_launch, "_DIRECT", False)
    launch = Launch(kernel, (7,), 5, LAST=2, BLOCK=64)
    for _ in range(3):
        launch(torch.device("cuda", 0), (torch.empty(1), None), torch.empty(1))
    assert (len(kernel.usual), len(kernel.direct)) == (3, 0)


def test_numbers_may_differ_from_call_to_call(kernel):
    device = torch.device("cuda", 0)
    launch = Launch(kernel, (7,), 5, LAST=2, BLOCK=64)
    x = torch.empty(3)
    for rate in (0.5, 0.25):
        launch(device, x, numbers=((rate, 1.0),))
    ((_, arguments, _),) = kernel.usual
    assert arguments == (x, (0.5, 1.0), 5)
    assert kernel.direct[0][9:] == (x.data_ptr(), (0.25, 1.0), 5, 64, 2)


def launcher(arguments, tensordesc_meta=()):
    """Triton's own, of the version that is here, and what it hands to C."""
    handed = []
    made = object.__new__(nvidia.CudaLauncher)
    names = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    vars(made).update(dict.fromkeys(names, 0), num_ctas=1, global_scratch_align=1, profile_scratch_align=1)
    signature = {n: "tensordesc<bf16[8, 8]>" if n < len(tensordesc_meta) else "i64" for n in range(arguments)}
    made.arg_annotations, made.kernel_signature = "annotations", b"signature"
    made.launch = nvidia.wrap_handle_tensordesc(
        lambda *given: handed.append(tuple(tuple(x) if isinstance(x, list) else x for x in given)),
        signature,
        list(tensordesc_meta),
    )
    return made, handed


@pytest.mark.skipif(_launch._VERSION not in ((3, 6), (3, 7)), reason="launchers of other versions are not known")
def test_past_the_launcher_c_is_handed_the_same():
    run, handed = launcher(3)
    kernel = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    run(7, 2, 1, 100, "function", "metadata", None, None, None, 1, 2, 3)
    function, together, middle = _launch.straight(kernel)
    assert function is run.launch
    function(7, 2, 1, 100, *middle, *([[1, 2, 3]] if together else [1, 2, 3]))
    assert handed[0] == handed[1]


@pytest.mark.parametrize("change", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}])
def test_a_kernel_with_scratch_memory_goes_through_the_launcher(change):
    run, _ = launcher(1)
    vars(run).update(change)
    kernel = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    assert _launch.straight(kernel)[0] is run


@pytest.fixture
def mapped(way, monkeypatch):
    """A compiled kernel of two tensor maps, a tensor and a number; what C was handed, and maps that were made."""
    from kernelmark.kernels import _hopper

    run, handed = launcher(4, [{}, {}])
    made = []

    def make(x, metadata):
        made.append((x.base.data_ptr(), *x.strides))
        return [("map", *made[-1]), *x.shape, *x.strides]

    monkeypatch.setattr(_hopper, "make_map", make)
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", make)
    monkeypatch.setattr(_hopper, "current_device", lambda: 0)
    monkeypatch.setattr(_hopper, "current_stream", lambda index: 100)
    kernel = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    return _hopper, run, _hopper.Compiled(kernel), handed, made


def test_tensor_maps_are_kept_by_address_and_by_what_they_say(mapped):
    common, run, compiled, handed, made = mapped
    memory, out = torch.empty(2, 1024, dtype=torch.bfloat16), torch.empty(4)

    def maps(*shapes):
        tensors = [x.view(1, 1, *shape) for x, shape in zip(memory, shapes, strict=True)]
        return [common.tensor_map(x, 8) for x in tensors]

    for shapes, new in (
        (((16, 64), (16, 64)), 2),
        (((16, 64), (16, 64)), 0),
        (((64, 16), (16, 64)), 1),  # the same address with other strides
        (((64, 16), (64, 16)), 1),
        (((16, 64), (64, 16)), 0),
    ):
        before = len(made)
        given = maps(*shapes)
        compiled(7, (*given, out, 5))
        assert len(made) == before + new
        # As Triton would have handed it over.
        run(7, 1, 1, 100, "function", "metadata", None, None, None, *(x.map() for x in given), out.data_ptr(), 5)
        assert handed[-1] == handed[-2]
        del made[before + new :]


def test_only_so_many_tensor_maps_are_kept(mapped, monkeypatch):
    common, run, compiled, handed, _ = mapped
    monkeypatch.setattr(common, "MOST_MAPS", 3)
    memory, out = torch.empty(8, 1, 1, 16, 64, dtype=torch.bfloat16), torch.empty(4)
    for x in (*memory, *memory):
        given = [common.tensor_map(y, 8) for y in (x, memory[0])]
        compiled(7, (*given, out, 5))
        assert len(compiled._maps) <= 3
        run(7, 1, 1, 100, "function", "metadata", None, None, None, *(x.map() for x in given), out.data_ptr(), 5)
        assert handed[-1] == handed[-2]


def test_arguments_around_tensor_maps(mapped):
    """Maps between tensors and numbers, made for the call or kept, and nothing in a tensor's place."""
    common, run, compiled, handed, _ = mapped
    x, out = torch.empty(1, 1, 16, 64, dtype=torch.bfloat16), torch.empty(4)
    for y in (x, torch.empty_like(x)):
        given = [common.tensor_map(x, 8), common.flat_map(y, 8), out, None]
        compiled(7, tuple(given))
        usual = *map(common.usual, given[:2]), out.data_ptr(), None
        run(7, 1, 1, 100, "function", "metadata", None, None, None, *usual)
        assert handed[-1] == handed[-2]


def test_a_tensor_where_there_was_none_and_none_where_there_was_a_tensor(mapped):
    """Of a kernel that reads neither."""
    common, _, compiled, handed, _ = mapped
    x, out = torch.empty(1, 1, 16, 64, dtype=torch.bfloat16), torch.empty(4)
    maps = common.tensor_map(x, 8), common.tensor_map(x, 8)
    compiled(7, (*maps, out, None))
    compiled(7, (*maps, None, out))
    assert handed[0][-1][-2:] == (out.data_ptr(), None)
    assert handed[1][-1][-2] is None
    assert handed[1][-1][-1] is out


def test_maps_of_a_launcher_that_is_not_known_are_handed_over_whole(mapped):
    common, _, _, _, _ = mapped
    handed = []
    kernel = SimpleNamespace(
        run=lambda *given: handed.append(given[9:]), function="function", packed_metadata="metadata"
    )
    compiled = common.Compiled(kernel)
    x, out = torch.empty(1, 1, 16, 64, dtype=torch.bfloat16), torch.empty(4)
    for _ in range(2):
        compiled(7, (common.tensor_map(x, 8), out, 5))
        (found, *rest) = handed[-1]
        assert isinstance(found, common.TensorMap)
        assert found.base is x
        assert rest == [out.data_ptr(), 5]


def test_what_is_prepared_runs_on_its_device(made, monkeypatch):
    seen, call = made
    x, entered = torch.empty(2), []
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or contextlib.nullcontext())
    monkeypatch.setattr(_launch, "_device", lambda: 0)
    call(x, 1)
    (found,) = call._runs.values()
    found.index = 1
    call(x, 1)
    found.index = 0
    call(x, 1)
    assert (entered, len(seen)) == ([1], 1)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 1, 5)])
def test_room_is_dense(shape):
    for x in (_launch.room(shape, torch.float16, torch.device("cpu"))(), _launch.room_like(torch.empty(shape))()):
        assert (x.shape, x.stride()) == (torch.empty(shape).shape, torch.empty(shape).stride())
    x = _launch.room((4, 5), torch.float16, torch.device("cpu"), (1, 4))()
    assert (x.dtype, x.stride()) == (torch.float16, (1, 4))
