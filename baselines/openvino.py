"""OpenVINO on a CPU: each operator as a graph of ONNX (`_onnx.py`) that it compiles, with torch's threads.

The precision that it computes in is held to the case's: by default it would compute fp32 graphs in bf16 where the
processor has that. Inputs are read where they lie and answers are written into memory of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _onnx
from ._terms import Call

REQUIRES = ("openvino", "onnx")
ENVIRONMENT = "onnx"
DEVICES = ("cpu",)


def running(operator: str, form: str) -> Callable[[Any], Call]:
    """A factory for an operator, from the graph of that form."""

    def factory(case: Any) -> Call:
        import openvino
        import torch

        compiled: tuple[_onnx.Graph, Any, list[Any]] | None = None

        def opened(inputs: dict[str, Any]) -> tuple[_onnx.Graph, Any, list[Any]]:
            graph, model = _onnx.made(form, case, inputs)
            core = openvino.Core()
            first = next(x for x, _ in graph.fed.values())
            precision = {"bfloat16": "bf16", "float16": "f16"}.get(str(first.dtype).removeprefix("torch."), "f32")
            program = core.compile_model(
                core.read_model(model),
                "CPU",
                {
                    "INFERENCE_PRECISION_HINT": precision,
                    "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                    "PERFORMANCE_HINT": "LATENCY",
                },
            )
            like = [first.new_empty(tuple(x.shape)) for x in program.outputs]
            return graph, program.create_infer_request(), like

        def call(**inputs: Any) -> Any:
            nonlocal compiled
            if compiled is None:
                compiled = opened(inputs)
            graph, request, like = compiled
            answers = [torch.empty_like(x) for x in like]
            feeds = graph.feeds(inputs)  # what was copied must live until it ran
            for name, x in feeds.items():
                request.set_tensor(name, seen(x))
            for place, x in enumerate(answers):
                request.set_output_tensor(place, seen(x))
            request.infer()
            return answers[0] if len(answers) == 1 else tuple(answers)

        return _onnx.in_order(case, call)

    factory.__doc__ = f"`{operator}` as a compiled graph."
    return factory


def seen(x: Any) -> Any:
    """A tensor of torch's as OpenVINO's, in the same memory."""
    import openvino
    import torch

    if x.dtype == torch.bfloat16:  # which numpy has not
        return openvino.Tensor(x.view(torch.int16).numpy(), openvino.Shape(list(x.shape)), openvino.Type.bf16)
    return openvino.Tensor(x.numpy(), shared_memory=True)


FORMS = {x: x for x in _onnx.MAKERS if x != "int8_linear_by_weight"} | {"int8_linear": "int8_linear_by_weight"}
IMPLEMENTATIONS = {x: {"openvino": running(x, form)} for x, form in FORMS.items()}
