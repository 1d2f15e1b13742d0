"""Intel Neural Compressor on a CPU: a layer quantized to 8 bits by its PT2E path, then compiled by Inductor.

The path that its documentation gives for processors: `export`, `prepare`, `convert`, then `torch.compile` with the
weight frozen into the program, where Inductor calls oneDNN's products of 8-bit integers.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call

REQUIRES = ("neural-compressor", "torchao")
ENVIRONMENT = "neural_compressor"
DEVICES = ("cpu",)


def int8_linear(case: Any) -> Call:
    """`DynamicQuantConfig`: the weight by output channel beforehand, the input as a whole in each call."""
    import torch
    from neural_compressor.torch.export import export
    from neural_compressor.torch.quantization import convert, get_default_dynamic_config, prepare

    compiled: Any = None

    def quantized(x: Any, layer: Any) -> Any:
        model = torch.nn.Sequential(layer).eval()
        exported = export(model, example_inputs=(x,))
        ready = prepare(exported, get_default_dynamic_config())
        ready(x)
        program: Any = torch.compile(convert(ready), dynamic=False, options={"freezing": True})
        with torch.no_grad():
            program(x)
        return program

    def call(x: Any, layer: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = quantized(x, layer)
        return compiled(x)

    return call


IMPLEMENTATIONS = {"int8_linear": {"neural_compressor": int8_linear}}
