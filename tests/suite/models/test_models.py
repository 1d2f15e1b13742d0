"""Models are what was published: their counts, and a module that has the weights and makes the calls it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernelmark.registry.errors import InputError
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import Chosen, Part, chosen, draw, linear_part
from torch.nn import functional

MODELS = Catalog.default().models
TINY = ("gpt2-tiny", "bert-tiny", "llama-tiny", "mixtral-tiny", "olmoe-tiny", "mamba2-tiny")
B, S = 2, 16

# Billions of parameters as their authors or the models' cards state them, to the digits stated.
PUBLISHED = {
    "gpt2-124m": "0.124",
    "gpt2-350m": "0.355",
    "gpt2-774m": "0.774",
    "gpt2-1.5b": "1.558",
    "gpt3-1.3b": "1.3",
    "gpt3-6.7b": "6.7",
    "bert-base": "0.109",
    "llama-2-7b": "6.74",
    "llama-2-13b": "13.02",
    "llama-3.2-1b": "1.24",
    "llama-3.2-3b": "3.21",
    "llama-3.1-8b": "8.03",
    "llama-3.1-70b": "70.55",
    "qwen3-0.6b": "0.596",
    "qwen3-8b": "8.19",
    "qwen3-32b": "32.76",
    "mistral-7b-v0.3": "7.25",
    "phi-4": "14.66",
    "olmo-2-7b": "7.30",
    "olmo-2-13b": "13.72",
    "granite-3-8b": "8.17",
    "mixtral-8x7b": "46.70",
    "olmoe-1b-7b": "6.92",
    "mamba2-130m": "0.129",
    "mamba2-1.3b": "1.34",
    "mamba2-2.7b": "2.70",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_one(name: str) -> None:
    found = chosen(MODELS, name)
    digits = len(PUBLISHED[name].partition(".")[2])
    assert f"{found.model.parameters(found.configuration) / 1e9:.{digits}f}" == PUBLISHED[name]


def test_every_published_configuration_is_counted() -> None:
    # what converges on bytes
    ours = {"gpt2-1m-bytes", "gpt2-86m-bytes", "gpt2-88m-bytes"}
    ours |= {"mamba2-1m-bytes", "mamba2-86m-bytes", "llama-85m-bytes"}
    tests = {"gpt2-quick", "gpt2-memory", "llama-1m", "llama-block", *TINY}
    other = {"llama-1.2b", "gpt2-124m-padded", "bert-large", *tests, *ours}
    assert {x for model in MODELS.values() for x in model.configurations} == {*PUBLISHED, *other}


def test_what_is_multiplied() -> None:
    def multiplied(name: str) -> float:
        found = chosen(MODELS, name)
        return found.model.multiplied(found.configuration)

    # Llama 2 7B by hand: 32 layers of 4 D² + 3 D F, and the output projection.
    assert multiplied("llama-2-7b") == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    # A tied table is multiplied, as one that is not.
    assert multiplied("gpt2-124m") == 12 * 12 * 768**2 + 50257 * 768
    # Mixtral: 2 of 8 experts, and the router.
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 3 * 4096 * 14336
    assert multiplied("mixtral-8x7b") == 32 * layer + 32000 * 4096


def test_operations_of_training() -> None:
    found = chosen(MODELS, "llama-2-7b")
    by_hand = 6 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096) + 6 * 32 * 2048 * 32 * 128
    assert found.model.training_flops(found.configuration, 2048, 10) == 10 * by_hand
    bert = chosen(MODELS, "bert-base")  # sees everything: twice what a causal mask leaves
    assert bert.model.attention(bert.configuration) == 2 * 12 * 768


def _built(found: Chosen, watch: Callable[[Part, dict[str, Any]], None], linear: Any = functional.linear) -> Any:
    """The module in fp32 by the operators' references, which tell `watch` what they are called with."""
    operators = Catalog.default().operators

    def watched(part: Part) -> Callable[..., Any]:
        def call(**inputs: Any) -> Any:
            watch(part, inputs)
            return operators[part.operator].reference(**inputs)

        return call

    parts: dict[str, Callable[..., Any]] = {
        x.name: watched(x) for x in found.model.parts(found.configuration, B, S)
    }
    module: Any = found.model.module(found.configuration, parts | {"linear": linear})
    module.prepare(S, torch.device("cpu"), torch.float32)
    return module


