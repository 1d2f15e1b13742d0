"""A decode step of the serving engine with our kernels: which they are, and that its answer is the model's."""

import collections
import dataclasses

import pytest
import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads._serving.engine import Engine

CPU = torch.device("cpu")


class AsOnGpu(Assembly):
    """Implementations for CUDA, which the interpreter runs here; counts the calls of each operator."""

    def implementation(self, part, operator, device):
        return super().implementation(part, operator, "cuda")

    def call(self, part, operator, axes, options, dtype, device):
        made = super().call(part, operator, axes, options, dtype, "cuda")

        def counted(*arguments, **named):
            counts[operator] += 1
            return made(*arguments, **named)

        return counted


counts = collections.Counter()


@pytest.mark.parametrize(
    ("model", "parts", "wanted"),
    [
        # A layer: joined projections, turned and written, attention, output, gate and up in one, down; the logits.
        (
            "llama-tiny",
            {},
            {"matmul": 5, "rope_cache_write": 1, "attention_decode": 1, "rms_norm": 1, "add_rms_norm": 2},
        ),
        # An exchanged activation is called, and so is an exchanged rotation.
        (
            "llama-tiny",
            {"swiglu": "torch", "rope": "torch"},
            {"matmul": 6, "swiglu": 1, "rope": 1, "attention_decode": 1, "rms_norm": 1, "add_rms_norm": 2},
        ),
        ("gpt2-tiny", {}, {"matmul": 5, "gelu": 1, "attention_decode": 1, "layer_norm": 3}),
    ],
)
def test_what_a_step_calls(model, parts, wanted):
    catalog = Catalog.default()
    found = chosen(catalog.models, model).first(1)
    small = dataclasses.replace(found.configuration, vocabulary=48)  # the interpreter takes its time
    found = dataclasses.replace(found, configuration=small)
    assembly = AsOnGpu(System("kernelmark", base="kernelmark", parts=parts), catalog)
    e = Engine(assembly, found, "fp16", inference.initial(found, "fp16", 3, CPU), 2, 16, 16)
    tokens = torch.randint(0, 48, (2, 6), generator=torch.Generator().manual_seed(1))
    rows = [e.hold(16), e.hold(16)][::-1]
    given = [e.prefill(tokens[:, :5], rows)]
    counts.clear()
    given.append(e.decode(tokens[:, 5], rows))
    assert counts == wanted
    logits = torch.stack([x.logits for x in given], 1)
    answer = inference.answer(found, "fp16", 3, tokens, range(4, 6), catalog)
    assert inference.deviation(model, logits, answer, "fp16") < 5e-3
    assert given[1].token.tolist() == given[1].logits.argmax(-1).tolist()
