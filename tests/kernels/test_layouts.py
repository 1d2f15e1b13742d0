"""Inputs whose last dimension is not contiguous and that begin at an odd address: the right answer all the same,
forward and backward. Through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels import _hopper
from kernelmark.kernels.attention import _attention_sparse_hopper, _tiling

HEADS = {"B": 1, "H": 2, "Hkv": 1, "D": 16}
CASES = [
    ("attention", HEADS | {"S": 70}, {"sinks": True}),
    ("attention_window", HEADS | {"S": 70, "W": 20}, {"cap": 30}),
    ("attention_sparse", HEADS | {"S": 140}, {"pattern": "learned", "sparsity": 50}),
    ("attention_varlen", {"B": 2, "H": 2, "Hkv": 1, "S": 40, "D": 16}, {}),
    ("attention_decode", {"B": 2, "Sq": 3, "H": 4, "Hkv": 2, "S": 40, "D": 16}, {"page": 16, "sinks": True}),
    ("attention_mla", {"B": 1, "H": 2, "S": 40, "D": 24, "Dv": 16}, {}),
    ("attention_mla_decode", {"B": 2, "Sq": 1, "H": 2, "S": 40, "C": 32, "R": 16}, {"page": 16}),
    ("rms_norm", {"B": 1, "S": 5, "D": 37}, {}),
    ("add_rms_norm", {"B": 1, "S": 5, "D": 37}, {}),
    ("layer_norm", {"B": 1, "S": 5, "D": 37}, {}),
    ("gated_rms_norm", {"B": 1, "S": 5, "D": 36, "G": 2}, {}),
    ("softmax", {"M": 5, "D": 37}, {}),
    ("cross_entropy", {"M": 5, "V": 37}, {}),
    ("gelu", {"M": 5, "N": 37}, {}),
    ("swiglu", {"M": 5, "N": 37}, {}),
    ("geglu", {"M": 5, "N": 37}, {}),
    ("rope", {"B": 1, "H": 4, "Hkv": 2, "S": 9, "D": 16}, {}),
    ("fp8_quant", {"M": 5, "N": 256}, {}),
    ("matmul", {"M": 20, "N": 17, "K": 33}, {}),
    ("fused_linear_cross_entropy", {"M": 20, "D": 32, "V": 50}, {}),
    ("causal_conv1d", {"B": 1, "S": 20, "D": 16, "W": 4}, {}),
]


def apart(inputs):
    """The same numbers, every second place of longer rows, from the second on."""
    found = {}
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
            room = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan).to(x.dtype)
            found[name] = room[..., 1::2].copy_(x)
    return found


@pytest.mark.parametrize(("operator", "axes", "options"), CASES, ids=[x[0] for x in CASES])
def test_never_a_wrong_answer(agrees, operator, axes, options):
    agrees(operator, axes, change=apart, **options)


@pytest.mark.parametrize("part", ["last", "start", "rows"])
def test_what_a_tensor_map_cannot_describe_goes_elsewhere(monkeypatch, part):
    """Gaps in the last dimension, an address or rows that are no multiple of 16 bytes."""
    monkeypatch.setattr(_tiling, "capability", lambda device: (9, 0))
    room = torch.zeros(1, 2, 1024, 144, dtype=torch.bfloat16)
    whole = torch.zeros(1, 2, 1024, 64, dtype=torch.bfloat16)
    x = {
        "last": room[..., :128:2],
        "start": room[..., 1:65],
        "rows": torch.zeros(1, 2, 1024, 65, dtype=torch.bfloat16)[..., :64],
    }[part]
    assert _hopper.fits(whole, whole, whole)
    assert _tiling.describable(whole, whole, whole)
    for place in range(3):
        tensors = [whole] * 3
        tensors[place] = x
        assert not _hopper.fits(*tensors)
        assert not _attention_sparse_hopper.fits(*tensors)
        assert not _tiling.describable(*tensors)
