"""Programs of others that train: torchtitan's model, nanoGPT's, DeepSpeed's engine. None need be installed."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernelmark.baselines import deepspeed, nanogpt, torchtitan
from kernelmark.suite.catalog import Catalog
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products take longer to share among threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


@pytest.mark.parametrize("factory", [deepspeed.train, deepspeed.train_offload, nanogpt.train, torchtitan.train])
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


# nanoGPT

CHECKOUT = '''
"""The interface of nanoGPT's model.py, by another hand."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

print("a script may print")


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.c_attn, self.c_proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)

    def forward(self, x):
        parts = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in parts), is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(c.n_embd, 4 * c.n_embd), nn.Linear(4 * c.n_embd, c.n_embd)
        self.gelu = nn.GELU()

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn, self.mlp = Attention(c), Feed(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        assert c.dropout == 0 and c.bias
        wte, wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.transformer = nn.ModuleDict({"wte": wte, "wpe": wpe, "h": h, "ln_f": nn.LayerNorm(c.n_embd)})
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        wte.weight = self.lm_head.weight

    def forward(self, tokens, targets=None):
        t = self.transformer
        x = t.wte(tokens) + t.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        own = list(self.parameters())
        groups = [{"params": [x for x in own if x.dim() > 1], "weight_decay": weight_decay}]
        groups.append({"params": [x for x in own if x.dim() < 2], "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
'''


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `model.py` that has nanoGPT's interface."""
    monkeypatch.setenv(nanogpt.VARIABLE, str(tmp_path))
    (tmp_path / "model.py").write_text(CHECKOUT)
    return tmp_path


@pytest.mark.parametrize(
    ("dtype", "A", "options"), [("fp32", 2, {"clip": 0.0}), ("bf16", 1, {"state": "master32"}), ("bf16", 1, {})]
)
def test_nanogpt_is_held_to_the_model(
    checkout: Path, capsys: pytest.CaptureFixture[str], dtype: str, A: int, options: dict[str, Any]
) -> None:
    found = measured(case(dtype, A=A, **options), nanogpt._Gpt(compiled=False))
    if dtype == "fp32":
        assert found["loss_error"][0] < 1e-5
        assert found["gradient_error"][0] < 1e-4
        assert found["change_error"][0] < 1e-2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("is_causal=True", "is_causal=False", "gradient|loss"),
        ("x + self.mlp(", "self.mlp(", "gradient|loss"),
        ("torch.optim.AdamW(groups", "torch.optim.SGD(groups[:1]", "change|AdamW"),
    ],
)
def test_a_checkout_that_computes_another_thing_is_found(
    checkout: Path, before: str, after: str, said: str
) -> None:
    text = CHECKOUT.replace(before, after).replace(
        "SGD(groups[:1], lr=learning_rate, betas=betas)", "SGD(groups[:1])"
    )
    assert text != CHECKOUT
    (checkout / "model.py").write_text(text)
    with pytest.raises(Incorrect, match=said):
        measured(case(), nanogpt._Gpt(compiled=False))


def test_nanogpt_clips_after_the_last_micro_batch(checkout: Path) -> None:
    """AdamW's first steps are of one size whatever a gradient's is: seen by an optimizer whose are not."""
    model = train.catalog().models["gpt2"]
    c = model.configurations["gpt2-tiny"]
    program = nanogpt._Gpt(compiled=False)
    program.build(Chosen(model, "x", c), 16, draw(model.weights(c), 3, torch.float32, torch.device("cpu")))
    adamw = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    program.start("plain", 1, 2, 0.5, adamw)
    params = [x for x, _ in program.parameters().values()]
    program._optimizer = torch.optim.SGD(params, lr=1.0)
    before = [x.detach().clone() for x in params]
    for x in params:
        x.grad = torch.ones_like(x)
    program.update()
    assert all(map(torch.equal, before, params)), "one of two"
    program.update()
    moved = torch.nn.utils.get_total_norm([x - y for x, y in zip(before, params, strict=True)])
    assert float(moved) == pytest.approx(0.5, rel=1e-3)
    assert all(x.grad is None for x in params)


def test_what_nanogpt_lacks(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = train.catalog().models
    program = nanogpt.train(ALONE)
    llama = Chosen(models["llama"], "x", models["llama"].configurations["llama-tiny"])
    with pytest.raises(NotImplementedError, match="trains gpt2, not llama"):
        program.build(llama, 16, [])
    c = replace(models["gpt2"].configurations["gpt2-tiny"], eps=1e-6)
    with pytest.raises(NotImplementedError, match="layer norms add 1e-05"):
        program.build(Chosen(models["gpt2"], "x", c), 16, [])
    monkeypatch.setenv(nanogpt.VARIABLE, str(checkout / "absent"))
    with pytest.raises(ImportError, match="where no model.py is"):
        nanogpt.checkout()


def test_without_a_checkout_its_rows_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    (known,) = (x for x in Catalog.default().of_operator("train") if x.name == "nanogpt")
    for named, environment in (("", "nanogpt"), ("/somewhere", "core")):
        monkeypatch.setenv(nanogpt.VARIABLE, named)
        own = runpy.run_path(str(nanogpt.__file__))  # as when it is listed
        assert own["ENVIRONMENT"] == environment
        found = replace(known, environment=environment).unavailable("cuda")
        assert (found is None) == bool(named)
        assert found is None or (found[0] == "unavailable" and "set KERNELMARK_NANOGPT to that folder" in found[1])
