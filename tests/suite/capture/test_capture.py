"""Capture sees a program's calls, written as functions or by hand, and makes a plan of them that loads."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from click.testing import CliRunner
from kernelmark.registry.analysis.own_step import own_step
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import read
from kernelmark.registry.store.record import Header
from kernelmark.suite import plan as plans
from kernelmark.suite.capture import Capture, recorder, run
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
        "attention_decode": 1,
    }
    assert dict(found["rms_norm"].call.axes) == {"B": 2, "S": 8, "D": 64}
    assert found["rms_norm"].call.dtype == "bf16"  # of what was cast, not of the cast
    assert dict(found["rope"].call.axes) == {"B": 2, "H": 4, "Hkv": 2, "S": 8, "D": 16}
    assert found["rope"].call.strides == (512, 16, 64, 1)  # a view of the projection
    assert found["cross_entropy"].call.dtype == "fp32"
    assert not found["layer_norm"].call.trained
    assert found["attention"].call.trained
    assert dict(found["attention_decode"].call.axes) == {"B": 2, "Sq": 1, "H": 4, "Hkv": 4, "S": 8, "D": 16}
    assert seen.remarks == {}
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
        "attention_decode",
    }
    assert {x.pass_ for x in plan.cases if x.operator == "layer_norm"} == {"forward"}
    assert {x.pass_ for x in plan.cases if x.operator == "rope"} == {"forward", "backward"}
    assert {x.options["storage"] for x in plan.cases if x.operator == "rope"} == {"bshd"}
    assert "1 call, " in target.read_text()


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


ODD = {
    "one element of four dimensions": lambda x, q: q[0, 0, 0, 0],
    "NumPy's numbers": lambda x, q: x * numpy.sqrt(8),
    "powers by tensors": lambda x, q: (x ** x.abs(), torch.pow(2.0, x)),
    "names of arguments": lambda x, q: (
        torch.mul(input=x, other=x),
        torch.add(input=x, other=x),
        torch.cat(tensors=[x, x]),
        torch.pow(input=x, exponent=2),
        torch.mean(input=x),
        torch.rsqrt(input=x),
        torch.neg(input=x),
        functional.silu(input=x),
    ),
    "no dimension": lambda x, q: (functional.gelu(x[0, 0]), functional.softmax(x[0, 0], -1)),
    "no strides": lambda x, q: x.to_sparse_csr() @ x.mT,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("what", ODD)
def test_a_call_of_an_odd_form_is_still_the_programs_own(what: str) -> None:
    """Whatever a rule does not expect: what is right without a capture is right within."""
    x, q = torch.rand(3, 8), torch.rand(1, 2, 4, 8)
    with Capture() as seen:
        ODD[what](x, q)
    assert seen.calls() == ()


def test_arguments_by_name_are_the_same_call() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with Capture() as seen:
        torch.mul(input=functional.silu(input=x), other=x)
        square = torch.mean(input=torch.pow(input=x, exponent=2), dim=-1, keepdim=True)
        torch.mul(input=torch.mul(input=x, other=torch.rsqrt(input=square + 1e-6)), other=weight)
    assert {x.call.operator for x in seen.calls()} == {"swiglu", "rms_norm"}


@pytest.mark.parametrize("over", [{}, {"dim": 0, "keepdim": True}, {"dim": (0, 1), "keepdim": True}])
def test_a_norm_over_other_dimensions_is_no_rms_norm(over: dict) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with Capture() as seen:
        x * torch.rsqrt(x.pow(2).mean(**over) + 1e-6) * weight
    assert seen.calls() == ()


def test_losses_and_attention_that_do_more_than_a_case() -> None:
    x, q = torch.randn(3, 8), torch.randn(1, 2, 4, 8)
    with Capture() as seen:
        functional.cross_entropy(x, torch.rand(3, 8))
        functional.cross_entropy(x, torch.zeros(3, dtype=torch.long), torch.rand(8))
        functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert [x.call.operator for x in seen.calls()] == ["attention"]
    assert "attention with dropout, which a case does not have" in seen.remarks


def test_sizes_of_one_of_many_examples_are_no_case():
    weight = torch.randn(7, 6)
    with Capture() as seen:
        torch.func.vmap(lambda x: functional.softmax(functional.linear(x, weight), -1))(torch.randn(5, 3, 6))
        functional.softmax(torch.randn(15, 7), -1)
    assert [(x.call.operator, dict(x.call.axes)) for x in seen.calls()] == [("softmax", {"M": 15, "D": 7})]
    assert seen.remarks["softmax within torch.vmap, whose sizes are of one example"] == 1


def test_a_compiler_does_not_see_the_capture() -> None:
    with Capture():
        whole = torch.compile(lambda x: functional.silu(x) * x, backend="eager", fullgraph=True)
        whole(torch.randn(3, 8))


def test_a_closure_is_no_part_of_an_optimizers_step() -> None:
    linear = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = linear(torch.randn(3, 8)).sum()
        loss.backward()
        return loss

    with Capture() as seen:
        optimizer.step(closure)
        optimizer.step(closure=closure)
    assert sum(x.count for x in seen.calls() if x.call.axes[0] == ("M", 3)) == 2
    assert seen.step()[0] == 2


def test_a_step_that_raises_has_ended() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise ValueError("overflow")

    linear = torch.nn.Linear(8, 2)
    optimizer = Failing(linear.parameters(), lr=0.1)
    with Capture() as seen:
        for _ in range(3):
            linear(torch.randn(3, 8))
            with pytest.raises(ValueError, match="overflow"):
                optimizer.step()
    assert [x.count for x in seen.calls() if x.call.axes[0] == ("M", 3)] == [3]


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


def fails_after_a_call(tmp_path: Path, ending: str) -> Path:
    path = tmp_path / "boom.py"
    path.write_text(
        "import os, sys, torch\n"
        "torch.nn.functional.silu(torch.zeros(4)), torch.nn.functional.softmax(torch.zeros(4, 8), -1)\n"
        f"{ending}\n"
    )
    return path


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raise ValueError('mine')", "ValueError: mine"),
        ("torch.nn.functional.softmax(torch.zeros(4), 7)", "IndexError: "),
        ("sys.exit('enough')", "enough"),
    ],
)
def test_a_program_that_fails_leaves_what_was_seen(tmp_path: Path, ending: str, said: str) -> None:
    target = tmp_path / "mine.toml"
    path = fails_after_a_call(tmp_path, ending)
    result = CliRunner().invoke(command_capture, ["--plan", str(target), "--", "python", str(path)])
    assert result.exit_code == 1, result.output
    assert "softmax" in target.read_text()
    assert said in result.output
    assert "the program failed with status 1; the plan has what it called before" in result.output
    if "Error" in said:
        assert f'File "{path}", line 3, in <module>' in result.output
    assert "runpy" not in result.output
    assert "suite/capture" not in result.output


@pytest.mark.parametrize(
    ("text", "module", "said"),
    [("x = = 3\n", False, "SyntaxError: invalid syntax"), ("", True, "No module named nomod")],
)
def test_a_program_that_does_not_begin(tmp_path: Path, text: str, module: bool, said: str) -> None:
    path, target = tmp_path / "boom.py", tmp_path / "mine.toml"
    path.write_text(text)
    program = ["-m", "nomod"] if module else [str(path)]
    result = CliRunner().invoke(command_capture, ["--plan", str(target), "--", "python", *program])
    assert result.exit_code == 1, result.output
    assert said in result.output
    assert "runpy" not in result.output
    assert "there is no plan: the program made no call that is an operator of ours\n" in result.output
    assert not target.exists()


def test_the_plan_is_written_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    path = fails_after_a_call(tmp_path, "os.chdir('elsewhere')")
    result = CliRunner().invoke(command_capture, ["--plan", "mine.toml", "--", "python", str(path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mine.toml").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_plan_that_cannot_be_written_is_said_before_the_program_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = fails_after_a_call(tmp_path, f"open({str(ran)!r}, 'w')")
    result = CliRunner().invoke(command_capture, ["--plan", str(tmp_path / "a" / "b.toml"), "--", str(path)])
    assert isinstance(result.exception, InputError)
    assert "b.toml cannot be written: No such file or directory. Name another" in str(result.exception)
    assert not ran.exists()
    result = CliRunner().invoke(command_capture, ["--plan", str(tmp_path / "b.toml"), "--", "absent.py"])
    assert "no program at absent.py" in str(result.exception)
    assert not (tmp_path / "b.toml").exists()


def found(call) -> list[tuple]:
    """Operator, axes and options of what a function calls, in the order of names."""
    with Capture() as seen:
        call()
    every = [(x.call.operator, dict(x.call.axes), dict(x.call.options), x.count) for x in seen.calls()]
    return sorted(every, key=str)


def test_a_linear_layer_is_three_products() -> None:
    """Its gradients' too: of the input (M, N)·(N, K), of the weight (N, M)·(M, K), each as PyTorch stores it."""
    layer = torch.nn.Linear(20, 7)
    x = torch.randn(3, 5, 20, requires_grad=True)
    assert found(lambda: layer(x)) == [
        ("matmul", {"M": 15, "N": 20, "K": 7}, {"layout": "nn", "epilogue": "none"}, 1),
        ("matmul", {"M": 15, "N": 7, "K": 20}, {"layout": "nt", "epilogue": "bias"}, 1),
        ("matmul", {"M": 7, "N": 20, "K": 15}, {"layout": "tn", "epilogue": "none"}, 1),
    ]
    with torch.no_grad():
        (forward,) = found(lambda: layer(x))
    assert forward[2:] == ({"layout": "nt", "epilogue": "bias"}, 1)


