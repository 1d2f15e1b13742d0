"""Kernels compiled for GPUs that are not here, by the calls that users make: that they compile, and that they fit.

On most of these devices nobody has measured. What is too large for a device's shared memory fails at its launch
there, and Triton's passes differ by architecture.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite.catalog import Catalog

from . import compiled, gate

FOLDER = Path(__file__).parent
KERNELS = FOLDER.parents[1] / "kernels"
LISTED = gate.exceptions((FOLDER / "exceptions.toml").read_text())
HOPPER = {x.stem for x in KERNELS.rglob("_*_hopper*.py")}
OF_HOPPER = {
    "attention": ("_attention_hopper",),
    "attention_varlen": ("_attention_varlen",),
    "attention_sparse": ("_attention_sparse",),
    "selective_scan": ("_selective_scan",),
    "matmul": ("_matmul", "_weights", "_dual"),
    "moe": ("_grouped", "_matmul", "_sparse24"),
    "fused_linear_cross_entropy": ("_cross_entropy",),
}
"""What the modules for Hopper are called, by the first operator of those that are compiled together."""
E4M3 = "fp8_matmul", "fp8_quant", "mx_quant", "quantized_activation", "quantized_linear", "grouped_fp8_matmul"
"""Not for compute capability 8.0."""
LATENT = "attention_mla", "attention_mla_decode"
"""By portable kernels everywhere."""
MATRIX = "matmul", "fp8_matmul", "mx_matmul", "gate_up_swiglu"
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
        ("9.0", ("attention_varlen", "attention_fp8")),
        ("9.0", ("attention_sparse",)),
        ("9.0", ("selective_scan", "linear_attention")),
        ("9.0", MATRIX),
        ("9.0", ("fused_linear_cross_entropy",)),
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
def test_compiles_and_fits(capability, operators):
    found = gate.compiled(capability, operators)
    assert {x["case"].split()[0] for x in found} == set(operators)
    # That none spills, and that products go to matrix units, is asked of fewer cases: `make test-targets`.
    unfit = [x for x in found if gate.status(x, capability) in ("failed", "shared memory")]
    assert gate.faults(unfit, capability, LISTED) == []
    if capability == "9.0" and operators[0] in OF_HOPPER:
        wanted = {x for x in HOPPER if x.startswith(OF_HOPPER[operators[0]])}
        assert wanted
        assert {x["module"] for x in found} & HOPPER == wanted
    # Scales of a stage have arrived when it is given up: the next ones would come over them.
    assert [x["case"] for x in found if x["early"]] == []
    if operators == WIDE:
        odd = [x for x in found if ODD.search(x["case"]) and x["kernel"] not in SMALL]
        assert {x["case"].split()[0] for x in odd} == set(WIDE)
        assert [x for x in odd if not x["wide"]] == []
        # Beside vectors of logits only the target's own is read, once for each of a thread's vectors at most.
        assert [x for x in odd if "rms_norm" not in x["case"] and x["narrow"] > 8] == []


def test_loads_that_are_under_way_where_a_stage_is_given_up(monkeypatch):
    """By what SASS says: a load sets a scoreboard, and whoever waits for that one comes behind it."""
    load, use, meet, arrive, fence = (0, 63, "LDS R2, [R1]"), (1, 7, "FMUL R3, R2, R2"), (0, 7, "BAR.SYNC 0x2"), (
        0, 7, "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"), (0, 7, "MEMBAR.ALL.CTA")  # fmt: skip

    def told(*instructions):
        """As cuobjdump prints them: masks of scoreboards waited for, the one set (0, or 7 for none)."""
        lines = []
        for waited, written, words in instructions:
            code = (waited << 11 | (0 if written == 63 else 7) << 5) << 41
            lines.append(f"/*0010*/ {words} ;  /* {0:#018x} */\n /* {code:#018x} */")
        done = compiled.subprocess.CompletedProcess([], 0, "\n".join(lines), "")
        monkeypatch.setattr(compiled.subprocess, "run", lambda *a, **k: done)
        return compiled.early(b"")

    assert told(load, meet, use, arrive) == 1
    assert told(load, meet, arrive, load, meet, arrive) == 2
    assert told(load, use, meet, arrive) == 0
    assert told(load, fence, meet, use, arrive) == 0
    assert told(meet, load, arrive) == 0


def test_what_the_command_is_asked():
    target, operators, few = compiled.asked(["--few", "9.0", "attention"])
    assert (target.arch, operators, few) == (90, ["attention"], True)
    assert compiled.asked(["gfx942"])[1:] == (compiled.everywhere(), False)
    for words, said in (
        ([], "no target ''"),
        (["--few"], "no target ''"),
        (["attention"], "no target 'attention'. Targets are"),
        (["9.0", "atention"], "unknown operator 'atention'. Did you mean 'attention'"),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            compiled.asked(words)
