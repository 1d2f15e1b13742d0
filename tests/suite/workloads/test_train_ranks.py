"""Training over ranks: the same losses as one process on the same tokens, by DDP and by FSDP2."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.group import ALONE
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _averaged as averaged
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._hooks import HOOKS
from kernelmark.suite.workloads._parallel import Ddp, Fsdp2
from kernelmark.suite.workloads._split import DIVIDED

from ...ranks import Sent, spread
from .clipping import Clipping

STEPS, FOLLOWED = 4, 50
CPU = torch.device("cpu")
WORLD = 2


SYSTEM = System("torch", parts={"attention_context_parallel": "kernelmark_cpu"})


def made(world, way, S=16, follow=0):
    """A trainer, and the tokens of all ranks' steps."""
    case = train.WORKLOAD.case(
        {"B": 1, "S": S, "A": 2 if way in DIVIDED else 2 // world, "gpus": world, "follow": follow},
        "fp32",
        "program",
        model="llama-tiny",
        slice="first1",
        parallel=way,
    )
    trainer = train.assemble(case, Assembly(SYSTEM, train.catalog()))
    whole = train.read(train.WORKLOAD.whole(case))
    trainer.load(answer.initial(whole, 5, CPU))
    return case, trainer, answer.Batches(whole, 5, CPU)


def losses(world, way, steps=STEPS):
    """Of steps on a rank's own share of the tokens, the weights after the first few, and how it was spread."""
    _, trainer, batches = made(world, way)
    found = []
    for step in range(steps):
        if step == STEPS:
            weights = {name: x.clone() for name, x in trainer.weights().items()}
        found.append(float(trainer.step(*map(trainer.parallel.share, batches.draw(step)))))
    return found, weights if steps > STEPS else trainer.weights(), trainer.parallel


def _losses(group, way, steps=STEPS):
    found, weights, spread = losses(group.size, way, steps)
    return found, weights, spread.sent(), spread.ratio


@pytest.fixture(scope="module")
def alone():
    """One process's steps, and its weights after the first few."""
    return losses(1, "single", FOLLOWED)[:2]


EXCHANGED = {"tensor": (4096.0,) * 8, "sequence": (2048.0,) * 16, "context": (4096.0,)}
"""Of a layer's stream, 16 tokens of 64, two blocks both ways in two passes: as all-reduces, or in halves of them;
its K and V once a pass.
"""


@pytest.mark.parametrize("way", ["ddp", "fsdp2", *DIVIDED])
def test_ranks_learn_what_one_process_learns(way, alone):
    """The losses of fifty steps, and the weights after four."""
    found = spread(WORLD, _losses, way, FOLLOWED)
    together = [sum(x) / WORLD for x in zip(*(x[0] for x in found), strict=True)]
    assert together[:STEPS] == pytest.approx(alone[0][:STEPS], rel=1e-5)
    assert together == pytest.approx(alone[0], rel=1e-3)
    assert len({round(x, 3) for x in together}) == FOLLOWED
    for name, right in alone[1].items():
        torch.testing.assert_close(found[0][1][name], right, rtol=1e-3, atol=1e-4)
        assert torch.equal(found[0][1][name], found[1][1][name])
    told = EXCHANGED.get(way, ())
    assert found[0][2] == found[1][2]
    assert found[0][2][-len(told) :] == told if way == "context" else found[0][2][: len(told)] == told


def _clips(group, way):
    """Steps whose update clips, where it may; how often it did."""
    case, plain, batches = made(group.size, way)
    trainer = Clipping(train.read(case), Assembly(SYSTEM, train.catalog()), plain.parallel)
    trainer.load(answer.initial(train.read(train.WORKLOAD.whole(case)), 5, CPU))
    found = [float(trainer.step(*map(trainer.parallel.share, batches.draw(step)))) for step in range(STEPS)]
    gradients = sum(float(x.double().square().sum()) for x in trainer.gradients().values()) ** 0.5
    return found, trainer.clips, gradients


@pytest.mark.parametrize(("way", "clips"), [("ddp", STEPS), ("ddp_int8", STEPS), ("fsdp2", 0), ("tensor", 0)])
def test_an_update_clips_what_every_rank_has_whole(way, clips, alone):
    """Of parts of gradients each rank would know its own norm alone."""
    first, second = spread(WORLD, _clips, way)
    assert (first[1], second[1]) == (clips, clips)
    assert first[2] == pytest.approx(second[2], rel=1e-6)
    assert first[2] == pytest.approx(1.0, rel=1e-5)  # clipped, by either
    together = [(x + y) / 2 for x, y in zip(first[0], second[0], strict=True)]
    assert together == pytest.approx(alone[0][:STEPS], rel=1e-2 if way == "ddp_int8" else 1e-5)


def _silent(group, way):
    """How often ranks speak in a step, in one that sends nothing and in one after; what the last one gives."""
    _, trainer, batches = made(group.size, way)
    counts, found = [], []

    def step(number):
        with Sent() as counted:
            found.append(float(trainer.step(*map(trainer.parallel.share, batches.draw(number)))))
        counts.append(counted.count)

    step(0)
    with trainer.parallel.local():
        step(1)  # it may bring what the next ones compute on
        step(2)
    step(3)
    return [counts[i] for i in (0, 2, 3)], all(map(math.isfinite, found)), {
        name: bool(torch.isfinite(x).all()) for name, x in trainer.gradients().items()
    }  # fmt: skip


@pytest.mark.parametrize("way", ["ddp", "fsdp2", *DIVIDED])
def test_a_step_can_leave_out_what_is_sent(way):
    for (before, without, after), finite, gradients in spread(WORLD, _silent, way):
        assert without == 0
        assert before > 0
        assert after > 0
        assert finite
        assert all(gradients.values())


def _averaged(group):
    """What ranks compute of an answer together."""
    found = averaged.compute(whole_recipe(), train.catalog(), 5, CPU, group)
    return found.first, found.random, {name: x.clone() for name, x in found.changed.items()}


def whole_recipe():
    """Of two ranks, with two micro-batches each."""
    case = train.WORKLOAD.case(
        {"B": 1, "S": 16, "A": 2, "gpus": WORLD}, "fp32", "program", model="llama-tiny", parallel="ddp"
    )
    return train.read(train.WORKLOAD.whole(case))


def test_ranks_compute_together_what_one_process_computes():
    """Two micro-batches a rank, as of one process's four; all ranks have the same."""
    first, second = spread(WORLD, _averaged)
    one = answer.compute(whole_recipe(), train.catalog(), 5, CPU)
    for step, wanted in ((first[0], one.first), (first[1], one.random)):
        assert step.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert (step.norm, step.mean_square) == pytest.approx((wanted.norm, wanted.mean_square), rel=1e-5)
        assert step.gradients.keys() == wanted.gradients.keys()
        for name, x in wanted.gradients.items():
            torch.testing.assert_close(step.gradients[name], x, rtol=1e-4, atol=1e-6)
    assert first[2].keys() == one.changed.keys()
    assert all(torch.equal(x, second[2][name]) for name, x in first[2].items())
    # Elements whose gradient is next to nothing step by its sign.
    assert all(float((first[2][name] - x).norm() / x.norm()) < 1e-4 for name, x in one.changed.items())


def test_ranks_that_have_a_step_s_tokens_together_compute_all_of_its_answer():
    def computed(way, **options):
        case = train.WORKLOAD.case(
            {"B": 1, "S": 16, "gpus": 2}, "fp32", "program", model="llama-tiny", parallel=way, **options
        )
        return train.is_averaged(case), averaged.compute in train.WORKLOAD.computes(case)

    assert computed("ddp") == computed("fsdp2") == (True, True)
    assert computed("tensor") == computed("context") == computed("ddp", state="muon") == (False, False)


def test_gradients_that_ranks_do_not_share_are_no_answer(monkeypatch):
    """What would hold each rank to its own tokens, as a step without communication is."""
    monkeypatch.setattr(averaged, "_average", lambda parameter: None)
    alike = SimpleNamespace(size=2, rank=0, every=lambda x: [x, x + 1])
    case = train.WORKLOAD.case(
        {"B": 1, "S": 16, "A": 2, "gpus": 2}, "fp32", "program", model="llama-tiny", parallel="ddp"
    )
    with pytest.raises(RuntimeError, match="not the same in all ranks"):
        averaged.compute(train.read(case), train.catalog(), 5, CPU, alike)


def _checked(group, way, wrong):
    """What a program says of the first steps, one rank of which may drop a gradient."""
    case, trainer, _ = made(group.size, way, follow=8)
    session = SimpleNamespace(device=Cpu.open(), group=group, seed=5)
    program = train.Program(train.read(case), trainer, session, SimpleNamespace(expected=None))
    if wrong:
        program.trainer.parallel.clip = lambda params, most: None
    try:
        program._follow()
    except Incorrect as error:
        return str(error)
    return program.errors["loss_apart"], program.share


def test_a_case_may_have_its_loss_followed():
    assert all(0 < apart < 1e-5 and share == 0.5 for apart, share in spread(WORLD, _checked, "sequence", False))
    first, second = spread(WORLD, _checked, "sequence", True)
    assert "of 8: the loss is" in first
    assert second == f"rank 0 of 2: {first}"


@pytest.mark.parametrize(
    ("way", "world", "S", "said"),
    [
        ("context", 2, 18, "18 tokens cannot be cut into 4 equal parts for 2 ranks"),
        ("sequence", 2, 17, "17 tokens cannot be cut into 2 equal parts for 2 ranks"),
        ("tensor", 4, 16, "key has 2 parts, which 4 ranks cannot share"),
    ],
)
def test_what_cannot_be_shared_is_said(way, world, S, said):
    with pytest.raises(NotImplementedError, match=said):
        made(world, way, S)


def test_models_that_are_not_known_are_not_shared():
    layers = SimpleNamespace(layers=[torch.nn.Linear(2, 2)])
    with pytest.raises(NotImplementedError, match="layers have attend and feed"):
        DIVIDED["tensor"](2).spread(layers)
    with pytest.raises(NotImplementedError, match="rotary positions"):
        DIVIDED["context"](2).spread(layers)


def test_steps_that_ranks_share_are_of_each_rank_s_part():
    one, two = (
        train.WORKLOAD.case({"B": 1, "S": 64, "gpus": 2}, "fp32", "program", model="llama-tiny", parallel=way)
        for way in ("ddp", "tensor")
    )
    assert (one.flops, one.tokens) == (2 * two.flops, 2 * two.tokens)
    assert train.WORKLOAD.whole(one).axes["A"] == 2
    assert train.WORKLOAD.whole(two) == two
    assert "follow" not in one.axes


RATIOS = {"ddp_fp16": 2.0, "ddp_int8": 4 / (1 + 4 / 128)}


@pytest.mark.parametrize("way", [*RATIOS, "ddp_powersgd"])
def test_compressed_gradients_are_near_and_the_same_in_all_ranks(way, alone):
    """Of fp32; how near is each way's own affair, and PowerSGD's first two steps are exact."""
    weights = alone[1]
    found = spread(WORLD, _losses, way)
    together = [sum(x) / WORLD for x in zip(*(x[0] for x in found), strict=True)]
    assert together == pytest.approx(alone[0][:STEPS], rel=1e-2)
    assert together != pytest.approx(alone[0][:STEPS], rel=1e-7)
    gradients = sum(x.numel() * 4 for x in weights.values())
    _, first, sent, ratio = found[0]
    assert sum(sent) == pytest.approx(gradients / ratio)
    assert (ratio > 10) if way == "ddp_powersgd" else (ratio == pytest.approx(RATIOS[way]))
    assert all(torch.equal(x, found[1][1][name]) for name, x in first.items())


def test_what_is_sent_is_said():
    """DDP's buckets are full from 25 MiB on, the first from 1 MiB; FSDP2's units are layers, which it gathers
    twice a pass, and the rest once; gradients are scattered once."""
    layers = [torch.nn.Linear(1 << 10, 1 << 12, bias=False) for _ in range(3)]  # 16 MiB each
    way = Ddp()
    way._module = torch.nn.Sequential(*layers)
    assert way.sent() == (16 << 20, 32 << 20)
    sharded = Fsdp2()
    sharded._module = torch.nn.Module()
    sharded._module.layers = torch.nn.ModuleList(layers[:2])
    sharded._module.head = layers[2]
    sharded._module.norm = torch.nn.Parameter(torch.zeros(1 << 10))
    assert sharded.sent() == (24 << 20, 24 << 20, (16 << 20) + (4 << 10))
    assert sharded.sent(4) == (72 << 20, 72 << 20, (40 << 20) + (4 << 10))
    assert way.sent(4) == way.sent()


@pytest.mark.parametrize(
    ("way", "bound"), [("ddp", "fp32"), ("fsdp2", "fp32"), ("ddp_int8", "bf16"), ("ddp_powersgd", "")]
)
def test_how_gradients_are_sent_says_how_far_they_may_be_off(way, bound):
    case = train.WORKLOAD.case({"B": 1, "S": 16, "gpus": 2}, "fp32", "program", model="llama-tiny", parallel=way)
    recipe, trainer = train.read(case), train.assemble(case, Assembly(System("torch"), train.catalog()))
    session = SimpleNamespace(device=Cpu.open(), group=ALONE, seed=1)
    found = train.Program(recipe, trainer, session, SimpleNamespace(expected=None)).bound
    bounds = recipe.chosen.model.bounds
    if bound:
        assert found == bounds[bound]
    else:
        assert (found.loss, found.gradient, found.change) == (bounds["fp32"].loss, math.inf, math.inf)


def test_gradients_that_are_narrow_already_need_no_hook():
    with pytest.raises(NotImplementedError, match="gradients are bfloat16 already"):
        HOOKS["ddp_bf16"](train.catalog(), 2).spread(torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(NotImplementedError, match="hook for bf16 is NCCL's"):
        HOOKS["ddp_bf16"](train.catalog(), 2).spread(torch.nn.Linear(2, 2))


def test_several_gpus_need_a_way():
    with pytest.raises(NotImplementedError, match="2 GPUs need a way to be used: parallel = ddp or fsdp2"):
        losses(2, "single")
    with pytest.raises(NotImplementedError, match="ddp is of several GPUs, and this case takes one"):
        losses(1, "ddp")
