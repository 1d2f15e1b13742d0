"""TensorRT: each operator as a graph of ONNX (`_onnx.py`), from which an engine is built for the GPU. Not run yet.

The engine is built for the case's shapes in the graph's own precision (strongly typed); building takes seconds to
minutes and is outside of what is timed.
"""

from __future__ import annotations

from typing import Any

from . import _onnx
from ._terms import Call

REQUIRES = ("tensorrt", "onnx")
ENVIRONMENT = "tensorrt"
DEVICES = ("cuda",)
NO_ENVIRONMENT = (
    "TensorRT cannot be locked: what PyPI has since 8.6.0 are stubs that fetch the libraries from NVIDIA's own "
    "index while they are installed; install tensorrt, onnx and kernelmark in .venv-tensorrt by hand"
)


def running(operator: str) -> Any:
    """A factory for an operator."""

    def factory(case: Any) -> Call:
        import tensorrt
        import torch

        made: tuple[_onnx.Graph, Any, list[tuple[str, Any]]] | None = None

        def built(inputs: dict[str, Any]) -> tuple[_onnx.Graph, Any, list[tuple[str, Any]]]:
            graph, model = _onnx.made(operator, case, inputs)
            logger = tensorrt.Logger(tensorrt.Logger.ERROR)
            builder = tensorrt.Builder(logger)
            network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            parser = tensorrt.OnnxParser(network, logger)
            if not parser.parse(model):
                raise NotImplementedError(f"TensorRT: {parser.get_error(0).desc()}")
            plan = builder.build_serialized_network(network, builder.create_builder_config())
            if plan is None:
                raise NotImplementedError("TensorRT has no implementation of this graph")
            engine = tensorrt.Runtime(logger).deserialize_cuda_engine(plan)
            first = next(x for x, _ in graph.fed.values())
            names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
            given = [x for x in names if engine.get_tensor_mode(x) == tensorrt.TensorIOMode.OUTPUT]
            like = [(x, first.new_empty(tuple(engine.get_tensor_shape(x)))) for x in given]
            return graph, engine.create_execution_context(), like

        def call(**inputs: Any) -> Any:
            nonlocal made
            if made is None:
                made = built(inputs)
            graph, context, like = made
            answers = [torch.empty_like(x) for _, x in like]
            feeds = graph.feeds(inputs)  # it is given addresses: what was copied must live until it ran
            for name, x in (*feeds.items(), *zip((n for n, _ in like), answers, strict=True)):
                context.set_tensor_address(name, x.data_ptr())
            if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
                raise RuntimeError("TensorRT could not run its engine")
            return answers[0] if len(answers) == 1 else tuple(answers)

        return _onnx.in_order(case, call)

    factory.__doc__ = f"`{operator}` as an engine."
    return factory


GRAPHS = tuple(x for x in _onnx.MAKERS if not x.startswith("int8_linear"))
IMPLEMENTATIONS = {x: {"tensorrt": running(x)} for x in GRAPHS}
