"""Techniques of training: what is lossless is so bit by bit, what is kept is counted, what is moved is awaited."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernelmark.suite import system
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.operators import fp8_matmul
from kernelmark.suite.products import by_blocks
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import _arms, train
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads._arms import ArmTrainer, _unhook
from kernelmark.suite.workloads._host_states import HostStates, HostUpdate, InTurn, buckets
from kernelmark.suite.workloads._parallel import Ddp, Fsdp2
from kernelmark.suite.workloads._recompute import budget, worth_keeping
from kernelmark.suite.workloads._trainer import PartsTrainer

from .clipping import Clipping

STEPS = 3


@dataclass
class Work:
    """Copies that are queued and not yet done."""

    call: Callable[[], None] | None
    after: tuple[Any, ...]
    before: Work | None
    done: bool = False


@dataclass
class Deferred:
    """Streams that do nothing until somebody waits for it, or by chance: a wait that is missing shows."""

    overlaps = True
    chance: random.Random = field(default_factory=lambda: random.Random(5))
    last: dict[str, Work | None] = field(default_factory=lambda: {"in": None, "out": None})
    queued: list[Work] = field(default_factory=list)

    def queue(self, direction: str, work: Callable[[], None], after: Iterable[Any]) -> Work:
        made = self.last[direction] = Work(work, tuple(after), self.last[direction])
        self.queued.append(made)
        if self.chance.random() < 0.3:
            self.wait(self.chance.choice(self.queued))
        return made

    def mark(self) -> Work:
        return Work(None, (), None, done=True)

    def wait(self, event: Work) -> None:
        if event.done:
            return
        for x in (event.before, *event.after):
            if x is not None:
                self.wait(x)
        assert event.call is not None
        event.call()
        event.done = True

    def settle(self) -> None:
        for x in self.queued:
            self.wait(x)
        self.queued.clear()


class Moved(PartsTrainer):
    """States on the host of a device that is the host, in buckets as small as these models."""

    bucket = 1 << 12

    def on_host(self, device):
        if self.assembly.system.states == "host_updated":
            return HostUpdate(self._params, self.states())
        self.moves = InTurn() if self.assembly.system.states == "host_copied" else Deferred()
        return HostStates(self._params, self.states(), self.moves, self.bucket)


def trained(bench, system: System, kind: type[PartsTrainer] = PartsTrainer) -> tuple[PartsTrainer, dict[str, Any]]:
    """Weights, gradients and losses after some steps."""
    trainer = bench.trainer(kind, system)
    r, seed, device = train.read(bench.case), bench.session.seed, torch.device("cpu")
    trainer.load(answer.initial(r, seed, device))
    batches = answer.Batches(r, seed, device)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        found[f"loss {step}"] = trainer.step(*batches.draw(step)).clone()
        found |= {f"gradient {step} of {x}": y.clone() for x, y in trainer.gradients().items()}
    return trainer, found | {x: y.clone() for x, y in trainer.weights().items()}


def checked(bench, trainer: PartsTrainer) -> dict[str, float]:
    """How far a system is off in the check that comes before it is timed."""
    program = train.Program(train.read(bench.case), trainer, bench.session, bench.prepared)
    program.verify()
    return program.errors


@pytest.fixture(scope="module")
def plain(bench):
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make(model: str, **options: Any) -> dict[str, Any]:
        key = (model, *sorted(options.items()))
        if key not in made:
            made[key] = trained(bench(model, **options), System("torch"))[1]
        return made[key]

    return make


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny", "mamba2-tiny"])
@pytest.mark.parametrize("how", ["every_layer", "every_second", "by_cost", "by_part", "by_part_wide"])
def test_computing_again_changes_no_bit(bench, plain, model, how):
    _, found = trained(bench(model), System("x", recompute=how))
    assert same(found, plain(model))


def test_what_is_computed_again_is_not_kept(bench):
    case = bench()
    r = train.read(case.case)
    batch = answer.Batches(r, 1, torch.device("cpu")).draw(0)

    def kept(how: str) -> int:
        trainer, _ = trained(case, System("x", recompute=how))
        return trainer.activations(batch[0][0], batch[1][0])

    c, rows = r.chosen.configuration, r.B * r.S
    # The loss keeps its logits and more, whatever the layers do.
    none, wide = kept("none"), kept("by_part_wide")
    assert none - kept("every_layer") > kept("none") - kept("every_second") > 0
    norms = (2 * c.layers + 1) * c.width
    assert none - kept("by_part") == 4 * rows * (norms + c.layers * c.hidden)
    # And in both layers gate and up, which go into the gate.
    assert none - wide == 4 * rows * (norms + 3 * c.layers * c.hidden)
    assert none > kept("by_cost") > kept("every_layer")


@pytest.mark.minutes
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # what torch's compiler says of torch itself
def test_a_compilers_budget_keeps_less_and_changes_no_gradient(bench, plain):
    """`activation_memory_budget` reaches torch.compile, which then computes again what it does not keep."""
    case = bench("gpt2-tiny")
    batch = answer.Batches(train.read(case.case), 1, torch.device("cpu")).draw(0)
    kept = {}
    for how in ("none", "budget_25"):
        trainer, found = trained(case, System("x", recompute=how, execution="compile"))
        for name, x in plain("gpt2-tiny").items():
            # Later ones are of weights that Adam moved by nearly the signs of gradients, those of 0 among them.
            if name.startswith(("loss", "gradient 0")):
                assert torch.allclose(found[name], x, rtol=1e-3, atol=1e-4), (how, name)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: to.append(x.nbytes) or x, lambda x: x):
            trainer._forward(batch[0][0], batch[1][0])
        kept[how] = sum(sizes)
        del trainer
        torch._dynamo.reset()
    assert kept["budget_25"] < 0.8 * kept["none"], kept


def test_which_operations_are_worth_keeping():
    assert worth_keeping("aten::mm", [(64, 4096), (4096, 4096)])
    assert not worth_keeping("aten::mm", [(64, 4096), (4096, 14336)])
    assert worth_keeping("aten::addmm", [(4096,), (64, 14336), (14336, 4096)])
    assert not worth_keeping("aten::linear", [(64, 4096), (14336, 4096), (14336,)])
    assert worth_keeping("aten::_scaled_dot_product_flash_attention", [(1, 2, 3, 4)] * 3)
    assert not worth_keeping("aten::gelu", [(64, 4096)])
    assert (budget("budget_25"), budget("by_cost")) == (0.25, None)


@pytest.mark.parametrize("options", [{"A": 2}, {"clip": 0.0}])
def test_an_update_that_clips_changes_no_bit(bench, plain, options):
    """What its gradients are is asked after it. Where nothing is clipped it is not taken."""
    trainer, found = trained(bench("gpt2-tiny", **options), System("torch"), Clipping)
    want = dict(plain("gpt2-tiny", **options))
    for name in [x for x in want if x.startswith("gradient 0") and "clip" not in options]:
        # What the first moments have of them.
        torch.testing.assert_close(found.pop(name), want.pop(name), rtol=1e-6, atol=1e-9)
    assert same(found, want)
    assert trainer.clips == (0 if "clip" in options else STEPS)


@pytest.mark.parametrize("spread", [None, Ddp, Fsdp2])
def test_gradients_that_are_sent_are_heard_of(bench, spread):
    """No product adds to them behind autograd's back, and no update clips a rank's own alone."""
    recipe = train.read(bench("gpt2-tiny").case)
    assembly = Assembly(System("torch"), bench("gpt2-tiny").catalog)
    trainer = PartsTrainer(recipe, assembly, spread and spread())
    assert (trainer._unheard, trainer._alone) == (spread is None, spread is None)


@pytest.mark.parametrize("by", [torch.ones_like, lambda scale: scale / 2, lambda scale: 1.5 * scale])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16", "state": "master32"}, {"dtype": "bf16"}])
def test_an_update_that_clips_by_the_wrong_norm_is_found(bench, monkeypatch, by, options):
    """And one that does not clip, whatever norm it says: its first moments show it, and weights hardly."""
    case = bench("llama-tiny", **options)
    trainer = case.trainer(Clipping, System("torch"))
    checked(case, trainer)
    monkeypatch.setattr(trainer, "by", by)
    with pytest.raises(Incorrect, match="the gradient of .* is off by"):
        checked(case, trainer)


@pytest.mark.parametrize("states", ["host_copied", "host_streamed", "host_updated"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_states_on_the_host_change_no_bit(bench, plain, states, clip):
    _, found = trained(bench("gpt2-tiny", clip=clip), System("x", states=states), Moved)
    assert same(found, plain("gpt2-tiny", clip=clip))


def test_masters_on_the_host_change_no_bit(bench, plain):
    options = {"dtype": "bf16", "state": "master32", "clip": 0.0, "A": 2}
    _, found = trained(bench("gpt2-tiny", **options), System("x", states="host_streamed"), Moved)
    assert same(found, plain("gpt2-tiny", **options))


def test_weights_are_updated_while_the_backward_pass_runs(bench):
    trainer = bench("gpt2-tiny", clip=0.0).trainer(Moved, System("x", states="host_streamed"))
    r = train.read(bench("gpt2-tiny", clip=0.0).case)
    trainer.load(answer.initial(r, 1, torch.device("cpu")))
    before = []
    clip = trainer.clip
    trainer.clip = lambda: (before.append(trainer.host._next), clip())
    trainer.step(*answer.Batches(r, 1, torch.device("cpu")).draw(0))
    assert before == [len(trainer.host._buckets)], "none is left to update after the backward pass"


@pytest.mark.parametrize(
    "system", [{"recompute": "by_part"}, {"states": "host_copied"}, {"states": "host_updated"}]
)
def test_nothing_of_a_trainer_stays(bench, system):
    trainer, _ = trained(bench("gpt2-tiny", clip=0.0), System("x", **system), Moved)
    weight = weakref.ref(trainer._params[0])
    del trainer, _
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("forgotten", ["loaded", "free"])
def test_a_wait_that_is_forgotten_shows(bench, plain, forgotten):
    class Forgetful(Moved):
        def on_host(self, device):
            host = super().on_host(device)
            fetch, use = host._fetch, host._use

            def fetched(place):
                if forgotten == "free":
                    host._slots[place % len(host._slots)].free = []
                fetch(place)

            def used(place):
                if forgotten == "loaded":
                    host._slots[place % len(host._slots)].loaded = self.moves.mark()
                use(place)

            host._fetch, host._use = fetched, used
            return host

    _, found = trained(bench("gpt2-tiny", clip=0.0), System("x", states="host_streamed"), Forgetful)
    assert not same(found, plain("gpt2-tiny", clip=0.0))


def test_buckets_hold_everything_once_the_last_parameter_first():
    found = buckets([5, 3, 9], 4)
    assert [sum(x.stop - x.start for x in y) for y in found] == [4, 4, 4, 4, 1]
    assert [(x.parameter, x.start, x.stop, x.at) for x in found[2]] == [(2, 8, 9, 0), (1, 0, 3, 1)]
    assert sorted((x.parameter, i) for y in found for x in y for i in range(x.start, x.stop)) == [
        (n, i) for n, size in enumerate([5, 3, 9]) for i in range(size)
    ]


def test_a_row_tells_what_is_kept_and_what_moving_costs(bench):
    case = bench("gpt2-tiny", clip=0.0)
    trainer = case.trainer(Moved, System("x", states="host_streamed"))
    # Rates of the limit are given: a CPU takes a second for them.
    prepared = train.Prepared(case.prepared.expected, rates=(1e12, 1e11))
    found = train.measure(case.case, trainer, case.session, prepared).samples
    assert found["activations"][0] > 0
    assert found["exposed_states"][0] >= 0


@pytest.mark.parametrize(
    ("system", "said"),
    [
        (System("x", recompute="by_part", execution="compile"), "chooses itself what it keeps"),
        (System("x", recompute="budget_50"), "compiles nothing"),
        (System("x", states="host_streamed", execution="graph"), "does not say when"),
        (System("x", states="host_copied", changes=Changes(dtype="fp16")), "keeps its states on the device"),
        (System("x", execution="graph", changes=Changes(dtype="fp16")), "a graph keeps what it captured"),
        (System("x", precision="float8_rowwise"), "float8 is another recipe's"),
        (System("x", changes=Changes(gradients="topk")), "`converge` compares such systems"),
    ],
)
def test_what_cannot_be_says_why(catalog, system, said):
    case = train.WORKLOAD.case({"B": 2, "S": 32}, "fp32", "program", model="gpt2-tiny")
    with pytest.raises(NotImplementedError, match=said):
        train.assemble(case, Assembly(system, catalog))


def test_a_cpu_has_no_states_to_stream(bench):
    with pytest.raises(NotImplementedError, match="this device is the host"):
        trained(bench("gpt2-tiny", clip=0.0), System("x", states="host_streamed"))
    case = bench("gpt2-tiny", clip=0.0)
    arm = train.assemble(case.case, Assembly(System("x", changes=Changes(dtype="tf32")), case.catalog))
    with pytest.raises(NotImplementedError, match="TF32 is of CUDA"):
        case.measure(arm)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_precisions_are_systems_of_one_case(bench, dtype):
    case = bench("gpt2-tiny", dtype="bf16", state="master32", products="e4m3", clip=0.0)
    arm = Assembly(System("x", changes=Changes(dtype=dtype)), case.catalog)
    trainer = train.assemble(case.case, arm)
    found = checked(case, trainer)
    assert trainer.products == ("fp32" if dtype == "fp32" else "bf16")
    assert found["gradient_error"] < (4e-3 if dtype == "fp32" else 0.15)  # the answer is rounded to bf16


def test_a_loss_in_fp16_is_that_of_autocast(bench):
    """Its product is in fp16, as a user's is; where it were in fp32, a step would take three times as long."""
    case = bench("gpt2-tiny", dtype="bf16", state="master32", products="e4m3", clip=0.0)
    trainer = train.assemble(case.case, Assembly(System("x", changes=Changes(dtype="fp16")), case.catalog))
    loss = trainer.parts(torch.device("cpu"))["loss"]
    x, weight = (torch.randn(shape).half().requires_grad_() for shape in ((6, 8), (50, 8)))
    target = torch.randint(0, 50, (6,))
    with torch.autocast("cpu", torch.float16):
        logits = torch.nn.functional.linear(x, weight)
        assert logits.dtype == torch.float16
    wanted = torch.nn.functional.cross_entropy(logits.float(), target)
    found = loss(x=x, weight=weight, target=target)
    assert torch.equal(found, wanted)
    for got, want in zip(
        torch.autograd.grad(found * 2**10, (x, weight)),
        torch.autograd.grad(wanted * 2**10, (x, weight)),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("B", "S", "A", "scale"),
    [
        (1, 32, 1, 2.0**5),
        (3, 100, 1, 2.0**9),
        (3, 100, 4, 2.0**11),
        (16, 1024, 1, 2.0**14),
        (64, 1024, 4, 2.0**16),
    ],
)
def test_the_first_scale_of_a_loss_in_fp16(B, S, A, scale):
    """At most that of PyTorch's scaler."""
    case = train.WORKLOAD.case({"B": B, "S": S, "A": A}, "bf16", "program", model="gpt2-124m", state="master32")
    assert _arms.first_scale(train.read(case)) == scale
    assert torch.amp.GradScaler("cpu").get_scale() == _arms.LARGEST_FIRST_SCALE


