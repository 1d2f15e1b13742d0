"""What is drawn of servers: latency over load, throughput against speed, how latencies are spread."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.site.facts import facts
from kernelmark.registry.store.record import Measurement, Record
from kernelmark.registry.views.canvas import CHARACTER
from kernelmark.registry.views.looks import palette
from kernelmark.registry.views.report import render
from kernelmark.registry.views.serving import (
    Pictures,
    best,
    nearest_rank,
    order_interval,
    pictures,
    probes,
    spreads,
)
from kernelmark.registry.views.table import render as text
from kernelmark.registry.views.tables import run_table
from kernelmark.suite.workloads import serve


def served(literal: Any, name: str, rate: int, users: int, requests: int, slow: float) -> Record:
    """A record of a server that takes so many ms."""
    chance = random.Random(f"{name}{rate}{users}")
    axes = {"rate": rate, "users": users, "requests": requests, "input": 32, "output": 16}
    load = "closed" if users else "poisson"
    case = serve.WORKLOAD.case(axes, "fp32", "program", model="llama-1m", load=load)
    values = [slow * (1 + chance.random()) for _ in range(requests)]
    samples: dict[str, tuple[float, ...]] = {
        "request": tuple(values),
        "ttft": tuple(x / 4 for x in values),
        "tpot": tuple(x / 20 for x in values),
        "dispatch": tuple(0.1 * chance.random() for _ in values),
        "output_per_s": (16000 / slow * max(1, users),),
    }
    if requests >= 500:
        samples |= {f"{x}_p99": (nearest_rank(sorted(samples[x]), 99),) for x in ("request", "ttft", "tpot")}
    record: Record = literal.record()
    measurement = Measurement(samples, "monotonic")
    return msgspec.structs.replace(
        record,
        case=case,
        implementation=name,
        provider=name.partition("_")[0],
        cache="hot",
        measurement=measurement,
    )


def searched(literal: Any, name: str, rate: float, slow: float) -> Record:
    """A record of a search from 4 requests/s, which found a rate at which a request takes so many ms."""
    record = served(literal, name, 4000, 0, 600, slow)
    axes = {"rate": 4000, "users": 0, "requests": 600, "input": 32, "output": 16}
    options = {"model": "llama-1m", "load": "search", "slo": "2000-100"}
    case = serve.WORKLOAD.case(axes, "fp32", "program", **options)
    assert record.measurement is not None
    measured = msgspec.structs.replace(
        record.measurement, samples={**record.measurement.samples, "slo_rate": (rate,)}
    )
    return msgspec.structs.replace(record, case=case, measurement=measured)


@pytest.fixture
def run(literal: Any) -> Any:
    """Two servers at two rates and two numbers of users, one of the rates with few requests."""
    lines = [
        served(literal, name, rate, users, requests, slow)
        for name, factor in (("kernelmark", 1.0), ("torch", 2.0))
        for rate, users, requests, slow in (
            (4000, 0, 600, 100 * factor),
            (8000, 0, 600, 150 * factor),
            (16000, 0, 40, 300 * factor),
            (0, 1, 40, 80 * factor),
            (0, 4, 40, 120 * factor),
        )
    ]
    return literal.journal(*lines, metrics=serve.METRICS)


def drawn(run: Any) -> Pictures:
    found = rows(run)
    return pictures(found, spreads(run), palette(found))


def captions(found: Pictures) -> Sequence[str]:
    return [x.caption.partition(",")[0] for x in found.loads]


def test_open_and_closed_loads_are_apart(run: Any) -> None:
    found = drawn(run)
    assert captions(found) == [
        "p99 of first token", "p99 of time a token", "p99 of end to end",
        "Output tokens/s a GPU", "Output tokens/s a GPU",
    ]  # fmt: skip
    by_schedule = [" requests/s: " in x.drawing for x in found.loads[3:]]
    by_users = [" users: " in x.drawing for x in found.loads[3:]]
    assert sorted(zip(by_schedule, by_users, strict=True)) == [(False, True), (True, False)]
    assert found.implementations == ("kernelmark", "torch")


def test_a_p99_is_of_enough_requests(run: Any) -> None:
    found = drawn(run)
    tips = re.findall(r"<title>(kernelmark, [^<]*)</title>", found.loads[0].drawing)
    assert [x.partition(":")[0] for x in tips] == ["kernelmark, 4 requests/s", "kernelmark, 8 requests/s"]
    few = next(x for x in found.spreads if "rate16000" in x.of)
    many = next(x for x in found.spreads if "rate4000" in x.of)
    marked = [re.findall(r"kernelmark: (p\d+) ", x.drawing) for x in (few, many)]
    assert marked == [["p50"], ["p50", "p90", "p99"]]


@pytest.mark.parametrize("count", [500, 501, 777, 5000])
def test_a_p99_lies_within_its_interval(count: int) -> None:
    """Of what a loop of the binomial's own definition says: no narrower pair of ranks holds it so often."""
    ranks = order_interval(count, 99)
    assert ranks is not None
    low, high = ranks
    share = [math.comb(count, k) * 99**k / 100**count for k in range(count + 1)]
    assert sum(share[:low]) <= 0.025 < sum(share[: low + 1])
    assert sum(share[high:]) <= 0.025 < sum(share[high - 1 :])
    assert low < math.ceil(0.99 * count) < high