@pytest.mark.parametrize("name", TINY)
def test_a_module_has_the_weights_and_makes_the_calls_that_are_said(name: str) -> None:
    found = chosen(MODELS, name)
    calls: Counter[str] = Counter()
    shapes: dict[str, set[tuple[int, ...]]] = {}

    def watch(part: Part, inputs: dict[str, Any]) -> None:
        calls[part.name] += 1
        first = next(x for x in inputs.values() if isinstance(x, torch.Tensor))
        shapes.setdefault(part.name, set()).add(tuple(first.shape))

    products: Counter[tuple[str, int, bool]] = Counter()

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        N, K = weight.shape
        products[linear_part(N, K), x.numel() // K, bias is not None] += 1
        return functional.linear(x, weight, bias)

    module = _built(found, watch, linear)
    weights = found.model.weights(found.configuration)
    assert {x: tuple(y.shape) for x, y in module.named_parameters()} == {x: y.shape for x, y in weights.items()}
    with torch.no_grad():
        for x, values in draw(weights, 3, torch.float32, torch.device("cpu")):
            dict(module.named_parameters())[x].copy_(values)
    tokens = torch.randint(0, found.configuration.vocabulary, (B, S + 1))
    loss = module(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert torch.isfinite(loss)
    assert all(x.grad is not None for x in module.parameters())
    said = found.model.parts(found.configuration, B, S)
    assert calls == {x.name: x.calls for x in said}
    named = [x for x in found.named(B, S) if x.operator == "linear"]
    assert products == {(x.name, x.axes["M"], x.options["bias"]): x.calls for x in named}
    for part in said:
        (shape,) = shapes[part.name]
        product = 1
        for size in shape:
            product *= size
        assert product == _elements(part), (part.name, shape)


def _elements(part: Part) -> int:
    """Elements of the first input of a part's case."""
    a = part.axes
    match part.operator:
        case "rms_norm" | "add_rms_norm" | "layer_norm" | "gated_rms_norm":
            return a["B"] * a["S"] * a["D"]
        case "attention" | "rope":
            return a["B"] * a["H"] * a["S"] * a["D"]
        case "gelu" | "swiglu":
            return a["M"] * a["N"]
        case "fused_linear_cross_entropy":
            return a["M"] * a["D"]
        case "causal_conv1d":
            return a["B"] * a["D"] * a["S"]
        case "ssd":
            return a["B"] * a["S"] * a["H"] * a["P"]
    raise AssertionError(part.operator)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_part_is_a_case_of_its_operator(name: str) -> None:
    found = chosen(MODELS, name)
    catalog = Catalog.default()
    for part in (*found.model.parts(found.configuration, 1, 256), *found.named(1, 256)):
        operator = catalog.operator(part.operator)
        operator.case(dict(part.axes), "bf16", operator.passes[-1], **part.options)


def test_layers_computed_again_give_the_same_gradients() -> None:
    found = chosen(MODELS, "llama-tiny")
    gradients = []
    for recompute in (False, True):
        module = _built(found, lambda part, inputs: None)
        module.recompute = recompute
        with torch.no_grad():
            for x, values in draw(found.model.weights(found.configuration), 3, torch.float32, torch.device("cpu")):
                dict(module.named_parameters())[x].copy_(values)
        tokens = torch.arange(2 * (S + 1)).view(2, S + 1)
        module(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([x.grad for x in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_slice_keeps_the_first_layers_as_they_are() -> None:
    whole = chosen(MODELS, "llama-tiny")
    part = whole.first(1)
    drawn = [
        dict(draw(x.model.weights(x.configuration), 3, torch.float32, torch.device("cpu"))) for x in (whole, part)
    ]
    assert torch.equal(drawn[0]["layers.0.query"], drawn[1]["layers.0.query"])
    assert "layers.1.query" not in drawn[1]
    with pytest.raises(InputError, match="has 2 layers"):
        whole.first(3)


def test_an_unknown_model_is_told_which_exist() -> None:
    with pytest.raises(InputError, match="llama-3.1-8b"):
        chosen(MODELS, "llama-3.1-8")


def test_long_contexts_stretch_low_frequencies_alone() -> None:
    from kernelmark.suite.models.llama import CONFIGURATIONS, frequencies

    c = CONFIGURATIONS["llama-3.1-8b"]
    found = frequencies(c)
    plain = [c.base ** (-2 * i / c.head) for i in range(c.head // 2)]
    assert found[0] == plain[0] == 1
    assert found[-1] == pytest.approx(plain[-1] / 8)
    assert all(y <= x for x, y in zip(plain, found, strict=True))