def test_a_first_scale_that_overflows_is_lowered_for_the_check(bench):
    """A step that overflows is left out: there would be two updates after three steps."""
    case = bench("gpt2-tiny", dtype="bf16", state="master32", clip=0.0)
    trainer = train.assemble(case.case, Assembly(System("x", changes=Changes(dtype="fp16")), case.catalog))
    wanted = checked(case, trainer)
    assert trainer.first_scale == _arms.first_scale(trainer.recipe), "nothing overflows"
    trainer.first_scale = 2.0**20
    assert checked(case, trainer) == pytest.approx(wanted, rel=1e-2), "a power of two changes what underflows"
    assert trainer.first_scale < 2.0**20
    assert int(trainer.counts["skipped"]) == 0


def test_the_first_step_of_all_is_the_slow_one(bench, monkeypatch):
    """Of a loss in fp16 it is one of those that find its scale: what is compiled is compiled there."""
    case = bench("gpt2-tiny", dtype="bf16", state="master32", clip=0.0)
    trainer = train.assemble(case.case, Assembly(System("x", changes=Changes(dtype="fp16")), case.catalog))
    waits, step = [1.0], trainer.step
    monkeypatch.setattr(trainer, "step", lambda *given: (waits and time.sleep(waits.pop()), step(*given))[1])
    program = train.Program(train.read(case.case), trainer, case.session, case.prepared)
    program.verify()
    assert program.first_ms > 1000