def test_an_interval_holds_as_often_as_it_says() -> None:
    chance = random.Random(7)
    ranks = order_interval(500, 99)
    assert ranks is not None
    low, high = ranks
    held = 0
    for _ in range(400):
        ordered = sorted(chance.random() for _ in range(500))
        held += ordered[low - 1] <= 0.99 <= ordered[high - 1]
    assert held >= 0.92 * 400
    assert order_interval(300, 99) is None
    assert order_interval(0, 99) is None


def test_a_p99_over_the_rate_has_its_bar(run: Any) -> None:
    found = drawn(run)
    (tails,) = (x for x in found.loads if x.caption.startswith("p99 of first token"))
    assert tails.caption.endswith("; bars are 95 % by order statistics of requests")
    assert (
        tails.drawing.count("95 % by order statistics") == 4
    )  # two servers at two rates of 500 requests and more
    told = [x for x in found.spreads if "requests4" in x.of or "requests6" in x.of]
    assert any("p99" in x.drawing and "95 % by order statistics" in x.drawing for x in told)
    assert not any("95 % by" in x.drawing for x in found.spreads if "requests40-" in x.of)


def test_what_logarithms_do_not_take_is_not_drawn(run: Any) -> None:
    """As a journal of somebody else's may say."""
    first = run.records[0]
    samples = {**first.measurement.samples, "tpot": (0.0,), "ttft_p99": (-1.0,)}
    odd = msgspec.structs.replace(first, measurement=msgspec.structs.replace(first.measurement, samples=samples))
    found = drawn(dataclasses.replace(run, records=(odd, *run.records[1:])))
    tips = re.findall(r"<title>(kernelmark, [^<]*)</title>", found.loads[0].drawing)
    assert [x.partition(":")[0] for x in tips] == ["kernelmark, 8 requests/s"]


def test_of_rows_that_are_left_out_nothing_is_drawn(run: Any) -> None:
    """As of `kernelmark report RUN --implementation torch`: the run's spreads are of all its rows."""
    found = [x for x in rows(run) if x.implementation == "torch"]
    assert pictures(found, spreads(run), palette(found)).implementations == ("torch",)


def test_the_front_is_what_nothing_is_better_than() -> None:
    assert best([(1, 5), (2, 4), (2, 3), (3, 4), (4, 1), (1, 4)]) == [(1, 5), (3, 4), (4, 1)]
    assert best([]) == []


def test_the_report_has_them(run: Any) -> None:
    page = render([run])
    assert page.count("p99 of first token, ms, over requests/s: lower is better") == 1
    assert page.count("Dispatch delay, ms: share of requests") == 5


def test_a_run_without_servers_has_none(literal: Any) -> None:
    run = literal.journal(literal.record())
    assert drawn(run) == Pictures()
    assert 'serving">' not in render([run])


def test_a_search_is_judged_by_the_rate_that_it_found(literal: Any) -> None:
    """The one that follows more requests is better, though each takes longer then; in tables of its own."""
    lines = [
        searched(literal, "kernelmark", 30.0, 400), searched(literal, "torch", 20.0, 200),
        served(literal, "kernelmark", 4000, 0, 600, 200), served(literal, "torch", 4000, 0, 600, 400),
    ]  # fmt: skip
    journal = literal.journal(*lines, metrics=serve.METRICS)
    found = {(x.options["load"], x.implementation): x for x in rows(journal)}
    ours = found["search", "kernelmark"]
    assert ours.value() == 30.0
    assert ours.speedup_vs_best_baseline == pytest.approx(1.5)
    assert found["poisson", "kernelmark"].speedup_vs_best_baseline == pytest.approx(2.0, rel=0.1)
    text = re.sub(r"<[^>]*>", "", render([journal]))
    assert "Program serve, End to end ms" in text
    assert "Program serve, Highest rate within SLO requests/s" in text
    (front,) = [x for x in drawn(journal).loads if "search" in x.of]
    assert "30 requests/s" in front.drawing
    assert "20 requests/s" in front.drawing


