"""Arms of training: paired, checked, what each changes; one killed in the middle ends with the same numbers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import read
from kernelmark.registry.store.record import Measurement
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect, Unavailable
from kernelmark.suite.operators import _gates
from kernelmark.suite.operators.attention_sparse import choose, fixed, scores
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import _deterministic, _tasks, _text, _training, _weights, converge, quality
from kernelmark.suite.workloads._arms import ArmTrainer, low_share, recipe_of, two_of_four
from kernelmark.suite.workloads._fp8 import Probe, counted, rounded, scale
from kernelmark.suite.workloads._gated import Gates
from kernelmark.suite.workloads._health import Health
from kernelmark.suite.workloads._sparse import OFF, block_mask, blocks, by_blocks, elements, left_out, masked
from kernelmark.suite.workloads._text import source
from kernelmark.suite.workloads._training import rate, validated
from torch.nn.attention.flex_attention import flex_attention

STEPS = 20
OWN = converge.catalog()


@pytest.fixture(scope="module")
def arm(catalog: Catalog):
    """Trains an arm of a tiny case; all share one preparation."""
    axes = {"B": 2, "S": 16, "N": STEPS}
    options = {"model": "gpt2-tiny", "data": "synthetic", "lr": 4e-3, "target": 4.0}
    case = converge.WORKLOAD.case(axes, "fp32", "program", **options)
    session = Session(Cpu(), 11, 0, Sampling(), Stages())
    prepared = converge.prepare(case, session)

    def make(changes: Changes = Changes(), **fields: object) -> ArmTrainer:  # noqa: B008  # it is frozen
        return converge.assemble(case, Assembly(System("arm", changes=changes, **fields), catalog))  # type: ignore[arg-type]  # as tests give them

    def train(changes: Changes = Changes(), **fields: object) -> Measurement:  # noqa: B008  # it is frozen
        return converge.measure(case, make(changes, **fields), session, prepared)

    train.make = make  # type: ignore[attr-defined]  # a second way to call the fixture
    return train


@pytest.fixture(scope="module")
def plain(arm) -> Measurement:
    return arm()


def numbers(found: Measurement) -> dict[str, tuple[float, ...]]:
    """All that does not hang on a clock."""
    return {x: y for x, y in found.samples.items() if x not in ("tokens_per_s", "seconds_to_target")}


def test_an_arm_learns_and_says_how_its_gradients_are(plain):
    found = plain.samples
    assert found["validated_step"] == (0, 5, 10, 15, 20)
    assert found["bits_per_byte"][0] == found["bits_by_step"][-1] < found["bits_by_step"][0] - 1
    assert found["training_step"] == (5, 10, 15, 20)
    assert len(found["health_step"]) == 4 * 3
    assert set(found["health_layer"]) == {-1, 0, 1}
    assert min(found["gradient_cosine_by_layer"]) > 0.9999
    assert 0 < found["update_ratio"][0] < 0.1
    assert found["nonfinite"] == (0,)


def test_an_arm_goes_on_from_a_checkpoint(arm, catalog, monkeypatch, tmp_path, nvml):
    """And what the board says beside its steps is kept, a planted one here."""
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    axes = {"B": 2, "S": 16, "N": 5, "P": STEPS}
    given = {"model": "gpt2-tiny", "data": "synthetic"}
    absent = converge.WORKLOAD.case(axes, "fp32", "program", **given)
    session = Session(Cpu(), 11, 0, Sampling(), Stages())
    with pytest.raises(Unavailable, match="kernelmark checkpoint gpt2-tiny --data synthetic --steps 20"):
        converge.prepare(absent, session)
    trained = converge.WORKLOAD.case({**axes, "N": STEPS, "P": 0}, "fp32", "program", **given)
    trainer = arm.make()
    trainer.load(_training.initial(converge.read(trained), 3, torch.device("cpu")))
    _weights.save(trained, 0, {name: 0.5 * x for name, x in trainer.weights().items()})
    case = converge.WORKLOAD.case(axes, "fp32", "program", **given)
    assert (case.name, case.spec != absent.spec) == (absent.name, True), "other weights are another case"
    with pytest.raises(Unavailable, match="another than where the run was planned"):
        converge.prepare(absent, session)
    made = []
    session.device.nvml = nvml(sm=[1500], temperature=[61])
    for some in (case, trained):
        system = converge.assemble(
            some, Assembly(System("window", changes=Changes(attention="window-50")), catalog)
        )
        found = converge.measured(some, system, session, None)
        made.append(found.samples)
        assert (found.telemetry.sm_mhz, found.telemetry.temperature_c) == ((1500, 1500), 61)
    assert made[0]["bits_by_step"][0] != made[1]["bits_by_step"][0]
    assert made[0]["bits_per_byte"][0] < made[0]["bits_by_step"][0]
    assert {"last_quarter_bits", "copying_bits", "needle_bits"} < made[0].keys()
    assert made[0]["left_out"] == (0,), "one block"


def test_the_end_of_a_window_and_what_stands_in_it_twice():
    tokens = torch.arange(16).view(1, 16)
    asked = _tasks.asked([(tokens, tokens + 1)], 0)
    ((_, late),) = asked["last_quarter_bits"]
    assert late.tolist() == [[-1] * 12 + [13, 14, 15, 16]]
    ((twice, targets),) = asked["copying_bits"]
    assert twice[0, 8:].tolist() == twice[0, :8].tolist()
    assert targets[0].tolist() == [-1] * 8 + [1, 2, 3, 4, 5, 6, 7, -1]
    ((planted, key),) = asked["needle_bits"]
    assert key[0, 11:15].tolist() == planted[0, 12:].tolist()
    assert bytes(planted[0, 10:12].tolist()) == b"\n#"
    # Logits that know nothing need 8 bits a byte.
    assert _tasks.bits(lambda x: torch.zeros(*x.shape, 256), [(twice, targets)]) == pytest.approx(8)


def test_windows_of_an_odd_length_are_asked_everything(catalog):
    """A task of the window's half twice is one shorter, and tables of positions are not."""
    axes, options = {"B": 2, "S": 9, "N": 1}, {"model": "llama-tiny", "data": "synthetic"}
    case = converge.WORKLOAD.case(axes, "fp32", "program", **options)
    trainer = converge.assemble(case, Assembly(System("arm"), catalog))
    trainer.load(_training.initial(converge.read(case), 3, torch.device("cpu")))
    tokens = torch.arange(18).view(2, 9)
    for batches in _tasks.asked([(tokens, tokens + 1)], 0).values():
        assert 0 < _tasks.bits(trainer.logits, batches) < 100
    assert torch.allclose(trainer.logits(tokens[:, :8]), trainer.logits(tokens)[:, :8], atol=1e-5)