def test_gradients_that_no_scale_makes_finite_are_refused(bench, monkeypatch):
    case = bench("gpt2-tiny", dtype="bf16", state="master32", clip=0.0)
    trainer = train.assemble(case.case, Assembly(System("x", changes=Changes(dtype="fp16")), case.catalog))
    backward = trainer.backward
    monkeypatch.setattr(trainer, "backward", lambda loss: backward(loss * float("inf")))
    with pytest.raises(Incorrect, match="is not finite"):
        checked(case, trainer)


def test_a_loss_that_a_system_names_is_not_exchanged(bench):
    case = bench("gpt2-tiny", dtype="bf16", state="master32", products="e4m3", clip=0.0)
    for what in ("loss", "fused_linear_cross_entropy"):
        named = System("x", parts={what: "torch"}, changes=Changes(dtype="fp16"))
        loss = train.assemble(case.case, Assembly(named, case.catalog)).parts(torch.device("cpu"))["loss"]
        assert loss.__name__ == "widened"


def test_eight_bits_by_parts(bench):
    case = bench("gpt2-tiny", dtype="bf16", state="master32", products="e4m3", clip=0.0)
    trainer = train.assemble(case.case, Assembly(System("x", precision="parts_rowwise"), case.catalog))
    found = checked(case, trainer)
    assert trainer.products == "e4m3"
    assert 1e-2 < found["gradient_error"] < 0.4