@pytest.mark.parametrize(("turned", "layout"), [((0, 0), "nn"), ((0, 1), "nt"), ((1, 0), "tn")])
def test_the_products_of_a_backward_pass_are_those_that_autograd_makes(turned, layout) -> None:
    """Each implied product, of the gradients' numbers, against autograd's gradient as it is stored."""
    M, N, K = 6, 4, 9
    stored = [
        torch.randn(*(shape[::-1] if t else shape), requires_grad=True)
        for shape, t in zip(((M, K), (K, N)), turned, strict=True)
    ]
    a, b = (x.t() if t else x for x, t in zip(stored, turned, strict=True))
    every = found(lambda: a @ b)
    assert ("matmul", {"M": M, "N": N, "K": K}, {"layout": layout, "epilogue": "none"}, 1) in every
    gradients = torch.autograd.grad((a @ b).sum(), stored)
    implied = {(x["M"], x["N"]): o["layout"] for _, x, o, _ in every if (x["M"], x["N"], x["K"]) != (M, N, K)}
    assert set(implied) == {tuple(x.shape) for x in gradients}
    assert sorted(x["K"] for _, x, _, _ in every) == sorted((K, N, M))


def test_products_of_another_kind_are_left(monkeypatch) -> None:
    x = torch.randn(4, 4)
    assert found(lambda: x.t() @ x.t()) == []
    assert found(lambda: torch.randn(2, 3, 4) @ torch.randn(2, 4, 3)) == []
    assert found(lambda: torch.addmm(torch.randn(4), x, x)) == [
        ("matmul", {"M": 4, "N": 4, "K": 4}, {"layout": "nn", "epilogue": "bias"}, 1)
    ]
    assert found(lambda: torch.addmm(torch.randn(4), x, x, beta=2)) == []


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    ("visible", "operator", "told"),
    [
        (lambda i, j: j <= i, "attention", ("causal", None)),
        (lambda i, j: j <= i + 100, "attention", ("full", None)),
        (lambda i, j: (j <= i) & (i - j < 3), "attention_window", ("causal", 3)),
        (lambda i, j: (j <= i) & (i - j != 2), None, None),
    ],
)
def test_masks_that_say_what_an_option_says(additive, visible, operator, told) -> None:
    S = 11
    mask = visible(torch.arange(S)[:, None], torch.arange(S)[None])[None, None].expand(2, 1, S, S)
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    q = torch.randn(2, 4, S, 8)
    every = found(lambda: functional.scaled_dot_product_attention(q, q, q, attn_mask=mask))
    if operator is None:
        assert every == []
    else:
        ((name, axes, options, _),) = every
        assert (name, options["mask"], axes.get("W")) == (operator, *told)


