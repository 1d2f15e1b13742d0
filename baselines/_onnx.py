"""Operators as graphs of ONNX, for the runtimes that compile such graphs: `onnxruntime.py`, `openvino.py`,
`tensorrt.py`.

A graph is made for one case from the tensors of its first call: shapes and dtypes are fixed in it, as an exporter
fixes them, and nothing else. All tensors are fed with each call, because a case's inputs are; only the weight of a
layer, which stays, is a constant. Operators are ONNX's own of opset 23, fused ones where it has them (Attention,
RMSNormalization, LayerNormalization, Gelu).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import _blocks
from ._terms import Call, forcing

OPSET = 23
IR = 11
"""The version of the file's form that belongs to the opset: runtimes refuse newer ones than they know."""
KINDS = {
    "float32": "FLOAT",
    "bfloat16": "BFLOAT16",
    "float16": "FLOAT16",
    "int32": "INT32",
    "int64": "INT64",
    "int8": "INT8",
    "bool": "BOOL",
}
"""torch's dtypes, each by ONNX's name."""


@dataclass
class Graph:
    """A graph in the making, and then what feeds it."""

    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    fed: dict[str, tuple[Any, Callable[[Any], Any]]] = field(default_factory=dict)
    """By name, a tensor of the right shape and dtype, and the view of the operator's input that is fed."""

    def given(self, name: str, tensor: Any, view: Callable[[Any], Any] = lambda x: x) -> str:
        """An input of the operator as an input of the graph; `view` gives it contiguous, without a copy where its
        order in memory is one that the graph knows. Runtimes are given addresses: others are copied (`in_order`).
        """

        def fed(x: Any) -> Any:
            return view(x).contiguous()

        self.fed[name] = (fed(tensor), fed)
        return name

    def constant(self, tensor: Any) -> str:
        """A tensor that stays."""
        from onnx import numpy_helper

        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(tensor.contiguous().cpu().numpy(), name))
        return name

    def several(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """A node with several results."""
        from onnx import helper

        names = [f"n{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names

    def __call__(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node with one result."""
        return self.several(kind, 1, *inputs, **attributes)[0]

    def serialized(self, results: list[tuple[str, str]]) -> bytes:
        """The model, whose results are these names, each of an ONNX kind."""
        from onnx import TensorProto, helper

        def value(name: str, kind: str, shape: Any) -> Any:
            return helper.make_tensor_value_info(name, getattr(TensorProto, kind), shape)

        inputs = [value(name, kind(x), list(x.shape)) for name, (x, _) in self.fed.items()]
        outputs = [value(name, of, None) for name, of in results]
        graph = helper.make_graph(self.nodes, "operator", inputs, outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET)]
        model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=IR).SerializeToString()
        return model

    def feeds(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What is fed of an operator's inputs."""
        return {name: view(inputs[name]) for name, (_, view) in self.fed.items()}


def kind(tensor: Any) -> str:
    """ONNX's name of a tensor's dtype. Raises `NotImplementedError` for one that no graph here has."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in KINDS:
        raise NotImplementedError(f"no graph of ONNX here takes {name}")
    return KINDS[name]


def in_order(case: Any, call: Call) -> Call:
    """`call` of a runtime, which copies queries, keys and values that do not lie as (B, H, S, D)."""

    def conversion(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        return [x.contiguous() for x in (q, k, v)]

    return call if case.options.get("storage", "bhsd") == "bhsd" else forcing(call, conversion)


Maker = Callable[..., "str | list[str]"]


def made(operator: str, case: Any, inputs: dict[str, Any]) -> tuple[Graph, bytes]:
    """The graph of a case, and its file, for tensors like these. Raises `NotImplementedError` where none is."""
    if case.pass_ != "forward":
        raise NotImplementedError("graphs of ONNX are for inference: they have no backward pass")
    _blocks.takes(case, "ONNX's Attention as it is called here", "Sk")
    graph = Graph()
    results = MAKERS[operator](graph, case, **inputs)
    first = next(x for x in inputs.values() if hasattr(x, "dtype"))
    names = [results] if isinstance(results, str) else results
    return graph, graph.serialized([(name, kind(first)) for name in names])


def matmul(g: Graph, case: Any, a: Any, b: Any, bias: Any, gated: bool) -> str:
    """`Gemm` with the matrices as they lie; a SwiGLU after it in operators of its own."""
    a_turned, b_turned = {"nt": (0, 1), "nn": (0, 0), "tn": (1, 0)}[case.options["layout"]]

    def turned(x: Any) -> Any:
        return x.t()

    def plain(x: Any) -> Any:
        return x

    operands = [
        g.given(name, x, turned if way else plain) for name, x, way in (("a", a, a_turned), ("b", b, b_turned))
    ]
    if bias is not None:
        operands.append(g.given("bias", bias))
    y = g("Gemm", *operands, transA=a_turned, transB=b_turned)
    if not gated:
        return y
    gate, up = g.several("Split", 2, y, axis=1, num_outputs=2)
    return g("Mul", g("Mul", gate, g("Sigmoid", gate)), up)


def attention(g: Graph, case: Any, q: Any, k: Any, v: Any, mask: str) -> str:
    """`Attention`, causal by its attribute; grouped heads as they are. That aligns the first query and key: of
    another number of keys the mask is of elements, a constant.
    """
    names = [g.given(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    if mask == "causal" and k.shape[2] != q.shape[2]:
        return g("Attention", *names, g.constant(_blocks.lower_right(q.shape[2], k.shape[2], (-1, 0), q.device)))
    return g("Attention", *names, is_causal=int(mask == "causal"))


def attention_window(g: Graph, case: Any, q: Any, k: Any, v: Any, mask: str, window: int) -> str:
    """`Attention` with a mask of elements, a constant: ONNX's has no window."""
    from ._blocks import window_mask

    names = [g.given(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    return g("Attention", *names, g.constant(window_mask(case, q.device)))


def attention_decode(
    g: Graph, case: Any, q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any
) -> str:
    """`Attention` with a mask made of the lengths; of a paged cache the pages are gathered first."""
    import torch

    B, Sq, S = (case.axes[axis] for axis in ("B", "Sq", "S"))
    caches = [g.given(name, x) for name, x in (("k_cache", k_cache), ("v_cache", v_cache))]
    if block_table is not None:
        S = block_table.shape[1] * k_cache.shape[1]
        table = g.given("block_table", block_table)
        shape = g.constant(torch.tensor([B, S, *k_cache.shape[2:]]))
        caches = [g("Reshape", g("Gather", x, table, axis=0), shape) for x in caches]
    turned = [g("Transpose", x, perm=[0, 2, 1, 3]) for x in (g.given("q", q), *caches)]
    # Token i of Sq sees the keys before length − Sq + i + 1.
    places = g.constant((torch.arange(S)[None] - torch.arange(Sq)[:, None] + Sq - 1).to(torch.int32))
    shape = g.constant(torch.tensor([B, 1, 1, 1]))
    seen = g("Less", places, g("Reshape", g.given("lengths", lengths), shape))
    return g("Transpose", g("Attention", *turned, seen), perm=[0, 2, 1, 3])


def softmax(g: Graph, case: Any, x: Any) -> str:
    """`Softmax`."""
    return g("Softmax", g.given("x", x), axis=-1)


def rms_norm(g: Graph, case: Any, x: Any, weight: Any, eps: float) -> str:
    """`RMSNormalization`."""
    return g("RMSNormalization", g.given("x", x), g.given("weight", weight), axis=-1, epsilon=eps)


def add_rms_norm(g: Graph, case: Any, x: Any, residual: Any, weight: Any, eps: float) -> list[str]:
    """`Add` and `RMSNormalization`."""
    h = g("Add", g.given("x", x), g.given("residual", residual))
    return [g("RMSNormalization", h, g.given("weight", weight), axis=-1, epsilon=eps), h]


def layer_norm(g: Graph, case: Any, x: Any, weight: Any, bias: Any, eps: float) -> str:
    """`LayerNormalization`."""
    names = (g.given(name, y) for name, y in (("x", x), ("weight", weight), ("bias", bias)))
    return g("LayerNormalization", *names, axis=-1, epsilon=eps)


def gelu(g: Graph, case: Any, x: Any, approximate: str) -> str:
    """`Gelu`."""
    return g("Gelu", g.given("x", x), approximate=approximate)


def swiglu(g: Graph, case: Any, gate: Any, up: Any) -> str:
    """`Sigmoid` and two products."""
    name = g.given("gate", gate)
    return g("Mul", g("Mul", name, g("Sigmoid", name)), g.given("up", up))


def geglu(g: Graph, case: Any, gate: Any, up: Any) -> str:
    """`Gelu`, the tanh form, and a product."""
    return g("Mul", g("Gelu", g.given("gate", gate), approximate="tanh"), g.given("up", up))


def int8_linear(g: Graph, case: Any, x: Any, layer: Any) -> str:
    """What `onnxruntime.quantization.quantize_dynamic` makes of a layer: the input quantized by
    `DynamicQuantizeLinear`, `MatMulInteger` with a constant weight of a scale an output, and both scales after it.
    """
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    constant = (weight / scale[:, None]).round().char().t()
    q, x_scale, zero = g.several("DynamicQuantizeLinear", 3, g.given("x", x))
    sums = g("Cast", g("MatMulInteger", q, g.constant(constant), zero), to=1)
    return g("Mul", sums, g("Mul", x_scale, g.constant(scale)))


def int8_linear_by_weight(g: Graph, case: Any, x: Any, layer: Any) -> str:
    """The same layer with only its weight in 8 bits, `DequantizeLinear` before a `MatMul`: the form from which a
    compiler chooses by itself how the input is rounded.
    """
    weight = layer.weight.detach().float()
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    constant = g.constant((weight / scale[:, None]).round().char())
    wide = g("DequantizeLinear", constant, g.constant(scale), axis=0)
    return g("MatMul", g.given("x", x), g("Transpose", wide, perm=[1, 0]))


MAKERS: dict[str, Maker] = {
    "add_rms_norm": add_rms_norm,
    "attention": attention,
    "attention_decode": attention_decode,
    "attention_window": attention_window,
    "geglu": geglu,
    "gelu": gelu,
    "int8_linear": int8_linear,
    "int8_linear_by_weight": int8_linear_by_weight,
    "layer_norm": layer_norm,
    "matmul": matmul,
    "rms_norm": rms_norm,
    "softmax": softmax,
    "swiglu": swiglu,
}
