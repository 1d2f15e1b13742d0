"""Efficiency against the best of one GPU, and predictions, on literal data."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kernelmark.registry.analysis.rows import Row, Value, rows
from kernelmark.registry.analysis.scaling import (
    Link,
    Step,
    break_evens,
    efficiencies,
    fitted,
    links,
    predictions,
    strong_besides,
)
from kernelmark.registry.store.record import YARDSTICK, Measurement
from kernelmark.registry.views.prediction_table import page
from kernelmark.registry.views.scaling_table import cells, scaling_table
from kernelmark.registry.views.table import markdown

from ...steps import BUCKETS, COMPUTE, NVLINK, journal, reduced, stepped, truth

GIB = float(1 << 30)


def row(operator, implementation, ms, world=1, pass_="forward", status="ok", S=8192, **options) -> Row:
    axes = {"B": 1, "S": S} | ({"gpus": world} if world > 1 else {})
    primary = "step" if pass_ == "program" else "latency"
    return Row(
        operator=operator, case=f"S{S}-{world}", axes=axes, options=options, dtype="bf16", pass_=pass_,
        implementation=implementation, provider=implementation, version=None, cache="cold", status=status,
        reason=None if status == "ok" else "why", key="k", primary=primary,
        metrics={primary: Value(ms, "ms", "lower", 3, 60)} if status == "ok" else {},
    )  # fmt: skip


def test_strong_scaling_is_against_the_best_of_one_gpu():
    rows = [
        row("attention", "ours", 10.0),
        row("attention", "quicker", 8.0),
        row("attention", "wrong", 1.0, status="incorrect"),
        row("attention", "shorter", 1.0, S=4096),
        row("attention", "full", 1.0, mask="full"),
        row("attention_context_parallel", "ours", 2.5, world=4),
        row("attention_context_parallel", "broken", 2.0, world=4, status="crashed"),
        row("attentive", "other", 2.5, world=4),
    ]
    (found,) = efficiencies(rows)
    assert (found.kind, found.alone, found.one.implementation) == ("strong", 8.0, "quicker")
    assert found.efficiency == pytest.approx(0.8)
    assert cells(found) == (
        "attention_context_parallel S8192-4", "ours", "4", "strong", "2.5", "8", "quicker", "80.0 %"
    )  # fmt: skip
    assert scaling_table(rows) is not None
    assert scaling_table(rows[:4]) is None


def each(implementation, slowest, world, **options):
    """A row whose GPUs each computed the whole; the largest of each sample lies above any one's median."""
    x = row("attention", implementation, slowest + 0.3, world, **options)
    value = Value(slowest, "ms", "neither", 3, 12)
    return msgspec.structs.replace(x, metrics={**x.metrics, "each_gpu": value})


def test_several_gpus_are_held_to_the_slowest_of_them_alone():
    shared = row("attention_context_parallel", "ours", 2.5, world=4)
    rows = [
        row("attention", "ours", 9.0),
        each("ours", 9.6, 8),
        each("ours", 9.4, 4),
        each("ours", 9.2, 2),
        each("quicker", 8.0, 2),
        row("attention", "other", 9.5),
        shared,
    ]
    (found,) = efficiencies(rows)
    assert (found.row, found.alone, found.efficiency) == (shared, 9.4, pytest.approx(0.94))
    assert cells(found)[6] == "ours, slowest of 4 GPUs"
    (more,) = efficiencies([rows[0], rows[1], rows[3], shared])
    assert (more.alone, cells(more)[6]) == (9.6, "ours, slowest of 8 GPUs")
    (fewer,) = efficiencies([rows[0], rows[3], shared])
    assert (fewer.alone, cells(fewer)[6]) == (9.0, "ours")


def test_an_operator_with_more_options_scales_to_one_with_fewer():
    """Whatever is at its default is in no name: storage and another number of keys are options of `attention`."""
    named = {"axes": {"B": 1, "S": 8192, "Sk": 0}, "options": {"mask": "causal", "storage": "bhsd"}}
    one, other = (row("attention", x, ms, mask="causal") for x, ms in (("ours", 10.0), ("windowed", 1.0)))
    one = msgspec.structs.replace(one, case="B1-S8192-causal-bf16-forward", **named)
    other = msgspec.structs.replace(other, case="B1-S8192-W64-causal-bf16-forward", **named)
    two = row("attention_context_parallel", "ours", 6.0, world=2, mask="causal")
    two = msgspec.structs.replace(two, case="B1-S8192-gpus2-causal-bf16-forward")
    (found,) = efficiencies([one, other, two])
    assert (found.one, found.efficiency) == (one, pytest.approx(10 / 12))