def test_storage_keys_of_another_length_and_values_of_another_width() -> None:
    B, S, H, K, D = 2, 6, 4, 2, 8

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(B, -1, count, D).transpose(1, 2)

    qkv = torch.randn(B, S, (H + 2 * K) * D)
    packed = [heads(x, n) for x, n in zip(qkv.split((H * D, K * D, K * D), -1), (H, K, K), strict=True)]
    apart = [heads(torch.randn(B, S, n * D), n) for n in (H, K, K)]
    attend = functional.scaled_dot_product_attention
    for tensors, storage in ((packed, "packed"), (apart, "bshd"), ([x.contiguous() for x in apart], "bhsd")):
        ((name, axes, options, _),) = found(lambda given=tensors: attend(*given, is_causal=True, enable_gqa=True))
        assert (name, options) == ("attention", {"mask": "causal", "storage": storage})
        assert axes == {"B": B, "H": H, "Hkv": K, "S": S, "D": D}
    q, k, v = torch.randn(B, H, S, D), torch.randn(B, H, 9, D), torch.randn(B, H, S, 5)
    assert found(lambda: attend(q, k, k))[0][1] == {"B": B, "H": H, "Hkv": H, "S": S, "D": D, "Sk": 9}
    assert found(lambda: attend(q, k, k, is_causal=True)) == []  # from the first key on: another computation
    assert found(lambda: attend(q, q, q, scale=1.0))[0][0] == "attention"  # the same work
    assert found(lambda: attend(q, q, v))[0][:2] == ("attention_mla", {"B": B, "H": H, "S": S, "D": D, "Dv": 5})