@pytest.mark.parametrize("workload", [converge.WORKLOAD, quality.WORKLOAD])
def test_windows_without_a_target_for_each_task_are_refused(workload):
    with pytest.raises(InputError, match="axis S is 3; it is at least 4"):
        workload.case({"B": 2, "S": 3, "N": 1}, "fp32", "program", model="llama-tiny", data="synthetic")


def test_linear_attention_of_heads_that_share_keys(catalog):
    case = converge.WORKLOAD.case(
        {"B": 2, "S": 16, "N": 1}, "fp32", "program", model="llama-tiny", data="synthetic"
    )
    trainer = converge.assemble(case, Assembly(System("linear", changes=Changes(attention="linear")), catalog))
    trainer.load(_training.initial(converge.read(case), 3, torch.device("cpu")))
    assert trainer.logits(torch.zeros(2, 16, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("gradients", ["int8", "fp8", "topk"])
def test_an_overflow_is_not_kept_for_the_next_steps(arm, gradients):
    """What compression leaves of a step that fp16 leaves out is not finite, and would be in all that follow."""
    trainer = arm.make(Changes(dtype="fp16", gradients=gradients))
    trainer.load(_training.initial(trainer.recipe, 3, torch.device("cpu")))
    trainer._scale = 2.0**20  # some halvings from where nothing overflows
    tokens = torch.arange(32).view(1, 2, 16)
    for _ in range(8):
        trainer.step(tokens, tokens + 1)
    assert 0 < int(trainer.counts["skipped"]) < 8


def test_the_same_arm_twice_has_the_same_numbers(arm, plain):
    assert numbers(arm()) == numbers(plain)


def test_eight_bits_are_near_and_tell_what_they_lose(arm, plain):
    measured = arm(Changes(products="e4m3_rowwise"))
    found = measured.samples
    assert measured.remarks == ("fp8_share follows from the model's sizes: no product in 8 bits could be counted",)
    base = plain.samples["bits_per_byte"][0]
    assert found["bits_per_byte"][0] == pytest.approx(base, rel=0.02)
    assert found["bits_per_byte"][0] != base
    assert 0.9 < found["gradient_cosine"][0] < 0.9999
    assert found["fp8_saturation"] == (0,)
    assert 0 < found["fp8_underflow"][0] < 0.1
    assert max(found["fp8_amax_by_layer"]) > 1
    assert 0.5 < found["fp8_share"][0] < 0.9


@pytest.mark.parametrize("changes", [Changes(dtype="fp16"), Changes(gradients="topk"), Changes(weights="2:4")])
def test_other_arms_learn(arm, plain, changes):
    samples = arm(changes).samples
    found = samples["bits_by_step"]
    if changes.gradients:  # of 1024 elements of 4 bytes, 8 with their places
        assert samples["compression_ratio"][0] == pytest.approx(1024 * 4 / (8 * 6), rel=0.01)
        assert 0.1 < samples["compression_accuracy"][0] < 0.9
    else:
        assert "compression_ratio" not in samples
    assert found[-1] != plain.samples["bits_by_step"][-1]
    assert found[-1] < found[0] - (0.1 if changes.gradients else 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no_bias_correction", "after 3 steps: the change of"),
        ("unscaled_momentum", "after 3 steps: the change of"),
        ("mask_off_by_one", "the first step: the loss is|the gradient of"),
    ],
)
def test_planted_faults_are_incorrect(arm, fault, said):
    with pytest.raises(Incorrect, match=said):
        arm(Changes(fault=fault))


def test_a_leak_is_seen_where_no_answer_is_known(arm):
    # With another attention there is no answer to compare with.
    trainer = arm.make(Changes(attention="window-50"))
    given = trainer.parts

    def parts(device):
        leaking = masked(lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1))
        return given(device) | {"attention": leaking}

    trainer.parts = parts
    session = Session(Cpu(), 3, 0, Sampling(), Stages())
    case = converge.WORKLOAD.case(
        {"B": 2, "S": 16, "N": 5}, "fp32", "program", model="gpt2-tiny", data="synthetic"
    )
    with pytest.raises(Incorrect, match="position 7 sees what comes after it"):
        converge.measure(case, trainer, session, None)