def test_weak_scaling_of_a_program_is_against_one_gpu_without_a_way():
    rows = [
        row("train", "ours", 100.0, pass_="program", parallel="single"),
        row("train", "ours", 104.0, 4, pass_="program", parallel="fsdp2"),
    ]
    (found,) = efficiencies(rows)
    assert (found.kind, found.efficiency) == ("weak", pytest.approx(100 / 104))


def test_a_program_with_own_tokens_scales_strongly_against_one_gpu_with_all_of_them():
    def of(B, *given, **options):
        x = row("train", *given, pass_="program", **options)
        return msgspec.structs.replace(x, axes={**x.axes, "B": B})

    many = of(2, "ours", 104.0, 4, parallel="fsdp2")
    shared = of(8, "ours", 99.0, 4, parallel="context")
    rows = [of(2, "ours", 100.0), of(8, "ours", 390.0), of(8, "quicker", 380.0), of(4, "ours", 1.0), many, shared]
    (found,) = strong_besides(rows)
    assert (found.row, found.kind, found.efficiency) == (many, "strong", pytest.approx(380 / 4 / 104))
    weak = [x for x in efficiencies(rows) if x.row == many]
    assert [(x.kind, x.efficiency) for x in weak] == [("weak", pytest.approx(100 / 104))]
    assert len(scaling_table(rows).rows) == 3


def test_gpus_that_share_a_step_scale_as_those_that_share_a_call():
    rows = [
        row("train", "ours", 100.0, pass_="program", parallel="single"),
        row("train", "ours", 30.0, 4, pass_="program", parallel="context"),
    ]
    (found,) = efficiencies(rows)
    assert (found.kind, found.efficiency) == ("strong", pytest.approx(100 / 120))
    followed = msgspec.structs.replace(rows[1], axes={**rows[1].axes, "follow": 50})
    assert [x.efficiency for x in efficiencies([rows[0], followed])] == [found.efficiency]


def test_what_is_no_number_of_gpus_or_no_time_has_no_efficiency():
    """As a journal of somebody else's may say."""
    good = row("attention", "ours", 10.0)
    none = msgspec.structs.replace(good, axes={**good.axes, "gpus": 0})
    rates = row("attention", "rate", 2.0, world=4)
    rate = msgspec.structs.replace(rates, metrics={"latency": Value(2.0, "GB/s", "higher", 3, 60)})
    assert not efficiencies([good, none, rate, row("attention", "zero", 0.0, world=4)])
    yardstick = msgspec.structs.replace(row("attention", "copy", 1.0), provider=YARDSTICK)
    one = msgspec.structs.replace(good, axes={**good.axes, "gpus": 1})
    (found,) = efficiencies([one, yardstick, row("attention", "ours", 5.0, world=4)])
    assert (found.one, found.efficiency) == (one, 0.5)


def test_a_link_is_found_again():
    times = [(size, NVLINK.all_reduce_ms(size, 2)) for size in (1 << 12, 1 << 20, 1 << 28)]
    found = fitted(times, 2)
    assert (found.alpha_ms, found.beta) == (pytest.approx(0.004), pytest.approx(350e6))
    with pytest.raises(ValueError, match="at least two sizes"):
        fitted(times[:1] * 3, 2)


@pytest.mark.parametrize(
    ("times", "alpha", "beta"),
    [
        ([(1e6, 0.05), (1e8, 10.0)], 0.0, 5e8 / 30),  # more than in proportion to the bytes
        ([(1e3, 1.0), (1e6, 0.8)], 2.25 / 2.5625, 1e300),  # less for more of them
    ],
)
def test_a_link_without_a_time_of_one_kind_has_the_other_fitted_alone(times, alpha, beta):
    found = fitted(times, 2)
    assert (found.alpha_ms, found.beta) == (pytest.approx(alpha), pytest.approx(beta))


def test_what_nccl_took_over_two_gpus_says_what_it_takes_over_four():
    """Bytes and ms of `20261129-200344-b173`, in place. Of large arrays it makes more of four GPUs' links."""
    link = fitted([(1 << 22, 0.0396976), (1 << 26, 0.251968), (1 << 28, 0.899456)], 2)
    assert link.all_reduce_ms(1 << 22, 4) == pytest.approx(0.0464448, rel=0.03)
    assert link.all_reduce_ms(1 << 26, 4) == pytest.approx(0.32736, rel=0.12)


