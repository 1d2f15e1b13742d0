"""Models of Transformer Engine's layers, on a stand-in of its modules: which parameter is which weight of ours,
and in which precision layers run. The library need not be installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from kernelmark.baselines import transformer_engine
from kernelmark.baselines._transformer_engine_layers import FIRST_SCALE, Layers, seed_gradients
from kernelmark.registry.views.technique_tables import EIGHT_BIT_LAYERS
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.model import Chosen, draw
from kernelmark.suite.workloads import _expected, train
from torch.nn import functional

TRAIN = transformer_engine.IMPLEMENTATIONS["train"]


def case(model: str, dtype: str = "fp32", **options: str) -> Any:
    return train.WORKLOAD.case({"B": 1, "S": 16}, dtype, "program", model=model, state="plain", **options)


class FakeLayer(torch.nn.Module):
    """What its `TransformerLayer` computes, with parameters of the same names and shapes, in plain PyTorch."""

    inside: ClassVar[list[str]] = []
    seen: ClassVar[list[str]] = []

    def __init__(self, width: int, hidden: int, heads: int, **given: Any) -> None:
        super().__init__()
        self.given, self.heads, self.head = given, heads, given["kv_channels"]
        assert not given["hidden_dropout"]
        assert not given["attention_dropout"]
        groups = given.get("num_gqa_groups") or heads
        made = {"dtype": given["params_dtype"], "device": given["device"]}

        def parameters(**shapes: tuple[int, ...] | None) -> torch.nn.ParameterDict:
            own = {x: torch.nn.Parameter(torch.empty(y, **made)) for x, y in shapes.items() if y is not None}
            return torch.nn.ParameterDict(own)

        bias = given["bias"]
        rows = (heads + 2 * groups) * self.head
        split = {"query": heads, "key": groups, "value": groups}
        norm = {"layer_norm_weight": (width,), "layer_norm_bias": (width,) if bias else None}
        if given.get("fuse_qkv_params"):
            assert not given["qkv_weight_interleaved"]
            qkv = parameters(weight=(rows, width), bias=(rows,), **norm)
        else:
            assert not bias
            qkv = parameters(**{f"{x}_weight": (y * self.head, width) for x, y in split.items()}, **norm)
        self.self_attention = torch.nn.Module()
        self.self_attention.layernorm_qkv = qkv
        self.self_attention.proj = parameters(weight=(width, heads * self.head), bias=(width,) if bias else None)
        several = 2 if given["activation"] == "swiglu" else 1
        self.layernorm_mlp = parameters(
            fc1_weight=(several * hidden, width), fc1_bias=(hidden,) if bias else None,
            fc2_weight=(width, hidden), fc2_bias=(width,) if bias else None, **norm,
        )  # fmt: skip

    def _normal(self, x: Any, of: Any) -> Any:
        weight, eps = of["layer_norm_weight"], self.given["layernorm_epsilon"]
        if self.given["normalization"] == "LayerNorm":
            return functional.layer_norm(x, weight.shape, weight, of["layer_norm_bias"], eps)
        return functional.rms_norm(x, weight.shape, weight, eps)

    def forward(self, h: Any, rotary_pos_emb: Any = None) -> Any:
        self.seen.append(self.inside[-1] if self.inside else "")
        qkv, proj = self.self_attention.layernorm_qkv, self.self_attention.proj
        matrix = (
            qkv["weight"]
            if "weight" in qkv
            else torch.cat([qkv[f"{x}_weight"] for x in ("query", "key", "value")])
        )
        out = functional.linear(self._normal(h, qkv), matrix, qkv.get("bias"))
        groups = (out.shape[-1] // self.head - self.heads) // 2
        sizes = [x * self.head for x in (self.heads, groups, groups)]
        q, k, v = (x.unflatten(-1, (-1, self.head)).transpose(1, 2) for x in out.split(sizes, -1))
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb[:, 0, 0]
            q, k = (
                (x * angles.cos() + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * angles.sin()).to(
                    x.dtype
                )
                for x in (q, k)
            )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)
        h = h + functional.linear(out, proj["weight"], proj.get("bias"))
        feed = self.layernorm_mlp
        out = functional.linear(self._normal(h, feed), feed["fc1_weight"], feed.get("fc1_bias"))
        if self.given["activation"] == "swiglu":
            out = functional.silu(out.chunk(2, -1)[0]) * out.chunk(2, -1)[1]
        else:
            out = functional.gelu(out, approximate="tanh")
        return h + functional.linear(out, feed["fc2_weight"], feed.get("fc2_bias"))


class FakeNorm(torch.nn.Module):
    """Its `LayerNorm`, and its `RMSNorm` where there is no bias."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: Any, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(width, dtype=dtype, device=device))

    def forward(self, x: Any) -> Any:
        if hasattr(self, "bias"):
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules, in `sys.modules`."""

    @contextlib.contextmanager
    def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
        assert enabled
        FakeLayer.inside.append(type(recipe).__name__)
        yield
        FakeLayer.inside.pop()

    def loss(logits: Any, targets: Any, smoothing: float, reduced: bool) -> Any:
        assert (smoothing, reduced) == (0.0, True)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common")
    made: dict[str, Any] = {x: ModuleType(x) for x in (*names, "transformer_engine.common.recipe")}
    te, pytorch, common, recipe = made.values()
    te.pytorch, te.common, common.recipe = pytorch, common, recipe
    pytorch.TransformerLayer, pytorch.LayerNorm, pytorch.autocast = FakeLayer, FakeNorm, autocast
    pytorch.RMSNorm = lambda *shape, **given: FakeNorm(*shape, **given, bias=False)
    pytorch.parallel_cross_entropy = loss
    for x in ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling"):
        setattr(recipe, x, type(x, (), {}))
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    FakeLayer.seen.clear()


@pytest.mark.parametrize(
    ("name", "changes"), [("gpt2-tiny", {}), ("llama-tiny", {}), ("llama-tiny", {"tied": True, "stretch": 8.0})]
)
def test_its_parameters_are_our_weights(name: str, changes: dict[str, Any]) -> None:
    model, S, cpu = train.catalog().models[name.split("-")[0]], 32, torch.device("cpu")
    c = replace(model.configurations[name], **changes)
    chosen = Chosen(model, "x", c)
    weights = list(draw(model.weights(c), 3, torch.float32, cpu))
    reference = _expected.reference_module(chosen, S, train.catalog(), cpu, {})
    own = dict(reference.named_parameters())
    for weight, values in weights:
        own[weight].data.copy_(values)
    tokens, targets = torch.randint(0, c.vocabulary, (2, 1, S), generator=torch.Generator().manual_seed(5))
    wanted = reference(tokens, targets)
    wanted.backward()
    program = Layers(None)
    program.build(chosen, S, weights)
    found = program.loss(tokens, targets)
    found.backward()
    torch.testing.assert_close(found, wanted)
    parameters = program.parameters()
    assert parameters.keys() == own.keys()
    for weight, (parameter, ordered) in parameters.items():
        torch.testing.assert_close(ordered(parameter.grad).reshape(own[weight].shape), own[weight].grad)
    assert set(FakeLayer.seen) == {""}


def test_a_step_of_gate_and_up_in_one_parameter_is_one_step() -> None:
    given = case("llama-tiny")
    session = Session(
        Cpu(), 3, 0, Sampling(min_samples=2, max_samples=2, min_seconds=0, max_seconds=60, warmup_s=0), Stages()
    )
    program = TRAIN["transformer_engine_layers"](given)
    found = train.measure(given, program, session, train.prepared(given, session)).samples
    assert found["gradient_error"][0] < 1e-4
    assert found["change_error"][0] < 1e-2


def test_goals_know_which_layers_are_of_8_bits() -> None:
    assert TRAIN.keys() - {"transformer_engine_layers"} == EIGHT_BIT_LAYERS


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("tensorwise", "Float8CurrentScaling"), ("delayed", "DelayedScaling"), ("1x128", "Float8BlockScaling")],
)
def test_layers_run_within_the_recipes_autocast_and_are_held_to_its_bound(name: str, recipe: str) -> None:
    given = case("llama-tiny", "bf16", products="e4m3")
    program = TRAIN[f"transformer_engine_layers_{name}"](given)
    trainer = train.stepping(train.read(given), program)
    trainer.load(_expected.initial(train.read(given), 3, torch.device("cpu")))
    trainer.step(*torch.randint(0, 512, (2, 1, 1, 16)))
    assert FakeLayer.seen == [recipe] * 2
    assert trainer.products == "e4m3"
    plain = train.stepping(train.read(given), TRAIN["transformer_engine_layers"](given))
    assert plain.products == "bf16"
    with pytest.raises(NotImplementedError, match="products are in bf16"):
        TRAIN[f"transformer_engine_layers_{name}"](case("llama-tiny", "bf16"))


def test_its_loss_has_no_z_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(parallel_cross_entropy=None))
    factory = transformer_engine.IMPLEMENTATIONS["cross_entropy"]["transformer_engine"]
    assert callable(factory(SimpleNamespace(options={"regularized": False})))
    with pytest.raises(NotImplementedError, match="no z-loss"):
        factory(SimpleNamespace(options={"regularized": True}))


@pytest.mark.parametrize("name", ["mamba2-tiny", "qwen3-0.6b", "olmo-2-7b", "granite-3-8b"])
def test_what_its_layer_lacks(name: str) -> None:
    model = next(x for x in train.catalog().models.values() if name in x.configurations)
    with pytest.raises(NotImplementedError, match="trains gpt2 and llama|is not of"):
        Layers(None).build(Chosen(model, name, model.configurations[name]), 16, iter([]))


def test_gradients_have_a_scale_before_one_was_seen() -> None:
    scale = torch.ones(2)
    delayed = SimpleNamespace(scale=scale, amax_history=torch.zeros(4, 2))
    current = SimpleNamespace()
    forward = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3))
    modules = [
        SimpleNamespace(fp8_meta={"scaling_fwd": forward, "scaling_bwd": delayed}),
        SimpleNamespace(fp8_meta={"scaling_bwd": current}),
        SimpleNamespace(),
    ]
    seed_gradients(modules)
    assert scale.tolist() == [FIRST_SCALE] * 2
    assert forward.scale.tolist() == [1.0] * 3
