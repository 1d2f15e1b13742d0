"""Runtimes for CPUs and those of NVIDIA's that take graphs: where they live, why one is not there, and, where one
is, its answers. An environment without them skips the last part: `make environment NAME=onnx` has them.
"""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from kernelmark.baselines import _onnx, onednn
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure import device
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.workloads import forward

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
OWN = Catalog.default()
NEEDS = {"onnxruntime": "onnxruntime", "openvino": "openvino", "neural_compressor": "neural_compressor"}
SHAPES = {
    "matmul": {"M": 5, "N": 48, "K": 40},
    "int8_linear": {"M": 64, "N": 100, "K": 96},
    "attention": {"B": 2, "H": 4, "Hkv": 2, "S": 20, "D": 16},
    "attention_window": {"B": 1, "H": 4, "Hkv": 2, "S": 20, "D": 16, "W": 6},
    "attention_decode": {"B": 3, "Sq": 2, "H": 4, "Hkv": 2, "S": 32, "D": 16},
    "softmax": {"M": 3, "D": 40},
    "rms_norm": {"B": 2, "S": 3, "D": 40},
    "add_rms_norm": {"B": 2, "S": 3, "D": 40},
    "layer_norm": {"B": 2, "S": 3, "D": 40},
    "gelu": {"M": 3, "N": 40},
    "swiglu": {"M": 3, "N": 40},
    "geglu": {"M": 3, "N": 40},
}


def right(operator: str, implementation, dtype: str, **options) -> None:
    """The answer on inputs, after a first call on others, as the harness makes it."""
    definition = OWN.operator(operator)
    case = definition.case(SHAPES[operator], dtype, "forward", **options)
    bench = Workbench.build(definition, case, CPU, 1)
    call = bench.call(implementation(case))
    bench.lay_doubled()
    call()
    bench.lay(bench.values)
    deviation(bench.comparable(call()), bench.references, definition.tolerances[dtype])


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("operator", SHAPES)
def test_graphs_give_the_answers(name, operator):
    module = importlib.import_module(f"kernelmark.baselines.{name}")
    if find_spec(NEEDS[name]) is None or find_spec("onnx") is None:
        pytest.skip(f"{name} is not installed here")
    factory = module.IMPLEMENTATIONS[operator][name]
    right(operator, factory, "int8" if operator == "int8_linear" else "fp32")


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("matmul", {"layout": "tn", "epilogue": "bias"}),
        ("matmul", {"epilogue": "swiglu"}),
        ("attention", {"mask": "full"}),
        ("attention", {"storage": "bshd"}),
        ("attention", {"storage": "packed"}),
        ("attention_window", {"storage": "bshd"}),
        ("attention_decode", {"page": 16, "lengths": "mixed"}),
    ],
)
def test_graphs_of_other_options(name, operator, options):
    module = importlib.import_module(f"kernelmark.baselines.{name}")
    if find_spec(NEEDS[name]) is None or find_spec("onnx") is None:
        pytest.skip(f"{name} is not installed here")
    right(operator, module.IMPLEMENTATIONS[operator][name], "fp32", **options)


@pytest.mark.parametrize("operator", ["attention", "attention_window"])
def test_graphs_are_fed_what_lies_as_they_read_it(operator):
    """Runtimes are given addresses: of views they would read other numbers."""
    definition = OWN.operator(operator)
    case = definition.case(SHAPES[operator], "fp32", "forward", storage="packed")
    inputs = definition.built(case, CPU, torch.Generator().manual_seed(0))
    assert not inputs["q"].is_contiguous()
    graph = _onnx.Graph()
    graph.given("q", inputs["q"])
    (fed,) = graph.feeds(inputs).values()
    assert fed.is_contiguous()
    assert torch.equal(fed, inputs["q"])
    call = _onnx.in_order(case, lambda **given: None)
    assert all(x.is_contiguous() for x in call.conversion(**inputs))


@pytest.mark.parametrize("operator", ["attention", "attention_window", "attention_decode"])
@pytest.mark.parametrize(("option", "says"), [({"sinks": True}, "no sinks"), ({"cap": 30}, "no cap")])
def test_graphs_say_what_their_attention_lacks(operator, option, says):
    definition = OWN.operator(operator)
    case = definition.case(SHAPES[operator], "fp32", "forward", **option)
    with pytest.raises(NotImplementedError, match=says):
        _onnx.made(operator, case, definition.built(case, CPU, torch.Generator().manual_seed(0)))


def test_a_causal_graph_of_more_keys_than_queries_ends_with_both():
    """ONNX's own causal mask begins with both."""
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        pytest.skip("onnxruntime is not installed here")
    from kernelmark.baselines.onnxruntime import IMPLEMENTATIONS

    definition = OWN.operator("attention")
    case = definition.case(SHAPES["attention"] | {"Sk": 33}, "fp32", "forward")
    bench = Workbench.build(definition, case, CPU, 1)
    call = bench.call(IMPLEMENTATIONS["attention"]["onnxruntime"](case))
    deviation(bench.comparable(call()), bench.references, definition.tolerances["fp32"])


def test_what_a_runtime_has_no_kernel_for_is_unsupported():
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        pytest.skip("onnxruntime is not installed here")
    from kernelmark.baselines.onnxruntime import IMPLEMENTATIONS

    with pytest.raises(NotImplementedError, match="ONNX Runtime: Could not find an implementation for Gemm"):
        right("matmul", IMPLEMENTATIONS["matmul"]["onnxruntime"], "bf16")


