"""Traces of PyTorch's profiler, written here and literal ones, read as captures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from kernelmark.registry.errors import InputError
from kernelmark.suite import plan as plans
from kernelmark.suite.capture import traced
from kernelmark.suite.capture.trace import _ATEN
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.cli.capture import command_capture
from torch.nn import functional


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of two layers, one of them without gradients, by PyTorch's own profiler."""
    path = tmp_path_factory.mktemp("trace") / "mine.json"
    layer, still = torch.nn.Linear(24, 16), torch.nn.Linear(16, 12)
    x = torch.randn(2, 5, 24, requires_grad=True)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        y = layer(x)
        with torch.no_grad():
            still(y)
        q = y.view(2, 5, 2, 8).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        functional.rms_norm(out, (8,), torch.ones(8)).sum().backward()
        optimizer.step()
    profiler.export_chrome_trace(str(path))
    return path


def test_a_trace_of_the_profiler(profiled: Path) -> None:
    seen = traced(profiled)
    found = {
        (x.call.operator, *(size for _, size in x.call.axes), x.call.options[0][1]): (x.count, x.ms)
        for x in seen.calls()
        if x.call.options
    }
    assert {x: count for x, (count, _) in found.items()} == {
        ("matmul", 10, 16, 24, "nt"): 1,
        ("matmul", 10, 24, 16, "nn"): 1,  # of the backward pass
        ("matmul", 16, 24, 10, "tn"): 1,
        ("matmul", 10, 12, 16, "nt"): 1,  # without gradients, so without products of a backward pass
        ("attention", 2, 2, 2, 5, 8, "causal"): 1,
    }
    assert all((ms > 0) == (key[-1] in ("nt", "causal")) for key, (_, ms) in found.items())
    assert ("rms_norm", True) in {(x.call.operator, x.call.trained) for x in seen.calls()}
    names = {name: count for name, count, _ in seen.rest()}
    assert names["AdamW.step"] == 1
    assert any(x.endswith("Backward0") for x in names)
    # Nothing is counted twice: all times are those of the events on top.
    events = json.loads(profiled.read_text())["traceEvents"]
    spans = sorted(
        (x["ts"], -x["dur"]) for x in events if x.get("cat") in ("cpu_op", "user_annotation") and "dur" in x
    )
    whole, end = 0.0, -1.0
    for begin, negative in spans:
        if begin >= end:
            whole, end = whole - negative, begin - negative
    assert seen.total_ms == pytest.approx(whole / 1e3, rel=0.02)


def test_its_plan_loads(profiled: Path, tmp_path: Path) -> None:
    packed = tmp_path / "mine.json.gz"
    packed.write_bytes(gzip.compress(profiled.read_bytes()))
    target = tmp_path / "mine.toml"
    result = CliRunner().invoke(command_capture, ["--plan", str(target), "--trace", str(packed)])
    assert result.exit_code == 0, result.output
    assert "M10 N24 K16 nn none" in result.output
    assert {x.operator for x in plans.load(str(target), Catalog.default(), "cpu").cases} >= {"matmul", "attention"}


def event(name: str, begin: float, length: float, shapes=(), values=(), kind="c10::BFloat16", **more) -> dict:
    """An operator's event; a shape for a tensor, a text for what is none."""
    given = [*shapes, *([] for _ in values)]
    strides = [[int(torch.Size(x[i + 1 :]).numel()) for i in range(len(x))] for x in given]
    arguments = {
        "Input Dims": given,
        "Input Strides": strides,
        "Input type": [kind] * len(shapes) + ["Scalar"] * len(values),
        "Concrete Inputs": [""] * len(shapes) + list(values),
        **more,
    }
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": begin,
        "dur": length,
        "args": arguments,
    }


def kernel(name: str, length: float, by: int) -> dict:
    return {"cat": "kernel", "name": name, "ts": 0, "dur": length, "args": {"External id": by}}