def test_arms_that_cannot_be_here_say_why(arm, monkeypatch, tmp_path):
    with pytest.raises(ImportError, match="torchao"):
        arm(Changes(optimizer="torchao_adamw_8bit"))
    with pytest.raises(ImportError, match="torchao"):
        arm(precision="float8_1x128")
    with pytest.raises(NotImplementedError, match="mamba2-1m-bytes has 1018648 parameters"):
        arm.make(Changes(model="mamba2-1m-bytes"))
    monkeypatch.setenv("KERNELMARK_CORPUS", str(tmp_path))
    with pytest.raises(Unavailable, match="data: no corpus .* kernelmark corpus build"):
        source("corpus")


def test_a_plan_that_names_an_unknown_change_is_refused():
    import msgspec

    with pytest.raises(msgspec.ValidationError, match="there is linear, and static"):
        msgspec.convert({"name": "x", "changes": {"attention": "static-80"}}, System)
    with pytest.raises(msgspec.ValidationError, match="weight"):
        msgspec.convert({"name": "x", "changes": {"weight": "2:4"}}, System)
    for lost in ("1/3", "2/9", "0.05", "1/"):
        with pytest.raises(msgspec.ValidationError, match="there is 1/4 and less, as 1/20"):
            msgspec.convert({"name": "x", "changes": {"lost": lost}}, System)


def test_models_of_equal_parameters_are_arms_of_one_case(catalog):
    case = converge.WORKLOAD.case({"B": 1, "S": 16, "N": 5}, "fp32", "program", model="gpt2-1m-bytes")
    assembly = Assembly(System("ssd", changes=Changes(model="mamba2-1m-bytes")), catalog)
    assert recipe_of(converge.read(case), assembly).chosen.name == "mamba2-1m-bytes"
    case = converge.WORKLOAD.case({"B": 32, "S": 512, "N": 5}, "bf16", "program", model="gpt2-86m-bytes")
    assert low_share(converge.read(case)) == pytest.approx(0.945, abs=1e-3)


def test_rounding_to_eight_bits():
    x = torch.tensor([[448.0, 1.0, 1e-3, 0.0]])
    assert rounded(x, 1.0).tolist() == [[448.0, 1.0, 2.0**-9, 0.0]]
    assert rounded(2 * x, 1.0)[0, 0] == 448, "what is too large is the largest"
    assert rounded(torch.tensor([500.0, 1.2, 6e4]), 1.0, e5m2=True).tolist() == [512, 1.25, 57344]
    assert scale(2 * x, "tensorwise").item() == 2
    wide = torch.ones(3, 300)
    wide[2, 290] = 896
    by = scale(wide, "1x128")
    assert by.shape == wide.shape
    assert (by[2, 255].item(), by[2, 256].item(), by[1, 256].item()) == pytest.approx((1 / 448, 2, 1 / 448))
    assert scale(wide, "1x128", square=True)[0, 256] == 2
    assert scale(wide, "rowwise").flatten().tolist() == pytest.approx([1 / 448, 1 / 448, 2])