def test_a_provider_that_is_not_there_is_never_the_cpus(recwarn):
    """The runtime itself takes its CPU provider in place of one that it cannot load, with a warning at most."""
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        pytest.skip("onnxruntime is not installed here")
    from kernelmark.baselines.onnxruntime import running

    factory = running("softmax", [("CUDAExecutionProvider", {})], "cuda")
    with pytest.raises(ImportError, match="cannot load its CUDAExecutionProvider here"):
        right("softmax", factory, "fp32")


def test_on_a_gpu_its_stream_is_joined_to_torchs(monkeypatch):
    """On made-up streams: a call begins behind what torch queued, and what torch queues then behind the call."""
    from kernelmark.baselines import onnxruntime, onnxruntime_gpu

    done, given = [], []

    class Stream:
        def __init__(self, cuda_stream: int = 77) -> None:
            self.cuda_stream = cuda_stream

        def wait_stream(self, other: Stream) -> None:
            done.append((self.cuda_stream, other.cuda_stream))

    def running(operator, providers, device):
        given.append((operator, providers, device))
        return lambda case: lambda **inputs: done.append("run") or inputs["x"]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(onnxruntime, "running", running)
    call = onnxruntime_gpu.IMPLEMENTATIONS["softmax"]["onnxruntime_gpu"](None)
    assert call(x=3) == 3
    assert done == [(77, 0), "run", (0, 77)]
    options = {"user_compute_stream": "77", "device_id": "1", "use_tf32": "0"}
    assert given == [("softmax", [("CUDAExecutionProvider", options)], "cuda")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_onednn_is_what_runs(dtype, capfd):
    """As oneDNN itself tells, which PyTorch's product in fp32 does not call where it has MKL."""
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with pytest.raises(NotImplementedError, match="AVX-512"):
            right("matmul", onednn.matmul, dtype)
        return
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        right("matmul", onednn.matmul, dtype)
        said = capfd.readouterr().out
    assert re.search(r"primitive,exec,cpu,(matmul|inner_product)", said)


@pytest.mark.parametrize("vnni", [True, False])
def test_an_8_bit_layer(vnni, monkeypatch):
    """Without VNNI the input has 7 bits, with which no sum of two products leaves 16."""
    if vnni and not torch.cpu._is_vnni_supported():
        pytest.skip("8 bits of both overflow on a CPU without VNNI")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    right("int8_linear", onednn.int8_linear, "int8")


def test_a_layout_that_it_does_not_take():
    with pytest.raises(NotImplementedError, match="layout nt"):
        right("matmul", onednn.matmul, "fp32", layout="nn")


@pytest.mark.parametrize(
    ("name", "device", "environment"),
    [
        ("onnxruntime", "cpu", "onnx"),
        ("openvino", "cpu", "onnx"),
        ("neural_compressor", "cpu", "neural_compressor"),
        ("onnxruntime_gpu", "cuda", "onnxruntime_gpu"),
    ],
)
def test_each_has_an_environment_with_a_lock(name, device, environment, monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELMARK_ENVIRONMENTS", str(tmp_path))
    mine = [x for x in OWN.parts if x.provider == name]
    assert {x.operator for x in mine} == set(
        importlib.import_module(f"kernelmark.baselines.{name}").IMPLEMENTATIONS
    )
    for x in mine:
        assert (x.environment, x.devices) == (environment, (device,))
        remedy = f"environment {environment!r} is not installed: make environment NAME={environment}"
        assert x.unavailable(device) == ("unavailable", remedy)
    locks = [x.read_text() for x in (ROOT / "requirements").glob(f"*{environment}.txt")]
    assert all(any(re.search(rf"^{x}==", text, re.MULTILINE) for text in locks) for x in mine[0].requires)
    makefile = (ROOT / "Makefile").read_text()
    assert environment in " ".join(re.findall(r"ENVIRONMENTS := (.*)", makefile)).split()


@pytest.mark.parametrize("name", ["tensorrt", "torch_tensorrt", "tensorrt_llm"])
def test_what_cannot_be_locked_says_why(name, monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELMARK_ENVIRONMENTS", str(tmp_path))
    mine = [x for x in OWN.parts if x.provider == name]
    assert mine
    for x in mine:
        status, reason = x.unavailable("cuda") or ("", "")
        assert status == "unavailable"
        assert re.search(r"cannot be locked: what PyPI has .* NVIDIA's own index while .* by hand$", reason)
        assert x.unavailable("cpu") == ("unsupported", "needs a cuda device, this is cpu")


@pytest.mark.parametrize("model", ["llama-tiny", "bert-tiny"])
def test_exported_models_give_the_logits(model):
    for name in ("onnxruntime", "onnx", "onnxscript"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed here")
    case = forward.WORKLOAD.case({"B": 2, "S": 12}, "fp32", "program", model=model)
    session = Session(device.Cpu(), 5, 0, Sampling(4, 4, 0, 60, warmup_s=0), Stages())
    system = next(x for x in OWN.of_operator("forward") if x.name == "onnxruntime_model").load()(case)
    found = forward.measure(case, system, session, forward.prepare(case, session)).samples
    assert found["logits_error"][0] < 1e-5
