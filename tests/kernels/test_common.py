"""What the kernels share, where no operator's own tests show it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernelmark.kernels import _common
from kernelmark.kernels.activation.gelu import gelu
from kernelmark.kernels.matmul.matmul import matmul
from kernelmark.kernels.norm.rms_norm import rms_norm
from torch._subclasses.fake_tensor import FakeTensorMode


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
