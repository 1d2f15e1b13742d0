"""Which kernels a call of attention gets on a Hopper GPU; `test_attention_hopper*.py` play them."""

from __future__ import annotations

import math

import pytest
import torch
from kernelmark.kernels.attention import _dispatch as module


def test_hopper_is_chosen_by_capability_and_shape(monkeypatch):
    for capability in ((0, 0), (8, 0), (10, 0)):
        module.hopper_modules.cache_clear()
        monkeypatch.setattr(module, "capability", lambda device, c=capability: c)
        assert module.hopper_modules(torch.device("cpu")) is None
    module.hopper_modules.cache_clear()
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    hopper = module.hopper_modules(torch.device("cpu")).common
    module.hopper_modules.cache_clear()

    def fits(H=2, S=1024, D=64, dtype=torch.bfloat16, widths=hopper.WIDTHS):
        x = torch.empty(1, H, S, D, dtype=dtype)
        return hopper.fits(x, x, x, widths)

    assert fits()
    assert fits(S=1280, D=128, dtype=torch.float16)
    assert fits(D=96)
    assert fits(D=40)
    assert fits(D=256, widths=hopper.FORWARD_WIDTHS)
    assert fits(D=192, widths=hopper.FORWARD_WIDTHS)
    assert not fits(D=256)
    assert fits(S=1)
    assert fits(S=5000)
    assert not fits(D=92)
    assert not fits(D=32)
    assert not fits(dtype=torch.float32)
    stored = torch.empty(2, 100, 7, 64, dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in stored.split([4, 1, 2], 2))
    assert hopper.fits(q, k, v)
    assert hopper.fits(q, k[:, :, :50], v[:, :, :50])
    assert not hopper.fits(q, k[:, :, :0], v[:, :, :0])
    # Strides and addresses that a tensor map does not take.
    odd = torch.empty(2, 4, 100, 68, dtype=torch.bfloat16)
    assert not hopper.fits(odd[..., :64], k, v)
    assert not hopper.fits(torch.empty(2, 4, 100, 72, dtype=torch.bfloat16)[..., 4:68], k, v)
    assert not hopper.fits(q, k.expand(2, 1, 100, 64)[:1].expand(2, 1, 100, 64), v)
    assert not hopper.fits(q.mT.contiguous().mT, k, v)
    assert hopper.mapped(odd[..., :64]).is_contiguous()
    assert hopper.mapped(q) is q


@pytest.fixture
def hopper(monkeypatch):
    """The modules for Hopper, as if the device were one; `test_attention_hopper*.py` play them."""
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    module.hopper_modules.cache_clear()
    modules = module.hopper_modules(torch.device("cpu"))
    module.hopper_modules.cache_clear()
    monkeypatch.setattr(module, "hopper_modules", lambda device: modules)
    return modules


@pytest.mark.parametrize(("D", "kernels"), [(64, "forward"), (128, "forward"), (256, "paired")])
def test_sinks_and_caps_on_hopper(monkeypatch, hopper, D, kernels):
    taken = []
    for each in (hopper.paired, hopper.forward):
        monkeypatch.setattr(each, "forward", lambda *given, each=each: taken.append((each, given[-2:])))
    q, k, v = (torch.zeros(1, 2, 512, D, dtype=torch.bfloat16) for _ in range(3))
    strided = torch.zeros(4)[::2]
    module.launch_forward(q, k, v, True, 0, strided, 30.0, path="hopper")
    ((each, (sinks, cap)),) = taken
    assert each is getattr(hopper, kernels)
    assert sinks.is_contiguous()
    assert cap == 30.0


def test_gradients_with_sinks_and_caps_on_hopper(monkeypatch, hopper):
    """A cap is no work for the deterministic kernels; sinks change nothing in either."""
    taken = []
    deterministic, unordered = hopper.deterministic, hopper.backward
    for each in (deterministic, unordered):
        monkeypatch.setattr(each, "backward", lambda *_, each=each, **more: taken.append((each, more)))
    q, k, v, out, grad = torch.randn(5, 1, 1, 200, 64, dtype=torch.float32).bfloat16()
    lse, sinks = torch.zeros(1, 1, 200), torch.ones(1)

    def kernels(sinks, cap, path=None):
        ds = module.launch_backward(grad, q, k, v, out, lse, True, 0, None, sinks, cap, path=path)[3]
        if sinks is not None:  # delta's rows have room for 256
            delta = (out.double() * grad.double()).sum(-1)
            torch.testing.assert_close(ds.double(), -(math.e * delta).sum().view(1), rtol=1e-3, atol=1e-2)
        return taken.pop()

    assert kernels(sinks, 0.0) == (unordered, {"cap": 0.0})
    assert kernels(None, 30.0) == (unordered, {"cap": 30.0})
    assert kernels(sinks, 0.0, path="hopper") == (deterministic, {})
    with pytest.raises(NotImplementedError, match="kernels for Hopper do not take"):
        kernels(None, 30.0, path="hopper")