def test_eight_bits_in_blocks_are_a_linear_layer():
    """By the operators' definitions: what is quantized along what, and which recipe multiplies it. All products
    are of rows along what is summed over, and a training step reads each tensor once to quantize it.
    """
    asked, reads = [], []

    def quantize(x, granularity):
        reads.append((granularity, tuple(x.shape)))
        found = fp8_matmul.scaled(x, *((128, 128) if granularity.startswith("tile") else (1, 128)))
        if granularity == "both":
            return *found, *fp8_matmul.scaled(x.t().contiguous(), 1, 128)
        return (*found, *(y.t().contiguous() for y in found)) if granularity == "tile_both" else found

    def product(a, b, scale_a, scale_b, recipe, bias=None):
        asked.append((recipe, tuple(a.shape), tuple(b.shape)))
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        wide = (x.double() for x in (a, b, scale_a, scale_b))
        out = fp8_matmul.reference(*wide, recipe)
        return (out if bias is None else out + bias).to(torch.bfloat16)

    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 70, 200), (150, 200), (2, 70, 150))
    )
    # So that a scale of the wrong block shows.
    x[:, 40:] *= 30
    weight[:20] *= 20
    found, wanted = [], []
    for linear, results in ((by_blocks(quantize, product), found), (torch.nn.functional.linear, wanted)):
        a, w, bias = (y.clone().requires_grad_() for y in (x, weight, weight[:, 0]))
        out = linear(a, w, bias)
        results += [out, *torch.autograd.grad(out, (a, w, bias), grad)]
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert (got.float() - want.float()).norm() < 0.06 * want.float().norm()
    assert asked == [
        ("block", (140, 200), (200, 150)),
        ("block", (140, 150), (150, 200)),
        ("group", (150, 140), (140, 200)),
    ]
    assert reads == [("both", (140, 200)), ("tile_both", (150, 200)), ("both", (140, 150))]
    with torch.no_grad():
        alone = by_blocks(quantize, product)(x, weight, weight[:, 0])
    assert torch.equal(alone, found[0])
    assert reads[3:] == [("block", (140, 200)), ("tile", (150, 200))], "no pass comes for more"


