"""Programs of others that train: torchtitan's model, DeepSpeed's engine. Neither need be installed here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernelmark.baselines import deepspeed, torchtitan
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.model import Chosen, draw
from kernelmark.suite.workloads import _expected, train

SAMPLING = Sampling(min_samples=2, max_samples=2, min_seconds=0, max_seconds=60, warmup_s=0)
ALONE = SimpleNamespace(world=1)


def case(dtype: str = "fp32", A: int = 1, **options: str | float) -> Any:
    return train.WORKLOAD.case({"B": 1, "S": 16, "A": A}, dtype, "program", model="gpt2-tiny", **options)


def measured(given: Any, program: Any) -> Mapping[str, tuple[float, ...]]:
    session = Session(Cpu(), 3, 0, SAMPLING, Stages())
    return train.measure(given, program, session, train.prepared(given, session)).samples


# DeepSpeed


class FakeEngine:
    """What DeepSpeed's engine does, in fp32 and by PyTorch; it lets go of gradients when it updates."""

    fault = ""

    def __init__(self, model: Any, config: Mapping[str, Any]) -> None:
        self.model, self.config, self.count = model, config, 0
        given = {**config["optimizer"]["params"]}
        self.optimizer = torch.optim.AdamW(model.parameters(), **given)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.config["gradient_accumulation_steps"]).backward()

    def step(self) -> None:
        self.count += 1
        if self.count % self.config["gradient_accumulation_steps"]:
            return
        most = self.config["gradient_clipping"]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), most or float("inf"))
        if self.fault != "no update":
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def destroy(self) -> None:
        self.model = None


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Those that were made; `deepspeed` and its utilities stand in `sys.modules`."""
    made: list[FakeEngine] = []
    package, utilities = ModuleType("deepspeed"), ModuleType("deepspeed.utils")

    def initialize(model: Any, config: Mapping[str, Any], dist_init_required: bool) -> tuple[FakeEngine, None]:
        assert not dist_init_required
        made.append(FakeEngine(model, config))
        return made[-1], None

    package.initialize = initialize  # type: ignore[attr-defined]  # modules take attributes
    utilities.safe_get_full_grad = lambda parameter: parameter.grad  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utilities)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return made


@pytest.mark.parametrize(("A", "clip"), [(1, 1.0), (2, 0.0)])
def test_an_engine_is_held_to_the_model(engines: list[FakeEngine], A: int, clip: float) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = measured(case(A=A, clip=clip), deepspeed.train(ALONE))
    assert found["gradient_error"][0] < 1e-4
    assert found["change_error"][0] < 1e-2
    config = engines[0].config
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (A, clip)
    assert len(engines) == 2  # at the start and for the checked step, each with weights of its own
    assert engines[0].model is None


def test_an_engine_that_does_not_update_is_found(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(FakeEngine, "fault", "no update")
    with pytest.raises(Incorrect, match="after 3 steps: the change of"):
        measured(case(), deepspeed.train(ALONE))


def test_states_by_configuration() -> None:
    adamw = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    plain = deepspeed.configuration("plain", False, False, 2, 4, 1.0, adamw)
    assert plain["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert plain["zero_optimization"] == {"stage": 1}
    masters = deepspeed.configuration("master32", True, False, 2, 4, 1.0, adamw)
    assert masters["bf16"] == {"enabled": True}
    assert masters["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert masters["optimizer"]["params"]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        (deepspeed.train_offload, {"state": "plain"}, "stores states as master32, not plain"),
        (deepspeed.train, {"state": "muon"}, "optimizer is Muon"),
    ],
)
def test_what_the_engine_lacks(factory: Any, options: dict[str, str], said: str) -> None:
    with pytest.raises(NotImplementedError, match=said):
        train.stepping(train.read(case("bf16", **options)), factory(ALONE))


@pytest.mark.parametrize("factory", [deepspeed.train, deepspeed.train_offload, torchtitan.train])
def test_ranks_are_their_launchers(factory: Any) -> None:
    with pytest.raises(NotImplementedError, match="in one process"):
        factory(SimpleNamespace(world=2))


# torchtitan


def test_rows_that_rotate_as_neighbours_are_seen_as_halves() -> None:
    ours = torch.arange(2 * 6 * 3.0).view(12, 3)  # 2 heads of 6, K = 3
    theirs = torch.empty_like(ours)
    seen = torchtitan._halves(theirs, heads=2)
    seen.copy_(ours.view(seen.shape))
    for head in range(2):
        for pair in range(3):
            assert torch.equal(theirs[6 * head + 2 * pair], ours[6 * head + pair])
            assert torch.equal(theirs[6 * head + 2 * pair + 1], ours[6 * head + 3 + pair])
    assert torch.equal(torchtitan._halves(theirs, heads=2).reshape(ours.shape), ours)


@pytest.mark.parametrize("name", ["gpt2-tiny", "qwen3-0.6b", "olmo-2-7b", "granite-3-8b"])
def test_what_torchtitan_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "torchtitan",
        "torchtitan.models",
        "torchtitan.models.llama3",
        "torchtitan.models.llama3.model",
    ):
        fake = ModuleType(module)
        fake.Llama3Model = None  # type: ignore[attr-defined]  # modules take attributes
        monkeypatch.setitem(sys.modules, module, fake)
    model = next(x for x in train.catalog().models.values() if name in x.configurations)
    with pytest.raises(NotImplementedError, match="trains llama|no configuration of"):
        torchtitan.train(ALONE).build(Chosen(model, name, model.configurations[name]), 16, [])


@pytest.mark.parametrize("changes", [{}, {"tied": True, "stretch": 32.0, "head": 32}])
def test_torchtitans_model_is_ours(changes: dict[str, Any]) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.models.common.attention import ScaledDotProductAttention

    model, S = train.catalog().models["llama"], 32
    c = replace(model.configurations["llama-tiny"], **changes)
    chosen, cpu = Chosen(model, "x", c), torch.device("cpu")
    weights = list(draw(model.weights(c), 3, torch.float32, cpu))
    reference = _expected.reference_module(chosen, S, train.catalog(), cpu, {})
    own = dict(reference.named_parameters())
    for name, values in weights:
        own[name].data.copy_(values)
    tokens, targets = torch.randint(0, c.vocabulary, (2, 1, S))
    reference(tokens, targets).backward()
    # FlexAttention, its default, has no backward pass on a CPU.
    program = torchtitan._Llama(False, ScaledDotProductAttention.Config)
    program.build(chosen, S, weights)
    program.loss(tokens, targets).backward()
    found = program.parameters()
    assert found.keys() == own.keys()
    for name, (parameter, ordered) in found.items():
        torch.testing.assert_close(ordered(parameter.grad).reshape(own[name].shape), own[name].grad)
