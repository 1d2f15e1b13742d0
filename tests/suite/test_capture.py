"""Capture sees a program's calls, written as functions or by hand, and makes a plan of them that loads."""

import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from kernelmark.registry.errors import InputError
from kernelmark.suite import plan as plans
from kernelmark.suite.capture import Capture, run
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.cli.capture import command_capture
from torch.nn import functional

PROGRAM = """
import sys
import torch
from torch.nn import functional

def rms(x, weight, eps=1e-6):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)

def half(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)

B, S, H, K, D = 2, 8, 4, 2, 16
h = torch.randn(B, S, H * D, dtype=torch.bfloat16, requires_grad=True)
weight = torch.ones(H * D, dtype=torch.bfloat16, requires_grad=True)
cos = torch.randn(1, 1, S, D, dtype=torch.bfloat16)
for _ in range(3):
    y = rms(h, weight)
    q = y.view(B, S, H, D).transpose(1, 2)
    k = v = y.view(B, S, H, D)[:, :, :K].transpose(1, 2)
    q, k = (q * cos) + (half(q) * cos), (k * cos) + (half(k) * cos)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    rows = out.transpose(1, 2).reshape(B * S, H * D)
    gate = functional.silu(rows) * rows
    gate = functional.gelu(gate, approximate="tanh")
    h = h + gate.view(B, S, H * D)
functional.layer_norm(h.detach(), (H * D,), weight.detach(), weight.detach())
functional.cross_entropy(h.view(B * S, -1).float(), torch.zeros(B * S, dtype=torch.long)).backward()
functional.scaled_dot_product_attention(q[:, :, :1], q, q)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_what_is_called_and_how_often(program: Path) -> None:
    seen = Capture()
    assert run(["python", str(program), "0"], seen) == 0
    found = {x.call.operator: x for x in seen.calls()}
    counts = {name: x.count for name, x in found.items()}
    assert counts == {
        "rms_norm": 3,
        "rope": 3,
        "attention": 3,
        "swiglu": 3,
        "gelu": 3,
        "layer_norm": 1,
        "cross_entropy": 1,
    }
    assert dict(found["rms_norm"].call.axes) == {"B": 2, "S": 8, "D": 64}
    assert found["rms_norm"].call.dtype == "bf16"  # of what was cast, not of the cast
    assert dict(found["rope"].call.axes) == {"B": 2, "H": 4, "Hkv": 2, "S": 8, "D": 16}
    assert found["rope"].call.strides == (512, 16, 64, 1)  # a view of the projection
    assert found["cross_entropy"].call.dtype == "fp32"
    assert not found["layer_norm"].call.trained
    assert found["attention"].call.trained
    assert list(seen.refused) == ["attention of (2, 4, 1, 16) queries on (2, 4, 8, 16) keys"]
    assert sum(x.ms for x in seen.calls()) + sum(ms for *_, ms in seen.rest()) == pytest.approx(seen.total_ms)


def test_the_plan_loads_and_names_what_is_left(program: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    result = CliRunner().invoke(command_capture, ["--plan", str(target), "--", "python", str(program), "3"])
    assert result.exit_code == 3, result.output
    assert "3 × attention" in result.output
    catalog = Catalog.default()
    plan = plans.load(str(target), catalog, "cpu")
    assert {x.operator for x in plan.cases} == {
        "rms_norm",
        "rope",
        "attention",
        "swiglu",
        "gelu",
        "layer_norm",
        "cross_entropy",
    }
    assert {x.pass_ for x in plan.cases if x.operator == "layer_norm"} == {"forward"}
    assert {x.pass_ for x in plan.cases if x.operator == "rope"} == {"forward", "backward"}
    assert "attention of (2, 4, 1, 16) queries" in target.read_text()


def test_a_context_in_a_program_of_the_users_own() -> None:
    with Capture() as seen:
        functional.softmax(torch.randn(4, 8), dim=-1)
        torch.nn.GELU()(torch.randn(4, 8))
    assert [x.call.operator for x in sorted(seen.calls(), key=lambda x: x.call.operator)] == ["gelu", "softmax"]
    functional.softmax(torch.randn(4, 8), dim=-1)  # outside of the context
    assert sum(x.count for x in seen.calls()) == 2


def test_products_that_are_no_pattern_are_not_attributed() -> None:
    with Capture() as seen:
        x = torch.randn(2, 4, 8, 16)
        functional.silu(x) * x[:1]  # another shape
        (x * x) + (x * x)
    assert seen.calls() == ()
    with pytest.raises(InputError, match="no call that is an operator of ours"):
        seen.plan(Catalog.default())


@pytest.mark.parametrize("command", [["gcc", "x.c"], ["-c", "print()"], []])
def test_other_commands_are_refused(command: list[str]) -> None:
    with pytest.raises(InputError):
        run(command, Capture())


def test_a_program_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 3")
    path = tmp_path / "main.py"
    path.write_text("import sys, beside; assert __name__ == '__main__'; sys.exit(beside.VALUE + len(sys.argv))")
    before = list(sys.path), list(sys.argv)
    assert run([str(path), "a", "b"], Capture()) == 6
    assert (sys.path, sys.argv) == before