def test_a_scale_that_is_stuck_shows_as_saturation_and_underflow():
    probe = Probe("tensorwise", stuck=True)
    probe.look(0, "input", torch.tensor([[1000.0, 1.0, 1e-4, 0.0]]))
    assert probe.seen[0, "input"] == (0.25, 0.25, 1000.0)


def test_gradients_in_e5m2_are_held_to_its_range():
    probe = Probe("tensorwise", stuck=True, e5m2=True)
    for what in ("input", "gradient"):
        probe.look(0, what, torch.tensor([[1000.0, 1.0, 1e-4, 7e-6]]))
    assert probe.seen[0, "input"][:2] == (0.25, 0.5)
    assert probe.seen[0, "gradient"][:2] == (0, 0.25)


def test_products_in_8_bits_are_counted_and_no_others():
    wide = torch.randn(32, 16)
    a, b = wide.to(torch.float8_e4m3fn), wide.to(torch.float8_e4m3fn)
    one = torch.ones(())
    assert counted(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)) == 2 * 32 * 32 * 16
    assert counted(lambda: wide @ wide.t()) == 0


@pytest.fixture(scope="module")
def watched(catalog: Catalog):
    """An arm of bf16 before its first step, and that step's batch."""

    def make(**fields) -> tuple[ArmTrainer, tuple[torch.Tensor, ...]]:
        case = converge.WORKLOAD.case(
            {"B": 2, "S": 16, "N": 5, "A": 2}, "bf16", "program", model="gpt2-tiny", data="synthetic"
        )
        trainer = converge.assemble(case, Assembly(System("arm", **fields), catalog))
        trainer.load(_training.initial(trainer.recipe, 3, torch.device("cpu")))
        return trainer, _text.Order(source("synthetic").train, 3, 2, 2, 16, torch.device("cpu")).draw(0)

    return make


def test_what_8_bits_lose_is_seen_of_a_compiled_arm_too(watched):
    seen = []
    for execution in ("eager", "aot_eager"):
        trainer, batch = watched(changes=Changes(products="e4m3_rowwise"), execution=execution)
        trainer.step = lambda *batch: None  # compiling takes long on a CPU
        trainer.norm = torch.ones(())
        trainer.gradients = trainer.weights
        health = Health()
        health.look(trainer, batch, 0, None)
        seen.append(health.samples(False, True))
        assert all(x.grad is None for x in trainer._params), "a look leaves no gradients"
    assert seen[0] == seen[1]
    assert seen[0]["health_layer"] == (-1, 0, 1)
    assert all(x > 0 for x in seen[0]["fp8_amax_by_layer"][1:])
    assert 0 < seen[0]["fp8_underflow"][0] < 0.1
    assert health.low is None, "products that are emulated are not in 8 bits"


def test_the_share_is_counted_where_products_run_in_8_bits(watched):
    trainer, batch = watched(precision="parts_rowwise")
    assert trainer.watch(*(x[0] for x in batch)) == pytest.approx(low_share(trainer.recipe))
    assert {trainer.probe.layers[place] for place, _ in trainer.probe.seen} == {0, 1}


def test_an_explosion_stays_in_sight():
    health = Health()
    for step, norm in ((0, 1.0), (500, float("inf"))):
        for layer in (-1.0, 0.0):
            health.at.append((float(step), layer))
            for name, values in health.values.items():
                values.append(norm if name == "gradient_norm" and layer == 0 else 1.0)
    found = health.samples(True, False)
    assert (found["exploded_step"], found["exploded_layer"]) == ((500,), (0,))
    assert found["gradient_norm_by_layer"] == (1, 1, 1)
    assert health.exploded() == "; at step 500 what was looked at of layer 0 was not"
    health.values["gradient_norm"] = [float("nan")] * 4
    assert set(health.samples(True, False)) == {"exploded_step", "exploded_layer"}


def test_two_of_four_are_kept():
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0]])
    assert two_of_four(weight).tolist() == [[0, -3, 2, 0, 1, 1, 0, 0]]


