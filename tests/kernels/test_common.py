"""What the kernels share, where no operator's own tests show it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernelmark.kernels import _common
from kernelmark.kernels.activation.gelu import gelu
from kernelmark.kernels.loss.cross_entropy import cross_entropy
from kernelmark.kernels.loss.fused_linear_cross_entropy import fused_linear_cross_entropy
from kernelmark.kernels.matmul.matmul import matmul
from kernelmark.kernels.norm.rms_norm import rms_norm
from kernelmark.kernels.position.rope import rope
from kernelmark.kernels.state_space.selective_scan import selective_scan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize(
    ("capability", "roomy"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_roomy(capability, roomy):
    """By CUDA's programming guide; not every later device has more than an earlier one."""
    assert _common.roomy(capability) == roomy


@pytest.mark.parametrize(
    ("architecture", "converts"),
    [
        ((8, 6), False),
        ((8, 9), True),
        ((9, 0), True),
        ("gfx942", True),
        ("gfx950", True),
        ("gfx1201", True),
        ("gfx1100", False),
        ("gfx90a", False),
    ],
)
def test_e4m3_is_refused_where_nothing_converts_to_it(monkeypatch, architecture, converts):
    there = SimpleNamespace(is_cuda=True, device="a device")
    monkeypatch.setattr(_common, "architecture", lambda device: architecture)
    if converts:
        _common.needs_e4m3("it", there)
    else:
        with pytest.raises(
            NotImplementedError, match="it needs a GPU that converts to E4M3: compute capability 8.9"
        ):
            _common.needs_e4m3("it", there)
    _common.needs_e4m3("it", SimpleNamespace(is_cuda=False))


def test_an_architecture_is_amds_name_or_a_compute_capability(monkeypatch):
    monkeypatch.setattr(_common, "capability", lambda device: (9, 0))
    assert _common.architecture(torch.device("cuda")) == (9, 0)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    told = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert _common.architecture(torch.device("cuda")) == "gfx942"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch's own forward mode uses