@pytest.mark.parametrize("compute", [30.0, 900.0])
def test_four_are_predicted_from_two(compute):
    """Steps that were really made by this model, timed with deviations of half a per cent."""
    buckets = (25e6,) * 40
    hides = 2.0
    link = fitted([(x, NVLINK.all_reduce_ms(x, 2) * d) for x, d in ((1e4, 1.005), (1e7, 0.995), (1e9, 1.0))], 2)

    def truth(world: int) -> float:
        return compute + max(0.0, sum(NVLINK.all_reduce_ms(x, world) for x in buckets) - hides)

    step = Step.measured(compute * 1.005, truth(2) * 0.995, 2, buckets, link)
    assert step.predicted_ms(4, link) == pytest.approx(truth(4), rel=0.03)
    assert step.predicted_ms(8, link) >= step.predicted_ms(4, link) >= step.compute_ms


def test_hosts_add_what_is_between_them():
    step = Step(100.0, (GIB,), 0.0)
    network = Link(0.02, 40e6)
    one, eight = (step.predicted_ms(4, NVLINK, network, hosts) for hosts in (1, 8))
    assert eight - one == pytest.approx(14 * (0.02 + GIB / 4 / 8 / 40e6))
    with pytest.raises(ValueError, match="the link between them"):
        step.predicted_ms(4, NVLINK, hosts=2)


def test_a_run_predicts_more_gpus_than_it_had():
    """Steps that were made by this model and timed half a per cent wrong: 4 from 2 and 8 from 4 within 3 %."""
    run = journal(stepped(1, COMPUTE * 1.005), stepped(2, truth(2) * 0.995), stepped(4, truth(4) * 1.005))
    four, eight = predictions(run, (4, 8))
    assert (four.world, four.row.axes["gpus"], four.seen_ms) == (4, 2, pytest.approx(truth(4) * 1.005))
    assert abs(four.off) < 0.03
    # Eight come from two: of four GPUs the run has no all-reduces.
    assert (eight.world, eight.row.axes["gpus"], eight.seen_ms, eight.off) == (8, 2, None, None)
    assert eight.ms == pytest.approx(truth(8), rel=0.03)
    from_four = journal(
        stepped(1, COMPUTE),
        stepped(4, truth(4)),
        *(reduced(4, x, NVLINK.all_reduce_ms(x, 4)) for x in (1 << 16, 1 << 28)),
    )
    (eight,) = predictions(from_four, (8,))
    assert (eight.row.axes["gpus"], eight.ms) == (4, pytest.approx(truth(8), rel=1e-3))


def test_eight_are_predicted_from_two_and_four():
    """Of what four send more than two, as much is exposed as of what eight send more than four."""
    two, four, eight = (sum(NVLINK.all_reduce_ms(x, n) for x in BUCKETS) for n in (2, 4, 8))
    reduces = [reduced(4, x, NVLINK.all_reduce_ms(x, 4)) for x in (1 << 16, 1 << 28)]

    def at(sent):  # a quarter of it is exposed, and something beside
        return COMPUTE + 1.0 + 0.25 * sent

    run = journal(stepped(1, COMPUTE), stepped(2, at(two)), stepped(4, at(four)), *reduces)
    (found,) = predictions(run, (8,))
    assert (found.made_from, found.row.axes["gpus"]) == ((2, 4), 4)
    assert found.ms == pytest.approx(at(eight), rel=1e-4)
    alone = journal(stepped(1, COMPUTE), stepped(4, at(four)), *reduces)
    (of_four,) = predictions(alone, (8,))
    assert of_four.made_from == (4,)
    assert of_four.ms == pytest.approx(at(four) + eight - four, rel=1e-4)  # all of it
    hidden = journal(stepped(1, COMPUTE), stepped(2, COMPUTE), stepped(4, at(four)), *reduces)
    assert predictions(hidden, (8,))[0].ms == pytest.approx(of_four.ms)


@pytest.mark.parametrize("wrong", [0.995, 1.005])
def test_eight_are_predicted_from_two_and_four_within_three_per_cent(wrong):
    reduces = [reduced(4, x, NVLINK.all_reduce_ms(x, 4)) for x in (1 << 16, 1 << 28)]
    run = journal(
        stepped(1, COMPUTE), stepped(2, truth(2) * wrong), stepped(4, truth(4) / wrong), stepped(8, truth(8)),
        *reduces,
    )  # fmt: skip
    (found,) = predictions(run, (8,))
    assert abs(found.off) < 0.03