def test_an_optimizers_step_is_one_thing() -> None:
    weight = torch.nn.Parameter(torch.randn(8))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    weight.sum().backward()
    with Capture() as seen:
        optimizer.step()
        optimizer.step()
    assert [(name, count) for name, count, _ in seen.rest()] == [("AdamW.step of 1 tensor, 8 numbers", 2)]
    optimizer.step()  # outside: nothing is left behind
    assert len(seen.rest()) == 1


def test_a_step_of_several_optimizers_is_one_step() -> None:
    weight = torch.nn.Parameter(torch.randn(8))
    optimizers = [kind([weight], lr=1e-3) for kind in (torch.optim.AdamW, torch.optim.SGD)]
    with Capture() as seen:
        for _ in range(3):
            weight.square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    steps, ms, how = seen.step()
    assert (steps, how) == (3, "between optimizer steps, while they were captured")
    assert ms > 0


def test_a_call_that_brings_a_device_into_use_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first edge is of the host's clock, its last of the device's."""
    event = SimpleNamespace(elapsed_time=lambda other: 2.0)
    edges = itertools.chain([1.0], itertools.repeat(event))
    monkeypatch.setattr(recorder, "_edge", lambda: next(edges))
    monkeypatch.setattr(Capture, "_wait", lambda self: None)
    with Capture() as seen:
        torch.zeros(2) + 1
        torch.zeros(2).add(1)
    assert [x.ms for x in seen._entries][:2] == [0.0, 2.0]


TRAINING = """
import torch
from torch.nn import functional
h = torch.nn.Parameter(torch.randn(4, 8, 64))
weight = torch.nn.Parameter(torch.ones(64))
optimizer = torch.optim.AdamW([h, weight], lr=1e-3)
for _ in range(4):
    y = functional.layer_norm(functional.layer_norm(h, (64,), weight, weight), (64,), weight, weight)
    functional.cross_entropy(y.view(32, 64), torch.zeros(32, dtype=torch.long)).backward()
    optimizer.step()