def test_forward_mode_is_refused():
    """It would give a derivative of zero without a word."""
    x = torch.randn(3, 8)
    with torch.autograd.forward_ad.dual_level():
        assert gelu(x).shape == x.shape
        with pytest.raises(NotImplementedError, match="gelu has no derivative in forward mode"):
            gelu(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.vmap(gelu)(x).shape == x.shape  # a dual level alone asks for nothing


@pytest.mark.parametrize(
    "derivative",
    [
        lambda x: torch.func.jvp(gelu, (x,), (x,)),
        lambda x: torch.func.jvp(torch.vmap(gelu), (x,), (x,)),
        torch.func.jacfwd(gelu),
        torch.vmap(torch.func.jacfwd(gelu)),
    ],
    ids=["jvp", "jvp of vmap", "jacfwd", "vmap of jacfwd"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
def test_forward_mode_of_torch_func_is_refused(derivative):
    with pytest.raises(NotImplementedError, match="gelu has no derivative in forward mode"):
        derivative(torch.randn(3, 8))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
def test_a_gradient_of_torch_func_is_refused_without_a_backward_pass():
    """It would be zero without a word."""
    a, b = torch.randn(3, 8), torch.randn(8, 4)

    def total(a):
        return matmul(a, b).sum()

    batched = torch.vmap(matmul, (0, None))
    with pytest.raises(NotImplementedError, match="matmul has no backward pass"):
        torch.func.grad(total)(a)
    with pytest.raises(NotImplementedError, match="matmul has no backward pass"):
        torch.func.grad(lambda a: batched(a, b).sum())(a[None])
    torch.testing.assert_close(batched(a[None], b)[0], matmul(a, b))


class Own(torch.Tensor):
    """A subclass, whose calls go through the dispatcher."""


@pytest.mark.parametrize(
    "call",
    [
        lambda x: gelu(x),
        lambda x: torch.ops.kernelmark.gelu(x, "none"),
        lambda x: gelu(x.as_subclass(Own)).as_subclass(torch.Tensor),
        lambda x: checkpoint(gelu, x, use_reentrant=False),
        lambda x: cross_entropy(x, torch.tensor([1, 2, 3])),
        lambda x: cross_entropy(x, torch.tensor([1, 2, 3]), gradient="forward"),
        lambda x: fused_linear_cross_entropy(x, torch.ones(4, 8), torch.tensor([1, 2, 3])),
    ],
    ids=["eager", "torch.ops", "subclass", "checkpoint", "loss", "gradient made forward", "fused loss"],
)
def test_a_second_derivative_is_refused(call):
    """Also of a sum, whose own gradient is a constant: a penalty on it would else count for nothing."""
    x = torch.randn(3, 8, requires_grad=True)
    for loss in (lambda y: y.sum(), lambda y: y.square().sum()):
        y = call(x)
        (gradient,) = torch.autograd.grad(loss(y), x, create_graph=True)
        with pytest.raises(RuntimeError, match="is differentiable once"):
            (loss(y) + gradient.square().sum()).backward()


def test_a_second_derivative_is_refused_where_it_is_asked_for_by_its_input():
    x = torch.randn(3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gelu is differentiable once"):
        torch.autograd.grad(gradient.sum(), x, allow_unused=True)


def test_gradients_of_which_a_graph_is_made_are_the_same():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    given = torch.randn(3, 8)
    found, wanted = (
        torch.autograd.grad(rms_norm(x, weight), (x, weight), given, create_graph=kept) for kept in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    # What depends on nothing that requires a gradient is a constant.
    table = torch.randn(3, 4)
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    turned, _ = rope(q, q.detach(), table, table)
    assert not torch.autograd.grad(turned.sum(), q, create_graph=True)[0].requires_grad


def test_memory_may_have_the_negative_of_a_tensors_numbers():
    """As that of a conjugate's imaginary part has, which this kernel reads where it lies."""
    u, A, pairs = torch.randn(1, 3, 9), -torch.rand(3, 4), torch.randn(1, 4, 9, dtype=torch.complex64)
    B = pairs.conj().imag
    assert B.is_neg()
    wanted = selective_scan(u, u.abs(), A, -pairs.imag, pairs.real)
    assert torch.equal(selective_scan(u, u.abs(), A, B, pairs.real), wanted)
    own = u.clone().requires_grad_()
    assert torch.equal(selective_scan(own, u.abs(), A, B, pairs.real), wanted)


def test_memory_may_have_the_negative_of_numbers_that_lie_as_others():
    """Whose launch was prepared already, and would read them with the other sign."""
    numbers = torch.randn(5, dtype=torch.complex64)
    opposite, wanted = numbers.conj().imag[:, None], -numbers.imag[:, None].contiguous()
    assert opposite.is_neg()
    x, weight = torch.randn(5, 1), torch.randn(1)
    for call in (
        lambda y: rms_norm(y, weight),
        lambda y: rms_norm(x, y[0]),
        lambda y: gelu(y[0]),
        lambda y: matmul(x, y.t()),
    ):
        assert torch.equal(call(wanted), call(opposite))
    for followed in (wanted, opposite):
        followed.requires_grad_()
    found, expected = (torch.autograd.grad(gelu(y[0]).sum(), y)[0] for y in (opposite, wanted))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, target: cross_entropy(x, target),
        lambda x, target: cross_entropy(x, target, gradient="forward"),
        lambda x, target: fused_linear_cross_entropy(x, torch.eye(8), target),
    ],
    ids=["backward", "forward", "fused"],
)
def test_the_gradient_of_a_loss_that_a_conjugate_follows(loss):
    """What autograd gives as the gradient of the loss is memory's negative."""
    x, target = torch.randn(3, 8, requires_grad=True), torch.tensor([1, 2, 3])
    (plain,) = torch.autograd.grad(2.0 * loss(x, target), x)
    wave = torch.complex(torch.zeros(()), loss(x, target)).conj() * 2j  # its real part is 2 · loss
    (found,) = torch.autograd.grad(wave.real, x)
    assert torch.equal(found, plain)


def test_a_number_is_no_tensor():
    """It would stay what it was at the first call."""
    x, weight = torch.randn(3, 8), torch.ones(8)
    for _ in range(2):
        with pytest.raises(TypeError, match="eps must be a number, not a tensor"):
            rms_norm(x, weight, torch.tensor(1e-6))
    for eps in (None, "1e-6"):
        with pytest.raises(TypeError, match=f"eps must be a number, not {type(eps).__name__}"):
            rms_norm(x, weight, eps)
    assert torch.equal(rms_norm(x, weight, np.float32(1e-6)), rms_norm(x, weight, float(np.float32(1e-6))))


def test_inductor_knows_an_operator_before_it_compiles():
    """It says in a text what it does not know, which took as long as it liked of deep models."""
    from torch._inductor import lowering

    schema = "told(Tensor x) -> Tensor"
    call = _common.operator(schema, lambda x: x.clone(), torch.empty_like)
    defined = torch.ops.kernelmark.told.default
    call(torch.ones(2))
    assert defined not in lowering.lowerings
    with FakeTensorMode() as mode:
        call(mode.from_tensor(torch.ones(2)))
    assert defined in lowering.lowerings
    tag = lowering.get_layout_constraint_tag(defined, with_default=True)
    assert lowering.maybe_layout_constraints(defined) is lowering.tag_to_layout_constraint(tag) is not None


def test_a_version_that_names_its_parts_otherwise_is_left_alone():
    for lowering in (SimpleNamespace(), SimpleNamespace(lowerings={})):
        _common._announce("an operator", lowering)