def test_a_step_that_gpus_share_is_predicted_with_its_share_of_the_work():
    def at(world):  # all that is sent is exposed
        return COMPUTE / world + sum(NVLINK.all_reduce_ms(x, world) for x in BUCKETS)

    run = journal(stepped(1, COMPUTE), stepped(2, at(2), "tensor"))
    (found,) = predictions(run, (4,))
    assert found.ms == pytest.approx(at(4), rel=1e-3)
    assert found.efficiency == pytest.approx(COMPUTE / 4 / at(4), rel=1e-3)
    assert predictions(run, (2,), 2, NVLINK) == ()


def test_what_no_communication_explains_stays():
    """A step that is slower than if all it sends were exposed: on as many GPUs that is what is predicted."""
    whole = sum(NVLINK.all_reduce_ms(x, 2) for x in BUCKETS)
    step = Step.measured(COMPUTE, COMPUTE + whole + 0.4, 2, BUCKETS, NVLINK)
    assert step.predicted_ms(2, NVLINK) == pytest.approx(COMPUTE + whole + 0.4)


@pytest.mark.parametrize(
    "records",
    [
        (stepped(2, 40.0),),
        (stepped(1, 30.0), stepped(2, 40.0, sent=())),
        (stepped(1, 30.0), stepped(4, 40.0)),
    ],
    ids=["no step on one GPU", "nothing said of what is sent", "no all-reduces on as many"],
)
def test_nothing_is_predicted_without_what_it_takes(records):
    assert predictions(journal(*records), (8,)) == ()


def test_all_reduces_out_of_place_count_where_there_are_none_in_place():
    """They copy as well."""
    slow = [reduced(4, x, 2 * NVLINK.all_reduce_ms(x, 4), "out") for x in (1 << 16, 1 << 28)]
    found = links(rows(journal(*slow, *(reduced(2, 1 << x, 9.0, "out") for x in (16, 28)))))
    assert found[2].beta == pytest.approx(NVLINK.beta)
    assert found[4].beta == pytest.approx(NVLINK.beta / 2)


def test_one_size_by_several_times_is_one_size():
    """In two dtypes, or caches: what follows from times differs, in the last digit or by a median's bias."""
    one = [reduced(3, 4000, ms) for ms in (1.0, 1.01)]
    one[1] = msgspec.structs.replace(one[1], case=msgspec.structs.replace(one[1].case, name="N1000", dtype="fp32"))
    samples = {"latency": (1.0, 1.0, 1.2, 1.2), "algbw": (4e-6, 4e-6, 4e-6 / 1.2, 4e-6 / 1.2)}
    apart = msgspec.structs.replace(one[0], cache="hot", measurement=Measurement(samples, "events"))
    assert 3 not in links(rows(journal(*one, apart)))


@pytest.mark.parametrize(("cost", "rate"), [(1.0, 1e-6 * 1e9 / 2), (-0.1, None)])
def test_fewer_bytes_pay_below_a_link_speed(cost, rate):
    """Half of 1 GB is saved; over two GPUs a link carries as many bytes as the array has."""
    half = tuple(x / 2 for x in BUCKETS)
    saved = 5e8 / NVLINK.beta
    run = journal(
        stepped(2, 40.0), stepped(2, 40.0 - saved + cost, "ddp_int8", half, 2.0), stepped(2, 1.0, "fsdp2")
    )
    (found,) = break_evens(run)
    assert (found.plain.options["parallel"], found.ratio) == ("ddp", 2.0)
    assert found.rate == (None if rate is None else pytest.approx(rate, rel=1e-6))


def test_as_many_bytes_have_no_break_even():
    run = journal(stepped(2, 40.0), stepped(2, 41.0, "ddp_bf16", BUCKETS, 1.0))
    assert break_evens(run) == ()


def test_the_page():
    run = journal(
        stepped(1, 30.0),
        stepped(2, 35.0),
        stepped(4, 36.5),
        stepped(2, 34.0, "ddp_int8", tuple(x / 2 for x in BUCKETS), 2.0),
    )
    text = markdown(page(predictions(run, (4, 8)), break_evens(run), links(rows(run))))
    expected = Path(__file__).with_name("predictions.md")
    assert text == expected.read_text()
