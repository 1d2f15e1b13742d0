"""A decode step of the serving engine with our kernels: which they are, and that its answer is the model's."""

import collections
import dataclasses

import pytest
import torch
from kernelmark.suite import fused_blocks
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads._serving import few_rows
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

    def eight_bits(self, dtype, device):
        """By PyTorch, in fp16 too, which the interpreter rounds as it should be."""

        def quantize(x, scaled):
            assert scaled == "row"
            counts["fp8_quant"] += 1
            scale = x.abs().amax(1, keepdim=True).float() / 448
            return (x / scale).to(torch.float8_e4m3fn), scale

        def product(a, b, of_a, of_b, scaled, bias):
            return ((a.float() * of_a) @ (b.float() * of_b)).half()

        return quantize, product


counts = collections.Counter()


def engine(found, catalog, parts, dtype="fp16", sequences=2, **fields):
    """Of a small vocabulary: the interpreter takes its time."""
    small = dataclasses.replace(found.configuration, vocabulary=48)
    found = dataclasses.replace(found, configuration=small)
    assembly = AsOnGpu(System("kernelmark", base="kernelmark", parts=parts, **fields), catalog)
    return found, Engine(assembly, found, dtype, inference.initial(found, dtype, 3, CPU), sequences, 16, 16)


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
    found, e = engine(chosen(catalog.models, model).first(1), catalog, parts)
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


# Of the first layer the norm and the projections are as of several rows. Then all that is added is added by the
# product before it, and all that is normalized by the products behind it, the logits among them; queries, keys and
# values of the second are turned and written where they are projected.
APART = {"rms_norm": 1, "matmul": 1, "rope_cache_write": 2, "attention_decode": 2}
FUSED = {**APART, "added": 4, "normed": 3, "turned": 1, "rope_cache_write": 1}