def test_older_searches_are_judged_by_the_rate_that_they_found_or_not_at_all(literal: Any) -> None:
    """Their journals name how long a request takes, under a load that is another for each server."""

    def older(name: str, slow: float, kept: bool = True) -> Record:
        record = searched(literal, name, 28.0, slow)
        assert record.measurement is not None
        samples = {x: y for x, y in record.measurement.samples.items() if kept or x != "slo_rate"}
        return msgspec.structs.replace(
            record,
            case=msgspec.structs.replace(record.case, primary="request"),
            measurement=msgspec.structs.replace(record.measurement, samples=samples),
        )

    journal = literal.journal(older("kernelmark", 400), older("torch", 200), metrics=serve.METRICS)
    (ours,) = (x for x in rows(journal) if x.provider == "kernelmark")
    assert (ours.primary, ours.value(), ours.speedup_vs_best_baseline) == ("slo_rate", 28.0, 1.0)
    assert ours.value("request") == pytest.approx(600, rel=0.1), "beside it"
    shown = text(run_table(journal))
    assert "1.00×" in shown
    assert "0.50×" not in shown
    assert "0.50×" not in render([journal])
    (fact,) = (x for x in facts(journal) if x.ours)
    assert (fact.primary, fact.better, fact.speedup) == ("slo_rate", "higher", 1.0)
    lost = literal.journal(older("kernelmark", 400, False), older("torch", 200, False), metrics=serve.METRICS)
    assert [x.speedup_vs_best_baseline for x in rows(lost)] == [None, None]


def test_what_a_search_tried_is_drawn_with_the_rate_that_it_found(literal: Any) -> None:
    """In order of rates; what a journal of somebody else may say beside it is left out."""
    record = searched(literal, "kernelmark", 8.0, 400)
    assert record.measurement is not None
    samples = {
        **record.measurement.samples,
        "probe_rate": (16.0, 4.0, 8.0, -1.0),
        "probe_met": (0.5, 1.0, 1.0, 1.0),
    }
    record = msgspec.structs.replace(
        record, measurement=msgspec.structs.replace(record.measurement, samples=samples)
    )
    journal = literal.journal(record, metrics=serve.METRICS)
    (probe,) = probes(journal)
    assert (probe.rates, probe.met) == ((4.0, 8.0, 16.0), (1.0, 1.0, 0.5))
    found = rows(journal)
    (picture,) = pictures(found, (), palette(found), tried=probes(journal)).loads
    assert picture.caption.startswith("Share of requests within the objective")
    assert "kernelmark at 16 requests/s: 50 % within the objective" in picture.drawing
    assert ">kernelmark: 8<" in picture.drawing
    # Of a long name on the side that has room: the axis is at 52, the drawing ends at 340.
    for rates in ((7.9, 8.0, 90.0), (0.1, 8.0, 8.1), (1.0, 8.0, 12.0)):
        long = msgspec.structs.replace(probe, rates=rates)
        (picture,) = pictures(found, (), palette(found), tried=[long], width=340).loads
        ((at, style),) = re.findall(r'<text x="([\d.]+)"[^>]*style="([^"]*)">kernelmark: 8<', picture.drawing)
        width = len("kernelmark: 8") * CHARACTER
        left = float(at) - (width if "end" in style else 0)
        assert left >= 52
        assert left + width <= 340


def test_every_load_has_its_name_beside_its_point(literal: Any) -> None:
    """Six at one place: none is dropped."""
    lines = [served(literal, name, 4000, 0, 600, 100) for name in ("kernelmark", "torch", "vllm", "a", "b", "c")]
    journal = literal.journal(*lines, metrics=serve.METRICS)
    (front,) = [x for x in drawn(journal).loads if x.caption.startswith("Output")]
    places = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>4 requests/s<', front.drawing)
    assert len(places) == len(set(places)) == 6


def test_loads_that_differ_in_their_requests_alone_say_how_many(literal: Any) -> None:
    lines = [served(literal, "torch", 4000, 0, requests, slow) for requests, slow in ((600, 100), (1200, 150))]
    (front,) = [
        x for x in drawn(literal.journal(*lines, metrics=serve.METRICS)).loads if x.caption.startswith("Output")
    ]
    assert ">4 requests/s (600)<" in front.drawing
    assert ">4 requests/s (1,200)<" in front.drawing


def test_a_rate_that_a_server_cannot_follow_has_a_mark_and_no_latency(run: Any) -> None:
    def lost(record: Record) -> Record:
        if record.implementation != "kernelmark" or record.case.axes["rate"] != 8000:
            return record
        why = "sample: saturated: at 8 requests/s the backlog grew to the end of the load"
        return msgspec.structs.replace(record, status="unsupported", reason=why, measurement=None)

    run = dataclasses.replace(run, records=tuple(map(lost, run.records)))
    (tail, *_) = drawn(run).loads
    assert tail.drawing.count("kernelmark, 8 requests/s: saturated") == 1
    assert ">saturated<" in tail.drawing
    assert all("saturated" not in x.drawing for x in drawn(run).loads if x.caption.startswith("Output"))


def test_a_time_of_nothing_does_not_stretch_the_axis(literal: Any) -> None:
    record = served(literal, "torch", 0, 1, 40, 100)
    samples = {**record.measurement.samples, "tpot": (0.0, *record.measurement.samples["tpot"][1:])}
    record = msgspec.structs.replace(record, measurement=Measurement(samples, "monotonic"))
    found = drawn(literal.journal(record, metrics=serve.METRICS))
    (tpot,) = (x.drawing for x in found.spreads if x.caption.startswith("Time a token"))
    assert ">0.001<" not in tpot
    assert ">5<" in tpot
