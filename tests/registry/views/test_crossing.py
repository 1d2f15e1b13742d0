"""Where a linear operator overtakes attention: power laws of known crossing, and what must not be claimed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import combinations_with_replacement, product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.views.crossing import (
    _percentiles,
    bounds,
    contests,
    crossing,
    fastest,
    resamples,
    summarize,
    tell,
)
from kernelmark.registry.views.table import render
from kernelmark.registry.views.tables import run_table

LENGTHS = tuple(1024 * 2**i for i in range(8))
CROSSES = 10_000.0
"""Where 1e-7 S² ms and 1e-3 S ms meet."""


def curve(
    law: Callable[[float], float], lengths: Any = LENGTHS, noise: Any = (1.0,)
) -> dict[int, dict[int, float]]:
    return {x: {r: law(x) * factor for r, factor in enumerate(noise)} for x in lengths}


def square(x: float) -> float:
    return 1e-7 * x * x


def line(x: float) -> float:
    return 1e-3 * x


# --- two curves -----------------------------------------------------------------------------------------


def test_power_laws_cross_where_they_do() -> None:
    found = crossing(curve(square), curve(line))
    assert found is not None
    assert found.at == pytest.approx(CROSSES)
    assert (found.first, found.last, found.order) == (1024, 131072, (-1, 1))
    assert (found.low, found.high, found.confidence, found.replicates) == (None, None, None, 1)
    assert tell(found, "ssd", "attention", "time") == (
        "ssd is faster from S = 10,000 on (one replicate: no interval)"
    )


def test_lengths_need_not_be_the_same() -> None:
    found = crossing(curve(square, (1000, 30_000)), curve(line, (2000, 9000, 50_000)))
    assert found is not None
    assert found.at == pytest.approx(CROSSES)
    assert (found.first, found.last) == (2000, 30_000)


def test_nothing_in_common_is_nothing() -> None:
    assert crossing({}, curve(line)) is None
    assert crossing(curve(square, (1024, 2048)), curve(line, (4096, 8192))) is None
    assert crossing(curve(square, (1024, 2048)), curve(line, (2048, 8192))) is None


def test_a_curve_that_is_always_below_has_no_crossing_and_says_so() -> None:
    noise = (1.0, 1.01, 0.99, 1.0, 1.0)
    below = crossing(curve(lambda x: x, noise=noise), curve(lambda x: x / 2, noise=noise))
    above = crossing(curve(lambda x: x, noise=noise), curve(lambda x: x * 2, noise=noise))
    assert below is not None
    assert above is not None
    assert (below.at, below.low, below.high) == (-math.inf, -math.inf, -math.inf)
    assert (above.at, above.low, above.high) == (math.inf, math.inf, math.inf)
    assert tell(below, "ssd", "attention", "time") == (
        "ssd is faster from S = 1,024 on, the shortest that both have"
    )
    assert tell(above, "ssd", "attention", "memory") == (
        "attention needs less memory up to S = 131,072, the longest that both have"
    )


def test_a_crossing_outside_the_measured_range_is_not_extrapolated() -> None:
    early, late = LENGTHS[:3], LENGTHS[5:]
    before = crossing(curve(square, early), curve(line, early))
    after = crossing(curve(square, late), curve(line, late))
    assert before is not None
    assert after is not None
    assert (before.at, after.at) == (math.inf, -math.inf)
    assert "up to S = 4,096" in tell(before, "ssd", "attention", "time")
    assert "from S = 32,768" in tell(after, "ssd", "attention", "time")


def test_equal_curves_show_no_difference() -> None:
    found = crossing(curve(line), curve(line))
    assert found is not None
    assert found.order == ()
    assert tell(found, "ssd", "attention", "memory").startswith("no difference from S = 1,024 to 131,072")


def test_of_several_crossings_the_last_counts() -> None:
    flat = curve(lambda x: 1.0, (1000, 2000, 4000, 8000))
    waves = {1000: {0: 0.5}, 2000: {0: 2.0}, 4000: {0: 2.0}, 8000: {0: 0.5}}
    found = crossing(flat, waves)
    assert found is not None
    assert found.at == pytest.approx(math.sqrt(4000 * 8000))
    assert found.order == (1, -1, 1)
    assert "the last of 2 crossings" in tell(found, "ssd", "attention", "time")
    back = crossing(waves, flat)
    assert back is not None
    assert back.at == math.inf
    assert "though ssd is faster before: they cross 2 times" in tell(back, "ssd", "attention", "time")


def test_a_tie_at_a_point_is_not_yet_ahead() -> None:
    found = crossing(curve(lambda x: 1.0, (1000, 2000, 4000)), {1000: {0: 1.0}, 2000: {0: 1.0}, 4000: {0: 0.5}})
    assert found is not None
    assert found.at == 2000


laws = st.tuples(st.floats(0.001, 1000), st.floats(0.2, 3))
lengths = st.lists(st.integers(16, 200_000), min_size=2, max_size=9, unique=True)


@given(laws, laws, lengths, lengths)
def test_a_crossing_lies_within_what_both_have(first: Any, second: Any, some: Any, others: Any) -> None:
    found = crossing(
        curve(lambda x: first[0] * x ** first[1], some), curve(lambda x: second[0] * x ** second[1], others)
    )
    low, high = max(min(some), min(others)), min(max(some), max(others))
    assert (found is None) == (low >= high)
    if found is not None and math.isfinite(found.at):
        assert low <= found.at <= high
        exact = (second[0] / first[0]) ** (1 / (first[1] - second[1]))
        assert math.log(found.at) == pytest.approx(math.log(exact), abs=1e-3 / abs(first[1] - second[1]))


values = st.lists(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), min_size=4, max_size=4)


@given(values, values, st.floats(1e-6, 1e6))
def test_scaling_all_times_changes_nothing(first: Any, second: Any, factor: float) -> None:
    def made(rows_: Any, scale: float) -> dict[int, dict[int, float]]:
        return {2**i: {r: x * scale for r, x in enumerate(row)} for i, row in enumerate(rows_, 10)}

    one, other = (crossing(made(first, x), made(second, x)) for x in (1.0, factor))
    assert one is not None
    assert other is not None
    assert one.order == other.order
    for name in ("at", "low", "high"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6)
    assert one.low <= one.at <= one.high  # type: ignore[operator]  # three replicates give an interval


# --- the interval ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
def test_resamples_are_all_there_are_with_their_probabilities(n: int) -> None:
    draws, weights = resamples(n)
    counted: dict[tuple[int, ...], float] = dict.fromkeys(combinations_with_replacement(range(n), n), 0.0)
    for x in product(range(n), repeat=n):
        counted[tuple(sorted(x))] += n**-n
    assert {tuple(x): p for x, p in zip(draws.tolist(), weights, strict=True)} == pytest.approx(counted)


def test_of_many_replicates_a_fixed_set_of_resamples_is_drawn() -> None:
    draws, weights = resamples(12)
    assert draws.shape[1] == 12
    assert weights.sum() == pytest.approx(1)
    assert (draws == resamples(12)[0]).all()


def test_percentiles_give_infinite_places_their_rank() -> None:
    weights = np.array([0.01, 0.48, 0.5, 0.01])
    assert _percentiles([5.0, math.inf, 7.0, -math.inf], weights, 0.02) == (7.0, math.inf)
    assert _percentiles([1.0], np.array([1.0]), 0.025) == (1.0, 1.0)


def test_replicates_are_drawn_whole() -> None:
    """Noise that both curves of a replicate share moves no crossing; noise of one of them does."""
    noise = (1.0, 1.1, 0.9, 1.05, 0.95)
    together = crossing(curve(square, noise=noise), curve(line, noise=noise))
    apart = crossing(curve(square, noise=noise), curve(line, noise=(1.0,) * 5))
    assert together is not None
    assert apart is not None
    assert (together.low, together.high) == (pytest.approx(CROSSES), pytest.approx(CROSSES))
    assert apart.low == pytest.approx(CROSSES / 1.1)  # of five medians the interval is their range
    assert apart.high == pytest.approx(CROSSES / 0.9)
    assert apart.confidence == 1 - 2.0**-4
    assert bounds(apart) == "[9,091, 11,111] (94 %)"


def test_few_replicates_say_so() -> None:
    found = crossing(curve(square, noise=(1.0, 1.1, 0.9)), curve(line, noise=(1.0, 1.0, 1.0)))
    assert found is not None
    assert found.confidence == 0.75
    assert bounds(found).endswith("(75 %: 3 replicates are few)")
    many = crossing(curve(square, noise=[1 + i / 100 for i in range(9)]), curve(line, noise=(1.0,) * 9))
    assert many is not None
    assert many.confidence == 0.95


def test_a_replicate_that_lost_a_point_is_left_out_of_the_interval() -> None:
    lost = curve(square, noise=(1.0, 1.1, 0.9))
    del lost[4096][2]
    found = crossing(lost, curve(line, noise=(1.0, 1.0, 1.0)))
    assert found is not None
    assert found.replicates == 2


def test_an_interval_may_reach_beyond_what_was_measured() -> None:
    short = (1024, 2048, 4096, 8192, 10_100)
    found = crossing(curve(square, short, (1.0, 1.2, 1.0, 0.8, 1.0)), curve(line, short, (1.0,) * 5))
    assert found is not None
    assert found.at == pytest.approx(CROSSES)
    assert found.high == math.inf
    assert bounds(found) == "[8,333, > 10,100] (94 %)"


@pytest.mark.usefixtures("untraced")
def test_the_interval_covers_as_often_as_it_says() -> None:
    """Five replicates with noise of 2 % of their own and 1 % of each point: 94 % promised, 1000 runs."""
    generator = np.random.default_rng(3)
    hit = 0
    for _ in range(1000):
        noise = np.exp(generator.normal(0, 0.02, (2, 1, 5)) + generator.normal(0, 0.01, (2, len(LENGTHS), 5)))
        made = [
            {x: {r: law(x) * noise[side, i, r] for r in range(5)} for i, x in enumerate(LENGTHS)}
            for side, law in enumerate((square, line))
        ]
        found = crossing(*made)
        assert found is not None
        hit += found.low <= CROSSES <= found.high  # type: ignore[operator]  # five replicates give an interval
    assert 0.91 < hit / 1000 < 0.97


# --- a run's contests -----------------------------------------------------------------------------------


def case(literal: Any, operator: str, length: int, **changes: Any) -> Any:
    axes = {
        "attention": {"B": 1, "H": 16, "Hkv": 16, "S": length, "D": 128},
        "ssd": {"B": 1, "S": length, "H": 32, "P": 64, "N": 128, "G": 1},
        "selective_scan": {"B": 1, "D": 2048, "S": length, "N": 16},
    }[operator]
    options = {"mask": "causal"} if operator == "attention" else {}
    fields = {"operator": operator, "axes": axes, "options": options} | changes
    name = "-".join(
        [*(f"{k}{v}" for k, v in fields["axes"].items()), *(str(x) for x in fields["options"].values())]
    )
    return literal.case(**{"name": f"{name}-bf16-forward"} | fields)


TIMES: dict[tuple[str, str], Callable[[float], float]] = {
    ("attention", "kernelmark"): square,
    ("attention", "sdpa_cudnn"): lambda x: 0.8 * square(x),
    ("attention", "torch"): lambda x: 5 * square(x),
    ("ssd", "kernelmark"): line,
    ("ssd", "mamba_ssm"): lambda x: 2 * line(x),
    ("ssd", "torch"): lambda x: 8 * line(x),
    ("selective_scan", "kernelmark"): lambda x: 0.5 * line(x),
}


def made(literal: Any, replicates: int = 5, lengths: Any = LENGTHS) -> list[Any]:
    """Eager attention holds all scores and has no memory for them beyond 16384."""
    out = []
    for (operator, name), law in TIMES.items():
        for length, r in product(lengths, range(replicates)):
            asked = case(literal, operator, length)
            if (operator, name) == ("attention", "torch") and length > 16384:
                out.append(
                    literal.record(
                        name, case=asked, replicate=r, status="out_of_memory", reason="CUDA out of memory"
                    )
                )
                continue
            memory = 2 * length**2 * 16 if (operator, name) == ("attention", "torch") else 4096 * length
            memory *= 300 if (operator, name) == ("ssd", "torch") else 1
            ms = law(length) * (1 + 0.002 * (r - 2))
            out.append(literal.record(name, ms, case=asked, replicate=r, beside={"memory": memory}))
    return out


@pytest.fixture(scope="module")
def run(literal: Any) -> Any:
    return literal.journal(*made(literal), literal.footer(), replicates=5, plan="crossing")


def test_contests_are_of_equal_standing(run: Any) -> None:
    found = {x.side: x for x in contests(run, rows(run))}
    assert list(found) == ["kernelmark", "fastest baselines", "eager PyTorch"]
    assert [x.name for x in found["kernelmark"].series] == [
        "attention (kernelmark)",
        "selective_scan (kernelmark)",
        "ssd (kernelmark)",
    ]
    assert [x.name for x in found["fastest baselines"].series] == ["attention (sdpa_cudnn)", "ssd (mamba_ssm)"]
    assert [x.name for x in found["eager PyTorch"].series] == ["attention (torch)", "ssd (torch)"]
    assert {x.width for x in found.values()} == {2048}
    assert found["eager PyTorch"].quadratic.ended == (32768, "out of memory")


def test_a_run_in_figures(run: Any) -> None:
    told = {(x["side"], x["linear"]["operator"], x["measure"]): x for x in summarize(run)}
    ours = told["kernelmark", "ssd", "time"]
    assert ours["crossing"] == pytest.approx(CROSSES, rel=1e-3)
    assert ours["low"] <= ours["crossing"] <= ours["high"]
    assert (ours["from"], ours["to"], ours["replicates"]) == (1024, 131072, 5)
    assert told["kernelmark", "selective_scan", "time"]["crossing"] == pytest.approx(CROSSES / 2, rel=1e-3)
    assert told["fastest baselines", "ssd", "time"]["crossing"] == pytest.approx(2.5 * CROSSES, rel=1e-3)
    same = told["kernelmark", "ssd", "memory"]
    assert (same["crossing"], same["ahead"]) == (None, "neither")
    eager = told["eager PyTorch", "ssd", "memory"]
    assert eager["to"] == 16384
    assert (eager["crossing"], eager["ahead"]) == (None, "quadratic")  # 38,400 is where it would be
    json.loads(msgspec.json.encode(summarize(run)))


def test_a_run_in_a_terminal(run: Any) -> None:
    text = re.sub(r"\s+", " ", render(run_table(run), 100))
    assert "O(S) against O(S²) · kernelmark · width 2048 · B1 · bf16 · forward" in text
    assert "ssd (kernelmark) against attention (kernelmark) time ssd is faster from S = 10,000 on [" in text
    assert "memory no difference from S = 1,024 to 131,072" in text
    assert "attention (torch): out of memory from S = 32,768 on" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": {"B": 1, "H": 40, "Hkv": 40, "S": 0, "D": 128}},  # another width
        {"axes": {"B": 2, "H": 16, "Hkv": 16, "S": 0, "D": 128}},  # another batch
        {"options": {"mask": "full"}},
        {"dtype": "fp16"},
        {"pass_": "backward"},
    ],
)
def test_what_is_not_the_same_is_not_compared(literal: Any, changes: dict[str, Any]) -> None:
    lines = []
    for length in (1024, 2048, 4096):
        axes = {"axes": changes["axes"] | {"S": length}} if "axes" in changes else {}
        lines.append(
            literal.record("kernelmark", square(length), case=case(literal, "attention", length, **changes | axes))
        )
        lines.append(literal.record("kernelmark", line(length), case=case(literal, "ssd", length)))
    found = literal.journal(*lines)
    assert contests(found, rows(found)) == ()
    assert summarize(found) == []


def test_one_length_is_no_curve(literal: Any) -> None:
    found = literal.journal(*made(literal, lengths=(2048,)))
    assert contests(found, rows(found)) == ()


def test_the_fastest_is_the_one_that_wins_most_lengths(run: Any) -> None:
    found = [x for y in contests(run, rows(run)) for x in y.series if x.operator == "attention"]
    best = fastest(found)
    assert best is not None
    assert best.implementation == "sdpa_cudnn"
    assert fastest([]) is None
