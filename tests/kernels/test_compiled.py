"""Kernels compiled for GPUs that are not here, by the calls that users make: that they compile, and that they fit.

On most of these devices nobody has measured. What is too large for a device's shared memory fails at its launch
there, and Triton's passes differ by architecture.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernelmark.suite.catalog import Catalog

FOLDER = Path(__file__).parent
KERNELS = FOLDER.parents[1] / "kernels"
KIB = {
    "8.0": 163,
    "8.9": 99,
    "9.0": 227,
    "10.0": 227,
    "12.0": 99,
    "gfx942": 64,
}
"""Shared memory of a program, by compute capability: A100, Ada, Hopper, B200, and Blackwell with displays. (CUDA's
programming guide, "Technical specifications per compute capability".) MI300 has 64 KiB a workgroup."""

HOPPER = {x.stem for x in KERNELS.rglob("_*_hopper*.py")}
E4M3 = "fp8_matmul", "fp8_quant", "mx_quant", "quantized_activation", "quantized_linear", "grouped_fp8_matmul"
"""Not for compute capability 8.0."""
LATENT = "attention_mla", "attention_mla_decode"
"""By portable kernels everywhere."""
MATRIX = "matmul", "fp8_matmul", "mx_matmul"
"""Matrix products with kernels of their own for Hopper."""
APART = "attention", "linear_attention", "selective_scan", "moe", "sparse24_fp8_matmul", *E4M3
OWN = Catalog.default()
PLAIN = tuple(
    x for x in OWN.roots[0].files("kernels") if not x.startswith(APART) and not OWN.operator(x).distributed
)
"""Operators of one device whose kernels are the same everywhere; those between ranks need their peers' memory."""
WIDE = "rms_norm", "softmax", "cross_entropy"
"""Those whose rows start anywhere between two 16-byte boundaries in some of what is compiled."""
ODD = re.compile(r"-[DV](5001|1001|50257)\b")
"""Widths at which rows start anywhere between two 16-byte boundaries."""
SMALL = "_mean", "_share", "_scale", "_add_parts"
"""Kernels that read no such rows."""


@pytest.mark.parametrize(
    ("capability", "operators"),
    [
        ("9.0", ("attention", "attention_window", "attention_decode")),
        ("9.0", ("attention_varlen", "attention_sparse", "attention_fp8", "selective_scan", "linear_attention")),
        ("9.0", MATRIX),
        pytest.param(
            "9.0",
            ("moe", "grouped_fp8_matmul", "quantized_activation", "quantized_linear", "sparse24_matmul"),
            marks=pytest.mark.targets,
        ),
        pytest.param("8.0", LATENT, marks=pytest.mark.targets),
        pytest.param("9.0", LATENT, marks=pytest.mark.targets),
        pytest.param("10.0", ("attention", "linear_attention"), marks=pytest.mark.targets),
        pytest.param(
            "12.0",
            ("attention_varlen", "attention_sparse", "attention_fp8", "linear_attention"),
            marks=pytest.mark.targets,
        ),
        pytest.param(
            "8.9", ("attention", "attention_decode", "linear_attention", "moe", *E4M3), marks=pytest.mark.targets
        ),
        ("8.0", WIDE),
        pytest.param("8.0", tuple(x for x in PLAIN if x not in WIDE), marks=pytest.mark.targets),
        ("gfx942", ("causal_conv1d", "causal_conv1d_update", "fp8_quant")),
    ],
)
def test_compiles_and_fits(tmp_path, capability, operators):
    found = compiled(tmp_path, capability, operators)
    assert {x["case"].split()[0] for x in found} == set(operators)
    assert [x for x in found if x["error"]] == []
    assert [x for x in found if x["shared"] > KIB[capability] << 10] == []
    if capability == "9.0" and operators != LATENT:
        kind = "matrix" if operators == MATRIX else "dense" if "attention" in operators else "other"
        assert {x["module"] for x in found} & HOPPER == {x for x in HOPPER if _kind(x) == kind}
    if operators == WIDE:
        odd = [x for x in found if ODD.search(x["case"]) and x["kernel"] not in SMALL]
        assert {x["case"].split()[0] for x in odd} == set(WIDE)
        assert [x for x in odd if not x["wide"]] == []
        # Beside vectors of logits only the target's own is read, once for each of a thread's vectors at most.
        assert [x for x in odd if "rms_norm" not in x["case"] and x["narrow"] > 8] == []


def compiled(tmp_path: Path, capability: str, operators: tuple[str, ...]) -> list[dict[str, Any]]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, FOLDER / "compiled.py", capability, *operators],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _kind(module: str) -> str:
    """Which of the groups above a module for Hopper is compiled in."""
    if module.startswith("_attention_hopper"):
        return "dense"
    return "matrix" if module in ("_matmul_hopper", "_weights_hopper") else "other"