class CPUOffloadOptimizer:
    """torchao's, as far as it takes hold of parameters: each has a hook that holds all of them."""

    copied = 0

    def __init__(self, params, kind, **given):
        self.param_groups = [{"lr": given["lr"]}]
        self.of_host = {}
        for x in params:
            own = self.of_host[x] = x.detach().clone()

            def backward_hook(x, own=own):
                CPUOffloadOptimizer.copied += 1
                self.of_host[x] = own

            x.register_post_accumulate_grad_hook(backward_hook)

    def step(self): ...


def test_an_offloading_optimizer_is_let_go_of(bench, monkeypatch):
    """It would copy gradients as often as weights were loaded, and its parameters would never be given back."""
    package = ModuleType("torchao")
    package.optim = SimpleNamespace(CPUOffloadOptimizer=CPUOffloadOptimizer)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", package)
    made = bench("gpt2-tiny")
    trainer = made.trainer(ArmTrainer, System("x", changes=Changes(optimizer="torchao_cpu_offload")))
    r, seed, device = train.read(made.case), made.session.seed, torch.device("cpu")
    for _ in range(3):
        trainer.load(answer.initial(r, seed, device))
    monkeypatch.setattr(CPUOffloadOptimizer, "copied", 0)
    trainer.step(*answer.Batches(r, seed, device).draw(0))
    parameters = [weakref.ref(x) for x in trainer._params]
    assert CPUOffloadOptimizer.copied == len(parameters)
    trainer._params[0].register_post_accumulate_grad_hook(partial(dict.get, {}))
    _unhook(trainer._params)
    assert len(trainer._params[0]._post_accumulate_grad_hooks) == 1, "others' hooks stay"
    trainer.load(answer.initial(r, seed, device))
    del trainer
    gc.collect()
    assert [x() for x in parameters[1:]] == [None] * (len(parameters) - 1)