@pytest.mark.parametrize(
    ("changes", "parts", "wanted"),
    [
        ({}, {}, FUSED),
        ({"tied": False}, {}, FUSED),
        ({"head": 8}, {}, FUSED),
        ({"head": 128}, {}, FUSED),
        ({"head": 20}, {}, {**APART, "added": 4, "normed": 4, "turned": 0}),
        ({"qk_norm": "head"}, {}, {**APART, "rms_norm": 5, "added": 4, "normed": 4, "turned": 0}),
        ({}, {"rope": "torch"}, {**APART, "rope": 2, "rope_cache_write": 0, "added": 4, "normed": 4, "turned": 0}),
        ({"multipliers": (2.0, 0.5, 0.2, 0.5)}, {}, {**APART, "matmul": 9, "add_rms_norm": 4, "added": 0}),
        ({}, {"add_rms_norm": "torch"}, {**APART, "matmul": 9, "add_rms_norm": 4, "added": 0}),
        ({}, {"swiglu": "torch"}, {**APART, "matmul": 11, "swiglu": 2, "add_rms_norm": 4, "added": 0}),
        ({}, {"matmul": "torch"}, {**APART, "matmul": 0, "add_rms_norm": 4, "added": 0}),
    ],
)
@pytest.mark.parametrize("B", [1, 2])
def test_what_a_step_of_few_sequences_calls(monkeypatch, changes, parts, wanted, B):
    """What a system exchanges is called by itself. In fp16, which the interpreter rounds as it should be."""
    own = fused_blocks.few_rows(Catalog.default())
    monkeypatch.setattr(few_rows, "DTYPES", ("fp16",))

    def counting(name):
        def call(*given, **named):
            counts[name] += 1
            return getattr(own, name)(*given, **named)

        return call

    counted = fused_blocks.FewRowKernels(*map(counting, own._fields))
    monkeypatch.setattr(fused_blocks, "few_rows", lambda _: counted)
    catalog = Catalog.default()
    found = chosen(catalog.models, "llama-tiny").first(2)
    found = dataclasses.replace(found, configuration=dataclasses.replace(found.configuration, **changes))
    found, e = engine(found, catalog, parts)
    tokens = torch.randint(0, 48, (B, 7), generator=torch.Generator().manual_seed(1))
    rows = [e.hold(16) for _ in range(B)]
    given = [e.prefill(tokens[:, :5], rows)]
    counts.clear()
    given.append(e.decode(tokens[:, 5], rows))
    assert {x: counts[x] for x in wanted} == wanted
    given.append(e.decode(tokens[:, 6], rows))
    logits = torch.stack([x.logits for x in given], 1)
    answer = inference.answer(found, "fp16", 3, tokens, range(4, 7), catalog)
    assert inference.deviation("llama", logits, answer, "fp16") < 5e-3


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"tied": False, "head": 20}])
def test_matrices_in_eight_bits_are_multiplied_by_rows_in_sixteen(monkeypatch, changes, B):
    """As by the numbers that they hold: a step quantizes nothing. A prompt's inputs are quantized."""
    monkeypatch.setattr(few_rows, "DTYPES", ("fp16",))
    catalog = Catalog.default()
    found = chosen(catalog.models, "llama-tiny").first(2)
    found = dataclasses.replace(found, configuration=dataclasses.replace(found.configuration, **changes))
    found, e = engine(found, catalog, {}, sequences=3, precision="parts_rowwise")
    assert e.few is not None
    held = [(x, *e.quantized.held([x])) for x in e.module.layers.parameters() if x.dim() == 2]
    assert len(held) == 14
    tokens = torch.randint(0, 48, (B, 7), generator=torch.Generator().manual_seed(1))
    rows = [e.hold(16) for _ in range(B)]
    e.prefill(tokens[:, :5], rows)
    kept = [x.clone() for x in (*e.memory.tensors, e.lengths)]

    def decoded():
        for x, before in zip((*e.memory.tensors, e.lengths), kept, strict=True):
            x.copy_(before)
        e._steps.clear()
        counts.clear()
        return torch.stack([e.decode(tokens[:, i], rows).logits for i in (5, 6)])

    found = decoded()
    assert counts["fp8_quant"] == 2  # the first layer's norm, before which nothing is added, is as of many rows
    e.few = None
    quantized = decoded()
    assert counts["fp8_quant"] > 10
    for weight, values, scale in held:
        weight.data = (values.float() * scale.view(-1, 1)).half()
    e.quantized = None
    exact = decoded()
    assert 0 < (found - exact).norm() < 0.8 * (quantized - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("named", ["fp8_matmul", "fp8_quant", "linear"])
def test_products_in_eight_bits_that_a_system_exchanges_are_called(monkeypatch, named):
    monkeypatch.setattr(few_rows, "DTYPES", ("fp16",))
    found = chosen(Catalog.default().models, "llama-tiny").first(1)
    parts = {named: "torch_compile" if named == "linear" else "torch"}
    _, e = engine(found, Catalog.default(), parts, precision="parts_rowwise")
    assert e.few is None


def test_which_dtypes_are_decoded_so():
    """In fp16 what is not normalized may be too large."""
    catalog = Catalog.default()
    found = chosen(catalog.models, "llama-tiny").first(1)
    assert {x: engine(found, catalog, {}, x)[1].few is not None for x in ("bf16", "fp16", "fp32")} == {
        "bf16": True,
        "fp16": False,
        "fp32": False,
    }


@pytest.mark.parametrize(("B", "size", "fused"), [(1, 1, True), (3, 4, True), (9, 16, True), (17, 17, False)])
def test_sequences_of_their_own_lengths(monkeypatch, B, size, fused):
    """Filled up with the row that is nobody's; more than few are as ever."""
    monkeypatch.setattr(few_rows, "DTYPES", ("fp16",))
    catalog = Catalog.default()
    found, e = engine(chosen(catalog.models, "llama-tiny").first(2), catalog, {}, sequences=17)
    tokens = torch.randint(0, 48, (B, 8), generator=torch.Generator().manual_seed(1))
    rows, lengths = [e.hold(16) for _ in range(B)], [2 + i % 5 for i in range(B)]
    for row, text, length in zip(rows, tokens, lengths, strict=True):
        e.prefill(text[None, :length], [row])
    last = torch.stack([text[length] for text, length in zip(tokens, lengths, strict=True)])
    counts.clear()
    with torch.no_grad():
        logits = e._step(torch.cat((last, last.new_zeros(size - B))), e._at(rows, size)).logits[:B]
    assert (counts["add_rms_norm"] == 0) == fused
    for text, length, own in zip(tokens, lengths, logits, strict=True):
        answer = inference.answer(found, "fp16", 3, text[None, : length + 1], [length], catalog)
        assert inference.deviation("llama", own[None, None], answer, "fp16") < 5e-3
