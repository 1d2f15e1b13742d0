"""The method, stage by stage, on a device whose timer is a script: sampling and stopping are exact."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernelmark.registry.store.metric import Metric
from kernelmark.suite.measure import stages as module
from kernelmark.suite.measure.device import Cpu, TimerUnavailable, wall_ms
from kernelmark.suite.measure.group import ALONE
from kernelmark.suite.measure.stages import Stages, Trial, autotuned
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.all_gather import OPERATOR as ALL_GATHER
from kernelmark.suite.operators.rms_norm import OPERATOR
from kernelmark.suite.operators.softmax import OPERATOR as SOFTMAX

FEW = Sampling(min_samples=8, max_samples=100, min_seconds=0, max_seconds=60, target=0.01, warmup_s=0)


@dataclass
class Scripted:
    """Gives the lists of its script one after the other, the last one for ever."""

    script: list[list[float]]
    name: str = "scripted"
    batch: int = 4
    taken: int = 0

    def sample(self, call: Any, fresh: Any = None) -> list[float]:
        if fresh is not None:
            fresh.before()
        result = call()
        if fresh is not None:
            fresh.after(result)
        self.taken += 1
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


@dataclass
class Fake:
    """A device on which time is a script."""

    script: list[list[float]]
    unavailable: bool = False
    kind: str = "cpu"
    nvml: Any = None
    group: Any = ALONE
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timers: list[Scripted] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def using(self):
        return contextlib.nullcontext()

    def synchronize(self) -> None: ...

    def timer(self, case, cache, call, name):
        self.asked.append((cache, name))
        if self.unavailable:
            raise TimerUnavailable("cannot be captured")
        self.timers.append(Scripted(self.script))
        return self.timers[-1]

    def fallback(self, cache):
        self.timers.append(Scripted(self.script, name="fallback", batch=1))
        return self.timers[-1]

    def load(self, call, latency_ms):
        self.loads.append(latency_ms)

    def peak_memory(self, call):
        call()
        return 4096

    def release(self) -> None: ...


def trial(
    script: list[list[float]] | None = None, pass_: str = "forward", sampling: Sampling = FEW, **more
) -> Trial:
    device = Fake(script or [[1.0]], **{x: more.pop(x) for x in ("unavailable",) if x in more})
    case = OPERATOR.case({"B": 2, "S": 3, "D": 16}, "fp32", pass_)
    bench = Workbench.build(OPERATOR, case, torch.device("cpu"), 1)
    return Trial(device, bench, "cold", sampling, Stages(), **more)


def right(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def run(trial: Trial, call=right):
    return trial.run(lambda: call)


def test_samples_are_taken_until_the_median_is_known():
    noisy = [[1.0, 2.0, 1.0, 2.0]] * 3  # the first one belongs to calibration
    measured = run(trial([*noisy, [1.5] * 4]))
    assert measured.samples["latency"] == (1.0, 2.0) * 4 + (1.5,) * (len(measured.samples["latency"]) - 8)
    assert measured.converged
    before = measured.samples["latency"][:-4]
    from kernelmark.suite.measure.stopping import converged

    assert not converged(before, FEW)
    assert (measured.timer, measured.batch, measured.samples["memory"]) == ("scripted", 4, (4096,))
    assert measured.samples["error"][0] < 1e-6
    assert len(measured.samples["launch"]) == module.LAUNCHES
    assert (measured.telemetry, measured.throttled, measured.tuning) == (None, (), {})
    assert "energy" not in measured.samples


def test_steady_samples_stop_at_the_minimum():
    assert run(trial([[1.0]])).samples["latency"] == (1.0,) * 8


def test_what_never_settles_stops_at_the_maximum_and_says_so():
    measured = run(trial([[1.0, 9.0]]))
    assert len(measured.samples["latency"]) == 100
    assert not measured.converged


@pytest.mark.parametrize("says", [True, False])
def test_a_ranks_memory_is_its_inputs_too_and_what_peers_can_read(says):
    bench = Workbench.build(ALL_GATHER, ALL_GATHER.case({"N": 64}, "fp32", "forward"), torch.device("cpu"), 1)

    def gathered(x):
        return x.clone()

    if says:
        gathered.shared = lambda x: 100 + x.numel()
    found = run(Trial(Fake([[1.0]]), bench, "cold", FEW, Stages()), gathered).samples
    assert found["memory"] == (4096,)
    assert found["rank_memory"] == (4096 + 4 * 64 + says * 164,)
    assert "rank_memory" not in run(trial([[1.0]])).samples


def test_what_only_the_implementation_knows_is_asked_of_it():
    """Of a call that does not say there is no number but a remark."""
    asked = trial([[1.0]])
    told = Metric("rows_skipped", "1")
    asked.bench = dataclasses.replace(asked.bench, operator=dataclasses.replace(OPERATOR, told=(told,)))

    def says(x, weight, eps):
        return right(x, weight, eps)

    says.rows_skipped = lambda x, **rest: len(x) / 4
    found = run(asked, says)
    assert (found.samples["rows_skipped"], found.remarks) == ((0.5,), ())
    silent = dataclasses.replace(asked, stages=Stages())
    found = run(silent)
    assert "rows_skipped" not in found.samples
    assert found.remarks == ("no rows_skipped: this implementation does not say",)


def test_the_clock_stops_sampling_too():
    measured = run(trial([[1.0, 9.0]], sampling=Sampling(max_seconds=0, min_seconds=0, warmup_s=0)))
    assert len(measured.samples["latency"]) == 2


def test_samples_are_kept_to_seven_digits():
    assert run(trial([[0.123456789]])).samples["latency"][0] == 0.1234568


def test_warm_up_ends_when_steady_or_late():
    calls = []
    chosen = trial(sampling=Sampling(warmup_s=30))
    times = iter([5.0] * 5 + [1.0] * 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wall_ms", lambda device, call, count: (calls.append(call()), [next(times)])[1])
        chosen.warm_up(lambda: 0)
    assert len(calls) == 13  # two windows whose medians agree
    calls.clear()
    trial().warm_up(lambda: calls.append(0))
    assert not calls  # no time for it


def test_the_timer_of_the_case_is_asked_for():
    chosen = trial(sampling=Sampling(min_samples=6, warmup_s=0, timer="graph"))
    chosen.cache = "hot"
    assert run(chosen).timer == "scripted"
    assert chosen.device.asked == [("hot", "graph")]


def test_where_the_timer_cannot_the_fallback_does_and_is_named():
    measured = run(trial(unavailable=True))
    assert (measured.timer, measured.batch) == ("fallback", 1)


def test_stages_come_in_their_order_and_add_up():
    heard: list[str] = []
    now = iter(range(1000))
    chosen = trial()
    chosen.stages = Stages(listen=heard.append, clock=lambda: next(now))
    run(chosen)
    assert heard == ["build", "verify", "warm up", "calibrate", "sample", "verify", "summarize"]
    assert chosen.stages.spent_s == {
        "build": 1,
        "verify": 2,
        "warm up": 1,
        "calibrate": 1,
        "sample": 1,
        "summarize": 1,
    }


def converting(conversion, call=right):
    """A call that names the part of it which a library forces on its user."""

    def named(**inputs):
        return call(**inputs)

    named.conversion = conversion
    return named


def copies(x, weight, eps):
    assert not torch.is_grad_enabled()
    return x.clone()


def test_a_conversion_is_timed_by_the_calls_timer_and_no_longer_than_it_may():
    chosen = trial([[1.0], [1.0], [0.5, 0.123456789]])  # calibration, one sample, then the conversion
    chosen.sampling = Sampling(min_samples=1, max_samples=1, min_seconds=0, warmup_s=0)
    measured = run(chosen, converting(copies))
    assert chosen.device.asked == [("cold", "auto"), ("cold", "scripted")]
    assert measured.samples["conversion"] == (0.3117284,)  # the median of both
    assert chosen.device.timers[1].taken == 1 + module.CONVERSIONS // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CONVERSIONS_S", 0.0)
        short = trial()
        assert run(short, converting(copies)).samples["conversion"] == (1.0,)
        assert short.device.timers[1].taken == 2


def test_a_conversion_on_the_cpu_is_a_part_of_the_call():
    def slow(x, weight, eps):
        time.sleep(0.004)

    def call(x, weight, eps):
        slow(x, weight, eps)
        return right(x, weight, eps)

    chosen = trial(sampling=Sampling(max_samples=20, max_seconds=0.3, warmup_s=0))
    chosen.device = Cpu.open()
    measured = run(chosen, converting(slow, call))
    assert measured.timer == "monotonic"
    assert 4 <= measured.samples["conversion"][0] < max(measured.samples["latency"])


def test_without_a_conversion_there_is_no_time_of_it():
    assert "conversion" not in run(trial()).samples


@pytest.mark.parametrize("pass_", ["backward", "forward_backward"])
def test_a_conversion_is_not_timed_where_backward_undoes_it(pass_):
    assert "conversion" not in run(trial(pass_=pass_), converting(copies)).samples


def test_a_conversion_that_the_timer_cannot_time_has_none(monkeypatch):
    chosen = trial()
    timer = chosen.device.timer

    def only_the_call(case, cache, call, name):
        chosen.device.unavailable = bool(chosen.device.asked)
        return timer(case, cache, call, name)

    monkeypatch.setattr(chosen.device, "timer", only_the_call)
    measured = run(chosen, converting(copies))
    assert measured.timer == "scripted"
    assert "conversion" not in measured.samples


def test_a_conversion_that_launches_nothing_takes_no_time():
    chosen = trial([[1.0], [1.0], [-1e-5]], sampling=Sampling(min_samples=1, max_samples=1, warmup_s=0))
    assert run(chosen, converting(copies)).samples["conversion"] == (0,)


def test_a_stage_that_fails_is_paid_for_and_remembered():
    now = iter([1, 4])
    chosen = Stages(clock=lambda: next(now))
    with pytest.raises(ZeroDivisionError), chosen.stage("verify"):
        _ = 1 / 0
    assert (chosen.current, chosen.spent_s) == ("verify", {"verify": 3})


def wrong(call):
    with pytest.raises(Incorrect) as error:
        run(trial(), call)
    return str(error.value)


def test_a_wrong_answer_has_no_time():
    assert wrong(lambda x, weight, eps: right(x, weight, eps) * 1.01).startswith("output: relative error 0.01")


@pytest.mark.parametrize(
    ("given", "pass_"), [("bf16", "forward"), ("bf16", "forward_backward"), ("fp32", "forward")]
)
def test_an_answer_in_another_dtype_is_remarked_upon(given, pass_):
    """It is right, and moves other bytes than its rivals."""

    def wide(x, weight, eps):
        return right(x.float(), weight.float(), eps)

    bench = Workbench.build(
        OPERATOR, OPERATOR.case({"B": 2, "S": 3, "D": 16}, given, pass_), torch.device("cpu"), 1
    )
    said = {x: run(Trial(Fake([[1.0]]), bench, "cold", FEW, Stages()), x).remarks for x in (right, wide)}
    told = "its answer is in float32, where all inputs are in bfloat16"
    assert said == {right: (), wide: (told,) if given == "bf16" else ()}


def test_dtypes_that_need_not_be_the_inputs_are_told_nothing_of():
    bench = trial().bench
    answers = [torch.ones(2, dtype=torch.float16), torch.ones((), dtype=torch.float16), torch.ones(2).int()]
    assert bench.other_dtypes(answers[:1]) == ("its answer is in float16, where all inputs are in float32",)
    assert bench.other_dtypes(answers[1:]) == ()  # a number alone, and what is chosen
    assert (
        dataclasses.replace(
            bench, operator=dataclasses.replace(OPERATOR, results=lambda result, inputs: result)
        ).other_dtypes(answers)
        == ()
    )
    bench.inputs["weight"] = bench.inputs["weight"].double()
    assert bench.other_dtypes(answers) == ()


def test_inputs_are_left_alone():
    def spoils(x, weight, eps):
        y = right(x, weight, eps)
        x.mul_(1)  # nothing happens
        weight[0] += 1
        return y

    assert wrong(spoils) == "it changed its inputs"


def test_inputs_are_left_alone_after_the_first_calls_too():
    calls = []

    def late(x):
        calls.append(x)
        return (x.relu_() if len(calls) > 2 else x.relu()).clone()

    operator = dataclasses.replace(SOFTMAX, reference=lambda x: x.relu())
    bench = Workbench.build(operator, SOFTMAX.case({"M": 4, "D": 8}, "fp32", "forward"), torch.device("cpu"), 1)
    own = Trial(Fake([[1.0]]), bench, "hot", FEW, Stages())
    with pytest.raises(Incorrect, match="changed its inputs"):
        own.run(lambda: late)


@pytest.mark.parametrize("pass_", ["backward", "forward_backward"])
@pytest.mark.parametrize("written", ["input", "gradient"])
def test_what_a_pass_does_not_vary_is_left_alone_and_put_back(pass_, written):
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward((x > 0).to(x.dtype))
            y = x.relu()
            if written == "input":
                x.data.neg_()
            return y

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(*ctx.saved_tensors) if written == "gradient" else gradient * ctx.saved_tensors[0]

    operator = dataclasses.replace(SOFTMAX, reference=lambda x: x.relu())
    bench = Workbench.build(operator, SOFTMAX.case({"M": 4, "D": 8}, "fp32", pass_), torch.device("cpu"), 1)
    with pytest.raises(Incorrect, match="changed its inputs"):
        Trial(Fake([[1.0]]), bench, "hot", FEW, Stages()).run(lambda: Writes.apply)
    bench.restore()
    Trial(Fake([[1.0]]), bench, "hot", FEW, Stages()).run(lambda: torch.relu)  # the next one has what it should


def test_a_sparse_answer_is_wrong_and_not_unsupported():
    bench = Workbench.build(SOFTMAX, SOFTMAX.case({"M": 4, "D": 8}, "fp32", "forward"), torch.device("cpu"), 1)
    with pytest.raises(Incorrect, match="sparse_coo"):
        Trial(Fake([[1.0]]), bench, "hot", FEW, Stages()).run(lambda: lambda x: x.softmax(-1).to_sparse())


def test_a_gradient_that_is_the_outputs_own_is_not_poisoned():
    operator = dataclasses.replace(SOFTMAX, reference=lambda x: x + 1)
    case = SOFTMAX.case({"M": 4, "D": 8}, "fp32", "forward_backward")
    bench = Workbench.build(operator, case, torch.device("cpu"), 1)
    Trial(Fake([[1.0]]), bench, "hot", FEW, Stages()).run(lambda: lambda x: x + 1)


def test_an_element_never_written_is_not_the_last_calls():
    kept: list[torch.Tensor] = []

    def forgets(x, weight, eps):
        y = right(x, weight, eps)
        if not kept:
            kept.append(y)
            return y
        out = kept[0]
        out.view(-1)[:-1] = y.view(-1)[:-1]
        return out

    assert "1 of 96 elements are NaN" in wrong(forgets)


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
def test_every_pass(pass_):
    assert run(trial(pass_=pass_)).samples["latency"] == (1.0,) * 8


def test_a_view_of_the_inputs_is_not_poisoned():
    case = OPERATOR.case({"B": 2, "S": 3, "D": 16}, "fp32", "forward")
    bench = Workbench.build(OPERATOR, case, torch.device("cpu"), 1)
    bench.references = [bench.values[0]]
    chosen = Trial(Fake([[1.0]]), bench, "cold", FEW, Stages())
    assert chosen.verify(lambda: bench.inputs["x"]) == 0


def stale_after(calls: int):
    """Right so many times, then the answer it gave last."""
    kept: list[torch.Tensor] = []

    def call(x, weight, eps):
        if len(kept) < calls:
            kept.append(right(x, weight, eps))
        return kept[-1].clone()

    return call


def test_stale_output_is_caught():
    assert "relative error" in wrong(stale_after(1))  # of the decoys, before timing
    assert wrong(stale_after(2)) == "stale output: other inputs gave the same answer"  # after it


@pytest.mark.parametrize(("D", "stale"), [(1, False), (2, True)])
def test_an_answer_that_cannot_change_is_not_stale(D, stale):
    """The softmax of one column is 1, whatever it holds."""
    case = SOFTMAX.case({"M": 5, "D": D}, "fp32", "forward")
    bench = Workbench.build(SOFTMAX, case, torch.device("cpu"), 1)
    kept = bench.inputs["x"].softmax(-1)
    chosen = Trial(Fake([[1.0]]), bench, "cold", FEW, Stages())
    with pytest.raises(Incorrect, match="stale output") if stale else contextlib.nullcontext():
        chosen.verify_again(kept.clone)


def test_an_answer_that_goes_wrong_while_timed_is_caught():
    count = []

    def tires(x, weight, eps):
        count.append(0)
        return right(x, weight, eps) * (1 if len(count) < 10 else 2)

    assert "relative error 1" in wrong(tires)


def test_nothing_to_compute_is_never_stale():
    case = OPERATOR.case({"B": 0, "S": 3, "D": 16}, "fp32", "forward")
    bench = Workbench.build(OPERATOR, case, torch.device("cpu"), 1)
    measured = Trial(Fake([[1.0]]), bench, "cold", FEW, Stages()).run(lambda: right)
    assert measured.samples["error"] == (0,)


def test_a_yardstick_has_no_answer_to_check():
    measured = run(trial(gated=False), lambda x, weight, eps: x.clone())
    assert "error" not in measured.samples
    assert measured.samples["latency"]


def test_what_the_implementation_raises_comes_out():
    def fails(x, weight, eps):
        raise NotImplementedError("not at this size")

    chosen = trial()
    with pytest.raises(NotImplementedError, match="not at this size"):
        run(chosen, fails)
    assert chosen.stages.current == "verify"


def test_throttled_samples_are_marked(nvml):
    chosen = trial([[1.0, 1.0, 1.0]])
    chosen.device.nvml = nvml(reasons=[0, 0, 0x40, 0x1])
    measured = run(chosen)
    assert measured.throttled == (3, 4, 5)
    assert measured.telemetry is not None
    assert measured.telemetry.reasons == ("hardware thermal slowdown",)


def test_energy_is_measured_where_it_is_asked_for(nvml, monkeypatch):
    known = module.energy.Energy((0.5, 0.51), 2.0, utilization=98.0)
    monkeypatch.setattr(module.energy, "measured", lambda nvml, load, agreed: known)
    chosen = trial([[2.0]], with_energy=True)
    chosen.device.nvml = nvml()
    measured = run(chosen)
    assert chosen.device.loads == [2.0]
    assert (measured.samples["energy"], measured.samples["back_to_back"]) == ((0.5, 0.51), (2.0,))
    assert measured.samples["utilization"] == (98.0,)
    known = module.energy.Energy(reason="who knows", utilization=61.0)
    measured = run(chosen)
    assert "energy" not in measured.samples
    assert measured.samples["utilization"] == (61.0,)
    assert measured.remarks == ("no energy: who knows",)
    chosen.with_energy = False
    assert run(chosen).remarks == ()
    chosen.with_energy, chosen.device.nvml = True, None
    assert run(chosen).remarks == ()


def test_boards_of_several_ranks_make_as_many_windows_as_they_do(monkeypatch):
    of_ranks = [module.energy.Energy((1.0, 2.0), 1.0), module.energy.Energy((3.0, 4.0, 5.0), 1.5)]
    chosen = trial([[2.0]])
    monkeypatch.setattr(chosen, "joules", lambda call, latency_ms: of_ranks)
    measured = run(chosen)
    assert (measured.samples["energy"], measured.samples["back_to_back"]) == ((4.0, 6.0), (1.5,))


def test_the_state_of_the_board_is_a_metric_of_the_row(nvml):
    chosen = trial([[2.0]])
    chosen.device.nvml = nvml(sm=[1500, 1980], temperature=[41, 66], power=[300_000, 500_000])
    measured = run(chosen)
    board = {x: measured.samples.get(x) for x in ("power", "temperature", "sm_clock", "utilization")}
    # Sampled for less than a second.
    assert board == {"power": None, "temperature": (41,), "sm_clock": (1980,), "utilization": None}
    assert measured.telemetry.power_w == 300


def test_tuning_of_the_module_is_recorded(monkeypatch):
    namespace = {
        "ran": SimpleNamespace(best_config="BLOCK: 128, num_warps: 8"),
        "idle": SimpleNamespace(best_config=None),
        "other": 3,
    }
    assert autotuned(namespace) == {"ran": "BLOCK: 128, num_warps: 8"}
    monkeypatch.setattr(test_tuning_of_the_module_is_recorded, "best_config", "BLOCK: 64", raising=False)
    assert run(trial(tuned=True)).tuning == {"test_tuning_of_the_module_is_recorded": "BLOCK: 64"}
    assert run(trial()).tuning == {}


def test_wall_ms_counts_calls_and_stops_late():
    device = Fake([[1.0]])
    assert len(wall_ms(device, lambda: None, 7)) == 7
    samples = wall_ms(device, lambda: sum(range(20_000)), 10_000, limit_s=0.01)
    assert 1 <= len(samples) < 10_000
    assert all(x > 0 for x, _ in pairwise([*samples, 0]))
    assert wall_ms(device, lambda: None, 3, limit_s=0) == []