def test_transformer_engines_products_are_of_our_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One `Linear` a weight, within its autocast by the recipe; a fake one, as there is none here."""
    inside: list[str] = []
    made: list[torch.nn.Module] = []

    class Linear(torch.nn.Linear):
        def __init__(self, K: int, N: int, bias: bool, params_dtype: torch.dtype, device: str) -> None:
            super().__init__(K, N, bias=bias, dtype=params_dtype, device=device)
            made.append(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert inside == ["Float8BlockScaling"]
            return super().forward(x)

    @contextlib.contextmanager
    def autocast(enabled: bool, recipe: object) -> Iterator[None]:
        assert enabled
        inside.append(type(recipe).__name__)
        yield
        inside.clear()

    te, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    common, recipe = ModuleType("transformer_engine.common"), ModuleType("transformer_engine.common.recipe")
    recipe.Float8BlockScaling = type("Float8BlockScaling", (), {})  # type: ignore[attr-defined]  # modules take them
    pytorch.Linear, pytorch.autocast = Linear, autocast  # type: ignore[attr-defined]
    te.pytorch, te.common, common.recipe = pytorch, common, recipe  # type: ignore[attr-defined]
    for module in (te, pytorch, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    linear = system.linear("te_1x128")
    x, bias = torch.randn(3, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    weights = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
    out = linear(x, weights[0], bias) + linear(x, weights[1]) + linear(x, weights[1])
    wanted = torch.nn.functional.linear
    torch.testing.assert_close(out, wanted(x, weights[0], bias) + 2 * wanted(x, weights[1]))
    out.sum().backward()
    assert len(made) == 2
    assert all(y.grad is not None for y in (x, bias, *weights))
    assert all(p.is_meta for module in made for p in module.parameters())


def test_a_look_by_delayed_scaling_sees_the_arms_own_scales_and_leaves_them(
    catalog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in of Transformer Engine's `Linear`, whose scale is of what it saw in the pass before."""
    passes: list[str] = []

    def seen(state: Any, grad: torch.Tensor) -> None:
        state.scale[0] = 57344 / grad.abs().max()

    class Linear(torch.nn.Module):
        def __init__(self, K: int, N: int, **given: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(N, K, device="meta"))
            if given["bias"]:
                self.bias = torch.nn.Parameter(torch.empty(N, device="meta"))

            def state(count: int) -> SimpleNamespace:
                return SimpleNamespace(scale=torch.ones(count), amax_history=torch.zeros(3, count))

            self.fp8_meta = {"scaling_fwd": state(3), "scaling_bwd": state(2)}

        def forward(self, x: Any) -> Any:
            forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
            out = torch.nn.functional.linear(x, self.weight, getattr(self, "bias", None))
            forward.scale[:2] = 448 / torch.stack([x.detach().abs().max(), self.weight.detach().abs().max()])
            if out.requires_grad:
                out.register_hook(lambda grad: seen(backward, grad))
            return out

    @contextlib.contextmanager
    def autocast(enabled: bool, recipe: object) -> Iterator[None]:
        passes.append(type(recipe).__name__)
        yield

    te, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    common, recipe = ModuleType("transformer_engine.common"), ModuleType("transformer_engine.common.recipe")
    recipe.DelayedScaling = type("DelayedScaling", (), {})  # type: ignore[attr-defined]  # modules take them
    pytorch.Linear, pytorch.autocast = Linear, autocast  # type: ignore[attr-defined]
    te.pytorch, te.common, common.recipe = pytorch, common, recipe  # type: ignore[attr-defined]
    for module in (te, pytorch, common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    case = train.WORKLOAD.case(
        {"B": 1, "S": 16}, "bf16", "program", model="gpt2-tiny", state="plain", products="e4m3"
    )
    arm = System("again", precision="te_delayed", recompute="every_layer")
    with pytest.raises(NotImplementedError, match="delayed scales move"):
        ArmTrainer(train.read(case), Assembly(arm, catalog))
    trainer = ArmTrainer(train.read(case), Assembly(System("delayed", precision="te_delayed"), catalog))
    trainer.load(answer.initial(train.read(case), 3, torch.device("cpu")))
    batch = torch.randint(0, 512, (2, 1, 1, 16), generator=torch.Generator().manual_seed(1))
    tokens, targets = (x[0] for x in batch)
    linears: Any = trainer.linear
    trainer.watch(tokens, targets)
    assert len(linears._modules) == 0, "a look before the first step leaves nothing"
    assert trainer.probe is not None
    trainer.step(*batch)
    assert passes == ["DelayedScaling"] * 2, "one for the look, one for the step"
    assert len(linears._modules) == 8
    trainer.step(*batch)
    states = [x for module in linears._modules.values() for x in module.fp8_meta.values()]
    # Of one that saw larger tensors half of the range is left; of one that saw smaller ones much is too large.
    for x in states:
        x.scale.mul_(4)
    before = [x.scale.clone() for x in states]
    trainer.watch(tokens, targets)
    assert all(torch.equal(x.scale, was) for x, was in zip(states, before, strict=True))
    over = {
        what: max(x[0] for (_, y), x in trainer.probe.seen.items() if y == what) for what in ("input", "weight")
    }
    assert all(x > 0.01 for x in over.values()), over
    assert len(trainer.probe.seen) == 3 * 8
