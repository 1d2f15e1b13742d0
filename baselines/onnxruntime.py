"""ONNX Runtime on a CPU: each operator as a graph (`_onnx.py`), and whole models as PyTorch exports them
(`_onnx_models.py`), optimized by the runtime, its threads as torch's.

Inputs are bound where they lie and answers are written into memory of ours, so that nothing is copied but what
lies in another order than the graph's. Its CPU provider computes in fp32 and int8: what it has no kernel for
(bf16, most of all) it refuses when it loads a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _onnx, _onnx_models
from ._terms import Call

REQUIRES = ("onnxruntime", "onnx")
ENVIRONMENT = "onnx"
DEVICES = ("cpu",)
CPU = ("CPUExecutionProvider",)
REFUSED = "NOT_IMPLEMENTED"
ELSEWHERE = "fallback to CPU EP has been explicitly disabled"


def session(
    operator: str, case: Any, inputs: dict[str, Any], providers: list[Any]
) -> tuple[_onnx.Graph, Any, list[Any]]:
    """The graph of a case, a session that runs it, and an empty answer of each shape. Raises as `opened`."""
    graph, model = _onnx.made(operator, case, inputs)
    runner = opened(model, providers)
    first = next(x for x, _ in graph.fed.values())
    return graph, runner, [first.new_empty(x.shape) for x in runner.get_outputs()]


def opened(model: bytes | str, providers: list[Any]) -> Any:
    """A session that runs a model, given whole or by its file.

    Raises `NotImplementedError` with the runtime's words where its provider has no kernel of a node, and
    `ImportError` where the provider itself cannot be loaded: the runtime would give both to its CPU provider and
    say nothing.
    """
    import onnxruntime
    import torch

    name = providers[0] if isinstance(providers[0], str) else providers[0][0]
    options = onnxruntime.SessionOptions()
    if name not in CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model, options, providers=providers, enable_fallback=False)
    except Exception as error:  # its own errors have no common class that is public
        if ELSEWHERE in str(error):
            anyhow = onnxruntime.InferenceSession(model, providers=providers, enable_fallback=False)
            if name not in anyhow.get_providers():
                raise ImportError(f"ONNX Runtime cannot load its {name} here") from None
            raise NotImplementedError(
                f"ONNX Runtime: {name} has no kernel of a node, and a CPU's is refused"
            ) from None
        if REFUSED in str(error) or type(error).__name__ == "NotImplemented":
            said = str(error).splitlines()[0].rpartition(" : ")[2]
            raise NotImplementedError(f"ONNX Runtime: {said}") from None
        raise


def bound(call_session: Any, feeds: dict[str, Any], answers: list[Any], device: str) -> Any:
    """A binding of a session's inputs and outputs to memory of torch's."""
    from onnx import TensorProto

    binding = call_session.io_binding()

    def place(x: Any) -> tuple[Any, ...]:
        index = x.device.index or 0
        return device, index, int(getattr(TensorProto, _onnx.kind(x))), tuple(x.shape), x.data_ptr()

    for name, x in feeds.items():
        binding.bind_input(name, *place(x))
    for node, x in zip(call_session.get_outputs(), answers, strict=True):
        binding.bind_output(node.name, *place(x))
    return binding


def options(device: str) -> Any:
    """How a session is run: a GPU's answer is waited for by whoever reads it, as with all others."""
    import onnxruntime

    how = onnxruntime.RunOptions()
    if device != "cpu":
        how.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return how


def modelled(providers: list[Any], device: str) -> _onnx_models.Passes:
    """A whole model by these execution providers."""
    how = options(device)

    def run(runner: Any, feeds: dict[str, Any], answers: list[Any]) -> None:
        runner.run_with_iobinding(bound(runner, feeds, answers, device), how)

    return _onnx_models.Passes(lambda path: opened(path, providers), run)


def forward(case: Any) -> _onnx_models.Passes:
    """Transformers' model of its own class, as PyTorch exports it."""
    return modelled([*CPU], "cpu")


def running(operator: str, providers: list[Any], device: str) -> Callable[[Any], Call]:
    """A factory for an operator by these execution providers, the first that takes a node."""

    def factory(case: Any) -> Call:
        import onnxruntime  # noqa: F401  # what is missing is said before the inputs are made
        import torch

        made: tuple[_onnx.Graph, Any, list[Any]] | None = None
        how = options(device)

        def call(**inputs: Any) -> Any:
            nonlocal made
            if made is None:
                made = session(operator, case, inputs, providers)
            graph, runner, like = made
            answers = [torch.empty_like(x) for x in like]
            feeds = graph.feeds(inputs)  # a binding knows addresses alone: what was copied must live until it ran
            runner.run_with_iobinding(bound(runner, feeds, answers, device), how)
            return answers[0] if len(answers) == 1 else tuple(answers)

        return _onnx.in_order(case, call)

    factory.__doc__ = f"`{operator}` as a graph, by {providers[0]}."
    return factory


OPERATORS = tuple(x for x in _onnx.MAKERS if x != "int8_linear_by_weight")
IMPLEMENTATIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    **{x: {"onnxruntime": running(x, [*CPU], "cpu")} for x in OPERATORS},
    "forward": {"onnxruntime_model": forward},
}