def test_sinks_and_caps_can_be_left_to_the_portable_kernels(monkeypatch, hopper):
    monkeypatch.setattr(module, "TAKEN", frozenset())
    q, k, v = (torch.zeros(1, 1, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    for options in ({"sinks": torch.zeros(1)}, {"cap": 30.0}):
        with pytest.raises(NotImplementedError, match="kernels for Hopper do not take"):
            module.launch_forward(q, k, v, True, path="hopper", **options)


def test_forward_on_hopper_by_columns(monkeypatch, hopper):
    taken = []
    for each in (hopper.paired, hopper.forward):
        monkeypatch.setattr(each, "forward", lambda *given, each=each: taken.append((each, given)))

    def kernel(D, window=0, path=None, schedule=None, S=1024, causal=True):
        q, k, v = (torch.zeros(1, heads, S, D, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out, lse = module.launch_forward(q, k, v, causal, window, path=path, schedule=schedule)
        each, given = taken.pop()
        assert all(a is b for a, b in zip(given, (q, k, v, out, lse), strict=False))
        return each, given[5:-2]

    # The last is how many query heads have 24 MiB of K and V, two of them the same.
    assert kernel(64) == (hopper.forward, (True, 0, 192))
    assert kernel(64, path="hopper") == (hopper.forward, (True, 0, 192))
    assert kernel(48, S=1280) == (hopper.forward, (True, 0, 204))
    assert kernel(64, window=300) == (hopper.forward, (True, 300, 192))
    assert kernel(64, window=100) == (hopper.forward, (True, 100, 4))
    assert kernel(72) == (hopper.forward, (True, 0, 170))
    assert kernel(128) == (hopper.forward, (True, 0, 96))
    # With a full mask those of one key head.
    assert kernel(64, causal=False) == (hopper.forward, (False, 0, 2))
    schedule = hopper.paired.SCHEDULES[64, True]
    assert kernel(64, path="hopper", schedule=schedule) == (hopper.paired, (True, 0, schedule))
    assert kernel(256) == (hopper.paired, (True, 0, None))


@pytest.mark.parametrize(
    ("D", "keys", "cap", "takes"),
    [
        (256, 200, 0.0, True),
        (136, 200, 0.0, True),
        (192, 300, 0.0, False),  # other keys than queries
        (256, 200, 30.0, True),
        (252, 200, 0.0, False),  # rows of no multiple of 16 bytes
        (128, 200, 0.0, False),  # the unordered kernel's
    ],
)
@pytest.mark.parametrize("fixed", [True, False])
def test_gradients_of_wide_heads_on_hopper(monkeypatch, hopper, fixed, D, keys, cap, takes):
    """Deterministic or not; prepared or not."""
    taken = []
    monkeypatch.setattr(hopper.wide, "backward", lambda *given: taken.append((given[8].shape, given[-1])))
    for each in (hopper.deterministic, hopper.backward):
        monkeypatch.setattr(each, "backward", lambda *given, **more: taken.append("others"))
    monkeypatch.setattr(hopper.backward, "run", lambda *given: taken.append("others"))
    monkeypatch.setattr(hopper.deterministic, "statistics", lambda out, grad, lse: (lse, lse))
    monkeypatch.setattr(hopper.deterministic, "run_statistics", lambda plan, out, grad, lse, sums: (lse, lse))
    monkeypatch.setattr(module, "planned_backward", lambda *_: lambda *given: taken.append("portable"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed)
    q, (k, v) = torch.zeros(1, 2, 200, D).bfloat16(), torch.zeros(2, 1, 2, keys, D).bfloat16()
    given = q, q, k, v, q, torch.zeros(1, 2, 200), True, 0, None, None, cap
    module.launch_backward(*given)
    module.prepare_backward(*given)(*given)
    assert taken == [(v.shape, cap) if takes else "others" if D == 128 else "portable"] * 2


@pytest.mark.parametrize(
    ("D", "Dv", "keys", "takes"),
    [
        (192, 128, 512, True),
        (136, 72, 300, True),
        (96, 64, 512, True),
        (64, 128, 512, True),
        (192, 64, 512, False),  # no model's
        (256, 128, 512, False),
        (192, 32, 512, False),
        (180, 128, 512, False),  # rows of no multiple of 16 bytes
        (192, 128, 0, False),
    ],
)
def test_values_of_other_columns_on_hopper(monkeypatch, hopper, D, Dv, keys, takes):
    """Both passes, the backward one by the deterministic kernels; prepared or not, the same have them."""
    taken = []
    for name in ("forward", "run"):
        monkeypatch.setattr(hopper.forward, name, lambda *given: taken.append("hopper"))
    monkeypatch.setattr(hopper.deterministic, "statistics", lambda out, grad, lse: (lse, lse))
    monkeypatch.setattr(hopper.deterministic, "backward", lambda *given: taken.append("hopper"))
    for name in ("planned_forward", "planned_backward"):
        monkeypatch.setattr(module, name, lambda *_: lambda *given: taken.append("portable"))
    q, k = (torch.zeros(1, 2, S, D, dtype=torch.bfloat16) for S in (512, keys))
    v = torch.zeros(1, 2, keys, Dv, dtype=torch.bfloat16)
    assert hopper.forward.takes(q, k, v) is takes
    if not keys:
        return
    out, lse = module.launch_forward(q, k, v, False)
    assert out.shape == (1, 2, 512, Dv)
    assert module.prepare_forward(q, k, v, False, 0)(q, k, v, False, 0)[0].shape == out.shape
    rest = False, 0, None, None, 0.0
    module.launch_backward(out, q, k, v, out, lse, *rest)
    module.prepare_backward(out, q, k, v, out, lse, *rest)(out, q, k, v, out, lse, *rest)
    # Gradients of fewer keys than queries are none of theirs.
    assert (
        taken == ["hopper" if takes else "portable"] * 2 + ["hopper" if takes and keys == 512 else "portable"] * 2
    )


def test_an_output_that_no_tensor_map_takes_is_written_by_the_portable_kernels(monkeypatch, hopper):
    taken = []
    monkeypatch.setattr(hopper.forward, "forward", lambda *given: taken.append("hopper"))
    monkeypatch.setattr(module, "planned_forward", lambda *_: lambda *given: taken.append("portable"))
    q, k, v = (torch.zeros(1, 2, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    for width in (72, 68):
        out = torch.zeros(1, 2, 1024, width, dtype=torch.bfloat16)[..., :64]
        assert module.launch_forward(q, k, v, True, out=out)[0] is out
    assert taken == ["hopper", "portable"]


def test_gradients_on_hopper_follow_the_switch_for_deterministic_algorithms(monkeypatch, hopper):
    deterministic, unordered = hopper.deterministic, hopper.backward
    taken = []
    for each in (deterministic, unordered):
        monkeypatch.setattr(each, "backward", lambda grad, *_, each=each, **more: taken.append((each, grad)))
    q, k, v, out = torch.zeros(4, 1, 1, 1024, 64, dtype=torch.bfloat16)
    # Contiguous, but where no descriptor can be.
    grad = torch.ones(1 + q.numel(), dtype=torch.bfloat16)[1:].view(q.shape)

    def kernels(window=0, path=None):
        module.launch_backward(grad, q, k, v, out, torch.zeros(1, 1, 1024), True, window, path=path)
        each, passed = taken.pop()
        assert passed.data_ptr() % 16 == 0
        assert torch.equal(passed, grad)
        return each

    assert kernels() is unordered
    assert kernels(window=100) is unordered
    assert kernels(window=100, path="hopper") is deterministic
    assert kernels(path="hopper") is deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels() is deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels() is unordered
    monkeypatch.setattr(unordered, "AVAILABLE", False)
    assert kernels() is deterministic


def test_gradients_on_hopper_of_other_keys_than_queries(monkeypatch, hopper):
    """By the unordered kernel where every query sees every key, and else by the portable ones."""
    taken = []
    monkeypatch.setattr(hopper.backward, "backward", lambda *_, **more: taken.append("hopper"))
    monkeypatch.setattr(module, "planned_backward", lambda *_: lambda *_: taken.append("portable"))
    q, out, grad = torch.zeros(3, 1, 1, 256, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 1, 1, 640, 64, dtype=torch.bfloat16)

    def kernels(causal=False, keys=640):
        given = q, k[:, :, :keys], v[:, :, :keys], out
        module.launch_backward(grad, *given, torch.zeros(1, 1, 256), causal)
        return taken.pop()

    assert kernels() == "hopper"
    assert kernels(causal=True) == "portable"
    assert kernels(keys=600) == "portable"
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels() == "portable"
    finally:
        torch.use_deterministic_algorithms(False)
