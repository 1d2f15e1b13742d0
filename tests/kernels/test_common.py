"""What the kernels share, where no operator's own tests show it."""

from types import SimpleNamespace

import pytest
from kernelmark.kernels import _common


@pytest.mark.parametrize(
    ("capability", "roomy"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_roomy(capability, roomy):
    """By CUDA's programming guide; not every later device has more than an earlier one."""
    assert _common.roomy(capability) == roomy


def test_e4m3_is_refused_where_nothing_converts_to_it(monkeypatch):
    there = SimpleNamespace(is_cuda=True, device="a device")
    monkeypatch.setattr(_common, "capability", lambda device: (8, 9))
    _common.needs_e4m3("it", there)
    monkeypatch.setattr(_common, "capability", lambda device: (8, 6))
    with pytest.raises(NotImplementedError, match="it needs a GPU of compute capability 8.9"):
        _common.needs_e4m3("it", there)
    _common.needs_e4m3("it", SimpleNamespace(is_cuda=False))