def test_kernels_give_their_time_to_what_launched_them(tmp_path: Path) -> None:
    """A linear layer's product lies within it; vLLM's and FlashAttention's operators have names of their own."""
    path = tmp_path / "mine.json"
    events = [
        event("aten::linear", 0, 90, [[7, 64], [32, 64]], **{"External id": 1}),
        event("aten::mm", 10, 50, [[7, 64], [64, 32]], **{"External id": 2}),
        event("_C::silu_and_mul", 100, 9, [[7, 40], [7, 80]], **{"External id": 3}),
        event("_C::fused_add_rms_norm", 110, 9, [[7, 64], [7, 64], [64]], ["1e-06"], **{"External id": 4}),
        event("_C::rotary_embedding", 120, 9, [[7], [7, 32], [7, 16]], ["8", "", "True"], **{"External id": 5}),
        event(
            "flash_attn::_flash_attn_forward", 130, 9, [[1, 7, 4, 8], [1, 7, 2, 8], [1, 7, 2, 8]],
            ["0.", "0.35", "True", "2", "0", "0."], **{"External id": 6},
        ),
        event("mine::odd", 140, 9, [[7]], **{"External id": 7}),
        kernel("gemm", 40, 2), kernel("silu", 3, 3), kernel("norm", 2, 4), kernel("rotary", 1, 5),
        kernel("flash", 5, 6), kernel("odd", 7, 7), kernel("graph\n[[cases]]", 42, 99),
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    seen = traced(path)
    assert {
        (x.call.operator, dict(x.call.axes)["W"] if "window" in x.call.operator else 0): x.ms for x in seen.calls()
    } == {
        ("matmul", 0): 0.04,
        ("swiglu", 0): 0.003,
        ("add_rms_norm", 0): 0.002,
        ("rope", 0): 0.001,
        ("attention_window", 3): 0.005,
    }
    axes = {x.call.operator: dict(x.call.axes) for x in seen.calls()}
    assert axes["swiglu"] == {"M": 7, "N": 40}
    assert axes["rope"] == {"B": 1, "H": 4, "Hkv": 2, "S": 7, "D": 8}
    assert [(*x[:2], pytest.approx(x[2])) for x in seen.rest()] == [
        ("graph\n[[cases]]", 1, 0.042),
        ("mine::odd", 1, 0.007),
    ]
    text = seen.plan(Catalog.default())
    assert "graph\n" not in text  # a name is no line of a plan
    assert text.count("\n[[cases]]") == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no trace of PyTorch's profiler"),
        ('{"traceEvents": 5}', "is no trace of PyTorch's profiler"),
        ('{"traceEvents": [7, {"args": 3}]}', "profile with record_shapes=True"),
        (
            '{"traceEvents": [{"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "args": {}}]}',
            "record_shapes",
        ),
    ],
)
def test_files_that_are_no_such_trace(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        traced(path)


@pytest.mark.parametrize(
    "odd", [{"Input Dims": [[7]]}, {"Input Dims": [[7, "x"], [3]]}, {"Input type": ["float"]}]
)
def test_arguments_that_are_not_those_of_the_rule(tmp_path: Path, odd: dict) -> None:
    """Another version's: the operator is then one that is not ours."""
    path = tmp_path / "x.json"
    one = event("aten::linear", 0, 9, [[7, 64], [32, 64]])
    one["args"] |= odd
    path.write_text(json.dumps({"traceEvents": [one]}))
    assert traced(path).calls() == ()
    assert [x[:2] for x in traced(path).rest()] == [("aten::linear", 1)]


TRACES = Path(__file__).parent / "traces"
"""Of Transformers' Llama with two layers on an H200, but for what no rule reads: two training steps, three tokens,
and a pass by torch.compile."""


@pytest.mark.parametrize(
    ("name", "steps", "attention", "products"),
    [
        ("train", 2, [("attention", 4, {"B": 4, "H": 8, "Hkv": 2, "S": 512, "D": 64}, "causal")], 30),
        (
            "generate",
            None,
            [
                ("attention", 2, {"B": 4, "H": 8, "Hkv": 2, "S": 128, "D": 64}, "causal"),
                ("attention_decode", 2, {"B": 4, "Sq": 1, "H": 8, "Hkv": 2, "S": 129, "D": 64}, 0),
                ("attention_decode", 2, {"B": 4, "Sq": 1, "H": 8, "Hkv": 2, "S": 130, "D": 64}, 0),
            ],
            45,
        ),
        ("compiled", None, [], 15),
    ],
)
def test_traces_of_a_gpu(name: str, steps: int | None, attention: list, products: int) -> None:
    """Two layers of seven products, and logits."""
    seen = traced(TRACES / f"{name}.json.gz")
    assert seen.steps == steps
    forward = [x for x in seen.calls() if x.ms]
    found = [
        (x.call.operator, x.count, dict(x.call.axes), x.call.options[0][1])
        for x in forward
        if x.call.operator.startswith("attention")
    ]
    assert sorted(found, key=str) == attention
    assert sum(x.count for x in forward if x.call.operator == "matmul" and x.call.dtype == "bf16") == products
    if name == "compiled":  # Transformers gives it a mask, whose elements a trace does not have
        assert seen.remarks == {"attention with a mask of elements": 2}
    if name == "train":
        assert {x.call.operator for x in forward} == {"matmul", "attention", "cross_entropy"}


COMPILED = [x for x, (public, _) in _ATEN.items() if public == "scaled_dot_product_attention" and "::_" in x]


@pytest.mark.parametrize("name", COMPILED)
def test_what_compiled_attention_is_called_with(name: str, tmp_path: Path) -> None:
    """The arguments are PyTorch's own, and a call of them is attention."""
    schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
    names = [x.name.replace("attn_bias", "attn_mask") for x in schema.arguments]
    assert list(_ATEN[name][1]) == names
    path = tmp_path / "mine.json"
    rest = ["True" if x == "is_causal" else "0." if x == "dropout_p" else "" for x in names[3:]]
    path.write_text(
        json.dumps({"traceEvents": [event(name, 0, 9, [[1, 4, 7, 8], [1, 2, 7, 8], [1, 2, 7, 8]], rest)]})
    )
    (call,) = traced(path).calls()
    assert (call.call.operator, dict(call.call.axes)) == ("attention", {"B": 1, "H": 4, "Hkv": 2, "S": 7, "D": 8})
    assert dict(call.call.options)["mask"] == "causal"


@pytest.mark.parametrize(
    ("given", "remark"),
    [
        ({"attn_mask": torch.zeros(8, 8)}, "attention with a mask of elements"),
        ({"is_causal": True}, "attention, causal from the first key on, of 8 queries on 12 keys"),
    ],
)
def test_what_attention_is_refused_for_is_said_once(given: dict, remark: str, tmp_path: Path) -> None:
    """Eager attention calls one of its ways, which has the same arguments."""
    path = tmp_path / "mine.json"
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8 if "attn_mask" in given else 12, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        functional.scaled_dot_product_attention(q, k, k, **given)
    profiler.export_chrome_trace(str(path))
    seen = traced(path)
    assert not seen.calls()
    assert seen.remarks == {remark: 1}