@pytest.mark.parametrize("pattern", ["static", "window", "random", "dynamic", "learned"])
def test_patterns_of_equal_density_never_look_ahead(pattern):
    q = torch.randn(1, 2, 1024, 8, generator=torch.Generator().manual_seed(0))
    seen = elements(Gates(50) if pattern == "learned" else blocks(pattern, 50))(q, q)
    assert seen.shape[-2:] == (1024, 1024)
    assert not seen.triu(1).any()
    assert seen.diagonal(dim1=-2, dim2=-1).all()
    wide = seen.reshape(-1, 8, 128, 8, 128).any(4).any(2)
    assert wide.sum((1, 2)).unique().tolist() == [sum(max(1, (n * 50 + 50) // 100) for n in range(1, 9))]


def sparse_arms():
    """Every sparse arm of every built-in plan, with the blocks in its sequence."""
    for name in ("converge", "converge_short", "converge_continued", "converge_sparse", "converge_long"):
        plan = plans.load(name, converge.catalog(), "cuda")
        systems = {x.name: x for x in plan.systems}
        for case in plan.cases:
            for arm in plan.only.get(case.full_name, ()):
                changes = systems[arm].changes if arm in systems else Changes()
                if changes.left_out is not None:
                    yield f"{name}/{case.name}", changes, case.axes["S"] // _gates.BLOCK


def test_sparse_arms_of_plans_leave_out_what_their_names_say_and_differ():
    by_case: dict[tuple[str, float], dict[str, list[list[int]]]] = {}
    generator = torch.Generator().manual_seed(0)
    for case, changes, across in sparse_arms():
        pattern, _, percent = changes.attention.partition("-")
        if pattern in ("static", "window", "random"):
            rows = fixed(pattern, across, "causal", int(percent))
        else:
            means = torch.randn(2, 1, 1, across * _gates.BLOCK, 2, generator=generator)
            gates = (
                _gates.both(torch.randn(1, 2, 2, generator=generator), 1) if pattern == "learned" else (None, None)
            )
            chosen = choose(scores(*means, "causal", *gates), "causal", int(percent))[0, 0]
            rows = [x.nonzero().flatten().tolist() for x in chosen]
        assert all(row in own for row, own in enumerate(rows)), "a row's own block is seen under every pattern"
        seen = torch.zeros(across, across, dtype=torch.bool)
        for row, own in enumerate(rows):
            seen[row, own] = True
        assert abs(float(left_out(seen)) - changes.left_out) <= OFF, (case, changes.attention)
        by_case.setdefault((case, changes.left_out), {})[pattern] = rows
    assert len(by_case) == 7
    assert all(
        patterns.keys() >= {"static", "window", "random"} for patterns in by_case.values() if len(patterns) > 1
    )
    for case, patterns in by_case.items():
        for one, other in itertools.combinations(patterns, 2):
            differing = sum(x != y for x, y in zip(patterns[one], patterns[other], strict=True))
            assert differing >= len(patterns[one]) / 2, (case, one, other)


def test_an_arm_that_leaves_out_another_share_than_its_name_says_so(arm):
    def told(attention: str, S: int) -> float | None:
        """What an arm of that name counts in two layers whose blocks are a window's."""
        trainer = arm.make(Changes(attention=attention))
        counted = trainer._counted(blocks("window", 75))
        trainer.logits = lambda tokens: [counted(tokens, tokens), counted(tokens, tokens)]
        return trainer.left_out(torch.zeros(1, 1, S, 1))

    assert told("window-75", 1024) == pytest.approx(25 / 36)
    assert told("window-75", 512) == pytest.approx(0.6)
    assert told("linear", 512) is None
    trainer = arm.make(Changes(attention="static-75"))
    assert converge._misnamed(0.74, trainer) is None
    assert converge._misnamed(0.694, trainer) == (
        "static-75 leaves out 69.4% of the tiles at S = 16, more than 2% off 75%: no name for it"
    )


def told_apart(generator):
    """Queries and keys (1, 2, 1024, 16) whose blocks have means of their own."""
    means = torch.randn(2, 1, 2, 8, 16, generator=generator).repeat_interleave(128, 3)
    return torch.randn(2, 1, 2, 1024, 16, generator=generator) + 1.5 * means


def test_gates_learn_in_passes_with_gradients_each_layer_its_own():
    generator = torch.Generator().manual_seed(1)
    gates = Gates(50)

    def loss(layer: int) -> float:
        q, k = told_apart(torch.Generator().manual_seed(9))
        means = _gates.pooled(q), _gates.pooled(k)
        both = _gates.both(gates.held[layer][0], 2)
        return float(_gates.gate_loss(*both, *means, _gates.weights(q, k, "causal"), "causal"))

    with torch.no_grad():
        gates(*told_apart(generator))
    first = gates.held[0][0].clone()
    before = loss(0)
    for _ in range(60):
        gates(*told_apart(generator))
    assert loss(0) < before - 0.02
    kept = gates.state()
    gates.layer = 1
    gates(*told_apart(generator))
    assert set(gates.held) == {0, 1}
    assert not torch.equal(gates.held[1][0], gates.held[0][0])
    again = Gates(50)
    again.restore(kept)
    again.layer = gates.layer = 0
    given = told_apart(generator)
    assert torch.equal(again(*given), gates(*given)), "the choice comes before the step that the pass makes"
    assert torch.equal(again.held[0][0], gates.held[0][0])
    assert not torch.equal(first, gates.held[0][0])
    short = Gates(50)
    short(*(x[:, :, :200] for x in given))
    assert int(short.held[0][3]) == 0, "two blocks leave no choice"


def test_an_arm_whose_gates_learn_goes_on_with_them(arm):
    case = converge.WORKLOAD.case(
        {"B": 1, "S": 512, "N": 5}, "fp32", "program", model="llama-tiny", data="synthetic"
    )
    system = System("learned", changes=Changes(attention="learned-50"))
    first, again = (converge.assemble(case, Assembly(system, converge.catalog())) for _ in range(2))
    order = _text.Order(source("synthetic").train, 3, 1, 1, 512, torch.device("cpu"))
    start = list(_training.initial(first.recipe, 3, torch.device("cpu")))
    first.load(start)
    first.step(*order.draw(0))
    layers = first.recipe.chosen.configuration.layers
    assert set(first.gates.held) == set(range(layers)), "each layer has its own"
    assert [int(x[3]) for x in first.gates.held.values()] == [1] * layers
    first.logits(order.draw(1)[0][0])
    assert [int(x[3]) for x in first.gates.held.values()] == [1] * layers, "a look trains nothing"
    again.load(start)
    again.restore(first.state())
    for trainer in (first, again):
        trainer.step(*order.draw(1))
    assert torch.equal(first.logits(order.draw(2)[0][0]), again.logits(order.draw(2)[0][0]))
    for x, y in zip(first.gates.held.values(), again.gates.held.values(), strict=True):
        assert all(map(torch.equal, x, y))
    with pytest.raises(NotImplementedError, match="gates learn in eager passes"):
        arm.make(Changes(attention="learned-50"), execution="compile")


def test_updates_that_are_lost_make_an_arm_worse(arm, plain):
    found = arm(Changes(lost="1/5")).samples
    assert found["bits_by_step"][0] == plain.samples["bits_by_step"][0]
    assert found["training_loss"][0] == plain.samples["training_loss"][0], (
        "five steps' losses, then the fifth update"
    )
    assert found["bits_by_step"][1] > plain.samples["bits_by_step"][1]
    assert 1.005 < found["bits_per_byte"][0] / plain.samples["bits_per_byte"][0] < 1.5
    assert found["gradient_error"] == plain.samples["gradient_error"], "the first steps are the model's"


@pytest.mark.training
@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"
)  # a CPU compiles no backward pass
@pytest.mark.parametrize("pattern", ["static", "dynamic"])
def test_blocks_by_flex_attention_are_those_of_the_mask(pattern):
    q, k, v = torch.randn(3, 1, 2, 640, 8, generator=torch.Generator().manual_seed(0))
    found = by_blocks(blocks(pattern, 50), flex_attention)(q, k, v, "causal")
    wanted = masked(elements(blocks(pattern, 50)))(q, k, v, "causal")
    assert torch.allclose(found, wanted, atol=1e-5)
    visited = block_mask(blocks(pattern, 50)(q, k), 640)
    assert visited.sparsity() == pytest.approx(100 * (1 - 9 / 25)), "of five rows 1, 1, 2, 2 and 3 blocks"


def test_the_rate_rises_and_falls():
    rates = [rate(x, 1000, 1.0) for x in range(1000)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == pytest.approx(1, abs=2e-3)
    assert rates.index(max(rates)) == 19
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert {1000, 5000, 10000} <= set(validated(10000))


def test_the_target_of_arms_that_go_on_lies_below_what_they_begin_at():
    """As the checkpoint of a recorded run has it: there steps and time to the target said nothing."""
    reference = Path(__file__).parents[3] / "registry" / "reference"
    made = read(reference / "20261130-055716-bbf1.jsonl.gz")
    began = min(x.measurement.samples["bits_by_step"][0] for x in made.records if x.measurement)
    ended = max(x.measurement.samples["bits_by_step"][-1] for x in made.records if x.measurement)
    recorded = {(*x.case.axes.items(), x.case.options["model"]) for x in made.records}
    cases = [x for name in ("converge_continued", "converge_rates") for x in plans.load(name, OWN, "cuda").cases]
    assert len(cases) == 6
    for case in cases:
        assert (*case.axes.items(), case.options["model"]) in recorded
        assert ended < case.options["target"] < began


def test_arms_that_go_on_and_the_rates_tried_for_them_are_of_one_case_but_for_the_rate():
    (arms,), rates = (plans.load(x, OWN, "cuda").cases for x in ("converge_continued", "converge_rates"))
    assert arms in rates
    assert {x.but_for("lr") for x in rates} == {arms.but_for("lr")}
    assert len({x.options["lr"] for x in rates}) == 5


EVERY_ARM = (
    Changes(),
    Changes(products="e4m3_tensorwise"),
    Changes(products="e4m3_tensorwise_e5m2"),
    Changes(products="e4m3_rowwise"),
    Changes(products="e4m3_1x128"),
    Changes(dtype="fp16"),
    Changes(optimizer="twin_adamw_8bit"),
    Changes(gradients="int8"),
    Changes(gradients="fp8"),
    Changes(gradients="topk"),
    Changes(weights="2:4"),
    Changes(attention="linear"),
    Changes(attention="static-50"),
    Changes(attention="window-50"),
    Changes(attention="random-50"),
    Changes(attention="dynamic-50"),
    Changes(attention="learned-50"),
    Changes(lost="1/5"),
    Changes(model="mamba2-1m-bytes"),
)


def test_arms_of_the_small_model_are_of_every_kind_that_a_cpu_can_train():
    kinds = get_type_hints(Changes)
    for field in ("products", "gradients", "weights"):
        assert set(get_args(kinds[field])) == {getattr(x, field) for x in EVERY_ARM}, field
    patterns = {x.attention.partition("-")[0] for x in EVERY_ARM}
    assert patterns == {"", "linear", "static", "window", "random", "dynamic", "learned"}
    assert {x.optimizer for x in EVERY_ARM} == {"", "twin_adamw_8bit"}, "libraries' are of a GPU"
    assert {x.dtype for x in EVERY_ARM} == {"", "fp16"}


@pytest.mark.training
def test_a_million_parameters_go_through_every_arm_and_a_kernel_swap_within_a_minute(
    catalog, monkeypatch, tmp_path
):
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    began = time.process_time()
    given = {"model": "gpt2-1m-bytes", "data": "synthetic"}
    case = converge.WORKLOAD.case({"B": 1, "S": 32, "N": 10}, "fp32", "program", **given)
    session = Session(Cpu(), 11, 0, Sampling(), Stages())
    expected = converge.prepare(case, session)
    for changes in EVERY_ARM:
        trainer = converge.assemble(case, Assembly(System("arm", changes=changes), catalog))
        found = converge.measure(case, trainer, session, expected).samples
        assert found["bits_per_byte"][0] < found["bits_by_step"][0]
        assert "gradient_norm_by_layer" in found
        if changes == Changes():
            _weights.save(case, 0, trainer.weights())
    swapped = quality.WORKLOAD.case({"B": 1, "S": 32, "N": 10}, "fp32", "program", **given)
    system = Assembly(System("fp8", changes=Changes(products="e4m3_rowwise")), catalog)
    prepared = quality.prepare(swapped, session)
    assert quality.measure(swapped, quality.assemble(swapped, system), session, prepared).samples["kl"][0] > 0
    assert time.process_time() - began < 60


KILLED = """
import sys
from pathlib import Path

import torch
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import converge

torch.set_num_threads(1)
options = {"model": "gpt2-tiny", "data": "synthetic"}
case = converge.WORKLOAD.case({"B": 1, "S": 16, "N": 64}, "fp32", "program", **options)
session = Session(Cpu(), 5, 0, Sampling(), Stages(), Path(sys.argv[1]))
system = System("int8", changes=Changes(gradients="int8"))
converge.measure(case, converge.assemble(case, Assembly(system, converge.catalog())), session, None)
"""


def test_a_killed_program_goes_on_bitwise(catalog: Catalog, tmp_path: Path, monkeypatch) -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "scratch")],
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 100
    while time.monotonic() < until and started.poll() is None and not list(tmp_path.glob("scratch/*.pt")):
        time.sleep(0.002)
    started.kill()
    started.wait()
    (kept,) = tmp_path.glob("scratch/*.pt")
    assert 0 < torch.load(kept, weights_only=True)["progress"]["step"] < 64
    options = {"model": "gpt2-tiny", "data": "synthetic"}
    case = converge.WORKLOAD.case({"B": 1, "S": 16, "N": 64}, "fp32", "program", **options)
    assembly = Assembly(System("int8", changes=Changes(gradients="int8")), catalog)
    steps = []
    given = _training.Training._step
    monkeypatch.setattr(
        _training.Training, "_step", lambda self, step, look: (steps.append(step), given(self, step, look))
    )
    made = []
    for scratch in (tmp_path / "scratch", None):
        session = Session(Cpu(), 5, 0, Sampling(), Stages(), scratch)
        made.append(numbers(converge.measure(case, converge.assemble(case, assembly), session, None)))
    assert steps[0] > 0, "it began where it was killed"
    assert steps[-64:] == list(range(64))
    assert made[0] == made[1]
    assert not (tmp_path / "scratch").exists(), "what is finished leaves nothing"


@pytest.fixture
def settled():
    """Whether PyTorch's switch for deterministic algorithms holds, asked at each draw of a batch."""
    seen: list[bool] = []
    given = _text.Order.draw

    def draw(self, step):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return given(self, step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_text.Order, "draw", draw)
        yield seen
    torch.use_deterministic_algorithms(False)


def test_a_training_that_is_to_repeat_bitwise_asks_for_deterministic_algorithms(catalog, settled, monkeypatch):
    axes, given = {"B": 2, "S": 16, "N": 5}, {"model": "gpt2-tiny", "data": "synthetic", "target": 4.0}
    plain = converge.WORKLOAD.case(axes, "fp32", "program", **given)
    assert converge.WORKLOAD.case(axes, "fp32", "program", **given, deterministic=False) == plain
    case = converge.WORKLOAD.case(axes, "fp32", "program", **given, deterministic=True)
    assert case.name == plain.name.replace("-fp32", "-deterministic-fp32"), "its time is not that of the other"
    assert case.spec == plain.spec, "and its answer is"
    answered = []
    compute = converge.answer.compute
    monkeypatch.setattr(
        converge.answer,
        "compute",
        lambda *x: (answered.append(torch.are_deterministic_algorithms_enabled()), compute(*x))[1],
    )
    made = {}
    for one in (plain, case, plain):
        settled.clear()
        session = Session(Cpu(), 11, 0, Sampling(), Stages())
        expected = converge.WORKLOAD.prepare(one, session)
        arm = converge.assemble(one, Assembly(System("arm"), catalog))
        made[one.name] = numbers(converge.measured(one, arm, session, expected))
        assert set(settled) == {one is case}
        assert answered.pop() is (one is case)
        assert not torch.are_deterministic_algorithms_enabled()
    assert made[plain.name] == made[case.name], "a CPU repeats bitwise anyway"


def test_what_has_no_deterministic_form_says_so_and_cuda_asks_for_a_variable(monkeypatch):
    monkeypatch.delenv(_deterministic.CUBLAS, raising=False)
    said = "need CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment of the run"
    with pytest.raises(Unavailable, match=said), _deterministic.held(True, "cuda"):
        pass
    with _deterministic.held(False, "cuda"):
        assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(_deterministic.CUBLAS, ":4096:8")
    filled = torch.utils.deterministic.fill_uninitialized_memory
    seen = []

    def inside() -> None:
        seen.append(torch.get_deterministic_debug_mode())  # 2: not warnings alone
        raise RuntimeError("put_ does not have a deterministic implementation, but you set it. You can turn")

    with (
        pytest.raises(NotImplementedError, match=r"^put_ does not have a deterministic implementation.* it$"),
        _deterministic.held(True, "cuda"),
    ):
        inside()
    assert seen == [2]
    with pytest.raises(RuntimeError, match="out of memory"), _deterministic.held(True, "cpu"):
        raise RuntimeError("out of memory")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is filled


@pytest.mark.parametrize("target", [4.0, 1.0])
def test_a_target_that_is_met_before_the_first_step_says_nothing(arm, monkeypatch, target):
    axes, given = {"B": 2, "S": 16, "N": 5}, {"model": "gpt2-tiny", "data": "synthetic"}
    case = converge.WORKLOAD.case(axes, "fp32", "program", **given, target=target)
    session = Session(Cpu(), 11, 0, Sampling(), Stages())

    def told(case) -> tuple[str, ...]:
        return converge.measured(case, arm.make(Changes(attention="window-50")), session, None).remarks

    assert converge.MET not in told(case)
    monkeypatch.setattr(_training.tasks, "bits", lambda *_: target)
    assert converge.MET in told(case)
