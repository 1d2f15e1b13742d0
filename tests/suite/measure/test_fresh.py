"""Dishonest implementations on real trials, and what honest ones pay for the watch over them."""

from __future__ import annotations

import dataclasses
import os
from statistics import median

import pytest
import torch
import torch._dynamo
from kernelmark.baselines._terms import keeping
from kernelmark.suite.doctor.planted.baselines import hacks
from kernelmark.suite.doctor.planted.baselines.faults import honest
from kernelmark.suite.doctor.planted.operators.chain import OPERATOR
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.fresh import Fresh, copied
from kernelmark.suite.measure.pristine import Pristine
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operator import Tolerance
from kernelmark.suite.operators import adamw, mx_matmul, rms_norm, sparse24_matmul

SAMPLING = Sampling(min_samples=10, max_samples=15, min_seconds=0, max_seconds=5, warmup_s=0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench():
    return Workbench.build(OPERATOR, OPERATOR.case({"N": 128}, "fp32", "forward"), CPU, 1)


@pytest.fixture
def trial(bench):
    def make() -> Trial:
        return Trial(Cpu.open(), bench, "hot", SAMPLING, Stages(), pristine=Pristine())

    return make


@pytest.mark.parametrize("name", [x for x, outcome in hacks.OUTCOMES.items() if outcome == "incorrect"])
def test_a_dishonest_implementation_is_incorrect(trial, bench, name):
    if name == "on_a_stream":
        with pytest.raises(NotImplementedError, match="only a GPU"):
            trial().run(lambda: hacks.on_a_stream(bench.case))
        return

    def caught() -> bool:
        bench.mixture = bench.mixed_references = None
        try:
            trial().run(lambda: hacks.IMPLEMENTATIONS["chain"][name](bench.case))
        except Incorrect:
            return True
        return False

    # What looks at a sixteenth of the blocks is right by chance where the last one exchanged is one of those.
    assert caught() or (name == "by_ends" and (caught() or caught()))
    again = trial().run(lambda: honest(bench.case))  # nobody else pays for it
    assert again.remarks == ()
    assert median(again.samples["latency"]) > 0.05


def test_a_memory_by_version_is_of_no_use(trial, bench, monkeypatch):
    computed: list[object] = []

    def counting(case):
        true = honest(case)
        return lambda x, w: (computed.append(0), true(x, w))[1]

    monkeypatch.setattr(hacks, "honest", counting)
    samples = trial().run(lambda: hacks.by_version(bench.case)).samples["latency"]
    assert len(computed) >= len(samples)


def test_a_memory_by_version_is_of_no_use_where_all_inputs_are_integers():
    case = OPERATOR.case({"N": 64}, "fp32", "forward")
    drawn = lambda case, device, generator: {"x": torch.randint(0, 99, (64,), generator=generator)}  # noqa: E731
    operator = dataclasses.replace(OPERATOR, inputs=drawn, reference=lambda x: x.to(torch.float64).sqrt())
    bench = Workbench.build(operator, case, CPU, 1)
    computed, kept = [], {}

    def by_version(x):
        if x._version not in kept:
            computed.append(0)
            kept[x._version] = x.to(torch.float64).sqrt()
        return kept[x._version]

    samples = Trial(Cpu.open(), bench, "hot", SAMPLING, Stages()).run(lambda: by_version).samples["latency"]
    assert len(computed) >= len(samples) > 0


@pytest.mark.parametrize("calibrating", [1, 2, 5])
def test_inputs_change_where_calibrating_led_to_what_is_checked(calibrating):
    bench = Workbench.build(OPERATOR, OPERATOR.case({"N": 96}, "fp32", "forward"), CPU, 1)
    true, fresh = honest(bench.case), Fresh(bench)
    for _ in range(calibrating):
        fresh.before()
    bench.mixture = frozenset(fresh._exchanged)
    fresh.start(10)
    seen = {tuple(x._version for x in bench.varied)}
    for nth in range(10):
        fresh.before()
        now = tuple(x._version for x in bench.varied)
        assert now not in seen, f"nothing changed before call {nth}"
        seen.add(now)
        fresh.after(true(**bench.inputs))
    assert not fresh.due
    fresh.check(lambda: true(**bench.inputs), bench.tolerance)


def _dynamo_off() -> None:
    torch._dynamo.config.disable = True


OF_OTHERS = {
    "fp32 products": (
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        torch.get_float32_matmul_precision,  # which torch refuses to say after that
    ),
    "autocast on cpu": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "the cores it may use": (
        lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        lambda: os.sched_getaffinity(0),
    ),
    "torch._dynamo.config.disable": (_dynamo_off, lambda: torch._dynamo.config.disable),
}


@pytest.mark.parametrize("what", OF_OTHERS)
def test_what_others_compute_by_is_put_back(what):
    switch, read = OF_OTHERS[what]
    if what == "the cores it may use" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    pristine, before = Pristine(), read()
    pristine.begin()
    switch()
    assert any(what in x for x in pristine.settle())
    assert read() == before
    assert pristine.settle() == ()


def test_switches_are_put_back_and_remarked_upon(trial, bench):
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.initial_seed()
    remarks = trial().run(lambda: hacks.switches(bench.case)).remarks
    for what in ("default dtype", "deterministic", "precision of fp32", "TRITON_PLANTED", "seeded"):
        assert any(what in x for x in remarks), what
    assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == before[:2]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
def test_every_pass_is_checked_while_timed(pass_):
    case = rms_norm.OPERATOR.case({"B": 2, "S": 32, "D": 64}, "fp32", pass_)
    bench = Workbench.build(rms_norm.OPERATOR, case, CPU, 1)
    kept: list[object] = []

    def right(x, weight, eps):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    fresh = Fresh(bench)
    fresh.start(1)
    call = bench.call(right)
    for _ in range(3):
        fresh.before()
        kept.append(call())
        fresh.after(kept[-1])
    fresh.check(call, Tolerance(1e-4, 1e-3, 1e-3))
    fresh = Fresh(bench)
    fresh.start(1)
    # The first answer is right; of the second step's inputs one block is another, which a third might undo.
    for _ in range(2):
        fresh.before()
        fresh.after(kept[0])
    with pytest.raises(Incorrect, match="while timed"):
        fresh.check(call, Tolerance(1e-4, 1e-3, 1e-3))


MX = mx_matmul.OPERATOR.case({"M": 4, "N": 16, "K": 64}, "bf16", "forward", format="mxfp4", data="normal")


def test_a_weight_that_a_model_keeps_stays_while_calls_are_timed():
    bench = Workbench.build(mx_matmul.OPERATOR, MX, CPU, 1)
    fresh = Fresh(bench)
    before = {name: bench.inputs[name].clone() for name in ("x", "q", "scales")}
    for _ in range(40):
        fresh.before()
    same = {name: torch.equal(bench.inputs[name], x) for name, x in before.items()}
    assert same == {"x": False, "q": True, "scales": True}
    # Of a training step the weight is another one each time.
    gradient = sparse24_matmul.OPERATOR.case({"M": 8, "N": 16, "K": 64}, "bf16", "forward_backward", data="normal")
    assert Workbench.build(sparse24_matmul.OPERATOR, gradient, CPU, 1).kept() == []


def test_what_is_made_of_a_weight_once_for_all_is_stale():
    bench = Workbench.build(mx_matmul.OPERATOR, MX, CPU, 1)

    def trial(prepared):
        def call(x, q, scales, format, scale, scale_x):
            return x @ prepared(q=q, scales=scales).t()

        return Trial(Cpu.open(), bench, "hot", SAMPLING, Stages(), pristine=Pristine()).run(lambda: call)

    def widened(q, scales):
        return mx_matmul.dequantized(q, scales, "mxfp4", None, torch.bfloat16)

    assert len(trial(keeping(widened, "q", "scales")).samples["latency"]) >= 10
    held = []

    def once(q, scales):
        held[:] = held or [widened(q, scales)]
        return held[0]

    with pytest.raises(Incorrect):
        trial(once)


@pytest.mark.parametrize("calls", [1, 100])
def test_what_is_updated_in_place(calls):
    case = adamw.OPERATOR.case({"T": 2, "D": 16}, "fp32", "forward")
    bench = Workbench.build(adamw.OPERATOR, case, CPU, 1)
    tolerance = adamw.OPERATOR.tolerances["fp32"]

    def step(**inputs):
        adamw.OPERATOR  # noqa: B018  # the operator's own update, in place of an implementation
        values = adamw.reference(**inputs)
        own = [x for name in adamw.OPERATOR.in_place for x in inputs[name] or ()]
        for x, y in zip(own, values, strict=True):
            x.copy_(y)

    for call, ends in ((bench.call(step), None), (lambda: None, "nothing" if calls > 1 else "while timed")):
        fresh = Fresh(bench)
        fresh.start(1)

        def timed(fresh=fresh, call=call):
            fresh.before()
            result = call()
            fresh.after(result, calls)
            fresh.check(call, tolerance)

        if ends is None:
            timed()
        else:
            with pytest.raises(Incorrect, match=ends):
                timed()


def test_only_plain_tensors_are_answers():
    class Own(torch.Tensor):
        pass

    x = torch.ones(2)
    assert torch.equal(copied([x, None])[0], x)
    assert copied(torch.nn.Parameter(x)) is not x
    with pytest.raises(Incorrect, match="its output is a Own and no plain tensor"):
        copied((x, x.as_subclass(Own)))


def test_the_watch_costs_an_honest_row_nothing_that_is_timed():
    """The clock's time of a call with the watch, and without it, in turns.

    Work of others can only add time to either side, and what the watch itself cost would be in every round: the
    least of three rounds is held to the bound.
    """
    case = rms_norm.OPERATOR.case({"B": 4, "S": 128, "D": 1024}, "fp32", "forward")
    bench = Workbench.build(rms_norm.OPERATOR, case, CPU, 1)
    call = bench.call(lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps))
    fresh = Fresh(bench)
    fresh.start(1200)
    for cache in ("cold", "hot"):
        timer = Cpu.open().fallback(cache)
        ratios: list[float] = []
        while len(ratios) < 3 and not any(x < 1.25 for x in ratios):
            pairs = [(timer.sample(call)[0], timer.sample(call, fresh)[0]) for _ in range(60)]
            ratios.append(median(y / x for x, y in pairs[10:]))
        assert min(ratios) < 1.25, (cache, ratios)  # 1.05 on a quiet machine


@pytest.mark.parametrize(
    ("changes", "answers", "told"), [(True, False, False), (False, True, True), (True, True, False)]
)
def test_of_many_calls_an_answer_that_lies_apart_can_be_told(changes, answers, told):
    """A collective that may work in place, and this one does not; or an update, of which many were made."""
    bench = Workbench.build(adamw.OPERATOR, adamw.OPERATOR.case({"T": 1, "D": 64}, "fp32", "forward"), CPU, 1)
    fresh = Fresh(bench)
    fresh.start(1)
    fresh.hurry()
    fresh.before()
    if changes:
        with torch.no_grad():
            fresh._own[0][0].add_(1)
    fresh.after(torch.ones(3) if answers else None, calls=7)
    assert (fresh._checked is not None) == told


def test_many_calls_that_change_nothing_and_give_nothing_are_incorrect():
    bench = Workbench.build(adamw.OPERATOR, adamw.OPERATOR.case({"T": 1, "D": 64}, "fp32", "forward"), CPU, 1)
    fresh = Fresh(bench)
    fresh.start(1)
    fresh.hurry()
    fresh.before()
    for answer in (None, fresh._own[0][0]):
        with pytest.raises(Incorrect, match="changed nothing"):
            fresh.after(answer, calls=7)