"""


@pytest.fixture
def training(tmp_path: Path) -> Path:
    path = tmp_path / "training.py"
    path.write_text(TRAINING)
    return path


def captured(training: Path, *options: str) -> plans.Plan:
    target = training.with_name("captured.toml")
    result = CliRunner().invoke(command_capture, ["--plan", str(target), *options, "--", "python", str(training)])
    assert result.exit_code == 0, result.output
    return plans.load(str(target), Catalog.default(), "cpu")


def test_a_plan_says_how_often_a_step_makes_each_call(training: Path) -> None:
    plan = captured(training)
    calls = {name.rpartition("/")[0] + name.rpartition("-")[2]: count for name, count in plan.calls.items()}
    # Of the loss, what runs both passes stands for both.
    assert calls == {"layer_normforward": 2.0, "layer_normbackward": 2.0, "cross_entropyforward_backward": 1.0}
    assert plan.step_ms is not None
    assert 0 < plan.step_ms < 1e4
    assert "4 steps: between optimizer steps" in (training.with_name("captured.toml")).read_text()
    again = captured(training, "--steps", "2", "--step-ms", "12.5")
    assert again.step_ms == 12.5
    assert set(again.calls.values()) == {4.0, 2.0}
    assert plans.Plan.of(header_of(again)) == again
    narrowed = plans.load(str(training.with_name("captured.toml")), Catalog.default(), "cpu", ["layer_norm"])
    assert all(x.startswith("layer_norm/") for x in narrowed.calls)


def test_another_capture_keeps_what_the_plan_held(training: Path) -> None:
    """A plan edited by hand is not lost, to a program that fails least of all."""
    target, before = training.with_name("captured.toml"), training.with_name("captured.old.toml")
    captured(training)
    assert not before.exists()
    edited = target.read_text() + "# by hand\n"
    target.write_text(edited)
    training.write_text(TRAINING + "\nraise SystemExit(7)\n")
    command = ["--plan", str(target), "--", "python", str(training)]
    result = CliRunner().invoke(command_capture, command)
    assert result.exit_code == 7
    assert f"kept      {before}: what the plan held before" in result.output
    assert before.read_text() == edited
    assert "# by hand" not in target.read_text()


def header_of(plan: plans.Plan) -> Header:
    """That of a run of a plan."""
    return Header(
        2, "r", "", "", None, False, plan.name, 0, plan.replicates, "cpu", "k", {}, {},
        request=plan.request(()),
    )  # fmt: skip


@pytest.mark.minutes
def test_what_each_implementation_is_worth_to_the_programs_step(training: Path) -> None:
    captured(training, "--step-ms", "5")
    home = training.with_name("home")
    asked = f"run --plan {training.with_name('captured.toml')} --operator layer_norm --device cpu --replicates 1"
    done = subprocess.run(
        [sys.executable, "-m", "kernelmark.suite", *asked.split(), "--output", str(home), "--no-report"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "140"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (path,) = home.glob("journals/*.jsonl")
    found = own_step(read(path))
    assert found is not None
    (call,) = found.calls
    offers = {x.implementation: x for x in call.offers}
    assert call.calls == 2
    assert offers["torch"].worth == pytest.approx(1)
    assert "needs a cuda device" in offers["kernelmark"].reason
    assert "worth to your step of 5.000 ms" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--outptu", "x", "--", "python", "x.py"], "No such option '--outptu'"),
        ([], "give a program"),
        (["--trace", "absent.json"], "does not exist"),
    ],
)
def test_a_command_line_that_cannot_be(arguments, said) -> None:
    result = CliRunner().invoke(command_capture, arguments)
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_transformers_llama() -> None:
    """Its own class, in training: every part that ours has is seen, as often as it is called."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with Capture() as seen:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    found = {
        (x.call.operator, dict(x.call.axes).get("D"), dict(x.call.options).get("mask")): x.count
        for x in seen.calls()
        if x.call.operator != "matmul"
    }
    assert found == {
        ("rms_norm", 32, None): 5,
        ("rope", 8, None): 2,
        ("attention", 8, "causal"): 2,
        ("swiglu", None, None): 2,
        ("cross_entropy", None, None): 1,
    }
    products = [x for x in seen.calls() if x.call.operator == "matmul" and dict(x.call.options)["layout"] == "nt"]
    assert sum(x.count for x in products) == 2 * 7 + 1
